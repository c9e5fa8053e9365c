"""Asking and waiting for the answer: ``request`` and ``arequest``.

A request is a message with an address for answers and an id that the answer carries as its correlation id, as NServiceBus
does it. The answer comes into a queue that no consumer handles; who waits takes the one with its id and leaves the others.
He waits on a connection that listens, and looks now and then all the same: a foreign endpoint wakes nobody.
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

from django.db import Error, connections, transaction

from .. import messages
from ..conf import settings
from ..consuming.registry import registered
from ..errors import InvalidOption, NoReply, QueueError, UndecodableMessage
from ..messages.well_known_headers import WellKnown
from ..models.delivery.topics import content_type_of
from ..notifier import CHANNEL
from ..sending.validation import alias_of, milliseconds
from ..sql import ErrorKind, backend_of, nonblocking, queue_sql
from ..sql.message_columns import Row
from ..sql.notifications import ListenerConnection, NotificationsUnavailable

#: Seconds between two looks: at first, doubled up to the peek delay.
_FIRST_LOOK = 0.02
_PATIENCE_MS = 1_000
#: What every writer of JSON writes as it is. Of quotes, slashes and letters beyond ASCII each has a way of his own.
_PLAIN = re.compile(r"[A-Za-z0-9_.-]+")


class Reply(WellKnown):
    """The answer to a request."""

    __slots__ = ("_headers", "_queue", "_row")

    def __init__(self, queue: Any, row: Row, headers: Mapping[str, str]) -> None:
        self._queue, self._row, self._headers = queue, row, headers

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
        content_type = messages.read_head(self._row.headers)[1] or content_type_of(self._queue)
        return messages.decode_body(self._row.body, content_type, cls)


def request(
    queue: Any,
    body: Any,
    *,
    reply_queue: Any,
    timeout: timedelta,
    using: str | None = None,
    **options: Any,
) -> Reply:
    """Send a message and wait for its answer, which comes into ``reply_queue``. The other arguments are those of ``Queue.send``.

    It expires with the ``timeout`` unless ``expires_in`` says otherwise: nobody would wait for its answer. Raises NoReply when
    none has come in time (one that comes later stays in its queue until it expires), QueueError in a transaction, whose message
    nobody could see meanwhile (``isolated=True`` commits it by itself), and InvalidOption for a reply queue with consumers,
    which would take the answer away.
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
    """``request`` for async code, on a thread and connections of its own; the event loop goes on meanwhile. A task that is
    cancelled waits no longer."""
    given_up = threading.Event()

    def wait() -> Reply:
        try:
            return _request(queue, body, reply_queue, timeout, using, options, given_up)
        finally:
            connections.close_all()  # those of this thread

    try:
        return await asyncio.to_thread(wait)
    finally:
        given_up.set()


def _request(
    queue: Any,
    body: Any,
    reply_queue: Any,
    timeout: timedelta,
    using: str | None,
    options: dict[str, Any],
    given_up: threading.Event,
) -> Reply:
    milliseconds("timeout", timedelta(0) if timeout is None else timeout, low=1)
    _refuse_consumed(reply_queue)
    alias, of_replies = alias_of(queue, using), alias_of(reply_queue)
    if connections[of_replies].in_atomic_block or (connections[alias].in_atomic_block and not options.get("isolated")):
        raise QueueError(
            f"An answer from {queue._meta.label} cannot be waited for in a transaction: nobody sees the request before it has "
            "committed. Ask outside of atomic()."
        )
    identity = options.pop("message_id", None) or messages.new_id()
    correlation = options.pop("correlation_id", None) or str(identity)
    options.setdefault("expires_in", timeout)
    deadline = monotonic() + timeout.total_seconds()
    with _listening(of_replies) as heard:
        queue.send(
            body,
            message_id=identity,
            correlation_id=correlation,
            reply_to=address_of(reply_queue),
            using=using,
            **options,
        )
        wait = _FIRST_LOOK
        while True:
            found = _take(reply_queue, of_replies, correlation)
            if found is not None:
                return found
            left = deadline - monotonic()
            if left <= 0 or given_up.is_set():
                raise NoReply(queue._meta.label, identity, timeout)
            if not heard(min(wait, left), reply_queue._meta.label):
                wait = min(wait * 2, settings.PEEK_DELAY.total_seconds())


def address_of(queue: Any) -> str:
    """The address of a queue for answers: its label, or its table where NServiceBus endpoints read it."""
    return str(queue._meta.db_table if queue.wire_format else queue._meta.label)


def _refuse_consumed(queue: Any) -> None:
    if not (isinstance(queue, type) and hasattr(queue, "delivery")):
        raise InvalidOption("reply_queue", queue, "the class of a queue")
    if consumers := registered.of(queue):
        raise InvalidOption(
            "reply_queue", queue, f"a queue without consumers, and {consumers[0].name} takes its messages"
        )


@contextmanager
def _listening(alias: str) -> Iterator[Callable[[float, str], bool]]:
    """Something to wait with: for so long, or until a wake-up for this label; whether there was one."""
    never = threading.Event()
    silent: Callable[[float, str], bool] = lambda seconds, label: never.wait(seconds)  # noqa: E731
    ear: ListenerConnection | None = None
    if settings.NOTIFY:
        ear = backend_of(connections[alias]).notifications.listener(connections[alias].copy(), CHANNEL)
        try:
            ear.connect()
            ear.listen()
        except (Error, OSError, NotificationsUnavailable):
            ear.close()
            ear = None
    try:
        yield silent if ear is None else partial(_heard, ear)
    finally:
        if ear is not None:
            ear.close()


def _heard(ear: ListenerConnection, seconds: float, label: str) -> bool:
    until = monotonic() + seconds
    while (left := until - monotonic()) > 0:
        try:
            if label in ear.received(left):
                return True
        except (Error, OSError):
            threading.Event().wait(max(0.0, until - monotonic()))
    return False


def _take(queue: Any, alias: str, correlation: str) -> Reply | None:
    """Take the answer out of its queue, if it is there. The whole table is looked through: it holds what nobody has taken yet."""
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
                row = sql.failures.lock(connection, seq, None, _PATIENCE_MS)
                if row is not None and sql.failures.remove(connection, [seq]) == 1:
                    return Reply(queue, row, headers)
        except Error as error:
            if backend_of(connection).error_kind(error) is not ErrorKind.LOCKED:
                raise
    return None
