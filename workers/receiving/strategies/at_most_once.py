"""AT_MOST_ONCE: DELETE a batch, commit, handle each. Gone before the handler runs; what it fails on is kept as poison."""

from __future__ import annotations

import logging
from time import monotonic

from django.db import Error, connections, transaction

from queueapp.conf import settings
from queueapp.errors import UndecodableMessage
from queueapp.messages.ids import as_uuid
from queueapp.recovery import carrying_out, verdicts
from queueapp.sql import backend_of
from queueapp.sql.claimed import HEADERS, ID, SEQ, Claimed

from ...connections.dead_peers import Answering
from ..desk import Desk
from ..handling import WorkerStopped
from ..sizing import BatchSize
from ..slot import Slot
from .base import RollBack, Task

log = logging.getLogger("workers")


class AtMostOnceTask(Task):
    """AT_MOST_ONCE: gone before the handler runs; what a handler fails on is kept as poison."""

    def __init__(self, desk: Desk, slot: Slot | None) -> None:
        super().__init__(desk, slot)
        # A batch is gone when it is claimed, so a crash may lose all of it: BATCH_TARGET's worth of work.
        most = min(settings.AT_MOST_ONCE_BATCH, backend_of(connections[self.alias]).max_batch)
        self.size = BatchSize(most, settings.BATCH_TARGET.total_seconds(), settings.MAX_BATCH_BYTES)

    def receive(self, limit: int) -> int:
        self.full = False
        connection = connections[self.alias]
        rows: list[Claimed] = []
        unknown: list[int] = []
        try:
            with Answering(connection), transaction.atomic(using=self.alias):
                # It ends before the commit, so that no other task walks over these rows meanwhile.
                with self.desk.claim(limit) as claim:
                    claim.rows = rows = self.sql.claim_by_delete(connection, claim.ranges, limit, whole=True)
                if not rows:
                    return 0
                unknown = self._unknown(rows)
                if unknown:
                    raise RollBack  # they are somebody else's: claim again without them
            self.full = len(rows) == limit
            self.desk.claimed(rows, self.full)
            self.size.weigh(rows)
        except RollBack:
            self.desk.retried(min(row[SEQ] for row in rows))
            self.desk.leave_alone(claim, rows, unknown)
            self.full = True  # claim again without them
            return len(rows)
        except Error:
            if rows:
                self.desk.retried(min(row[SEQ] for row in rows))
            raise
        started = monotonic()
        # Also when stopping: what was claimed is handled, never dropped.
        handled = 0
        self.handed.used()
        for row in rows:
            if self.slot is not None:
                identity = row[ID]
                self.slot.keep(identity if type(identity) is bytes else as_uuid(identity).bytes, row[HEADERS])
            outcome = self.call(row)
            if outcome is None:
                handled += 1
            else:
                assert isinstance(outcome, BaseException)
                self._keep(row, outcome)
                self.handed.used()
        if handled:
            self.desk.succeeded(handled)
        self.size.observe(len(rows), monotonic() - started, full=len(rows) >= limit)
        return len(rows)

    def _unknown(self, rows: list[Claimed]) -> list[int]:
        if not self.queue.delivery.recipients:
            # Most have the headers of those before.
            known = self._route.headers if self._route is not None else None
            rows = [row for row in rows if row[HEADERS] != known]
        return [row[SEQ] for row in rows if self._is_unknown(row)]

    def _is_unknown(self, claimed: Claimed) -> bool:
        try:
            return self.handlers.find(claimed)[0] is None
        except UndecodableMessage:
            return False

    def _keep(self, claimed: Claimed, error: BaseException) -> None:
        verdict = None
        if isinstance(error, WorkerStopped):
            verdict = verdicts.Poison(f"at-most-once, not retried: {error}")
        else:
            self.desk.failed()
        self.about = claimed
        row = self.sql.table.row_of(claimed)
        connection = connections[self.alias]
        while True:
            try:
                with Answering(connection):
                    carrying_out.fail_taken(
                        self.queue, self.alias, row, error, consumer=self.consumer_of(claimed),
                        items=self.items, verdict=verdict,
                    )  # fmt: skip
                self.mend()
                return
            except Error as failure:
                if not self.desk.survive(failure, self.desk.breaker, connection):
                    log.critical("%s: at-most-once message %s failed and could not be kept; headers: %s",
                                 self.queue._meta.label, row.id, row.headers)  # fmt: skip
                    return  # the rest of its batch is to be handled all the same
