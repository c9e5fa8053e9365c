"""TRANSACTIONAL with consumers of several messages: what is claimed together is handled and committed together.

A call that fails takes back its transaction; the next has half as many messages, until the one that fails is alone. What
the handler says of single messages (``BatchContext.fail``) is decided in the same transaction: what it did stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from queueapp.failures import apply_verdict
from queueapp.failures.applied import AppliedVerdict
from queueapp.services.connection_timeouts import ResponseDeadline
from queueapp.sql.claims import SEQ, Claimed

from ..queue_state import QueueState
from ..slot import Slot
from .base import HandlerRoute
from .several import Ready, SeveralTask
from .transactional_batch import SharedTransaction, TransactionBatchReceiver


class Refused(Exception):
    """The attempt of one message of several has failed where that cannot be decided beside the others."""


class TogetherSeveralTask(SeveralTask, TransactionBatchReceiver):
    """TRANSACTIONAL."""

    def __init__(self, state: QueueState, slot: Slot | None) -> None:
        super().__init__(state, slot)
        self._stages = self.size
        self._shares = self._together > 1  # those of consumers that take one message, too
        self._together = self._largest
        #: At most so many are claimed: half after each call that fails, twice after each that does not.
        self._limit = self._largest
        #: What was decided in the open transaction, to be told once it is committed.
        self._decided: list[AppliedVerdict] = []

    _whole = True
    _again = "fewer at a time"

    def receive(self, limit: int) -> int:
        limit = min(self.gather(limit), self._limit)
        if not limit:
            return 0
        self._decided.clear()
        count = super().receive(limit)
        self._alone = 0
        if not count or limit == 1:
            self._allow_more()
        return count

    def _allow_more(self) -> None:
        """What was claimed was handled, or judged."""
        self._limit = min(2 * self._limit, self._largest)

    def _is_apart(self, row: Claimed) -> bool:
        return self.is_suspect(row, leased=False) or not (self._shares or self.route_of(row) is not None)

    def _may_go_on_with(self, batch: SharedTransaction, limit: int, began: float) -> bool:
        return False

    def _be_alone(self, batch: SharedTransaction) -> None:
        rows = batch.rows
        if batch.culprit is not None and batch.outcome is None:
            # Before any handler: those before it are claimed without it, or it without those behind it.
            place = next(place for place, row in enumerate(rows) if row[SEQ] == batch.culprit[SEQ])
            self._limit = max(1, place)
        else:
            self._limit = max(1, len(rows) // 2)

    def _handle_rows(self, batch: SharedTransaction, connection: Any, deadline: ResponseDeadline) -> None:
        waiting = list(batch.stage)
        while waiting:
            route, mine, waiting = self.next_call(waiting, leased=False)
            if route is None:
                self._handle_one(batch, connection, mine[0], last=not waiting)
                continue
            self._handle_several(batch, connection, deadline, route, mine)
            if self.handed.stale and waiting:
                batch.fail(mine[0], Refused("its handler has changed the session, which the next one is not to have"))

    def _handle_several(
        self,
        batch: SharedTransaction,
        connection: Any,
        deadline: ResponseDeadline,
        route: HandlerRoute,
        rows: Sequence[Claimed],
    ) -> None:
        hooks = len(connection.run_on_commit)
        ready: list[Ready] = []
        failed: list[tuple[Claimed, BaseException, dict[str, Any] | None]] = []
        for row in rows:
            made = self.make_ready(route, row, leased=False)
            if isinstance(made, Ready):
                ready.append(made)
            else:
                failed.append((row, made or Refused("it is for another subscriber"), None))
        if ready:
            outcome = self.call_several(route, ready, leased=False)
            if isinstance(outcome, dict):
                failed += [(ready[place].row, error, self.items_of(place)) for place, error in outcome.items()]
            elif outcome is not None:
                batch.fail(ready[0].row, outcome)
            if len(connection.run_on_commit) > hooks:
                batch.hooks.append((hooks, ready[0].row, self.variables))
        if failed and (self.sql.table.barriers or len(batch.rows) == 1):
            batch.fail(failed[0][0], failed[0][1])  # what is alone is judged in its place, which barriers go by
        for row, error, items in failed:
            deadline.restart()
            self._decide(batch, row, error, items)
            deadline.pause()

    def _decide(
        self, batch: SharedTransaction, claimed: Claimed, error: BaseException, items: dict[str, Any] | None
    ) -> None:
        self.about = claimed
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
            batch.fail(claimed, Refused(f"its failure cannot be recorded beside others: {refused}"))
        else:
            self._decided.append(decided)
            batch.failed += 1

    def _committed(self, batch: SharedTransaction) -> None:
        super()._committed(batch)
        self._allow_more()
        for decided in self._decided:
            self.state.failed()
            decided.tell()
        if self._decided:
            self._decided.clear()
            self.mend()
