"""The progress of Spark's jobs, reported while they run by a thread of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_POLL_SECONDS = 0.2

#: Called with the tasks that are done and those that are known so far.
Report = Callable[[int, int], None]


@contextmanager
def reported(spark: SparkSession, group: str, report: Report | None) -> Iterator[None]:
    """Report the progress of this thread's Spark jobs while the block runs. None: they are not reported."""
    spark.sparkContext.setJobGroup(group, group, interruptOnCancel=True)
    if report is None:
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_report, args=(spark, group, report, done), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _report(spark: SparkSession, group: str, report: Report, done: threading.Event) -> None:
    tracker = spark.sparkContext.statusTracker()
    while not done.wait(_POLL_SECONDS):
        infos = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
        stages = [tracker.getStageInfo(stage) for info in infos if info for stage in info.stageIds]
        tasks = sum(stage.numTasks for stage in stages if stage)
        if tasks:
            report(sum(stage.numCompletedTasks for stage in stages if stage), tasks)
