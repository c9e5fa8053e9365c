"""How often each message was handled, for another process: one byte per message number in a shared file."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from tests.benchmarks.rig.shared_file import SharedArray

ENVIRONMENT = "BENCH_TALLY"


class Tally(SharedArray):
    """Counts by message number, from 0."""

    code = "B"

    def mark(self, number: int) -> None:
        """The message with this number is being handled."""
        self._places[number] += 1

    def clear(self) -> None:
        """Nothing was handled yet."""
        self._map[:] = bytes(self.size)

    def handled(self) -> int:
        """How many different messages were handled. 100 µs for a million."""
        return self.size - self._map[:].count(0)

    def missing(self, of: int) -> int:
        """How many of the first so many messages were not."""
        return self._map[:of].count(0)

    def doubled(self) -> int:
        """How many were handled more than once."""
        counts = self._map[:]
        return self.size - counts.count(0) - counts.count(1)


@lru_cache(maxsize=1)
def shared_tally() -> Tally:
    """The one that the environment of this process names."""
    return Tally(Path(os.environ[ENVIRONMENT]))
