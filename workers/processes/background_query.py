"""Queries for callers that must not wait for the database: on a thread of its own, and no more often than is useful."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import monotonic
from typing import Generic, TypeVar

from django.db import connections

log = logging.getLogger("queueapp.workers")
_T = TypeVar("_T")


class CachedQuery(Generic[_T]):
    """The result of ``read``, at most ``max_age`` seconds old.

    A caller waits for at most ``timeout`` seconds; None: there is no result by then. However many call, and however
    long the database takes, one thread reads, with one connection.
    """

    def __init__(self, read: Callable[[], _T], max_age: float = 2.0, timeout: float = 5.0) -> None:
        self._read, self._max_age, self._timeout = read, max_age, timeout
        self._cond = threading.Condition()
        self._result: _T | None = None
        self._read_at = float("-inf")
        self._reading = False

    def __call__(self) -> _T | None:
        """The result."""
        with self._cond:
            called = monotonic()
            if called - self._read_at > self._max_age:
                if not self._reading:
                    # The flag is set only once the thread runs: where no thread can be started now, a later call may.
                    # The thread waits for this lock before it reports its end.
                    threading.Thread(target=self._run, name="background-query", daemon=True).start()
                    self._reading = True
                self._cond.wait_for(lambda: not self._reading, self._timeout)
            return self._result if called - self._read_at <= self._max_age else None

    def _run(self) -> None:
        result: _T | None = None
        try:
            result = self._read()
        except Exception as error:
            log.warning("A background query failed: %s", error)
        finally:
            connections.close_all()
            with self._cond:
                if result is not None:
                    self._result, self._read_at = result, monotonic()
                self._reading = False
                self._cond.notify_all()
