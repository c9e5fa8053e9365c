"""Low-water marks: the seq at which a claim begins, so that it does not read rows that it cannot take.

The invariant: every row below a mark is either

* claimed: leased, deleted by a transaction that is still open, or a dead row that a snapshot retains; or
* not for this process: of a type without a consumer here; or
* pending: it became available below the mark (a retry, a release, a late commit, an expired lease, a rollback in
another process). The process that returns a row lowers its marks to it; all other pending rows are found by the rescan.

A mark is a hint of one process: losing it costs time and no message. It exists because deleted rows at the head of a
table stay there while any old snapshot is open, and a claim that begins at the head reads all of them (3,300 messages a
second and falling; 66,000 and constant from a mark).

The structures:

* ``LowWaterMarks``: one mark for each level (recipient, priority) of a queue. ``advance`` after a claim, ``retreat``
when a row comes back, ``ahead`` and ``behind`` are the ranges of the next claim. Processes of one supervisor ``share``
the marks.
* ``ScanWindow``: the rescan, which reads from zero to the mark in windows that are sized by the time they take.
* The *near window*: after rows came back, the stretch just below the mark is read before the rescan continues.

A queue whose priority has 64 bits has one mark for the whole queue, and single rows below it (``Priority64Marks``). Its
messages have one total order, by priority and then by seq; the *order key* is a message's number in it (128 bits). The
invariant: every row whose order key is below the mark is either

* claimed, or not for this process, when the mark passed it (under an old snapshot: dead rows that no claim should read
again); or
* *pending*: its order key is in ``_pending``, and the next claims take it by that key; or
* not yet known to this process. It is found in one of three ways and becomes pending:

  * it is newer: its seq is above the highest one that was read, and these seqs are read by the primary key before each
claim, so that the most urgent new message is the next one and costs one seek;
  * it came back in this process, which remembers the order keys of its claims;
  * it was committed late, or came back in another process: each rescan reads the last seqs again, and the next window
of all.

A mark is a hint of one process. If many messages become pending, the mark retreats to the first of them.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, NamedTuple

from ..sql.claims import MAX_ORDER_KEY, MAX_SEQ, PRIORITY, RECIPIENT, SEQ, WINDOW_ROWS, Claimed, SeqRange, order_key

#: A window takes about this many seconds, without the round trip: it is halved above twice, doubled below half of that.
WINDOW_TARGET = timedelta(milliseconds=10).total_seconds()
FIRST_WINDOW = 50_000
_SMALLEST_WINDOW = 1_000
#: Half of all seqs: a sender may choose one of the highest seqs, and all others then lie below the mark.
_LARGEST_WINDOW = 1 << 62
#: A cycle has at most so many windows, however slow they are: on a busy machine a smaller window is no quicker, and
#: with windows of 1,000 a late commit below a mark at a million waited for a thousand peeks.
WINDOWS_PER_CYCLE = 16
#: After a window, the rescan pauses for so many times as long as that took: it uses a tenth of the time. Under load
#: there are a hundred peeks a second, and each of them read 10 ms of a million messages that were leased to others.
DUTY_CYCLE = 9

#: Where messages come back all the time, the rescan continues after so many near windows.
NEAR_WINDOWS_IN_A_ROW = 8
#: Where messages come back during every claim, a mark that was kept so often advances; near windows find the rest.
KEPT_IN_A_ROW = 8

Level = tuple[str, int]


class ScanWindow:
    """The next window of a scan that goes from zero to an end in cycles; the end may move between windows."""

    __slots__ = ("cycle_seconds", "position", "span")

    def __init__(self) -> None:
        #: The first seq of the next window; None: the next cycle has not begun.
        self.position: int | None = None
        #: The number of seqs of the next window.
        self.span = FIRST_WINDOW
        #: Server time of the present cycle, or of the last one.
        self.cycle_seconds = 0.0

    def bounds(self) -> tuple[int, int]:
        """The seqs of the next window, from and to (exclusive)."""
        start = self.position or 0
        return start, start + self.span

    def advance(self, end: int, seconds: float, reached: int = 0) -> bool:
        """The window was read in ``seconds`` of server time, up to the seq ``reached`` (0: completely). Return whether
        that completed a cycle from zero to ``end``."""
        start, end_of_window = self.bounds()
        self.cycle_seconds = seconds if self.position is None else self.cycle_seconds + seconds
        if reached:
            # The window has more rows than one peek reads. The span doubled in a stretch without rows until it covered
            # them all.
            self.span = max(reached + 1 - start, _SMALLEST_WINDOW)
            self.position = reached + 1
        else:
            self.position = end_of_window
        self._resize(seconds, end)
        if self.position >= end:
            self.position = None
            return True
        return False

    def _resize(self, seconds: float, end: int) -> None:
        if seconds < WINDOW_TARGET / 2:
            self.span = min(self.span * 2, _LARGEST_WINDOW)
        elif seconds > WINDOW_TARGET * 2:
            # A span may exceed the stretch: half of it would not be less to read.
            self.span = max(min(self.span, end) // 2, _SMALLEST_WINDOW, end // WINDOWS_PER_CYCLE)


class LowWaterMarks:
    """The low-water marks of one queue in one process, and its rescan. The receivers of the queue use it without a
    lock: a lost update means that a few rows are read twice, or are found by the rescan."""

    __slots__ = (
        "_index",
        "_kept",
        "_marks",
        "_near",
        "_near_windows",
        "_returns",
        "_returns_seen",
        "_turn",
        "leveled",
        "levels",
        "round_trip",
        "window",
    )

    def __init__(self, levels: Iterable[Level] = (("", 0),), leveled: bool = False) -> None:
        self.levels: list[Level] = list(levels)
        self.leveled = leveled
        self._index = {level: index for index, level in enumerate(self.levels)}
        self._marks: MutableSequence[int] | memoryview[int] = [0] * len(self.levels)
        #: Two counters: retreats because of a returned row, and retreats for another reason. A counter, and not the
        #: mark, says that rows came back: a claim that was active meanwhile advances the mark again.
        self._returns: MutableSequence[int] | memoryview[int] = [0, 0]
        self._returns_seen = 0
        #: The first seq of the near window; None: no near window is due.
        self._near: int | None = None
        #: Near windows since the rescan continued.
        self._near_windows = 0
        self.window = ScanWindow()
        #: Seconds of the quickest window: the round trip, which no smaller window shortens.
        self.round_trip = math.inf
        self._turn = 0
        #: Claims in a row that did not advance a mark because rows came back.
        self._kept = 0

    # -- claims -------------------------------------------------------------------------------------------------------

    def ahead(self) -> list[SeqRange]:
        """The ranges of the next claim, in claim order: each level from its mark. Recipients of one priority take turns
        at being the first, so that one with an endless backlog does not starve the others."""
        marks = self._marks
        if not self.leveled:
            return [SeqRange(marks[0], MAX_SEQ, *self.levels[0])]
        self._turn += 1
        ranges = [SeqRange(marks[index], MAX_SEQ, *level) for index, level in enumerate(self.levels)]
        first = self._turn % len(ranges)
        ranges = ranges[first:] + ranges[:first]
        ranges.sort(key=lambda r: -r.priority)
        return ranges

    def advance(self, rows: Sequence[Claimed], returns: int) -> None:
        """Move the marks of the levels above these rows, which were claimed. ``returns`` is the value of the property
        when the claim began: a row that came back since then may lie below these, unseen by the claim, and the marks
        stay."""
        if returns != self._returns[0]:
            self._kept += 1
            if self._kept < KEPT_IN_A_ROW:
                return
        self._kept = 0
        marks = self._marks
        # A mark never moves above the highest seq of all, which a sender may choose: it would hide all other rows.
        if not self.leveled:
            seq = rows[-1][SEQ]
            if marks[0] <= seq < MAX_SEQ:
                marks[0] = seq + 1
            return
        for row in rows:
            index = self._index.get((row[RECIPIENT], row[PRIORITY]))
            if index is not None and marks[index] <= row[SEQ] < MAX_SEQ:
                marks[index] = row[SEQ] + 1

    def advance_to(self, first: int) -> None:
        """Move the mark to ``first``: a peek found no available row between the two."""
        if not self.leveled and self._marks[0] < first < MAX_SEQ:
            self._marks[0] = first

    def skip(self, level: Level, after: Callable[[int], int]) -> None:
        """Move a level's mark to the seq that ``after`` returns for it: the rows between are not for this process."""
        index = self._index.get(level)
        if index is not None:
            self._marks[index] = min(max(self._marks[index], after(self._marks[index])), MAX_SEQ)

    def retreat(self, seq: int, *, returned: bool = True) -> None:
        """Lower every mark to this row, which is available. ``returned=False``: it was not claimed before, so that no
        active claim can have passed it."""
        for index, mark in enumerate(self._marks):
            if seq < mark:
                self._marks[index] = seq
        self._returns[0 if returned else 1] += 1

    def note_returned(self) -> None:
        """Rows came back, and it is not known which: no mark is lowered, and claims that are active do not advance
        one."""
        self._returns[0] += 1

    def retreat_all(self, seqs: Sequence[int]) -> None:
        """Lower every mark to these returned rows."""
        self.retreat(min(seqs))

    def reset(self) -> None:
        """Begin at zero again."""
        for index in range(len(self._marks)):
            self._marks[index] = 0
        self.window.position = None

    # -- rescan -------------------------------------------------------------------------------------------------------

    def behind(self) -> list[SeqRange]:
        """The ranges of the present window, cut off at each level's mark; empty if none lies below. It is the near
        window after rows came back, and the rescan's else."""
        if self._near is None and self._returns[0] != self._returns_seen and self._near_windows < NEAR_WINDOWS_IN_A_ROW:
            self._returns_seen = self._returns[0]
            self._near_windows += 1
            self._near = max(0, max(self._marks) - FIRST_WINDOW)
        start, end = self._bounds
        marks = zip(self.levels, self._marks, strict=False)
        ranges = [SeqRange(start, min(end, mark) - 1, *level) for level, mark in marks if start < min(end, mark)]
        if self.leveled:
            ranges.sort(key=lambda r: -r.priority)
        return ranges

    def rescanned(self, seconds: float, reached: int = 0) -> bool:
        """The present window was read in ``seconds`` (0: its content is known without a query), up to the seq
        ``reached`` (0: completely). Continue with the next one; return whether that completed a cycle."""
        if self._near is not None:
            self._near = reached + 1 if reached else None
            return False
        self._near_windows = 0
        return self.window.advance(max(self._marks), self.server_time(seconds), reached)

    def is_present(self, only: SeqRange) -> bool:
        """Whether the range is of the present window: of two receivers that read one window, the first continues."""
        start, end = self._bounds
        return start <= only.low < end

    @property
    def rescanning(self) -> bool:
        """Whether a near window is due or a cycle has begun."""
        return self._near is not None or self.window.position is not None

    @property
    def cycle_seconds(self) -> float:
        """Server time of the present cycle of the rescan, or of the last one."""
        return self.window.cycle_seconds

    def reconnected(self) -> None:
        """Forget the round trip: the next query may go to another, more distant server."""
        self.round_trip = math.inf

    @property
    def _bounds(self) -> tuple[int, int]:
        return self.window.bounds() if self._near is None else (self._near, self._near + FIRST_WINDOW)

    def server_time(self, seconds: float) -> float:
        """``seconds`` without the round trip, as far as it is known."""
        if seconds:
            self.round_trip = min(self.round_trip, seconds)
        return max(0.0, seconds - self.round_trip)

    # -- shared by processes ------------------------------------------------------------------------------------------

    def share(
        self, marks: memoryview[int] | MutableSequence[int], returns: memoryview[int] | MutableSequence[int]
    ) -> None:
        """Keep the marks in this memory from now on, which other processes with the same levels use too: a claim then
        begins above what any of them has claimed. ``returns`` holds the two counters."""
        for index, mark in enumerate(self._marks):
            marks[index] = max(marks[index], mark)
        self._marks, self._returns = marks, returns

    @property
    def returns(self) -> int:
        """How often claimed rows came back, in all processes that share these marks."""
        return self._returns[0]

    @property
    def retreats(self) -> int:
        """How often a mark was lowered, for any reason, in all processes that share these marks."""
        return self._returns[0] + self._returns[1]

    @property
    def near_is_due(self) -> bool:
        """Whether rows came back since the last near window."""
        return self._near is not None or self._returns[0] != self._returns_seen

    # -- figures ------------------------------------------------------------------------------------------------------

    def level_of(self, row: Claimed) -> Level:
        """The level under which a claimed row was found."""
        if not self.leveled:
            return self.levels[0]
        level = row[RECIPIENT], row[PRIORITY]
        return level if level in self._index else ("", row[PRIORITY])

    def count_in(self, ranges: Sequence[SeqRange], rows: Sequence[Claimed]) -> int:
        """How many of the rows lie in these ranges, each of its own level."""
        count = 0
        for row in rows:
            level, seq = self.level_of(row), row[SEQ]
            count += any(only.low <= seq <= only.high and (only.recipient, only.priority) == level for only in ranges)
        return count

    @property
    def lowest(self) -> int:
        """The lowest mark: where a claim begins on a queue without levels."""
        return min(self._marks)


# -- marks of this process --------------------------------------------------------------------------------------------

_marks: dict[tuple[Any, ...], LowWaterMarks] = {}


def marks_of(
    queue: Any,
    alias: str,
    levels: tuple[Level, ...],
    leveled: bool,
    make: Callable[[tuple[Level, ...], bool], LowWaterMarks] = LowWaterMarks,
) -> LowWaterMarks:
    """The marks that this process keeps for a queue and a set of levels."""
    key = (queue._meta.db_table, alias, levels)
    marks = _marks.get(key)
    if marks is None:
        marks = _marks[key] = make(levels, leveled)
    return marks


def forget() -> None:
    """Begin at zero again in every queue (tests)."""
    _marks.clear()


def retreat_marks(queue: Any, alias: str, seqs: Sequence[int]) -> None:
    """Rows of this queue came back in this process: lower every mark above them."""
    for (table, at, _), marks in list(_marks.items()):
        if table == queue._meta.db_table and at == alias:
            marks.retreat_all(seqs)


#: Seqs of new messages that one query reads, and the number of such queries before one claim.
NEW_ROWS, NEW_ROWS_QUERIES = 5_000, 4
#: The most pending order keys; with more of them the mark retreats.
MAX_PENDING = 10_000
#: The most remembered order keys of claimed messages.
MAX_REMEMBERED = 20_000
#: The number of the last seqs that each rescan reads: a late commit is mostly so many messages late. (2 ms.)
NEAR = 1_000
#: Pending order keys that a peek counts.
MAX_PEEKED = 500


class ClaimStart(NamedTuple):
    """The state with which a claim began: the pending order keys that it takes, the mark, the number of retreats, and
    the highest seq that was read."""

    pending: list[int]
    mark: int
    retreats: int
    read_to: int | None

    @property
    def ranges(self) -> list[SeqRange]:
        """The ranges of the claim, in order."""
        return [*(SeqRange(key, key) for key in self.pending), SeqRange(self.mark, MAX_ORDER_KEY)]


class Priority64Marks(LowWaterMarks):
    """The mark of such a queue in one process; safe from any thread."""

    __slots__ = ("_lock", "_order_keys", "_pending", "mark", "mark_retreats", "read_to", "rescan_at")

    def __init__(self, levels: Iterable[Level] = (("", 0),), leveled: bool = True) -> None:
        super().__init__(levels, leveled=True)
        self._lock = threading.Lock()
        self.mark = 0
        #: How often the mark retreated: a claim that began before that does not advance it.
        self.mark_retreats = 0
        #: Order keys below the mark where a message is available, ascending.
        self._pending: list[int] = []
        #: The highest seq that was read; None: none was read yet.
        self.read_to: int | None = None
        #: The order keys of claimed messages by seq.
        self._order_keys: OrderedDict[int, int] = OrderedDict()
        #: When the rescan continues, by the monotonic clock.
        self.rescan_at = 0.0

    # -- claims -------------------------------------------------------------------------------------------------------

    def begin_claim(self, limit: int) -> ClaimStart:
        """Begin a claim of at most ``limit`` messages; it owns the pending order keys that it gets."""
        with self._lock:
            pending, self._pending = self._pending[:limit], self._pending[limit:]
            return ClaimStart(pending, self.mark, self.mark_retreats, self.read_to)

    def end_claim(self, start: ClaimStart, rows: Sequence[Claimed] | None, full: bool, *, failed: bool = False) -> None:
        """The claim got these rows; None: they are unknown. ``failed``: what it had claimed is available again, and
        other claims may have passed it."""
        with self._lock:
            if failed:
                self.mark = min(self.mark, start.mark)
                self.mark_retreats += 1
                self._returns[0] += 1
            if rows is None:
                self._add_pending(start.pending)
                return
            last = -1
            for row in rows:
                key = order_key(row[PRIORITY], row[SEQ])
                self._order_keys[row[SEQ]] = key
                last = max(last, key)
            while len(self._order_keys) > MAX_REMEMBERED:
                self._order_keys.popitem(last=False)
            if full:
                self._add_pending([key for key in start.pending if key > last])
            if last >= self.mark and start.retreats == self.mark_retreats:
                self.mark = last + 1
                # New rows that were read meanwhile lay below the new mark but not below the old one: they are not
                # pending, and this claim may not have seen them.
                if start.read_to is not None and self.read_to is not None:
                    self.read_to = min(self.read_to, start.read_to)

    def order_key_of(self, seq: int) -> int | None:
        """The order key of a message that was claimed here lately."""
        return self._order_keys.get(seq)

    def retreat(self, seq: int, *, returned: bool = True) -> None:
        """Make a message pending; ``seq`` may be its order key."""
        with self._lock:
            key = seq if seq > MAX_SEQ else self._order_keys.get(seq)
            if key is not None:
                self._add_pending([key])
        if key is None or returned:
            self._returns[0] += 1

    def retreat_all(self, seqs: Sequence[int]) -> None:
        for seq in seqs:
            self.retreat(seq)

    def skip(self, level: Any, after: Any) -> None:
        with self._lock:
            self.mark = max(self.mark, after(self.mark))

    def reset(self) -> None:
        with self._lock:
            self.mark, self._pending, self.window.position = 0, [], None
            self.mark_retreats += 1

    def _add_pending(self, keys: Sequence[int]) -> None:
        if len(self._pending) + len(keys) > MAX_PENDING:
            # One scan from the first of them on costs less than a seek for each.
            self.mark = min(self.mark, *self._pending[:1], *keys)
            self.mark_retreats += 1
            self._pending = []
            return
        for key in keys:
            index = bisect_right(self._pending, key)
            if key < self.mark and (not index or self._pending[index - 1] != key):
                insort(self._pending, key)

    # -- rescan -------------------------------------------------------------------------------------------------------

    def read_new(self, sql: Any, connection: Any) -> None:
        """Read the seqs above the highest one that was read."""
        if self.read_to is None:
            # The highest seq first: rows above it are new, and those below it are found from the mark, which is 0.
            last = sql.figures.last_seq(connection)
            with self._lock:
                self.read_to = last if self.read_to is None else self.read_to
        for _ in range(NEW_ROWS_QUERIES):
            after, mark = self.read_to or 0, self.mark
            keys, last, count = sql.claims.scan_order_keys(connection, after + 1, MAX_SEQ, mark, NEW_ROWS)
            with self._lock:
                self._add_pending(keys)
                if self.mark > mark:
                    continue  # a row between the two marks is neither pending nor ahead
                self.read_to = max(after, self.read_to or 0, last)
            if count < NEW_ROWS:
                return

    def rescan(self, sql: Any, connection: Any, unwanted: Callable[[int], bool] = lambda key: False) -> None:
        """Read the last seqs again, and the next window of all if it is due: for late commits and returned messages,
        without order keys that are ``unwanted``."""
        self.read_new(sql, connection)
        read_to = self.read_to or 0
        keys, _, _ = sql.claims.scan_order_keys(connection, read_to - NEAR, read_to, self.mark, NEAR + 1)
        self._add_wanted(keys, unwanted)
        started = monotonic()
        if started < self.rescan_at and self._returns[0] == self._returns_seen:
            return
        self._returns_seen = self._returns[0]
        low, end = window = self.window.bounds()
        keys, last, count = sql.claims.scan_order_keys(connection, low, min(end - 1, read_to), self.mark, WINDOW_ROWS)
        seconds = monotonic() - started
        self._add_wanted(keys, unwanted)
        with self._lock:
            self.rescan_at = started + seconds * (1 + DUTY_CYCLE)
            if self.window.bounds() == window:  # else another thread has read it meanwhile and continued
                self.window.advance(read_to + 1, self.server_time(seconds), last if count == WINDOW_ROWS else 0)

    def _add_wanted(self, keys: Sequence[int], unwanted: Callable[[int], bool]) -> None:
        wanted = [key for key in keys if not unwanted(key)]
        with self._lock:
            self._add_pending(wanted)

    def ahead(self) -> list[SeqRange]:
        """The ranges of a peek, in order; it takes no pending key."""
        with self._lock:
            return [*(SeqRange(key, key) for key in self._pending[:MAX_PEEKED]), SeqRange(self.mark, MAX_ORDER_KEY)]

    def behind(self) -> list[SeqRange]:
        """None: ``rescan`` reads by seq, and makes what it finds pending."""
        return []

    # -- shared by processes, figures ---------------------------------------------------------------------------------

    def share(
        self, marks: memoryview[int] | MutableSequence[int], returns: memoryview[int] | MutableSequence[int]
    ) -> None:
        """Share the counters only: an order key needs 128 bits, so each process keeps a mark of its own."""
        self._returns = returns

    @property
    def lowest(self) -> int:
        return 0


def marks_for(queue: Any, alias: str, levels: tuple[Level, ...], leveled: bool) -> LowWaterMarks:
    """``marks_of`` with the class that the queue's priority needs."""
    return marks_of(queue, alias, levels, leveled, Priority64Marks if queue.delivery.priority else LowWaterMarks)
