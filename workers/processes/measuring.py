"""What a process of a tree counts for Prometheus, with ``prometheus-client`` in its mode for several processes: the values are
in files of a directory of the tree, so nothing of them is lost when a process is killed, and what handlers measure with
the same library is there as well.

Imported where it is wanted and nowhere else.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from queueapp import signals
from queueapp.circuit_breaker import Breaker, BreakerReport, State
from queueapp.consuming.registration import Registration
from queueapp.services.delayed_dispatcher import DelayedDispatcher

from ..receiving import handlers
from ..receiving.pump import QueuePump

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

HANDLER_SECONDS = Histogram(
    "queueapp_handler_seconds",
    "How long a call of a handler took, well or not.",
    ["queue", "consumer"],
    buckets=BUCKETS,
)
HANDLED = Counter("queueapp_handled", "Calls of a handler that returned.", ["queue", "consumer"])
FAILED = Counter(
    "queueapp_failed",
    "Failed attempts, by what was decided: retry, delay, poison, discard.",
    ["queue", "consumer", "verdict"],
)
RECEIVED = Counter("queueapp_received", "Messages that were claimed.", ["queue"])
ACKED = Counter("queueapp_acked", "Messages that were handled and removed from their queue.", ["queue"])
LOST = Counter("queueapp_leases_lost", "Leases that were over before what they were for had ended.", ["queue"])
TASKS = Gauge("queueapp_tasks", "Receive tasks that there may be at once.", ["queue"], multiprocess_mode="livesum")
WORKING = Gauge("queueapp_tasks_working", "Receive tasks at work.", ["queue"], multiprocess_mode="livesum")
BREAKER = Gauge(
    "queueapp_breaker_state", "0: closed, 1: failing or throttled, 2: open; the worst of the processes.",
    ["breaker", "queue", "database"],
    multiprocess_mode="livemax",
)  # fmt: skip
DISPATCHED = Counter("queueapp_dispatched", "Delayed messages that were moved to their queues.", ["database"])

VERDICTS = {
    "retry": signals.retry,
    "delay": signals.delayed_retry,
    "poison": signals.poisoned,
    "discard": signals.discarded,
}


def measured(registration: Registration, call: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """The same handler, its calls counted."""
    labels = registration.queue._meta.label, registration.name
    handled, observe = HANDLED.labels(*labels).inc, HANDLER_SECONDS.labels(*labels).observe

    several = registration.takes_several

    def timed(message: Any, context: Any) -> None:
        started = perf_counter()
        try:
            call(message, context)
        finally:
            observe(perf_counter() - started)
        handled(len(context) - len(context.failures) if several else 1)

    return timed


def labels_of(failure: Any, verdict: str) -> tuple[str, str, str]:
    """The labels of a failed attempt."""
    queue = failure.queue._meta.label if failure.queue is not None else ""
    return queue, failure.consumer.name if failure.consumer is not None else "", verdict


def _count_failed(verdict: str) -> Callable[..., None]:
    def told(failure: Any, **_: Any) -> None:
        FAILED.labels(*labels_of(failure, verdict)).inc()

    return told


class Measuring:
    """Counts what happens in this process; ``tell`` is called from time to time for what is counted elsewhere."""

    def __init__(
        self,
        pumps: Sequence[QueuePump] = (),
        breakers: Iterable[Breaker] = (),
        movers: Sequence[DelayedDispatcher] = (),
    ) -> None:
        self._pumps, self._breakers, self._movers = pumps, tuple(breakers), movers
        self._before: Counts[tuple[Any, ...]] = Counts()
        #: The labels of breakers that were reported once: they are set to 0 when they are gone.
        self._known: set[tuple[str, str, str]] = set()

    @staticmethod
    def install() -> None:
        """Before handlers are looked up."""
        if measured not in handlers.handler_wrappers:
            handlers.handler_wrappers.append(measured)
        for verdict, signal in VERDICTS.items():
            signal.connect(_count_failed(verdict), weak=False, dispatch_uid=f"queueapp.measuring.{verdict}")

    @staticmethod
    def uninstall() -> None:
        """For a process that goes on (a test run)."""
        handlers.handler_wrappers[:] = [one for one in handlers.handler_wrappers if one is not measured]
        for verdict, signal in VERDICTS.items():
            signal.disconnect(dispatch_uid=f"queueapp.measuring.{verdict}")

    def tell(self) -> None:
        """What the pumps, breakers and dispatchers have counted since the last time."""
        states: dict[tuple[str, str, str], int] = {}
        for pump in self._pumps:
            label = pump.queue._meta.label
            for counter, value in (
                (RECEIVED, pump.stats.received), (ACKED, pump.stats.handled), (LOST, pump.stats.lost)
            ):  # fmt: skip
                self._add(counter, label, value)
            TASKS.labels(label).set(pump.pool.concurrency)
            WORKING.labels(label).set(pump.pool.busy)
            states |= {(breaker.kind, label, ""): 0 for breaker in pump.health.breakers}
            states |= {(report["breaker"], label, ""): _severity(report) for report in pump.health.degraded()}
        for breaker in self._breakers:
            states[breaker.kind, "", breaker.subject] = _severity(breaker.report())
        for labels in self._known - states.keys():
            BREAKER.labels(*labels).set(0)
        self._known |= states.keys()
        for labels, severity in states.items():
            BREAKER.labels(*labels).set(severity)
        for mover in self._movers:
            self._add(DISPATCHED, mover.alias, mover.dispatched, mover)

    def _add(self, counter: Counter, label: str, value: int, *of: Any) -> None:
        key = (counter, label, *of)
        counter.labels(label).inc(max(0, value - self._before[key]))
        self._before[key] = value


def _severity(report: BreakerReport | None) -> int:
    if report is None:
        return 0
    return 2 if report["state"] == State.OPEN.value else 1
