"""The delayed dispatcher: moves due messages to their queues (spec/002), and sleeps until the next one is due.

One elected dispatcher per database does the work; the others wait for its lease to lapse. It is woken by a message
stored anywhere that may be due sooner. A round moves a batch in one transaction; a full batch is followed at once.
"""

from __future__ import annotations

import logging
import threading
import uuid
from datetime import timedelta

from django.db import Error, connections

from queueapp import delayed
from queueapp.conf import settings
from queueapp.sql import ErrorKind, backend_of

from .circuit_breaker import CircuitBreaker
from .leadership import Leadership

log = logging.getLogger("workers")


class DelayedDispatcher(threading.Thread):
    """Dispatches for one database until stopping."""

    def __init__(self, alias: str, holder: uuid.UUID, stopping: threading.Event) -> None:
        super().__init__(name=f"dispatcher-{alias}", daemon=True)
        self.alias = alias
        self.leadership = Leadership(alias, "delayed dispatcher", holder)
        self.dispatched = 0
        self._stopping = stopping
        self._wake = threading.Event()
        self._breaker = CircuitBreaker(f"Delayed dispatch in {alias}")

    def wake(self) -> None:
        """A delayed message was stored: it may be due before the dispatcher meant to look again."""
        self._wake.set()

    def stop(self) -> None:
        """End the wait; ``stopping`` has to be set before."""
        self._wake.set()

    def run(self) -> None:
        woken = False
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                wait = self._round()
                self._breaker.success()
            except Error as error:
                wait = self._failed(error)
            if woken:
                # Wake-ups are throttled: what was stored just after this one is seen by looking once more.
                wait = min(wait, settings.WAKE_UP_INTERVAL.total_seconds())
            woken = wait > 0 and self._wake.wait(wait)
        try:
            self.leadership.resign()
        except Error as error:
            log.info("The dispatcher of %r could not resign, its lease will lapse: %s", self.alias, error)
        connections[self.alias].close()

    def _round(self) -> float:
        """One round; returns how many seconds to wait for the next."""
        poll = settings.DISPATCH_POLL.total_seconds()
        if not self.leadership.hold():
            return poll
        limit = settings.DISPATCH_BATCH
        done = delayed.dispatch_due(self.alias, limit)
        self.dispatched += done.moved
        if done.poisoned:
            log.error(
                "%d delayed messages in %r went to poison: their queue does not exist.", done.poisoned, self.alias
            )
        if done.moved + done.poisoned >= limit:
            return 0.0
        due = delayed.next_due_in(self.alias)
        if due is None:
            return poll
        # Overdue and yet not moved: somebody else has it locked.
        return min(poll, max(due, timedelta(milliseconds=5)).total_seconds())

    def _failed(self, error: Error) -> float:
        connection = connections[self.alias]
        if backend_of(connection).error_kind(error) is ErrorKind.DEADLOCK:
            return 0.01
        connection.close()
        return self._breaker.failure(error)
