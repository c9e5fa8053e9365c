"""Where the receive tasks of one pump claim on a queue with a priority of 64 bits (``queueapp.receiving.priority64_marks``).

What is a seq in ``ClaimTracker`` is a place here: the floor, the stretches without anything for this process, and what handlers
have in hand. Before each claim what has arrived is read; what came back and late commits are read at each look.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from queueapp.receiving.priority64_marks import ClaimStart, Priority64Marks
from queueapp.sql.claims import MAX_ORDER_KEY, PRIORITY, SEQ, Claimed, PeekResult, SeqRange, order_key

from .claim_tracker import PATIENCE, ActiveClaim, ClaimTracker

_LEVEL = ("", 0)


class Priority64Claim(ActiveClaim, kw_only=True):
    """One claim, with what it began with."""

    taken: ClaimStart


class Priority64ClaimTracker(ClaimTracker):
    """The claims under way of one pump."""

    floors: Priority64Marks

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: The places of what is held, by seq. The floors forget them, sooner than a handler of an hour ends.
        self._place_held: dict[int, int] = {}

    # -- looking --------------------------------------------------------------------------------------------------

    def look_for_arrived(self, sql: Any, connection: Any) -> None:
        """Before a claim."""
        self.floors.read_new(sql, connection)

    def look_behind(self, sql: Any, connection: Any) -> None:
        """Before a look."""
        self.floors.rescan(sql, connection, self._is_unknown)

    def _is_unknown(self, place: int) -> bool:
        with self._lock:
            unknown = self._unknown.get(_LEVEL)
            return unknown is not None and unknown.after(place) != place

    def _known(self, ranges: list[SeqRange]) -> list[SeqRange]:
        """What has a place of its own has arrived or come back: it is wanted wherever that lies."""
        *places, rest = ranges
        return [*(one for one in places if one.low not in self._held), *super()._known([rest])]

    def look(self) -> tuple[list[SeqRange], list[SeqRange]]:
        with self._lock:
            return self._known(self.floors.ahead()), []

    @property
    def goes_on_at(self) -> float | None:
        return self.floors.rescan_at if self.floors.rescanning else None

    def seen(self, peek: PeekResult, behind: Sequence[SeqRange], seconds: float, came_down: int | None = None) -> None:
        """What there is has been looked at by seq."""

    # -- claiming -------------------------------------------------------------------------------------------------

    def take_turn(self) -> bool:
        """They do: two side by side would want the same messages."""
        return self.turn.acquire(timeout=PATIENCE)

    def begin(self, limit: int) -> ActiveClaim:
        taken = self.floors.begin_claim(limit)
        with self._lock:
            return Priority64Claim(self._known(taken.ranges), limit, taken=taken)

    def end(self, mine: ActiveClaim) -> None:
        assert isinstance(mine, Priority64Claim)
        rows = mine.rows
        self.floors.end_claim(mine.taken, rows, rows is not None and len(rows) == mine.limit, failed=mine.failed)

    def hold(self, seq: int) -> None:
        place = self.floors.order_key_of(seq)
        if place is not None:
            self._held[place] = True
            self._place_held[seq] = place

    def let_go(self, seq: int) -> None:
        place = self._place_held.pop(seq, None)
        if place is not None:
            self._held.pop(place, None)

    def holds(self, seq: int) -> bool:
        return seq in self._place_held

    def lower(self, seq: int) -> None:
        place = seq if seq >= 2**63 else self._place_held.get(seq, self.floors.order_key_of(seq))
        with self._lock:
            for unknown in self._unknown.values():
                if place is not None:
                    unknown.remove(place)
            self.floors.retreat(seq if place is None else place)

    def lower_all(self, seqs: Sequence[int]) -> None:
        for seq in seqs:
            self.lower(seq)

    # -- what is not for this process -----------------------------------------------------------------------------

    def leave_alone(self, mine: ActiveClaim, rows: Sequence[Claimed], seqs: Set[int]) -> SeqRange | None:
        with self._lock:
            run: list[int] = []
            for row in rows:
                place = order_key(row[PRIORITY], row[SEQ])
                if row[SEQ] in seqs:
                    run.append(place)
                elif run:
                    self._add(_LEVEL, run[0], run[-1])
                    run = []
            if not run:
                return None
            self._add(_LEVEL, run[0], run[-1])
            return SeqRange(run[-1] + 1, MAX_ORDER_KEY)
