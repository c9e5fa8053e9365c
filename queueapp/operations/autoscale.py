"""The desired number of workers of a queue, for autoscalers, from its backlog and the age of its oldest message.

    need    = (waiting + leased) / per_worker, rounded up
    lag     = workers * min(oldest / late, 2), rounded up, if the oldest message is older than ``late``; else 0
    desired = max(need, lag), bounded by ``min_workers`` and ``max_workers``

``need`` follows the backlog at once. ``lag`` is for handlers slower than ``per_worker`` assumes: while messages are
late it asks for more workers than there are, at most twice as many at each evaluation. A worker is a worker process.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from math import ceil
from typing import Any

from django.db import connections, router

from ..errors import InvalidOption
from ..models import Subscriber
from ..sql import queue_sql
from ..sql.figures import WorkersWanted
from . import statistics

#: Rows that the statement of ``statement_for`` reads at most.
MAX_ROWS = 10_000_000
MAX_LATE_SECONDS = 31_536_000


@dataclass(frozen=True)
class ScalingRule:
    """The parameters of the formula. Raises InvalidOption."""

    per_worker: int = 1000
    late: timedelta | None = None
    min_workers: int = 0
    max_workers: int = 10

    def __post_init__(self) -> None:
        if not _is_whole(self.per_worker, 1, 1_000_000):
            raise InvalidOption("per-worker", self.per_worker, "a whole number from 1 to 1000000")
        if self.late is not None and not isinstance(self.late, timedelta):
            raise InvalidOption("late", self.late, "a timedelta")
        if self.late is not None and not timedelta(seconds=1) <= self.late <= timedelta(seconds=MAX_LATE_SECONDS):
            raise InvalidOption("late", self.late.total_seconds(), "a number of seconds from 1 to 31536000")
        if not (_is_whole(self.max_workers, 1, 1000) and _is_whole(self.min_workers, 0, self.max_workers)):
            raise InvalidOption(
                "min, max",
                (self.min_workers, self.max_workers),
                "whole numbers from 0 to 1000, min not above max, and max not 0",
            )
        rows = self.per_worker * self.max_workers
        if rows > MAX_ROWS:
            raise InvalidOption("per-worker * max", rows, f"at most {MAX_ROWS}, the number of rows that are read")


def _is_whole(given: Any, low: int, high: int) -> bool:
    return type(given) is int and low <= given <= high


@dataclass
class DesiredWorkers:
    """The result for one queue. ``desired`` None: unknown, and ``error`` says why."""

    queue: str
    waiting: int | None
    leased: int | None
    oldest_seconds: float | None
    workers: int | None
    desired: int | None
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def desired(backlog: int, oldest_seconds: float | None, workers: int, rule: ScalingRule) -> int:
    """The formula."""
    need, lag = ceil(backlog / rule.per_worker), 0
    if rule.late is not None and oldest_seconds is not None and oldest_seconds > rule.late.total_seconds():
        lag = ceil(workers * min(oldest_seconds / rule.late.total_seconds(), 2))
    return max(rule.min_workers, min(rule.max_workers, max(need, lag)))


def desired_workers(queues: Iterable[Any], rule: ScalingRule = ScalingRule()) -> list[DesiredWorkers]:
    """The desired workers of these queues."""
    return [desired_workers_for(stats, rule) for stats in statistics.backlogs(queues)]


def desired_workers_for(stats: statistics.QueueStats, rule: ScalingRule = ScalingRule()) -> DesiredWorkers:
    """The same for statistics that were read already."""
    count = None
    if stats.waiting is not None and stats.leased is not None and stats.workers is not None:
        count = desired(stats.waiting + stats.leased, stats.oldest_seconds, stats.workers, rule)
    return DesiredWorkers(
        stats.queue, stats.waiting, stats.leased, stats.oldest_seconds, stats.workers, count, stats.error
    )


def statement_for(queue: Any, rule: ScalingRule = ScalingRule()) -> str:
    """The same as one SELECT of one number, for autoscalers that query the database themselves."""
    connection = connections[router.db_for_read(queue) or "default"]
    late = None if rule.late is None else int(rule.late / timedelta(milliseconds=1))
    subscribers, label = Subscriber._meta.db_table, queue._meta.label
    asked = WorkersWanted(rule.per_worker, late, rule.min_workers, rule.max_workers, subscribers, label)
    return queue_sql(queue, connection).figures.workers_wanted(asked)
