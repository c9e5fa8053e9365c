"""``send``: storing one message in the caller's transaction, with what follows it (``then``) and whether its result is
kept (``keep_result``) in its header.

A send is one INSERT beneath Django's cursor; it opens no transaction (BEGIN and COMMIT would take a third of its time).
A delayed message goes to the delayed store of the same database or, where its queue allows that, to the delayed
messages of another one. A throttled notification follows the commit.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, Unpack

from asgiref.sync import sync_to_async
from django.db import Error, connections
from django.utils import timezone

from .. import delayed, messages, notifier, registry
from ..conf import settings
from ..consuming.context import handling
from ..errors import InvalidMessage, NotMigrated, shortened
from ..flow import ledger
from ..flow.workflow import FollowUp, Workflow, encode
from ..models import DelayedMessage
from ..models.delivery import OnConflict
from ..sql import ErrorKind, backend_of, queue_sql
from ..sql.message_columns import OPTIONS, TIMES, Outgoing
from ..sql.tables import StoreTable
from ..telemetry import tracing
from . import dedupe, early_acks, fanout
from .isolation import atomic_on, isolated_connection
from .preparation import apply_rules, encode_body, refuse_encryption_subject, with_correlation
from .validation import (
    FAR_FUTURE,
    CarriedOptions,
    SendOptions,
    alias_of,
    build_outgoing,
    check_type,
    milliseconds,
    names_of,
    refuse_unknown_recipient,
    with_ordering_key,
)


def send(
    queue: Any,
    body: Any,
    *,
    headers: Mapping[str, str] | None = None,
    delay: timedelta | None = None,
    at: datetime | None = None,
    delayed_in: str | None = None,
    expires_in: timedelta | None = None,
    priority: int = 0,
    recipient: str = "",
    correlation_id: str | None = None,
    reply_to: str | None = None,
    message_id: uuid.UUID | None = None,
    isolated: bool = False,
    unknown_recipient: bool = False,
    using: str | None = None,
    dedupe_key: dedupe.Key = None,
    on_conflict: OnConflict | str | None = None,
    ordering_key: str | None = None,
    then: Any = None,
    keep_result: timedelta | None = None,
    **carried: Unpack[CarriedOptions],
) -> uuid.UUID:
    """Send one message into a queue, in the caller's transaction; returns its id.

    ``body``: a msgspec.Struct, a dataclass, any JSON value, bytes, or None. ``delay`` and ``at`` (aware) keep it in the
    delayed store until it is due; a time in the past is due at once. ``delayed_in`` keeps it in another database than
    the queue's, in a transaction of that one, and a dispatcher forwards it (``Delivery.delayed_in``). ``expires_in``
    drops it if it is not received in that time, counted from when it becomes due. ``priority``: 0 to the queue's levels
    - 1, the highest is received first. ``recipient`` addresses one consumer; '' means every consumer of its type, one
    copy each, on a queue with ``recipients``; there a name that neither this process nor a live worker knows is
    refused, unless ``unknown_recipient`` (or ``delayed_in``, whose sender must not need the queue's database).
    ``isolated=True`` commits it on a connection of its own, independent of the caller's transaction. ``dedupe_key``: of
    the messages with one key only one waits, on a queue with ``Delivery.dedupe_key``; ``on_conflict`` ("ignore",
    "replace", "error") decides which, and the id of the waiting message is returned ("error" raises DuplicateMessage).
    ``ordering_key``: messages with one key are handled in order, on a queue with ``Delivery.ordering``. ``then``: what
    ``Queue.prepare`` returns, or a ``Chain``; it is sent with the ack of this message. ``keep_result``: how long the
    result is kept, for ``result_of``. Both on a queue with ``Delivery.workflow``.
    ``carried``: further message columns (``sql.message_columns``): ``is_barrier``. Raises InvalidMessage (FilteredOut
    when the queue's filter does not match), and TableNotFound or NotMigrated before `migrate`.
    """
    if tracing.tracer is not None and type(headers) is not tracing.Traced:
        return tracing.tracer.send("send", send, queue._meta.label, locals())
    if not isinstance(isolated, bool):
        raise InvalidMessage(f"isolated = {shortened(isolated)} is not accepted: True or False.")
    identity = message_id or messages.new_id()
    if ordering_key is not None:
        headers = with_ordering_key(queue, headers, ordering_key)
    alias = alias_of(queue, using)
    if then is not None or keep_result is not None:
        following, kept = () if then is None else steps_of(then), seconds_kept(queue, recipient, keep_result)
        headers, _ = with_workflow(queue, alias, identity, headers, correlation_id, following, kept)
    message = build_message(
        queue, body, identity, headers, expires_in, priority, recipient, correlation_id, reply_to, carried
    )
    key = None
    if dedupe_key is not None or queue.delivery.dedupe_key is not None:
        key = dedupe.key_of(queue, body, dedupe_key)
    if on_conflict is not None:
        dedupe.refuse_without(queue, None, on_conflict)
        dedupe.conflict_of(queue, on_conflict)
    if delayed_in is not None:
        if key is not None and delayed_in != alias:
            raise InvalidMessage(
                "dedupe_key and delayed_in exclude each other: what waits is known in the queue's database."
            )
        if using is not None:
            raise InvalidMessage(
                "using and delayed_in exclude each other: a message is forwarded to the queue's database."
            )
        due = when_due(delay, at)
        if delayed_in != alias:
            _store_for(queue, alias, delayed_in, isolated, message, due)
            return identity
    if recipient and not unknown_recipient:
        refuse_unknown_recipient(queue, alias, recipient)
    if key is not None:
        conflict = dedupe.conflict_of(queue, on_conflict)
        if dedupe_key is not None:
            message = message._replace(headers=dedupe.with_key(message.headers, key))
        with isolated_connection(alias) if isolated else nullcontext(connections[alias]) as connection:
            return insert_once(queue, connection, message, type(body), delay, at, key, conflict) or identity
    if isolated:
        with isolated_connection(alias) as connection:
            insert(queue, connection, message, type(body), delay, at)
    else:
        insert(queue, connections[alias], message, type(body), delay, at)
    return identity


async def asend(queue: Any, body: Any, **options: Unpack[SendOptions]) -> uuid.UUID:
    """``send`` for async code, on the thread that Django's async ORM uses, so in the same transaction."""
    return await sync_to_async(send, thread_sensitive=True)(queue, body, **options)


def build_message(
    queue: Any,
    body: Any,
    identity: uuid.UUID,
    headers: Mapping[str, str] | None,
    expires_in: timedelta | None,
    priority: int,
    recipient: str,
    correlation_id: str | None,
    reply_to: str | None,
    carried: Mapping[str, Any] = MappingProxyType({}),
) -> Outgoing:
    """A message as this queue stores it: body and headers encoded, options checked, expressions evaluated. Runs no
    query. Raises InvalidMessage."""
    refuse_encryption_subject(queue, headers)
    message_headers = with_addresses(headers, correlation_id, reply_to)
    stored_headers, data = messages.encode(body, message_headers, queue.delivery.message_type)
    check_type(queue, type(body), stored_headers, recipient)
    if queue.wire_format:
        stored_headers = messages.to_nservicebus(stored_headers, identity)
    message = build_outgoing(
        queue, identity, stored_headers, data, expires_in, priority, recipient, correlation_id, reply_to, carried
    )
    return apply_rules(queue, message) if queue.delivery.has_expressions else message


def with_addresses(
    headers: Mapping[str, str] | None, correlation_id: str | None, reply_to: str | None
) -> Mapping[str, str] | None:
    """The headers with correlation id and reply address: consumers of NServiceBus read columns, handlers read
    headers."""
    if (caller := handling.get()) is not None:
        headers = with_correlation(headers, correlation_id, caller)
    if not correlation_id and not reply_to:
        return headers
    message_headers = {messages.CORRELATION_ID: correlation_id, messages.REPLY_TO: reply_to}
    return {name: value for name, value in message_headers.items() if value} | dict(headers or {})


def insert(
    queue: Any, connection: Any, message: Outgoing, cls: type, delay: timedelta | None, at: datetime | None
) -> None:
    """Insert a message whose body was of class ``cls``, in the connection's transaction: into the queue, with a copy
    for each consumer on a queue with ``recipients``, or into the delayed store."""
    if queue.delivery.encoding:
        message = encode_body(queue, message, connection.alias)
    if delay is not None or at is not None:
        _store_delayed(queue, connection, message, delay, at)
        return
    if early_acks.defers(queue):
        with atomic_on(connection):
            if not early_acks.was_acked(queue, connection, message.id):
                _insert_into_queue(queue, connection, message, cls)
        return
    _insert_into_queue(queue, connection, message, cls)


def _insert_into_queue(queue: Any, connection: Any, message: Outgoing, cls: type) -> None:
    if queue.delivery.recipients and not message.recipient:
        fanout.insert(queue, connection, message, names_of(cls, message.headers))
    else:
        queue_sql(queue, connection).inserts.insert(connection, message)
    notifier.sent(queue, connection)


def insert_once(
    queue: Any,
    connection: Any,
    message: Outgoing,
    cls: type,
    delay: timedelta | None,
    at: datetime | None,
    key: str,
    conflict: OnConflict,
) -> uuid.UUID | None:
    """``insert`` of a message with a key. Returns the id of the waiting message, if that stays. Raises
    DuplicateMessage."""
    if (delay is not None or at is not None) and not delayed.is_built_in(delayed.store_of(connection.alias)):
        raise InvalidMessage(
            f"dedupe_key = {shortened(key)} is not accepted with delay or at: what waits in the delayed store of "
            f"{connection.alias!r} (QUEUEAPP.DELAYED_STORE) cannot be looked up."
        )
    # No savepoint: it costs two round trips, and a refusal has changed nothing.
    with nullcontext() if connection.in_atomic_block else atomic_on(connection):
        kept = dedupe.admit(queue, connection, key, message.id, conflict)
        if kept is None:
            insert(queue, connection, message, cls, delay, at)
    return kept


def _store_delayed(
    queue: Any, connection: Any, message: Outgoing, delay: timedelta | None, at: datetime | None
) -> None:
    due = when_due(delay, at)
    store = delayed.store_of(connection.alias)
    with delayed.storing(connection.alias, store):
        if delayed.is_built_in(store):
            _store_in_table(queue._meta.label, connection, message, due)
        else:
            _store_elsewhere(queue, connection, message, due)
    notifier.delayed(connection)


def when_due(delay: timedelta | None, at: datetime | None) -> int | datetime:
    """When a message is due: in so many milliseconds, or at a time. Raises InvalidMessage."""
    if delay is not None and at is not None:
        raise InvalidMessage("delay and at exclude each other: a message is due in a time or at a time.")
    if delay is not None:
        return milliseconds("delay", delay)
    if at is None:
        raise InvalidMessage("delayed_in goes with delay or at; delay=timedelta(0) forwards the message at once.")
    if not isinstance(at, datetime) or timezone.is_naive(at):
        raise InvalidMessage(f"at = {shortened(at)} is not accepted: it must be an aware datetime.")
    return _bounded(at)


def _store_for(queue: Any, alias: str, kept_in: str, isolated: bool, message: Outgoing, due: int | datetime) -> None:
    """Store a message for a queue of the database ``alias`` in another one: always in the table, whichever delayed
    store that one has, because the message has to commit with the caller's transaction there."""
    if kept_in not in queue.delivery.delayed_in:
        raise InvalidMessage(
            f"delayed_in = {shortened(kept_in)} is not accepted by {queue._meta.label}, which lies in {alias!r}: its "
            f"Delivery.delayed_in = {queue.delivery.delayed_in!r} does not name that database, so no dispatcher would "
            "forward it."
        )
    if queue.delivery.encoding:
        if messages.ENCRYPT_FOR in message.headers and messages.ENCRYPT_FOR in messages.decode_headers(message.headers):
            raise InvalidMessage(
                f"Header {messages.ENCRYPT_FOR!r} is not accepted with delayed_in: the keys of subjects are in "
                f"{alias!r}."
            )
        message = encode_body(queue, message, alias)
    with isolated_connection(kept_in) if isolated else nullcontext(connections[kept_in]) as connection:
        with delayed.storing(kept_in):
            _store_in_table(registry.address(queue, alias), connection, message, due)
        notifier.delayed(connection)


def _store_in_table(destination: str, connection: Any, message: Outgoing, due: int | datetime) -> None:
    table = StoreTable.of(DelayedMessage, "due")
    backend = backend_of(connection)
    try:
        with ledger.transaction_of(connection, destination):
            backend.delayed.store(connection, table, destination, message, due)
            ledger.count(connection, destination, ledger.DELAYED, ledger.SENT)
    except Error as error:
        if backend.error_kind(error) is ErrorKind.MISSING:
            raise NotMigrated(connection.alias, [f"{table.db_table} or a column of it"]) from error
        raise


def _store_elsewhere(queue: Any, connection: Any, message: Outgoing, due: int | datetime) -> None:
    store = delayed.open_store(connection.alias, queue.delivery.semantics)
    when = due if isinstance(due, datetime) else backend_of(connection).now(connection) + timedelta(milliseconds=due)
    carried: dict[str, Any] = dict(zip(OPTIONS, message[3:], strict=True))
    for name in TIMES:
        if carried[name] is not None:
            carried[name] = when + timedelta(milliseconds=carried[name])
    store.store(delayed.Delayed(message.id, queue._meta.label, when, message.headers, message.body, **carried))


def _bounded(at: datetime) -> datetime:
    """A time that every table, time zone and later arithmetic can hold. Raises InvalidMessage for a later one."""
    now = datetime.now(UTC)  # Django's now() is naive without USE_TZ
    if at > now + FAR_FUTURE:
        raise InvalidMessage(f"at = {shortened(at)} is not accepted: it must be within 100 years from now.")
    return max(at, now - FAR_FUTURE)  # due at once


@dataclass(frozen=True, slots=True)
class Step:
    """A message that was checked and encoded, and is sent later, any number of times: each has an id of its own.
    ``then``: those that follow it. ``keep_result``: in seconds."""

    queue: Any
    alias: str
    message: Outgoing
    body_class: type
    then: tuple[Step, ...] = field(default=(), kw_only=True)
    keep_result: int | None = field(default=None, kw_only=True)

    @property
    def steps(self) -> tuple[Step, ...]:
        """Itself and what follows it."""
        return (self, *self.then)

    def anew(self) -> Outgoing:
        """The message under another id, which a wire format has in its headers as well."""
        identity = messages.new_id()
        headers = self.message.headers.replace(str(self.message.id), str(identity))
        return self.message._replace(id=identity, headers=headers)


def steps_of(then: Any) -> tuple[Step, ...]:
    """The messages of a ``then``. Raises InvalidMessage for what is none."""
    steps = getattr(then, "steps", None)
    if not isinstance(steps, tuple) or not steps or not all(isinstance(step, Step) for step in steps):
        raise InvalidMessage(
            f"then = {shortened(then)} is not accepted: write then=Queue.prepare(body, ...), or then=Chain([...])."
        )
    return steps


def seconds_kept(queue: Any, recipient: str, keep_result: Any) -> int | None:
    """``keep_result`` in whole seconds. Raises InvalidMessage."""
    if keep_result is None:
        return None
    label = queue._meta.label
    if not queue.delivery.workflow:
        raise InvalidMessage(f"{label} keeps no results (keep_result): set Delivery.workflow = True.")
    if queue.delivery.recipients and not recipient:
        raise InvalidMessage(f"keep_result is not accepted by {label} without a recipient: each copy has a result.")
    return milliseconds("keep_result", keep_result, low=1000) // 1000


def with_workflow(
    queue: Any,
    alias: str,
    identity: uuid.UUID,
    headers: Mapping[str, str] | None,
    correlation_id: str | None,
    then: Sequence[Step],
    keep_result: int | None,
) -> tuple[dict[str, str], list[uuid.UUID]]:
    """(headers of a message with these follow-ups, the ids that they get). Each is encoded as its own queue stores it:
    what is encrypted there is so from here on. Raises InvalidMessage."""
    _refuse_steps(queue, alias, then)
    if (caller := handling.get()) is not None:
        headers = with_correlation(headers, correlation_id, caller)
    given = dict(headers or {})
    conversation = correlation_id or given.get(messages.CORRELATION_ID) or str(identity)
    previous, following, ids = identity, list[FollowUp](), list[uuid.UUID]()
    for step in then:
        message = _correlated(step.anew(), previous, conversation)
        if step.queue.delivery.encoding:
            message = encode_body(step.queue, message, alias)
        following.append(FollowUp.of(step.queue._meta.label, message, step.keep_result))
        previous = message.id
        ids.append(previous)
    return given | {messages.WORKFLOW: encode(Workflow(following, keep_result))}, ids


def _correlated(message: Outgoing, previous: uuid.UUID, conversation: str) -> Outgoing:
    """The message with the addresses of the one before."""
    if not settings.CORRELATE:
        return message
    headers = {messages.CORRELATION_ID: conversation} | messages.decode_headers(message.headers)
    return message._replace(headers=messages.encode_headers(headers | {messages.RELATED_TO: str(previous)}))


def _refuse_steps(queue: Any, alias: str, then: Sequence[Step]) -> None:
    """Raise InvalidMessage for messages that cannot follow each other."""
    before = queue
    for step in then:
        label = step.queue._meta.label
        if not before.delivery.workflow:
            raise InvalidMessage(
                f"No message can follow those of {before._meta.label} (then): set Delivery.workflow = True there."
            )
        if step.alias != alias:
            raise InvalidMessage(f"{label} lies in {step.alias!r}, and the message that it follows in {alias!r}.")
        if step.queue.wire_format:
            raise InvalidMessage(f"{label} is a table of another system: send to it from the handler, not by then.")
        if before.delivery.encrypts and not step.queue.delivery.encrypts:
            raise InvalidMessage(
                f"{before._meta.label} encrypts its messages, and {label}, whose message would be part of one, does "
                "not: let it encrypt as well (Delivery.encoding), or send from the handler."
            )
        before = step.queue
