"""Figures that are read once for all who ask in the same moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Remembered(Generic[_T]):
    """What ``read`` returned, for so many seconds. Who asks while somebody reads waits for that."""

    def __init__(self, read: Callable[[], _T], seconds: float) -> None:
        self._read, self._seconds = read, seconds
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._found: _T | None = None

    def forget(self) -> None:
        """Whoever asks next has them read anew."""
        with self._lock:
            self._found = None

    def __call__(self) -> _T:
        """The present ones, or those of a moment ago."""
        with self._lock:
            if self._found is None or monotonic() - self._read_at > self._seconds:
                self._found = self._read()
                self._read_at = monotonic()
            return self._found
