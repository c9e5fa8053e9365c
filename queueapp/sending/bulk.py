"""Sending many messages by one statement, in the caller's transaction: ``send_many`` by one COPY, or one OPENJSON
insert on SQL Server, and ``send_from``, from rows of the queue's own database, by one INSERT … SELECT."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import groupby, islice
from typing import Any, NamedTuple, Unpack

import msgspec
from asgiref.sync import sync_to_async
from django.db import DataError, connections, transaction
from django.db.models import QuerySet

from .. import messages, notifier
from ..consuming.context import handling
from ..errors import FilteredOut, InvalidMessage, shortened
from ..messages.ids import as_uuid
from ..messages.types import CONSTANT_FACTORIES
from ..models.delivery import OnConflict
from ..sql import queue_sql
from ..sql.inserts import REFUSED_VALUE, REFUSED_VALUES, Source
from ..sql.message_columns import RUN_LENGTH, Outgoing, Run, runs_of
from ..telemetry import tracing
from . import dedupe, early_acks, fanout
from .preparation import apply_rules, refuse_encryption_subject, with_correlation
from .validation import (
    BulkOptions,
    CarriedOptions,
    SelectOptions,
    alias_of,
    build_outgoing,
    check_type,
    names_of,
    refuse_unknown_recipient,
    with_ordering_key,
)


def send_many(
    queue: Any,
    bodies: Iterable[Any],
    *,
    headers: Mapping[str, str] | None = None,
    expires_in: timedelta | None = None,
    priority: int = 0,
    recipient: str = "",
    unknown_recipient: bool = False,
    using: str | None = None,
    dedupe_key: dedupe.Key = None,
    on_conflict: OnConflict | str | None = None,
    ordering_key: str | Callable[[Any], str | None] | None = None,
    **carried: Unpack[CarriedOptions],
) -> int:
    """Send every body of an iterable by the bulk path; all or nothing, in the caller's transaction if there is one.

    Returns how many messages were stored. ``dedupe_key``: a callable of the body, on a queue with keys; ``on_conflict``
    as in ``send``; ``ordering_key``: of all of them, or a callable of the body. Raises InvalidMessage at the first body
    that cannot be encoded, and for an argument that is a single message.
    """
    if tracing.tracer is not None and type(headers) is not tracing.Traced:
        return tracing.tracer.send("send", send_many, queue._meta.label, locals())
    refuse_one_message("send_many", "send(...)", bodies)
    refuse_encryption_subject(queue, headers)
    if (caller := handling.get()) is not None:
        headers = with_correlation(headers, None, caller)
    alias = alias_of(queue, using)
    connection = connections[alias]
    if recipient and not unknown_recipient:
        refuse_unknown_recipient(queue, alias, recipient)
    like = build_outgoing(queue, messages.new_id(), "{}", None, expires_in, priority, recipient, None, None, carried)
    key_of = ordering_key if callable(ordering_key) else None
    if ordering_key is not None and not callable(ordering_key):
        headers = with_ordering_key(queue, headers, ordering_key)
    if dedupe_key is not None or on_conflict is not None or queue.delivery.dedupe_key is not None:
        if key_of is not None:
            raise InvalidMessage("A callable ordering_key is not accepted on a queue with dedupe keys.")
        return _send_keyed(queue, connection, bodies, headers, like, dedupe_key, on_conflict)
    given = (
        encoded(bodies, headers, queue.delivery.message_type)
        if key_of is None
        else _encoded_in_order(queue, bodies, headers, key_of)
    )
    runs = runs_for(queue, given, like, connection)
    with transaction.atomic(using=alias):
        # Bodies in a list or tuple: iterating over them runs no query, so a COPY can stream them.
        count = early_acks.insert_runs(queue, connection, runs, isinstance(bodies, list | tuple))
    if count:
        notifier.sent(queue, connection)
    return count


def _encoded_in_order(
    queue: Any, bodies: Iterable[Any], headers: Mapping[str, str] | None, key_of: Callable[[Any], str | None]
) -> Iterator[Encoded]:
    """Encode bodies whose ordering keys differ; neighbours with one key together."""
    for key, group in groupby(bodies, key_of):
        yield from encoded(group, with_ordering_key(queue, headers, key), queue.delivery.message_type)


def _send_keyed(
    queue: Any,
    connection: Any,
    bodies: Iterable[Any],
    headers: Mapping[str, str] | None,
    like: Outgoing,
    dedupe_key: dedupe.Key,
    on_conflict: OnConflict | str | None,
) -> int:
    """``send_many`` of messages with keys: looks up a thousand keys at a time and stores the messages that are
    admitted."""
    dedupe.refuse_without(queue, dedupe_key, on_conflict)
    if dedupe_key is not None and not callable(dedupe_key):
        raise InvalidMessage(
            f"dedupe_key = {shortened(dedupe_key)} is not accepted by send_many: a callable of the body."
        )
    conflict, count = dedupe.conflict_of(queue, on_conflict), 0
    with transaction.atomic(using=connection.alias):
        for admitted, ids, keys in dedupe.admitted(
            queue, connection, bodies, dedupe_key, conflict, messages.id_sequence()
        ):
            runs = runs_for(queue, encoded(admitted, headers, queue.delivery.message_type, ids), like, connection)
            if dedupe_key is not None:
                runs = _with_keys(runs, dict(zip(ids, keys, strict=True)))
            count += early_acks.insert_runs(queue, connection, runs, False)
    if count:
        notifier.sent(queue, connection)
    return count


def _with_keys(runs: Iterable[Run], keys: Mapping[bytes, str | None]) -> Iterator[Run]:
    """The runs with the keys that the sender gave, by id: each message has its own in its headers."""
    for run in runs:
        pairs = zip(run.ids, run.bodies, strict=True)
        for has_key, group in groupby(pairs, lambda pair: keys[pair[0]] is not None):
            ids, bodies = zip(*group, strict=True)
            text = run.like.headers
            headers = [dedupe.with_key(text, str(keys[identity])) for identity in ids] if has_key else None
            yield Run(run.like, ids, bodies, headers)


async def asend_many(queue: Any, bodies: Iterable[Any], **options: Unpack[BulkOptions]) -> int:
    """``send_many`` for async code, on the thread that Django's async ORM uses, so in the same transaction."""
    return await sync_to_async(send_many, thread_sensitive=True)(queue, bodies, **options)


def refuse_one_message(verb: str, instead: str, bodies: Any) -> None:
    """Raise InvalidMessage for a dict or a string, of which the keys or characters would be sent."""
    if isinstance(bodies, Mapping | str | bytes | bytearray | memoryview):
        kind = type(bodies).__name__
        raise InvalidMessage(
            f"{verb} takes an iterable of messages, and a {kind} is one: write {instead}, or {verb}([...])."
        )
    if not isinstance(bodies, Iterable):
        later = (
            " Collect an asynchronous one first: [one async for one in ...]." if hasattr(bodies, "__aiter__") else ""
        )
        raise InvalidMessage(f"{verb} takes an iterable of messages, not a {type(bodies).__name__}.{later}")


class Encoded(NamedTuple):
    """Encoded bodies of one class, at most ``RUN_LENGTH``."""

    cls: type
    headers: str
    ids: list[bytes]
    bodies: list[bytes | None]


def encoded(
    bodies: Iterable[Any], headers: Mapping[str, str] | None, message_type: str, ids: Sequence[bytes] | None = None
) -> Iterator[Encoded]:
    """Encode the bodies class by class: 0.7 µs each instead of 3 one by one. ``ids``: the ids that they already
    have."""
    iterator, ids_of = iter(bodies), messages.id_sequence()
    if ids is not None:
        drawing = iter(ids)
        ids_of = lambda count: list(islice(drawing, count))  # noqa: E731
    while part := list(islice(iterator, RUN_LENGTH)):
        for cls, group in groupby(part, type):
            stored, data = messages.encode_alike(list(group), headers, message_type)
            yield Encoded(cls, stored, ids_of(len(data)), data)


def runs_for(
    queue: Any, given: Iterable[Encoded], like: Outgoing, connection: Any, *, leave_out: bool = False
) -> Iterator[Run]:
    """What this queue stores of the messages; the other columns are as in ``like``. ``leave_out``: omit messages that
    its filter refuses, instead of raising FilteredOut. ``connection``: their database, where the subscribers are read
    at once."""
    # Before the runs are drawn: during that a COPY may occupy the connection.
    addressed = queue.delivery.recipients and not like.recipient
    known = (
        fanout.read_subscribers(queue, connection) if addressed and not fanout.has_fixed_snapshot(connection) else None
    )
    if queue.delivery.has_expressions:
        return runs_of(_entered(queue, given, like, known, leave_out))
    return _runs_for(queue, given, like, known)


def _entered(
    queue: Any, given: Iterable[Encoded], like: Outgoing, known: fanout.Subscribers | None, leave_out: bool
) -> Iterator[Outgoing]:
    """Single messages, because expressions make them differ; evaluated once for all copies."""
    for run in given:
        check_type(queue, run.cls, run.headers, like.recipient)
        recipients = _recipients(run, like, known)
        for identity, body in zip(map(as_uuid, run.ids), run.bodies, strict=True):
            headers = messages.to_nservicebus(run.headers, identity) if queue.wire_format else run.headers
            try:
                message = apply_rules(queue, like._replace(id=identity, headers=headers, body=body))
            except FilteredOut:
                if not leave_out:
                    raise
                continue
            for name in recipients:
                yield message._replace(recipient=name)


def _recipients(encoded: Encoded, like: Outgoing, known: fanout.Subscribers | None) -> tuple[str, ...]:
    """The recipients of these messages: by the class of their bodies, or, of stored bytes, by the type in their
    headers; ('',) if no consumer subscribes."""
    if known is None:
        return (like.recipient,)
    return known.of(names_of(encoded.cls, encoded.headers)) or ("",)


def _runs_for(queue: Any, given: Iterable[Encoded], like: Outgoing, known: fanout.Subscribers | None) -> Iterator[Run]:
    for run in given:
        check_type(queue, run.cls, run.headers, like.recipient)
        recipients = _recipients(run, like, known)
        if queue.wire_format:
            yield from _foreign_runs(like, run.headers, run.ids, run.bodies, recipients)
            continue
        for name in recipients:
            yield Run(like._replace(headers=run.headers, recipient=name), run.ids, run.bodies)


def _foreign_runs(
    like: Outgoing, headers: str, ids: list[bytes], data: list[bytes | None], recipients: Iterable[str]
) -> Iterator[Run]:
    """A run for each message, because its id is in its headers."""
    for identity, body in zip(ids, data, strict=True):
        decoded = messages.to_nservicebus(headers, uuid.UUID(bytes=identity))
        for name in recipients:
            yield Run(like._replace(headers=decoded, recipient=name), [identity], [body])


def send_from(
    queue: Any,
    rows: QuerySet[Any, Any] | str,
    params: Sequence[Any] | None = None,
    *,
    of: type | None = None,
    headers: Mapping[str, str] | None = None,
    expires_in: timedelta | None = None,
    priority: int = 0,
    recipient: str = "",
    unknown_recipient: bool = False,
    using: str | None = None,
    **carried: Unpack[CarriedOptions],
) -> int:
    """Send a message for each row of a queryset, or of a SELECT with ``params``; returns how many.

    The body is the row as a JSON object with the names of its columns (``values()`` chooses and renames them). ``of``:
    the message class that the rows are for; its fields without a default must be columns, as must those whose default
    is another one each time. The other arguments are those of ``send_many``. Raises InvalidMessage, also for a queue
    whose bodies are not plain JSON or that accepts early acks.
    """
    if tracing.tracer is not None and type(headers) is not tracing.Traced:
        return tracing.tracer.send("send", send_from, queue._meta.label, locals())
    alias = alias_of(queue, using)
    connection = connections[alias]
    _refuse_what_is_not_stored_as_json(queue)
    if (caller := handling.get()) is not None:
        headers = with_correlation(headers, None, caller)
    if recipient and not unknown_recipient:
        refuse_unknown_recipient(queue, alias, recipient)
    source = _source(queue, rows, params, connection)
    identity = messages.first_of_many()
    stored = messages.json_headers(of, headers)
    check_type(queue, of or dict, stored, recipient)
    if queue.wire_format:
        raise InvalidMessage(
            f"send_from is not for {queue._meta.label}: its wire format has the id of each message in it."
        )
    like = build_outgoing(queue, identity, stored, None, expires_in, priority, recipient, None, None, carried)
    sql = queue_sql(queue, connection)
    try:
        with transaction.atomic(using=alias):
            columns = sql.inserts.columns_of(connection, source)
            _refuse_columns([name for name, _ in columns], of)
            count = sql.inserts.insert_select(connection, like, source, columns)
    except DataError as error:
        why = _refusal(error)
        if why is None:
            raise
        raise InvalidMessage(f"A row cannot be a message body: {why}.") from error
    if count:
        notifier.sent(queue, connection)
    return count


def _refusal(error: DataError) -> str | None:
    """Why ``send`` would refuse a value of a row; None: the error is another one."""
    found = re.search(rf'{REFUSED_VALUE}(\w+): ([^"\n]+)', str(error))
    if found is None:
        return None
    kind, value = found.groups()
    return REFUSED_VALUES[kind].format(value.lower().replace("inity", "") if kind == "number" else value)


async def asend_from(
    queue: Any, rows: QuerySet[Any, Any] | str, params: Sequence[Any] | None = None, **options: Unpack[SelectOptions]
) -> int:
    """``send_from`` for async code, on the thread that Django's async ORM uses, so in the same transaction."""
    return await sync_to_async(send_from, thread_sensitive=True)(queue, rows, params, **options)


def _source(queue: Any, rows: Any, params: Sequence[Any] | None, connection: Any) -> Source:
    if isinstance(rows, str):
        text = rows.strip().rstrip(";")
        # Without parameters a percent sign stands for itself.
        return Source(text.replace("%", "%%"), ()) if params is None else Source(text, tuple(params))
    if not isinstance(rows, QuerySet) or params is not None:
        accepted = "a queryset" if params is not None else "a queryset or a SELECT"
        raise InvalidMessage(f"send_from({shortened(rows)}) is not accepted: {accepted}.")
    chosen: Any = rows
    if chosen._db is not None and chosen._db != connection.alias:
        raise InvalidMessage(
            f"send_from takes rows of {connection.alias!r}, where the queue is, and these are of {chosen._db!r}: use "
            "send_many."
        )
    chosen = chosen if chosen._fields is not None else chosen.values()
    sql, given = chosen.query.get_compiler(connection=connection).as_sql()
    if chosen.ordered and not chosen.query.is_sliced:
        sql = queue_sql(queue, connection).inserts.ordered_select(sql)
    return Source(sql, given, _names_of(chosen))


def _names_of(rows: Any) -> list[str]:
    """The names of the columns in the order of the SELECT."""
    query = rows.query
    selected = getattr(query, "selected", None)  # since Django 5.2
    if selected:
        return list(selected)
    return [*query.extra_select, *query.values_select, *query.annotation_select]


def _refuse_columns(names: Sequence[str], of: type | None) -> None:
    if len(set(names)) < len(names):
        raise InvalidMessage(f"send_from: several columns have one name ({', '.join(names)}): rename one of them.")
    if of is None:
        return
    info: Any = msgspec.inspect.type_info(of)
    if getattr(info, "array_like", False):
        raise InvalidMessage(f"send_from: a {of.__qualname__} is an array (array_like), and a row an object.")
    needed = [field.encode_name for field in info.fields if field.required or _differs(field)]
    if getattr(info, "tag", None) is not None:
        needed.append(info.tag_field)
    if lacking := [name for name in needed if name not in names]:
        raise InvalidMessage(
            f"send_from: a {of.__qualname__} has no {', '.join(lacking)} in these rows ({', '.join(names)}). Columns "
            "are needed for fields without a default, for those whose default is another one each time, and for a tag."
        )
    known = {*needed, *(field.encode_name for field in info.fields)}
    if getattr(info, "forbid_unknown_fields", False) and (unknown := [name for name in names if name not in known]):
        raise InvalidMessage(f"send_from: a {of.__qualname__} forbids the fields {', '.join(unknown)} of these rows.")


def _differs(field: Any) -> bool:
    """Whether each reader of a body without this field would make another value of it."""
    return field.default_factory is not msgspec.NODEFAULT and field.default_factory not in CONSTANT_FACTORIES


def _refuse_what_is_not_stored_as_json(queue: Any) -> None:
    delivery, label = queue.delivery, queue._meta.label
    for stands, why in (
        (
            delivery.message_type != "json",
            f"its message_type is {delivery.message_type!r}, and the database writes JSON",
        ),
        (delivery.encoding, "the database cannot encode its bodies (Delivery.encoding)"),
        (callable(delivery.dedupe_key), "its keys are made of bodies (Delivery.dedupe_key)"),
        (early_acks.defers(queue), "an ack may come before its messages (Delivery.deferred_ack_expiration)"),
    ):
        if stands:
            raise InvalidMessage(f"send_from is not for {label}: {why}. Use send_many.")
