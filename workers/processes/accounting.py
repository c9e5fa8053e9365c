"""The accounts of worker processes that died, on a thread of their own.

Writing a crash down may take long: a row that somebody holds, a database that does not answer, a policy or a receiver of the
user's. The supervisor's loop waits for none of it: it goes on to watch, to restart, to answer its probes and to stop.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from queueapp import callbacks
from queueapp.circuit_breaker import CircuitBreaker
from queueapp.services.connection_timeouts import without_deadline
from queueapp.services.service import Service

from . import crash_recovery

log = logging.getLogger("queueapp.workers")

#: Seconds between two looks while there is nothing to count: it is woken for what comes.
IDLE = 3600.0
#: Seconds for what is not counted yet when everybody else has ended.
LAST_TRY = 5.0


class Accounting(Service):
    """Counts crashes in the order in which they came; what cannot be written down is tried again after a while."""

    def __init__(self, on_counted: Callable[[], None]) -> None:
        """``on_counted``: what a dead process held is free again; called on this thread."""
        super().__init__("accounting")
        self._on_counted = on_counted
        self._breaker = CircuitBreaker("Accounting for crashes", kind="crash_recovery")
        self._guard = threading.Lock()
        self._open: list[crash_recovery.Crash] = []

    def add(self, crash: crash_recovery.Crash) -> None:
        """Count this one, soon. Safe from any thread."""
        with self._guard:
            self._open.append(crash)
        self.wake()

    def end(self, seconds: float = LAST_TRY) -> list[crash_recovery.Crash]:
        """Count what is left, at most for so long; returns what could not be."""
        self.stop(seconds)
        with self._guard:
            return [crash for crash in self._open if crash.open_ends]

    def serve(self) -> None:
        callbacks.guard(without_deadline)
        while True:
            # Before the look at what there is: what was added until then is tried once more.
            last = self.stopping
            with self._guard:
                before = list(self._open)
            ends = sum(crash.open_ends for crash in before)
            left, wait = crash_recovery.account(before, self._breaker)
            with self._guard:
                # Others may have been added meanwhile.
                self._open = [*left, *self._open[len(before) :]]
            if sum(crash.open_ends for crash in left) < ends:
                self._on_counted()
            if last and (wait or not left):
                return  # nothing is left, or nothing can be done about it; a row is waited for, as long as ``end`` does
            self.pause(wait if left else IDLE)
