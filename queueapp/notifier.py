"""Telling sleeping workers that a message was committed: NOTIFY, or Service Broker on SQL Server, after the commit,
throttled.

NOTIFY takes a cluster-wide lock at commit, so it never rides in the sender's transaction: that halved the throughput of
four senders. A sender that sends now and then wakes each time; of one that sends all the time (every ``DENSE`` seconds
or more often) further sends within the interval are covered by the worker, which looks again one interval after it ran
dry. At 150 messages a second that is the difference between a median wait of 26 ms and one of 3. Polling stays the
truth: a lost wake-up costs one peek delay.
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
from .sql.notifications import NotificationsUnavailable

log = logging.getLogger("queueapp")

CHANNEL = "queueapp"
#: Payload that wakes the delayed dispatcher; queue labels hold a dot, so this is none.
DELAYED = "delayed"
#: Payload that wakes who fills queues from the journal.
JOURNAL = "journal"

#: Seconds between sends, on average, below which not each of them wakes somebody. The average follows within a few
#: sends; a gap counts for ``_LONGEST`` at most, so that the first sends of a burst bring it down at once.
DENSE = 0.002
_LONGEST = 0.01
_WEIGHT = 0.3


class _Rhythm:
    """How often one payload was sent lately by this process, and when a wake-up last went out."""

    __slots__ = ("average", "seen", "told")

    def __init__(self) -> None:
        self.average = self.seen = self.told = 0.0

    def due(self, now: float, interval: float) -> bool:
        """Count a send; whether a wake-up goes out for it."""
        self.average += (min(now - self.seen, _LONGEST) - self.average) * _WEIGHT
        self.seen = now
        if self.average < DENSE and now - self.told < interval:
            return False
        self.told = now
        return True


_rhythms: dict[tuple[str, str], _Rhythm] = {}
_lock = threading.Lock()


def sent(queue: Any, connection: Any) -> None:
    """Wake the workers of a queue once the connection's transaction has committed. In eager mode this thread is the
    worker."""
    sent_to(queue._meta.label, connection)
    if settings.EAGER:
        inline.sent(queue._meta.label, connection)


def sent_to(label: str, connection: Any) -> None:
    """The same for a queue that this process may not know."""
    _after_commit(connection, label)


def delayed(connection: Any) -> None:
    """Wake the delayed dispatcher: a message was stored that may be due before it meant to look again."""
    _after_commit(connection, DELAYED)


def journaled(connection: Any) -> None:
    """Wake who fills queues from the journal: something was published that waits there for one."""
    _after_commit(connection, JOURNAL)


def prepare(connection: Any) -> str | None:
    """Make what wake-ups need in a database, where it is missing and this user may; else why there are none, in words."""
    try:
        backend_of(connection).notifications.prepare(connection)
    except (Error, NotificationsUnavailable) as error:
        return str(error).strip().split("\n", 1)[0]
    return None


def after_migrate(*, using: str, **_: Any) -> None:
    """Whoever migrates a database makes what wake-ups need there: as a rule nobody else may. Without it queues are
    polled."""
    connection = connections[using]
    if not settings.NOTIFY or not router.allow_migrate_model(using, DelayedMessage):
        return
    try:
        why = prepare(connection)
    except UnsupportedServer:
        return  # none of our tables is there
    if why is not None:
        log.info("Database %r has no wake-ups, its queues are polled: %s", using, why)


def run_every_hook(connection: Any, first: Callable[[], None] | None = None) -> bool:
    """Let each ``on_commit`` hook of the connection's transaction run after the commit, also behind one that raises,
    which is logged; whether there are any. For a transaction of ours in which code of the user ran: once it has
    committed, the message is ended, and there is nobody to whom the error could go; Django would drop the hooks behind
    it, the user's and ours. ``first`` is called between the commit and the first of them."""
    hooks = connection.run_on_commit
    if not hooks:
        return False
    connection.run_on_commit = [(savepoints, _tamed(hook), True) for savepoints, hook, _ in hooks]
    if first is not None:
        connection.run_on_commit.insert(0, (set(), first, True))
    return True


def _tamed(hook: Callable[[], Any]) -> Callable[[], None]:
    """Django lets pass what is no ``Exception``: ``sys.exit()`` or a cancelled coroutine would end the worker's thread.
    And it logs one that raises by its ``__qualname__``, which a ``functools.partial`` has not."""

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
    # A transaction that sends a thousand messages wakes once, also in a thousand savepoints: what is still pending was
    # told in savepoints that are open or released, so that whatever rolls it back takes this send with it.
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
        # The message is stored by now: a sender that got an error here would send it a second time.
        log.info("A wake-up for %s was lost, polling finds the message: %s", payload, error)
