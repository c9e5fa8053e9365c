"""``send_from``: messages from rows of the queue's own database, by one INSERT … SELECT in the caller's transaction."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Unpack

import msgspec
from asgiref.sync import sync_to_async
from django.db import DataError, connections, transaction
from django.db.models import QuerySet

from .. import messages, notifier
from ..consuming.context import handling
from ..errors import InvalidMessage, shortened
from ..messages.types import CONSTANT_FACTORIES
from ..sql import queue_sql
from ..sql.inserts import REFUSED_VALUE, REFUSED_VALUES, Source
from ..telemetry import tracing
from . import early_acks
from .accepted_types import check_type
from .preparation import with_correlation
from .validation import CarriedOptions, SelectOptions, alias_of, build_outgoing, refuse_unknown_recipient


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
