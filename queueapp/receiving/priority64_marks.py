"""Where a claim looks on a queue with a priority of 64 bits: one place for the whole queue, and what lies before it by name.

Messages stand in one order, by priority and then by seq (``place_of``). Everything before the *floor* was claimed, or was not to
be had, when this process went by: under an old snapshot it is dead rows that no claim may walk over again. What is to be had
there all the same is held by its place, in order, and claimed by it:

* what has **arrived** since: seqs above the highest that was looked at, read by the primary key before each claim, so that the
  most urgent newcomer is the next message and costs one seek;
* what **came back** in this process, whose place its claim has told;
* what a **look** finds that goes over all seqs, a window at a time, and each time over the last few thousand: late commits, and
  what came back elsewhere.

All of it is a hint of this process. Where a backlog arrives before the floor and not a few messages, the floor goes down to it.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from time import monotonic
from typing import Any, NamedTuple

from ..sql.claimed import MAX_PLACE, MAX_SEQ, PRIORITY, SEQ, WINDOW_ROWS, Claimed, Range, place_of
from .low_water_marks import Floors, Level, floors_of
from .scan_window import REST

#: Seqs read at once for what has arrived, and how many times before one claim.
ARRIVED_AT_ONCE, ARRIVED_PIECES = 5_000, 4
#: Places before the floor that are held; with more of them the floor comes down.
MOST_HELD = 10_000
#: Places of messages that were claimed lately, for those that come back.
MOST_REMEMBERED = 20_000
#: The last seqs that each look goes over: a transaction that commits late has been open for so many sends, mostly. (2 ms.)
NEAR = 1_000
#: Places held that a look counts.
WINDOW_PLACES = 500


class Taken(NamedTuple):
    """What a claim began with: places before the floor, the floor, how often that had come down, and the last seq that was
    looked at."""

    places: list[int]
    floor: int
    lowered: int
    looked_to: int | None

    @property
    def ranges(self) -> list[Range]:
        """Where it looks, in order."""
        return [*(Range(place, place) for place in self.places), Range(self.floor, MAX_PLACE)]


class RankedFloors(Floors):
    """The floor of such a queue in one process; safe from any thread."""

    __slots__ = ("_held", "_lock", "_looked_to", "_places", "floor", "lowered", "rescan_at")

    def __init__(self, levels: Iterable[Level] = (("", 0),), leveled: bool = True) -> None:
        super().__init__(levels, leveled=True)
        self._lock = threading.Lock()
        self.floor = 0
        #: How often the floor came down: a claim that began before that does not raise it.
        self.lowered = 0
        #: Places before the floor where something is to be had, ascending.
        self._held: list[int] = []
        #: The highest seq that was looked at; None: nobody has looked yet.
        self._looked_to: int | None = None
        self._places: OrderedDict[int, int] = OrderedDict()
        #: When the rescan goes on, by the monotonic clock.
        self.rescan_at = 0.0

    # -- claiming -----------------------------------------------------------------------------------------------------

    def take(self, limit: int) -> Taken:
        """What a claim of so many begins with; the places held are its own from now on."""
        with self._lock:
            held, self._held = self._held[:limit], self._held[limit:]
            return Taken(held, self.floor, self.lowered, self._looked_to)

    def ended(self, taken: Taken, rows: Sequence[Claimed] | None, full: bool, *, failed: bool = False) -> None:
        """A claim that began so got these rows; None: nothing is known of what is there. ``failed``: what it had taken is free again,
        and others may have passed it."""
        with self._lock:
            if failed:
                self.floor = min(self.floor, taken.floor)
                self.lowered += 1
                self._returns[0] += 1
            if rows is None:
                self._hold(taken.places)
                return
            last = -1
            for row in rows:
                place = place_of(row[PRIORITY], row[SEQ])
                self._places[row[SEQ]] = place
                last = max(last, place)
            while len(self._places) > MOST_REMEMBERED:
                self._places.popitem(last=False)
            if full:
                self._hold([place for place in taken.places if place > last])
            if last >= self.floor and taken.lowered == self.lowered:
                self.floor = last + 1
                # What others have looked at meanwhile was before the new floor or not by the old one, and this claim may not
                # have seen it yet.
                if taken.looked_to is not None and self._looked_to is not None:
                    self._looked_to = min(self._looked_to, taken.looked_to)

    def place_of(self, seq: int) -> int | None:
        """The place of a message that was claimed here lately."""
        return self._places.get(seq)

    def lower(self, seq: int, *, told: bool = True) -> None:
        """A message came back; ``seq`` may be its place already."""
        with self._lock:
            place = seq if seq > MAX_SEQ else self._places.get(seq)
            if place is not None:
                self._hold([place])
        if place is None or told:
            self._returns[0] += 1

    def lower_all(self, seqs: Sequence[int]) -> None:
        for seq in seqs:
            self.lower(seq)

    def _hold(self, places: Sequence[int]) -> None:
        if len(self._held) + len(places) > MOST_HELD:
            # A backlog: one walk from its best place on costs less than a seek for each of them.
            self.floor = min(self.floor, *self._held[:1], *places)
            self.lowered += 1
            self._held = []
            return
        for place in places:
            at = bisect_right(self._held, place)
            if place < self.floor and (not at or self._held[at - 1] != place):
                insort(self._held, place)

    # -- looking ------------------------------------------------------------------------------------------------------

    def look_for_arrived(self, sql: Any, connection: Any) -> None:
        """Read what has arrived since the last time."""
        if self._looked_to is None:
            # The highest seq first: what comes after it is new, and what was there is found from the floor, which is 0.
            last = sql.figures.last_seq(connection)
            with self._lock:
                self._looked_to = last if self._looked_to is None else self._looked_to
        for _ in range(ARRIVED_PIECES):
            after, floor = self._looked_to or 0, self.floor
            places, last, count = sql.claims.scan_order_keys(connection, after + 1, MAX_SEQ, floor, ARRIVED_AT_ONCE)
            with self._lock:
                self._hold(places)
                if self.floor > floor:
                    continue  # between the two something may have arrived that is neither held nor ahead
                self._looked_to = max(after, self._looked_to or 0, last)
            if count < ARRIVED_AT_ONCE:
                return

    def look_behind(self, sql: Any, connection: Any, unwanted: Callable[[int], bool] = lambda place: False) -> None:
        """Read the last seqs again, and the next window of the others if it is time: for late commits and what came back, but
        for places that are ``unwanted``."""
        self.look_for_arrived(sql, connection)
        looked_to = self._looked_to or 0
        places, _, _ = sql.claims.scan_order_keys(connection, looked_to - NEAR, looked_to, self.floor, NEAR + 1)
        self._hold_wanted(places, unwanted)
        started = monotonic()
        if started < self.rescan_at and self._returns[0] == self._returns_seen:
            return
        self._returns_seen = self._returns[0]
        low, end = window = self._walk.window()
        places, last, count = sql.claims.scan_order_keys(
            connection, low, min(end - 1, looked_to), self.floor, WINDOW_ROWS
        )
        seconds = monotonic() - started
        self._hold_wanted(places, unwanted)
        with self._lock:
            self.rescan_at = started + seconds * (1 + REST)
            if self._walk.window() == window:  # else another one has looked at it meanwhile, and has gone on
                self._walk.go_on(looked_to + 1, self._alone(seconds), last if count == WINDOW_ROWS else 0)

    def _hold_wanted(self, places: Sequence[int], unwanted: Callable[[int], bool]) -> None:
        wanted = [place for place in places if not unwanted(place)]
        with self._lock:
            self._hold(wanted)

    def ahead(self) -> list[Range]:
        """Where something may be had, in order, without taking it: for a look."""
        with self._lock:
            return [*(Range(place, place) for place in self._held[:WINDOW_PLACES]), Range(self.floor, MAX_PLACE)]

    def behind(self) -> list[Range]:
        """Nothing: ``look_behind`` goes by seq, and what it finds is held by its place."""
        return []

    # -- of all floors ------------------------------------------------------------------------------------------------

    def share(
        self, places: memoryview[int] | MutableSequence[int], returns: memoryview[int] | MutableSequence[int]
    ) -> None:
        """A place needs 128 bits, so each process keeps a floor of its own; that something came back they tell each other."""
        self._returns = returns

    def step_over(self, level: Any, after: Any) -> None:
        with self._lock:
            self.floor = max(self.floor, after(self.floor))

    def reset(self) -> None:
        with self._lock:
            self.floor, self._held, self._walk.position = 0, [], None
            self.lowered += 1

    @property
    def lowest(self) -> int:
        return 0


def floors_for(queue: Any, alias: str, levels: tuple[Level, ...], leveled: bool) -> Floors:
    """``floors_of`` of whichever kind the queue needs."""
    return floors_of(queue, alias, levels, leveled, RankedFloors if queue.delivery.priority else Floors)
