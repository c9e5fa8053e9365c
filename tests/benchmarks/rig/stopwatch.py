"""When a handler ran, for another process: an array of times in a shared file, one place per message number.

The monotonic clock is one for all processes of a machine. A place is written by one handler only, so nothing is locked.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from time import monotonic_ns

from tests.benchmarks.rig.shared_file import SharedArray

ENVIRONMENT = "BENCH_STOPWATCH"


class Stopwatch(SharedArray):
    """``size`` places, used round and round."""

    code = "q"

    def stamp(self, number: int) -> None:
        """The message with this number is being handled now."""
        self._places[number % self.size] = monotonic_ns()

    def take(self, number: int) -> int:
        """When that was, in nanoseconds (0: not yet); the place is free again."""
        place = number % self.size
        time, self._places[place] = self._places[place], 0
        return time


@lru_cache(maxsize=1)
def shared_stopwatch() -> Stopwatch:
    """The one that the environment of this process names."""
    return Stopwatch(Path(os.environ[ENVIRONMENT]))
