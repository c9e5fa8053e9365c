"""TRANSACTIONAL: BEGIN, DELETE one message, handle it, COMMIT. What the handler writes and sends commits with the
receive.

COMMIT, BEGIN and the next DELETE travel together while handlers are fast, which saves a quarter of the time of a
message: such messages are a *streak*, which to Django is one atomic block.

While the queue tracks crashes (after the death of a whole process tree), the deliveries are committed first, as leases
of a few messages at once. A ``BatchLeaser`` takes them; each message still has a transaction of its own, which deletes
it first: still exactly once, for one commit a batch more, and a message that kills every process is counted.
"""

from __future__ import annotations

import enum
import logging
import uuid
from collections.abc import Sequence
from time import monotonic
from typing import Any

from django.db import connections, transaction

from queueapp import notifier, overrides
from queueapp.conf import settings
from queueapp.errors import LeaseLost, MessageCancelled
from queueapp.failures import apply_verdict, recoverability
from queueapp.failures.apply_verdict import AppliedVerdict
from queueapp.flow import ack_effects
from queueapp.messages.ids import as_uuid
from queueapp.services.connection_timeouts import ResponseDeadline
from queueapp.sql import ErrorKind
from queueapp.sql.acks import Acked
from queueapp.sql.claims import HEADERS, ID, SEQ, Claimed

from ..claim_tracker import ActiveClaim
from ..events import InFlightSlot
from ..handlers import GatedHandler, WorkerStopped
from ..limits import BatchSizer
from ..quarantine import SMALL_BATCH
from ..queue_state import QueueState, is_error_of
from . import outcomes
from .at_least_once import BatchLeaser, HeldKeys, LeasedBatch, lease_sizer
from .base import Receiver, Rollback

log = logging.getLogger("queueapp.workers")

NO_TOKEN = uuid.UUID(int=0)
#: The handler of a deadlock victim is run again without counting an attempt, so often per message.
FREE_DEADLOCKS = 10
#: Messages whose deadlocks are remembered.
MAX_DEADLOCKED = 1000
#: So many messages a receiver takes one after another, and for so many seconds, before the pump decides anew.
STREAK, STREAK_SECONDS = 100, 0.02


class Step(enum.Enum):
    """Where a streak is; see ``Streak``."""

    EMPTY = "the claim got no message"
    CLAIMED = "a message is claimed in the open transaction"
    COMMITTING = "its handler returned; leaving the atomic block commits"
    DECIDED = "its handler failed; the verdict commits with the atomic block"
    ROLLED_BACK = "the transaction is undone; the outcome is handled in another one"
    ELSEWHERE = "rolled back: another receiver of this process is recording a failed attempt of the message"
    FAN_OUT = "rolled back: several consumers get a copy each"


class Streak:
    """Messages received one after another on one connection, each in a transaction of its own.

        CLAIMED --its handler returned, and the next may follow--> COMMIT and the next claim in one trip --> CLAIMED or
                    EMPTY
                --its handler returned--> COMMITTING
                --its handler raised--> undone and locked again in one round trip --> DECIDED
                --no consumer here, stop, deadlock, or the session is lost--> ROLLED_BACK
                --in flight in this process--> ELSEWHERE
                --several consumers subscribe--> FAN_OUT
        COMMITTING, DECIDED --the commit fails--> ROLLED_BACK

    ``EMPTY`` and the last five end it.
    """

    __slots__ = ("claim", "count", "decided", "has_hooks", "limit", "message", "outcome", "rows", "step", "until")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.until = monotonic() + STREAK_SECONDS
        self.step = Step.EMPTY
        self.claim: ActiveClaim | None = None
        self.rows: Sequence[Claimed] = ()
        #: Messages that were claimed and handed to a handler.
        self.count = 0
        #: The message whose transaction is open or was rolled back; None between a commit and the next handler.
        self.message: Claimed | None = None
        #: What ``Receiver.call`` returned for it, or the error of its commit.
        self.outcome: BaseException | bool | None = None
        self.decided: AppliedVerdict | None = None
        #: Its handler left hooks that run after the commit.
        self.has_hooks = False

    def claimed(self, claim: ActiveClaim) -> None:
        """The claim has ended."""
        self.claim, self.rows = claim, claim.rows or ()
        self.step = Step.CLAIMED if self.rows else Step.EMPTY

    def roll_back(self, step: Step = Step.ROLLED_BACK) -> None:
        """Leave the transaction without a commit."""
        self.step = step
        raise Rollback

    def failed(self, error: Exception) -> None:
        """The commit failed (a deferred constraint, a lost connection)."""
        self.step = Step.ROLLED_BACK
        if not isinstance(self.outcome, BaseException):
            self.outcome = error


class TransactionalReceiver(Receiver):
    """TRANSACTIONAL: the receive, the handler, its writes and its sends are one transaction."""

    def __init__(self, state: QueueState, slot: InFlightSlot | None) -> None:
        super().__init__(state, slot)
        #: Seconds of handlers that a batch has at most.
        self.target = settings.BATCH_TARGET.total_seconds()
        self._single, self._tracked = BatchSizer(1, self.target), lease_sizer(self.alias).at_most(SMALL_BATCH)
        self.size = self._single
        self._leaser = BatchLeaser(self, self._handle_tracked)
        #: The message in flight; 0: none.
        self._seq = 0
        self._deadlocks: dict[int, int] = {}
        self.gated = GatedHandler(next(state.handler_gates))
        self._needs_permits = state.needs_permits
        #: Those of a handler's transaction have no effects before its handler has run.
        self._acks = self.sql.acks.plain
        self._has_effects = ack_effects.has_effects(self.queue)
        self._can_lease = self.sql.table.has("lease_token", "lease_owner", "lease_expires", "deliveries")

    @property
    def _leases_first(self) -> bool:
        """Whether deliveries are committed before their handlers run: while crashes are tracked, and always on a queue
        with keys, whose claims lease."""
        return self._can_lease and (self.state.crash_tracking or self.sql.table.claims_by_key)

    @property
    def max_batch(self) -> int:
        return self._tracked.n if self._leases_first else STREAK

    def receive(self, limit: int) -> int:
        if self._leases_first:
            self.size = self._tracked
            try:
                return self._leaser.receive(min(limit, SMALL_BATCH))
            finally:
                if self.slot is not None:
                    self.slot.lease(NO_TOKEN)
        self.size = self._single
        self.full = False
        try:
            return self._receive_streak(limit)
        finally:
            # Excluded since its claim: a session that is killed releases the row long before its failed attempt is
            # counted.
            self.state.claims.include(self._seq)
            self._seq = 0  # the next receive may take nothing, and another receiver have this message in flight by then

    # -- a streak -----------------------------------------------------------------------------------------------------

    def _receive_streak(self, limit: int) -> int:
        """Receive messages for ``STREAK_SECONDS``; return how many were claimed."""
        connection = connections[self.alias]
        streak = Streak(limit)
        try:
            # It ends with the first message that leaves Django anything to do.
            with ResponseDeadline(connection) as deadline, transaction.atomic(using=self.alias):
                if self._needs_permits and not self._take_permit(connection):
                    return 0
                with self.state.claim(1) as claim:
                    claim.rows = self.sql.claims.claim_by_delete(
                        connection, claim.ranges, 1, owner=self.state.subscriber
                    )
                streak.claimed(claim)
                while streak.step is Step.CLAIMED:
                    self._handle_next(streak, connection, deadline)
        except Rollback:
            pass
        except Exception as error:
            if streak.message is None:
                raise  # of a claim
            streak.failed(error)
        return self._end_streak(streak, connection)

    def _handle_next(self, streak: Streak, connection: Any, deadline: ResponseDeadline) -> None:
        """Handle the claimed message, and claim the next one with its commit if that may follow."""
        rows = streak.rows
        if self.state.claims.excludes(rows[0][SEQ]):
            streak.roll_back(Step.ELSEWHERE)
        if self.handlers.copies and outcomes.copy_groups(self.state, rows):
            streak.roll_back(Step.FAN_OUT)
        streak.message = message = rows[0]
        self._begin(message)
        self.state.claimed(rows, full=True)
        streak.count += 1
        deadline.pause()
        with self.gated:
            streak.outcome = outcome = self.call(message)
        deadline.restart()
        if outcome is None:
            streak.step = Step.COMMITTING
            self._apply_effects(connection, rows)
            streak.has_hooks = self._run_every_hook(connection, message, deadline)
            if streak.count < streak.limit and self._may_follow(connection, streak.until):
                following = self._commit_and_claim(connection)
                if following is not None:
                    # Committed. An error from here on is that of the next message, or of none.
                    streak.message = None
                    streak.claimed(following)
                    self.full = following.rows is None
        elif outcome is False or isinstance(outcome, WorkerStopped) or _is_deadlock(outcome, connection):
            streak.roll_back()
        elif self.session_lost:
            streak.roll_back()  # by the server, already; the attempt is counted in a transaction of its own
        else:
            assert isinstance(outcome, BaseException)
            streak.step = Step.ROLLED_BACK  # unless the verdict is applied
            streak.decided = self._decide_in_place(message, outcome, connection)
            streak.step = Step.DECIDED

    def _end_streak(self, streak: Streak, connection: Any) -> int:
        """After the last transaction of a streak; return how many messages were claimed."""
        if streak.step is Step.ELSEWHERE:
            # The receiver that has it in flight is counting its failed attempt; this one would be one too many.
            self.state.rolled_back(streak.rows)
            return streak.count
        if streak.step is Step.FAN_OUT:
            self.state.rolled_back(streak.rows)
            outcomes.replace_by_copies_from(self.state, streak.rows[0])
            self.full = True
            return streak.count + 1
        message, outcome = streak.message, streak.outcome
        if message is None:
            return streak.count
        self.full = True
        if streak.has_hooks or self.guard.stale:
            self.restore_connection()
        if streak.step is Step.COMMITTING:
            self._done()
        elif streak.step is Step.DECIDED:
            assert streak.decided is not None
            self._report(streak.decided, message[SEQ])
        elif outcome is False:
            assert streak.claim is not None
            self.state.skipped.skip(streak.claim, streak.rows, [message[SEQ]])
        else:
            assert isinstance(outcome, BaseException)
            self._failed(message, outcome, connection, None)
        return streak.count

    def _take_permit(self, connection: Any) -> bool:
        """Take a permit of the queue for the open transaction, whose end frees it."""
        max_backlog: int = overrides.effective_value(self.queue, "max_backlog", self.alias)
        return self.sql.limits.take_permits(connection, max_backlog, 1) == 1

    def _commit_and_claim(self, connection: Any) -> ActiveClaim | None:
        """Commit the message in flight and claim the next one; None: not possible in one trip, and nothing was done.
        Its ``rows`` are None where the commit is done and the claim is not."""
        with self.state.claim(1) as claim:
            claims = self.sql.claims
            way = claims.pipelined_claim(connection, claim.ranges)
            if way is None:
                return None
            claim.rows = claims.commit_and_claim(connection, claim.ranges, way)
            claim.failed = claim.rows is None
        self._done()
        return claim

    def _apply_effects(self, connection: Any, rows: Sequence[Claimed]) -> None:
        """What the acks of handled messages bring about, as the last statements of the transaction."""
        if self._has_effects:
            acked = [Acked(row[SEQ], as_uuid(row[ID]), row[HEADERS]) for row in rows]
            ack_effects.apply_effects(self.queue, connection, acked)

    def _may_follow(self, connection: Any, until: float) -> bool:
        """Whether the next message may be claimed with the commit of this one: Django has nothing to do in between, and
        the pump's decision is not too old."""
        if connection.run_on_commit or self.guard.stale or self._needs_permits:
            return False
        return not (not self.state.events.may_continue() or self.state.crash_tracking or monotonic() > until)

    def _run_every_hook(self, connection: Any, claimed: Claimed, deadline: ResponseDeadline) -> bool:
        if not notifier.run_every_hook(connection, first=deadline.pause):
            return False
        self.callback_message, self.callback_variables = claimed, self.handler_variables
        return True

    def _begin(self, claimed: Claimed) -> None:
        self._seq = claimed[SEQ]
        self.state.claims.exclude(self._seq)

    def _done(self) -> None:
        """The message in flight was handled, and its transaction is committed."""
        self.state.claims.include(self._seq)
        self.state.health.succeeded(1)
        if self._needs_permits:
            self.state.capacity_freed()

    # -- failed attempts ----------------------------------------------------------------------------------------------

    def transaction_intact(self, seq: int) -> bool:
        return self.sql.failures.lock(connections[self.alias], seq, None, wait_ms=1000) is None

    def _decide_in_place(self, claimed: Claimed, error: BaseException, connection: Any) -> AppliedVerdict:
        """Undo the handler and decide without releasing the message: between a rollback and a transaction that counts
        the attempt, another worker would run it once more. Raises Rollback when another worker took it all the same."""
        self.callback_message = claimed
        row = self.sql.failures.rollback_and_lock(connection, claimed[SEQ], wait_ms=1000)
        # The handler's transaction is gone, and with it what was to run after its commit.
        connection.needs_rollback = False
        connection.run_on_commit = []
        if row is None:
            raise Rollback
        return apply_verdict.decide_locked(
            self.queue, self.alias, row, error, consumer=self.consumer_of(claimed), token=None,
            items=self.items,
        )  # fmt: skip

    def _report(self, decided: AppliedVerdict, seq: int) -> None:
        """A verdict that was applied in place is committed."""
        self.restore_connection()
        if not isinstance(decided.failure.exception, MessageCancelled):
            self.state.health.failed()
        decided.notify()
        self.restore_connection()
        if isinstance(decided.verdict, recoverability.RetryNow):
            self.state.retried(seq)

    def _failed(self, claimed: Claimed, error: BaseException, connection: Any, token: uuid.UUID | None) -> None:
        """The transaction of a message is rolled back: decide in another one."""
        if _is_deadlock(error, connection):
            seq = claimed[SEQ]
            if len(self._deadlocks) > MAX_DEADLOCKED:
                self._deadlocks.clear()
            self._deadlocks[seq] = self._deadlocks.get(seq, 0) + 1
            if self._deadlocks[seq] <= FREE_DEADLOCKS:
                # A victim did nothing wrong: everything was rolled back, it is received again.
                if token is not None:
                    with ResponseDeadline(connection):
                        self.sql.acks.release(connection, [seq], token, cancelled=False)
                self.state.retried(seq)
                return
        outcomes.recover(self, claimed, error, token, self.items)

    def call_barrier(self, claimed: Claimed) -> BaseException | bool | None:
        """What its handler writes and sends commits together; the barrier itself is gone in any case."""
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

    # -- while crashes are tracked ------------------------------------------------------------------------------------

    def _handle_tracked(self, batch: LeasedBatch, claim: ActiveClaim) -> None:
        """Handle a leased batch: its deliveries are committed, whatever dies."""
        started, handled = monotonic(), 0
        flush_at = min(started + 2 * self.target, batch.expires)
        held = HeldKeys(self._leaser) if self.sql.table.is_ordered else None
        while (row := self._leaser.next(batch)) is not None:
            if held is None:
                self._handle_leased(row, batch.token, claim)
            elif not held.keeps_back(row) and not self._handle_leased(row, batch.token, claim):
                held.add(row)
            batch.in_flight.clear()
            handled += 1
            if batch.waiting and monotonic() > flush_at:
                keep = max(1, int(self.target * handled / (monotonic() - started)))
                if monotonic() > batch.expires:
                    # It was not renewed: what was not started may be leased to others by now. The token decides.
                    log.warning(
                        "%s: the lease of %d waiting messages expired.", self.queue._meta.label, len(batch.waiting),
                        extra={"queue": self.queue._meta.label, "messages": len(batch.waiting)},
                    )  # fmt: skip
                    keep = 0
                self._leaser.release(batch, keep)
                flush_at = min(monotonic() + 2 * self.target, batch.expires)
        if handled:
            full = self.full if self.sql.table.claims_by_key else len(claim.rows or ()) >= claim.limit
            self.size.observe(handled, monotonic() - started, full=full)
        if held is not None:
            held.release(batch)
        if batch.waiting:
            self._leaser.release(batch, 0)

    def _handle_leased(self, claimed: Claimed, token: uuid.UUID, claim: ActiveClaim) -> bool:
        """Handle one leased message in its transaction; returns whether that was committed."""
        connection = connections[self.alias]
        outcome: BaseException | bool | None
        has_hooks = False
        try:
            with ResponseDeadline(connection) as deadline, transaction.atomic(using=self.alias):
                elsewhere = self.state.claims.excludes(claimed[SEQ])  # since before crashes were tracked
                if elsewhere or (self._needs_permits and not self._take_permit(connection)):
                    self.sql.acks.release(connection, [claimed[SEQ]], token, cancelled=False)
                    return False
                # From here on the row lock owns the message, however long the handler takes and the lease lasts.
                if self._acks.ack(connection, [claimed[SEQ]], token) != 1:
                    self.state.stats.lost += 1
                    log.warning("%s", LeaseLost(self.queue._meta.label, claimed[SEQ]))
                    return False
                deadline.pause()
                outcome = self.call(claimed, leased=True)
                deadline.restart()
                if outcome is not None:
                    raise Rollback
                self._apply_effects(connection, [claimed])
                has_hooks = self._run_every_hook(connection, claimed, deadline)
        except Rollback:
            pass
        except Exception as error:
            outcome = error
        if has_hooks or self.guard.stale:
            self.restore_connection()
        if outcome is None:
            self.state.health.succeeded(1)
        elif outcome is False:
            with ResponseDeadline(connection):
                self.sql.acks.release(connection, [claimed[SEQ]], token, cancelled=False)
            self.state.skipped.skip(claim, claim.rows or (), [claimed[SEQ]])
        else:
            assert isinstance(outcome, BaseException)
            self._failed(claimed, outcome, connection, token)
        return outcome is None


def _is_deadlock(outcome: BaseException | bool, connection: Any) -> bool:
    return isinstance(outcome, BaseException) and is_error_of(connection, outcome, ErrorKind.DEADLOCK)
