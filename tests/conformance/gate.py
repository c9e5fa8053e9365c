"""A place where handlers wait until the test lets them go, and which counts how many are inside."""

from __future__ import annotations

import threading
from typing import Any

from tests.in_process_worker import DEADLINE


class Gate:
    """``enter`` is what a handler calls; the test calls the rest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._permits = threading.Semaphore(0)
        self.inside = 0
        #: How many have come out.
        self.passed = 0
        #: How many were inside when a handler came in, at most, since ``mark``.
        self.max_inside = 0

    def enter(self, *_: Any) -> None:
        with self._lock:
            self.inside += 1
            self.max_inside = max(self.max_inside, self.inside)
        try:
            if not self._permits.acquire(timeout=DEADLINE):
                raise AssertionError("the gate was not opened")
        finally:
            with self._lock:
                self.inside -= 1
                self.passed += 1

    def mark(self) -> None:
        with self._lock:
            self.max_inside = 0

    def let(self, count: int) -> None:
        """Let this many out, now or as they come."""
        self._permits.release(count)
