"""The forwarder: moves due messages that one database keeps to queues of another one.

A dispatcher like the other, for one pair of databases: on its own thread and with its own connections and breakers, so that
a target that is away, or hangs, keeps no messages for healthy ones waiting. It runs only where a queue's
``Delivery.delayed_in`` asks for it.
"""

from __future__ import annotations

import uuid
import zlib
from datetime import timedelta
from time import monotonic

from django.db import connections

from .. import delayed
from ..circuit_breaker import CircuitBreaker, RateBreaker
from ..sql import ErrorKind, backend_of
from .connection_timeouts import Answering
from .delayed_dispatcher import DelayedDispatcher

#: Seconds between two looks for notes of arrivals that can go, and how long after the last arrival there may be some.
SWEEP = 60.0
SWEPT = delayed.KEPT.total_seconds() + 2 * SWEEP


class Forwarder(DelayedDispatcher):
    """Forwards from ``alias`` to ``target``. ``wake`` it when a message was stored in ``alias``."""

    def __init__(self, alias: str, target: str, holder: uuid.UUID) -> None:
        self.target = target
        super().__init__(alias, uuid.uuid5(holder, target))
        self._sweep_at = self._sweep_until = 0.0
        self._term = 0

    def _place(self) -> tuple[str, str]:
        # By what it is to move: a version that knows of more has a leader of its own, or those would wait for this one's end.
        known = self.target, sorted(delayed.addresses(self.alias).get(self.target, ()))
        return f"{self.alias} for {self.target}", f" {zlib.crc32(repr(known).encode()):08x}"

    def _round(self) -> float:
        wait = super()._round()
        # Behind all that the round has to tell of itself.
        if self.leadership.held and self._sweep_at <= monotonic() < self._sweep_until:
            self._sweep_at = monotonic() + SWEEP
            with delayed.step(delayed.DispatchFailed, self.target), Answering(connections[self.target]):
                delayed.forget_arrivals(self.alias, self.target)
            if not self._refusals:
                self.dispatch_breaker.success()
        return wait

    def _dispatch(self, limit: int) -> delayed.Dispatched:
        self._refusals.clear()
        done = delayed.forward_due(self.alias, self.target, limit, self._refusals.append, Answering)
        if done.moved or self._term != self.leadership.term:
            # A new leader as well: the old one may have been killed, and left some.
            self._term = self.leadership.term
            self._sweep_until = monotonic() + SWEPT
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
