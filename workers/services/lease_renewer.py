"""Renews leases while handlers run: one thread per process and database, which waits for no row lock.

It renews the leases of batches that are half over. Behind a slow handler it acks what is done, lest a crash makes it
run twice, and releases what waits. A row that another session has locked, first of all a handler that extended its own
lease in its transaction, is skipped and tried again at the next round; while it is locked no other worker can take it
either. Messages that were taken out of a batch to be acked or released stay with this thread until that is done, or
their lease has expired.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from time import monotonic

from django.db import Error, connections, transaction

from queueapp.circuit_breaker import CircuitBreaker
from queueapp.services.connection_timeouts import ResponseDeadline
from queueapp.services.service import Service
from queueapp.sql import ErrorKind, backend_of
from queueapp.sql.claims import FOREVER_MS

from ..receiving.pump import QueuePump
from ..receiving.receivers import LeasedBatch, Receiver

log = logging.getLogger("queueapp.workers")

#: Seconds between two rounds while there are leases, and while there are none.
_BUSY, _IDLE = 0.1, 0.25
#: Messages that wait behind one handler for longer than this are released.
SLOW_HANDLER_AFTER = 0.5
#: How long to wait for a table that a migration has locked, in milliseconds, and seconds before the next try.
LOCK_WAIT_MS, LOCKED_PAUSE = 100, 0.5


class PendingAcks:
    """Messages that were taken out of a batch to be acked here, or released."""

    __slots__ = ("acks", "batch", "receiver", "seqs")

    def __init__(self, receiver: Receiver, batch: LeasedBatch, seqs: list[int], *, acks: bool) -> None:
        self.receiver = receiver
        self.batch = batch
        self.seqs = seqs
        self.acks = acks

    @property
    def is_over(self) -> bool:
        """Whether none is left, or their leases have expired: the batch has ended, and nothing renews them."""
        return not self.seqs or (self.receiver.batch is not self.batch and monotonic() > self.batch.expires)


class RenewedQueue:
    """One queue whose leases are renewed."""

    def __init__(self, pump: QueuePump) -> None:
        self.pump = pump
        self.renews: bool = pump.queue.delivery.renew_leases
        self.breaker = CircuitBreaker(
            f"Renewal of leases of {pump.state.label}", kind="lease_renewal", subject=pump.state.label
        )
        pump.health.breakers.append(self.breaker)
        self.paused_until = 0.0
        self.pending: list[PendingAcks] = []

    @property
    def lease_ms(self) -> int:
        """How long a lease lasts that is taken now."""
        return self.pump.state.lease_ms


class LeaseRenewer(Service):
    """Renews the leases of these pumps, all of one database; to be stopped after them."""

    def __init__(self, alias: str, pumps: Sequence[QueuePump]) -> None:
        super().__init__(f"lease-renewer-{alias}")
        self.alias = alias
        self.queues = [RenewedQueue(pump) for pump in pumps]

    def serve(self) -> None:
        while not self.stopping:
            self.pause(self.interval(busy=self.renew_once()))
        self._end_the_rest()

    def interval(self, *, busy: bool) -> float:
        """Seconds until the next round: there are several in a lease, however short an operator makes it."""
        shortest = min((queue.lease_ms for queue in self.queues), default=FOREVER_MS) / 4000
        return min(_BUSY if busy else _IDLE, shortest)

    def renew_once(self) -> bool:
        """Check every queue; returns whether there were leases."""
        busy = False
        for queue in self.queues:
            if monotonic() < queue.paused_until:
                busy = True
                continue
            try:
                busy = self._check(queue) or busy
            except Error as error:
                busy = True
                if self._survive(queue, error) is ErrorKind.CONNECTION:
                    break  # the other queues are on the same server
        return busy

    def _check(self, queue: RenewedQueue) -> bool:
        receivers = [(receiver, receiver.batch) for receiver in queue.pump.receivers]
        batches = [(receiver, batch) for receiver, batch in receivers if batch is not None]
        if queue.renews:
            for receiver, batch in batches:  # all of them first: nothing else is urgent
                self._renew(queue, receiver, batch)
        for receiver, batch in batches:
            running = receiver.active_handler or receiver.active_callback
            if running is not None and monotonic() - running.started > SLOW_HANDLER_AFTER:
                if seqs := batch.take_done():
                    queue.pending.append(PendingAcks(receiver, batch, seqs, acks=True))
                if seqs := batch.take_waiting():
                    queue.pump.backlog.leaving += len(seqs)
                    queue.pending.append(PendingAcks(receiver, batch, seqs, acks=False))
        self._write_pending(queue)
        return bool(batches or queue.pending)

    def _renew(self, queue: RenewedQueue, receiver: Receiver, batch: LeasedBatch) -> None:
        asked = monotonic()
        # A lease that never expires is never due.
        due = batch.expires - asked < batch.period / 2
        if not (due or batch.renew_again):
            return
        again = batch.renew_again.copy()
        batch.renew_again -= (
            again  # before the statement: a lease that a handler shortens from here on is for the next round
        )
        leased = batch.leased()
        seqs = leased if due else leased & again
        if not seqs:
            return
        try:
            with ResponseDeadline(connections[self.alias]), transaction.atomic(using=self.alias):
                reached = receiver.sql.acks.renew(
                    connections[self.alias], sorted(seqs), batch.token, int(batch.period * 1000), LOCK_WAIT_MS
                )
        except Error:
            batch.renew_again |= again
            raise
        queue.breaker.success()
        batch.renew_again |= seqs.difference(reached)
        if due:
            # Counted from before the statement, so that a slow round trip cannot stretch the lease.
            batch.expires = asked + batch.period

    def _write_pending(self, queue: RenewedQueue) -> None:
        """Ack or release what was taken out of batches, except rows that another session has locked."""
        for pending in queue.pending:
            if not pending.seqs:
                continue
            receiver, token = pending.receiver, pending.batch.token
            verb = receiver.sql.acks.try_ack if pending.acks else receiver.sql.acks.try_release
            if pending.acks and receiver.handlers.resolver is not None:
                verb = partial(receiver.handlers.resolver.try_ack, receiver.sql)
            with ResponseDeadline(connections[self.alias]), transaction.atomic(using=self.alias):
                ended = verb(connections[self.alias], pending.seqs, token, LOCK_WAIT_MS)
            queue.breaker.success()
            pending.seqs = sorted({*pending.seqs}.difference(ended))
            if not ended:
                continue
            if pending.acks:
                pending.batch.acked.update(ended)
                receiver.state.health.succeeded(len(ended))
            else:
                queue.pump.backlog.leaving -= len(ended)
                receiver.state.messages_returned(ended)
        over = [pending for pending in queue.pending if pending.is_over]
        queue.pending = [pending for pending in queue.pending if not pending.is_over]
        for pending in over:
            self._lose(queue, pending)

    @staticmethod
    def _lose(queue: RenewedQueue, pending: PendingAcks) -> None:
        count = len(pending.seqs)
        if not count or queue.pump.queue.delivery.others_may_end:
            return
        queue.pump.stats.lost += count
        if not pending.acks:
            queue.pump.backlog.leaving -= count
        if pending.acks:
            label = queue.pump.state.label
            log.warning(
                "%s: %d lease%s expired before the ack (seq %d to %d); the message%s will be handled again.",
                label, count, "s" if count != 1 else "", pending.seqs[0], pending.seqs[-1], "s" if count != 1 else "",
                extra={"queue": label, "count": count},
            )  # fmt: skip

    def _end_the_rest(self) -> None:
        """The process ends: one last try."""
        for queue in self.queues:
            try:
                self._write_pending(queue)
            except Error as error:
                self._survive(queue, error)
            for pending in queue.pending:
                self._lose(queue, pending)

    def _survive(self, queue: RenewedQueue, error: Error) -> ErrorKind:
        connection = connections[self.alias]
        kind = backend_of(connection).error_kind(error)
        if kind is ErrorKind.LOCKED:
            queue.paused_until = monotonic() + min(LOCKED_PAUSE, queue.lease_ms / 8000)
        elif kind is not ErrorKind.DEADLOCK:
            connection.close()
            wait = queue.breaker.failure(error)
            # Shorter than the breaker's wait: a lease has to be renewed in time once the database is back.
            queue.paused_until = monotonic() + min(wait, 1.0, queue.lease_ms / 8000)
        return kind
