"""The delayed dispatcher: moves due messages to their queues, and sleeps until the next one is due.

One elected dispatcher per database and set of queues does the work; the others of that set wait for its lease to lapse.
(Two projects on one database do not know each other's queues: each has its own leader, or the messages of one would wait
for ever while the other's leads. During a deploy that adds a queue both versions lead; rows are locked, so they share.)
It is woken by a message stored anywhere that may be due sooner. A round moves a batch in one transaction; a full batch is
followed at once.
"""

from __future__ import annotations

import logging
import uuid
from datetime import timedelta

from django.db import Error, connections

from .. import callbacks, delayed
from ..circuit_breaker import Breaker, CircuitBreaker, RateBreaker
from ..conf import settings
from ..sql import ErrorKind, backend_of
from .connection_timeouts import Answering, again, at_rest
from .leader_election import Leadership, role
from .service import Service

log = logging.getLogger("queueapp.workers")

#: Seconds that a round waits for what somebody else has locked: at first, and at most.
_LOCKED_FIRST, _LOCKED_MOST = 0.005, 1.0


class DelayedDispatcher(Service):
    """Dispatches for one database. ``wake`` it when a message was stored: it may be due before it meant to look again."""

    def __init__(self, alias: str, holder: uuid.UUID) -> None:
        self.alias = alias
        where, suffix = self._place()
        super().__init__(f"dispatcher-{where}")
        self.leadership = Leadership(alias, role("delayed dispatcher") + suffix, holder)
        self.dispatched = 0
        #: How long the next round waits for what is overdue and locked by somebody else.
        self._locked_wait = _LOCKED_FIRST
        #: Why messages were refused in this round.
        self._refusals: list[BaseException] = []
        #: What this round saw in the store before it moved anything.
        self._agenda: delayed.Agenda = []
        self.fetch_breaker = CircuitBreaker(
            f"Fetch of due messages in {where}", settings.TIME_TO_TRIGGER_FETCH_CIRCUIT_BREAKER
        )
        self.dispatch_breaker = CircuitBreaker(
            f"Dispatch of due messages in {where}", settings.TIME_TO_TRIGGER_DISPATCH_CIRCUIT_BREAKER
        )
        self.recovery_breaker = RateBreaker(
            f"Recovery of delayed messages in {where}", settings.MAXIMUM_RECOVERY_FAILURES_PER_SECOND
        )
        self.breakers: list[Breaker] = [self.fetch_breaker, self.dispatch_breaker, self.recovery_breaker]

    def serve(self) -> None:
        woken = False
        callbacks.guard(at_rest)
        while not self.stopping:
            try:
                with Answering(connections[self.alias]):
                    wait = self._round()
                self.fetch_breaker.success()
            except delayed.FetchFailed as error:
                wait = self._failed(_cause(error), self.fetch_breaker)
            except delayed.DispatchFailed as error:
                wait = self._failed(_cause(error), self.dispatch_breaker)
            except Error as error:
                wait = self._failed(error, self.fetch_breaker)
            except Exception as error:
                # Failure handling itself failed (the database, a row that vanished, another store): nothing was committed.
                wait = self._failed(_cause(error), self.recovery_breaker)
            if woken:
                # Wake-ups are throttled: what was stored just after this one is seen by looking once more.
                wait = min(wait, settings.NOTIFY_INTERVAL.total_seconds())
            woken = wait > 0 and self.pause(wait)
        try:
            with Answering(connections[self.alias]):
                self.leadership.resign()
        except Error as error:
            log.info("The dispatcher of %r could not resign, its lease will lapse: %s", self.alias, error)

    def _round(self) -> float:
        """One round; returns how many seconds to wait for the next."""
        poll = settings.DISPATCH_INTERVAL.total_seconds()
        if not self.leadership.hold():
            return poll
        limit = settings.DISPATCH_BATCH
        done = self._dispatch(limit)
        self.dispatched += done.moved
        if done.poisoned:
            log.error(
                "%d delayed messages in %r went to poison: they could not be forwarded.", done.poisoned, self.alias
            )
        if done.moved:
            self.dispatch_breaker.success()
        if self._refusals:
            # Whether it is to be tried again or is poison by now: not the next one at once, and the breaker sees it.
            return self.dispatch_breaker.failure(self._refusals[-1])
        if done.moved + done.poisoned >= limit:
            return 0.0
        due = self._next_due_in()
        wait = self._locked_wait
        self._locked_wait = _LOCKED_FIRST
        if due is None:
            return poll
        if due > timedelta(0) or done.moved:
            return min(poll, max(due.total_seconds(), _LOCKED_FIRST))
        # Overdue and yet not moved: somebody else has it locked, for an instant as a rule.
        self._locked_wait = min(2 * wait, _LOCKED_MOST)
        return min(poll, wait)

    def _dispatch(self, limit: int) -> delayed.Dispatched:
        self._refusals.clear()
        # Always: delayed retries are kept here whatever store is configured, so that they move in one transaction.
        self._agenda = delayed.agenda(self.alias)
        total = delayed.dispatch_due(self.alias, limit, self._refusals.append, self._agenda)
        if delayed.is_built_in(delayed.store_of(self.alias)):
            return total
        connection = connections[self.alias]
        try:
            store, semantics = delayed.open_for_dispatch(self.alias)
        except Exception as error:
            raise delayed.FetchFailed("the store cannot be opened") from error
        while sum(total) < limit and not self.stopping:
            now = backend_of(connection).now(connection)
            one = delayed.dispatch_next(store, now, self._refusals.append, semantics)
            if one is None:
                break
            again()
            total = delayed.Dispatched(*(a + b for a, b in zip(total, one, strict=True)))
            if one.failed:
                break
        return total

    def _next_due_in(self) -> timedelta | None:
        # An idle round asks the store once: an idle worker's statements are counted.
        return delayed.next_due_in(self.alias, self._agenda if delayed.is_idle(self._agenda) else None)

    def _place(self) -> tuple[str, str]:
        """What it works on in words, and what its role ends in."""
        return self.alias, ""

    def _failed(self, error: BaseException, breaker: CircuitBreaker | RateBreaker) -> float:
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
