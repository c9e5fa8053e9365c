"""AT_MOST_ONCE on a queue that counts what is out, or has barriers: claimed as *sent*, handled, acked, which frees its place in
the backlog, and which barriers wait for.

What is sent stays in its table, under a lease that never lapses, and nobody is ever handed it again: it is deleted when its
handler has ended, well or not, and when its subscriber is dead. What no consumer here takes, or the filter of this
subscriber does not let pass, was never started and goes back to its place.
"""

from __future__ import annotations

import logging
import uuid
from time import monotonic

from django.db import Error, connections, transaction

from queueapp.flow.limited_claims import ClaimResult
from queueapp.messages import new_id
from queueapp.services.connection_timeouts import ResponseDeadline
from queueapp.sql import ErrorKind
from queueapp.sql.claims import FOREVER_MS, SEQ, Claimed

from .. import fanout
from ..queue_state import is_error_of
from .at_most_once import AtMostOnceReceiver
from .strangers import strangers_of

log = logging.getLogger("queueapp.workers")

#: How long to wait for whoever looks at a message that was sent to this task.
_PATIENCE_MS = 10_000


class SentTask(AtMostOnceReceiver):
    """AT_MOST_ONCE with a limit, with messages that are shared out, or with barriers."""

    def receive(self, limit: int) -> int:
        taking = self.state.limited_claims
        self.full = False
        connection = connections[self.alias]
        token = new_id()
        with self.state.claim(limit) as claim:
            with ResponseDeadline(connection):
                if taking is None:
                    rows = self.sql.claims.claim_by_lease(
                        connection, claim.ranges, limit, token, self.state.subscriber, FOREVER_MS
                    )
                    taken = ClaimResult(rows, full=len(rows) == limit)
                else:
                    taken = taking.take(
                        connection, claim.ranges, limit, token, self.state.subscriber, None, bounded=True
                    )
            rows = taken.rows
            # As in ``AtLeastOnceReceiver``.
            claim.rows = None if taken.unassigned or (taking is not None and not rows) else rows
        if taken.unassigned:
            self.state.skipped.pass_by(claim, taken.unassigned)
        self.full, self.state.at_limit = taken.full, taken.at_limit
        if not rows:
            return 0
        if self.handlers.copies:
            rows = fanout.replace_leased(self.state, rows, token)
        self.reserved = len(rows) if self.reserved else 0
        self.state.claimed(rows, self.full)
        self.size.weigh(rows)
        if unknown := strangers_of(self, rows):
            self._give_back(sorted(unknown), token)
            self.state.skipped.leave_alone(claim, rows, unknown)
            gone = set(unknown)
            rows = [row for row in rows if row[SEQ] not in gone]
        if rows:
            self._handle(rows, token)
        return len(taken.rows)

    def _handle(self, rows: list[Claimed], token: uuid.UUID) -> None:
        ended: list[int] = []
        handled = 0
        started = flushed = monotonic()
        # Also when stopping: what was sent is handled, never dropped.
        self.handed.used()
        for row, outcome in self._outcomes(rows, leased=True):
            if outcome is False:
                # Others subscribe to it since it was claimed.
                self._give_back([row[SEQ]], token)
                self.state.messages_returned([row[SEQ]])
                self.handed.used()
                continue
            if outcome is None:
                handled += 1
            else:
                assert isinstance(outcome, BaseException)
                self._keep_sent(row, outcome, token)
                self.handed.used()
            ended.append(row[SEQ])
            if monotonic() > flushed + 2 * self._target:  # slow handlers: their places are wanted meanwhile
                handled = self._ack(ended, handled, token)
                flushed = monotonic()
                self.handed.used()
        self.size.observe(len(rows), monotonic() - started, full=self.full)
        self._ack(ended, handled, token)

    def _give_back(self, seqs: list[int], token: uuid.UUID) -> None:
        connection = connections[self.alias]
        with ResponseDeadline(connection):
            self.sql.acks.release(connection, seqs, token, handled=False)

    def _ack(self, ended: list[int], handled: int, token: uuid.UUID) -> int:
        """Delete what has ended, of which so many were handled; returns how many are still to be counted. It is tried again
        until the database answers: a row that stays would keep its place."""
        connection = connections[self.alias]
        while ended:
            try:
                with ResponseDeadline(connection):
                    self.sql.acks.ack(connection, sorted(ended), token)
            except Error as error:
                if not self.state.retry_after(error, self.state.breaker, connection):
                    log.error("%s: %d messages that were handled keep their places until this worker is dead: %s",
                              self.queue._meta.label, len(ended), error)  # fmt: skip
                    return handled
                continue
            if handled:
                self.state.succeeded(handled)
            if self.reserved:
                self.reserved = max(0, self.reserved - len(ended))
            ended.clear()
            if self.state.at_limit:
                self.state.made_room()
            return 0
        return handled

    def _keep_sent(self, claimed: Claimed, error: BaseException, token: uuid.UUID) -> None:
        """Keep what its handler failed on as poison; the row goes with the others of its batch, or with this worker."""
        connection = connections[self.alias]
        while True:
            try:
                with ResponseDeadline(connection), transaction.atomic(using=self.alias):
                    row = self.sql.failures.lock(connection, claimed[SEQ], token, _PATIENCE_MS)
                break
            except Error as failure:
                if not is_error_of(connection, failure, ErrorKind.LOCKED) and not self.state.retry_after(
                    failure, self.state.breaker, connection
                ):
                    row = None
                    break
        if row is None:  # somebody deleted it by hand; or the worker stops, and what was claimed has to do
            row = self.sql.table.row_of(claimed)
        # Its claim has counted this hand-out, which ``fail_taken`` counts for what was deleted.
        self._keep_row(claimed, row._replace(deliveries=row.deliveries - 1), error)
