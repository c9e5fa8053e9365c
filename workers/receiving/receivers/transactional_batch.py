"""TRANSACTIONAL with a ``transaction_size``, or with consumers that take batches: many messages share one transaction,
without savepoints.

    shared  --all handlers returned, committed--> shared
            --a handler failed, the commit failed--> rolled back, no attempt is counted --> fallback
            --a claimed message has failed before--> rolled back before any handler has run --> fallback
            --another receiver of the process has a claimed message in flight--> rolled back, and claimed again without
                it
    fallback, of consumers that take one message: one by one, as many as were rolled back; only there is a failure
        judged
    fallback, of consumers that take batches: half as many, until the one that fails is single

Messages are claimed a stage at a time, of what the handlers do in about ``STAGE_SECONDS``: what is claimed cannot be
released in part, so a handler that becomes slow ends the transaction with its stage. A process that dies has one
message in flight, and its crash is counted against that one; the others are back. From then on that one is handled by
itself.

What the handler of a batch reports about single messages (``BatchContext.fail``) is decided in the same transaction:
the rest of what it did is kept.
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
from queueapp.failures import apply_verdict
from queueapp.failures.apply_verdict import AppliedVerdict
from queueapp.failures.history import one_line
from queueapp.messages import counted_attempts
from queueapp.services.connection_timeouts import ResponseDeadline
from queueapp.sql import ErrorKind, backend_of
from queueapp.sql.claims import DELIVERIES, HEADERS, SEQ, Claimed

from ..claim_tracker import ActiveClaim
from ..events import InFlightSlot
from ..handlers import Interrupted, WorkerStopped
from ..limits import BatchSizer, WholeBatches
from ..queue_state import QueueState, is_error_of
from . import outcomes
from .base import HandlerRoute, Rollback
from .batch_consumers import BatchCaller, ReadyMessage
from .transactional import TransactionalReceiver

log = logging.getLogger("queueapp.workers")

#: What is claimed at once is what handlers do in about so many seconds.
STAGE_SECONDS = 0.01
#: So many messages at most are handled one by one after rollbacks that came one upon another.
MAX_SINGLE = 1000


class Refused(Exception):
    """The failed attempt of one message of a batch cannot be decided beside the others."""


class SharedTransaction:
    """One transaction of several messages, until it has ended."""

    __slots__ = (
        "claim", "copies", "culprit", "decided", "elsewhere", "hooks", "outcome", "permits", "rows", "skipped", "stage"
    )  # fmt: skip

    def __init__(self) -> None:
        #: All that was claimed, and what of it was claimed last.
        self.rows: list[Claimed] = []
        self.stage: Sequence[Claimed] = ()
        self.claim: ActiveClaim | None = None
        #: Why it cannot be committed: this message, and what its handler raised.
        self.culprit: Claimed | None = None
        self.outcome: BaseException | bool | None = None
        #: Another receiver is recording a failed attempt of a message of the last stage.
        self.elsewhere = False
        #: Those of the last stage that are not for this process.
        self.skipped: list[int] = []
        #: Those of the last stage that several consumers get a copy of.
        self.copies: outcomes.CopyGroups = {}
        #: Where the hooks of which message begin, and the variables of its handler.
        self.hooks: list[tuple[int, Claimed, Any]] = []
        #: Permits of a queue with a limit that it has taken and not used yet.
        self.permits = 0
        #: Messages whose failure is decided in this transaction (consumers that take batches).
        self.decided: set[int] = set()

    def fail(self, claimed: Claimed, outcome: BaseException | bool | None) -> None:
        """Leave the transaction because of this message."""
        self.culprit, self.outcome = claimed, outcome
        raise Rollback


class TransactionBatchReceiver(TransactionalReceiver):
    """TRANSACTIONAL, several messages a transaction."""

    def __init__(self, state: QueueState, slot: InFlightSlot | None) -> None:
        super().__init__(state, slot)
        self._transaction_size: int = self.queue.delivery.transaction_size
        limit = min(self._transaction_size, backend_of(connections[self.alias]).max_batch)
        self._stages = BatchSizer(limit, STAGE_SECONDS, settings.MAX_BATCH_BYTES)
        #: So many messages are to be handled one by one, and were the last time.
        self._single_count = self._last_single_count = 0
        #: How what was rolled back is handled, for the log.
        self._fallback = "one by one"
        if self.handlers.largest_batch:
            self.batches = BatchCaller(self)
            #: Whether messages of consumers that take one share a transaction, too.
            self._shares_single = self._transaction_size > 1
            self._transaction_size = self._batch_limit = self.batches.largest
            self._stages = WholeBatches(self.batches.largest)
            self._fallback = "fewer at a time"
        self.size = self._stages
        #: Verdicts that were applied in the open transaction, to be reported once it is committed.
        self._decided: list[AppliedVerdict] = []

    @property
    def max_batch(self) -> int:
        return super().max_batch if self._single_count or self.state.crash_tracking else self._transaction_size

    def receive(self, limit: int) -> int:
        if self.batches is None:
            return self._receive(limit)
        limit = min(self.batches.gather(limit), self._batch_limit)
        if not limit:
            return 0
        self._decided.clear()
        count = self._receive(limit)
        if not count or limit == 1:
            self._double_batch()
        return count

    def _receive(self, limit: int) -> int:
        if self._single_count or limit == 1 or self.state.crash_tracking:
            count = super().receive(min(limit, self._single_count or limit))
            self._single_count = max(0, self._single_count - count) if count else 0
            return count
        self.size = self._stages
        self.full = False
        return self._receive_shared(limit)

    def _begin(self, claimed: Claimed) -> None:
        # By itself: its failure is counted, and its row says so from then on.
        self.state.isolated.discard(claimed[SEQ])
        super()._begin(claimed)

    def _receive_shared(self, limit: int) -> int:
        connection = connections[self.alias]
        shared = SharedTransaction()
        committing = has_hooks = False
        try:
            with ResponseDeadline(connection) as deadline, transaction.atomic(using=self.alias):
                began = monotonic()
                while self._claim_stage(shared, connection, limit - len(shared.rows)):
                    self._handle_stage(shared, connection, deadline)
                    if not self.full or not self._may_continue(shared, limit, began):
                        break
                self._apply_effects(connection, [row for row in shared.rows if row[SEQ] not in shared.decided])
                has_hooks = self._schedule_hooks(shared, connection, deadline)
                committing = True
        except Rollback:
            pass
        except Exception as error:
            if shared.rows:
                self.state.rolled_back(shared.rows)
            # A reply that is lost with its connection says nothing of the commit: the queue does.
            if not committing or is_error_of(connection, error, ErrorKind.CONNECTION):
                raise
            self._fall_back(shared)
            log.info(
                "%s: %d messages could not be committed together (%s); they are handled again, %s.",
                self.state.label, len(shared.rows), one_line(error), self._fallback,
                extra={"queue": self.state.label, "messages": len(shared.rows)},
            )  # fmt: skip
            return len(shared.rows)
        if isinstance(shared.outcome, Interrupted):
            # Perhaps interrupted between an answer of the server and the driver's processing of it.
            self.guard.replace()
        elif has_hooks or self.guard.stale:
            self.restore_connection()
        if shared.culprit is not None or shared.elsewhere or shared.skipped or shared.copies:
            self._rolled_back(shared)
        elif shared.rows:
            self._committed(shared)
        return len(shared.rows)

    # -- a stage ------------------------------------------------------------------------------------------------------

    def _claim_stage(self, shared: SharedTransaction, connection: Any, limit: int) -> bool:
        """Claim the next messages into the open transaction; return whether there are any."""
        wanted = min(self.size.n, limit)
        if self._needs_permits and (wanted := self._take_permits(shared, connection, wanted)) == 0:
            return False
        with self.state.claim(wanted) as claim:
            # A batch may have to be kept as poison: all columns.
            claim.rows = rows = self.sql.claims.claim_by_delete(
                connection, claim.ranges, wanted, whole=self.batches is not None, owner=self.state.subscriber
            )
        self.full = len(rows) == wanted
        if not rows:
            return False
        shared.claim, shared.stage = claim, rows
        shared.rows += rows
        shared.permits -= len(rows)
        self.state.claimed(rows, self.full)
        self.size.weigh(rows)
        # Before any of their handlers runs: what is for others, or must not take others with it.
        shared.elsewhere = self.state.claims.excludes_any(rows)
        if shared.elsewhere:
            raise Rollback
        if self.handlers.copies:
            shared.copies = outcomes.copy_groups(self.state, rows)
        copied = {seq for seqs in shared.copies.values() for seq in seqs}
        shared.skipped = [seq for seq in outcomes.not_for_this_process(self, rows) if seq not in copied]
        if shared.skipped or shared.copies:
            raise Rollback
        for row in rows:
            if self._is_isolated(row):
                shared.fail(row, None)
        return True

    def _take_permits(self, shared: SharedTransaction, connection: Any, wanted: int) -> int:
        if shared.permits < wanted:
            max_backlog: int = overrides.effective_value(self.queue, "max_backlog", self.alias)
            more = bool(shared.rows)
            shared.permits += self.sql.limits.take_permits(connection, max_backlog, wanted - shared.permits, more=more)
        return min(wanted, shared.permits)

    def _is_isolated(self, row: Claimed) -> bool:
        """Whether it is to be handled by itself: it has failed before, counted or in a shared transaction; or its
        consumer takes one message and its queue has no ``transaction_size``."""
        if self.batches is not None:
            return self.batches.is_quarantined(row, leased=False) or not (
                self._shares_single or self.batches.route_of(row) is not None
            )
        if row[SEQ] in self.state.isolated:
            return True
        return bool(row[DELIVERIES] > 0 if self.keeps_counts else counted_attempts(row[HEADERS]))

    def _handle_stage(self, shared: SharedTransaction, connection: Any, deadline: ResponseDeadline) -> None:
        started = monotonic()
        deadline.pause()
        try:
            if self.batches is None:
                for claimed in shared.stage:
                    self._handle_single(shared, connection, claimed, last=claimed is shared.stage[-1])
            else:
                self._handle_calls(shared, connection, deadline)
        finally:
            deadline.restart()
        self.size.observe(len(shared.stage), monotonic() - started, full=self.full)

    def _handle_single(self, shared: SharedTransaction, connection: Any, claimed: Claimed, *, last: bool) -> None:
        hooks = len(connection.run_on_commit)
        outcome = self.call(claimed)
        if outcome is not None:
            shared.fail(claimed, outcome)
        if self.guard.stale and not last:
            shared.fail(claimed, None)  # the next one must not have this session
        if len(connection.run_on_commit) > hooks:
            shared.hooks.append((hooks, claimed, self.handler_variables))

    def _may_continue(self, shared: SharedTransaction, limit: int, began: float) -> bool:
        """Whether another stage may join the transaction."""
        if self.batches is not None:
            return False
        if len(shared.rows) >= limit or self.guard.stale or self.state.crash_tracking:
            return False
        return self.state.events.may_continue() and monotonic() - began < self.target

    def _schedule_hooks(self, shared: SharedTransaction, connection: Any, deadline: ResponseDeadline) -> bool:
        """Hooks of handlers run after the commit, each in the variables of its own handler."""
        if not notifier.run_every_hook(connection, first=deadline.pause):
            return False
        for begin, claimed, variables in reversed(shared.hooks):
            # One more hook is before them all: ``first``.
            connection.run_on_commit.insert(begin + 1, (set(), partial(self._begin_hooks, claimed, variables), True))
        return True

    def _begin_hooks(self, claimed: Claimed, variables: Any) -> None:
        self.callback_message, self.callback_variables = claimed, variables

    # -- a call of a batch --------------------------------------------------------------------------------------------

    def _handle_calls(self, shared: SharedTransaction, connection: Any, deadline: ResponseDeadline) -> None:
        waiting = list(shared.stage)
        while waiting:
            route, together, waiting = self.batches.next_call(waiting, leased=False)
            if route is None:
                self._handle_single(shared, connection, together[0], last=not waiting)
                continue
            self._handle_call(shared, connection, deadline, route, together)
            if self.guard.stale and waiting:
                shared.fail(together[0], Refused("its handler has changed the session, which the next must not have"))

    def _handle_call(
        self,
        shared: SharedTransaction,
        connection: Any,
        deadline: ResponseDeadline,
        route: HandlerRoute,
        rows: Sequence[Claimed],
    ) -> None:
        hooks = len(connection.run_on_commit)
        ready: list[ReadyMessage] = []
        failed: list[tuple[Claimed, BaseException, dict[str, Any] | None]] = []
        for row in rows:
            prepared = self.batches.prepare(route, row, leased=False)
            if isinstance(prepared, ReadyMessage):
                ready.append(prepared)
            else:
                failed.append((row, prepared or Refused("it is for another subscriber"), None))
        if ready:
            outcome = self.batches.call_batch(route, ready, leased=False)
            if isinstance(outcome, dict):
                failed += [(ready[index].row, error, self.batches.items_of(index)) for index, error in outcome.items()]
            elif outcome is not None:
                shared.fail(ready[0].row, outcome)
            if len(connection.run_on_commit) > hooks:
                shared.hooks.append((hooks, ready[0].row, self.handler_variables))
        if failed and (self.sql.table.barriers or len(shared.rows) == 1):
            shared.fail(failed[0][0], failed[0][1])  # a single message is judged in its place, which barriers rely on
        for row, error, items in failed:
            deadline.restart()
            self._decide(shared, row, error, items)
            deadline.pause()

    def _decide(
        self, shared: SharedTransaction, claimed: Claimed, error: BaseException, items: dict[str, Any] | None
    ) -> None:
        self.callback_message = claimed
        try:
            decided = apply_verdict.decide_taken(
                self.queue,
                self.alias,
                self.sql.table.row_of(claimed),
                error,
                consumer=self.consumer_of(claimed),
                items=items,
            )
        except Exception as refused:
            shared.fail(claimed, Refused(f"its failure cannot be recorded beside others: {refused}"))
        else:
            self._decided.append(decided)
            shared.decided.add(claimed[SEQ])

    # -- after the transaction ----------------------------------------------------------------------------------------

    def _committed(self, shared: SharedTransaction) -> None:
        self._last_single_count = 0
        self.state.health.succeeded(len(shared.rows) - len(shared.decided))
        if self._needs_permits:
            self.state.capacity_freed()
        if self.batches is None:
            return
        self._double_batch()
        for decided in self._decided:
            self.state.health.failed()
            decided.notify()
        if self._decided:
            self._decided.clear()
            self.restore_connection()

    def _rolled_back(self, shared: SharedTransaction) -> None:
        """Nothing was done, and no message is judged: skip those that are not for this process, receive the others
        again."""
        self.full = True
        self.state.rolled_back(shared.rows, shared.skipped)
        if shared.skipped:
            assert shared.claim is not None
            self.state.skipped.skip(shared.claim, shared.stage, shared.skipped)
        if shared.copies:
            outcomes.replace_free_by_copies(self.state, shared.copies)
        if shared.elsewhere or shared.skipped or shared.copies:
            return
        if isinstance(shared.outcome, WorkerStopped):
            return
        self._fall_back(shared)
        assert shared.culprit is not None
        if shared.outcome is None or shared.outcome is False:
            return
        if len(self.state.isolated) > MAX_SINGLE:
            self.state.isolated.clear()
        self.state.isolated.add(shared.culprit[SEQ])
        assert isinstance(shared.outcome, BaseException)
        log.info(
            "%s: message %d failed (%s); the %d messages of its transaction are handled again, %s.",
            self.state.label, shared.culprit[SEQ], one_line(shared.outcome), len(shared.rows), self._fallback,
            extra={"queue": self.state.label, "seq": shared.culprit[SEQ], "messages": len(shared.rows)},
        )  # fmt: skip

    def _fall_back(self, shared: SharedTransaction) -> None:
        """One by one for as many as were rolled back, and for longer each time when that comes one upon another, as of
        handlers of which every third fails. Batches: half as many."""
        rows = shared.rows
        if self.batches is None:
            self._single_count = max(len(rows), min(2 * self._last_single_count, MAX_SINGLE))
            self._last_single_count = self._single_count
        elif shared.culprit is not None and shared.outcome is None:
            # Before any handler ran: claim those before it without it, or it without those behind it.
            index = next(index for index, row in enumerate(rows) if row[SEQ] == shared.culprit[SEQ])
            self._batch_limit = max(1, index)
        else:
            self._batch_limit = max(1, len(rows) // 2)

    def _double_batch(self) -> None:
        """What was claimed was handled, or judged."""
        self._batch_limit = min(2 * self._batch_limit, self.batches.largest)
