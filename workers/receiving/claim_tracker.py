"""Where the receivers of one pump claim: their active claims, what peeks found, and what is to be skipped.

One claim reads three kinds of ranges in one statement, in claim order, so that a priority holds over the whole queue:

* **behind** the low-water marks: the window in which the last peek found a message that was returned or committed late;
* **ahead** of them: from the mark, or from where the active claims will end if there are no gaps. Two claims of 500 run
side by side on neighbouring ranges; where that guess is wrong, SKIP LOCKED resolves it;
* never a range that holds nothing for this process (``SkipRanges``).

What a peek found is a hint. A claim that takes nothing behind the marks says that the window is clear, whatever the
peek found: other workers have those messages, or hold locks on them, and the next peek reads another window. A claim
that comes back short, or fails, may leave messages below those of a later claim (a gap): the mark then retreats to
where it ended. While a message was returned, no claim that began before that advances a mark, since it may have passed
the message.

On a queue with barriers, claims take turns with them (``BarrierGate``).
"""

from __future__ import annotations

import threading
import uuid
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from time import monotonic
from typing import Any

import msgspec

from queueapp.receiving import barriers
from queueapp.receiving.low_water_marks import DUTY_CYCLE, ClaimStart, Level, LowWaterMarks, Priority64Marks
from queueapp.sql.claims import MAX_ORDER_KEY, MAX_SEQ, PRIORITY, SEQ, Claimed, PeekResult, SeqRange, order_key
from queueapp.sql.message_columns import Row

#: On a queue with recipients or priorities, claims of so many messages take turns; smaller ones are those of slow
#: handlers.
LARGE_CLAIM = 50
#: Seconds for which another claim is given way to: behind one that hangs, no message waits for longer.
PATIENCE = 0.1
#: After a rescan of all that lies behind the marks, if it took the server more than ``BRIEF`` seconds, the next one
#: begins after ``LEAST_REST``: where one is short, a tenth of the time is many of them, and no message waits for any of
#: them.
BRIEF, LEAST_REST = 0.001, 0.1
#: More skip ranges of a level than this are joined where they are nearest to each other: a claim names each of them.
MAX_SKIP_RANGES = 64


class ActiveClaim(msgspec.Struct, eq=False):
    """One claim, from before its statement until its rows are known."""

    ranges: Sequence[SeqRange]
    limit: int
    low: int = 0
    #: Ranges behind the marks that it reads; empty: none.
    behind: Sequence[SeqRange] = ()
    #: How many messages had been returned when it began.
    returns: int = 0
    started: float = msgspec.field(default_factory=monotonic)
    #: The rows; None: not known, or they say nothing of what is there.
    rows: Sequence[Claimed] | None = None
    #: Its statement failed: what that had taken is free again.
    failed: bool = False
    #: Another claim began above it meanwhile.
    overtaken: bool = False
    #: From this seq on, a claim below this one has left messages to be found.
    gap: int | None = None


class ClaimContext:
    """One claim as a context. (A class: a generator takes a microsecond more, and TRANSACTIONAL claims each message by
    itself.)"""

    __slots__ = ("_active", "_limit", "_tracker", "_turn")

    def __init__(self, tracker: ClaimTracker, limit: int) -> None:
        self._tracker = tracker
        self._limit = limit

    def __enter__(self) -> ActiveClaim:
        tracker = self._tracker
        self._turn = self._limit >= LARGE_CLAIM and tracker.take_turn()
        try:
            self._active = tracker.begin(self._limit)
        except BaseException:
            if self._turn:
                tracker.turn.release()
            raise
        return self._active

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._active.failed = True
        try:
            self._tracker.end(self._active)
        finally:
            if self._turn:
                self._tracker.turn.release()


def _low(claim: ActiveClaim) -> int:
    return claim.low


class ClaimTracker:
    """The active claims of one pump, and what its peeks found."""

    def __init__(self, marks: LowWaterMarks) -> None:
        self.marks = marks
        self._lock = threading.Lock()
        self.turn = threading.Lock()
        self._active: list[ActiveClaim] = []
        #: Ranges behind the marks where the last peek found messages; no claim has found them clear since.
        self.found_behind: list[SeqRange] = []
        #: A claim left messages to be found, or may have, to one that had given way to it. The pump peeks soon and
        #: clears it.
        self.has_gap = False
        #: When the next window of the rescan is due, by the monotonic clock.
        self.next_window_at = 0.0
        self._skipped: dict[Level, SkipRanges] = {}
        #: Messages in flight in this process that the database may have released: the session of a TRANSACTIONAL
        #: receive was killed, and its failed attempt is still to be counted. Changed without the lock: one key at a
        #: time.
        self.excluded: dict[int, bool] = {}

    # -- peeks ----------------------------------------------------------------------------------------------------

    def peek_ranges(self) -> tuple[list[SeqRange], list[SeqRange]]:
        """(ahead, behind): the ranges of the next peek."""
        with self._lock:
            due = self.marks.near_is_due or monotonic() >= self.next_window_at
            behind = self._claimable(self.marks.behind()) if due else []
            if due and not behind:
                self.marks.rescanned(0.0)  # above the marks, or nothing in it is for this process
            return self._claimable(self.marks.ahead()), behind

    @property
    def rescan_due_at(self) -> float | None:
        """When the rescan that has begun continues, by the monotonic clock; None: all that lies behind the marks was
        read."""
        return self.next_window_at if self.marks.rescanning else None

    def peeked(self, peek: PeekResult, behind: Sequence[SeqRange], seconds: float, retreats: int | None = None) -> None:
        """Take over what a peek found, behind the marks in these ranges. ``retreats``: how often the marks had
        retreated before it (None: as often as now)."""
        with self._lock:
            unchanged = retreats is None or retreats == self.marks.retreats
            if peek.behind:
                # Claimed first, together with what is ahead; the window stays until a claim finds it clear.
                ends = [only._replace(high=min(only.high, peek.reached)) for only in behind] if peek.reached else behind
                self.found_behind = [only for only in ends if only.low <= only.high]
            # A peek for which no window was due has read nothing of it. (Where peeks follow each other without a pause
            # a window often comes due during one: that passed for a read of the window, and what lay there was found
            # after six seconds.)
            elif behind and self.marks.is_present(behind[0]):
                self.found_behind = []
                ended = self.marks.rescanned(seconds, peek.reached) and self.marks.cycle_seconds > BRIEF
                rest = max(DUTY_CYCLE * seconds, LEAST_REST if ended else 0.0)
                self.next_window_at = max(self.next_window_at, monotonic() + rest)
            if peek.ahead and not peek.behind and not self._skipped and unchanged:
                self.marks.advance_to(peek.first)  # else it may have passed what has become free since

    def skip_window(self) -> None:
        """What lies in the present window is not claimable for now: the next peek reads the next window."""
        with self._lock:
            self.marks.rescanned(0.0)

    # -- claims ---------------------------------------------------------------------------------------------------

    def claim(self, limit: int) -> ClaimContext:
        """Around the statement that claims at most ``limit`` messages in the ranges of the claim. The caller gives it
        the rows."""
        return ClaimContext(self, limit)

    def take_turn(self) -> bool:
        """Whether large claims take turns here, and the turn was granted: ``turn.release()`` ends it."""
        return self.marks.leveled and self.turn.acquire(timeout=PATIENCE)

    def begin(self, limit: int) -> ActiveClaim:
        """Begin a claim, which is active until its ``end``."""
        with self._lock:
            marks, behind, low = self.marks, self.found_behind, 0
            if marks.leveled:
                ahead = marks.ahead()
            else:
                low = marks.lowest
                if self._active:
                    low = self._above_active_claims(low)
                ahead = [SeqRange(low, MAX_SEQ, *marks.levels[0])]
            ranges = self._claimable([*behind, *ahead] if behind else ahead)
            if behind and marks.leveled:
                # Stable: behind before ahead within a priority, and recipients in their turns.
                ranges.sort(key=lambda seq_range: -seq_range.priority)
            claim = ActiveClaim(ranges, limit, low, behind, marks.returns)
            self._active.append(claim)
        return claim

    def _above_active_claims(self, low: int) -> int:
        """Where the active claims at the mark will end if there are no gaps. The next claim begins there."""
        since = monotonic() - PATIENCE
        for claim in sorted(self._active, key=_low):
            claim.overtaken = True
            # Only where it covers the mark: what was returned below the mark is claimed by none of them.
            if claim.started > since and claim.low <= low:
                low = min(max(low, claim.low + claim.limit), MAX_SEQ)
        return low

    def end(self, claim: ActiveClaim) -> None:
        """The rows of a claim are known, or it has failed."""
        rows = claim.rows
        with self._lock:
            self._active.remove(claim)
            if claim.behind and rows is not None:
                self._claimed_behind(claim, rows)
            if rows:
                self.marks.advance(rows, claim.returns)
            if claim.failed:
                # Claims of other processes may have passed what it had taken.
                if self.marks.leveled:
                    self.marks.note_returned()
                else:
                    self.marks.retreat(claim.low)
            if self.marks.leveled:
                return
            gaps = [] if claim.gap is None else [claim.gap]
            if claim.overtaken and (rows is None or len(rows) < claim.limit):
                # It reached the end, or got nothing: what was committed since may lie between its end and a later
                # claim's start.
                gaps.append(max(claim.low, rows[-1][SEQ] + 1) if rows else claim.low)
            if gaps:
                self._leave_gap(min(gaps))

    def _claimed_behind(self, claim: ActiveClaim, rows: Sequence[Claimed]) -> None:
        """After a claim that read behind the marks as well: does anything remain there?"""
        if self.found_behind != claim.behind:
            return  # another claim found it clear meanwhile, and a peek has found something elsewhere
        found = self.marks.count_in(claim.behind, rows)
        cut_off = found == len(rows) if not self.marks.leveled else bool(found)
        if cut_off and len(rows) == claim.limit:
            return
        # It came to the end of the window, or took nothing there. Read other windows before this one again.
        self.found_behind = []
        if not found:
            self.marks.rescanned(0.0)

    def _leave_gap(self, gap: int) -> None:
        """From here on messages may be free, for the next claim, and for the mark when the claims above have ended."""
        for claim in self._active:
            if claim.low > gap:
                claim.gap = gap if claim.gap is None else min(claim.gap, gap)
        self.marks.retreat(gap, returned=False)
        self.has_gap = True

    def exclude(self, seq: int) -> None:
        """No receiver of this process claims this message until ``include``, whatever becomes of the transaction."""
        self.excluded[seq] = True

    def include(self, seq: int) -> None:
        """Undo ``exclude``."""
        self.excluded.pop(seq, None)

    def excludes(self, seq: int) -> bool:
        """Whether the message is in flight in this process. Asked by a receiver that has claimed it all the same: the
        ranges of its claim are older than the exclusion, and its statement came after the other one's rollback."""
        return seq in self.excluded

    def excludes_any(self, rows: Sequence[Claimed]) -> bool:
        """Whether one of these is in flight in this process."""
        return bool(self.excluded) and any(self.excludes(row[SEQ]) for row in rows)

    def retreat(self, seq: int) -> None:
        """A message was returned to the queue: the next claim is to find it."""
        with self._lock:
            for skipped in self._skipped.values():
                skipped.remove(seq)
            self.marks.retreat(seq)

    def retreat_all(self, seqs: Sequence[int]) -> None:
        """These messages were returned to the queue."""
        self.retreat(min(seqs))

    # -- what is not for this process -----------------------------------------------------------------------------

    def skip_rows(self, claim: ActiveClaim, rows: Sequence[Claimed], seqs: Set[int]) -> SeqRange | None:
        """Of the rows of a claim, in claim order, skip these from now on. Return where to read on, if the claim ended
        with one of them."""
        with self._lock:
            run: list[int] = []
            level = before = None
            for row in rows:
                level = self.marks.level_of(row)
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
        """The part of a range that is not skipped by now, from its first such seq on."""
        with self._lock:
            skipped = self._skipped.get((stretch.recipient, stretch.priority))
            return stretch._replace(low=skipped.after(stretch.low)) if skipped else stretch

    def extend_skipped(self, stretch: SeqRange, high: int) -> None:
        """Skip what follows, to ``high``, as well."""
        with self._lock:
            self._add((stretch.recipient, stretch.priority), stretch.low, high)

    def next_reread(self) -> SeqRange | None:
        """A skip range that is to be read again, for what was returned there; None: there is none."""
        with self._lock:
            for level, skipped in self._skipped.items():
                found = skipped.next_reread()
                if found is not None:
                    return SeqRange(*found, *level)
        return None

    def reread_to(self, stretch: SeqRange, reached: int) -> None:
        """The range was read again up to here; another level comes next."""
        with self._lock:
            level = (stretch.recipient, stretch.priority)
            skipped = self._skipped.pop(level, None)
            if skipped:
                skipped.reread_to(reached)
                self._skipped[level] = skipped

    def _add(self, level: Level | None, low: int, high: int) -> None:
        if level is None:
            return
        skipped = self._skipped.setdefault(level, SkipRanges())
        skipped.add(low, high)
        self.marks.skip(level, skipped.after)

    def _claimable(self, ranges: list[SeqRange]) -> list[SeqRange]:
        """The parts of these ranges that may hold something for this process. The list may be returned as it is."""
        if self._skipped:
            found = []
            for only in ranges:
                skipped = self._skipped.get((only.recipient, only.priority))
                found += skipped.outside(only) if skipped else [only]
            ranges = found
        # Nearly always all exclusions are below: a mark advances past what is claimed. (``max`` holds on to Python's
        # lock.)
        if ranges and max(self.excluded, default=-1) >= min(ranges)[0]:
            for seq in sorted(self.excluded):
                ranges = [part for only in ranges for part in _without(only, seq)]
        return ranges


def _without(only: SeqRange, seq: int) -> list[SeqRange]:
    if not only.low <= seq <= only.high:
        return [only]
    parts = [only._replace(high=seq - 1), only._replace(low=seq + 1)]
    return [part for part in parts if part.low <= part.high]


# -- 64-bit priorities ------------------------------------------------------------------------------------------------

_LEVEL = ("", 0)


class Priority64Claim(ActiveClaim, kw_only=True):
    """One claim, with the marks that it began with."""

    start: ClaimStart


class Priority64ClaimTracker(ClaimTracker):
    """The same on a queue with a 64-bit priority (``queueapp.receiving.low_water_marks``).

    An order key (priority and seq) takes the place of a seq: in the mark, in the skip ranges, and in the exclusions.
    New messages are read before each claim; returned messages and late commits are read before each peek.
    """

    marks: Priority64Marks

    def __init__(self, marks: Priority64Marks) -> None:
        super().__init__(marks)
        #: The order keys of excluded messages, by seq. The marks forget them sooner than a handler of an hour ends.
        self._excluded_keys: dict[int, int] = {}

    def read_new(self, sql: Any, connection: Any) -> None:
        """Before a claim."""
        self.marks.read_new(sql, connection)

    def rescan(self, sql: Any, connection: Any) -> None:
        """Before a peek."""
        self.marks.rescan(sql, connection, self._is_skipped)

    def _is_skipped(self, key: int) -> bool:
        with self._lock:
            skipped = self._skipped.get(_LEVEL)
            return skipped is not None and skipped.after(key) != key

    def _claimable(self, ranges: list[SeqRange]) -> list[SeqRange]:
        """A range of one order key is a message that is new or was returned: it is wanted wherever that lies."""
        *single, rest = ranges
        return [*(seq_range for seq_range in single if seq_range.low not in self.excluded), *super()._claimable([rest])]

    def peek_ranges(self) -> tuple[list[SeqRange], list[SeqRange]]:
        with self._lock:
            return self._claimable(self.marks.ahead()), []

    @property
    def rescan_due_at(self) -> float | None:
        return self.marks.rescan_at if self.marks.rescanning else None

    def peeked(self, peek: PeekResult, behind: Sequence[SeqRange], seconds: float, retreats: int | None = None) -> None:
        """Nothing to take over: ``rescan`` reads by seq."""

    def take_turn(self) -> bool:
        """All claims take turns: two side by side would want the same messages."""
        return self.turn.acquire(timeout=PATIENCE)

    def begin(self, limit: int) -> ActiveClaim:
        start = self.marks.begin_claim(limit)
        with self._lock:
            return Priority64Claim(self._claimable(start.ranges), limit, start=start)

    def end(self, claim: ActiveClaim) -> None:
        assert isinstance(claim, Priority64Claim)
        rows = claim.rows
        self.marks.end_claim(claim.start, rows, rows is not None and len(rows) == claim.limit, failed=claim.failed)

    def exclude(self, seq: int) -> None:
        key = self.marks.order_key_of(seq)
        if key is not None:
            self.excluded[key] = True
            self._excluded_keys[seq] = key

    def include(self, seq: int) -> None:
        key = self._excluded_keys.pop(seq, None)
        if key is not None:
            self.excluded.pop(key, None)

    def excludes(self, seq: int) -> bool:
        return seq in self._excluded_keys

    def retreat(self, seq: int) -> None:
        key = seq if seq >= 2**63 else self._excluded_keys.get(seq, self.marks.order_key_of(seq))
        with self._lock:
            for skipped in self._skipped.values():
                if key is not None:
                    skipped.remove(key)
            self.marks.retreat(seq if key is None else key)

    def retreat_all(self, seqs: Sequence[int]) -> None:
        for seq in seqs:
            self.retreat(seq)

    def skip_rows(self, claim: ActiveClaim, rows: Sequence[Claimed], seqs: Set[int]) -> SeqRange | None:
        with self._lock:
            run: list[int] = []
            for row in rows:
                key = order_key(row[PRIORITY], row[SEQ])
                if row[SEQ] in seqs:
                    run.append(key)
                elif run:
                    self._add(_LEVEL, run[0], run[-1])
                    run = []
            if not run:
                return None
            self._add(_LEVEL, run[0], run[-1])
            return SeqRange(run[-1] + 1, MAX_ORDER_KEY)


# -- ranges to skip ---------------------------------------------------------------------------------------------------


class SkipRanges:
    """Ranges of one level in which nothing that is free has a consumer in this process, so that claims step over them.

    They are ranges and not a list: a million messages of a type that only other workers take are one range. A range is
    a hint: what is returned inside it (a lease that expired elsewhere, a late commit) is found by reading it again, a
    piece at a time. The ranges are disjoint and ascending; both ends are included.
    """

    __slots__ = ("_highs", "_lows", "_reread_from")

    def __init__(self) -> None:
        self._lows: list[int] = []
        self._highs: list[int] = []
        self._reread_from = 0

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
        if len(self._lows) > MAX_SKIP_RANGES:
            gaps = [low - high for low, high in zip(self._lows[1:], self._highs, strict=False)]
            index = gaps.index(min(gaps))
            del self._lows[index + 1], self._highs[index]

    def remove(self, seq: int) -> None:
        """Claim this seq again."""
        index = bisect_left(self._highs, seq)
        if index == len(self._highs) or self._lows[index] > seq:
            return
        parts = [(self._lows[index], seq - 1), (seq + 1, self._highs[index])]
        parts = [part for part in parts if part[0] <= part[1]]
        self._lows[index : index + 1] = [low for low, _ in parts]
        self._highs[index : index + 1] = [high for _, high in parts]

    def after(self, low: int) -> int:
        """The first seq from ``low`` on that is in no range."""
        index = bisect_left(self._highs, low)
        if index < len(self._highs) and self._lows[index] <= low:
            return self._highs[index] + 1
        return low

    def outside(self, whole: SeqRange) -> list[SeqRange]:
        """The parts of a range that are not skipped, ascending."""
        found, low = [], whole.low
        for index in range(bisect_left(self._highs, whole.low), len(self._lows)):
            if self._lows[index] > whole.high:
                break
            if self._lows[index] > low:
                found.append(whole._replace(low=low, high=self._lows[index] - 1))
            low = self._highs[index] + 1
        if low <= whole.high:
            found.append(whole._replace(low=low))
        return found

    def next_reread(self) -> tuple[int, int] | None:
        """Where to read again: a range, or what remains of it since the last time; None: there is none."""
        if not self._lows:
            return None
        index = bisect_left(self._highs, self._reread_from)
        if index == len(self._highs):
            index = self._reread_from = 0
        return max(self._reread_from, self._lows[index]), self._highs[index]

    def reread_to(self, reached: int) -> None:
        """It was read again up to here."""
        self._reread_from = reached + 1


# -- barriers ---------------------------------------------------------------------------------------------------------


class BarrierGate:
    """Barriers of one queue in one process: they are released, taken, and handled before the messages behind them.

    Claims of the process take turns with its barriers (``gate``): no receiver claims while another one has a barrier in
    flight, and a claim gets nothing while a barrier waits for this subscriber. So a barrier's handler ends before that
    of a message behind it begins.
    """

    def __init__(self, queue: Any, alias: str, subscriber: uuid.UUID) -> None:
        self._queue, self._alias, self._subscriber = queue, alias, subscriber
        self.gate = threading.RLock()
        #: A barrier waited for this process at the last peek.
        self.is_due = False

    def peek(self) -> None:
        """Release what can be released, and see whether a barrier waits for this process. With every peek of the
        pump."""
        barriers.release(self._queue, self._alias)
        self.is_due = barriers.waiting(self._alias, self._subscriber)

    def release(self) -> int:
        """Release what can be released: after acks. Not in a handler's transaction."""
        return barriers.release(self._queue, self._alias)

    def take(self) -> Row | None:
        """The next barrier for this process; None: there is none. Not in a transaction."""
        return barriers.take(self._alias, self._subscriber)

    @contextmanager
    def around_claim(self, claim: AbstractContextManager[ActiveClaim]) -> Iterator[ActiveClaim]:
        """Around a claim."""
        with self.gate, claim as active:
            yield active
