"""Waiting for what became of a message: ``request`` and ``arequest`` send one and wait for its answer, ``result_of``
reads the result of one that was sent with ``keep_result``, or waits for it.

A request carries an address for answers and an id, which the answer carries as its correlation id, as NServiceBus does
it. The answer arrives in a queue that has no consumer; the waiting call takes the one with its id and leaves the
others. It waits on a connection that listens for notifications, and polls as well, because foreign endpoints send none.
"""

from __future__ import annotations

import asyncio
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any

from asgiref.sync import sync_to_async
from django.db import Error, connections, transaction
from django.db.utils import DEFAULT_DB_ALIAS

from .. import messages
from ..conf import settings
from ..consuming.registry import registered
from ..errors import InvalidOption, MessageNotFound, NoReply, QueueError, UndecodableMessage
from ..flow import ledger
from ..messages.headers import WellKnown
from ..models import MessageResult, Now
from ..models.delivery.topics import content_type_of
from ..notifier import CHANNEL
from ..sending.isolation import as_of_now, in_transaction, outside_transaction
from ..sending.validation import alias_of, milliseconds
from ..sql import ErrorKind, backend_of, nonblocking, queue_sql
from ..sql.database import ListenerConnection, NotificationsUnavailable
from ..sql.message_columns import Row

#: Seconds between two polls: at first, then doubled up to the peek delay.
_FIRST_POLL = 0.02
_LOCK_TIMEOUT_MS = 1_000
#: Characters that every JSON writer writes unescaped. Quotes, slashes and letters beyond ASCII may be escaped.
_PLAIN = re.compile(r"[A-Za-z0-9_.-]+")


class Reply(WellKnown):
    """The answer to a request."""

    __slots__ = ("_alias", "_headers", "_queue", "_row")

    def __init__(self, queue: Any, alias: str, row: Row, headers: Mapping[str, str]) -> None:
        self._queue, self._alias, self._row, self._headers = queue, alias, row, headers

    def __repr__(self) -> str:
        return f"<answer {self.id} in {self._queue._meta.label}>"

    @property
    def headers(self) -> Mapping[str, str]:
        """All headers."""
        return self._headers

    @property
    def id(self) -> uuid.UUID:
        """The id of the answer."""
        return self._row.id

    @property
    def raw_body(self) -> bytes | None:
        """The body as it was stored."""
        return self._row.body

    @property
    def body(self) -> Any:
        """The body: plain JSON values, or bytes. Raises UndecodableMessage."""
        return self.decode()

    def decode(self, cls: Any = Any) -> Any:
        """The body as an instance of ``cls``. Raises UndecodableMessage."""
        row = self._row
        return messages.read_stored(row.body, row.headers, row.id, self._alias, cls, content_type_of(self._queue))


def request(
    queue: Any,
    body: Any,
    *,
    reply_queue: Any,
    timeout: timedelta,
    using: str | None = None,
    **options: Any,
) -> Reply:
    """Send a message and wait for its answer, which comes into ``reply_queue``. The other arguments are those of
    ``Queue.send``.

    It expires with the ``timeout`` unless ``expires_in`` says otherwise. Raises NoReply when no answer has come in time
    (one that comes later stays in its queue until it expires), QueueError within a transaction, because its message is
    invisible before the commit (``isolated=True`` commits it by itself), and InvalidOption for a reply queue with
    consumers, which would take the answer.
    """
    return _request(queue, body, reply_queue, timeout, using, options, threading.Event())


async def arequest(
    queue: Any,
    body: Any,
    *,
    reply_queue: Any,
    timeout: timedelta,
    using: str | None = None,
    **options: Any,
) -> Reply:
    """``request`` for async code, on a thread and connections of its own; the event loop is not blocked. Cancelling the
    task ends the wait."""
    cancelled = threading.Event()

    def wait() -> Reply:
        try:
            return _request(queue, body, reply_queue, timeout, using, options, cancelled)
        finally:
            connections.close_all()  # those of this thread

    try:
        return await asyncio.to_thread(wait)
    finally:
        cancelled.set()


def _request(
    queue: Any,
    body: Any,
    reply_queue: Any,
    timeout: timedelta,
    using: str | None,
    options: dict[str, Any],
    cancelled: threading.Event,
) -> Reply:
    milliseconds("timeout", timedelta(0) if timeout is None else timeout, low=1)
    _refuse_consumed(reply_queue)
    alias, of_replies = alias_of(queue, using), alias_of(reply_queue)
    waits_for_commit = in_transaction(connections[alias]) and not options.get("isolated")
    if waits_for_commit or in_transaction(connections[of_replies]):
        raise QueueError(
            f"An answer from {queue._meta.label} cannot be waited for in a transaction: the request is invisible "
            "before the commit. Call request() outside of atomic(), and with autocommit."
        )
    identity = options.pop("message_id", None) or messages.new_id()
    correlation = options.pop("correlation_id", None) or str(identity)
    options.setdefault("expires_in", timeout)
    deadline = monotonic() + timeout.total_seconds()
    with listening(of_replies) as notified:
        queue.send(
            body,
            message_id=identity,
            correlation_id=correlation,
            reply_to=address_of(reply_queue),
            using=using,
            **options,
        )
        wait = _FIRST_POLL
        while True:
            found = _take(reply_queue, of_replies, correlation)
            if found is not None:
                return found
            remaining = deadline - monotonic()
            if remaining <= 0 or cancelled.is_set():
                raise NoReply(queue._meta.label, identity, timeout)
            if not notified(min(wait, remaining), reply_queue._meta.label):
                wait = min(wait * 2, settings.PEEK_DELAY.total_seconds())


def address_of(queue: Any) -> str:
    """The address of a queue for answers: its label, or its table for NServiceBus endpoints."""
    return str(queue._meta.db_table if queue.wire_format else queue._meta.label)


def _refuse_consumed(queue: Any) -> None:
    if not (isinstance(queue, type) and hasattr(queue, "delivery")):
        raise InvalidOption("reply_queue", queue, "the class of a queue")
    if consumers := registered.of(queue):
        raise InvalidOption(
            "reply_queue", queue, f"a queue without consumers, and {consumers[0].name} takes its messages"
        )


@contextmanager
def listening(alias: str) -> Iterator[Callable[[float, str], bool]]:
    """A function that waits for so many seconds, or until a notification for this label, and returns whether one
    came."""
    never = threading.Event()
    poll: Callable[[float, str], bool] = lambda seconds, label: never.wait(seconds)  # noqa: E731
    listener: ListenerConnection | None = None
    if settings.NOTIFY:
        listener = backend_of(connections[alias]).notifications.listener(connections[alias].copy(), CHANNEL)
        try:
            listener.connect()
            listener.listen()
        except (Error, OSError, NotificationsUnavailable):
            listener.close()
            listener = None
    try:
        yield poll if listener is None else partial(_heard, listener)
    finally:
        if listener is not None:
            listener.close()


def _heard(listener: ListenerConnection, seconds: float, label: str) -> bool:
    until = monotonic() + seconds
    while (remaining := until - monotonic()) > 0:
        try:
            if label in listener.received(remaining):
                return True
        except (Error, OSError):
            threading.Event().wait(max(0.0, until - monotonic()))
    return False


def _take(queue: Any, alias: str, correlation: str) -> Reply | None:
    """Take the answer out of its queue, if it is there. Reads the whole table, which holds only answers that were not
    taken."""
    rows = nonblocking(queue._base_manager.using(alias))
    if plain := max(_PLAIN.findall(correlation), key=len, default=""):
        rows = rows.filter(headers__contains=plain)
    connection = connections[alias]
    sql = queue_sql(queue, connection)
    for seq, text in rows.order_by("seq").values_list("seq", "headers"):
        try:
            headers = messages.decode_headers(text)
        except UndecodableMessage:
            continue
        if messages.well_known(headers, messages.CORRELATION_ID) != correlation:
            continue
        try:
            with transaction.atomic(using=alias):
                row = sql.failures.lock(connection, seq, None, _LOCK_TIMEOUT_MS)
                if row is not None and sql.failures.remove(connection, [seq]) == 1:
                    ledger.reclassify(queue, connection, 1, ledger.MOVED, ledger.ACKED)
                    return Reply(queue, alias, row, headers)
        except Error as error:
            if backend_of(connection).error_kind(error) is not ErrorKind.LOCKED:
                raise
    return None


#: Seconds between two polls: at first, then doubled up to the peek delay.


def result_of(identity: uuid.UUID, *, timeout: timedelta | None = None, using: str = DEFAULT_DB_ALIAS) -> MessageResult:
    """The result of the message with this id; with a ``timeout`` it is waited for. Raises MessageNotFound: there is
    none yet, the message was not sent with ``keep_result``, or the time for which it is kept is over.

    In a transaction it sees what others commit meanwhile, by a session of its own; a message that was sent in the open
    transaction is handled after its commit only.

    >>> result_of(Orders.send({"order": 7}, keep_result=timedelta(days=1)), timeout=timedelta(seconds=5)).value
    """
    found = _read_now(identity, using)
    if found is None and timeout is not None:
        seconds = milliseconds("timeout", timeout, low=1) / 1000
        found = outside_transaction(using, partial(_wait, identity, using, seconds, threading.Event()))
    return _required(found, identity, timeout, using)


async def aresult_of(
    identity: uuid.UUID, *, timeout: timedelta | None = None, using: str = DEFAULT_DB_ALIAS
) -> MessageResult:
    """``result_of`` for async code. It waits on a thread and a connection of its own, so the event loop is not blocked;
    cancelling the task ends the wait."""
    found = await sync_to_async(_read_now, thread_sensitive=True)(identity, using)
    if found is None and timeout is not None:
        seconds, cancelled = milliseconds("timeout", timeout, low=1) / 1000, threading.Event()

        def wait() -> MessageResult | None:
            try:
                return _wait(identity, using, seconds, cancelled)
            finally:
                connections.close_all()  # those of this thread

        try:
            found = await asyncio.to_thread(wait)
        finally:
            cancelled.set()
    return _required(found, identity, timeout, using)


def _required(found: MessageResult | None, identity: uuid.UUID, timeout: timedelta | None, using: str) -> MessageResult:
    if found is None:
        after = "" if timeout is None else f" after {timeout}"
        raise MessageNotFound(
            f"Message {identity} has no result in {using!r}{after}: it is not handled yet, was not sent with "
            "keep_result, or the time for which its result is kept is over."
        )
    return found


def _read_now(identity: uuid.UUID, using: str) -> MessageResult | None:
    """The result as the open transaction sees it, else as others see it."""
    return _read(identity, using) or as_of_now(using, partial(_read, identity, using))


def _read(identity: uuid.UUID, using: str) -> MessageResult | None:
    return MessageResult.objects.using(using).filter(pk=identity, expires_at__gt=Now()).first()


def _wait(identity: uuid.UUID, using: str, seconds: float, cancelled: threading.Event) -> MessageResult | None:
    deadline, pause = monotonic() + seconds, _FIRST_POLL
    while (found := _read(identity, using)) is None and (remaining := deadline - monotonic()) > 0:
        if cancelled.wait(min(pause, remaining)):
            break
        pause = min(pause * 2, settings.PEEK_DELAY.total_seconds())
    return found
