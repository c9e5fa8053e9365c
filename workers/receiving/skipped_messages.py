"""What is in a queue and not for this process: messages of types that nobody here takes, or that its filter does not let pass.
They stay where they are, for others; claims look past them, and now and then somebody reads them again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from django.db import connections

from queueapp.flow.filters import SubscriberFilter
from queueapp.receiving.low_water_marks import DUTY_CYCLE
from queueapp.services.connection_timeouts import ResponseDeadline
from queueapp.sql import QueueSql
from queueapp.sql.claims import HEADERS, SEQ, Claimed, SeqRange

from .claim_tracker import ActiveClaim, ClaimTracker
from .handlers import HandlerTable
from .stats import Stats

log = logging.getLogger("queueapp.workers")

#: Headers read at once while looking for the end of a stretch of messages that nobody here takes.
FIRST_WALK, WALK = 50, 5_000
#: The same where the bodies are read as well.
FILTERED_WALK = 1_000
#: Types that are told apart.
MOST_TYPES = 1_000


class SkippedMessages:
    """Those of one queue. ``sql`` gives its statements as they are now; ``again`` is told that there is something to look for."""

    def __init__(
        self,
        label: str,
        alias: str,
        sql: Callable[[], QueueSql],
        again: Callable[[], None],
        *,
        handlers: HandlerTable,
        filter: SubscriberFilter | None,
        claiming: ClaimTracker,
        stats: Stats,
        stopping: threading.Event,
    ) -> None:
        self._label, self._alias = label, alias
        self._sql, self._again = sql, again
        self._handlers, self._filter = handlers, filter
        self._claiming, self._stats, self._stopping = claiming, stats, stopping
        #: Types that nobody here takes, and how many messages of each were seen.
        self.types: dict[str, int] = {}
        self._reread_at = 0.0
        self._walking, self._telling = threading.Lock(), threading.Lock()

    def leave_alone(self, under_way: ActiveClaim, rows: Sequence[Claimed], seqs: Sequence[int]) -> None:
        """Of the rows of this claim no consumer here takes these: they stay where they are, for others, and this process
        looks past them. Behind them there may be many more: they are looked through without being claimed."""
        unknown = set(seqs)
        self._stats.unknown += len(unknown)
        for row in rows:
            if row[SEQ] in unknown and (self._filter is None or not self._handlers.knows(row[HEADERS])):
                self._tell_type(row[HEADERS])
        walk_from = self._claiming.leave_alone(under_way, rows, unknown)
        # One task looks on; another that meets some meanwhile waits for it, and not for long.
        if walk_from is not None and self._walking.acquire(timeout=5.0):
            try:
                self._walk(self._claiming.rest_of(walk_from))
            finally:
                self._walking.release()

    def pass_by(self, under_way: ActiveClaim, rows: Sequence[Claimed]) -> None:
        """No live subscriber's filter lets these pass, of a queue that shares messages out: the next claim looks behind them."""
        self._stats.unknown += len(rows)
        self._claiming.leave_alone(under_way, rows, {row[SEQ] for row in rows})

    def reread(self, pieces: int) -> None:
        """Read some of the stretches again that held nothing for this process: something may have come back there. For a
        tenth of the time at most: under load there are two hundred looks a second."""
        connection = connections[self._alias]
        started = monotonic()
        if started < self._reread_at:
            return
        for _ in range(pieces):
            stretch = self._claiming.to_reread()
            if stretch is None:
                break
            if self._handlers.copies:
                self._handlers.learn(connection)  # somebody may subscribe by now
            heads = self._heads(connection, stretch, WALK)
            wanted = [head[0] for head in heads if not self._is_strange(head, stretch)]
            if wanted:
                for seq in wanted:
                    self._claiming.lower(seq)
                self._again()  # the look that this is a part of has seen nothing of them
            longest = WALK if self._filter is None else FILTERED_WALK
            self._claiming.reread(stretch, heads[-1][0] if len(heads) == longest else stretch.high)
        self._reread_at = monotonic() + DUTY_CYCLE * (monotonic() - started)

    def _walk(self, stretch: SeqRange) -> None:
        """Look on from the last unknown message until one that is known here, or the end."""
        connection = connections[self._alias]
        most, longest = FIRST_WALK, WALK if self._filter is None else FILTERED_WALK
        while not self._stopping.is_set():
            with ResponseDeadline(connection):
                heads = self._heads(connection, stretch, most)
            unknown = next((n for n, head in enumerate(heads) if not self._is_unknown(head, stretch)), len(heads))
            if unknown:
                self._claiming.extend_unknown(stretch, heads[unknown - 1][0])
            if unknown < most:
                return
            most = min(most * 4, longest)
            stretch = stretch._replace(low=heads[-1][0] + 1)

    def _heads(self, connection: Any, stretch: SeqRange, most: int) -> Sequence[tuple[Any, ...]]:
        """(seq, headers) of what lies there, and the bodies where a filter asks for them."""
        if self._filter is None:
            return self._sql().claims.read_heads(connection, stretch, most)
        return self._sql().claims.read_heads_and_bodies(connection, stretch, min(most, FILTERED_WALK))

    def _is_strange(self, head: tuple[Any, ...], stretch: SeqRange) -> bool:
        """Whether it is not for this process. What is to be copied for several is, whatever its filter says."""
        handlers = self._handlers
        if not stretch.recipient and handlers.copies and handlers.wanted_by(head[1]):
            return False
        if not stretch.recipient and not handlers.knows(head[1]):
            return True
        return self._filter is not None and not self._filter.passes(head[1], head[2])

    def _is_unknown(self, head: tuple[Any, ...], stretch: SeqRange) -> bool:
        if not self._is_strange(head, stretch):
            return False
        if not stretch.recipient and not self._handlers.knows(head[1]):
            self._tell_type(head[1])
        return True

    def _tell_type(self, headers: str) -> None:
        kind = self._handlers.type_of(headers)
        with self._telling:
            if len(self.types) >= MOST_TYPES and kind not in self.types:
                kind = "(others)"
            count = self.types.get(kind)
            self.types[kind] = (count or 0) + 1
        if count is None:
            log.warning(
                "%s: messages of type %r have no consumer in this process and are left to others.",
                self._label,
                kind,
            )
