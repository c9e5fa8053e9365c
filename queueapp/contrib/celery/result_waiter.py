"""Waiting for results without frequent polling: a waiter polls, is notified that a task has ended, and polls again.

One thread per process and database listens, on its own connection, while a caller waits for longer than an instant. A
notification is a hint: without notifications (SQL Server, a connection pooler) polls become less and less frequent. The
calls come from Celery, so threads are the interpreter's own: greenlets where gevent has patched them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from time import monotonic

from django.db import Error, connections

from ...conf import settings
from ...sql import backend_of
from ...sql.database import ListenerConnection

log = logging.getLogger("queueapp")

#: Seconds between two polls: the first ones, and the longest while notifications arrive.
FIRST_WAIT, MAX_WAIT = 0.01, 1.0
#: A caller that waits for longer than this many seconds listens for notifications.
LISTEN_AFTER = 0.05
#: Seconds that the listener stays connected without waiters (a longer time would block the dropping of a test
#: database), and seconds after which a failed listener is retried.
LINGER, RETRY_AFTER = 2.0, 30.0
_READ_TIMEOUT = 0.5
_PROBE = "queueapp-listening"


class ResultWaiter:
    """A caller that waits for these tasks."""

    def __init__(self, ids: Collection[str]) -> None:
        self.ids = ids
        self.notified = threading.Event()


class ResultListener:
    """Listens for all callers of this process that wait for results in one database."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.process = os.getpid()
        self._lock = threading.Lock()
        self._waiters: set[ResultWaiter] = set()
        self._thread: threading.Thread | None = None
        self._idle_since = self._failed_at = 0.0
        #: Whether notifications arrive.
        self.established = threading.Event()

    @contextmanager
    def subscribed(self, waiter: ResultWaiter) -> Iterator[None]:
        """Notify a waiter of its tasks meanwhile."""
        with self._lock:
            self._waiters.add(waiter)
            if self._thread is None and (not self._failed_at or monotonic() - self._failed_at > RETRY_AFTER):
                self._thread = threading.Thread(target=self._run, name=f"results of {self.alias}", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._waiters.discard(waiter)
                self._idle_since = monotonic()

    def _run(self) -> None:
        failed = True
        try:
            connection = backend_of(connections[self.alias]).celery_results.listener(connections[self.alias].copy())
            if connection is not None:
                with connection:
                    failed = not self._listen(connection)
        except (Error, OSError) as error:
            log.info("Results in %r are polled, not notified: %s", self.alias, str(error).split("\n", 1)[0])
        finally:
            self.established.clear()
            with self._lock:
                self._thread = None
                self._failed_at = monotonic() if failed else 0.0

    def _listen(self, connection: ListenerConnection) -> bool:
        """Listen until there has been no waiter for a while; returns whether notifications arrive."""
        connection.connect()
        connection.listen()
        # Behind a pooler in transaction mode the LISTEN lands on some server connection: nothing ever arrives.
        if not self._probe_succeeds(connection):
            log.info(
                "Results in %r are polled: no notification arrives. Is there a connection pooler in transaction mode?",
                self.alias,
            )
            return False
        self.established.set()
        self._wake_all()  # tasks that ended since the last poll sent no notification to this listener
        while not self._is_idle():
            for payload in connection.received(_READ_TIMEOUT):
                self._wake(payload)
        return True

    def _probe_succeeds(self, connection: ListenerConnection) -> bool:
        # On another connection, as all other notifications.
        sender = connections[self.alias].copy()
        try:
            backend_of(sender).celery_results.notify_waiting(sender, _PROBE)
        finally:
            sender.close()
        deadline = monotonic() + 5
        while monotonic() < deadline:
            if _PROBE in connection.received(0.5):
                return True
        return False

    def _is_idle(self) -> bool:
        with self._lock:
            if self._waiters or monotonic() - self._idle_since < LINGER:
                return False
            self._thread = None  # the next waiter starts another one
            return True

    def _wake(self, task_id: str) -> None:
        with self._lock:
            for waiter in self._waiters:
                if task_id in waiter.ids:
                    waiter.notified.set()

    def _wake_all(self) -> None:
        with self._lock:
            for waiter in self._waiters:
                waiter.notified.set()


listeners: dict[str, ResultListener] = {}
_listeners_lock = threading.Lock()


def listener_of(alias: str) -> ResultListener:
    """The listener of this process."""
    with _listeners_lock:
        found = listeners.get(alias)
        if found is None or found.process != os.getpid():
            found = listeners[alias] = ResultListener(alias)
        return found


def _after_fork() -> None:
    """Forget the threads and connections of the parent."""
    global _listeners_lock
    _listeners_lock = threading.Lock()
    listeners.clear()


os.register_at_fork(after_in_child=_after_fork)


def poll_times(alias: str, ids: Collection[str], timeout: float | None, interval: float) -> Iterator[float]:
    """Yields when to poll for these tasks: now, and whenever one of them may have ended; the value is the seconds since
    the start. Ends after the timeout, with a last poll. ``interval``: the longest wait without notifications."""
    began = monotonic()
    waiter, wait = ResultWaiter(ids), FIRST_WAIT
    yield 0.0
    # A few fast polls first: most results that a caller asks for late exist already.
    while (passed := monotonic() - began) < LISTEN_AFTER:
        remaining = wait if timeout is None else min(wait, timeout - passed)
        if remaining <= 0:
            return
        waiter.notified.wait(remaining)
        yield monotonic() - began
        wait *= 2
    if not settings.NOTIFY:
        yield from _remaining_poll_times(waiter, began, wait, timeout, lambda: interval)
        return
    listener = listener_of(alias)
    with listener.subscribed(waiter):
        longest = lambda: MAX_WAIT if listener.established.is_set() else interval  # noqa: E731
        yield from _remaining_poll_times(waiter, began, wait, timeout, longest)


def _remaining_poll_times(
    waiter: ResultWaiter, began: float, wait: float, timeout: float | None, longest: Callable[[], float]
) -> Iterator[float]:
    while True:
        passed = monotonic() - began
        remaining = min(wait, longest())
        if timeout is not None:
            remaining = min(remaining, timeout - passed)
        if remaining <= 0:
            return
        if waiter.notified.wait(remaining):
            waiter.notified.clear()
        yield monotonic() - began
        wait *= 1.5
