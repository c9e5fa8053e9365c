"""The workers' breakers: the circuit breaker of ``queueapp``, under the workers' name in the log, and one that counts.

While a database does not answer at all, that has been said once for the whole process (``outages``): its breakers only
note it.
"""

from __future__ import annotations

import logging
from time import monotonic

from .. import circuit_breaker
from ..circuit_breaker import Breaker, State, Trouble
from ..operations.privileges import remedy_of
from .database_outage import of_an_outage

__all__ = ["Breaker", "CircuitBreaker", "RateBreaker", "State", "Trouble"]

log = logging.getLogger("queueapp.workers")
circuit_breaker.told_elsewhere.append(of_an_outage)
circuit_breaker.remedies.append(remedy_of)


class CircuitBreaker(circuit_breaker.CircuitBreaker):
    """One breaker, fed by ``success`` and ``failure``; shared by threads."""

    log = log


class RateBreaker:
    """Triggers when more than ``per_second`` x ``WINDOW`` failures fall into one window. Who feeds it pauses for ``pace``
    seconds after a failure: so short that a steady failure reaches the rate."""

    WINDOW = 30.0

    def __init__(self, name: str, per_second: int) -> None:
        self.name = name
        self._limit = per_second * self.WINDOW
        self.pace = max(0.005, 0.1 / per_second)
        self._window_started = monotonic()
        self.failures = 0
        self.last_error = ""
        self.state = State.DISARMED

    def trouble(self) -> Trouble | None:
        """What is the matter; None: nothing, or not any more."""
        if self.state is State.DISARMED or monotonic() - self._window_started > self.WINDOW:
            return None
        return Trouble(name=self.name, state=self.state.value, error=self.last_error)

    def failure(self, error: BaseException) -> float:
        """Count one; returns how many seconds the caller should wait: 0, or 10 once it has triggered."""
        now = monotonic()
        if now - self._window_started > self.WINDOW:
            self._window_started, self.failures = now, 0
            self.state = State.DISARMED
        self.failures += 1
        self.last_error = f"{type(error).__name__}: {error}".strip().split("\n", 1)[0]
        if self.failures > self._limit and self.state is not State.TRIGGERED:
            self.state = State.TRIGGERED
            log.critical(
                "%s: %d failures in %.0f s, slowing down: %s", self.name, self.failures, self.WINDOW, self.last_error
            )
        elif self.state is State.DISARMED:
            self.state = State.ARMED
        return 10.0 if self.state is State.TRIGGERED else 0.0
