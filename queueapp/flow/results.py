"""Results of messages that were sent with ``keep_result``.

    its handler returned --> kept in this process --ack, in its transaction--> a row with the value, until it expires
    it became poison     --> a row with the error, in that transaction --requeued, and handled--> with the value

A message without ``keep_result`` has none of it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from django.db import IntegrityError, router, transaction

from .. import messages
from ..conf import MAX_CONCURRENCY
from ..errors import InvalidMessage
from ..messages.body_filters import sealing
from ..models import MessageResult, Now

#: Values of messages that are not acked yet, at most: those of leases that were lost are never asked for. As many as
#: the most receivers of a queue have in batches of 500, since a value that is dropped before its ack is missing.
MAX_RETURNED = 500 * MAX_CONCURRENCY
#: Characters of an error.
MAX_ERROR = 2_000
#: Results that maintenance deletes at once.
BATCH = 1_000


class Returned(NamedTuple):
    """A value whose message is not acked yet, as it will be stored; the start is by this process' clock."""

    headers: str
    body: bytes | None
    attempts: int
    started: float


#: By database, label of the queue and seq.
_returned: dict[tuple[str, str, int], Returned] = {}
#: What the handler that runs now has returned; None: its result is not kept.
_values: ContextVar[list[Any] | None] = ContextVar("queueapp_returned_values", default=None)


def returned(value: Any) -> None:
    """The handler that runs in this context has returned this value."""
    values = _values.get()
    if values is not None:
        values.append(value)


def keeping(call: Callable[[Any, Any], Any]) -> Callable[[Any, Any], None]:
    """The handler of one message, whose value is kept until the ack. Raises InvalidMessage for a value that cannot be
    encoded, so that the attempt has failed."""

    def called(message: Any, context: Any) -> None:
        values, started = list[Any](), monotonic()
        token = _values.set(values)
        try:
            call(message, context)
        finally:
            _values.reset(token)
        headers, body = _encoded(context, values[-1] if values else None)
        if len(_returned) >= MAX_RETURNED:
            for key in list(_returned)[: MAX_RETURNED // 10]:
                _returned.pop(key, None)
        key = context.alias, context.queue._meta.label, context.seq
        _returned[key] = Returned(headers, body, context.attempt, started)

    return called


def forget(alias: str, queue: Any, seq: int) -> None:
    """Drop what a handler has returned for a message that is not acked: its handler was rehearsed."""
    _returned.pop((alias, queue._meta.label, seq), None)


def _encoded(context: Any, value: Any) -> tuple[str, bytes | None]:
    """The value as the queue of its message stores bodies: encrypted for the same subject, where it encrypts."""
    delivery = context.queue.delivery
    key = context.headers.get(messages.ENCRYPTION_KEY)
    given = {messages.ENCRYPTION_KEY: key} if key else None
    try:
        headers, body = messages.encode(value, given, delivery.message_type)
    except InvalidMessage as error:
        raise InvalidMessage(f"What {context.consumer.name} returned cannot be kept as a result. {error}") from error
    if delivery.encoding:
        headers, seal = sealing(delivery.encoding, headers, context.alias)
        body = seal(body, context.message_id)
    return headers, body


def store(queue: Any, connection: Any, seq: int, identity: uuid.UUID, keep_s: int) -> None:
    """Store the result of a handled message, in the transaction of its ack."""
    key = connection.alias, queue._meta.label, seq
    found = _returned.get(key)
    columns: dict[str, Any] = {"queue": queue._meta.label, "error": ""}
    if found is None:  # acked by a client, or handled in a batch
        columns |= {"headers": "{}", "body": None, "attempts": None, "started_at": None}
    else:
        columns |= found._asdict()
        columns["started_at"] = Now() - timedelta(seconds=monotonic() - columns.pop("started"))
        # Until then the ack may be tried again.
        transaction.on_commit(partial(_returned.pop, key, None), using=connection.alias)
    _write(connection.alias, identity, keep_s, columns)


def store_failure(alias: str, poison: Mapping[str, Any], keep_s: int) -> None:
    """Store why a message became poison, in that transaction. ``poison``: the columns of its record."""
    kind, text = poison.get("exception_type", ""), poison.get("exception_message", "")
    error = f"{kind}: {text}" if kind else str(poison.get("reason", ""))
    columns = {"queue": poison["queue"], "error": (error or "poison")[:MAX_ERROR], "headers": "{}", "body": None}
    _write(alias, poison["message_id"], keep_s, columns | {"attempts": poison.get("attempts"), "started_at": None})


def _write(alias: str, identity: uuid.UUID, keep_s: int, columns: dict[str, Any]) -> None:
    columns |= {"finished_at": Now(), "expires_at": Now() + timedelta(seconds=keep_s)}
    rows = MessageResult.objects.using(alias)
    if rows.filter(pk=identity).update(**columns):
        return
    try:
        # A savepoint: the caller's transaction acks. Not save(): its signals are the user's.
        with transaction.atomic(using=alias):
            rows.bulk_create([MessageResult(id=identity, **columns)])
    except IntegrityError:
        # Another message with this id was acked meanwhile, as of a follow-up that each copy of a message has sent.
        rows.filter(pk=identity).update(**columns)


def run_maintenance(alias: str, may_continue: Callable[[], bool]) -> None:
    """Delete results whose time is over."""
    if not router.allow_migrate_model(alias, MessageResult):
        return
    rows = MessageResult.objects.using(alias)
    while may_continue() and (keys := list(rows.filter(expires_at__lt=Now()).values_list("pk", flat=True)[:BATCH])):
        rows.filter(pk__in=keys)._raw_delete(alias)
