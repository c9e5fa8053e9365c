"""AT_MOST_ONCE: DELETE a batch, commit, handle each. Gone before the handler runs; what it fails on is kept as poison."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from time import monotonic

from django.db import Error, connections, transaction

from queueapp.conf import settings
from queueapp.errors import MessageCancelled
from queueapp.failures import verdicts
from queueapp.messages.ids import as_uuid
from queueapp.services.connection_timeouts import ResponseDeadline
from queueapp.sql import backend_of
from queueapp.sql.claims import HEADERS, ID, Claimed
from queueapp.sql.message_columns import Row

from .. import fanout
from ..batch_sizer import BatchSizer
from ..handlers import WorkerStopped
from ..queue_state import QueueState
from ..slot import Slot
from . import taken
from .base import Receiver, Rollback
from .strangers import strangers_of

log = logging.getLogger("queueapp.workers")


class AtMostOnceReceiver(Receiver):
    """AT_MOST_ONCE: gone before the handler runs; what a handler fails on is kept as poison."""

    def __init__(self, state: QueueState, slot: Slot | None) -> None:
        super().__init__(state, slot)
        # A batch is gone when it is claimed, so a crash may lose all of it: BATCH_TARGET's worth of work.
        most = min(settings.AT_MOST_ONCE_BATCH, backend_of(connections[self.alias]).max_batch)
        self._target = settings.BATCH_TARGET.total_seconds()
        self.size = BatchSizer(most, self._target, settings.MAX_BATCH_BYTES)
        self._filter = None  # asked for the whole batch, before any of it is gone

    def receive(self, limit: int) -> int:
        with self.only_here():
            return self._receive(limit)

    def _receive(self, limit: int) -> int:
        self.full = False
        connection = connections[self.alias]
        rows: list[Claimed] = []
        unknown: list[int] = []
        parts: fanout.Parts = {}
        try:
            with ResponseDeadline(connection), transaction.atomic(using=self.alias):
                # It ends before the commit, so that no other task walks over these rows meanwhile.
                with self.state.claim(limit) as claim:
                    claim.rows = rows = self.sql.claims.claim_by_delete(
                        connection, claim.ranges, limit, whole=True, owner=self.state.subscriber
                    )
                if not rows:
                    return 0
                if self.handlers.copies:
                    parts = fanout.parts_of(self.state, rows)
                several = {seq for seqs in parts.values() for seq in seqs}
                unknown = [seq for seq in strangers_of(self, rows) if seq not in several]
                if unknown or parts:
                    raise Rollback  # they are somebody else's, or several consumers': claim again without them
            self.full = len(rows) == limit
            self.reserved = len(rows) if self.reserved else 0
            self.state.claimed(rows, self.full)
            self.size.weigh(rows)
        except Rollback:
            self.state.rolled_back(rows, unknown)
            if unknown:
                self.state.skipped.leave_alone(claim, rows, unknown)
            if parts:
                fanout.replace_free(self.state, parts)
            self.full = True  # claim again without them
            return len(rows)
        except Error:
            if rows:
                self.state.rolled_back(rows)
            raise
        started = monotonic()
        # Also when stopping: what was claimed is handled, never dropped.
        handled = 0
        self.handed.used()
        for row, outcome in self._outcomes(rows, leased=False):
            if outcome is None:
                handled += 1
            elif isinstance(outcome, BaseException):
                self._keep(row, outcome)
                self.handed.used()
            else:
                taken.put_back(self, row)
                self.handed.used()
            if self.reserved:
                self.reserved -= 1
        if handled:
            self.state.succeeded(handled)
        self.size.observe(len(rows), monotonic() - started, full=len(rows) >= limit)
        return len(rows)

    def _outcomes(
        self, rows: Sequence[Claimed], *, leased: bool
    ) -> Iterator[tuple[Claimed, BaseException | bool | None]]:
        """Handle them; each with what ``call`` says of it, one after the other."""
        for row in rows:
            self.note(row)
            yield row, self.call(row, leased=leased)

    def note(self, row: Claimed) -> None:
        """Write down what it is, for whoever has to say what was lost with this process."""
        if self.slot is not None:
            identity = row[ID]
            self.slot.keep(identity if type(identity) is bytes else as_uuid(identity).bytes, row[HEADERS])

    def _keep(self, claimed: Claimed, error: BaseException) -> None:
        self._keep_row(claimed, self.sql.table.row_of(claimed), error)

    def _keep_row(self, claimed: Claimed, row: Row, error: BaseException) -> None:
        verdict = None
        if isinstance(error, WorkerStopped):
            verdict = verdicts.Poison(f"at-most-once, not retried: {error}")
        elif not isinstance(error, MessageCancelled):
            self.state.failed()
        taken.keep(self, claimed, row, error, verdict)
