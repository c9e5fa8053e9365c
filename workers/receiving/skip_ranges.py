"""Stretches of a queue in which this process has no consumer for anything that is free, so that claims step over them.

They are ranges and not a list: a million messages of a type that only others take are one stretch. A stretch is a hint:
what comes back inside it (a lease that lapsed elsewhere, a late commit) is found by reading it again, a piece at a time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from queueapp.sql.claims import SeqRange

#: More stretches of a level than this are joined where they are nearest to each other: a claim names each of them.
MOST = 64


class SkipRanges:
    """The stretches of one level, apart from each other and ascending; both ends belong to them."""

    __slots__ = ("_highs", "_lows", "_reread")

    def __init__(self) -> None:
        self._lows: list[int] = []
        self._highs: list[int] = []
        self._reread = 0

    def __bool__(self) -> bool:
        return bool(self._lows)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._lows, self._highs, strict=True))

    def add(self, low: int, high: int) -> None:
        """Nothing free from ``low`` to ``high`` is for this process."""
        first = bisect_left(self._highs, low - 1)
        last = bisect_right(self._lows, high + 1)
        if first < last:
            low, high = min(low, self._lows[first]), max(high, self._highs[last - 1])
        self._lows[first:last], self._highs[first:last] = [low], [high]
        if len(self._lows) > MOST:
            gaps = [low - high for low, high in zip(self._lows[1:], self._highs, strict=False)]
            place = gaps.index(min(gaps))
            del self._lows[place + 1], self._highs[place]

    def remove(self, seq: int) -> None:
        """This one is to be looked at again."""
        place = bisect_left(self._highs, seq)
        if place == len(self._highs) or self._lows[place] > seq:
            return
        parts = [(self._lows[place], seq - 1), (seq + 1, self._highs[place])]
        parts = [part for part in parts if part[0] <= part[1]]
        self._lows[place : place + 1] = [low for low, _ in parts]
        self._highs[place : place + 1] = [high for _, high in parts]

    def after(self, low: int) -> int:
        """The first place from ``low`` on that is in no stretch."""
        place = bisect_left(self._highs, low)
        if place < len(self._highs) and self._lows[place] <= low:
            return self._highs[place] + 1
        return low

    def outside(self, whole: SeqRange) -> list[SeqRange]:
        """What of a range is in no stretch, ascending."""
        found, low = [], whole.low
        for place in range(bisect_left(self._highs, whole.low), len(self._lows)):
            if self._lows[place] > whole.high:
                break
            if self._lows[place] > low:
                found.append(whole._replace(low=low, high=self._lows[place] - 1))
            low = self._highs[place] + 1
        if low <= whole.high:
            found.append(whole._replace(low=low))
        return found

    def to_reread(self) -> tuple[int, int] | None:
        """Where to read again: a stretch, or what is left of it since the last time; None: there is none."""
        if not self._lows:
            return None
        place = bisect_left(self._highs, self._reread)
        if place == len(self._highs):
            place = self._reread = 0
        return max(self._reread, self._lows[place]), self._highs[place]

    def reread(self, reached: int) -> None:
        """It was read up to here."""
        self._reread = reached + 1
