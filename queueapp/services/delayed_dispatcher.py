"""The delayed dispatcher: moves due messages to their queues, runs schedules, and sleeps until the next one is due.

One elected dispatcher per database and set of queues does the work; the others of that set wait until its lease
expires. (Two projects on one database do not know each other's queues, so each has a leader of its own: otherwise the
messages of one would wait for ever while the other's leads. During a deploy that adds a queue both versions lead; rows
are locked, so they share the work.) A notification wakes it when a message is stored that may be due sooner. A round
moves a batch in one transaction; a full batch is followed by the next at once.
"""

from __future__ import annotations

import logging
import math
import uuid
import zlib
from datetime import timedelta
from time import monotonic

from django.db import Error, connections

from .. import callbacks, delayed
from ..circuit_breaker import Breaker, CircuitBreaker, RateBreaker
from ..conf import settings
from ..errors import SemanticsRefused
from ..schedules.runner import ScheduleRunner
from ..sql import ErrorKind, backend_of
from .connection_timeouts import ResponseDeadline, restart_deadline, without_deadline
from .leader_election import Elector, role_name
from .service import Service

log = logging.getLogger("queueapp.workers")

#: Seconds between two rounds while due rows are locked by another session: the first wait, and the longest.
_FIRST_LOCK_WAIT, _LONGEST_LOCK_WAIT = 0.005, 1.0
#: Seconds between two deletions of old arrival records, and for how long after the last arrival there may be some.
SWEEP_INTERVAL = 60.0
SWEEP_PERIOD = delayed.KEPT.total_seconds() + 2 * SWEEP_INTERVAL


class DelayedDispatcher(Service):
    """Dispatches for one database. ``wake`` it when a message was stored: that may be due before the next round."""

    def __init__(self, alias: str, holder: uuid.UUID) -> None:
        self.alias = alias
        scope, suffix = self._scope()
        super().__init__(f"dispatcher-{scope}")
        self.elector = Elector(alias, role_name("delayed dispatcher") + suffix, holder)
        self.schedules = ScheduleRunner(alias)
        #: Whether it was logged that schedules cannot be run.
        self._schedules_fail = False
        self.dispatched = 0
        #: Whether it was logged that the configured store refuses the semantics of all queues.
        self._is_refused = False
        #: How long the next round waits while overdue rows are locked by another session.
        self._lock_wait = _FIRST_LOCK_WAIT
        #: Errors with which messages were refused in this round.
        self._refusals: list[BaseException] = []
        #: What this round found in the store before it moved anything.
        self._agenda: delayed.Agenda = []
        self.fetch_breaker = CircuitBreaker(
            f"Fetch of due messages in {scope}",
            settings.TIME_TO_TRIGGER_FETCH_CIRCUIT_BREAKER,
            kind="fetch",
            subject=alias,
        )
        self.dispatch_breaker = CircuitBreaker(
            f"Dispatch of due messages in {scope}",
            settings.TIME_TO_TRIGGER_DISPATCH_CIRCUIT_BREAKER,
            kind="dispatch",
            subject=alias,
        )
        self.recovery_breaker = RateBreaker(
            f"Recovery of delayed messages in {scope}",
            settings.MAXIMUM_RECOVERY_FAILURES_PER_SECOND,
            kind="recovery",
            subject=alias,
        )
        self.breakers: list[Breaker] = [self.fetch_breaker, self.dispatch_breaker, self.recovery_breaker]

    def serve(self) -> None:
        woken = False
        callbacks.guard(without_deadline)
        while not self.stopping:
            if woken:
                self.schedules.woken()
            try:
                with ResponseDeadline(connections[self.alias]):
                    wait = self.dispatch_once()
                self.fetch_breaker.success()
            except delayed.FetchFailed as error:
                wait = self.failed(_cause(error), self.fetch_breaker)
            except delayed.DispatchFailed as error:
                wait = self.failed(_cause(error), self.dispatch_breaker)
            except Error as error:
                wait = self.failed(error, self.fetch_breaker)
            except Exception as error:
                # Recording a failure has failed (the database, a row that vanished, another store): nothing was
                # committed.
                wait = self.failed(_cause(error), self.recovery_breaker)
            if woken:
                # Notifications are throttled: one more round sees what was stored just after this one.
                wait = min(wait, settings.NOTIFY_INTERVAL.total_seconds())
            woken = wait > 0 and self.pause(wait)
        try:
            with ResponseDeadline(connections[self.alias]):
                self.elector.resign()
        except Error as error:
            log.info(
                "The dispatcher of %r could not resign; others wait until its lease expires: %s", self.alias, error
            )

    def dispatch_once(self) -> float:
        """One round; returns how many seconds to wait for the next."""
        poll = settings.DISPATCH_INTERVAL.total_seconds()
        if not self.elector.try_lead():
            return poll
        # First: a delayed store that does not answer must not hold schedules up.
        next_schedule = self._run_schedules()
        return min(next_schedule, self._dispatch_round(poll))

    def _run_schedules(self) -> float:
        """Run the schedules that are due; returns how many seconds to wait for the next. Without their table, or the
        privilege to use it, delayed messages are moved all the same."""
        try:
            return self.schedules.round(self.elector.term, self._may_continue)
        except Error as error:
            if backend_of(connections[self.alias]).error_kind(error) not in (ErrorKind.MISSING, ErrorKind.DENIED):
                raise
            if not self._schedules_fail:
                self._schedules_fail = True
                log.error("Schedules in %r are not run: %s", self.alias, error, extra={"database": self.alias})
            return math.inf

    def _may_continue(self) -> bool:
        restart_deadline()
        return not self.stopping and self.elector.try_lead()

    def _dispatch_round(self, poll: float) -> float:
        limit = settings.DISPATCH_BATCH
        done = self._dispatch(limit)
        self.dispatched += done.moved
        if done.poisoned:
            log.error(
                "%d delayed message%s in %r could not be dispatched and moved to poison.",
                done.poisoned, "s" if done.poisoned != 1 else "", self.alias,
                extra={"database": self.alias, "count": done.poisoned},
            )  # fmt: skip
        if done.moved:
            self.dispatch_breaker.success()
        if self._refusals:
            # Poison or retried later: wait before the next round, and feed the breaker.
            return self.dispatch_breaker.failure(self._refusals[-1])
        if done.moved + done.poisoned >= limit:
            return 0.0
        due = self.next_due_in()
        wait = self._lock_wait
        self._lock_wait = _FIRST_LOCK_WAIT
        if due is None:
            return poll
        if due > timedelta(0) or done.moved:
            return min(poll, max(due.total_seconds(), _FIRST_LOCK_WAIT))
        # Overdue and yet not moved: another session has it locked, as a rule for an instant.
        self._lock_wait = min(2 * wait, _LONGEST_LOCK_WAIT)
        return min(poll, wait)

    def _dispatch(self, limit: int) -> delayed.Dispatched:
        self._refusals.clear()
        # Always: delayed retries are in this table whichever store is configured, so that they move in one transaction.
        self._agenda = delayed.agenda(self.alias)
        total = delayed.dispatch_due(self.alias, limit, self._refusals.append, self._agenda)
        if delayed.is_built_in(delayed.store_of(self.alias)):
            return total
        connection = connections[self.alias]
        try:
            store, semantics = delayed.open_for_dispatch(self.alias)
        except SemanticsRefused as error:
            self._report_refusal(error)
            return total
        except Exception as error:
            raise delayed.FetchFailed("the store cannot be opened") from error
        while sum(total) < limit and not self.stopping:
            now = backend_of(connection).now(connection)
            dispatched = delayed.dispatch_next(store, now, self._refusals.append, semantics)
            if dispatched is None:
                break
            restart_deadline()
            total = delayed.Dispatched(*(a + b for a, b in zip(total, dispatched, strict=True)))
            if dispatched.failed:
                break
        return total

    def _report_refusal(self, error: SemanticsRefused) -> None:
        """Once: nothing but another configuration helps, so no breaker waits for it."""
        if not self._is_refused:
            self._is_refused = True
            log.error(
                "Delayed messages in %r cannot be sent or dispatched: %s",
                self.alias,
                error,
                extra={"database": self.alias},
            )

    def next_due_in(self) -> timedelta | None:
        # An idle round asks the store once: a test counts the statements of an idle worker.
        return delayed.next_due_in(self.alias, self._agenda if delayed.is_idle(self._agenda) else None)

    def _scope(self) -> tuple[str, str]:
        """The databases in words, and the suffix of the role."""
        return self.alias, ""

    def failed(self, error: BaseException, breaker: CircuitBreaker | RateBreaker) -> float:
        """A round failed; returns how many seconds to wait for the next."""
        connection = connections[self.alias]
        if isinstance(error, Error):
            if backend_of(connection).error_kind(error) is ErrorKind.DEADLOCK:
                return 0.01
            connection.close()
        if isinstance(breaker, RateBreaker):
            if breaker.report() is None:
                log.error("A round of the dispatcher of %r failed.", self.alias, exc_info=error)
            return max(breaker.pace, breaker.failure(error))
        return breaker.failure(error)


def _cause(error: BaseException) -> BaseException:
    return error.__cause__ or error if isinstance(error, delayed.StepFailed) else error


class Forwarder(DelayedDispatcher):
    """Moves due messages from the delayed store of ``alias`` to queues of ``target``, another database. ``wake`` it
    when a message was stored in ``alias``.

    A pair of databases has a thread, connections and breakers of its own, so that a target that is down or hangs delays
    no messages for other targets. It runs only where a queue's ``Delivery.delayed_in`` asks for it.
    """

    def __init__(self, alias: str, target: str, holder: uuid.UUID) -> None:
        self.target = target
        super().__init__(alias, uuid.uuid5(holder, target))
        #: When old arrival records are deleted next, on this process' monotonic clock.
        self.sweep_at = 0.0
        self._sweep_until = 0.0
        self._term = 0

    def _scope(self) -> tuple[str, str]:
        # The role depends on the queues that it moves for: a version that knows more queues elects a leader of its own,
        # or their messages would wait until this one ends.
        known = self.target, sorted(delayed.addresses(self.alias).get(self.target, ()))
        return f"{self.alias} for {self.target}", f" {zlib.crc32(repr(known).encode()):08x}"

    def dispatch_once(self) -> float:
        wait = super().dispatch_once()
        # After the round, whose own failures come first.
        if self.elector.is_leader and self.sweep_at <= monotonic() < self._sweep_until:
            self.sweep_at = monotonic() + SWEEP_INTERVAL
            with delayed.step(delayed.DispatchFailed, self.target), ResponseDeadline(connections[self.target]):
                delayed.forget_arrivals(self.alias, self.target)
            if not self._refusals:
                self.dispatch_breaker.success()
        return wait

    def _run_schedules(self) -> float:
        return math.inf  # those of a database are its dispatcher's

    def _dispatch(self, limit: int) -> delayed.Dispatched:
        self._refusals.clear()
        done = delayed.forward_due(self.alias, self.target, limit, self._refusals.append, ResponseDeadline)
        if done.moved or self._term != self.elector.term:
            # Also for a new leader: the old one may have been killed and have left some.
            self._term = self.elector.term
            self._sweep_until = monotonic() + SWEEP_PERIOD
        return done

    def next_due_in(self) -> timedelta | None:
        return delayed.next_forward_in(self.alias, self.target)

    def failed(self, error: BaseException, breaker: CircuitBreaker | RateBreaker) -> float:
        connection = connections[self.target]
        if backend_of(connection).error_kind(error) is ErrorKind.DEADLOCK:
            return 0.01
        if breaker is self.dispatch_breaker:
            connection.close()
            return breaker.failure(error)
        return super().failed(error, breaker)
