"""Where the receive tasks of one pump claim, so that those at work at once do not walk over each other's rows.

A claim begins at the floor, or above where the claims that are under way will end if there are no gaps: two claims of 500
run side by side on neighbouring stretches. Where that guess is wrong, SKIP LOCKED does the rest. A claim that comes back
short, or fails, may leave messages below those of a later one: the floor then comes down to where it ended.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

from queueapp.receiving.floors import Floors
from queueapp.sql.base import SEQ, Claimed, Range

#: On a queue with recipients or levels claims of so many messages take turns instead, smaller ones are of slow handlers.
LARGE_CLAIM = 50
#: Seconds that a claim is given way to, either way: behind one that hangs no message waits for long.
PATIENCE = 0.1


class UnderWay:
    """One claim, from before its statement until its rows are known."""

    __slots__ = ("followed", "hole", "limit", "low", "ranges", "rows", "started")

    def __init__(self, ranges: Sequence[Range], limit: int, low: int = 0) -> None:
        self.ranges = ranges
        self.limit = limit
        self.low = low
        self.started = monotonic()
        #: What it got; None: it failed.
        self.rows: Sequence[Claimed] | None = None
        #: Another one began above it meanwhile.
        self.followed = False
        #: From where on a claim below this one has left messages to be found.
        self.hole: int | None = None


class Claiming:
    """The claims under way of one pump."""

    def __init__(self, floors: Floors) -> None:
        self._floors = floors
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._open: list[UnderWay] = []

    @contextmanager
    def claim(self, behind: Sequence[Range] | None, limit: int) -> Iterator[UnderWay]:
        """Around the statement that claims at most ``limit`` in the ranges of the claim, to which the caller gives the rows
        it got. ``behind``: the rescan window to claim in, instead of ahead of the floors."""
        if behind or self._floors.leveled:
            held = limit >= LARGE_CLAIM and self._turn.acquire(timeout=PATIENCE)
            try:
                mine = UnderWay(behind or self._floors.ahead(), limit)
                yield mine
                if mine.rows:
                    self._floors.passed(mine.rows)
            finally:
                if held:
                    self._turn.release()
            return
        mine = self._begin(limit)
        try:
            yield mine
        finally:
            self._end(mine)

    def _begin(self, limit: int) -> UnderWay:
        (only,) = self._floors.ahead()
        with self._lock:
            since = monotonic() - PATIENCE
            low = max([only.low, *(other.low + other.limit for other in self._open if other.started > since)])
            mine = UnderWay([only._replace(low=low)], limit, low)
            for other in self._open:
                other.followed = True
            self._open.append(mine)
        return mine

    def _end(self, mine: UnderWay) -> None:
        rows = mine.rows
        with self._lock:
            self._open.remove(mine)
            if rows:
                self._floors.passed(rows)
            holes = [] if mine.hole is None else [mine.hole]
            if mine.followed and (rows is None or len(rows) < mine.limit):
                # It saw the end, or nothing: what came in since then may lie between its end and a later claim's start.
                holes.append(rows[-1][SEQ] + 1 if rows else mine.low)
            if holes:
                self._leave(min(holes))

    def _leave(self, hole: int) -> None:
        """Something may lie free from here on, for the next claim and for the floor when those above it have ended."""
        for other in self._open:
            if other.low > hole:
                other.hole = hole if other.hole is None else min(other.hole, hole)
        self._floors.lower(hole)
