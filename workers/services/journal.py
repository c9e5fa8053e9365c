"""The journal of one database: fills the queues that read it, and lets go of what has been kept for long enough.

One process per database and set of queues does it, elected for this alone; the cursors are locked, so two at once only share
the work. A queue with ``target_queue_depth`` is topped up as soon as it is half empty, or something is published: the
publisher rings. While something waits in the journal, for room or for a transaction that began before it, this looks every
``LOOK_AGAIN`` seconds. Other queues have nothing to get from the journal as a rule, and are looked at every ``LOOK_OTHERS``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from django.db import Error, connections

from queueapp import callbacks
from queueapp.circuit_breaker import CircuitBreaker
from queueapp.conf import settings
from queueapp.errors import InvalidOption
from queueapp.flow import in_force
from queueapp.journal import retention
from queueapp.journal.append import is_fed, journal_of
from queueapp.services.connection_timeouts import Answering, again, at_rest
from queueapp.services.leader_election import Leadership
from queueapp.services.service import Service
from queueapp.sql import ErrorKind, backend_of
from queueapp.topics.backfill import Filler, is_over_journal

log = logging.getLogger("queueapp.workers")

LOOK_AGAIN, LOOK_OTHERS = 0.05, 5.0
#: For so long after it was woken it goes on looking: the publisher's transaction may be behind an open one.
AWAKE = 1.0
#: Seconds between two rounds of retention, and between two attempts to be elected.
RETENTION_INTERVAL, ELECTION_INTERVAL = 60.0, 5.0

#: What the next queue would meet as well.
_OF_THE_DATABASE = (ErrorKind.CONNECTION, ErrorKind.DEADLOCK, ErrorKind.LOCKED, ErrorKind.EXHAUSTED)


class _Fed:
    """One queue that is filled."""

    def __init__(self, queue: Any, alias: str) -> None:
        self.queue = queue
        self.filler = Filler(queue, alias)
        self.due = 0.0
        #: With so many it was full, and is left alone until it is half empty, or may have more.
        self.full_with: int | None = None


class JournalService(Service):
    """Keeps the journal of one database. ``wake`` it when something was published that a queue gets out of it."""

    def __init__(self, alias: str, queues: Sequence[Any], leadership: Leadership) -> None:
        super().__init__(f"journal-{alias}")
        self.alias = alias
        self._queues = [_Fed(queue, alias) for queue in queues if is_over_journal(queue)]
        self._leadership = leadership
        self.breaker = CircuitBreaker(f"Journal in {alias}")
        self._retention_at = self._awake_until = 0.0
        #: Queues of which the log says that they cannot be filled here.
        self._unable: set[str] = set()

    def prepare(self) -> None:
        self._retention_at = self._awake_until = 0.0

    def serve(self) -> None:
        callbacks.guard(at_rest)
        while not self.stopping:
            try:
                with Answering(connections[self.alias]):
                    wait = self._round() if self._leadership.hold() else ELECTION_INTERVAL
                self.breaker.success()
            except Error as error:
                wait = self._failed(error)
            if self.pause(wait):
                self._awake_until = monotonic() + AWAKE
                for one in self._queues:
                    one.due = min(one.due, monotonic() if is_fed(one.queue) else one.due)
        try:
            with Answering(connections[self.alias]):
                self._leadership.resign()
        except Error as error:
            log.info("The journal service of %r could not resign, its lease will lapse: %s", self.alias, error)

    def goes_on(self) -> bool:
        """Whether work in batches may go on."""
        again()
        return not self.stopping and self._leadership.hold()

    def _round(self) -> float:
        """One round; returns how many seconds to wait for the next."""
        if monotonic() >= self._retention_at:
            # First, because it also looks whether the journal came here with a dump.
            self._retention_at = monotonic() + RETENTION_INTERVAL
            retention.renumber(self.alias)
            retention.make_partitions(self.alias)
            for one in self._queues:
                # Also one that is full for weeks is looked after, so retention does not pass it.
                self._without_stopping_others(one, self._attach)
            # Only now: a queue that is new holds back what it has still to get.
            retention.let_go(self.alias, self.goes_on)
        for one in self._queues:
            if monotonic() >= one.due and self.goes_on():
                self._without_stopping_others(one, self._serve)
        next_at = min([self._retention_at, *(one.due for one in self._queues)])
        return max(0.0, min(next_at - monotonic(), settings.PEEK_DELAY.total_seconds()))

    def _serve(self, one: _Fed) -> None:
        """Fill one queue as far as it goes, and say when to look again."""
        if one.full_with is not None and not self._has_room(one, one.full_with):
            one.due = monotonic() + LOOK_AGAIN
            return
        filled = one.filler.fill()
        while filled.more and self.goes_on():
            filled = one.filler.fill()
        # By what it was filled: when an operator raised the depth just now, it is not full with that.
        one.full_with = filled.full_with
        if not is_fed(one.queue):
            one.due = monotonic() + (0.0 if filled.more else LOOK_OTHERS)
        elif filled.full_with is not None or filled.more or monotonic() < self._awake_until:
            one.due = monotonic() + LOOK_AGAIN
        else:
            one.due = monotonic() + settings.PEEK_DELAY.total_seconds()

    def _attach(self, one: _Fed) -> None:
        if one.filler.attach():
            one.due = 0.0

    def _has_room(self, one: _Fed, full_with: int) -> bool:
        """It is half empty, or an operator lets it have more than when it was full."""
        connection = connections[self.alias]
        depth: int = in_force.value(one.queue, "target_queue_depth", self.alias)
        half = depth // 2
        return (
            depth > full_with
            or journal_of(connection).rows_up_to(connection, one.queue._meta.db_table, half + 1) <= half
        )

    def _without_stopping_others(self, one: _Fed, step: Callable[[_Fed], None]) -> None:
        """A queue that is not migrated yet, may not be written to, or is in any other trouble of its own keeps none of the
        others from being filled. What is the database's goes to the breaker."""
        try:
            step(one)
        except InvalidOption as error:
            self._say_once(one, error)
        except Error as error:
            if backend_of(connections[self.alias]).error_kind(error) in _OF_THE_DATABASE:
                raise
            self._say_once(one, error)

    def _say_once(self, one: _Fed, error: Exception) -> None:
        one.due = monotonic() + LOOK_OTHERS
        label = one.queue._meta.label
        if label not in self._unable:
            self._unable.add(label)
            log.error("%s cannot be filled from the journal here: %s", label, str(error).split("\n", 1)[0])

    def _failed(self, error: Error) -> float:
        connection = connections[self.alias]
        if backend_of(connection).error_kind(error) is ErrorKind.DEADLOCK:
            return 0.01
        connection.close()
        return self.breaker.failure(error)


def has_work(queues: Sequence[Any]) -> bool:
    """Whether a database has a journal to be kept, by what is declared."""
    return bool(settings.JOURNAL) or any(map(is_fed, queues))
