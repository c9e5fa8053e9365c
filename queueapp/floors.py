"""Low-water marks: where a claim starts to look, so that it does not walk over what is dead, leased or not for it.

Rows deleted at the head cannot be cleaned up while any old snapshot is open; a claim that starts at the head walks over
all of them (3,300 messages a second and falling; 66,000 and flat from a floor). A floor is a hint of one process: it
only ever hides rows that came back behind it (a late commit, a lapsed lease, a rollback elsewhere), and those are found
by the rescan, which walks from zero to the floor in windows sized by the time they take. Losing a floor costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

from .sql.base import MAX_SEQ, PRIORITY, RECIPIENT, SEQ, Claimed, Range

#: A rescan window should take about this long; it is halved above twice, doubled below half of it.
WINDOW_TARGET = timedelta(milliseconds=10).total_seconds()
FIRST_WINDOW = 50_000
_SMALLEST_WINDOW = 1_000

Level = tuple[str, int]


class Floors:
    """The floors of one queue in one process, and its rescan. Shared by the receive tasks of that queue without a lock:
    a lost update only means that a few rows are looked at twice, or found by the rescan."""

    __slots__ = ("_leveled", "_low", "_position", "_span", "_turn", "levels")

    def __init__(self, levels: Iterable[Level] = (("", 0),), leveled: bool = False) -> None:
        self.levels: list[Level] = list(levels)
        self._leveled = leveled
        self._low: dict[Level, int] = dict.fromkeys(self.levels, 0)
        self._position = 0
        self._span = FIRST_WINDOW
        self._turn = 0

    def ahead(self) -> list[Range]:
        """Where to claim: every level from its floor, in claim order. Recipients of one priority take turns at being
        first, so that one with an endless backlog does not starve the others."""
        low = self._low
        if not self._leveled:
            level = self.levels[0]
            return [Range(low[level], MAX_SEQ, *level)]
        self._turn += 1
        ranges = [Range(low[level], MAX_SEQ, *level) for level in self.levels]
        first = self._turn % len(ranges)
        ranges = ranges[first:] + ranges[:first]
        ranges.sort(key=lambda r: -r.priority)
        return ranges

    def behind(self) -> list[Range]:
        """The present rescan window, cut off below each level's floor; empty when nothing lies behind."""
        start, end = self._position, self._position + self._span - 1
        found = [Range(start, min(end, low - 1), *level) for level, low in self._low.items() if start < low]
        if self._leveled:
            found.sort(key=lambda r: -r.priority)
        return found

    def rescanned(self, seconds: float) -> bool:
        """The window was looked at and took so long: go on to the next. True when that completed a cycle."""
        self._position += self._span
        if seconds < WINDOW_TARGET / 2:
            self._span = min(self._span * 2, 1 << 40)
        elif seconds > WINDOW_TARGET * 2:
            self._span = max(self._span // 2, _SMALLEST_WINDOW)
        if self._position >= max(self._low.values()):
            self._position = 0
            return True
        return False

    def passed(self, rows: Sequence[Claimed]) -> None:
        """These rows were claimed from ``ahead``: their levels' floors are above them now."""
        low = self._low
        if not self._leveled:
            level, seq = self.levels[0], rows[-1][SEQ] + 1
            if seq > low[level]:
                low[level] = seq
            return
        for row in rows:
            level = (row[RECIPIENT], row[PRIORITY])
            if row[SEQ] >= low.get(level, MAX_SEQ):
                low[level] = row[SEQ] + 1

    def lower(self, seq: int) -> None:
        """A row came back in this process (a retry, a give-back): do not wait for the rescan to find it."""
        for level, low in self._low.items():
            if seq < low:
                self._low[level] = seq

    def reset(self) -> None:
        """Look from the very beginning again."""
        for level in self._low:
            self._low[level] = 0
        self._position = 0

    @property
    def lowest(self) -> int:
        """The lowest floor, for display."""
        return min(self._low.values())
