"""Receive tasks: one strategy per semantics. A task is one thread with one connection; it claims, handles and ends.

**AT_LEAST_ONCE** lease a batch -> handle each -> ack the batch in one statement of its own, seqs ascending. Claim and
ack are never in one transaction: that deadlocks. **TRANSACTIONAL** BEGIN, DELETE one, handle, COMMIT. **AT_MOST_ONCE**
DELETE a batch, commit, handle each. No lock, timer or log line per message; the watchdog looks at ``Task.running``.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import Error, connections, transaction

from queueapp import recoverability
from queueapp.conf import settings
from queueapp.errors import LeaseLost, UndecodableMessage
from queueapp.messages import counted_attempts, new_id
from queueapp.models.delivery import Semantics
from queueapp.receiving import Context, as_uuid
from queueapp.sql import ErrorKind, backend_of, queue_sql
from queueapp.sql.base import BODY, DELIVERIES, HEADERS, ID, SEQ, Claimed, Row

from . import dead_peers
from .handling import Entry, Handlers, Interrupted, ProcessDied, WorkerStopped
from .sizing import BatchSize
from .slots import Slot

if TYPE_CHECKING:
    from .pump import QueuePump, Round

log = logging.getLogger("workers")

NO_TOKEN = uuid.UUID(int=0)
#: An AT_MOST_ONCE batch is gone when it is claimed, so a crash may lose all of it: kept small.
AT_MOST_ONCE_BATCH = 100
#: A deadlock victim's handler is run again without counting an attempt, so often per message.
FREE_DEADLOCKS = 10


class Running(NamedTuple):
    """The handler that runs now, for the watchdog."""

    seq: int
    entry: Entry
    context: Context
    started: float
    deadline: float | None


class Batch:
    """A leased batch. ``waiting`` is shared with the watchdog: the task takes from the left, the watchdog from the
    right, so neither needs a lock."""

    __slots__ = ("expires", "held", "token", "waiting")

    def __init__(self, token: uuid.UUID, expires: float, rows: Sequence[Claimed]) -> None:
        self.token = token
        self.expires = expires
        self.waiting: deque[Claimed] = deque(rows)
        #: Handled or in hand, and not yet acked: what a renewal has to cover besides ``waiting``.
        self.held: list[int] = []


class Task:
    """What the three strategies share."""

    def __init__(self, pump: QueuePump, slot: Slot | None) -> None:
        self.pump = pump
        self.queue: Any = pump.queue
        self.alias: str = pump.alias
        self.handlers: Handlers = pump.handlers
        self.sql = queue_sql(pump.queue, connections[pump.alias])
        self.slot = slot
        self.thread_id = 0
        self.running: Running | None = None
        self.batch: Batch | None = None
        self.stop_lock = threading.Lock()
        #: What the watchdog has interrupted, for its time limit and for a stop that could not wait.
        self.hit: Running | None = None
        self.cut_off: Running | None = None
        self.hurry = False
        #: What the handler that failed last had left in ``Context.items``.
        self.items: dict[str, Any] | None = None
        self.size = BatchSize(1, settings.BATCH_TARGET.total_seconds())
        #: The round it takes part in, and its consecutive successes there; the pump's business.
        self.round: Round | None = None
        self.successes = 0

    def bind(self) -> None:
        """Called on the task's own thread, before anything else."""
        self.thread_id = threading.get_ident()

    def receive(self, limit: int) -> int:
        """Claim at most ``limit``, handle them, end them; returns how many were claimed."""
        raise NotImplementedError

    # -- one message ----------------------------------------------------------------------------------------------

    def call(self, claimed: Claimed, attempt: int) -> BaseException | bool | None:
        """Run the handler of a message. None: done. False: nobody here knows the type. Else what it raised."""
        seq = claimed[SEQ]
        try:
            entry, content_type = self.handlers.find(claimed)
            if entry is None:
                return False
            message = self.handlers.decode(entry, claimed, content_type)
        except UndecodableMessage as error:
            self.items = None
            return error
        if attempt > entry.attempts:
            self.items = None
            # Handed out for its last attempt, and neither ended nor failed: its process died, or its lease lapsed.
            return ProcessDied(f"It was handed out {attempt - 1} times and never ended; its handler is not run again.")
        context = Context(self.queue, self.alias, entry.registration, claimed, attempt, self.extend)
        watched = dead_peers.pause()
        started = monotonic()
        timeout = entry.timeout
        slot = self.slot
        if slot is not None:
            slot.begin(seq)
        self.running = running = Running(seq, entry, context, started, started + timeout if timeout else None)
        failed: BaseException | None = None
        try:
            try:
                entry.call(message, context)
            except BaseException as error:
                # sys.exit() and a cancelled coroutine, too, end the attempt and not the worker.
                failed = error
            finally:
                self.running = None
            if self.hurry or (running.deadline is not None and monotonic() >= running.deadline):
                failed = self._absorb(running) or failed
        except Interrupted as error:
            # Sent while the handler ran, delivered a few bytecodes after it had returned: it was late all the same.
            self.running = None
            failed = error
        dead_peers.resume(watched)
        if slot is not None:
            slot.end()
        if failed is not None:
            if self.cut_off is running and self.hit is not running:
                # Whatever the handler made of the interruption.
                failed = WorkerStopped(f"{entry.registration.name} was interrupted: the worker stops.")
            self.items = context._items
        return failed

    def _absorb(self, running: Running) -> BaseException | None:
        """If the watchdog has sent an exception, it must arrive here or have arrived, and nowhere else."""
        try:
            with self.stop_lock:
                sent = self.hit is running or self.cut_off is running
            if sent:
                for _ in range(100):  # what is still under way is raised at a jump back; else the handler has had it
                    pass
        except Interrupted as error:
            return error
        return None

    def consumer_of(self, claimed: Claimed) -> Any:
        """The registration that a message belongs to, for recoverability; None when its headers do not parse."""
        try:
            entry, _ = self.handlers.find(claimed)
        except UndecodableMessage:
            return None
        return entry.registration if entry else None

    def extend(self, seq: int, period: timedelta | None) -> None:
        """``Context.extend``; only a leased message has something to extend."""

    # -- after a failure ------------------------------------------------------------------------------------------

    def recover(
        self, claimed: Claimed, error: BaseException, token: uuid.UUID | None, items: dict[str, Any] | None
    ) -> None:
        """Let recoverability decide, trying again while the database is in the way."""
        if isinstance(error, WorkerStopped):
            # A lease is ended uncounted; what was received in a transaction is back since its rollback.
            if token is not None:
                self.sql.give_back(connections[self.alias], [claimed[SEQ]], token, handled=False)
            self.pump.came_back(claimed[SEQ])
            return
        self.pump.failed()
        connection = connections[self.alias]
        if connection.connection is not None and not connection.is_usable():
            connection.close()
        while True:
            dead_peers.again()
            try:
                verdict = recoverability.fail(
                    self.queue,
                    self.alias,
                    claimed[SEQ],
                    error,
                    consumer=self.consumer_of(claimed),
                    token=token,
                    wait=dead_peers.patience(timedelta(seconds=60)),
                    items=items,
                )
                break
            except Error as failure:
                kind = backend_of(connection).error_kind(failure)
                if kind is ErrorKind.LOCKED:
                    continue  # another receiver has it in hand; the failed attempt must be counted all the same
                storing = isinstance(failure, recoverability.StoreFailed)
                breaker = self.pump.store_breaker if storing else self.pump.breaker
                if not self.pump.survive(failure, breaker, connection):
                    raise
        self.pump.store_breaker.success()
        if verdict is None:
            if token is not None:
                self.pump.stats.lost += 1
                log.warning("%s", LeaseLost(self.queue._meta.label, claimed[SEQ]))
        elif isinstance(verdict, recoverability.RetryNow):
            self.pump.floors.lower(claimed[SEQ])

    def unknown(self, seqs: list[int]) -> None:
        """No consumer of this process takes these: leave them to others, and do not look at them again."""
        self.pump.leave_alone(seqs)


#: A message of a batch, what its handler raised, and what it had left in ``Context.items``.
_Failed = tuple[Claimed, BaseException, dict[str, Any] | None]


class _RollBack(Exception):
    """Leaves the receive's transaction without a commit; what failed is kept beside it."""


class LeaseTask(Task):
    """AT_LEAST_ONCE."""

    def __init__(self, pump: QueuePump, slot: Slot | None) -> None:
        super().__init__(pump, slot)
        most = min(settings.MAX_BATCH, backend_of(connections[self.alias]).max_batch)
        self._target = settings.BATCH_TARGET.total_seconds()
        self.size = BatchSize(most, self._target)
        self._lease_ms = int(self.queue.delivery.lease_period / timedelta(milliseconds=1))

    def receive(self, limit: int) -> int:
        connection = connections[self.alias]
        token = new_id()
        # Careful: what is leased is in hand, so that a crash of everything counts against this message and no other.
        most = 1 if self.pump.careful else limit
        with self.pump.turn(most):
            started = monotonic()  # before the statement, so that a slow round trip cannot stretch the lease
            rows = self.sql.claim_by_lease(
                connection, self.pump.ranges(self), most, token, self.pump.subscriber, self._lease_ms, self.pump.skip
            )
            if not rows:
                return 0
            self.pump.claimed(self, rows)
        count = len(rows)
        self.batch = batch = Batch(token, started + self._lease_ms / 1000, rows)
        if self.slot is not None:
            self.slot.lease(token)
        try:
            self._handle(batch, started)
        finally:
            self.batch = None
        if most != limit:
            return limit  # not a short claim: there may well be more
        self.size.observe(count, monotonic() - started)
        return count

    def _handle(self, batch: Batch, started: float) -> None:
        held, waiting = batch.held, batch.waiting
        done: list[int] = []
        failures: list[_Failed] = []
        unknown: list[int] = []
        flush_at = started + 2 * self._target
        stopping = self.pump.stopping
        while waiting:
            if stopping.is_set():
                self._give_back(batch, 0)
                break
            try:
                row = waiting.popleft()
            except IndexError:  # the watchdog took the last one
                break
            held.append(row[SEQ])
            outcome = self.call(row, row[DELIVERIES])
            if outcome is None:
                done.append(row[SEQ])
            elif outcome is False:
                unknown.append(row[SEQ])
            else:
                assert isinstance(outcome, BaseException)
                failures.append((row, outcome, self.items))
            if monotonic() > flush_at:
                self._flush(batch, done, failures, unknown, started)
                flush_at = monotonic() + 2 * self._target
        self._end(batch, done, failures, unknown)

    def _flush(
        self,
        batch: Batch,
        done: list[int],
        failures: list[_Failed],
        unknown: list[int],
        started: float,
    ) -> None:
        """Handlers are slower than thought: end what is done, and keep only what fits into the target."""
        now = monotonic()
        average = (now - started) / max(1, len(done) + len(failures) + len(unknown))
        self._end(batch, done, failures, unknown)
        if now > batch.expires and batch.waiting:
            # Nobody renewed it: what was not started may be somebody else's by now.
            self.pump.stats.lost += len(batch.waiting)
            log.warning("%s: the lease of %d waiting messages lapsed.", self.queue._meta.label, len(batch.waiting))
            batch.waiting.clear()
        self._give_back(batch, max(1, int(self._target / average)))

    def _end(self, batch: Batch, done: list[int], failures: list[_Failed], unknown: list[int]) -> None:
        if done:
            self._ack(done, batch)
        for row, error, items in failures:
            self.recover(row, error, batch.token, items)
        if unknown:
            self.sql.give_back(connections[self.alias], sorted(unknown), batch.token, handled=False)
            self.unknown(unknown)
        done.clear()
        failures.clear()
        unknown.clear()
        batch.held.clear()

    def _ack(self, done: list[int], batch: Batch) -> None:
        connection = connections[self.alias]
        done.sort()
        while True:
            dead_peers.again()
            try:
                ended = self.sql.ack(connection, done, batch.token)
                break
            except Error as error:
                # These messages are handled: an ack that did not arrive is tried again as long as the lease holds.
                if monotonic() > batch.expires or not self.pump.survive(error, self.pump.breaker, connection):
                    log.error("%s: %d handled messages could not be acked and will come again: %s",
                              self.queue._meta.label, len(done), error)  # fmt: skip
                    self.pump.stats.lost += len(done)
                    return
        self.pump.succeeded(ended)
        if ended != len(done):
            self.pump.stats.lost += len(done) - ended
            log.warning(
                "%s: %d of %d leases were lost before the ack (seq %d to %d); those messages are handled again.",
                self.queue._meta.label, len(done) - ended, len(done), done[0], done[-1],
            )  # fmt: skip

    def _give_back(self, batch: Batch, keep: int) -> None:
        """Give back what was not started, from the right, all but ``keep``; not counted as a delivery."""
        surplus = []
        while len(batch.waiting) > keep:
            try:
                surplus.append(batch.waiting.pop()[SEQ])
            except IndexError:
                break
        if surplus:
            surplus.reverse()
            self.sql.give_back(connections[self.alias], sorted(surplus), batch.token, handled=False)
            self.pump.came_back(min(surplus), len(surplus))

    def extend(self, seq: int, period: timedelta | None) -> None:
        batch = self.batch
        if batch is None:
            raise LeaseLost(self.queue._meta.label, seq)
        lease_ms = self._lease_ms if period is None else int(period / timedelta(milliseconds=1))
        if not self.sql.extend(connections[self.alias], [seq], batch.token, lease_ms):
            raise LeaseLost(self.queue._meta.label, seq)


class TransactionalTask(Task):
    """TRANSACTIONAL: receive, handler and its writes and sends are one transaction."""

    def __init__(self, pump: QueuePump, slot: Slot | None) -> None:
        super().__init__(pump, slot)
        self._deadlocks: dict[int, int] = {}
        self._has_counts = self.sql.table.has("deliveries")
        self._can_lease = self.sql.table.has("lease_token", "lease_owner", "lease_expires", "deliveries")

    def receive(self, limit: int) -> int:
        if self.pump.careful and self._can_lease:
            return self._receive_carefully()
        connection = connections[self.alias]
        claimed: Claimed | None = None
        outcome: BaseException | bool | None = None
        decided: recoverability.Decided | None = None
        try:
            with transaction.atomic(using=self.alias):
                rows = self.sql.claim_by_delete(connection, self.pump.ranges(self), 1, skip=self.pump.skip)
                if not rows:
                    return 0
                claimed = rows[0]
                self.pump.claimed(self, rows)
                outcome = self.call(claimed, 1 + self._failed_attempts(claimed))
                if outcome is None:
                    pass
                elif outcome is False or isinstance(outcome, WorkerStopped) or self._is_deadlock(outcome, connection):
                    raise _RollBack
                else:
                    assert isinstance(outcome, BaseException)
                    decided = self._decide_in_place(claimed, outcome, connection)
        except _RollBack:
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
            if isinstance(decided.verdict, recoverability.RetryNow):
                self.pump.floors.lower(claimed[SEQ])
        else:
            assert isinstance(outcome, BaseException)
            self._failed(claimed, outcome, connection, None)
        return 1

    def _failed_attempts(self, claimed: Claimed) -> int:
        return int(claimed[DELIVERIES]) if self._has_counts else counted_attempts(claimed[HEADERS])

    def _decide_in_place(self, claimed: Claimed, error: BaseException, connection: Any) -> recoverability.Decided:
        """Undo the handler and decide, without letting go of the message: between a rollback and a transaction that
        counts the attempt, another worker would run it once more. Raises _RollBack when it was taken all the same."""
        row = self.sql.lock_again(connection, claimed[SEQ], wait_ms=1000)
        # The handler's transaction is gone, and with it what it meant to do after its commit.
        connection.needs_rollback = False
        connection.run_on_commit = []
        if row is None:
            raise _RollBack
        return recoverability.decide_locked(
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
        rows = self.sql.claim_by_lease(
            connection, self.pump.ranges(self), 1, token, self.pump.subscriber, lease_ms, self.pump.skip
        )
        if not rows:
            return 0
        claimed = rows[0]
        self.pump.claimed(self, rows)
        if self.slot is not None:
            self.slot.lease(token)
        outcome: BaseException | bool | None
        try:
            with transaction.atomic(using=self.alias):
                # From here on the row lock owns the message, however long the handler takes and the lease lasts.
                if self.sql.ack(connection, [claimed[SEQ]], token) != 1:
                    self.pump.stats.lost += 1
                    log.warning("%s", LeaseLost(self.queue._meta.label, claimed[SEQ]))
                    return 1
                outcome = self.call(claimed, claimed[DELIVERIES])
                if outcome is not None:
                    raise _RollBack
        except _RollBack:
            pass
        except Exception as error:
            outcome = error
        if self.slot is not None:
            self.slot.lease(NO_TOKEN)
        if outcome is None:
            self.pump.succeeded(1)
        elif outcome is False:
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
                    self.sql.give_back(connection, [seq], token, handled=False)
                self.pump.floors.lower(seq)
                return
        self.recover(claimed, error, token, self.items)


class AtMostOnceTask(Task):
    """AT_MOST_ONCE: gone before the handler runs; what a handler fails on is kept as poison."""

    def __init__(self, pump: QueuePump, slot: Slot | None) -> None:
        super().__init__(pump, slot)
        self.size = BatchSize(min(settings.MAX_BATCH, AT_MOST_ONCE_BATCH), settings.BATCH_TARGET.total_seconds())

    def receive(self, limit: int) -> int:
        connection = connections[self.alias]
        rows: list[Claimed] = []
        unknown: list[int] = []
        try:
            with transaction.atomic(using=self.alias), self.pump.turn(limit):
                started = monotonic()
                ranges = self.pump.ranges(self)
                rows = self.sql.claim_by_delete(connection, ranges, limit, whole=True, skip=self.pump.skip)
                if not rows:
                    return 0
                unknown = [row[SEQ] for row in rows if self._is_unknown(row)]
                if unknown:
                    raise _RollBack  # they are somebody else's: claim again without them
                # Before the commit, so that no other task walks over these rows meanwhile.
                self.pump.claimed(self, rows)
        except _RollBack:
            self.unknown(unknown)
            return len(unknown)
        except Error:
            if rows:
                self.pump.floors.lower(min(row[SEQ] for row in rows))
            raise
        # Also when stopping: what was claimed is handled, never dropped.
        handled = 0
        for row in rows:
            if self.slot is not None:
                identity = row[ID]
                self.slot.keep(identity if type(identity) is bytes else as_uuid(identity).bytes, row[HEADERS])
            outcome = self.call(row, 1)
            if outcome is None:
                handled += 1
            else:
                assert isinstance(outcome, BaseException)
                self._keep(row, outcome)
        if handled:
            self.pump.succeeded(handled)
        self.size.observe(len(rows), monotonic() - started)
        return len(rows)

    def _is_unknown(self, claimed: Claimed) -> bool:
        try:
            return self.handlers.find(claimed)[0] is None
        except UndecodableMessage:
            return False

    def _keep(self, claimed: Claimed, error: BaseException) -> None:
        verdict = None
        if isinstance(error, WorkerStopped):
            verdict = recoverability.Poison(f"at-most-once, not retried: {error}")
        else:
            self.pump.failed()
        rest = claimed[-8:]  # what claim_by_delete(whole=True) appends: Row from ``cancels`` on
        row = Row(claimed[SEQ], as_uuid(claimed[ID]), claimed[HEADERS], claimed[BODY], claimed[DELIVERIES], *rest)
        connection = connections[self.alias]
        while True:
            dead_peers.again()
            try:
                recoverability.fail_taken(
                    self.queue, self.alias, row, error, consumer=self.consumer_of(claimed),
                    items=self.items, verdict=verdict,
                )  # fmt: skip
                return
            except Error as failure:
                if not self.pump.survive(failure, self.pump.breaker, connection):
                    log.critical("%s: at-most-once message %s failed and could not be kept; headers: %s",
                                 self.queue._meta.label, row.id, row.headers)  # fmt: skip
                    raise


STRATEGIES: dict[Semantics, type[Task]] = {
    Semantics.AT_LEAST_ONCE: LeaseTask,
    Semantics.TRANSACTIONAL: TransactionalTask,
    Semantics.AT_MOST_ONCE: AtMostOnceTask,
}
