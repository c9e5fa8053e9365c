"""AT_LEAST_ONCE: lease a batch, handle each message, ack the batch in one statement of its own, seqs ascending.

Claim and ack are never in one transaction: that deadlocks. A slow handler makes the batch end what is done, renew what is
in hand and give back what was not started.
"""

from __future__ import annotations

import logging
import uuid
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

from django.db import Error, connections

from queueapp.conf import settings
from queueapp.errors import LeaseLost
from queueapp.messages import new_id
from queueapp.sql import backend_of
from queueapp.sql.claimed import SEQ, Claimed

from ...connections.dead_peers import Answering
from ..claiming import UnderWay
from ..desk import Desk
from ..sizing import BatchSize
from ..slot import Slot
from ..suspects import FEW
from .base import Task

log = logging.getLogger("workers")


#: A message of a batch, what its handler raised, and what it had left in ``Context.items``.
_Failed = tuple[Claimed, BaseException, dict[str, Any] | None]


class Batch:
    """A leased batch. ``waiting`` and ``done`` are shared with the thread that looks after leases (``services.renewals``):
    who takes a message out of one of them has it for himself, so neither needs a lock."""

    __slots__ = ("acked", "again", "done", "expires", "held", "token", "waiting")

    def __init__(self, token: uuid.UUID, expires: float, rows: Sequence[Claimed]) -> None:
        self.token = token
        #: Until when its leases last at least, but for those in ``again``. Moved on by the renewals alone.
        self.expires = expires
        self.waiting: deque[Claimed] = deque(rows)
        #: Handled, and not yet acked.
        self.done: deque[int] = deque()
        #: In hand, or handled since the task last ended what was done.
        self.held: list[int] = []
        #: Acked early, behind a slow handler.
        self.acked: set[int] = set()
        #: To be renewed at the next look: locked by somebody at the last one, or shortened by their handler.
        self.again: set[int] = set()

    def leased(self) -> set[int]:
        """What a renewal has to cover. ``waiting`` first: what goes over to ``held`` is in both for a moment."""
        waiting = [row[SEQ] for row in list(self.waiting)]
        return {*waiting, *self.held} - self.acked

    def take_waiting(self, keep: int = 0) -> list[int]:
        """Take what was not started, from the right, all but ``keep``; ascending."""
        taken: list[int] = []
        while len(self.waiting) > keep:
            try:
                taken.append(self.waiting.pop()[SEQ])
            except IndexError:  # the other one took the last
                break
        taken.sort()
        return taken

    def take_done(self) -> list[int]:
        """Take everything out of ``done``, ascending."""
        taken: list[int] = []
        try:
            while True:
                taken.append(self.done.popleft())
        except IndexError:
            taken.sort()
            return taken


class LeaseTask(Task):
    """AT_LEAST_ONCE."""

    def __init__(self, desk: Desk, slot: Slot | None) -> None:
        super().__init__(desk, slot)
        most = min(settings.MAX_BATCH, backend_of(connections[self.alias]).max_batch)
        self._target = settings.BATCH_TARGET.total_seconds()
        self.size = BatchSize(most, self._target, settings.MAX_BATCH_BYTES)
        self._caution = desk.caution
        self._lease_ms = int(self.queue.delivery.lease_period / timedelta(milliseconds=1))

    def receive(self, limit: int) -> int:
        self.full = False
        level = self._caution.level
        if level < 2:
            return self._receive(min(limit, FEW) if level else limit, level)
        # What is leased is in hand, so that a crash of everything counts against this message and no other.
        with self.desk.suspects.leasing_alone(self.desk.stopping) as may:
            return self._receive(1, level) if may else 0

    def _receive(self, limit: int, level: int) -> int:
        connection = connections[self.alias]
        token = new_id()
        with self.desk.claim(limit) as claim:
            asked = monotonic()  # before the statement, so that a slow round trip cannot stretch the lease
            with Answering(connection):
                claim.rows = rows = self.sql.claim_by_lease(
                    connection, claim.ranges, limit, token, self.desk.subscriber, self._lease_ms
                )
        if not rows:
            return 0
        self.full = len(rows) == limit
        self.desk.claimed(rows, self.full)
        self.size.weigh(rows)
        self.batch = batch = Batch(token, asked + self._lease_ms / 1000, rows)
        if self.slot is not None:
            self.slot.lease(token)
        try:
            needed = self._caution.needed(rows)
            if needed > level and len(rows) > (keep := FEW if needed == 1 else 0):
                # Claimed as if they were harmless: most go back unhandled and uncounted, and are claimed again with care.
                self._give_back(batch, keep)
                self.full = True
            self._handle(batch, claim)
        finally:
            self.batch = None
        return len(rows)

    def _handle(self, batch: Batch, claim: UnderWay) -> None:
        held, done = batch.held, batch.done
        failures: list[_Failed] = []
        unknown: list[int] = []
        # The handlers' time alone: a batch that shrank when a claim was slow would make claims of one while they are.
        started = monotonic()
        flush_at = self._flush_at(batch, started)
        spent, handled = 0.0, 0
        self.handed.used()
        while (row := self._next(batch)) is not None:
            outcome = self.call(row, leased=True)
            if outcome is None:
                done.append(row[SEQ])
            elif outcome is False:
                unknown.append(row[SEQ])
            else:
                assert isinstance(outcome, BaseException)
                failures.append((row, outcome, self.items))
            if (now := monotonic()) > flush_at:
                handled += len(held)
                spent += now - started
                self._flush(batch, failures, unknown, claim, spent / handled)
                self.handed.used()
                started = monotonic()
                flush_at = self._flush_at(batch, started)
        handled += len(held)
        if handled:
            self.size.observe(handled, spent + monotonic() - started, full=len(claim.rows or ()) >= claim.limit)
        self._end(batch, failures, unknown, claim)
        if batch.waiting:
            self._give_back(batch, 0)  # stopping; last, so that an error here does not cost the acks

    def _next(self, batch: Batch) -> Claimed | None:
        """Take the next message in hand; None: there is none, or the worker stops."""
        if self.desk.stopping.is_set():
            return None
        try:
            # In both for a moment: a renewal in between is not to miss it.
            batch.held.append(batch.waiting[0][SEQ])
        except IndexError:
            return None
        try:
            return batch.waiting.popleft()
        except IndexError:  # what waited was given back meanwhile
            batch.held.pop()
            return None

    def _flush_at(self, batch: Batch, started: float) -> float:
        """When handlers are slower than thought, or the lease may have lapsed since nobody renewed it."""
        return min(started + 2 * self._target, batch.expires)

    def _flush(
        self, batch: Batch, failures: list[_Failed], unknown: list[int], claim: UnderWay, average: float
    ) -> None:
        """Handlers are slower than thought, so many seconds on average: end what is done, and keep only what fits into the
        target."""
        self._end(batch, failures, unknown, claim)
        keep = max(1, int(self._target / average))
        if monotonic() > batch.expires and batch.waiting:
            # Nobody renewed it: what was not started may be somebody else's by now. The token says what is not.
            log.warning("%s: the lease of %d waiting messages lapsed.", self.queue._meta.label, len(batch.waiting))
            keep = 0
        self._give_back(batch, keep)

    def _end(self, batch: Batch, failures: list[_Failed], unknown: list[int], claim: UnderWay) -> None:
        if batch.done:
            self._ack(batch)
        if failures or unknown:
            # What takes long to end is renewed meanwhile, what is acked is not.
            batch.held[:] = [*(row[SEQ] for row, _, _ in failures), *unknown]
        for row, error, items in failures:
            self.recover(row, error, batch.token, items)
        if unknown:
            with Answering(connections[self.alias]):
                self.sql.give_back(connections[self.alias], sorted(unknown), batch.token, handled=False)
            self.desk.leave_alone(claim, claim.rows or (), unknown)
        failures.clear()
        unknown.clear()
        batch.held.clear()

    def _ack(self, batch: Batch) -> None:
        connection = connections[self.alias]
        while batch.done:
            try:
                self.ack_done(batch)
            except Error as error:
                # These messages are handled: an ack that did not arrive is tried again as long as the lease holds.
                if monotonic() > batch.expires or not self.desk.survive(error, self.desk.breaker, connection):
                    lost = len(batch.take_done())
                    log.error("%s: %d handled messages could not be acked and will come again: %s",
                              self.queue._meta.label, lost, error)  # fmt: skip
                    self.desk.stats.lost += lost

    def ack_done(self, batch: Batch) -> None:
        """Ack what is done; an error leaves it done and not acked."""
        seqs = batch.take_done()
        if not seqs:
            return
        connection = connections[self.alias]
        try:
            with Answering(connection):
                ended = self.sql.ack(connection, seqs, batch.token)
        except Error:
            batch.done.extend(seqs)
            raise
        self.desk.succeeded(ended)
        if ended != len(seqs):
            self.desk.stats.lost += len(seqs) - ended
            log.warning(
                "%s: %d of %d leases were lost before the ack (seq %d to %d); those messages are handled again.",
                self.queue._meta.label, len(seqs) - ended, len(seqs), seqs[0], seqs[-1],
            )  # fmt: skip

    def _give_back(self, batch: Batch, keep: int) -> None:
        """Give back what was not started, from the right, all but ``keep``; not counted as a delivery."""
        surplus = batch.take_waiting(keep)
        if surplus:
            with Answering(connections[self.alias]):
                ended = self.sql.give_back(connections[self.alias], surplus, batch.token, handled=False)
            self.desk.stats.lost += len(surplus) - ended
            self.desk.came_back(surplus)

    def extend(self, seq: int, period: timedelta | None) -> None:
        batch = self.batch
        if batch is None:
            raise LeaseLost(self.queue._meta.label, seq)
        lease_ms = self._lease_ms if period is None else int(period / timedelta(milliseconds=1))
        if not self.sql.extend(connections[self.alias], [seq], batch.token, lease_ms):
            raise LeaseLost(self.queue._meta.label, seq)
        if lease_ms < self._lease_ms:
            batch.again.add(seq)  # it ends before the others of its batch are due
