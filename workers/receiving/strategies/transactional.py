"""TRANSACTIONAL: BEGIN, DELETE one, handle, COMMIT. What the handler writes and sends commits with the receive.

After a crash of a whole process tree the delivery is committed first, as a lease (``_receive_carefully``).
"""

from __future__ import annotations

import logging
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.db import Error, connections, transaction

from queueapp.errors import LeaseLost
from queueapp.messages import new_id
from queueapp.recovery import carrying_out, verdicts
from queueapp.sql import ErrorKind, backend_of
from queueapp.sql.base import SEQ, Claimed

from ...connections.dead_peers import Answering
from ...processes.slots import Slot
from ..handling import WorkerStopped
from .base import RollBack, Task

if TYPE_CHECKING:
    from ..pump import QueuePump

log = logging.getLogger("workers")


NO_TOKEN = uuid.UUID(int=0)
#: A deadlock victim's handler is run again without counting an attempt, so often per message.
FREE_DEADLOCKS = 10


class TransactionalTask(Task):
    """TRANSACTIONAL: receive, handler and its writes and sends are one transaction."""

    def __init__(self, pump: QueuePump, slot: Slot | None) -> None:
        super().__init__(pump, slot)
        self._deadlocks: dict[int, int] = {}
        self._can_lease = self.sql.table.has("lease_token", "lease_owner", "lease_expires", "deliveries")

    def receive(self, limit: int) -> int:
        if self.pump.careful and self._can_lease:
            with self.pump.quarantine.alone(self.pump.stopping) as may:
                return self._receive_carefully() if may else 0
        connection = connections[self.alias]
        claimed: Claimed | None = None
        outcome: BaseException | bool | None = None
        decided: carrying_out.Decided | None = None
        try:
            with Answering(connection) as answering, transaction.atomic(using=self.alias):
                rows = self.sql.claim_by_delete(connection, self.pump.ranges(self), 1, skip=self.pump.skip)
                if not rows:
                    return 0
                claimed = rows[0]
                self.pump.floors.passed(rows)
                self.pump.claimed(self, rows)
                answering.pause()
                outcome = self.call(claimed)
                answering.again()
                if outcome is None:
                    pass
                elif outcome is False or isinstance(outcome, WorkerStopped) or self._is_deadlock(outcome, connection):
                    raise RollBack
                else:
                    assert isinstance(outcome, BaseException)
                    decided = self._decide_in_place(claimed, outcome, connection)
        except RollBack:
            pass
        except Exception as error:
            # The commit itself failed (a deferred constraint, a lost connection), or the claim did.
            if claimed is None:
                raise
            decided = None
            outcome = outcome if isinstance(outcome, BaseException) else error
        assert claimed is not None
        if outcome is None:
            self.pump.succeeded(1)
        elif outcome is False:
            self.unknown([claimed[SEQ]])
        elif decided is not None:
            self.pump.failed()
            decided.tell()
            if isinstance(decided.verdict, verdicts.RetryNow):
                self.pump.floors.lower(claimed[SEQ])
        else:
            assert isinstance(outcome, BaseException)
            self._failed(claimed, outcome, connection, None)
        return 1

    def _decide_in_place(self, claimed: Claimed, error: BaseException, connection: Any) -> carrying_out.Decided:
        """Undo the handler and decide, without letting go of the message: between a rollback and a transaction that
        counts the attempt, another worker would run it once more. Raises RollBack when it was taken all the same."""
        row = self.sql.lock_again(connection, claimed[SEQ], wait_ms=1000)
        # The handler's transaction is gone, and with it what it meant to do after its commit.
        connection.needs_rollback = False
        connection.run_on_commit = []
        if row is None:
            raise RollBack
        return carrying_out.decide_locked(
            self.queue, self.alias, row, error, consumer=self.consumer_of(claimed), token=None,
            items=self.items,
        )  # fmt: skip

    def _receive_carefully(self) -> int:
        """After a crash of a whole process tree: the delivery is committed first, as a lease, and the message is deleted
        in the handler's transaction. Still exactly once, for one commit more; a message that kills everything is counted.
        """
        connection = connections[self.alias]
        token = new_id()
        lease_ms = int(self.queue.delivery.lease_period / timedelta(milliseconds=1))
        with Answering(connection):
            rows = self.sql.claim_by_lease(
                connection, self.pump.ranges(self), 1, token, self.pump.subscriber, lease_ms, self.pump.skip
            )
        if not rows:
            return 0
        claimed = rows[0]
        self.pump.floors.passed(rows)
        self.pump.claimed(self, rows)
        if self.slot is not None:
            self.slot.lease(token)
        outcome: BaseException | bool | None
        try:
            with Answering(connection) as answering, transaction.atomic(using=self.alias):
                # From here on the row lock owns the message, however long the handler takes and the lease lasts.
                if self.sql.ack(connection, [claimed[SEQ]], token) != 1:
                    self.pump.stats.lost += 1
                    log.warning("%s", LeaseLost(self.queue._meta.label, claimed[SEQ]))
                    return 1
                answering.pause()
                outcome = self.call(claimed, leased=True)
                answering.again()
                if outcome is not None:
                    raise RollBack
        except RollBack:
            pass
        except Exception as error:
            outcome = error
        finally:
            if self.slot is not None:
                self.slot.lease(NO_TOKEN)
        if outcome is None:
            self.pump.succeeded(1)
        elif outcome is False:
            with Answering(connection):
                self.sql.give_back(connection, [claimed[SEQ]], token, handled=False)
            self.unknown([claimed[SEQ]])
        else:
            assert isinstance(outcome, BaseException)
            self._failed(claimed, outcome, connection, token)
        return 1

    @staticmethod
    def _is_deadlock(outcome: BaseException | bool, connection: Any) -> bool:
        return isinstance(outcome, Error) and backend_of(connection).error_kind(outcome) is ErrorKind.DEADLOCK

    def _failed(self, claimed: Claimed, error: BaseException, connection: Any, token: uuid.UUID | None) -> None:
        if self._is_deadlock(error, connection):
            seq = claimed[SEQ]
            if len(self._deadlocks) > 1000:
                self._deadlocks.clear()
            self._deadlocks[seq] = self._deadlocks.get(seq, 0) + 1
            if self._deadlocks[seq] <= FREE_DEADLOCKS:
                # A victim did nothing wrong: everything was rolled back, it is received again.
                if token is not None:
                    with Answering(connection):
                        self.sql.give_back(connection, [seq], token, handled=False)
                self.pump.floors.lower(seq)
                return
        self.recover(claimed, error, token, self.items)
