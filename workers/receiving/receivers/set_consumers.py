"""TRANSACTIONAL, a set of messages at a time (``@set_consumer``): lock them, let the handler write its statements,
delete them, in one transaction. Only their seqs come to this process.

    a set --handled, deleted, committed--> the next has twice as many, up to its size
          --failed--> rolled back, no message is judged --> half of it --> ... --> one message --> judged
"""

from __future__ import annotations

import logging

from django.db import connections, transaction

from queueapp.consuming.consumers import MessageSet
from queueapp.consuming.context import BatchContext, Receiving
from queueapp.consuming.registry import MOST_IN_A_BATCH
from queueapp.failures.history import one_line
from queueapp.flow import ledger
from queueapp.services.connection_timeouts import ResponseDeadline
from queueapp.sql import ErrorKind, backend_of
from queueapp.sql.claims import DELIVERIES, SEQ, Claimed

from ..events import InFlightSlot
from ..handlers import BoundConsumer, Interrupted, WorkerStopped
from ..limits import BatchSizer
from ..queue_state import QueueState, is_error_of
from .base import Rollback
from .transactional import TransactionalReceiver

log = logging.getLogger("queueapp.workers")


class MessagesGone(Exception):
    """The handler has deleted messages of its set, which only the worker may do."""


class SetReceiver(TransactionalReceiver):
    """The receiver of a set consumer."""

    def __init__(self, state: QueueState, slot: InFlightSlot | None) -> None:
        super().__init__(state, slot)
        self._largest = min(self.handlers.resolver.size, backend_of(connections[self.alias]).max_batch)
        self._limit = self._largest
        self.size = BatchSizer(self._largest, 1.0)
        self.size.n = self._largest
        self._consumer = BoundConsumer(self.handlers.resolver.registration)
        self._receiving = Receiving(
            self.queue, self.alias, self._consumer.registration, self.extend, self.write_headers
        )

    @property
    def max_batch(self) -> int:
        return self._largest

    def receive(self, limit: int) -> int:
        self.full = False
        connection = connections[self.alias]
        wanted = min(limit, self._limit)
        rows: list[Claimed] = []
        outcome: BaseException | bool | None = None
        handled = False
        try:
            with ResponseDeadline(connection) as deadline, transaction.atomic(using=self.alias):
                with self.state.claim(wanted) as claim:
                    # A single message may have to be kept as poison: with its body.
                    claim.rows = rows = self.sql.limits.lock_heads(connection, claim.ranges, wanted, bodies=wanted == 1)
                if not rows:
                    return 0
                self.full = len(rows) == wanted
                self.state.claimed(rows, self.full)
                if (
                    len(rows) > 1
                    and (index := next((n for n, row in enumerate(rows) if row[DELIVERIES]), None)) is not None
                ):
                    # What has failed before must not take others with it.
                    self._limit = max(1, index)
                    raise Rollback
                deadline.pause()
                outcome = self.call(rows[0]) if len(rows) == 1 else self._call(rows)
                deadline.restart()
                handled = True
                if outcome is not None:
                    raise Rollback
                seqs = [row[SEQ] for row in rows]
                if (gone := len(seqs) - self.sql.failures.remove(connection, seqs)) != 0:
                    outcome = MessagesGone(
                        f"The handler has deleted {gone} messages of its set: leave that to the worker."
                    )
                    raise Rollback
                ledger.reclassify(self.queue, connection, len(seqs), ledger.MOVED, ledger.ACKED)
                has_hooks = self._run_every_hook(connection, rows[0], deadline)
        except Rollback:
            has_hooks = False
        except Exception as error:
            has_hooks = False
            lost = is_error_of(connection, error, ErrorKind.CONNECTION)
            if not handled or (lost and len(rows) > 1):
                if rows:
                    self._limit = max(1, len(rows) // 2)  # the set may be why the session died
                    self.state.rolled_back(rows)
                raise
            outcome = error  # of the delete, or of the commit
        else:
            self._limit = min(2 * self._limit, self._largest)
            if has_hooks or self.guard.stale:
                self.restore_connection()
            self.state.health.succeeded(len(rows))
            return len(rows)
        self._rolled_back(rows, outcome)
        return len(rows)

    def call(self, claimed: Claimed, *, leased: bool = False) -> BaseException | bool | None:
        return self._call([claimed])

    def _call(self, rows: list[Claimed]) -> BaseException | None:
        self.session_lost = False
        context = BatchContext(self._receiving, rows, [1] * len(rows), self.extend_batch)
        seqs = [row[SEQ] for row in rows]
        messages = MessageSet(self.queue, self.alias, seqs)
        # If this process dies of one of them, these are handled one by one from then on.
        with self.in_flight(seqs[:MOST_IN_A_BATCH], quarantined=False):
            return self.run(self._consumer, messages, context, seqs[0])

    def _rolled_back(self, rows: list[Claimed], outcome: BaseException | bool | None) -> None:
        """The set is rolled back. A single message is judged; of several none is."""
        self.full = True
        if isinstance(outcome, Interrupted):
            self.guard.replace()
        elif self.guard.stale:
            self.restore_connection()
        if outcome is None or isinstance(outcome, WorkerStopped) or len(rows) > 1:
            self.state.rolled_back(rows)
        if outcome is None or isinstance(outcome, WorkerStopped):
            return
        assert isinstance(outcome, BaseException)
        if len(rows) == 1:
            self._failed(rows[0], outcome, connections[self.alias], None)
            self._limit = min(2, self._largest)
            return
        self._limit = len(rows) // 2
        log.info(
            "%s: a set of %d messages failed (%s); it is halved.", self.state.label, len(rows), one_line(outcome),
            extra={"queue": self.state.label, "messages": len(rows)},
        )  # fmt: skip

    def bound_consumer_of(self, claimed: Claimed) -> BoundConsumer:
        return self._consumer  # for all messages; their headers were not read

    def transaction_intact(self, seq: int) -> bool:
        """Unknown: the lock may be that of another transaction."""
        return False
