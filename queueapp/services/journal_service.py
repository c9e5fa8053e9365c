"""The journal of one database: fills the queues that read it, and removes entries whose retention is over.

One process per database and set of queues does it, elected for this alone; the cursors are locked, so two at once only
share the work. A queue with ``target_queue_depth`` is filled up as soon as it is half empty, or a publisher sends a
notification. While entries wait in the journal, for capacity of the queue or for a transaction that began before them,
the service polls every ``POLL_INTERVAL`` seconds. Other queues get nothing from the journal as a rule and are polled
every ``IDLE_POLL_INTERVAL``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from django.db import Error, connections

from .. import callbacks, overrides
from ..circuit_breaker import CircuitBreaker
from ..conf import settings
from ..errors import InvalidOption
from ..journal import retention
from ..journal.append import is_fed, journal_of
from ..sql import ErrorKind, backend_of
from ..topics.backfill import QueueFeeder, is_over_journal
from .connection_timeouts import ResponseDeadline, restart_deadline, without_deadline
from .leader_election import Elector
from .service import Service

log = logging.getLogger("queueapp.workers")

#: Seconds between two polls of a queue that waits for entries, and of one that does not.
POLL_INTERVAL, IDLE_POLL_INTERVAL = 0.05, 5.0
#: Seconds after a notification for which it polls: the publisher's transaction may be behind an open one.
AWAKE = 1.0
#: Seconds between two rounds of retention, and between two attempts to be elected.
RETENTION_INTERVAL, ELECTION_INTERVAL = 60.0, 5.0

#: Errors that every queue of the database would meet.
_OF_THE_DATABASE = (ErrorKind.CONNECTION, ErrorKind.DEADLOCK, ErrorKind.LOCKED, ErrorKind.EXHAUSTED)


class _FedQueue:
    """One queue that is filled from the journal."""

    def __init__(self, queue: Any, alias: str) -> None:
        self.queue = queue
        self.feeder = QueueFeeder(queue, alias)
        self.due = 0.0
        #: The number of messages with which it was full: it is not filled again before it is half empty, or may have
        #: more.
        self.full_with: int | None = None


class JournalService(Service):
    """The journal of one database. ``wake`` it when something was published that a queue gets from the journal."""

    def __init__(self, alias: str, queues: Sequence[Any], elector: Elector) -> None:
        super().__init__(f"journal-{alias}")
        self.alias = alias
        self.queues = [_FedQueue(queue, alias) for queue in queues if is_over_journal(queue)]
        self._elector = elector
        self.breaker = CircuitBreaker(f"Journal in {alias}", kind="journal", subject=alias)
        self._retention_at = self._awake_until = 0.0
        #: Queues of which the log says that they cannot be filled.
        self._reported: set[str] = set()

    def prepare(self) -> None:
        self._retention_at = self._awake_until = 0.0

    def serve(self) -> None:
        callbacks.guard(without_deadline)
        while not self.stopping:
            try:
                with ResponseDeadline(connections[self.alias]):
                    wait = self._round() if self._elector.try_lead() else ELECTION_INTERVAL
                self.breaker.success()
            except Error as error:
                wait = self._failed(error)
            if self.pause(wait):
                self._awake_until = monotonic() + AWAKE
                for fed in self.queues:
                    fed.due = min(fed.due, monotonic() if is_fed(fed.queue) else fed.due)
        try:
            with ResponseDeadline(connections[self.alias]):
                self._elector.resign()
        except Error as error:
            log.info(
                "The journal service of %r could not resign; others wait until its lease expires: %s", self.alias, error
            )

    def may_continue(self) -> bool:
        """Whether work in batches may go on."""
        restart_deadline()
        return not self.stopping and self._elector.try_lead()

    def _round(self) -> float:
        """One round; returns how many seconds to wait for the next."""
        if monotonic() >= self._retention_at:
            # First, because it also detects that the journal was restored from a dump.
            self._retention_at = monotonic() + RETENTION_INTERVAL
            retention.renumber(self.alias)
            retention.make_partitions(self.alias)
            for fed in self.queues:
                # Also a queue that is full for weeks, so that retention does not remove what it has still to get.
                self._isolated(fed, self._attach)
            # Only now: a queue that is new keeps the entries that it has still to get.
            retention.apply_retention(self.alias, self.may_continue)
        for fed in self.queues:
            if monotonic() >= fed.due and self.may_continue():
                self._isolated(fed, self._fill)
        next_at = min([self._retention_at, *(fed.due for fed in self.queues)])
        return max(0.0, min(next_at - monotonic(), settings.PEEK_DELAY.total_seconds()))

    def _fill(self, fed: _FedQueue) -> None:
        """Fill one queue as far as it goes, and set when it is due again."""
        if fed.full_with is not None and not self._has_capacity(fed, fed.full_with):
            fed.due = monotonic() + POLL_INTERVAL
            return
        filled = fed.feeder.fill()
        while filled.more and self.may_continue():
            filled = fed.feeder.fill()
        # The depth that it was filled to: when an operator has raised the depth just now, the queue is not full.
        fed.full_with = filled.full_with
        if not is_fed(fed.queue):
            fed.due = monotonic() + (0.0 if filled.more else IDLE_POLL_INTERVAL)
        elif filled.full_with is not None or filled.more or monotonic() < self._awake_until:
            fed.due = monotonic() + POLL_INTERVAL
        else:
            fed.due = monotonic() + settings.PEEK_DELAY.total_seconds()

    def _attach(self, fed: _FedQueue) -> None:
        if fed.feeder.attach():
            fed.due = 0.0

    def _has_capacity(self, fed: _FedQueue, full_with: int) -> bool:
        """Whether it is half empty, or an operator allows more than when it was full."""
        connection = connections[self.alias]
        depth: int = overrides.effective_value(fed.queue, "target_queue_depth", self.alias)
        half = depth // 2
        return (
            depth > full_with
            or journal_of(connection).rows_up_to(connection, fed.queue._meta.db_table, half + 1) <= half
        )

    def _isolated(self, fed: _FedQueue, step: Callable[[_FedQueue], None]) -> None:
        """A queue that is not migrated yet, may not be written to, or fails for a reason of its own must not stop the
        others. Errors of the database go to the breaker."""
        try:
            step(fed)
        except InvalidOption as error:
            self._log_once(fed, error)
        except Error as error:
            if backend_of(connections[self.alias]).error_kind(error) in _OF_THE_DATABASE:
                raise
            self._log_once(fed, error)

    def _log_once(self, fed: _FedQueue, error: Exception) -> None:
        fed.due = monotonic() + IDLE_POLL_INTERVAL
        label = fed.queue._meta.label
        if label not in self._reported:
            self._reported.add(label)
            why = str(error).split("\n", 1)[0]
            log.error("%s cannot be filled from the journal: %s", label, why, extra={"queue": label})

    def _failed(self, error: Error) -> float:
        connection = connections[self.alias]
        if backend_of(connection).error_kind(error) is ErrorKind.DEADLOCK:
            return 0.01
        connection.close()
        return self.breaker.failure(error)


def has_work(queues: Sequence[Any]) -> bool:
    """Whether a database has a journal, by what is declared."""
    return bool(settings.JOURNAL) or any(map(is_fed, queues))
