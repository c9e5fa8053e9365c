"""TRANSACTIONAL: BEGIN, DELETE one, handle, COMMIT. What the handler writes and sends commits with the receive.

COMMIT, BEGIN and the next DELETE travel together while handlers are fast: a quarter of the time of a message.

After a crash of a whole process tree the deliveries are committed first, as leases of a few at once (``_handle``).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

from django.db import connections, transaction

from queueapp import notifier, overrides
from queueapp.errors import LeaseLost, MessageCancelled
from queueapp.failures import apply_verdict, verdicts
from queueapp.failures.applied import AppliedVerdict
from queueapp.services.connection_timeouts import ResponseDeadline
from queueapp.sql import ErrorKind
from queueapp.sql.claims import SEQ, Claimed

from .. import fanout
from ..batch_sizer import BatchSizer
from ..claim_tracker import ActiveClaim
from ..handler_gate import GatedHandler
from ..handlers import WorkerStopped
from ..quarantine import SMALL_BATCH
from ..queue_state import QueueState, is_error_of
from ..slot import Slot
from .at_least_once import AtLeastOnceReceiver, LeasedBatch
from .base import Receiver, Rollback
from .recovering import recover

log = logging.getLogger("queueapp.workers")


NO_TOKEN = uuid.UUID(int=0)
#: A deadlock victim's handler is run again without counting an attempt, so often per message.
FREE_DEADLOCKS = 10
#: So many messages a task takes one after another, and for so long, in seconds, before the pump is asked anew.
STREAK, STREAK_SECONDS = 100, 0.02


class TransactionalReceiver(AtLeastOnceReceiver):
    """TRANSACTIONAL: receive, handler and its writes and sends are one transaction."""

    def __init__(self, state: QueueState, slot: Slot | None) -> None:
        super().__init__(state, slot)
        self._one, self._few = BatchSizer(1, self._target), self.size.at_most(SMALL_BATCH)
        self.size = self._one
        self._seq = 0
        self._deadlocks: dict[int, int] = {}
        self._in_turn = GatedHandler(next(state.handler_gates))
        self._needs_permits = state.needs_permits
        self._can_lease = self.sql.table.has("lease_token", "lease_owner", "lease_expires", "deliveries")

    @property
    def most(self) -> int:
        return self._few.n if self.state.crash_tracking else STREAK

    def receive(self, limit: int) -> int:
        if self.state.crash_tracking and self._can_lease:
            self.size = self._few
            try:
                return super().receive(min(limit, SMALL_BATCH))
            finally:
                if self.slot is not None:
                    self.slot.lease(NO_TOKEN)
        self.size = self._one
        self.full = False
        try:
            return self._receive_one_by_one(limit)
        finally:
            # Held since its claim: a session that is killed lets go of the row long before its failed attempt is counted.
            self.state.claims.let_go(self._seq)
            self._seq = 0  # the next receive may take nothing, and another task have this message in hand by then

    def _receive_one_by_one(self, limit: int) -> int:
        """Messages one after another, each in a transaction of its own, for ``STREAK_SECONDS``: what commits one claims the
        next, where the database does both in one trip. Returns how many were claimed."""
        connection = connections[self.alias]
        until = monotonic() + STREAK_SECONDS
        count = 0
        claimed: Claimed | None = None
        outcome: BaseException | bool | None = None
        decided: AppliedVerdict | None = None
        hooks = several = elsewhere = False
        try:
            # To Django a streak is one atomic block. It ends with the first message that leaves it anything to do.
            with ResponseDeadline(connection) as deadline, transaction.atomic(using=self.alias):
                if self._needs_permits and not self._take_permit(connection):
                    return 0
                with self.state.claim(1) as claim:
                    rows: Sequence[Claimed] = self.sql.claims.claim_by_delete(
                        connection, claim.ranges, 1, owner=self.state.subscriber
                    )
                    claim.rows = rows
                while rows:
                    if self.state.claims.holds(rows[0][SEQ]):
                        elsewhere = True
                        raise Rollback
                    if self.handlers.copies and fanout.parts_of(self.state, rows):
                        several = True
                        raise Rollback
                    self._take(claimed := rows[0])
                    self.state.claimed(rows, full=True)
                    count += 1
                    deadline.pause()
                    with self._in_turn:
                        outcome = self.call(claimed)
                    deadline.restart()
                    if outcome is None:
                        hooks = self._run_every_hook(connection, claimed, deadline)
                        following = None
                        if count < limit and self._may_follow(connection, until):
                            following = self._commit_and_claim(connection)
                        if following is None:
                            break
                        # Committed. An error from here on is the next one's, or nobody's.
                        claimed, claim = None, following
                        rows, self.full = claim.rows or [], claim.rows is None
                    elif outcome is False or isinstance(outcome, WorkerStopped) or _is_deadlock(outcome, connection):
                        raise Rollback
                    elif self.cut_loose:
                        raise Rollback  # by the server, already; the attempt is counted in a transaction of its own
                    else:
                        assert isinstance(outcome, BaseException)
                        decided = self._decide_in_place(claimed, outcome, connection)
                        break
        except Rollback:
            pass
        except Exception as error:
            # The commit itself failed (a deferred constraint, a lost connection), or the claim did.
            if claimed is None:
                raise
            decided = None
            outcome = outcome if isinstance(outcome, BaseException) else error
        if elsewhere:
            # Its failed attempt is being counted, by the task that has it in hand; this one would be one too many.
            self.state.rolled_back(rows)
            return count
        if several:
            self.state.rolled_back(rows)
            fanout.replace_from(self.state, rows[0])
            self.full = True
            return count + 1
        if claimed is None:
            return count
        self.full = True
        if hooks or self.handed.stale:
            self.mend()
        if outcome is None:
            self._done()
        elif outcome is False:
            self.state.skipped.leave_alone(claim, rows, [claimed[SEQ]])
        elif decided is not None:
            self._tell(decided, claimed[SEQ])
        else:
            assert isinstance(outcome, BaseException)
            self._failed(claimed, outcome, connection, None)
        return count

    def _take_permit(self, connection: Any) -> bool:
        """Take one of the queue's places for the open transaction, whose end frees it."""
        most: int = overrides.effective_value(self.queue, "max_backlog", self.alias)
        return self.sql.limits.take_permits(connection, most, 1) == 1

    def _commit_and_claim(self, connection: Any) -> ActiveClaim | None:
        """Commit the message in hand and claim the next one; None: not in one trip, and nothing was done. Its ``rows`` are None
        where the commit is done and the claim is not."""
        with self.state.claim(1) as claim:
            sql = self.sql
            way = sql.claims.pipelined_claim(connection, claim.ranges)
            if way is None:
                return None
            claim.rows = sql.claims.commit_and_claim(connection, claim.ranges, way)
            claim.failed = claim.rows is None
        self._done()
        return claim

    def _tell(self, decided: AppliedVerdict, seq: int) -> None:
        """A verdict that was carried out in place is committed."""
        self.mend()
        if not isinstance(decided.failure.exception, MessageCancelled):
            self.state.failed()
        decided.tell()
        self.mend()
        if isinstance(decided.verdict, verdicts.RetryNow):
            self.state.retried(seq)

    def _run_every_hook(self, connection: Any, claimed: Claimed, deadline: ResponseDeadline) -> bool:
        if not notifier.run_every_hook(connection, first=deadline.pause):
            return False
        self.about, self.around = claimed, self.variables
        return True

    def _take(self, claimed: Claimed) -> None:
        self._seq = claimed[SEQ]
        self.state.claims.hold(self._seq)

    def _done(self) -> None:
        """The message in hand was handled, and its transaction is committed."""
        self.state.claims.let_go(self._seq)
        self.state.succeeded(1)
        if self._needs_permits:
            self.state.made_room()

    def _may_follow(self, connection: Any, until: float) -> bool:
        """Whether the next message may be claimed with the commit of this one: Django has nothing to do in between, and it is
        not time to look at the pump's shares anew."""
        if connection.run_on_commit or self.handed.stale or self._needs_permits:
            return False
        return not (not self.state.may_go_on() or self.state.crash_tracking or monotonic() > until)

    def extend(self, seq: int, period: timedelta | None) -> None:
        """Nothing to extend: the row lock owns the message."""

    def write_headers(self, seq: int, headers: str) -> None:
        Receiver.write_headers(self, seq, headers)  # whatever it writes is undone with the attempt

    def call_barrier(self, claimed: Claimed) -> BaseException | bool | None:
        """What its handler writes and sends commits together, though the barrier itself is gone whatever becomes of that."""
        outcome: BaseException | bool | None = None
        try:
            with transaction.atomic(using=self.alias):
                outcome = super().call_barrier(claimed)
                if outcome is not None:
                    raise Rollback
        except Rollback:
            pass
        except Exception as error:
            outcome = error
        return outcome

    def stands(self, seq: int) -> bool:
        return self.sql.failures.lock(connections[self.alias], seq, None, wait_ms=1000) is None

    def _decide_in_place(self, claimed: Claimed, error: BaseException, connection: Any) -> AppliedVerdict:
        """Undo the handler and decide, without letting go of the message: between a rollback and a transaction that
        counts the attempt, another worker would run it once more. Raises Rollback when it was taken all the same."""
        self.about = claimed
        row = self.sql.failures.rollback_and_lock(connection, claimed[SEQ], wait_ms=1000)
        # The handler's transaction is gone, and with it what it meant to do after its commit.
        connection.needs_rollback = False
        connection.run_on_commit = []
        if row is None:
            raise Rollback
        return apply_verdict.decide_locked(
            self.queue, self.alias, row, error, consumer=self.consumer_of(claimed), token=None,
            items=self.items,
        )  # fmt: skip

    def _handle(self, batch: LeasedBatch, claim: ActiveClaim) -> None:
        """Careful: the hand-outs of the batch are on its rows, whatever dies. Each message has a transaction of its own, which
        deletes it first: still exactly once, for one commit a batch more, and what kills everything is counted."""
        started, handled = monotonic(), 0
        flush_at = self._flush_at(batch, started)
        while (row := self._next(batch)) is not None:
            self._handle_leased(row, batch.token, claim)
            batch.in_flight.clear()
            handled += 1
            if batch.waiting and monotonic() > flush_at:
                self._flush(batch, [], [], claim, (monotonic() - started) / handled)
                flush_at = self._flush_at(batch, monotonic())
        if handled:
            self.size.observe(handled, monotonic() - started, full=len(claim.rows or ()) >= claim.limit)
        if batch.waiting:
            self._give_back(batch, 0)

    def _handle_leased(self, claimed: Claimed, token: uuid.UUID, claim: ActiveClaim) -> None:
        connection = connections[self.alias]
        outcome: BaseException | bool | None
        hooks = False
        try:
            with ResponseDeadline(connection) as deadline, transaction.atomic(using=self.alias):
                elsewhere = self.state.claims.holds(claimed[SEQ])  # since before it became careful
                if elsewhere or (self._needs_permits and not self._take_permit(connection)):
                    self.sql.acks.release(connection, [claimed[SEQ]], token, handled=False)
                    return
                # From here on the row lock owns the message, however long the handler takes and the lease lasts.
                if self.sql.acks.ack(connection, [claimed[SEQ]], token) != 1:
                    self.state.stats.lost += 1
                    log.warning("%s", LeaseLost(self.queue._meta.label, claimed[SEQ]))
                    return
                deadline.pause()
                outcome = self.call(claimed, leased=True)
                deadline.restart()
                if outcome is not None:
                    raise Rollback
                hooks = self._run_every_hook(connection, claimed, deadline)
        except Rollback:
            pass
        except Exception as error:
            outcome = error
        if hooks or self.handed.stale:
            self.mend()
        if outcome is None:
            self.state.succeeded(1)
        elif outcome is False:
            with ResponseDeadline(connection):
                self.sql.acks.release(connection, [claimed[SEQ]], token, handled=False)
            self.state.skipped.leave_alone(claim, claim.rows or (), [claimed[SEQ]])
        else:
            assert isinstance(outcome, BaseException)
            self._failed(claimed, outcome, connection, token)

    def _failed(self, claimed: Claimed, error: BaseException, connection: Any, token: uuid.UUID | None) -> None:
        if _is_deadlock(error, connection):
            seq = claimed[SEQ]
            if len(self._deadlocks) > 1000:
                self._deadlocks.clear()
            self._deadlocks[seq] = self._deadlocks.get(seq, 0) + 1
            if self._deadlocks[seq] <= FREE_DEADLOCKS:
                # A victim did nothing wrong: everything was rolled back, it is received again.
                if token is not None:
                    with ResponseDeadline(connection):
                        self.sql.acks.release(connection, [seq], token, handled=False)
                self.state.retried(seq)
                return
        recover(self, claimed, error, token, self.items)


def _is_deadlock(outcome: BaseException | bool, connection: Any) -> bool:
    return isinstance(outcome, BaseException) and is_error_of(connection, outcome, ErrorKind.DEADLOCK)
