"""Notifies sleeping workers that a message was committed: NOTIFY, or Service Broker on SQL Server, after the commit,
throttled.

NOTIFY takes a cluster-wide lock at commit, so it is never part of the sender's transaction: that halved the throughput
of four senders. A sender that sends now and then notifies each time. Of one that sends all the time (every ``DENSE``
seconds or more often), further sends within the interval are covered by the worker, which peeks again one interval
after it ran dry. At 150 messages a second that is the difference between a median wait of 26 ms and one of 3. Polling
does not depend on it: a lost notification costs one peek delay.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import lru_cache
from time import monotonic
from typing import Any

from django.db import Error, connections, router

from . import callbacks, inline
from .conf import settings
from .errors import UnsupportedServer
from .models import DelayedMessage
from .sql import backend_of
from .sql.database import NotificationsUnavailable

log = logging.getLogger("queueapp")

CHANNEL = "queueapp"
#: Payload that wakes the delayed dispatcher; queue labels hold a dot, so this is none.
DELAYED = "delayed"
#: Payload that wakes the journal service.
JOURNAL = "journal"

#: Average seconds between sends below which not each of them notifies. The average follows within a few sends; a gap
#: counts for ``_LONGEST`` at most, so that the first sends of a burst bring it down at once.
DENSE = 0.002
_LONGEST = 0.01
_WEIGHT = 0.3


class _Rhythm:
    """How often this process has sent one payload lately, and when it last notified."""

    __slots__ = ("average", "last_sent", "notified")

    def __init__(self) -> None:
        self.average = self.last_sent = self.notified = 0.0

    def due(self, now: float, interval: float) -> bool:
        """Count a send; returns whether to notify."""
        self.average += (min(now - self.last_sent, _LONGEST) - self.average) * _WEIGHT
        self.last_sent = now
        if self.average < DENSE and now - self.notified < interval:
            return False
        self.notified = now
        return True


_rhythms: dict[tuple[str, str], _Rhythm] = {}
_lock = threading.Lock()


def forget() -> None:
    """The next message of every queue notifies at once (tests)."""
    _rhythms.clear()


def sent(queue: Any, connection: Any) -> None:
    """Notify the workers of a queue once the connection's transaction has committed. In eager mode this thread is the
    worker."""
    sent_to(queue._meta.label, connection)
    if settings.EAGER:
        inline.sent(queue._meta.label, connection)


def sent_to(label: str, connection: Any) -> None:
    """The same for a queue that may be unknown to this process."""
    _after_commit(connection, label)


def delayed(connection: Any) -> None:
    """Wake the delayed dispatcher: a message was stored that may be due before its next round."""
    _after_commit(connection, DELAYED)


def journaled(connection: Any) -> None:
    """Wake the journal service: something was published that a queue gets from the journal."""
    _after_commit(connection, JOURNAL)


def prepare(connection: Any) -> str | None:
    """Create what notifications need in a database, where it is missing and this user may; returns why there are none,
    or None."""
    try:
        backend_of(connection).notifications.prepare(connection)
    except (Error, NotificationsUnavailable) as error:
        return str(error).strip().split("\n", 1)[0]
    return None


def after_migrate(*, using: str, **_: Any) -> None:
    """After ``migrate``: create what notifications need, which as a rule only the user that migrates may do. Without it
    queues are polled."""
    connection = connections[using]
    if not settings.NOTIFY or not router.allow_migrate_model(using, DelayedMessage):
        return
    try:
        why = prepare(connection)
    except UnsupportedServer:
        return  # a database without tables of this app
    if why is not None:
        log.info("Database %r has no notifications; its queues are polled: %s", using, why)


def run_every_hook(connection: Any, first: Callable[[], None] | None = None) -> bool:
    """Let every ``on_commit`` hook of the connection's transaction run after the commit, also after one that raises,
    which is logged; returns whether there are any. For a transaction of the engine in which user code ran: once it has
    committed, the message has ended and no caller is left for the error; Django would skip the remaining hooks, of the
    project and of the engine. ``first`` is called between the commit and the first of them."""
    hooks = connection.run_on_commit
    if not hooks:
        return False
    connection.run_on_commit = [(savepoints, _logged_hook(hook), True) for savepoints, hook, _ in hooks]
    if first is not None:
        connection.run_on_commit.insert(0, (set(), first, True))
    return True


def _logged_hook(hook: Callable[[], Any]) -> Callable[[], None]:
    """Django does not catch what is no ``Exception``: ``sys.exit()`` or a cancelled coroutine would end the worker's
    thread. And it logs a hook that raises by its ``__qualname__``, which a ``functools.partial`` does not have."""

    def run() -> None:
        try:
            callbacks.run(f"the hook {name}", hook)
        except Exception:
            raise
        except BaseException as error:
            raise RuntimeError(f"{type(error).__name__} in a hook that runs after the commit") from error

    name = run.__qualname__ = str(getattr(hook, "__qualname__", type(hook).__qualname__))
    return run


def _after_commit(connection: Any, payload: str) -> None:
    if not settings.NOTIFY or not backend_of(connection).notifications.may_notify(connection):
        return
    if not connection.in_atomic_block:
        _notify(connection.alias, payload, connection)
        return
    wake = _callback(connection.alias, payload)
    pending = connection.run_on_commit
    # A transaction that sends a thousand messages notifies once, also in a thousand savepoints: a hook that is still
    # pending belongs to savepoints that are open or released, so whatever rolls it back rolls back this send.
    if not (pending and pending[-1][1] is wake):
        connection.on_commit(wake, robust=True)


@lru_cache(maxsize=4096)
def _callback(alias: str, payload: str) -> Any:
    def wake() -> None:
        _notify(alias, payload)

    return wake


def _notify(alias: str, payload: str, connection: Any = None) -> None:
    key = (alias, payload)
    with _lock:
        rhythm = _rhythms.get(key)
        if rhythm is None:
            rhythm = _rhythms[key] = _Rhythm()
        if not rhythm.due(monotonic(), settings.NOTIFY_INTERVAL.total_seconds()):
            return
    if connection is None:
        connection = connections[alias]
    try:
        backend_of(connection).notifications.notify(connection, CHANNEL, payload)
    except Error as error:
        # The message is stored: a sender that got an error here would send it a second time.
        log.info("A notification for %s was lost; polling finds the message: %s", payload, error)
