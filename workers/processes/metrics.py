"""What the processes of a tree count for Prometheus.

``prometheus-client`` runs in its multiprocess mode: the values are in files of a directory of the tree, so none is lost
when a process is killed, and what handlers measure with the same library is there as well. ``MetricsRecorder`` is the
side of a worker process, ``MetricsCollector`` the side of the supervisor, which also adds up what processes have
counted that are gone.

Imported only where it is needed: the library is optional.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import threading
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from queueapp import signals
from queueapp.circuit_breaker import Breaker, BreakerReport, State
from queueapp.consuming.registry import Registration
from queueapp.services.delayed_dispatcher import DelayedDispatcher

from ..receiving import handlers
from ..receiving.pump import QueuePump

log = logging.getLogger("queueapp.workers")

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

HANDLER_SECONDS = Histogram(
    "queueapp_handler_seconds",
    "Duration of handler calls.",
    ["queue", "consumer"],
    buckets=BUCKETS,
)
HANDLED = Counter("queueapp_handled", "Calls of a handler that returned.", ["queue", "consumer"])
FAILED = Counter(
    "queueapp_failed",
    "Failed attempts, by verdict: retry, delay, poison, discard.",
    ["queue", "consumer", "verdict"],
)
RECEIVED = Counter("queueapp_received", "Claimed messages.", ["queue"])
ACKED = Counter("queueapp_acked", "Messages that were handled and removed from their queue.", ["queue"])
LOST = Counter("queueapp_leases_lost", "Leases that expired before their message was acked.", ["queue"])
RECEIVERS = Gauge(
    "queueapp_receivers", "Receiver threads: the configured maximum.", ["queue"], multiprocess_mode="livesum"
)
BUSY = Gauge("queueapp_receivers_busy", "Receiver threads that are receiving.", ["queue"], multiprocess_mode="livesum")
BREAKER = Gauge(
    "queueapp_breaker_state", "0: closed, 1: failing or throttled, 2: open; the worst of the processes.",
    ["breaker", "queue", "database"],
    multiprocess_mode="livemax",
)  # fmt: skip
DISPATCHED = Counter("queueapp_dispatched", "Delayed messages that were dispatched to their queues.", ["database"])

VERDICTS = {
    "retry": signals.retry,
    "delay": signals.delayed_retry,
    "poison": signals.poisoned,
    "discard": signals.discarded,
}


def measure_calls(registration: Registration, call: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """The same handler, with its calls counted and timed."""
    labels = registration.queue._meta.label, registration.name
    handled, observe = HANDLED.labels(*labels).inc, HANDLER_SECONDS.labels(*labels).observe

    takes_batch = registration.takes_several

    def timed(message: Any, context: Any) -> None:
        started = perf_counter()
        try:
            call(message, context)
        finally:
            observe(perf_counter() - started)
        handled(len(context) - len(context.failures) if takes_batch else 1)

    return timed


def labels_of(failure: Any, verdict: str) -> tuple[str, str, str]:
    """The labels of a failed attempt."""
    queue = failure.queue._meta.label if failure.queue is not None else ""
    return queue, failure.consumer.name if failure.consumer is not None else "", verdict


def _count_failed(verdict: str) -> Callable[..., None]:
    def count(failure: Any, **_: Any) -> None:
        FAILED.labels(*labels_of(failure, verdict)).inc()

    return count


class MetricsRecorder:
    """Counts in this process; ``update`` is called now and then for what pumps, breakers and dispatchers count."""

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
        """Install the counters; to be called before handlers are looked up."""
        if measure_calls not in handlers.handler_wrappers:
            handlers.handler_wrappers.append(measure_calls)
        for verdict, signal in VERDICTS.items():
            signal.connect(_count_failed(verdict), weak=False, dispatch_uid=f"queueapp.metrics_recorder.{verdict}")

    @staticmethod
    def uninstall() -> None:
        """Remove the counters, in a process that goes on (a test run)."""
        handlers.handler_wrappers[:] = [
            wrapper for wrapper in handlers.handler_wrappers if wrapper is not measure_calls
        ]
        for verdict, signal in VERDICTS.items():
            signal.disconnect(dispatch_uid=f"queueapp.metrics_recorder.{verdict}")

    def update(self) -> None:
        """What the pumps, breakers and dispatchers have counted since the last time."""
        states: dict[tuple[str, str, str], int] = {}
        for pump in self._pumps:
            label = pump.queue._meta.label
            for counter, value in (
                (RECEIVED, pump.stats.received), (ACKED, pump.stats.handled), (LOST, pump.stats.lost)
            ):  # fmt: skip
                self._add(counter, label, value)
            RECEIVERS.labels(label).set(pump.pool.concurrency)
            BUSY.labels(label).set(pump.pool.busy)
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


PREFIX = "queueapp-metrics-"
#: A lock on this file shows that its tree runs.
LOCK = "lock"
#: Files in which the counts of processes that are gone are added up.
GONE = "gone"


class MetricsCollector(Collector):
    """The directory of a tree, as a collector for a registry."""

    def __init__(self) -> None:
        _sweep()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._locked = (self.path / LOCK).open("w")
        fcntl.flock(self._locked, fcntl.LOCK_EX)
        self._lock = threading.Lock()
        #: Attempts that ended with their process: counted here, by the supervisor.
        self._failed: Counts[tuple[str, str, str]] = Counts()
        self.restarts = 0
        for verdict, signal in VERDICTS.items():
            signal.connect(
                self._count_failed(verdict), weak=False, dispatch_uid=f"queueapp.metrics_collector.{verdict}"
            )

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of a child: the library reads them when it is imported."""
        return {"PROMETHEUS_MULTIPROC_DIR": str(self.path)}

    def describe(self) -> Iterable[Metric]:
        """Nothing: the metrics are known only when they are collected."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The metrics of all processes."""
        with self._lock:
            try:
                found = list(MultiProcessCollector(None, str(self.path)).collect())
            except Exception as error:  # a file that was just created and is empty
                log.info("The metrics of the processes cannot be read: %s", error)
                return
            failed = dict(self._failed)
        if failed:
            family = next((metric for metric in found if metric.name == "queueapp_failed"), None)
            if family is None:
                family = CounterMetricFamily("queueapp_failed", "Failed attempts, by verdict.")
                found.append(family)
            _add(family, failed)
        restarts = CounterMetricFamily(
            "queueapp_process_restarts", "Processes of the tree that died and were replaced."
        )
        restarts.add_metric([], self.restarts)
        yield from (*found, restarts)

    def died(self, process: int) -> None:
        """Add up the counts of a process that is gone, so that a tree whose processes die all the time does not fill
        its disk."""
        with self._lock:
            for path in [*self.path.glob(f"*_{process}.db")]:
                kind = path.name.split("_")[0]
                if kind == "gauge":
                    continue
                try:
                    _merge(path, self.path / f"{kind}_{GONE}.db")
                except Exception as error:
                    log.warning("The counts of a dead process cannot be read: %s", error)
                path.unlink(missing_ok=True)
            mark_process_dead(process, str(self.path))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Remove the directory."""
        for verdict, signal in VERDICTS.items():
            signal.disconnect(dispatch_uid=f"queueapp.metrics_collector.{verdict}")
        shutil.rmtree(self.path, ignore_errors=True)
        self._locked.close()

    def _count_failed(self, verdict: str) -> Any:
        def count(failure: Any, **_: Any) -> None:
            with self._lock:
                self._failed[labels_of(failure, verdict)] += 1

        return count


def _add(family: Metric, failed: dict[tuple[str, str, str], int]) -> None:
    """Add the supervisor's counts to those of its children."""
    names = ("queue", "consumer", "verdict")
    for position, sample in enumerate(family.samples):
        labels = sample.labels
        more = failed.pop((labels.get("queue", ""), labels.get("consumer", ""), labels.get("verdict", "")), 0)
        family.samples[position] = sample._replace(value=sample.value + more)
    for key, count in failed.items():
        family.add_sample("queueapp_failed_total", dict(zip(names, key, strict=True)), count)


def _merge(path: Path, into: Path) -> None:
    values = list(MmapedDict.read_all_values_from_file(str(path)))  # type: ignore[no-untyped-call]
    gone = MmapedDict(str(into))  # type: ignore[no-untyped-call]
    try:
        for key, value, timestamp, _ in values:
            gone.write_value(key, gone.read_value(key)[0] + value, timestamp)  # type: ignore[no-untyped-call]
    finally:
        gone.close()  # type: ignore[no-untyped-call]


def _sweep() -> None:
    """Remove the directories of trees that were killed: no process has them locked."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if path.stat().st_uid != os.getuid():
                continue
            with (path / LOCK).open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
