"""The forwarder: moves due messages from the delayed store of one database to queues of another.

It is a dispatcher for one pair of databases, with its own thread, connections and breakers, so that a target that is
down or hangs delays no messages for other targets. It runs only where a queue's ``Delivery.delayed_in`` asks for it.
"""

from __future__ import annotations

import math
import uuid
import zlib
from datetime import timedelta
from time import monotonic

from django.db import connections

from .. import delayed
from ..circuit_breaker import CircuitBreaker, RateBreaker
from ..sql import ErrorKind, backend_of
from .connection_timeouts import ResponseDeadline
from .delayed_dispatcher import DelayedDispatcher

#: Seconds between two deletions of old arrival records, and for how long after the last arrival there may be some.
SWEEP_INTERVAL = 60.0
SWEEP_PERIOD = delayed.KEPT.total_seconds() + 2 * SWEEP_INTERVAL


class Forwarder(DelayedDispatcher):
    """Forwards from ``alias`` to ``target``. ``wake`` it when a message was stored in ``alias``."""

    def __init__(self, alias: str, target: str, holder: uuid.UUID) -> None:
        self.target = target
        super().__init__(alias, uuid.uuid5(holder, target))
        self._sweep_at = self._sweep_until = 0.0
        self._term = 0

    def _scope(self) -> tuple[str, str]:
        # The role depends on the queues that it moves for: a version that knows more queues elects a leader of its own,
        # or their messages would wait until this one ends.
        known = self.target, sorted(delayed.addresses(self.alias).get(self.target, ()))
        return f"{self.alias} for {self.target}", f" {zlib.crc32(repr(known).encode()):08x}"

    def _round(self) -> float:
        wait = super()._round()
        # After the round, whose own failures come first.
        if self.elector.is_leader and self._sweep_at <= monotonic() < self._sweep_until:
            self._sweep_at = monotonic() + SWEEP_INTERVAL
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

    def _next_due_in(self) -> timedelta | None:
        return delayed.next_forward_in(self.alias, self.target)

    def _failed(self, error: BaseException, breaker: CircuitBreaker | RateBreaker) -> float:
        connection = connections[self.target]
        if backend_of(connection).error_kind(error) is ErrorKind.DEADLOCK:
            return 0.01
        if breaker is self.dispatch_breaker:
            connection.close()
            return breaker.failure(error)
        return super()._failed(error, breaker)
