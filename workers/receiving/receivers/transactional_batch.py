"""TRANSACTIONAL with a ``transaction_size``: so many messages share one transaction, without savepoints.

    together  --all handlers returned, committed--> together
              --a handler failed, the commit failed--> rolled back; nobody's attempt is counted --> alone
              --one of the claim has failed before--> rolled back before any handler has run --> alone
              --another task of the process has one of the claim in hand--> rolled back, and claimed again without it
    alone     (one by one, as ever: only there is a failure judged) --as many as were rolled back--> together

The messages are claimed a stage at a time, of what the handlers do in about ``STAGE_SECONDS``: what is claimed cannot be given
back in part, so a handler that becomes slow ends the transaction with its stage. A process that dies has one message in hand,
and its crash is counted against that one; the others are back. From then on that one is handled alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from time import monotonic
from typing import Any

from django.db import connections, transaction

from queueapp import notifier, overrides
from queueapp.conf import settings
from queueapp.failures.history import one_line
from queueapp.messages import counted_attempts
from queueapp.services.connection_timeouts import ResponseDeadline
from queueapp.sql import ErrorKind, backend_of
from queueapp.sql.claims import DELIVERIES, HEADERS, SEQ, Claimed

from .. import fanout
from ..batch_sizer import BatchSizer
from ..claim_tracker import ActiveClaim
from ..handlers import Interrupted, WorkerStopped
from ..queue_state import QueueState, is_error_of
from ..slot import Slot
from .base import Rollback
from .strangers import strangers_of
from .transactional import TransactionalReceiver

log = logging.getLogger("queueapp.workers")

#: What is claimed at once is what handlers do in about so many seconds.
STAGE_SECONDS = 0.01
#: So many messages at most are handled one by one after rollbacks that came one upon another.
MOST_ALONE = 1000


class SharedTransaction:
    """One transaction of several messages, until it has ended."""

    __slots__ = (
        "claim", "culprit", "elsewhere", "failed", "hooks", "outcome", "parts", "places", "rows", "stage", "strangers"
    )  # fmt: skip

    def __init__(self) -> None:
        #: All that was claimed, and what of it was claimed last.
        self.rows: list[Claimed] = []
        self.stage: Sequence[Claimed] = ()
        self.claim: ActiveClaim | None = None
        #: Why it cannot be committed: this message, and what its handler raised.
        self.culprit: Claimed | None = None
        self.outcome: BaseException | bool | None = None
        #: The failed attempt of one of the last stage is being counted, by the task that has it in hand.
        self.elsewhere = False
        #: Those of the last stage that nobody here takes.
        self.strangers: list[int] = []
        #: Those of the last stage that several consumers want.
        self.parts: fanout.Parts = {}
        #: Where the hooks of which message begin, and the variables of its handler.
        self.hooks: list[tuple[int, Claimed, Any]] = []
        #: ConsumerLimiter of a queue with a limit that it has and does not need yet.
        self.places = 0
        #: Messages whose failure is decided in this transaction (consumers of several).
        self.failed = 0

    def fail(self, claimed: Claimed, outcome: BaseException | bool | None) -> None:
        """Leave the transaction because of this one."""
        self.culprit, self.outcome = claimed, outcome
        raise Rollback


class TransactionBatchReceiver(TransactionalReceiver):
    """TRANSACTIONAL, several messages a transaction."""

    #: Whether all of a row is wanted, and not only what handlers need.
    _whole = False
    #: How what was rolled back is handled.
    _again = "one by one"

    def __init__(self, state: QueueState, slot: Slot | None) -> None:
        super().__init__(state, slot)
        self._together: int = self.queue.delivery.transaction_size
        most = min(self._together, backend_of(connections[self.alias]).max_batch)
        self._stages = BatchSizer(most, STAGE_SECONDS, settings.MAX_BATCH_BYTES)
        self.size = self._stages
        #: So many messages are to be handled one by one, and were the last time.
        self._alone = self._were_alone = 0

    @property
    def most(self) -> int:
        return super().most if self._alone or self.state.crash_tracking else self._together

    def receive(self, limit: int) -> int:
        if self._alone or limit == 1 or self.state.crash_tracking:
            count = super().receive(min(limit, self._alone or limit))
            self._alone = max(0, self._alone - count) if count else 0
            return count
        self.size = self._stages
        self.full = False
        return self._receive_together(limit)

    def _take(self, claimed: Claimed) -> None:
        # Alone: its failure is counted, and its row tells from then on.
        self.state.isolated.discard(claimed[SEQ])
        super()._take(claimed)

    def _receive_together(self, limit: int) -> int:
        connection = connections[self.alias]
        batch = SharedTransaction()
        committing = hooks = False
        try:
            with ResponseDeadline(connection) as deadline, transaction.atomic(using=self.alias):
                began = monotonic()
                while self._claim_stage(batch, connection, limit - len(batch.rows)):
                    self._handle_stage(batch, connection, deadline)
                    if not self.full or not self._may_go_on_with(batch, limit, began):
                        break
                hooks = self._run_the_hooks(batch, connection, deadline)
                committing = True
        except Rollback:
            pass
        except Exception as error:
            if batch.rows:
                self.state.rolled_back(batch.rows)
            # A reply that is lost with its connection says nothing of the commit: the queue does.
            if not committing or is_error_of(connection, error, ErrorKind.CONNECTION):
                raise
            self._be_alone(batch)
            log.info("%s: %d messages could not be committed together (%s); they are handled again, %s.",
                     self.state.label, len(batch.rows), one_line(error), self._again)  # fmt: skip
            return len(batch.rows)
        if isinstance(batch.outcome, Interrupted):
            self.handed.replace()  # it may have struck between an answer and the driver's notes of it
        elif hooks or self.handed.stale:
            self.mend()
        if batch.culprit is not None or batch.elsewhere or batch.strangers or batch.parts:
            self._rolled_back(batch)
        elif batch.rows:
            self._committed(batch)
        return len(batch.rows)

    # -- a stage ------------------------------------------------------------------------------------------------------

    def _claim_stage(self, batch: SharedTransaction, connection: Any, most: int) -> bool:
        """Claim the next messages into the open transaction; whether there are any."""
        wanted = min(self.size.n, most)
        if self._needs_permits and (wanted := self._take_places(batch, connection, wanted)) == 0:
            return False
        with self.state.claim(wanted) as claim:
            claim.rows = rows = self.sql.claims.claim_by_delete(
                connection, claim.ranges, wanted, whole=self._whole, owner=self.state.subscriber
            )
        self.full = len(rows) == wanted
        if not rows:
            return False
        batch.claim, batch.stage = claim, rows
        batch.rows += rows
        batch.places -= len(rows)
        self.state.claimed(rows, self.full)
        self.size.weigh(rows)
        # Before any handler of theirs: they are for others, or are not to take others with them.
        batch.elsewhere = self.state.claims.holds_any(rows)
        if batch.elsewhere:
            raise Rollback
        if self.handlers.copies:
            batch.parts = fanout.parts_of(self.state, rows)
        several = {seq for seqs in batch.parts.values() for seq in seqs}
        batch.strangers = [seq for seq in strangers_of(self, rows) if seq not in several]
        if batch.strangers or batch.parts:
            raise Rollback
        for row in rows:
            if self._is_apart(row):
                batch.fail(row, None)
        return True

    def _take_places(self, batch: SharedTransaction, connection: Any, wanted: int) -> int:
        if batch.places < wanted:
            most: int = overrides.effective_value(self.queue, "max_backlog", self.alias)
            more = bool(batch.rows)
            batch.places += self.sql.limits.take_permits(connection, most, wanted - batch.places, more=more)
        return min(wanted, batch.places)

    def _is_apart(self, row: Claimed) -> bool:
        """Whether it is to be handled alone: it has failed before, counted or in a transaction with others."""
        if row[SEQ] in self.state.isolated:
            return True
        return bool(row[DELIVERIES] > 0 if self._keeps_counts else counted_attempts(row[HEADERS]))

    def _handle_stage(self, batch: SharedTransaction, connection: Any, deadline: ResponseDeadline) -> None:
        started = monotonic()
        deadline.pause()
        try:
            self._handle_rows(batch, connection, deadline)
        finally:
            deadline.restart()
        self.size.observe(len(batch.stage), monotonic() - started, full=self.full)

    def _handle_rows(self, batch: SharedTransaction, connection: Any, deadline: ResponseDeadline) -> None:
        for claimed in batch.stage:
            self._handle_one(batch, connection, claimed, last=claimed is batch.stage[-1])

    def _handle_one(self, batch: SharedTransaction, connection: Any, claimed: Claimed, *, last: bool) -> None:
        hooks = len(connection.run_on_commit)
        outcome = self.call(claimed)
        if outcome is not None:
            batch.fail(claimed, outcome)
        if self.handed.stale and not last:
            batch.fail(claimed, None)  # the next one is not to have this session
        if len(connection.run_on_commit) > hooks:
            batch.hooks.append((hooks, claimed, self.variables))

    def _may_go_on_with(self, batch: SharedTransaction, limit: int, began: float) -> bool:
        """Whether another stage may join the transaction."""
        if len(batch.rows) >= limit or self.handed.stale or self.state.crash_tracking:
            return False
        return self.state.may_go_on() and monotonic() - began < self._target

    def _run_the_hooks(self, batch: SharedTransaction, connection: Any, deadline: ResponseDeadline) -> bool:
        """What handlers mean to do after the commit runs then, each in the variables of its own handler."""
        if not notifier.run_every_hook(connection, first=deadline.pause):
            return False
        for begin, claimed, variables in reversed(batch.hooks):
            # One more stands before them all: ``first``.
            connection.run_on_commit.insert(begin + 1, (set(), partial(self._hooks_of, claimed, variables), True))
        return True

    def _hooks_of(self, claimed: Claimed, variables: Any) -> None:
        self.about, self.around = claimed, variables

    def _committed(self, batch: SharedTransaction) -> None:
        self._were_alone = 0
        self.state.succeeded(len(batch.rows) - batch.failed)
        if self._needs_permits:
            self.state.made_room()

    # -- after a rollback ----------------------------------------------------------------------------------------------

    def _rolled_back(self, batch: SharedTransaction) -> None:
        """Nothing was done, and nobody is judged: those that are for others are left alone, the rest is received again."""
        self.full = True
        self.state.rolled_back(batch.rows, batch.strangers)
        if batch.strangers:
            assert batch.claim is not None
            self.state.skipped.leave_alone(batch.claim, batch.stage, batch.strangers)
        if batch.parts:
            fanout.replace_free(self.state, batch.parts)
        if batch.elsewhere or batch.strangers or batch.parts:
            return
        if isinstance(batch.outcome, WorkerStopped):
            return
        self._be_alone(batch)
        assert batch.culprit is not None
        if batch.outcome is None or batch.outcome is False:
            return
        if len(self.state.isolated) > MOST_ALONE:
            self.state.isolated.clear()
        self.state.isolated.add(batch.culprit[SEQ])
        assert isinstance(batch.outcome, BaseException)
        log.info("%s: message %d failed (%s); the %d messages of its transaction are handled again, %s.",
                 self.state.label, batch.culprit[SEQ], one_line(batch.outcome), len(batch.rows),
                 self._again)  # fmt: skip

    def _be_alone(self, batch: SharedTransaction) -> None:
        """One by one for as many as were rolled back; for longer each time when that comes one upon another, as of handlers of
        which every third fails."""
        self._alone = self._were_alone = max(len(batch.rows), min(2 * self._were_alone, MOST_ALONE))
