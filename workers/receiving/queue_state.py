"""What the receive tasks of one queue share, and all they know of the pump: where to claim, what became of messages,
trouble with the database, an outage of what the handlers need, and what nobody here takes (``strangers``).

The pump makes one and hands it to its tasks. It starts nothing and waits for nothing but a breaker or the throttle.
"""

from __future__ import annotations

import logging
import random
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import cycle
from time import monotonic
from typing import Any

from django.db import Error, connections

from queueapp import circuit_breaker, delayed, notifier, overrides
from queueapp.circuit_breaker import Breaker, BreakerReport, CircuitBreaker
from queueapp.conf import settings
from queueapp.flow.filters import SubscriberFilter
from queueapp.flow.limited_claims import LimitedClaims
from queueapp.messages import new_id
from queueapp.models.delivery import Semantics
from queueapp.receiving.low_water_marks import LowWaterMarks
from queueapp.receiving.priority64_marks import Priority64Marks
from queueapp.sending.isolation import close_isolated
from queueapp.sql import ErrorKind, QueueSql, backend_of, queue_sql
from queueapp.sql.claims import FOREVER_MS, MAX_SEQ, SEQ, Claimed, SeqRange
from queueapp.telemetry import tracing

from .barriers import BarrierGate
from .claim_tracker import ActiveClaim, ClaimTracker
from .handler_gate import AT_ONCE, HandlerGate
from .handlers import HandlerTable
from .quarantine import BatchLimit, Quarantine
from .ranked_claiming import Priority64ClaimTracker
from .skipped_messages import SkippedMessages
from .stats import Stats

log = logging.getLogger("queueapp.workers")


class QueueState:
    """One per pump. ``more`` is told of a full claim, ``again`` of what came back: the pump's two reasons to act. ``may_go_on``
    says whether the calling task may take another message."""

    def __init__(
        self,
        queue: Any,
        alias: str,
        *,
        handlers: HandlerTable,
        floors: LowWaterMarks,
        quarantine: Quarantine,
        stopping: threading.Event,
        more: Callable[[], None],
        again: Callable[[], None],
        may_go_on: Callable[[], bool],
        filter: SubscriberFilter | None = None,
    ) -> None:
        self.queue = queue
        self.alias = alias
        self.label: str = queue._meta.label
        self._sql = tracing.statements(queue, queue_sql(queue, connections[alias]))
        self._seen = overrides.version
        self.subscriber: uuid.UUID = new_id()
        self.handlers = handlers
        #: What this subscriber takes no message without; None: it takes every one that it knows.
        self.filter = filter
        #: How claims are made where the queue counts what is out, or shares it out; None: as they come.
        delivery = queue.delivery
        self.limited_claims = LimitedClaims(queue, alias, self._sql) if delivery.counts_leases else None
        #: TRANSACTIONAL with a limit: a message is taken with one of the queue's places.
        self.needs_permits = delivery.max_backlog is not None and delivery.semantics is Semantics.TRANSACTIONAL
        #: The last claim left no room for others, so they are to be told when there is some.
        self.at_limit = False
        self._told_room_at = 0.0
        self.quarantine = quarantine
        self.stopping = stopping
        self.stats = Stats()
        self.claims = Priority64ClaimTracker(floors) if isinstance(floors, Priority64Marks) else ClaimTracker(floors)
        #: Of a queue with barriers.
        self.barriers = BarrierGate(queue, alias, self.subscriber) if self.sql.table.barriers else None
        #: Of a queue with consumers that have a limit.
        self.limiter = handlers.limiter
        if self.limiter is not None:
            self.limiter.freed = self._place_is_free
        self._plain = self.barriers is None and self.limiter is None
        patience = settings.TIME_TO_TRIGGER_RECEIVE_CIRCUIT_BREAKER
        self.peek_breaker = CircuitBreaker(f"Peek of {self.label}", patience, kind="peek", subject=self.label)
        self.breaker = CircuitBreaker(f"Receive from {self.label}", patience, kind="receive", subject=self.label)
        #: Of this queue in this process; who else has one adds it.
        self.breakers: list[Breaker] = [self.peek_breaker, self.breaker]
        #: TRANSACTIONAL: record each hand-out before its handler runs; kept by the heartbeat (see ``CRASH_TRACKING_PERIOD``).
        self.crash_tracking = False
        self.batch_limit = BatchLimit()
        #: Messages that failed in a transaction with others (``Delivery.transaction_size``): to be handled alone.
        self.isolated: set[int] = set()
        #: Held by a task that lets more messages come (``batch_wait``).
        self.gathering = threading.Lock()
        #: Of quick handlers: each task shares the next one.
        self.handler_gates = cycle([HandlerGate() for _ in range(AT_ONCE)])
        self._more, self._again = more, again
        self.may_go_on = may_go_on
        self._consecutive_failures, self._throttled_at = 0, 0.0
        self.skipped = SkippedMessages(
            self.label,
            alias,
            lambda: self.sql,
            again,
            handlers=handlers,
            filter=filter,
            claiming=self.claims,
            stats=self.stats,
            stopping=stopping,
        )
        #: Consumers of which the log says that they change their session.
        self._changing: set[str] = set()

    # -- claims ---------------------------------------------------------------------------------------------------

    @property
    def sql(self) -> QueueSql:
        """The statements of the queue, as an operator would have them now."""
        if self._seen != overrides.version:
            self._seen = overrides.version
            self._sql = tracing.statements(self.queue, queue_sql(self.queue, connections[self.alias]))
            if self.limited_claims is not None:
                self.limited_claims = LimitedClaims(self.queue, self.alias, self._sql)
        return self._sql

    @property
    def lease_ms(self) -> int:
        """How long a lease lasts that is taken now."""
        period = overrides.lease_period(self.queue, self.alias)
        return FOREVER_MS if period is None else int(period / timedelta(milliseconds=1))

    def claim(self, limit: int) -> AbstractContextManager[ActiveClaim]:
        """Around a task's claim: says where, and moves the floors past what was claimed."""
        if isinstance(self.claims, Priority64ClaimTracker):
            self.claims.look_for_arrived(self.sql, connections[self.alias])
        claim: AbstractContextManager[ActiveClaim] = self.claims.claim(limit)
        if self._plain:
            return claim
        if self.limiter is not None:
            claim = self.limiter.turn(claim)
        return claim if self.barriers is None else self.barriers.turn(claim)

    def look(self) -> tuple[list[SeqRange], list[SeqRange]]:
        """(ahead, behind): where the next look goes."""
        ahead, behind = self.claims.look()
        if self.limiter is None:
            return ahead, behind
        visible = self.limiter.visible(ahead, behind)
        if behind and not visible[1]:
            self.claims.skip()
        return visible

    def look_behind(self) -> None:
        """Before a look, what that does not do itself: where priorities have 64 bits late commits and what came back; barriers."""
        if isinstance(self.claims, Priority64ClaimTracker):
            self.claims.look_behind(self.sql, connections[self.alias])
        if self.barriers is not None:
            self.barriers.look()

    def claimed(self, rows: Sequence[Claimed], full: bool) -> None:
        """A task claimed these rows and is about to handle them, which may take long: if there may be more, this is where
        another task is asked for."""
        self.stats.received += len(rows)
        self.breaker.success()
        if self.limiter is not None:
            self.limiter.claimed(rows)
        if full:
            self._more()

    # -- endings --------------------------------------------------------------------------------------------------

    def succeeded(self, count: int) -> None:
        """Messages were handled and ended well."""
        self.stats.handled += count
        if self._consecutive_failures:
            if self.throttled:
                log.warning("%s: a handler succeeded; receiving at full speed again.", self.label)
            self._consecutive_failures = 0

    def failed(self) -> None:
        """An attempt failed; if many did in a row, wait before the next one."""
        self.stats.failed += 1
        if not self.throttled:
            self._throttled_at = monotonic()
        self._consecutive_failures += 1
        if self.throttled:
            if self._consecutive_failures == settings.THROTTLE_AFTER:
                log.warning(
                    "%s: %d attempts failed in a row; one task, with %s between attempts, until one succeeds.",
                    self.label, self._consecutive_failures, settings.THROTTLE_WAIT,
                )  # fmt: skip
            self.stopping.wait(settings.THROTTLE_WAIT.total_seconds())

    @property
    def throttled(self) -> bool:
        """Whether an outage of something that the handlers need is assumed."""
        return 0 < settings.THROTTLE_AFTER <= self._consecutive_failures

    @property
    def is_degraded(self) -> bool:
        """Whether claims or endings fail, or an outage is assumed: one task feels its way."""
        return bool(self.breaker.failures) or self.throttled

    def feels_its_way(self, handling_since: float) -> bool:
        """Whether a task does so that has been in a handler since then. Nothing is learnt of the database by who is in a handler, nor
        of an outage by one that began before it: either may last an hour."""
        return self.throttled and handling_since >= self._throttled_at

    def messages_returned(self, seqs: Sequence[int]) -> None:
        """These messages were given back unhandled by this process: somebody is to take them."""
        self.stats.returned += len(seqs)
        if self.limiter is not None:
            self.limiter.came_back(seqs)
        self.claims.lower_all(seqs)
        self._again()

    def _place_is_free(self, passed_over: bool) -> None:
        """Of a consumer whose messages were left where they are because none was."""
        if passed_over:
            self.claims.floors.retreat(MAX_SEQ)  # lowers none: what lies just behind them is looked at again
        self._again()

    def rolled_back(self, rows: Sequence[Claimed], unknown: Sequence[int] = ()) -> None:
        """A claim was rolled back with all of its rows, of which nobody here takes the ``unknown``."""
        seqs = [row[SEQ] for row in rows]
        if isinstance(self.claims, Priority64ClaimTracker):
            # Each has a place of its own; the others are not to be claimed again.
            seqs = [seq for seq in seqs if seq not in set(unknown)]
        if seqs:
            self.claims.lower_all(seqs)
        self._again()

    def retried(self, seq: int) -> None:
        """A message is to be received again in its place."""
        self.claims.lower(seq)
        self._again()

    def copied(self) -> None:
        """Copies were made for several consumers, of which others may have some."""
        notifier.sent(self.queue, connections[self.alias])
        self._again()
        if self.at_limit:
            self.made_room()

    def made_room(self) -> None:
        """Messages of a queue that was at its limit have ended: whoever waits for room is told, throttled."""
        self.at_limit = False
        if monotonic() - self._told_room_at >= settings.NOTIFY_INTERVAL.total_seconds():
            self._told_room_at = monotonic()
            notifier.sent(self.queue, connections[self.alias])

    # -- trouble --------------------------------------------------------------------------------------------------

    def tell_changed(self, consumer: str, statement: str) -> None:
        """A handler has changed its session for good, which costs a new one after each of its messages: once per consumer."""
        if consumer not in self._changing:
            self._changing.add(consumer)
            log.warning(
                "%s: %s changes its database session for good (%s). The next message is not to feel it, so the session is "
                "replaced each time, which takes milliseconds: change it for a transaction alone (SET LOCAL).",
                self.label, consumer, " ".join(statement.split()) or "in a function, or on the driver's connection",
            )  # fmt: skip

    def retry_after(self, error: BaseException, breaker: circuit_breaker.CircuitBreaker, connection: Any) -> bool:
        """Deal with a database error: reconnect, wait as the breaker says. False: stopping, or it is not the database's."""
        kind = backend_of(connection).error_kind(error)
        if kind is ErrorKind.DEADLOCK:
            self.stopping.wait(random.uniform(0, 0.02))
            return True
        if not connection.in_atomic_block:
            connection.close()
            close_isolated(self.alias)
        wait = breaker.failure(error)
        if self.stopping.is_set():
            # On the way out there is no time for the breaker's waits: two quick tries, then let the lease lapse.
            return breaker.failures < 3
        self.stopping.wait(wait * random.uniform(0.8, 1.2))
        return True

    @property
    def store_breaker(self) -> circuit_breaker.CircuitBreaker:
        """The one of the table that delayed retries go to, shared with every ``send(delay=)`` of this process."""
        return delayed.store_breaker(self.alias)

    def degraded(self) -> list[BreakerReport]:
        """Which breakers are not disarmed, and the throttle."""
        all_of_them = [*self.breakers, *delayed.store_breakers(self.alias)]
        told = [trouble for one in all_of_them if (trouble := one.report()) is not None]
        if self.throttled:
            why = f"{self._consecutive_failures} failures in a row"
            told.append(
                BreakerReport(breaker="handlers", name=f"Handlers of {self.label}", state="throttled", error=why)
            )
        return told

    def degraded_text(self) -> str:
        """``troubles`` in words; '' when all is well."""
        return "; ".join(f"{one['name']}: {one['state']} after {one['error']}" for one in self.degraded())[:2000]


def is_error_of(connection: Any, error: BaseException, kind: ErrorKind) -> bool:
    """Whether this is a database error of that kind."""
    return isinstance(error, Error) and backend_of(connection).error_kind(error) is kind
