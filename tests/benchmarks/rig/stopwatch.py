"""When a handler ran, told to another process: an array of times in a shared file, one place per message number.

The monotonic clock is one for all processes of a machine. A place is written by one handler only, so nothing is locked.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from functools import lru_cache
from pathlib import Path
from time import monotonic_ns

ENVIRONMENT = "BENCH_STOPWATCH"


class Stopwatch:
    """``size`` places, used round and round."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._times = memoryview(self._map).cast("q")
        self.size = len(self._times)

    @classmethod
    def create(cls, size: int) -> Stopwatch:
        """A new one, all places zero."""
        descriptor, name = tempfile.mkstemp(prefix="queueapp-stopwatch-")
        os.ftruncate(descriptor, size * 8)
        os.close(descriptor)
        return cls(Path(name))

    def stamp(self, number: int) -> None:
        """The message with this number is being handled now."""
        self._times[number % self.size] = monotonic_ns()

    def take(self, number: int) -> int:
        """When that was, in nanoseconds (0: not yet); the place is free again."""
        place = number % self.size
        time, self._times[place] = self._times[place], 0
        return time

    def remove(self) -> None:
        """Unmap and delete the file."""
        self._times.release()
        self._map.close()
        self.path.unlink(missing_ok=True)


@lru_cache(maxsize=1)
def shared_stopwatch() -> Stopwatch:
    """The one that the environment of this process names."""
    return Stopwatch(Path(os.environ[ENVIRONMENT]))
