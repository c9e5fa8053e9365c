"""AT_MOST_ONCE: a batch is taken out of its queue and committed, then each message is handled. What a handler fails on
is kept as poison.

    delete (committed) --> handlers --failed--> poison

On a queue that counts what is leased, or has barriers, a message is leased instead of deleted: it stays in its table,
under a lease that never expires, is never delivered again, and is deleted when its handler has ended, whatever the
outcome, or when its subscriber is dead. Until then it takes its place in the backlog, and barriers wait for it.

    lease for ever (committed) --> handlers --> delete
                                   --no consumer here, or the filter does not match--> released, in its place

A consumer that takes batches gets each message once as well: what a call fails on as a whole is kept as poison, all of
it.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from time import monotonic

from django.db import Error, connections, transaction

from queueapp.conf import settings
from queueapp.errors import MessageCancelled
from queueapp.failures import recoverability
from queueapp.flow.limited_claims import ClaimResult
from queueapp.messages import new_id
from queueapp.messages.ids import as_uuid
from queueapp.services.connection_timeouts import ResponseDeadline
from queueapp.sql import ErrorKind, backend_of
from queueapp.sql.claims import FOREVER_MS, HEADERS, ID, SEQ, Claimed
from queueapp.sql.message_columns import Row

from ..events import InFlightSlot
from ..handlers import WorkerStopped
from ..limits import BatchSizer, WholeBatches
from ..queue_state import QueueState, is_error_of
from . import outcomes
from .base import Receiver, Rollback
from .batch_consumers import BatchCaller, ReadyMessage

log = logging.getLogger("queueapp.workers")

#: How long to wait for the lock of a message that was sent to this receiver.
_LOCK_WAIT_MS = 10_000

#: A message, and what ``Receiver.call`` returned for it.
HandledMessage = tuple[Claimed, BaseException | bool | None]


class AtMostOnceReceiver(Receiver):
    """AT_MOST_ONCE."""

    def __init__(self, state: QueueState, slot: InFlightSlot | None) -> None:
        super().__init__(state, slot)
        #: Whether messages are leased by their claim, and not deleted by it.
        self._keeps_in_flight: bool = self.queue.delivery.keeps_in_flight
        # A batch is gone when it is claimed, so a crash may lose all of it: BATCH_TARGET's worth of work.
        limit = min(settings.AT_MOST_ONCE_BATCH, backend_of(connections[self.alias]).max_batch)
        self._target = settings.BATCH_TARGET.total_seconds()
        self.size = BatchSizer(limit, self._target, settings.MAX_BATCH_BYTES)
        self.filter = None  # checked for the whole batch, before any of it is gone
        if self.handlers.largest_batch:
            self.batches = BatchCaller(self)
            self.size = WholeBatches(self.batches.largest)

    def receive(self, limit: int) -> int:
        if self.batches is not None and not (limit := self.batches.gather(limit)):
            return 0
        if self._keeps_in_flight:
            return self._receive_leased(limit)
        with self.only_here():
            return self._receive_deleted(limit)

    # -- deleted by the claim -----------------------------------------------------------------------------------------

    def _receive_deleted(self, limit: int) -> int:
        self.full = False
        connection = connections[self.alias]
        rows: list[Claimed] = []
        skipped: list[int] = []
        copies: outcomes.CopyGroups = {}
        try:
            with ResponseDeadline(connection), transaction.atomic(using=self.alias):
                # The claim ends before the commit, so that no other receiver scans these rows meanwhile.
                with self.state.claim(limit) as claim:
                    claim.rows = rows = self.sql.claims.claim_by_delete(
                        connection, claim.ranges, limit, whole=True, owner=self.state.subscriber
                    )
                if not rows:
                    return 0
                if self.handlers.copies:
                    copies = outcomes.copy_groups(self.state, rows)
                copied = {seq for seqs in copies.values() for seq in seqs}
                skipped = [seq for seq in outcomes.not_for_this_process(self, rows) if seq not in copied]
                if skipped or copies:
                    raise Rollback  # they are for other workers, or for several consumers: claim again without them
            self.full = len(rows) == limit
            self.reserved = len(rows) if self.reserved else 0
            self.state.claimed(rows, self.full)
            self.size.weigh(rows)
        except Rollback:
            self.state.rolled_back(rows, skipped)
            if skipped:
                self.state.skipped.skip(claim, rows, skipped)
            if copies:
                outcomes.replace_free_by_copies(self.state, copies)
            self.full = True  # claim again without them
            return len(rows)
        except Error:
            if rows:
                self.state.rolled_back(rows)
            raise
        started = monotonic()
        # Also when stopping: what was claimed is handled, never dropped.
        handled = 0
        self.guard.mark_used()
        for row, outcome in self._handle(rows, leased=False):
            if outcome is None:
                handled += 1
            elif isinstance(outcome, BaseException):
                self._keep(row, self.sql.table.row_of(row), outcome)
                self.guard.mark_used()
            else:
                outcomes.put_back(self, row)
                self.guard.mark_used()
            if self.reserved:
                self.reserved -= 1
        if handled:
            self.state.health.succeeded(handled)
        self.size.observe(len(rows), monotonic() - started, full=len(rows) >= limit)
        return len(rows)

    # -- leased for ever ---------------------------------------------------------------------------------------------

    def _receive_leased(self, limit: int) -> int:
        limited = self.state.limited_claims
        self.full = False
        connection = connections[self.alias]
        token = new_id()
        with self.state.claim(limit) as claim:
            with ResponseDeadline(connection):
                if limited is None:
                    rows = self.sql.claims.claim_by_lease(
                        connection, claim.ranges, limit, token, self.state.subscriber, FOREVER_MS
                    )
                    taken = ClaimResult(rows, full=len(rows) == limit)
                else:
                    taken = limited.take(
                        connection, claim.ranges, limit, token, self.state.subscriber, None, bounded=True
                    )
            rows = taken.rows
            # As in ``BatchLeaser``.
            claim.rows = None if taken.unassigned or (limited is not None and not rows) else rows
        if taken.unassigned:
            self.state.skipped.skip_unassigned(claim, taken.unassigned)
        self.full, self.state.at_limit = taken.full, taken.at_limit
        if not rows:
            return 0
        if self.handlers.copies:
            rows = outcomes.replace_leased_by_copies(self.state, rows, token)
        self.reserved = len(rows) if self.reserved else 0
        self.state.claimed(rows, self.full)
        self.size.weigh(rows)
        if skipped := outcomes.not_for_this_process(self, rows):
            self._release(sorted(skipped), token)
            self.state.skipped.skip(claim, rows, skipped)
            released = set(skipped)
            rows = [row for row in rows if row[SEQ] not in released]
        if rows:
            self._handle_leased(rows, token)
        return len(taken.rows)

    def _handle_leased(self, rows: list[Claimed], token: uuid.UUID) -> None:
        ended: list[int] = []
        handled = 0
        started = flushed = monotonic()
        # Also when stopping: what was sent is handled, never dropped.
        self.guard.mark_used()
        for row, outcome in self._handle(rows, leased=True):
            if outcome is False:
                # Other workers subscribe to it since it was claimed.
                self._release([row[SEQ]], token)
                self.state.messages_returned([row[SEQ]])
                self.guard.mark_used()
                continue
            if outcome is None:
                handled += 1
            else:
                assert isinstance(outcome, BaseException)
                self._keep_leased(row, outcome, token)
                self.guard.mark_used()
            ended.append(row[SEQ])
            if monotonic() > flushed + 2 * self._target:  # slow handlers: free their capacity meanwhile
                handled = self._ack(ended, handled, token)
                flushed = monotonic()
                self.guard.mark_used()
        self.size.observe(len(rows), monotonic() - started, full=self.full)
        self._ack(ended, handled, token)

    def _release(self, seqs: list[int], token: uuid.UUID) -> None:
        connection = connections[self.alias]
        with ResponseDeadline(connection):
            self.sql.acks.release(connection, seqs, token, cancelled=False)

    def _ack(self, ended: list[int], handled: int, token: uuid.UUID) -> int:
        """Delete what has ended, of which so many were handled; return how many remain to be counted. It is tried again
        until the database answers: a row that stays takes capacity."""
        connection = connections[self.alias]
        while ended:
            try:
                with ResponseDeadline(connection):
                    self.sql.acks.ack(connection, sorted(ended), token)
            except Error as error:
                if not self.state.health.retry_after(error, self.state.health.breaker, connection):
                    log.error(
                        "%s: %d messages that were handled take capacity until this worker is declared dead: %s",
                        self.queue._meta.label, len(ended), error,
                        extra={"queue": self.queue._meta.label, "messages": len(ended)},
                    )  # fmt: skip
                    return handled
                continue
            if handled:
                self.state.health.succeeded(handled)
            if self.reserved:
                self.reserved = max(0, self.reserved - len(ended))
            ended.clear()
            if self.state.at_limit:
                self.state.capacity_freed()
            return 0
        return handled

    def _keep_leased(self, claimed: Claimed, error: BaseException, token: uuid.UUID) -> None:
        """Keep what its handler failed on as poison; the row goes with the others of its batch, or with this worker."""
        connection = connections[self.alias]
        while True:
            try:
                with ResponseDeadline(connection), transaction.atomic(using=self.alias):
                    row = self.sql.failures.lock(connection, claimed[SEQ], token, _LOCK_WAIT_MS)
                break
            except Error as failure:
                if not is_error_of(connection, failure, ErrorKind.LOCKED) and not self.state.health.retry_after(
                    failure, self.state.health.breaker, connection
                ):
                    row = None
                    break
        if row is None:  # it was deleted by hand; or the worker stops, and the claimed columns have to do
            row = self.sql.table.row_of(claimed)
        # Its claim has counted this delivery, which ``fail_taken`` counts for what was deleted.
        self._keep(claimed, row._replace(deliveries=row.deliveries - 1), error)

    # -- both ---------------------------------------------------------------------------------------------------------

    def _handle(self, rows: Sequence[Claimed], *, leased: bool) -> Iterator[HandledMessage]:
        """Handle the messages; each with what ``call`` returns for it, one after the other."""
        if self.batches is not None:
            yield from self._handle_batches(rows, leased=leased)
            return
        for row in rows:
            self._record(row)
            yield row, self.call(row, leased=leased)

    def _handle_batches(self, rows: Sequence[Claimed], *, leased: bool) -> Iterator[HandledMessage]:
        waiting = list(rows)
        while waiting:
            route, together, waiting = self.batches.next_call(waiting, leased=leased)
            if route is None or len(together) == 1:
                for row in together:
                    self._record(row)
                    yield row, self.call(row, leased=leased)
                continue
            ready: list[ReadyMessage] = []
            for row in together:
                self._record(row)
                prepared = self.batches.prepare(route, row, leased=leased)
                if isinstance(prepared, ReadyMessage):
                    ready.append(prepared)
                else:
                    self.items = None
                    yield row, False if prepared is None else prepared
            if not ready:
                continue
            outcome = self.batches.call_batch(route, ready, leased=leased)
            for index, item in enumerate(ready):
                self.items = self.batches.items_of(index)
                yield item.row, outcome.get(index) if isinstance(outcome, dict) else outcome

    def _record(self, row: Claimed) -> None:
        """Record id and headers in the slot, so that the supervisor can log what was lost with this process."""
        if self.slot is not None:
            identity = row[ID]
            self.slot.keep(identity if type(identity) is bytes else as_uuid(identity).bytes, row[HEADERS])

    def _keep(self, claimed: Claimed, row: Row, error: BaseException) -> None:
        verdict = None
        if isinstance(error, WorkerStopped):
            verdict = recoverability.Poison(f"at-most-once, not retried: {error}")
        elif not isinstance(error, MessageCancelled):
            self.state.health.failed()
        outcomes.keep_as_poison(self, claimed, row, error, verdict)
