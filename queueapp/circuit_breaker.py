"""Circuit breakers: repeated database failures slow a loop down; they neither end nor flood it.

States: **closed** -> first failure -> **failing** (a failure waits 1 s) -> failing for the breaker's time -> **open**
(a failure waits 10 s) -> first success -> closed. A deadlock or a serialization failure is not a failure here: callers
do not report it. An error that no retry can repair (``remedies``: a missing privilege) opens the breaker at once. Each
change of state is logged once, the failures in between are not. A failure that the log has already
(``already_reported``: the database does not answer at all) is counted and not logged as a warning again.

A caller that cannot wait, such as a web process, reports success and failure too and ignores the returned wait: the log
and ``state`` show its breaker.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Protocol, TypedDict

log = logging.getLogger("queueapp")

#: Predicates: whether the log has this error already.
already_reported: list[Callable[[BaseException], bool]] = []
#: Functions that return the repair of an error that no retry can repair, or None.
remedies: list[Callable[[BaseException], str | None]] = []


class State(enum.Enum):
    CLOSED = "closed"
    FAILING = "failing"
    OPEN = "open"


class BreakerReport(TypedDict):
    """A breaker that is not closed, or another reason why a process works slowly, as operators see it. ``breaker`` is
    the kind, for metrics; ``name`` is for people."""

    breaker: str
    name: str
    state: str
    error: str


class Breaker(Protocol):
    """Anything that reports as a breaker does."""

    kind: str
    subject: str

    def report(self) -> BreakerReport | None:
        """The present state; None while it is closed."""


class CircuitBreaker:
    """One breaker, fed by ``success`` and ``failure``; shared by threads."""

    def __init__(
        self,
        name: str,
        open_after: timedelta = timedelta(seconds=30),
        failing_wait: timedelta = timedelta(seconds=1),
        open_wait: timedelta = timedelta(seconds=10),
        *,
        kind: str = "",
        subject: str = "",
    ) -> None:
        self.name = name
        #: What metrics call it ("peek"), and the label of its queue or the alias of its database.
        self.kind, self.subject = kind or name, subject
        self._open_after = open_after.total_seconds()
        #: Seconds to wait after a failure, by the state that it leads to.
        self.waits = {State.FAILING: failing_wait.total_seconds(), State.OPEN: open_wait.total_seconds()}
        self._lock = threading.Lock()
        self._first_failure: float | None = None
        self._state = State.CLOSED
        self.failures = 0
        self.last_error = ""
        #: Since it was last closed, it has logged a failure as a warning.
        self._has_warned = False
        #: The last error and its remedy. All receivers of a queue fail with the same one, and a remedy may need a
        #: query.
        self._last_remedy: tuple[str, str | None] = ("", None)

    @property
    def state(self) -> State:
        """The present state."""
        return self._state

    def success(self) -> None:
        """An attempt succeeded: close the breaker."""
        if self._first_failure is None:  # the hot path takes no lock
            return
        with self._lock:
            if self._first_failure is None:
                return
            seconds = monotonic() - self._first_failure
            self._first_failure = None
            self._state = State.CLOSED
            failures, self.failures = self.failures, 0
            level = logging.WARNING if self._has_warned else logging.INFO
            self._has_warned = False
            self._last_remedy = ("", None)
        log.log(
            level, "%s works again after %d failure%s in %.1f "
                   "s.", self.name, failures, "s" if failures != 1 else "", seconds,
            extra={"breaker": self.name, "state": State.CLOSED.value},
        )  # fmt: skip

    def report(self) -> BreakerReport | None:
        """The present state; None while the breaker is closed."""
        state = self._state
        if state is State.CLOSED:
            return None
        return BreakerReport(breaker=self.kind, name=self.name, state=state.value, error=self.last_error)

    def failure(self, error: BaseException) -> float:
        """An attempt failed; returns how many seconds the caller should wait before the next one."""
        reported = any(has_reported(error) for has_reported in already_reported)
        words = first_line(error)
        known_error, remedy = self._last_remedy
        if words != known_error:
            remedy = next((found for remedy_of in remedies if (found := remedy_of(error)) is not None), None)
        with self._lock:
            now = monotonic()
            self.failures += 1
            self._last_remedy = words, remedy
            self.last_error = words
            if remedy is not None:
                self.last_error += f" -- remedy: {remedy}"
            starts_failing = self._first_failure is None or not (reported or self._has_warned)
            self._has_warned = self._has_warned or not reported
            if self._first_failure is None:
                self._first_failure = now
                self._state = State.FAILING
            opens = self._state is State.FAILING and (
                remedy is not None or now - self._first_failure >= self._open_after
            )
            if opens:
                self._state = State.OPEN
            wait = self.waits[self._state]
        facts = {"breaker": self.name, "state": self._state.value}
        if opens and remedy is not None:
            log.critical("%s is refused, and no retry repairs that: %s", self.name, self.last_error, extra=facts)
            return wait
        if starts_failing:
            level = logging.INFO if reported else logging.WARNING
            log.log(level, "%s failed; trying again: %s", self.name, self.last_error, extra=facts)
        if opens:
            level = logging.INFO if reported else logging.CRITICAL
            log.log(
                level, "%s has been failing for %.0f s; the breaker is open and attempts slow down: %s",
                self.name, self._open_after, self.last_error, extra=facts,
            )  # fmt: skip
        return wait


class RateBreaker:
    """Opens when more than ``per_second`` x ``WINDOW`` failures fall into one window. Its caller pauses for ``pace``
    seconds after a failure, which is short enough for a steady failure to reach the rate."""

    WINDOW = 30.0

    def __init__(self, name: str, per_second: int, *, kind: str = "", subject: str = "") -> None:
        self.name = name
        self.kind, self.subject = kind or name, subject
        self._limit = per_second * self.WINDOW
        self.pace = max(0.005, 0.1 / per_second)
        self.window_started = monotonic()
        self.failures = 0
        self.last_error = ""
        self.state = State.CLOSED

    def report(self) -> BreakerReport | None:
        """The present state; None while it is closed, and once its window is over."""
        if self.state is State.CLOSED or monotonic() - self.window_started > self.WINDOW:
            return None
        return BreakerReport(breaker=self.kind, name=self.name, state=self.state.value, error=self.last_error)

    def failure(self, error: BaseException) -> float:
        """Count a failure; returns how many seconds the caller should wait: 0, or 10 once the breaker is open."""
        now = monotonic()
        if now - self.window_started > self.WINDOW:
            self.window_started, self.failures = now, 0
            self.state = State.CLOSED
        self.failures += 1
        self.last_error = first_line(error)
        if self.failures > self._limit and self.state is not State.OPEN:
            self.state = State.OPEN
            log.critical(
                "%s: %d failures in %.0f s; the breaker is open and attempts slow down: %s",
                self.name, self.failures, self.WINDOW, self.last_error,
                extra={"breaker": self.name, "state": self.state.value},
            )  # fmt: skip
        elif self.state is State.CLOSED:
            self.state = State.FAILING
        return 10.0 if self.state is State.OPEN else 0.0


def first_line(error: BaseException) -> str:
    """Class and first line of an error."""
    return f"{type(error).__name__}: {error}".strip().split("\n", 1)[0] + pool_hint(error)


def pool_hint(error: BaseException) -> str:
    """Why a pool gave no connection, which is no fault of the database; '' for any other error."""
    if type(error.__cause__ or error).__name__ != "PoolTimeout":
        return ""
    return " (all connections of the pool are in use: OPTIONS['pool'] needs a larger max_size, or remove the pool)"
