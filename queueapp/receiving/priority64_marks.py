"""The low-water mark of a queue whose priority has 64 bits: one mark for the whole queue, and single rows below it.

Messages have one total order, by priority and then by seq; the *order key* is a message's number in it (128 bits). The
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

import threading
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from time import monotonic
from typing import Any, NamedTuple

from ..sql.claims import MAX_ORDER_KEY, MAX_SEQ, PRIORITY, SEQ, WINDOW_ROWS, Claimed, SeqRange, order_key
from .low_water_marks import DUTY_CYCLE, Level, LowWaterMarks, marks_of

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
