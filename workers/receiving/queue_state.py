"""What the receivers of one queue share in one process: where they claim, its statements, its health, which messages
they skip, and what is counted.

``QueueHealth`` has the circuit breakers and the throttle:

    full speed  --``THROTTLE_AFTER`` failures in a row--> throttled: one receiver, ``THROTTLE_WAIT`` after each failure
    throttled   --a handler succeeds--> full speed
    full speed  --a claim or an ack fails--> degraded: one receiver probes the database --it is answered--> full speed

The pump makes one ``QueueState`` and gives it to its receivers. It starts nothing, and waits for nothing but a breaker
or the throttle. What it reports goes to the pump by ``ReceiverEvents``.

``SkippedMessages`` are those of a type without a consumer here, or that the filter of this process does not match. They
stay in the queue for other workers. Claims skip them (``claim_tracker.SkipRanges``), and they are read again from time
to time.
"""

from __future__ import annotations

import logging
import random
import threading
import uuid
from collections import deque
from collections.abc import Sequence
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
from queueapp.flow.rate_limit import rate_limit_of
from queueapp.messages import new_id
from queueapp.models.delivery import Semantics
from queueapp.receiving.low_water_marks import DUTY_CYCLE, LowWaterMarks, Priority64Marks
from queueapp.sending.isolation import close_isolated
from queueapp.services.connection_timeouts import ResponseDeadline
from queueapp.sql import ErrorKind, QueueSql, backend_of, queue_sql
from queueapp.sql.claims import FOREVER_MS, HEADERS, SEQ, Claimed, SeqRange
from queueapp.telemetry import tracing

from .claim_tracker import ActiveClaim, BarrierGate, ClaimTracker, Priority64ClaimTracker
from .events import ReceiverEvents
from .handlers import HANDLERS_AT_ONCE, HandlerGate, HandlerTable
from .quarantine import BatchLimit, Quarantine

log = logging.getLogger("queueapp.workers")


class Stats:
    """Counters of one pump, for display. Several threads write them without a lock: no decision depends on them."""

    __slots__ = ("empty", "failed", "handled", "lost", "peeks", "received", "returned", "skipped")

    def __init__(self) -> None:
        self.received = self.handled = self.failed = self.empty = self.lost = 0
        self.returned = self.skipped = self.peeks = 0


class QueueHealth:
    """Circuit breakers, the throttle, and the counts of successes and failures."""

    def __init__(self, label: str, alias: str, stopping: threading.Event) -> None:
        self._label, self._alias, self._stopping = label, alias, stopping
        self.stats = Stats()
        #: Seconds of the last handler calls.
        self.durations: deque[float] = deque(maxlen=500)
        open_after = settings.TIME_TO_TRIGGER_RECEIVE_CIRCUIT_BREAKER
        self.peek_breaker = CircuitBreaker(f"Peek of {label}", open_after, kind="peek", subject=label)
        self.breaker = CircuitBreaker(f"Receive from {label}", open_after, kind="receive", subject=label)
        #: All breakers of this queue in this process; services add their own.
        self.breakers: list[Breaker] = [self.peek_breaker, self.breaker]
        self._failures_in_a_row, self._throttled_at = 0, 0.0
        #: Consumers whose change of the session is logged.
        self._session_changers: set[str] = set()

    def succeeded(self, count: int) -> None:
        """So many messages were handled and acked."""
        self.stats.handled += count
        if self._failures_in_a_row:
            if self.throttled:
                log.warning(
                    "%s: a handler succeeded; receiving at full speed again.", self._label, extra={"queue": self._label}
                )
            self._failures_in_a_row = 0

    def failed(self) -> None:
        """An attempt failed. After many in a row, wait before the next one."""
        self.stats.failed += 1
        if not self.throttled:
            self._throttled_at = monotonic()
        self._failures_in_a_row += 1
        if self.throttled:
            if self._failures_in_a_row == settings.THROTTLE_AFTER:
                log.warning(
                    "%s: %d attempts failed in a row; one receiver, with %s between attempts, until one succeeds.",
                    self._label, self._failures_in_a_row, settings.THROTTLE_WAIT,
                    extra={"queue": self._label, "failures": self._failures_in_a_row},
                )  # fmt: skip
            self._stopping.wait(settings.THROTTLE_WAIT.total_seconds())

    @property
    def throttled(self) -> bool:
        """Whether an outage of something that the handlers need is assumed."""
        return 0 < settings.THROTTLE_AFTER <= self._failures_in_a_row

    @property
    def is_degraded(self) -> bool:
        """Whether claims or acks fail, or an outage is assumed: one receiver probes."""
        return bool(self.breaker.failures) or self.throttled

    def is_probing(self, handling_since: float) -> bool:
        """Whether a receiver probes that has been in a handler since then. A handler says nothing of the database, and
        one that began before an outage says nothing of the outage: either may last an hour."""
        return self.throttled and handling_since >= self._throttled_at

    def warn_session_changed(self, consumer: str, statement: str) -> None:
        """A handler has changed its session for good, which costs a new one after each of its messages. Logged once per
        consumer."""
        if consumer not in self._session_changers:
            self._session_changers.add(consumer)
            log.warning(
                "%s: %s changes its database session permanently (%s). The session is replaced after each message, so "
                "that the next message does not inherit the change; that takes milliseconds. Change it for one "
                "transaction only (SET LOCAL).",
                self._label, consumer, " ".join(statement.split()) or "in a function, or on the driver's connection",
                extra={"queue": self._label, "consumer": consumer},
            )  # fmt: skip

    def retry_after(self, error: BaseException, breaker: circuit_breaker.CircuitBreaker, connection: Any) -> bool:
        """After a database error: close the connection and wait as long as the breaker says. Return whether to try
        again; False only when the process stops."""
        kind = backend_of(connection).error_kind(error)
        if kind is ErrorKind.DEADLOCK:
            self._stopping.wait(random.uniform(0, 0.02))
            return True
        if not connection.in_atomic_block:
            connection.close()
            close_isolated(self._alias)
        wait = breaker.failure(error)
        if self._stopping.is_set():
            # A stopping process has no time for the breaker's waits: two quick tries, then the lease expires.
            return breaker.failures < 3
        self._stopping.wait(wait * random.uniform(0.8, 1.2))
        return True

    @property
    def store_breaker(self) -> circuit_breaker.CircuitBreaker:
        """The breaker of the table of delayed retries, shared with every ``send(delay=)`` of this process."""
        return delayed.store_breaker(self._alias)

    def degraded(self) -> list[BreakerReport]:
        """The breakers that are not closed, and the throttle."""
        breakers = [*self.breakers, *delayed.store_breakers(self._alias)]
        reports = [report for breaker in breakers if (report := breaker.report()) is not None]
        if self.throttled:
            error = f"{self._failures_in_a_row} failures in a row"
            reports.append(
                BreakerReport(breaker="handlers", name=f"Handlers of {self._label}", state="throttled", error=error)
            )
        return reports

    def degraded_text(self) -> str:
        """``degraded`` as text; '' when all breakers are closed."""
        return "; ".join(f"{report['name']}: {report['state']} after {report['error']}" for report in self.degraded())[
            :2000
        ]


class QueueState:
    """One per pump."""

    def __init__(
        self,
        queue: Any,
        alias: str,
        events: ReceiverEvents,
        *,
        handlers: HandlerTable,
        marks: LowWaterMarks,
        quarantine: Quarantine,
        filter: SubscriberFilter | None = None,
        health: QueueHealth | None = None,
    ) -> None:
        self.queue = queue
        self.alias = alias
        self.label: str = queue._meta.label
        self.events = events
        self.stopping = events.stopping
        self._sql = tracing.statements(queue, queue_sql(queue, connections[alias]))
        self._overrides_version = overrides.version
        self.subscriber: uuid.UUID = new_id()
        self.handlers = handlers
        #: What a message must match; None: this subscriber takes every type that it has a consumer for.
        self.filter = filter
        delivery = queue.delivery
        #: How claims are made where the queue counts what is leased, or shares it out; None: without limit.
        self.limited_claims = LimitedClaims(queue, alias, self._sql) if delivery.counts_leases else None
        #: TRANSACTIONAL with ``max_backlog``: a message is claimed together with a permit of the queue.
        self.needs_permits = delivery.max_backlog is not None and delivery.semantics is Semantics.TRANSACTIONAL
        #: ``Delivery.rate``; None: no limit.
        self.rate = rate_limit_of(queue, alias) if delivery.rate is not None else None
        #: The last claim reached the queue's limit, so that other workers are notified when messages end.
        self.at_limit = False
        self._capacity_notified_at = 0.0
        self.quarantine = quarantine
        self.batch_limit = BatchLimit()
        self.health = health or QueueHealth(self.label, alias, events.stopping)
        self.stats = self.health.stats
        self.claims = Priority64ClaimTracker(marks) if isinstance(marks, Priority64Marks) else ClaimTracker(marks)
        #: Of a queue with barriers; else None.
        self.barriers = BarrierGate(queue, alias, self.subscriber) if self.sql.table.barriers else None
        #: Of a queue whose consumers have a limit; else None.
        self.limiter = handlers.limiter
        if self.limiter is not None:
            self.limiter.events = events
        self._plain = self.barriers is None and self.limiter is None
        #: TRANSACTIONAL: commit each delivery before its handler runs. Set by the heartbeat: on when
        #: the process starts, off in its first round unless a process died lately (see ``CRASH_TRACKING_PERIOD``).
        self.crash_tracking = False
        #: Messages that failed in a transaction with others (``Delivery.transaction_size``): each is to be handled by
        #: itself.
        self.isolated: set[int] = set()
        #: Held by the receiver that waits for more messages (``batch_wait``).
        self.gathering = threading.Lock()
        #: Of quick handlers: each new receiver shares the next one.
        self.handler_gates = cycle([HandlerGate() for _ in range(HANDLERS_AT_ONCE)])
        self.skipped = SkippedMessages(self)

    @property
    def sql(self) -> QueueSql:
        """The statements of the queue, with the options that an operator has set."""
        if self._overrides_version != overrides.version:
            self._overrides_version = overrides.version
            self._sql = tracing.statements(self.queue, queue_sql(self.queue, connections[self.alias]))
            if self.limited_claims is not None:
                self.limited_claims = LimitedClaims(self.queue, self.alias, self._sql)
        return self._sql

    @property
    def lease_ms(self) -> int:
        """How long a lease lasts that is taken now."""
        period = overrides.lease_period(self.queue, self.alias)
        return FOREVER_MS if period is None else int(period / timedelta(milliseconds=1))

    # -- claims and peeks -----------------------------------------------------------------------------------------

    def claim(self, limit: int) -> AbstractContextManager[ActiveClaim]:
        """Around a receiver's claim: says where to claim, and advances the marks past what was claimed."""
        if isinstance(self.claims, Priority64ClaimTracker):
            self.claims.read_new(self.sql, connections[self.alias])
        claim: AbstractContextManager[ActiveClaim] = self.claims.claim(limit)
        if self._plain:
            return claim
        if self.limiter is not None:
            claim = self.limiter.around_claim(claim)
        return claim if self.barriers is None else self.barriers.around_claim(claim)

    def prepare_peek(self) -> None:
        """Before a peek, what the peek itself does not do: with 64-bit priorities, find late commits and returned
        messages; release barriers."""
        if isinstance(self.claims, Priority64ClaimTracker):
            self.claims.rescan(self.sql, connections[self.alias])
        if self.barriers is not None:
            self.barriers.peek()

    def peek_ranges(self) -> tuple[list[SeqRange], list[SeqRange]]:
        """(ahead, behind): the ranges of the next peek."""
        ahead, behind = self.claims.peek_ranges()
        if self.limiter is None:
            return ahead, behind
        visible = self.limiter.visible(ahead, behind)
        if behind and not visible[1]:
            self.claims.skip_window()
        return visible

    def claimed(self, rows: Sequence[Claimed], full: bool) -> None:
        """A receiver claimed these rows and is about to handle them, which may take long: if there may be more, this is
        where another receiver is asked for."""
        self.stats.received += len(rows)
        self.health.breaker.success()
        if self.limiter is not None:
            self.limiter.claimed(rows)
        if full:
            self.events.claim_was_full()

    # -- what became of messages ----------------------------------------------------------------------------------

    def messages_returned(self, seqs: Sequence[int]) -> None:
        """This process released these messages unhandled."""
        self.stats.returned += len(seqs)
        if self.limiter is not None:
            self.limiter.returned(seqs)
        self.claims.retreat_all(seqs)
        self.events.messages_available()

    def rolled_back(self, rows: Sequence[Claimed], skipped: Sequence[int] = ()) -> None:
        """A claim was rolled back with all of its rows; no consumer here takes the ``skipped`` ones."""
        seqs = [row[SEQ] for row in rows]
        if isinstance(self.claims, Priority64ClaimTracker):
            # Each row has an order key of its own; the skipped ones are not to be claimed again.
            seqs = [seq for seq in seqs if seq not in set(skipped)]
        if seqs:
            self.claims.retreat_all(seqs)
        self.events.messages_available()

    def retried(self, seq: int) -> None:
        """A message is to be received again, in its place."""
        self.claims.retreat(seq)
        self.events.messages_available()

    def copies_made(self) -> None:
        """Copies were made for several consumers; other workers may have some of those."""
        notifier.sent(self.queue, connections[self.alias])
        self.events.messages_available()
        if self.at_limit:
            self.capacity_freed()

    def capacity_freed(self) -> None:
        """Messages of a queue at its limit have ended: notify the workers that wait for capacity, throttled."""
        self.at_limit = False
        if monotonic() - self._capacity_notified_at >= settings.NOTIFY_INTERVAL.total_seconds():
            self._capacity_notified_at = monotonic()
            notifier.sent(self.queue, connections[self.alias])


def is_error_of(connection: Any, error: BaseException, kind: ErrorKind) -> bool:
    """Whether this is a database error of that kind."""
    return isinstance(error, Error) and backend_of(connection).error_kind(error) is kind


#: Headers read at once while looking for the end of a range of messages without a consumer here: at first, and at most.
FIRST_SCAN, MAX_SCAN = 50, 5_000
#: At most, where the bodies are read as well.
MAX_FILTERED_SCAN = 1_000
#: Types that are counted one by one.
MAX_TYPES = 1_000


class SkippedMessages:
    """The skipped messages of one queue. ``state`` is its ``QueueState``, which makes it."""

    def __init__(self, state: Any) -> None:
        self._state = state
        #: Types without a consumer here, and how many messages of each were met.
        self.types: dict[str, int] = {}
        #: When skip ranges are read again, by the monotonic clock.
        self.next_reread_at = 0.0
        self._scan_lock, self._types_lock = threading.Lock(), threading.Lock()

    def skip(self, claim: ActiveClaim, rows: Sequence[Claimed], seqs: Sequence[int]) -> None:
        """Of the rows of this claim, these are not for this process: they stay in the queue, and claims skip them. Many
        more may follow them: those are read without being claimed."""
        state, skipped = self._state, set(seqs)
        state.stats.skipped += len(skipped)
        for row in rows:
            if row[SEQ] in skipped and (state.filter is None or not state.handlers.knows(row[HEADERS])):
                self._count_type(row[HEADERS])
        scan_from = state.claims.skip_rows(claim, rows, skipped)
        # One receiver scans on; another that meets some meanwhile waits for it, and not for long.
        if scan_from is not None and self._scan_lock.acquire(timeout=5.0):
            try:
                self._scan(state.claims.rest_of(scan_from))
            finally:
                self._scan_lock.release()

    def skip_unassigned(self, claim: ActiveClaim, rows: Sequence[Claimed]) -> None:
        """No live subscriber's filter matches these, of a queue that shares messages out: the next claim reads behind
        them."""
        self._state.stats.skipped += len(rows)
        self._state.claims.skip_rows(claim, rows, {row[SEQ] for row in rows})

    def reread(self, pieces: int) -> None:
        """Read some of the skip ranges again: a message for this process may have been returned there. For a tenth of
        the time at most: under load there are two hundred peeks a second."""
        state = self._state
        connection = connections[state.alias]
        started = monotonic()
        if started < self.next_reread_at:
            return
        for _ in range(pieces):
            stretch = state.claims.next_reread()
            if stretch is None:
                break
            if state.handlers.copies:
                state.handlers.refresh_subscribers(connection)  # there may be new ones
            heads = self._heads(connection, stretch, MAX_SCAN)
            wanted = [head[0] for head in heads if not self._is_foreign(head, stretch)]
            if wanted:
                for seq in wanted:
                    state.claims.retreat(seq)
                state.events.messages_available()  # the peek that this is a part of has seen nothing of them
            longest = MAX_SCAN if state.filter is None else MAX_FILTERED_SCAN
            state.claims.reread_to(stretch, heads[-1][0] if len(heads) == longest else stretch.high)
        self.next_reread_at = monotonic() + DUTY_CYCLE * (monotonic() - started)

    def _scan(self, stretch: SeqRange) -> None:
        """Read on from the last skipped message until one that is for this process, or the end."""
        state = self._state
        connection = connections[state.alias]
        limit, longest = FIRST_SCAN, MAX_SCAN if state.filter is None else MAX_FILTERED_SCAN
        while not state.stopping.is_set():
            with ResponseDeadline(connection):
                heads = self._heads(connection, stretch, limit)
            skipped = next((n for n, head in enumerate(heads) if not self._count_foreign(head, stretch)), len(heads))
            if skipped:
                state.claims.extend_skipped(stretch, heads[skipped - 1][0])
            if skipped < limit:
                return
            limit = min(limit * 4, longest)
            stretch = stretch._replace(low=heads[-1][0] + 1)

    def _heads(self, connection: Any, stretch: SeqRange, limit: int) -> Sequence[tuple[Any, ...]]:
        """(seq, headers) of what lies there, and the bodies where a filter needs them."""
        claims = self._state.sql.claims
        heads: Sequence[tuple[Any, ...]]
        if self._state.filter is None:
            heads = claims.read_heads(connection, stretch, limit)
        else:
            heads = claims.read_heads_and_bodies(connection, stretch, min(limit, MAX_FILTERED_SCAN))
        return heads

    def _is_foreign(self, head: tuple[Any, ...], stretch: SeqRange) -> bool:
        """Whether it is not for this process. What is to be copied for several consumers is, whatever its filter
        matches."""
        handlers, filter = self._state.handlers, self._state.filter
        if not stretch.recipient and handlers.copies and handlers.copy_recipients(head[1]):
            return False
        if not stretch.recipient and not handlers.knows(head[1]):
            return True
        return filter is not None and not filter.passes(head[1], head[2])

    def _count_foreign(self, head: tuple[Any, ...], stretch: SeqRange) -> bool:
        if not self._is_foreign(head, stretch):
            return False
        if not stretch.recipient and not self._state.handlers.knows(head[1]):
            self._count_type(head[1])
        return True

    def _count_type(self, headers: str) -> None:
        kind = self._state.handlers.type_of(headers)
        with self._types_lock:
            if len(self.types) >= MAX_TYPES and kind not in self.types:
                kind = "(others)"
            count = self.types.get(kind)
            self.types[kind] = (count or 0) + 1
        if count is None:
            log.warning(
                "%s: messages of type %r have no consumer in this process and are left to other workers.",
                self._state.label, kind,
                extra={"queue": self._state.label, "message_type": kind},
            )  # fmt: skip
