"""AT_LEAST_ONCE: lease a batch, handle each message, ack the batch in one statement of its own, seqs ascending.

Claim and ack are never in one transaction: that deadlocks. A slow handler makes the batch end what is done, renew what is
in hand and give back what was not started.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

from django.db import Error, connections

from queueapp.conf import settings
from queueapp.errors import LeaseLost
from queueapp.flow.limited_claims import LimitedClaims
from queueapp.messages import new_id
from queueapp.models.delivery import Leasing
from queueapp.sending.isolation import atomic_on, isolated_connection
from queueapp.services.connection_timeouts import ResponseDeadline
from queueapp.sql import backend_of
from queueapp.sql.acks import LeaseHolder
from queueapp.sql.claims import FOREVER_MS, SEQ, Claimed

from .. import fanout
from ..batch_sizer import BatchSizer
from ..claim_tracker import ActiveClaim
from ..quarantine import SMALL_BATCH, LeaseLock
from ..queue_state import QueueState
from ..slot import Slot
from .base import Receiver
from .recovering import recover

log = logging.getLogger("queueapp.workers")

#: A table that is locked as a whole is waited for so long by what has another way.
EXTEND_WAIT_MS = 100

#: A message of a batch, what its handler raised, and what it had left in ``Context.items``.
Failed = tuple[Claimed, BaseException, dict[str, Any] | None]


class LeasedBatch:
    """A leased batch. ``waiting`` and ``done`` are shared with the thread that looks after leases (``services.lease_renewer``):
    who takes a message out of one of them has it for himself, so neither needs a lock."""

    __slots__ = ("acked", "done", "expires", "in_flight", "period", "renew_again", "token", "waiting")

    def __init__(self, token: uuid.UUID, expires: float, rows: Sequence[Claimed], period: float = math.inf) -> None:
        self.token = token
        #: How long its leases last, in seconds, counted from a claim or a renewal; for ever, if the queue says so.
        self.period = period
        #: Until when its leases last at least, but for those in ``again``. Moved on by the renewals alone.
        self.expires = expires
        self.waiting: deque[Claimed] = deque(rows)
        #: Handled, and not yet acked.
        self.done: deque[int] = deque()
        #: In hand, or handled since the task last ended what was done.
        self.in_flight: list[int] = []
        #: Acked early, behind a slow handler.
        self.acked: set[int] = set()
        #: To be renewed at the next look: locked by somebody at the last one, or shortened by their handler.
        self.renew_again: set[int] = set()

    def leased(self) -> set[int]:
        """What a renewal has to cover. ``waiting`` first: what goes over to ``held`` is in both for a moment."""
        waiting = [row[SEQ] for row in list(self.waiting)]
        return {*waiting, *self.in_flight} - self.acked

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


class AtLeastOnceReceiver(Receiver):
    """AT_LEAST_ONCE."""

    def __init__(self, state: QueueState, slot: Slot | None) -> None:
        super().__init__(state, slot)
        most = min(settings.MAX_BATCH, backend_of(connections[self.alias]).max_batch)
        self._target = settings.BATCH_TARGET.total_seconds()
        self.size = BatchSizer(most, self._target, settings.MAX_BATCH_BYTES)
        self._caution = state.batch_limit

    def receive(self, limit: int) -> int:
        self.full = False
        level = self._caution.level
        if level == 2:
            # What is leased is in hand, so that a crash of everything counts against this message and no other.
            with self.state.quarantine.leasing_alone(self.state.stopping) as turn:
                if turn is None:
                    return 0
                # While this one waited it may have become known that there is no reason.
                if (level := self._caution.level) == 2:
                    return self._receive(1, level, turn)
        return self._receive(min(limit, SMALL_BATCH) if level else limit, level)

    def _receive(self, limit: int, level: int, turn: LeaseLock | None = None) -> int:
        connection = connections[self.alias]
        token = new_id()
        lease_ms, taking = self.state.lease_ms, self.state.limited_claims
        with self.state.claim(limit) as claim:
            asked = monotonic()  # before the statement, so that a slow round trip cannot stretch the lease
            with ResponseDeadline(connection):
                if taking is None:
                    claim.rows = rows = self.sql.claims.claim_by_lease(
                        connection, claim.ranges, limit, token, self.state.subscriber, lease_ms
                    )
                    self.full = len(rows) == limit
                else:
                    rows = self._claim_counted(taking, claim, limit, token, lease_ms)
        if not rows:
            return 0
        count = len(rows)
        if self.handlers.copies:
            rows = fanout.replace_leased(self.state, rows, token)
            if not rows:
                self.state.claimed(rows, self.full)
                self.reserved = 0
                return count
        self.state.claimed(rows, self.full)
        self.size.weigh(rows)
        period = math.inf if lease_ms == FOREVER_MS else lease_ms / 1000
        self.batch = batch = LeasedBatch(token, asked + period, rows, period)
        self.reserved = 0  # the batch is what is held now
        if self.slot is not None:
            self.slot.lease(token)
        try:
            needed = self._caution.needed(rows)
            if turn is not None and self._caution.level < 2:
                turn.end()  # it is none, nor was there one before it; its handler may take long
            if needed > level and len(rows) > (keep := SMALL_BATCH if needed == 1 else 0):
                # Claimed as if they were harmless: most go back unhandled and uncounted, and are claimed again with care.
                self._give_back(batch, keep)
                self.full = True
            self._handle(batch, claim)
        finally:
            self.batch = None
        return count

    def _claim_counted(
        self, taking: LimitedClaims, claim: ActiveClaim, limit: int, token: uuid.UUID, lease_ms: int | None
    ) -> list[Claimed]:
        """A claim on a queue that counts what is out, or shares it out."""
        connection = connections[self.alias]
        taken = taking.take(connection, claim.ranges, limit, token, self.state.subscriber, lease_ms, bounded=True)
        # Nothing, because the queue is at its limit perhaps, says nothing of what is there; and what is nobody's lies between what
        # was taken: no floor is to pass that as if it were gone.
        claim.rows = None if taken.unassigned else taken.rows or None
        if taken.unassigned:
            self.state.skipped.pass_by(claim, taken.unassigned)
        self.full = taken.full
        self.state.at_limit = taken.at_limit
        return taken.rows

    def in_flight_count(self) -> int:
        batch = self.batch
        return 0 if batch is None else len(batch.leased())

    def _handle(self, batch: LeasedBatch, claim: ActiveClaim) -> None:
        held, done = batch.in_flight, batch.done
        failures: list[Failed] = []
        unknown: list[int] = []
        # The handlers' time alone: a batch that shrank when a claim was slow would make claims of one while they are.
        started = monotonic()
        flush_at = self._flush_at(batch, started)
        spent, handled = 0.0, 0
        self.handed.used()
        with_others = self._with_others
        while (row := self._next(batch)) is not None:
            if with_others is not None and with_others(batch, row, failures, unknown):
                outcome: BaseException | bool | None = True
            else:
                outcome = self.call(row, leased=True)
            if outcome is None:
                done.append(row[SEQ])
            elif outcome is False:
                unknown.append(row[SEQ])
            elif outcome is not True:
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

    #: Handles a message with others of its batch in one call, and returns whether it did; None: every message has a call of its own.
    _with_others: Callable[[LeasedBatch, Claimed, list[Failed], list[int]], bool] | None = None

    def _next(self, batch: LeasedBatch) -> Claimed | None:
        """Take the next message in hand; None: there is none, or the worker stops."""
        if self.state.stopping.is_set():
            return None
        try:
            # In both for a moment: a renewal in between is not to miss it.
            batch.in_flight.append(batch.waiting[0][SEQ])
        except IndexError:
            return None
        try:
            return batch.waiting.popleft()
        except IndexError:  # what waited was given back meanwhile
            batch.in_flight.pop()
            return None

    def _flush_at(self, batch: LeasedBatch, started: float) -> float:
        """When handlers are slower than thought, or the lease may have lapsed since nobody renewed it."""
        return min(started + 2 * self._target, batch.expires)

    def _flush(
        self, batch: LeasedBatch, failures: list[Failed], unknown: list[int], claim: ActiveClaim, average: float
    ) -> None:
        """HandlerTable are slower than thought, so many seconds on average: end what is done, and keep only what fits into the
        target."""
        self._end(batch, failures, unknown, claim)
        keep = max(1, int(self._target / average))
        if monotonic() > batch.expires and batch.waiting:
            # Nobody renewed it: what was not started may be somebody else's by now. The token says what is not.
            log.warning("%s: the lease of %d waiting messages lapsed.", self.queue._meta.label, len(batch.waiting))
            keep = 0
        self._give_back(batch, keep)

    def _end(self, batch: LeasedBatch, failures: list[Failed], unknown: list[int], claim: ActiveClaim) -> None:
        if batch.done:
            self._ack(batch)
        if failures or unknown:
            # What takes long to end is renewed meanwhile, what is acked is not.
            batch.in_flight[:] = [*(row[SEQ] for row, _, _ in failures), *unknown]
        for row, error, items in failures:
            recover(self, row, error, batch.token, items)
        if unknown:
            with ResponseDeadline(connections[self.alias]):
                self.sql.acks.release(connections[self.alias], sorted(unknown), batch.token, handled=False)
            self.state.skipped.leave_alone(claim, claim.rows or (), unknown)
        failures.clear()
        unknown.clear()
        batch.in_flight.clear()

    def _ack(self, batch: LeasedBatch) -> None:
        connection = connections[self.alias]
        while batch.done:
            try:
                self.ack_done(batch)
            except Error as error:
                # These messages are handled: an ack that did not arrive is tried again as long as the lease holds.
                if monotonic() > batch.expires or not self.state.retry_after(error, self.state.breaker, connection):
                    lost = len(batch.take_done())
                    log.error("%s: %d handled messages could not be acked and will come again: %s",
                              self.queue._meta.label, lost, error)  # fmt: skip
                    self.state.stats.lost += lost

    def ack_done(self, batch: LeasedBatch) -> None:
        """Ack what is done; an error leaves it done and not acked."""
        seqs = batch.take_done()
        if not seqs:
            return
        connection = connections[self.alias]
        try:
            with ResponseDeadline(connection):
                if self.handlers.finder is None:
                    ended = self._delete(seqs, batch.token)
                else:
                    ended = self.handlers.finder.ack(self.sql, connection, seqs, batch.token)
        except Error:
            batch.done.extend(seqs)
            raise
        self.state.breaker.success()  # or the trouble would last until the next claim, behind handlers of an hour
        self.state.succeeded(ended)
        if self.state.at_limit:
            self.state.made_room()
        if ended != len(seqs) and not self.queue.delivery.others_may_end:
            self.state.stats.lost += len(seqs) - ended
            log.warning(
                "%s: %d of %d leases were lost before the ack (seq %d to %d); those messages are handled again.",
                self.queue._meta.label, len(seqs) - ended, len(seqs), seqs[0], seqs[-1],
            )  # fmt: skip

    def _delete(self, seqs: list[int], token: uuid.UUID) -> int:
        """Delete what may be ended by who holds it: by its token, or by what else the queue's leasing allows."""
        leasing, connection = self.queue.delivery.leasing, connections[self.alias]
        if leasing is Leasing.FENCED:
            return self.sql.acks.ack(connection, seqs, token)
        return self.sql.ack_by_seq.ack(connection, seqs, LeaseHolder(leasing.value, self.state.subscriber))

    def _give_back(self, batch: LeasedBatch, keep: int) -> None:
        """Give back what was not started, from the right, all but ``keep``; not counted as a delivery."""
        surplus = batch.take_waiting(keep)
        if surplus:
            with ResponseDeadline(connections[self.alias]):
                ended = self.sql.acks.release(connections[self.alias], surplus, batch.token, handled=False)
            if not self.queue.delivery.others_may_end:
                self.state.stats.lost += len(surplus) - ended
            self.state.messages_returned(surplus)

    def write_headers(self, seq: int, headers: str) -> None:
        batch = self.batch
        if batch is None or not self.sql.acks.write_headers(connections[self.alias], seq, batch.token, headers):
            raise LeaseLost(self.queue._meta.label, seq)

    def extend(self, seq: int, period: timedelta | None) -> None:
        batch = self.batch
        if batch is None:
            raise LeaseLost(self.queue._meta.label, seq)
        if batch.period == math.inf:
            return  # it has more than it asks for
        seconds = batch.period if period is None else period.total_seconds()
        if not connections[self.alias].get_autocommit() and self._extend_beside(seq, batch, seconds):
            return
        if not self.sql.acks.extend(connections[self.alias], [seq], batch.token, int(seconds * 1000)):
            raise LeaseLost(self.queue._meta.label, seq)
        if seconds < batch.period:
            batch.renew_again.add(seq)  # it ends before the others of its batch are due

    def _extend_beside(self, seq: int, batch: LeasedBatch, seconds: float) -> bool:
        """Outside of the handler's transaction, in which the row would be locked: nobody could renew it until that ends, and in
        the moment after others would see it lapsed (seen: handled twice). False: that is not to be done, since the handler has
        locked it there already, say, or asks for less, or since all of this is a test's transaction, or a pool may have no
        other connection for us."""
        if seconds < batch.period or connections[self.alias].settings_dict["OPTIONS"].get("pool"):
            return False
        try:
            with isolated_connection(self.alias) as connection, atomic_on(connection):
                return bool(self.sql.acks.renew(connection, [seq], batch.token, int(seconds * 1000), EXTEND_WAIT_MS))
        except Error:
            return False  # of the spare connection; the handler's own says whether the lease is lost
