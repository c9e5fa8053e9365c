"""Circuit breakers: repeated database failures slow a loop down instead of killing or flooding.

States: **disarmed** -> first failure -> **armed** (a failure waits 1 s) -> failing for the breaker's time ->
**triggered** (a failure waits 10 s, one task at a time) -> first success -> disarmed. Deadlocks and serialization
failures are not failures here. What no retry mends (``remedies``: a missing right) triggers at once. Each change of state is
logged once; the failures in between are not. What somebody else
has said already (``told_elsewhere``: a database that does not answer at all) is only noted.

Who cannot wait, a web process for one, feeds a breaker all the same and leaves out the waits: it is in the log, and its
state can be seen.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Protocol, TypedDict

#: Asked whether an error is in the log already.
told_elsewhere: list[Callable[[BaseException], bool]] = []
#: Asked what would mend an error that no retry mends; None: a retry may.
remedies: list[Callable[[BaseException], str | None]] = []


class State(enum.Enum):
    DISARMED = "disarmed"
    ARMED = "armed"
    TRIGGERED = "triggered"


class Trouble(TypedDict):
    """A breaker that is not disarmed, or what else slows a process down, as it is told to operators."""

    name: str
    state: str
    error: str


class Breaker(Protocol):
    """What can be in trouble."""

    def trouble(self) -> Trouble | None:
        """What is the matter; None: nothing."""


class CircuitBreaker:
    """One breaker, fed by ``success`` and ``failure``; shared by threads."""

    log = logging.getLogger("queueapp")

    def __init__(
        self,
        name: str,
        time_to_trigger: timedelta = timedelta(seconds=30),
        armed_wait: timedelta = timedelta(seconds=1),
        triggered_wait: timedelta = timedelta(seconds=10),
    ) -> None:
        self.name = name
        self._time_to_trigger = time_to_trigger.total_seconds()
        self._waits = {State.ARMED: armed_wait.total_seconds(), State.TRIGGERED: triggered_wait.total_seconds()}
        self._lock = threading.Lock()
        self._first_failure: float | None = None
        self._state = State.DISARMED
        self.failures = 0
        self.last_error = ""
        #: This time it has failed for a reason of its own.
        self._loud = False
        #: The error that was asked about last, and what would mend it: every task of a queue fails for one and the same.
        self._asked: tuple[str, str | None] = ("", None)

    @property
    def state(self) -> State:
        """The present state."""
        return self._state

    def success(self) -> None:
        """Something worked: disarm."""
        if self._first_failure is None:  # the hot path: no lock
            return
        with self._lock:
            if self._first_failure is None:
                return
            seconds = monotonic() - self._first_failure
            self._first_failure = None
            self._state = State.DISARMED
            failures, self.failures = self.failures, 0
            level = logging.WARNING if self._loud else logging.INFO
            self._loud = False
            self._asked = ("", None)
        self.log.log(level, "%s works again after %d failures in %.1f s.", self.name, failures, seconds)

    def trouble(self) -> Trouble | None:
        """What is the matter; None: nothing."""
        state = self._state
        return None if state is State.DISARMED else Trouble(name=self.name, state=state.value, error=self.last_error)

    def failure(self, error: BaseException) -> float:
        """Something failed; returns how many seconds the caller should wait before it tries again."""
        known = any(tells(error) for tells in told_elsewhere)
        words = f"{type(error).__name__}: {error}".strip().split("\n", 1)[0]
        asked, remedy = self._asked
        if words != asked:
            remedy = next((mends for ask in remedies if (mends := ask(error)) is not None), None)
        with self._lock:
            now = monotonic()
            self.failures += 1
            self._asked = words, remedy
            self.last_error = words
            if remedy is not None:
                self.last_error += f" -- to mend it: {remedy}"
            armed = self._first_failure is None or not (known or self._loud)
            self._loud = self._loud or not known
            if self._first_failure is None:
                self._first_failure = now
                self._state = State.ARMED
            over = remedy is not None or now - self._first_failure >= self._time_to_trigger
            triggered = self._state is State.ARMED and over
            if triggered:
                self._state = State.TRIGGERED
            wait = self._waits[self._state]
        if triggered and remedy is not None:
            self.log.critical("%s is refused, which no retry mends: %s", self.name, self.last_error)
            return wait
        if armed:
            level = logging.INFO if known else logging.WARNING
            self.log.log(level, "%s failed, trying again: %s", self.name, self.last_error)
        if triggered:
            level = logging.INFO if known else logging.CRITICAL
            self.log.log(level, "%s keeps failing for %.0f s, slowing down: %s",
                    self.name, self._time_to_trigger, self.last_error)  # fmt: skip
        return wait
