"""Low-water marks: where a claim starts to look, so that it does not walk over what is dead, leased or not for it.

Rows deleted at the head cannot be cleaned up while any old snapshot is open; a claim that starts at the head walks over
all of them (3,300 messages a second and falling; 66,000 and flat from a floor). A floor is a hint of one process: it
only ever hides rows that came back behind it (a late commit, a lapsed lease, a rollback elsewhere), and those are found
by the rescan, which walks from zero to the floor in windows sized by the time they take. Losing a floor costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from typing import Any

from ..sql.claimed import MAX_SEQ, PRIORITY, RECIPIENT, SEQ, Claimed, Range
from .scan_window import FIRST_WINDOW, Walk

#: Where messages come back all the time, the rescan goes on after so many looks just behind the floor.
_NEARS_IN_A_ROW = 8
#: Where they come back with every claim, a floor that stayed so often rises; looks just behind it find the rest.
_STAYS_IN_A_ROW = 8

Level = tuple[str, int]


class Floors:
    """The floors of one queue in one process, and its rescan. Shared by the receive tasks of that queue without a lock:
    a lost update only means that a few rows are looked at twice, or found by the rescan."""

    __slots__ = (
        "_low",
        "_near",
        "_nears",
        "_place",
        "_returns",
        "_returns_seen",
        "_stayed",
        "_trip",
        "_turn",
        "_walk",
        "leveled",
        "levels",
    )

    def __init__(self, levels: Iterable[Level] = (("", 0),), leveled: bool = False) -> None:
        self.levels: list[Level] = list(levels)
        self.leveled = leveled
        self._low: MutableSequence[int] | memoryview[int] = [0] * len(self.levels)
        #: Two places. How often rows came back that were taken lately, told by who gave them back: the floor alone does not
        #: tell, a claim that was under way meanwhile raises it again. And how often it came down for another reason.
        self._returns: MutableSequence[int] | memoryview[int] = [0, 0]
        self._returns_seen = 0
        #: Where the look for them has got to, just behind the floor; None: no look is due.
        self._near: int | None = None
        #: Looks for them since the rescan went on.
        self._nears = 0
        self._place = {level: place for place, level in enumerate(self.levels)}
        #: The rescan, from zero to the floor.
        self._walk = Walk()
        #: What the quickest of its looks took, in seconds: the way to the server and back, which no smaller window shortens.
        self._trip = math.inf
        self._turn = 0
        #: Claims in a row that did not raise a floor because something had come back.
        self._stayed = 0

    def share(
        self, places: memoryview[int] | MutableSequence[int], returns: memoryview[int] | MutableSequence[int]
    ) -> None:
        """Keep the floors in these places from now on, where other processes with the same levels keep theirs: a claim
        then starts above what any of them has taken, and does not walk over it. ``returns`` is two places: a change of
        the first says that rows came back that were taken lately, of the second that a floor came down otherwise."""
        for place, low in enumerate(self._low):
            places[place] = max(places[place], low)
        self._low, self._returns = places, returns

    def ahead(self) -> list[Range]:
        """Where to claim: every level from its floor, in claim order. Recipients of one priority take turns at being
        first, so that one with an endless backlog does not starve the others."""
        low = self._low
        if not self.leveled:
            return [Range(low[0], MAX_SEQ, *self.levels[0])]
        self._turn += 1
        ranges = [Range(low[place], MAX_SEQ, *level) for place, level in enumerate(self.levels)]
        first = self._turn % len(ranges)
        ranges = ranges[first:] + ranges[:first]
        ranges.sort(key=lambda r: -r.priority)
        return ranges

    def behind(self) -> list[Range]:
        """The present rescan window, cut off below each level's floor; empty when nothing lies behind. After rows came
        back it is the one just behind the floor, and then again where the rescan had got to."""
        if self._near is None and self._returns[0] != self._returns_seen and self._nears < _NEARS_IN_A_ROW:
            self._returns_seen = self._returns[0]
            self._nears += 1
            self._near = max(0, max(self._low) - FIRST_WINDOW)
        start, end = self._window
        floors = zip(self.levels, self._low, strict=False)
        found = [Range(start, min(end, low) - 1, *level) for level, low in floors if start < min(end, low)]
        if self.leveled:
            found.sort(key=lambda r: -r.priority)
        return found

    def rescanned(self, seconds: float, reached: int = 0) -> bool:
        """The window was looked at, up to the seq ``reached`` if not to its end, and took so long (0: it is known without a look):
        go on to the next. True when that completed a cycle."""
        if self._near is not None:
            self._near = reached + 1 if reached else None
            return False
        self._nears = 0
        return self._walk.go_on(max(self._low), self._alone(seconds), reached)

    @property
    def cycle_seconds(self) -> float:
        """What the last cycle of the rescan, or the present one, has taken the server."""
        return self._walk.taken

    def _alone(self, seconds: float) -> float:
        """What of the time of a look, which is known now, it took the server itself."""
        if seconds:
            self._trip = min(self._trip, seconds)
        return max(0.0, seconds - self._trip)

    def connected_anew(self) -> None:
        """The next look may go to another server, which may be farther away."""
        self._trip = math.inf

    @property
    def _window(self) -> tuple[int, int]:
        """The seqs of the present window, from and to (exclusive)."""
        if self._near is not None:
            return self._near, self._near + FIRST_WINDOW
        return self._walk.window()

    def is_present(self, only: Range) -> bool:
        """Whether it is of the present window: two may have looked at one, and go on from it once."""
        start, end = self._window
        return start <= only.low < end

    def count_in(self, ranges: Sequence[Range], rows: Sequence[Claimed]) -> int:
        """How many of the rows lie in these ranges, each of its own level."""
        found = 0
        for row in rows:
            level, seq = self.level_of(row), row[SEQ]
            found += any(only.low <= seq <= only.high and (only.recipient, only.priority) == level for only in ranges)
        return found

    @property
    def rescanning(self) -> bool:
        """Whether a part of what lies behind the floors is still to be looked at, and soon."""
        return self._near is not None or self._walk.position is not None

    @property
    def told(self) -> bool:
        """Whether something came back just behind the floor, which is looked for before the rescan goes on."""
        return self._near is not None or self._returns[0] != self._returns_seen

    @property
    def returns(self) -> int:
        """How often rows have come back that were taken lately, in all processes that share these floors."""
        return self._returns[0]

    @property
    def came_down(self) -> int:
        """How often a floor came down, for whatever reason, in all processes that share these floors."""
        return self._returns[0] + self._returns[1]

    def passed(self, rows: Sequence[Claimed], returns: int) -> None:
        """These rows were claimed: their levels' floors are above them now. ``returns``: as it was when the claim began. If
        something has come back since then it may lie below these rows, unseen by that claim: the floors stay."""
        if returns != self._returns[0]:
            self._stayed += 1
            if self._stayed < _STAYS_IN_A_ROW:
                return
        self._stayed = 0
        low = self._low
        # The highest seq of all, which somebody may insert, has none above it, and would hide all others.
        if not self.leveled:
            seq = rows[-1][SEQ]
            if low[0] <= seq < MAX_SEQ:
                low[0] = seq + 1
            return
        for row in rows:
            place = self._place.get((row[RECIPIENT], row[PRIORITY]))
            if place is not None and low[place] <= row[SEQ] < MAX_SEQ:
                low[place] = row[SEQ] + 1

    def level_of(self, row: Claimed) -> Level:
        """The level under which a claimed row was found."""
        if not self.leveled:
            return self.levels[0]
        level = row[RECIPIENT], row[PRIORITY]
        return level if level in self._place else ("", row[PRIORITY])

    def step_over(self, level: Level, after: Callable[[int], int]) -> None:
        """Move a level's floor to the place that ``after`` gives for it: what lies between is not for this process."""
        place = self._place.get(level)
        if place is not None:
            self._low[place] = min(max(self._low[place], after(self._low[place])), MAX_SEQ)

    def seen(self, first: int) -> None:
        """A peek ahead found nothing below ``first``: no claim needs to walk there again."""
        if not self.leveled and self._low[0] < first < MAX_SEQ:
            self._low[0] = first

    def lower(self, seq: int, *, told: bool = True) -> None:
        """A row came back (a retry, a give-back): do not wait for the rescan to find it. ``told=False``: nobody has seen it
        yet, so that no claim under way can have passed it."""
        for place, low in enumerate(self._low):
            if seq < low:
                self._low[place] = seq
        self._returns[0 if told else 1] += 1

    def lower_all(self, seqs: Sequence[int]) -> None:
        """These came back."""
        self.lower(min(seqs))

    def reset(self) -> None:
        """Look from the very beginning again."""
        for place in range(len(self._low)):
            self._low[place] = 0
        self._walk.position = None

    @property
    def lowest(self) -> int:
        """The lowest floor, for display."""
        return min(self._low)


# -- floors of this process ----------------------------------------------------------------------------------------

_floors: dict[tuple[Any, ...], Floors] = {}


def floors_of(
    queue: Any,
    alias: str,
    levels: tuple[tuple[str, int], ...],
    leveled: bool,
    make: Callable[[tuple[tuple[str, int], ...], bool], Floors] = Floors,
) -> Floors:
    """The floors that this process keeps for a queue and a set of levels."""
    key = (queue._meta.db_table, alias, levels)
    floors = _floors.get(key)
    if floors is None:
        floors = _floors[key] = make(levels, leveled)
    return floors


def lower_floors(queue: Any, alias: str, seqs: Sequence[int]) -> None:
    """Rows of this queue came back in this process: every floor above them comes down to them."""
    for (table, at, _), floors in list(_floors.items()):
        if table == queue._meta.db_table and at == alias:
            floors.lower_all(seqs)
