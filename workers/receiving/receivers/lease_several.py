"""AT_LEAST_ONCE with consumers of several messages. A call that fails is halved at once: its messages are still leased."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic

from django.db import Error, connections

from queueapp.conf import settings
from queueapp.errors import LeaseLost
from queueapp.services.connection_timeouts import ResponseDeadline
from queueapp.sql import backend_of
from queueapp.sql.claims import HEADERS, SEQ, Claimed

from ..claim_tracker import ActiveClaim
from ..handlers import WorkerStopped
from ..queue_state import QueueState
from ..slot import Slot
from .at_least_once import AtLeastOnceReceiver, Failed, LeasedBatch
from .base import HandlerRoute
from .several import Ready, SeveralTask, WholeBatches


class Multiples(WholeBatches):
    """Several batches a claim where handlers are fast: 100 a call, claimed and acked by 500, is a fifth of the round trips."""

    def __init__(self, batch: int, most: int, target_seconds: float) -> None:
        super().__init__(batch)
        self._batch, self._time = batch, target_seconds
        self.limit = self._fits = max(1, most // batch) * batch

    def weigh(self, rows: Sequence[Claimed]) -> None:
        n = self.n
        super().weigh(rows)
        self.n = min(n, self._fits)

    def observe(self, count: int, seconds: float, *, full: bool = True) -> None:
        wanted = int(self._time * count / seconds) if seconds else self.limit
        ceiling = self.n * 2 if full and count >= self.n else self.n
        self.n = max(self._batch, min(wanted, ceiling, self.limit) // self._batch * self._batch)
        self.n = min(self.n, max(1, self._fits))


class LeaseSeveralTask(SeveralTask, AtLeastOnceReceiver):
    """AT_LEAST_ONCE."""

    def __init__(self, state: QueueState, slot: Slot | None) -> None:
        super().__init__(state, slot)
        most = min(settings.MAX_BATCH, backend_of(connections[self.alias]).max_batch)
        self.size = Multiples(self._largest, most, self._target)
        #: What the calls of one batch have kept checkpoints of.
        self._rewritten: set[int] = set()
        #: The message before was handled alone, since it may be one that kills.
        self._suspected = False
        self._with_others = self._handle_with_others
        # One message alone, to know what it is, would be a call that nobody asked for.
        self._caution.knows = True

    def receive(self, limit: int) -> int:
        limit = self.gather(limit)
        return super().receive(limit) if limit else 0

    def _handle_with_others(self, batch: LeasedBatch, row: Claimed, failures: list[Failed], unknown: list[int]) -> bool:
        if self._suspected:
            self._ack_early(batch)  # the one that kills may be next
        route = self.route_of(row)
        self._suspected = route is not None and self.is_suspect(row, leased=True)
        others = [] if route is None or self._suspected else self._take_along(batch, route, row)
        if route is None or not others:
            return False
        self._handle_several(batch, route, [row, *others], failures, unknown)
        return True

    def _flush(
        self, batch: LeasedBatch, failures: list[Failed], unknown: list[int], claim: ActiveClaim, average: float
    ) -> None:
        """As ever, but what is kept are whole batches: half of one would be a call that nobody asked for."""
        self._end(batch, failures, unknown, claim)
        keep = 0 if monotonic() > batch.expires else int(self._target / average) // self._largest * self._largest
        self._give_back(batch, keep)

    def _take_along(self, batch: LeasedBatch, route: HandlerRoute, first: Claimed) -> list[Claimed]:
        """Take out of what waits the others of the same call. What is of another one is out of it for a moment, and held, so that
        a renewal in between does not miss it."""
        others: list[Claimed] = []
        rest: list[Claimed] = []
        while len(others) < route.entry.batch - 1 and (row := self._next(batch)) is not None:
            (others if self.goes_with(row, route, first, leased=True) else rest).append(row)
        batch.waiting.extendleft(reversed(rest))
        if rest:
            passed = {row[SEQ] for row in rest}
            batch.in_flight[:] = [seq for seq in batch.in_flight if seq not in passed]
        return others

    def _handle_several(
        self,
        batch: LeasedBatch,
        route: HandlerRoute,
        rows: Sequence[Claimed],
        failures: list[Failed],
        unknown: list[int],
    ) -> None:
        """Call their handler, and where that fails as a whole with the halves of them, until those that fail are alone."""
        ready: list[Ready] = []
        for row in rows:
            made = self.make_ready(route, row, leased=True)
            if isinstance(made, Ready):
                ready.append(made)
            elif made is None:
                unknown.append(row[SEQ])
            else:
                failures.append((row, made, None))
        parts = deque([ready] if ready else [])
        self._rewritten.clear()
        while parts:
            part = parts.popleft()
            if self.state.stopping.is_set() and len(part) < len(ready):
                stopped = WorkerStopped(f"{route.entry.registration.name} was not called: the worker stops.")
                failures += [(one.row, stopped, None) for one in part]
                continue
            outcome = self.call_several(route, part, leased=True)
            if outcome is None:
                batch.done.extend([one.row[SEQ] for one in part])
            elif isinstance(outcome, dict):
                batch.done.extend([one.row[SEQ] for place, one in enumerate(part) if place not in outcome])
                failures += [(part[place].row, error, self.items_of(place)) for place, error in outcome.items()]
            elif len(part) == 1 or isinstance(outcome, WorkerStopped):
                failures += [(one.row, outcome, self.items_of(place)) for place, one in enumerate(part)]
            else:
                part, half = self._with_checkpoints(part), len(part) // 2
                parts.extendleft([part[half:], part[:half]])
            if parts and monotonic() > batch.expires - batch.period / 2:
                self._ack_early(batch)

    def write_headers(self, seq: int, headers: str) -> None:
        super().write_headers(seq, headers)
        self._rewritten.add(seq)

    def _with_checkpoints(self, part: list[Ready]) -> list[Ready]:
        """As their rows are now: a call that failed may have committed checkpoints before that, or not."""
        seqs = self._rewritten.intersection(one.row[SEQ] for one in part)
        if not seqs:
            return part
        connection = connections[self.alias]
        rows = self.queue._base_manager.using(self.alias).filter(seq__in=sorted(seqs))
        while True:
            try:
                with ResponseDeadline(connection):
                    headers = dict(rows.values_list("seq", "headers"))
                break
            except Error as error:
                if not self.state.retry_after(error, self.state.breaker, connection):
                    raise
        return [
            Ready(
                (*one.row[:HEADERS], headers.get(one.row[SEQ], one.row[HEADERS]), *one.row[HEADERS + 1 :]),
                one.message,
                one.attempt,
            )
            for one in part
        ]

    def _ack_early(self, batch: LeasedBatch) -> None:
        """What is done: a crash is not to double it."""
        seqs = set(batch.done)
        if seqs:
            self._ack(batch)
            batch.acked |= seqs
            self.handed.used()

    def extend_several(self, seqs: Sequence[int], period: timedelta | None) -> None:
        batch = self.batch
        if batch is None:
            raise LeaseLost(self.queue._meta.label, seqs[0])
        if batch.period == math.inf:
            return  # they have more than they ask for
        seconds = batch.period if period is None else period.total_seconds()
        reached = self.sql.acks.extend(connections[self.alias], sorted(seqs), batch.token, int(seconds * 1000))
        if lost := {*seqs}.difference(reached):
            raise LeaseLost(self.queue._meta.label, min(lost))
        if seconds < batch.period:
            batch.renew_again.update(seqs)  # they end before the others of their batch are due
