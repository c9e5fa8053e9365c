"""What all processes of a tree have counted, of those that are gone as well: the supervisor's side of ``measuring``."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import threading
from collections import Counter as Counts
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from queueapp import signals

log = logging.getLogger("queueapp.workers")

PREFIX = "queueapp-metrics-"
#: Whoever has it locked lives.
LOCK = "lock"
#: Where the counts of processes that are gone are added up.
GONE = "gone"

_VERDICTS = {
    "retry": signals.retry,
    "delay": signals.delayed_retry,
    "poison": signals.poisoned,
    "discard": signals.discarded,
}


class Measured(Collector):
    """The directory of a tree, and a registry's source of all that is in it."""

    def __init__(self) -> None:
        _sweep()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._locked = (self.path / LOCK).open("w")
        fcntl.flock(self._locked, fcntl.LOCK_EX)
        self._lock = threading.Lock()
        #: Attempts that ended with their process: counted here, by the supervisor.
        self._failed: Counts[tuple[str, str, str]] = Counts()
        self.restarts = 0
        for verdict, signal in _VERDICTS.items():
            signal.connect(self._count_failed(verdict), weak=False, dispatch_uid=f"queueapp.measured.{verdict}")

    @property
    def environment(self) -> dict[str, str]:
        """What a child is started with: its own library decides by it, when it is imported."""
        return {"PROMETHEUS_MULTIPROC_DIR": str(self.path)}

    def describe(self) -> Iterable[Metric]:
        """Nothing: it is known when it is there."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """One metric after the other."""
        with self._lock:
            try:
                found = list(MultiProcessCollector(None, str(self.path)).collect())
            except Exception as error:  # a file that has just been made, and is empty
                log.info("The metrics of the processes cannot be read now: %s", error)
                return
            failed = dict(self._failed)
        if failed:
            family = next((one for one in found if one.name == "queueapp_failed"), None)
            if family is None:
                family = CounterMetricFamily("queueapp_failed", "Failed attempts, by what was decided.")
                found.append(family)
            _add(family, failed)
        restarts = CounterMetricFamily(
            "queueapp_process_restarts", "Processes of the tree that died and were replaced."
        )
        restarts.add_metric([], self.restarts)
        yield from (*found, restarts)

    def died(self, process: int) -> None:
        """Add up what a process has counted: a tree whose processes die all the time is not to fill its disk."""
        with self._lock:
            for path in [*self.path.glob(f"*_{process}.db")]:
                kind = path.name.split("_")[0]
                if kind == "gauge":
                    continue
                try:
                    _merge(path, self.path / f"{kind}_{GONE}.db")
                except Exception as error:
                    log.warning("What a process that died has counted cannot be read: %s", error)
                path.unlink(missing_ok=True)
            mark_process_dead(process, str(self.path))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Remove the directory."""
        for verdict, signal in _VERDICTS.items():
            signal.disconnect(dispatch_uid=f"queueapp.measured.{verdict}")
        shutil.rmtree(self.path, ignore_errors=True)
        self._locked.close()

    def _count_failed(self, verdict: str) -> Any:
        def told(failure: Any, **_: Any) -> None:
            queue = failure.queue._meta.label if failure.queue is not None else ""
            consumer = failure.consumer.name if failure.consumer is not None else ""
            with self._lock:
                self._failed[queue, consumer, verdict] += 1

        return told


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
    """Remove the directories of trees that were killed: nobody has them locked."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if path.stat().st_uid != os.getuid():
                continue
            with (path / LOCK).open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
