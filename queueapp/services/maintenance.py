"""Housekeeping of one database: expired messages go, and the leases of dead subscribers are released.

Messages with a priority that no claim finds get the nearest one. Poison messages that were archived or edited go when their
retention is over; delayed messages that nobody delivers are named. All of it is done by one process per database and set of
queues, elected for this alone: it need not be the one that dispatches delayed messages, nor do so at all. Every piece is
idempotent and in small batches that skip what is locked, so nothing waits for it, and two at once only share the work.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from time import monotonic
from typing import Any

from django.db import Error, connections

from .. import callbacks, delayed, notifier
from ..circuit_breaker import CircuitBreaker
from ..conf import settings
from ..consuming.registry import registered
from ..failures import poison_archive, requeue_poison
from ..failures.poison_store import PASSING
from ..flow import claim_record_cache
from ..messages.escaping import in_one_line
from ..operations import settle_early_acks, statistics
from ..operations.expiration import delete_expired
from ..receiving import barriers
from ..sending import early_acks
from ..sql import ErrorKind, backend_of, queue_sql
from . import maintenance_hooks
from .connection_timeouts import Answering, again, at_rest
from .leader_election import Leadership
from .orphaned_leases import LeftAlone, release_leases_of_dead_subscribers
from .service import Service

log = logging.getLogger("queueapp.workers")

#: Seconds between two rounds.
PACE = 1.0
#: Seconds between two attempts of who does not lead to be elected.
ELECTION_INTERVAL = 5.0
#: Seconds between two looks for poison messages whose retention is over.
RETENTION_INTERVAL = 600.0
#: Seconds between two looks for delayed messages that nobody delivers.
NAMING_INTERVAL = 60.0
#: Until the same is named again.
NAMED_AGAIN = 3600.0
#: Seconds between two looks for messages whose priority no claim finds, and how many of them are moved at a time.
LEVELS_INTERVAL, LEVELS_BATCH = 2.0, 1000


class Housekeeping(Service):
    """Keeps the queues of one database clean."""

    def __init__(self, alias: str, queues: Sequence[Any], leadership: Leadership, pace: float = PACE) -> None:
        """``pace``: seconds between two rounds."""
        super().__init__(f"housekeeping-{alias}")
        self._pace = pace
        self.alias = alias
        self._queues = queues
        self._fenced = [queue for queue in queues if queue.delivery.has_barriers]
        self._leadership = leadership
        self.breaker = CircuitBreaker(f"Housekeeping in {alias}")
        #: The dead that somebody else has to bury.
        self.left_alone: LeftAlone = {}
        #: Destinations of delayed messages that are overdue and that no queue here answers to, and how many there are.
        self.undeliverable: dict[str, int] = {}
        #: What nobody takes or delivers, and when the log may name it again.
        self._name_again: dict[Hashable, float] = {}
        #: Messages of a queue that were moved to another priority since the log said so, by what they had.
        self._moved: dict[Any, Counter[int]] = {}
        #: Queues of which the log says that they cannot be purged.
        self._unpurged: set[str] = set()
        #: Where the look for messages that came after their acks goes on.
        self._settled: dict[Any, int] = {}
        #: The first piece of this round that failed.
        self._failure: Error | None = None

    def serve(self) -> None:
        interval = settings.PURGE_INTERVAL.total_seconds() if settings.PURGE_INTERVAL else None
        next_purge = (
            monotonic() if settings.PURGE_EXPIRED_ON_STARTUP else (monotonic() + interval if interval else None)
        )
        next_retention = next_kept = next_name = next_levels = monotonic()
        forgets = True
        callbacks.guard(at_rest)
        while not self.stopping:
            wait = min(self._pace, settings.HEARTBEAT_INTERVAL.total_seconds())
            self._failure = None
            try:
                with Answering(connections[self.alias]):
                    if self._leadership.hold():
                        self._try(release_leases_of_dead_subscribers, self.alias, self.left_alone)
                        if forgets:
                            forgets = False
                            self._try(claim_record_cache.forget_uncounted, self.alias)
                        if monotonic() >= next_levels:
                            next_levels = monotonic() + LEVELS_INTERVAL
                            self._keep_to_levels()
                            self._settle_deferred()
                        for queue in self._fenced:
                            self._try(self._release_barriers, queue)
                        if next_purge is not None and monotonic() >= next_purge:
                            for queue in self._queues:
                                self._try(self._purge, queue)
                            next_purge = monotonic() + interval if interval else None
                        if settings.POISON_RETENTION and monotonic() >= next_retention:
                            next_retention = monotonic() + RETENTION_INTERVAL
                            self._try(drop_old_poison, self.alias, self)
                        if monotonic() >= next_kept:
                            next_kept = monotonic() + RETENTION_INTERVAL
                            for finder in filter(None, map(registered.finder_of, self._queues)):
                                self._try(finder.keep_house, self.alias, self.goes_on)
                            for piece in maintenance_hooks.pieces:
                                self._try(piece, self.alias, self.goes_on)
                        if monotonic() >= next_name:
                            next_name = monotonic() + NAMING_INTERVAL
                            if self._fenced:
                                self._try(barriers.forget_dead, self.alias)
                            self._try(self._name_undeliverable)
                            self._try(self._name_stranded)
                    else:
                        wait = ELECTION_INTERVAL
                    if self._failure is not None:
                        raise self._failure
                self.breaker.success()
            except Error as error:
                connections[self.alias].close()
                wait = self.breaker.failure(error)
            self.pause(wait)
        try:
            with Answering(connections[self.alias]):
                self._leadership.resign()
        except Error as error:
            log.info("The housekeeping of %r could not resign, its lease will lapse: %s", self.alias, error)

    @property
    def leads(self) -> bool:
        """Whether it is this one that keeps house now. Safe from any thread."""
        return self._leadership.held

    def goes_on(self) -> bool:
        """Whether work in batches may go on: it was not asked to end, and leads, which a long purge has to say in between."""
        return not self.stopping and self._leadership.hold()

    def _try(self, piece: Callable[..., Any], *given: Any) -> None:
        """Do a piece of the work. One that fails keeps the others from nothing, or the first queue with a trigger that raises
        would keep all the rest from being purged; the round has failed all the same."""
        try:
            piece(*given)
        except Error as error:
            if backend_of(connections[self.alias]).error_kind(error) in PASSING:
                raise
            self._failure = self._failure or error

    def _keep_to_levels(self) -> None:
        for queue in self._queues:
            self._try(self._keep_to_levels_of, queue)

    def _keep_to_levels_of(self, queue: Any) -> None:
        moved = self._moved.setdefault(queue, Counter())
        try:
            moved.update(clamp_priorities(queue, self.alias, self))
        except Error as error:
            # A queue that this process may not write to, or that is not migrated yet.
            if backend_of(connections[self.alias]).error_kind(error) not in (ErrorKind.DENIED, ErrorKind.MISSING):
                raise
        if moved and self._may_name((queue, "priorities")):
            _tell_moved(queue, moved)
            moved.clear()

    def _settle_deferred(self) -> None:
        """Remove what came in after its ack, and forget acks whose messages have not come."""
        queues = [queue for queue in self._queues if early_acks.defers(queue)]
        for queue in queues:
            self._try(self._settle, queue)
        if queues:
            self._try(settle_early_acks.forget_old, self.alias)

    def _settle(self, queue: Any) -> None:
        removed, self._settled[queue] = settle_early_acks.settle(queue, self.alias, self._settled.get(queue, 0))
        if removed:
            log.info("%s: %d messages were removed that had been acked before they came.", queue._meta.label, removed)

    def _release_barriers(self, queue: Any) -> None:
        """A worker does so when it looks; this is for a barrier whose last worker before it died."""
        try:
            barriers.release(queue, self.alias)
        except Error as error:
            # A queue that this process may not write to, or that is not migrated yet.
            if backend_of(connections[self.alias]).error_kind(error) not in (ErrorKind.DENIED, ErrorKind.MISSING):
                raise

    def _purge(self, queue: Any) -> None:
        """Purge a queue. One whose table is still to be migrated, or may not be written to, keeps none of the others from it."""
        try:
            purge_expired(queue, self.alias, self)
        except Error as error:
            if backend_of(connections[self.alias]).error_kind(error) not in (ErrorKind.MISSING, ErrorKind.DENIED):
                raise
            label = queue._meta.label
            if label not in self._unpurged:
                self._unpurged.add(label)
                log.warning("%s: expired messages cannot be purged here: %s", label, str(error).split("\n", 1)[0])

    def _name_undeliverable(self) -> None:
        self.undeliverable = delayed.undeliverable(self.alias)
        for destination in filter(self._may_name, self.undeliverable):
            log.warning(
                "%d delayed messages in %r are overdue for %r, and no queue of this project has that name. They are left "
                "alone for whoever knows it; if the queue was removed, movedelayed lets them go to another one.",
                self.undeliverable[destination], self.alias, destination,
            )  # fmt: skip

    def _may_name(self, what: Hashable) -> bool:
        """Whether this is to be said now: once, and again while it is still so, or so again, after a while."""
        if monotonic() < self._name_again.get(what, 0.0):
            return False
        self._name_again[what] = monotonic() + NAMED_AGAIN
        return True

    def _name_stranded(self) -> None:
        """One line per recipient or queue; of a type each worker that meets it says so by itself, and of a priority who gives its
        messages another one."""
        for queue, left in statistics.left_in(self.alias):
            if left.what not in ("type", "priority") and self._may_name((queue, left.what, left.name)):
                log.warning("%s: %s.", in_one_line(queue, 200), left)


def clamp_priorities(queue: Any, alias: str, service: Housekeeping | None = None) -> Counter[int]:
    """Move messages of a queue whose priority no claim finds to the nearest level, in batches; how many had which. Of recipients
    that are no consumers of this project nothing is known here, and nobody here takes theirs."""
    connection = connections[alias]
    sql = queue_sql(queue, connection)
    moved: Counter[int] = Counter()
    if not sql.table.levels:
        return moved
    # Copies under a former name come for as long as that subscribes.
    recipients = ["", *(name for one in registered.of(queue) for name in (one.name, *one.aliases))]

    def step() -> int:
        some = sql.maintenance.clamp_priorities(connection, recipients, LEVELS_BATCH)
        moved.update(some)
        return sum(some.values())

    if _in_batches(step, LEVELS_BATCH, service):
        notifier.sent(queue, connection)
    return moved


def _tell_moved(queue: Any, moved: Counter[int]) -> None:
    most = moved.most_common(5)
    shown = [f"{count} from priority {priority}" for priority, count in most]
    if others := moved.total() - sum(count for _, count in most):
        shown.append(f"{others} from others")
    log.warning(
        "%s: %d messages had a priority outside of the queue's levels, 0 to %d, and were moved to the nearest: %s.",
        queue._meta.label, moved.total(), queue.delivery.priorities - 1, ", ".join(shown),
    )  # fmt: skip


def purge_expired(queue: Any, alias: str, service: Housekeeping | None = None) -> int:
    """Delete the expired messages of a queue in batches, each of which the signal ``expired`` tells; returns how many."""
    most = settings.PURGE_BATCH
    total = _in_batches(lambda: delete_expired(queue, alias, most), most, service)
    if total:
        log.info("%s: %d expired messages were purged.", queue._meta.label, total)
    return total


def drop_old_poison(alias: str, service: Housekeeping | None = None) -> int:
    """Delete archived and edited poison messages whose retention is over, in batches; returns how many."""
    total = _in_batches(
        lambda: poison_archive.drop_old(settings.POISON_RETENTION, using=alias), requeue_poison.BATCH, service
    )
    if total:
        log.info("%d archived or edited poison messages in %r were deleted: their retention is over.", total, alias)
    return total


def _in_batches(step: Callable[[], int], most: int, service: Housekeeping | None) -> int:
    """Take the step, which deletes or changes ``most`` at most, until it does fewer or the service that does it may not go on;
    returns how many they were."""
    total = 0
    while service is None or service.goes_on():
        again()
        count = step()
        total += count
        if count < most:
            break
    return total
