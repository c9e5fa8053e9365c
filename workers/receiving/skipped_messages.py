"""Messages of a queue that are not for this process: of a type without a consumer here, or that its filter does not
match.

They stay in the queue for other workers. Claims skip them (``claim_tracker.SkipRanges``), and they are read again from
time to time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from time import monotonic
from typing import Any

from django.db import connections

from queueapp.receiving.low_water_marks import DUTY_CYCLE
from queueapp.services.connection_timeouts import ResponseDeadline
from queueapp.sql.claims import HEADERS, SEQ, Claimed, SeqRange

from .claim_tracker import ActiveClaim

log = logging.getLogger("queueapp.workers")

#: Headers read at once while looking for the end of a range of messages without a consumer here: at first, and at most.
FIRST_SCAN, MAX_SCAN = 50, 5_000
#: At most, where the bodies are read as well.
MAX_FILTERED_SCAN = 1_000
#: Types that are counted one by one.
MAX_TYPES = 1_000


class SkippedMessages:
    """The skipped messages of one queue. ``state`` is its ``QueueState``, which makes it."""

    def __init__(self, state: Any) -> None:
        self._state = state
        #: Types without a consumer here, and how many messages of each were met.
        self.types: dict[str, int] = {}
        #: When skip ranges are read again, by the monotonic clock.
        self.next_reread_at = 0.0
        self._scan_lock, self._types_lock = threading.Lock(), threading.Lock()

    def skip(self, claim: ActiveClaim, rows: Sequence[Claimed], seqs: Sequence[int]) -> None:
        """Of the rows of this claim, these are not for this process: they stay in the queue, and claims skip them. Many
        more may follow them: those are read without being claimed."""
        state, skipped = self._state, set(seqs)
        state.stats.skipped += len(skipped)
        for row in rows:
            if row[SEQ] in skipped and (state.filter is None or not state.handlers.knows(row[HEADERS])):
                self._count_type(row[HEADERS])
        scan_from = state.claims.skip_rows(claim, rows, skipped)
        # One receiver scans on; another that meets some meanwhile waits for it, and not for long.
        if scan_from is not None and self._scan_lock.acquire(timeout=5.0):
            try:
                self._scan(state.claims.rest_of(scan_from))
            finally:
                self._scan_lock.release()

    def skip_unassigned(self, claim: ActiveClaim, rows: Sequence[Claimed]) -> None:
        """No live subscriber's filter matches these, of a queue that shares messages out: the next claim reads behind
        them."""
        self._state.stats.skipped += len(rows)
        self._state.claims.skip_rows(claim, rows, {row[SEQ] for row in rows})

    def reread(self, pieces: int) -> None:
        """Read some of the skip ranges again: a message for this process may have been returned there. For a tenth of
        the time at most: under load there are two hundred peeks a second."""
        state = self._state
        connection = connections[state.alias]
        started = monotonic()
        if started < self.next_reread_at:
            return
        for _ in range(pieces):
            stretch = state.claims.next_reread()
            if stretch is None:
                break
            if state.handlers.copies:
                state.handlers.refresh_subscribers(connection)  # there may be new ones
            heads = self._heads(connection, stretch, MAX_SCAN)
            wanted = [head[0] for head in heads if not self._is_foreign(head, stretch)]
            if wanted:
                for seq in wanted:
                    state.claims.retreat(seq)
                state.events.messages_available()  # the peek that this is a part of has seen nothing of them
            longest = MAX_SCAN if state.filter is None else MAX_FILTERED_SCAN
            state.claims.reread_to(stretch, heads[-1][0] if len(heads) == longest else stretch.high)
        self.next_reread_at = monotonic() + DUTY_CYCLE * (monotonic() - started)

    def _scan(self, stretch: SeqRange) -> None:
        """Read on from the last skipped message until one that is for this process, or the end."""
        state = self._state
        connection = connections[state.alias]
        limit, longest = FIRST_SCAN, MAX_SCAN if state.filter is None else MAX_FILTERED_SCAN
        while not state.stopping.is_set():
            with ResponseDeadline(connection):
                heads = self._heads(connection, stretch, limit)
            skipped = next((n for n, head in enumerate(heads) if not self._count_foreign(head, stretch)), len(heads))
            if skipped:
                state.claims.extend_skipped(stretch, heads[skipped - 1][0])
            if skipped < limit:
                return
            limit = min(limit * 4, longest)
            stretch = stretch._replace(low=heads[-1][0] + 1)

    def _heads(self, connection: Any, stretch: SeqRange, limit: int) -> Sequence[tuple[Any, ...]]:
        """(seq, headers) of what lies there, and the bodies where a filter needs them."""
        claims = self._state.sql.claims
        heads: Sequence[tuple[Any, ...]]
        if self._state.filter is None:
            heads = claims.read_heads(connection, stretch, limit)
        else:
            heads = claims.read_heads_and_bodies(connection, stretch, min(limit, MAX_FILTERED_SCAN))
        return heads

    def _is_foreign(self, head: tuple[Any, ...], stretch: SeqRange) -> bool:
        """Whether it is not for this process. What is to be copied for several consumers is, whatever its filter
        matches."""
        handlers, filter = self._state.handlers, self._state.filter
        if not stretch.recipient and handlers.copies and handlers.copy_recipients(head[1]):
            return False
        if not stretch.recipient and not handlers.knows(head[1]):
            return True
        return filter is not None and not filter.passes(head[1], head[2])

    def _count_foreign(self, head: tuple[Any, ...], stretch: SeqRange) -> bool:
        if not self._is_foreign(head, stretch):
            return False
        if not stretch.recipient and not self._state.handlers.knows(head[1]):
            self._count_type(head[1])
        return True

    def _count_type(self, headers: str) -> None:
        kind = self._state.handlers.type_of(headers)
        with self._types_lock:
            if len(self.types) >= MAX_TYPES and kind not in self.types:
                kind = "(others)"
            count = self.types.get(kind)
            self.types[kind] = (count or 0) + 1
        if count is None:
            log.warning(
                "%s: messages of type %r have no consumer in this process and are left to other workers.",
                self._state.label, kind,
                extra={"queue": self._state.label, "message_type": kind},
            )  # fmt: skip
