"""Housekeeping of one database: expired messages go, and the leases of dead subscribers are released.

Poison messages that were archived or edited go when their retention is over. All of it is done by the process that
dispatches delayed messages, as the same elected leader. Every piece is idempotent and in small batches that skip what
is locked, so nothing waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from django.db import Error, connections

from queueapp import poison, registry, signals, wakeups
from queueapp.conf import settings
from queueapp.models import Now, QueueControl, Subscriber
from queueapp.sql import queue_sql

from ..connections.circuit_breaker import CircuitBreaker
from ..connections.dead_peers import Answering, again
from .leadership import Leadership
from .service import Service

log = logging.getLogger("workers")

BATCH = 3000
#: Seconds between two looks for poison messages whose retention is over.
RETENTION_INTERVAL = 600.0


class Housekeeping(Service):
    """Keeps the queues of one database clean."""

    def __init__(self, alias: str, queues: Sequence[Any], leadership: Leadership) -> None:
        super().__init__(f"housekeeping-{alias}")
        self.alias = alias
        self._queues = queues
        self._leadership = leadership
        self._breaker = CircuitBreaker(f"Housekeeping in {alias}")

    def serve(self) -> None:
        interval = settings.PURGE_INTERVAL.total_seconds() if settings.PURGE_INTERVAL else None
        next_purge = (
            monotonic() if settings.PURGE_EXPIRED_ON_STARTUP else (monotonic() + interval if interval else None)
        )
        next_retention = monotonic()
        while not self.stopping:
            wait = min(1.0, settings.HEARTBEAT_INTERVAL.total_seconds())
            try:
                if self._leadership.held:
                    with Answering(connections[self.alias]):
                        release_leases_of_dead_subscribers(self.alias)
                        if next_purge is not None and monotonic() >= next_purge:
                            for queue in self._queues:
                                purge_expired(queue, self.alias, self)
                            next_purge = monotonic() + interval if interval else None
                        if settings.POISON_RETENTION and monotonic() >= next_retention:
                            next_retention = monotonic() + RETENTION_INTERVAL
                            drop_old_poison(self.alias, self)
                    self._breaker.success()
            except Error as error:
                connections[self.alias].close()
                wait = self._breaker.failure(error)
            self.pause(wait)


def purge_expired(queue: Any, alias: str, service: Service | None = None) -> int:
    """Delete the expired messages of a queue in batches; returns how many."""
    connection, most = connections[alias], settings.PURGE_BATCH
    sql = queue_sql(queue, connection)
    total = _in_batches(lambda: sql.purge_expired(connection, most), most, service)
    if total:
        log.info("%s: %d expired messages were purged.", queue._meta.label, total)
        signals.expired.send_robust(sender=queue, queue=queue, count=total)
    return total


def drop_old_poison(alias: str, service: Service | None = None) -> int:
    """Delete archived and edited poison messages whose retention is over, in batches; returns how many."""
    total = _in_batches(lambda: poison.drop_old(settings.POISON_RETENTION, using=alias), poison.BATCH, service)
    if total:
        log.info("%d archived or edited poison messages in %r were deleted: their retention is over.", total, alias)
    return total


def _in_batches(step: Callable[[], int], most: int, service: Service | None) -> int:
    """Take the step, which deletes ``most`` at most, until it deletes fewer or the service that does it has to stop;
    returns how many went."""
    total = 0
    while not (service is not None and service.stopping):
        again()
        count = step()
        total += count
        if count < most:
            break
    return total


def release_leases_of_dead_subscribers(alias: str) -> int:
    """Give back what subscribers hold that have no heartbeat any more, and forget them; returns how many messages."""
    connection = connections[alias]
    released = 0
    dead = Subscriber.objects.using(alias).filter(alive_until__lt=Now())
    for key, label, host, process, careful in dead.values_list("id", "queue", "host", "process", "careful"):
        try:
            queue = registry.queues.find(label)
        except LookupError:
            continue
        sql = queue_sql(queue, connection)
        count = 0
        again()
        # First the mark: from now on attempts are recorded before handlers run, so that a message that kills the whole
        # tree is counted the next time.
        QueueControl.objects.using(alias).update_or_create(
            queue=label, defaults={"careful_until": Now() + settings.CAREFUL_PERIOD}
        )
        if sql.table.has("lease_owner"):
            # Of a batch nobody knows which message was in hand: not counted, or a crash would cost all of them an attempt.
            # A careful subscriber had leased just the one in hand.
            while (some := sql.release_owner(connection, key, BATCH, started=careful)) > 0:
                count += some
        # Only now: if this process dies before, the next housekeeper finds the row and does it again.
        Subscriber.objects.using(alias).filter(pk=key, alive_until__lt=Now()).delete()
        log.warning("%s: worker %s:%s is dead; %d of its leases were released.", label, host, process, count)
        released += count
        if count:
            wakeups.sent(queue, connection)
    return released
