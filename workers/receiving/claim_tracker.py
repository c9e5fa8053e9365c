"""Where the receive tasks of one pump claim.

One claim looks in three kinds of places at once, in claim order, so that a priority holds over the whole queue:

* **behind** the floors, in the window in which the last look found something that had come back or was committed late;
* **ahead** of them, from the floor, or above where the claims under way will end if there are no gaps: two claims of 500
  run side by side on neighbouring stretches. Where that guess is wrong, SKIP LOCKED does the rest;
* never in a stretch that holds nothing for this process (``unknown``).

What a look saw is a hint. A claim that takes nothing behind says that the window is clear, whatever the look saw: somebody
else has those, or holds them, and the next look is somewhere else. A claim that comes back short, or fails, may leave
messages below those of a later one: the floor then comes down to where it ended. While something came back no claim that
had begun before it raises a floor, since it may have passed it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence, Set
from time import monotonic

import msgspec

from queueapp.receiving.low_water_marks import DUTY_CYCLE, Level, LowWaterMarks
from queueapp.sql.claims import MAX_SEQ, SEQ, Claimed, PeekResult, SeqRange

from .skip_ranges import SkipRanges

#: On a queue with recipients or levels claims of so many messages take turns instead, smaller ones are of slow handlers.
LARGE_CLAIM = 50
#: Seconds that a claim is given way to, either way: behind one that hangs no message waits for long.
PATIENCE = 0.1
#: After a walk over all that lies behind the floors that took the server itself longer than ``BRIEF`` (seconds), no other for
#: ``LEAST_REST``: where one is short a tenth of the time is many of them, and none of them is waited for.
BRIEF, LEAST_REST = 0.001, 0.1


class ActiveClaim(msgspec.Struct, eq=False):
    """One claim, from before its statement until its rows are known."""

    ranges: Sequence[SeqRange]
    limit: int
    low: int = 0
    #: Where it looks behind the floors; empty: it does not look there.
    behind: Sequence[SeqRange] = ()
    #: How often messages had come back when it began.
    returns: int = 0
    started: float = msgspec.field(default_factory=monotonic)
    #: What it got; None: that is not known, or says nothing of what is there.
    rows: Sequence[Claimed] | None = None
    #: Its statement has failed: what that had taken is free again.
    failed: bool = False
    #: Another one began above it meanwhile.
    followed: bool = False
    #: From where on a claim below this one has left messages to be found.
    hole: int | None = None


class ClaimContext:
    """One claim as a context. (A class: a generator takes a microsecond more, and TRANSACTIONAL claims each message alone.)"""

    __slots__ = ("_claiming", "_limit", "_mine", "_turn")

    def __init__(self, claiming: ClaimTracker, limit: int) -> None:
        self._claiming = claiming
        self._limit = limit

    def __enter__(self) -> ActiveClaim:
        claiming = self._claiming
        self._turn = self._limit >= LARGE_CLAIM and claiming.take_turn()
        try:
            self._mine = claiming.begin(self._limit)
        except BaseException:
            if self._turn:
                claiming.turn.release()
            raise
        return self._mine

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._mine.failed = True
        try:
            self._claiming.end(self._mine)
        finally:
            if self._turn:
                self._claiming.turn.release()


def _low(claim: ActiveClaim) -> int:
    return claim.low


class ClaimTracker:
    """The claims under way of one pump, and what its looks saw."""

    def __init__(self, floors: LowWaterMarks) -> None:
        self.floors = floors
        self._lock = threading.Lock()
        self.turn = threading.Lock()
        self._open: list[ActiveClaim] = []
        self._behind: list[SeqRange] = []
        #: A claim that another one had given way to left something to be found, or may have: not for long, see ``QueuePump``.
        self.left = False
        #: When the next part of the rescan is due.
        self._rescan_at = 0.0
        self._unknown: dict[Level, SkipRanges] = {}
        #: What handlers of this process have in hand though the database may have let go of it: the session of a TRANSACTIONAL
        #: receive was killed, and its failed attempt is still to be counted. Changed without the lock: one key at a time.
        self._held: dict[int, bool] = {}

    # -- looking --------------------------------------------------------------------------------------------------

    def look(self) -> tuple[list[SeqRange], list[SeqRange]]:
        """(ahead, behind): where the next look goes."""
        with self._lock:
            due = self.floors.near_is_due or monotonic() >= self._rescan_at
            behind = self._known(self.floors.behind()) if due else []
            if due and not behind:
                self.floors.rescanned(0.0)  # above the floors, or nothing in it is for this process
            return self._known(self.floors.ahead()), behind

    @property
    def goes_on_at(self) -> float | None:
        """When the rescan goes on that has begun, by the monotonic clock; None: all that lies behind the floors was looked at."""
        return self._rescan_at if self.floors.rescanning else None

    def seen(self, peek: PeekResult, behind: Sequence[SeqRange], seconds: float, came_down: int | None = None) -> None:
        """A look saw this, behind the floors in these ranges; ``came_down``: how often they had come down before it (None: as often
        as now)."""
        with self._lock:
            unchanged = came_down is None or came_down == self.floors.retreats
            if peek.behind:
                # First these, together with what is ahead; the window stays until a claim finds it clear.
                ends = [only._replace(high=min(only.high, peek.reached)) for only in behind] if peek.reached else behind
                self._behind = [only for only in ends if only.low <= only.high]
            # One that was not due has seen nothing of it. (Where looks follow each other without a pause it often comes due while one
            # is under way: that passed for a look at the window, and what lay there was found after six seconds.)
            elif behind and self.floors.is_present(behind[0]):
                self._behind = []
                ended = self.floors.rescanned(seconds, peek.reached) and self.floors.cycle_seconds > BRIEF
                rest = max(DUTY_CYCLE * seconds, LEAST_REST if ended else 0.0)
                self._rescan_at = max(self._rescan_at, monotonic() + rest)
            if peek.ahead and not peek.behind and not self._unknown and unchanged:
                self.floors.advance_to(peek.first)  # else it may have passed what has become free since

    def skip(self) -> None:
        """What lies behind the floors in the present window is of no interest for now: the next look goes on."""
        with self._lock:
            self.floors.rescanned(0.0)

    # -- claiming -------------------------------------------------------------------------------------------------

    def claim(self, limit: int) -> ClaimContext:
        """Around the statement that claims at most ``limit`` in the ranges of the claim, to which the caller gives the rows
        it got."""
        return ClaimContext(self, limit)

    def take_turn(self) -> bool:
        """Whether a large claim takes turns, and its turn has come: ``turn.release()`` ends it."""
        return self.floors.leveled and self.turn.acquire(timeout=PATIENCE)

    def begin(self, limit: int) -> ActiveClaim:
        """A claim is under way until its ``end``."""
        with self._lock:
            floors, behind, low = self.floors, self._behind, 0
            if floors.leveled:
                ahead = floors.ahead()
            else:
                low = floors.lowest
                if self._open:
                    low = self._above_those_under_way(low)
                ahead = [SeqRange(low, MAX_SEQ, *floors.levels[0])]
            ranges = self._known([*behind, *ahead] if behind else ahead)
            if behind and floors.leveled:
                # Stable: behind before ahead within a priority, and recipients in their turns.
                ranges.sort(key=lambda one: -one.priority)
            mine = ActiveClaim(ranges, limit, low, behind, floors.returns)
            self._open.append(mine)
        return mine

    def _above_those_under_way(self, low: int) -> int:
        """Where the claims will end that are under way at a floor, if there are no gaps. Another one begins above them."""
        since = monotonic() - PATIENCE
        for other in sorted(self._open, key=_low):
            other.followed = True
            # Only where it covers the floor: what came back below it is nobody's yet.
            if other.started > since and other.low <= low:
                low = min(max(low, other.low + other.limit), MAX_SEQ)
        return low

    def end(self, mine: ActiveClaim) -> None:
        """Its rows are known, or that it has failed."""
        rows = mine.rows
        with self._lock:
            self._open.remove(mine)
            if mine.behind and rows is not None:
                self._looked_behind(mine, rows)
            if rows:
                self.floors.advance(rows, mine.returns)
            if mine.failed:
                # Claims of other processes may have passed what it had taken.
                self.floors.retreat(MAX_SEQ if self.floors.leveled else mine.low)
            if self.floors.leveled:
                return
            holes = [] if mine.hole is None else [mine.hole]
            if mine.followed and (rows is None or len(rows) < mine.limit):
                # It saw the end, or nothing: what came in since then may lie between its end and a later claim's start.
                holes.append(max(mine.low, rows[-1][SEQ] + 1) if rows else mine.low)
            if holes:
                self._leave(min(holes))

    def _looked_behind(self, mine: ActiveClaim, rows: Sequence[Claimed]) -> None:
        """After a claim that looked behind the floors as well: is anything left there?"""
        if self._behind != mine.behind:
            return  # another one has found it clear meanwhile, and a look has found something elsewhere
        found = self.floors.count_in(mine.behind, rows)
        cut_off = found == len(rows) if not self.floors.leveled else bool(found)
        if cut_off and len(rows) == mine.limit:
            return
        # It came to the end of the window, or took nothing there. Look elsewhere before looking there again.
        self._behind = []
        if not found:
            self.floors.rescanned(0.0)

    def _leave(self, hole: int) -> None:
        """Something may lie free from here on, for the next claim and for the floor when those above it have ended."""
        for other in self._open:
            if other.low > hole:
                other.hole = hole if other.hole is None else min(other.hole, hole)
        self.floors.retreat(hole, returned=False)
        self.left = True

    def hold(self, seq: int) -> None:
        """No task of this process claims this message until it is let go, whatever becomes of the transaction."""
        self._held[seq] = True

    def let_go(self, seq: int) -> None:
        """The reverse of ``hold``."""
        self._held.pop(seq, None)

    def holds(self, seq: int) -> bool:
        """Whether a task of this process has it in hand. Asked by one that has claimed it all the same: the ranges of its claim
        are older than the hold, and its statement came after the other one's rollback."""
        return seq in self._held

    def holds_any(self, rows: Sequence[Claimed]) -> bool:
        """Whether it has one of these."""
        return bool(self._held) and any(self.holds(row[SEQ]) for row in rows)

    def lower(self, seq: int) -> None:
        """A message came back: the next claim is to find it."""
        with self._lock:
            for unknown in self._unknown.values():
                unknown.remove(seq)
            self.floors.retreat(seq)

    def lower_all(self, seqs: Sequence[int]) -> None:
        """These came back."""
        self.lower(min(seqs))

    # -- what is not for this process -----------------------------------------------------------------------------

    def leave_alone(self, mine: ActiveClaim, rows: Sequence[Claimed], seqs: Set[int]) -> SeqRange | None:
        """Of the rows of a claim, in claim order, these are not for this process. Returns where to look on, if it ended with
        one of them."""
        with self._lock:
            run: list[int] = []
            level = before = None
            for row in rows:
                level = self.floors.level_of(row)
                if run and (level != before or row[SEQ] not in seqs):
                    self._add(before, run[0], run[-1])
                    run = []
                if row[SEQ] in seqs:
                    run.append(row[SEQ])
                before = level
            if not run or level is None:
                return None
            self._add(level, run[0], run[-1])
            return SeqRange(run[-1] + 1, MAX_SEQ, *level)

    def rest_of(self, stretch: SeqRange) -> SeqRange:
        """What of it is left, after what somebody else has walked over meanwhile."""
        with self._lock:
            unknown = self._unknown.get((stretch.recipient, stretch.priority))
            return stretch._replace(low=unknown.after(stretch.low)) if unknown else stretch

    def extend_unknown(self, stretch: SeqRange, high: int) -> None:
        """What follows, to ``high``, is not for this process either."""
        with self._lock:
            self._add((stretch.recipient, stretch.priority), stretch.low, high)

    def to_reread(self) -> SeqRange | None:
        """A stretch that is to be read again, for what came back there; None: there is none."""
        with self._lock:
            for level, unknown in self._unknown.items():
                found = unknown.to_reread()
                if found is not None:
                    return SeqRange(*found, *level)
        return None

    def reread(self, stretch: SeqRange, reached: int) -> None:
        """It was read up to here; another level's comes next."""
        with self._lock:
            level = (stretch.recipient, stretch.priority)
            unknown = self._unknown.pop(level, None)
            if unknown:
                unknown.reread(reached)
                self._unknown[level] = unknown

    def _add(self, level: Level | None, low: int, high: int) -> None:
        if level is None:
            return
        unknown = self._unknown.setdefault(level, SkipRanges())
        unknown.add(low, high)
        self.floors.skip(level, unknown.after)

    def _known(self, ranges: list[SeqRange]) -> list[SeqRange]:
        """What of these, which the caller has no other use for, may hold something for this process."""
        if self._unknown:
            found = []
            for only in ranges:
                unknown = self._unknown.get((only.recipient, only.priority))
                found += unknown.outside(only) if unknown else [only]
            ranges = found
        # Nearly always all of them are below: a floor is raised past what is claimed. (``max`` holds on to Python's lock.)
        if ranges and max(self._held, default=-1) >= min(ranges)[0]:
            for seq in sorted(self._held):
                ranges = [part for only in ranges for part in _without(only, seq)]
        return ranges


def _without(only: SeqRange, seq: int) -> list[SeqRange]:
    if not only.low <= seq <= only.high:
        return [only]
    parts = [only._replace(high=seq - 1), only._replace(low=seq + 1)]
    return [part for part in parts if part.low <= part.high]
