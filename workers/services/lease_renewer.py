"""Leases are looked after while handlers run: one thread per process and database, which waits for nobody.

It renews the leases of batches that are half over, and behind a handler that takes long it acks what is done, lest a crash
doubles it, and gives back what waits. A row that somebody has locked, first of all a handler that extended its own lease in
its transaction, is passed over and tried again at the next look; while it is locked nobody else can take it either. What
was taken out of a batch and is not ended yet stays with this thread until it is, or until its lease is over.
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
from ..receiving.receivers import AtLeastOnceReceiver, LeasedBatch

log = logging.getLogger("queueapp.workers")

_BUSY, _IDLE = 0.1, 0.25
#: What waits behind one message for longer than this is given to others.
STUCK_AFTER = 0.5
#: A table that a migration has locked is waited for so long, and its queue rests before the next try.
WAIT_MS, REST = 100, 0.5


class Ending:
    """Messages that were taken out of a batch to be ended here: acked, or given back."""

    __slots__ = ("acks", "batch", "seqs", "task")

    def __init__(self, task: AtLeastOnceReceiver, batch: LeasedBatch, seqs: list[int], *, acks: bool) -> None:
        self.task = task
        self.batch = batch
        self.seqs = seqs
        self.acks = acks

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to end, or nobody renews the lease of what is."""
        return not self.seqs or (self.task.batch is not self.batch and monotonic() > self.batch.expires)


class Watched:
    """One queue whose leases are looked after."""

    def __init__(self, pump: QueuePump) -> None:
        self.pump = pump
        self.renews: bool = pump.queue.delivery.renew_leases
        self.breaker = CircuitBreaker(f"Renewal of leases of {pump.state.label}")
        pump.state.breakers.append(self.breaker)
        self.rests_until = 0.0
        self.endings: list[Ending] = []

    @property
    def lease_ms(self) -> int:
        """How long a lease lasts that is taken now."""
        return self.pump.state.lease_ms


class Renewals(Service):
    """Looks after the leases of these pumps, all of one database; to be stopped after them."""

    def __init__(self, alias: str, pumps: Sequence[QueuePump]) -> None:
        super().__init__(f"renewals-{alias}")
        self.alias = alias
        self._queues = [Watched(pump) for pump in pumps]

    def serve(self) -> None:
        while not self.stopping:
            self.pause(self.until_next_look(busy=self._look()))
        self._end_the_rest()

    def until_next_look(self, *, busy: bool) -> float:
        """Seconds; there are several looks in a lease, however short an operator makes it."""
        shortest = min((queue.lease_ms for queue in self._queues), default=FOREVER_MS) / 4000
        return min(_BUSY if busy else _IDLE, shortest)

    def _look(self) -> bool:
        """Look after every queue; whether there was anything to look after."""
        busy = False
        for queue in self._queues:
            if monotonic() < queue.rests_until:
                busy = True
                continue
            try:
                busy = self._look_after(queue) or busy
            except Error as error:
                busy = True
                if self._survive(queue, error) is ErrorKind.CONNECTION:
                    break  # the other queues are on the same server
        return busy

    def _look_after(self, queue: Watched) -> bool:
        tasks = [(task, task.batch) for task in queue.pump.receivers if isinstance(task, AtLeastOnceReceiver)]
        batches = [(task, batch) for task, batch in tasks if batch is not None]
        if queue.renews:
            for task, batch in batches:  # all of them first: nothing else is urgent
                self._renew(queue, task, batch)
        for task, batch in batches:
            running = task.active_handler or task.active_callback
            if running is not None and monotonic() - running.started > STUCK_AFTER:
                if seqs := batch.take_done():
                    queue.endings.append(Ending(task, batch, seqs, acks=True))
                if seqs := batch.take_waiting():
                    queue.pump.backlog.leaving += len(seqs)
                    queue.endings.append(Ending(task, batch, seqs, acks=False))
        self._end(queue)
        return bool(batches or queue.endings)

    def _renew(self, queue: Watched, task: AtLeastOnceReceiver, batch: LeasedBatch) -> None:
        asked = monotonic()
        # A lease that never lapses is never due.
        due = batch.expires - asked < batch.period / 2
        if not (due or batch.renew_again):
            return
        again = batch.renew_again.copy()
        batch.renew_again -= again  # before the statement: what a handler shortens from here on is for the next look
        leased = batch.leased()
        seqs = leased if due else leased & again
        if not seqs:
            return
        try:
            with ResponseDeadline(connections[self.alias]), transaction.atomic(using=self.alias):
                reached = task.sql.acks.renew(
                    connections[self.alias], sorted(seqs), batch.token, int(batch.period * 1000), WAIT_MS
                )
        except Error:
            batch.renew_again |= again
            raise
        queue.breaker.success()
        batch.renew_again |= seqs.difference(reached)
        if due:
            # From before the statement, so that a slow round trip cannot stretch the lease.
            batch.expires = asked + batch.period

    def _end(self, queue: Watched) -> None:
        """End what was taken out of batches, as far as nobody has it locked."""
        for ending in queue.endings:
            if not ending.seqs:
                continue
            task, token = ending.task, ending.batch.token
            verb = task.sql.acks.try_ack if ending.acks else task.sql.acks.try_release
            if ending.acks and task.handlers.finder is not None:
                verb = partial(task.handlers.finder.try_ack, task.sql)
            with ResponseDeadline(connections[self.alias]), transaction.atomic(using=self.alias):
                ended = verb(connections[self.alias], ending.seqs, token, WAIT_MS)
            queue.breaker.success()
            ending.seqs = sorted({*ending.seqs}.difference(ended))
            if not ended:
                continue
            if ending.acks:
                ending.batch.acked.update(ended)
                task.state.succeeded(len(ended))
            else:
                queue.pump.backlog.leaving -= len(ended)
                task.state.messages_returned(ended)
        over = [ending for ending in queue.endings if ending.is_over]
        queue.endings = [ending for ending in queue.endings if not ending.is_over]
        for ending in over:
            self._lose(queue, ending)

    @staticmethod
    def _lose(queue: Watched, ending: Ending) -> None:
        count = len(ending.seqs)
        if not count or queue.pump.queue.delivery.others_may_end:
            return
        queue.pump.stats.lost += count
        if not ending.acks:
            queue.pump.backlog.leaving -= count
        if ending.acks:
            log.warning(
                "%s: %d leases were lost before the ack (seq %d to %d); those messages are handled again.",
                queue.pump.state.label, count, ending.seqs[0], ending.seqs[-1],
            )  # fmt: skip

    def _end_the_rest(self) -> None:
        """The process ends: one last try."""
        for queue in self._queues:
            try:
                self._end(queue)
            except Error as error:
                self._survive(queue, error)
            for ending in queue.endings:
                self._lose(queue, ending)

    def _survive(self, queue: Watched, error: Error) -> ErrorKind:
        connection = connections[self.alias]
        kind = backend_of(connection).error_kind(error)
        if kind is ErrorKind.LOCKED:
            queue.rests_until = monotonic() + min(REST, queue.lease_ms / 8000)
        elif kind is not ErrorKind.DEADLOCK:
            connection.close()
            wait = queue.breaker.failure(error)
            # Not the breaker's: a lease has to be renewed in time once the database is back.
            queue.rests_until = monotonic() + min(wait, 1.0, queue.lease_ms / 8000)
        return kind
