"""Waiting for results without asking all the time: who waits looks, hears that a task has ended, and looks again.

One thread per process and database listens, on a connection of its own, while somebody waits for longer than an instant. What
is heard is a hint: who hears nothing (no ear, a pooler in between, SQL Server) looks more and more seldom. It is Celery that
calls, so threads are the interpreter's own: greenlets, where gevent has patched them.
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
from ...sql.notifications import ListenerConnection

log = logging.getLogger("queueapp")

#: Seconds between two looks: the first ones, and the longest where results are heard of.
FIRST, LONGEST = 0.01, 1.0
#: Who waits for longer than this listens.
LISTEN_AFTER = 0.05
#: Seconds for which an ear listens on when nobody waits (longer, and a test database could not be dropped for that), and after
#: which one that failed is tried again.
IDLE, TRY_AGAIN = 2.0, 30.0
_SLICE = 0.5
_PROOF = "queueapp-listening"


class Waiter:
    """Somebody who waits for these tasks."""

    def __init__(self, ids: Collection[str]) -> None:
        self.ids = ids
        self.heard = threading.Event()


class ResultListener:
    """Listens for everybody who waits in this process for results of one database."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.process = os.getpid()
        self._lock = threading.Lock()
        self._waiters: set[Waiter] = set()
        self._thread: threading.Thread | None = None
        self._idle_since = self._failed_at = 0.0
        #: Whether what is told arrives.
        self.established = threading.Event()

    @contextmanager
    def of(self, waiter: Waiter) -> Iterator[None]:
        """Let a waiter hear of its tasks."""
        with self._lock:
            self._waiters.add(waiter)
            if self._thread is None and (not self._failed_at or monotonic() - self._failed_at > TRY_AGAIN):
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
            ear = backend_of(connections[self.alias]).celery_results.listener(connections[self.alias].copy())
            if ear is not None:
                with ear:
                    failed = not self._listen(ear)
        except (Error, OSError) as error:
            log.info("Results in %r are polled: %s", self.alias, str(error).split("\n", 1)[0])
        finally:
            self.established.clear()
            with self._lock:
                self._thread = None
                self._failed_at = monotonic() if failed else 0.0

    def _listen(self, ear: ListenerConnection) -> bool:
        """Listen until nobody has waited for a while; whether what is told arrives."""
        ear.connect()
        ear.listen()
        # Behind a pooler in transaction mode the LISTEN lands on some server connection: nothing ever arrives.
        if not self._is_proved(ear):
            log.info("Results in %r are polled: nothing arrives of what is told; is there a pooler?", self.alias)
            return False
        self.established.set()
        self._wake_all()  # what has ended since they looked was not told to anybody
        while not self._is_idle():
            for payload in ear.received(_SLICE):
                self._wake(payload)
        return True

    def _is_proved(self, ear: ListenerConnection) -> bool:
        # On another connection, as everything else will be told.
        teller = connections[self.alias].copy()
        try:
            backend_of(teller).celery_results.notify_waiting(teller, _PROOF)
        finally:
            teller.close()
        deadline = monotonic() + 5
        while monotonic() < deadline:
            if _PROOF in ear.received(0.5):
                return True
        return False

    def _is_idle(self) -> bool:
        with self._lock:
            if self._waiters or monotonic() - self._idle_since < IDLE:
                return False
            self._thread = None  # who comes now begins another one
            return True

    def _wake(self, task_id: str) -> None:
        with self._lock:
            for waiter in self._waiters:
                if task_id in waiter.ids:
                    waiter.heard.set()

    def _wake_all(self) -> None:
        with self._lock:
            for waiter in self._waiters:
                waiter.heard.set()


_listening: dict[str, ResultListener] = {}
_making = threading.Lock()


def listener_of(alias: str) -> ResultListener:
    """Who listens in this process."""
    with _making:
        found = _listening.get(alias)
        if found is None or found.process != os.getpid():
            found = _listening[alias] = ResultListener(alias)
        return found


def _forked() -> None:
    """The thread is the parent's, and so is its connection."""
    global _making
    _making = threading.Lock()
    _listening.clear()


os.register_at_fork(after_in_child=_forked)


def poll_times(alias: str, ids: Collection[str], timeout: float | None, interval: float) -> Iterator[float]:
    """When to look whether these tasks have ended: now, and whenever that may be so; yields the seconds since the beginning.
    Ends when the time is over, after a last look. ``interval``: the longest wait where results are not heard of."""
    began = monotonic()
    waiter, wait = Waiter(ids), FIRST
    yield 0.0
    # First for an instant, in which most results come that were asked for late.
    while (passed := monotonic() - began) < LISTEN_AFTER:
        left = wait if timeout is None else min(wait, timeout - passed)
        if left <= 0:
            return
        waiter.heard.wait(left)
        yield monotonic() - began
        wait *= 2
    if not settings.NOTIFY:
        yield from _remaining_poll_times(waiter, began, wait, timeout, lambda: interval)
        return
    ears = listener_of(alias)
    with ears.of(waiter):
        longest = lambda: LONGEST if ears.established.is_set() else interval  # noqa: E731
        yield from _remaining_poll_times(waiter, began, wait, timeout, longest)


def _remaining_poll_times(
    waiter: Waiter, began: float, wait: float, timeout: float | None, longest: Callable[[], float]
) -> Iterator[float]:
    while True:
        passed = monotonic() - began
        left = min(wait, longest())
        if timeout is not None:
            left = min(left, timeout - passed)
        if left <= 0:
            return
        if waiter.heard.wait(left):
            waiter.heard.clear()
        yield monotonic() - began
        wait *= 1.5
