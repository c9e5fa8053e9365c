"""How many workers a queue wants: a figure for autoscalers, from its backlog and the age of its oldest message.

    need   = (waiting + leased) / per_worker, rounded up
    lag    = workers * min(oldest / late, 2), rounded up, if the oldest message waits for longer than ``late``; else 0
    wanted = max(need, lag), from ``least`` to ``most``

``need`` follows the backlog at once. ``lag`` is for handlers that are slower than ``per_worker`` was meant for: while messages are late
there are to be more workers than there are, at most twice as many each time somebody asks. A worker is a worker process.
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

#: Rows that the statement for others reads at most.
MOST_ROWS = 10_000_000
#: Seconds.
LONGEST_LATE = 31_536_000


@dataclass(frozen=True)
class Rule:
    """What the figure is made by. Raises InvalidOption."""

    per_worker: int = 1000
    late: timedelta | None = None
    least: int = 0
    most: int = 10

    def __post_init__(self) -> None:
        if not _is_whole(self.per_worker, 1, 1_000_000):
            raise InvalidOption("per-worker", self.per_worker, "a whole number from 1 to 1000000")
        if self.late is not None and not isinstance(self.late, timedelta):
            raise InvalidOption("late", self.late, "a timedelta")
        if self.late is not None and not timedelta(seconds=1) <= self.late <= timedelta(seconds=LONGEST_LATE):
            raise InvalidOption("late", self.late.total_seconds(), "a number of seconds from 1 to 31536000")
        if not (_is_whole(self.most, 1, 1000) and _is_whole(self.least, 0, self.most)):
            raise InvalidOption(
                "min, max",
                (self.least, self.most),
                "whole numbers from 0 to 1000, the first not above the second, which is not 0",
            )
        if self.per_worker * self.most > MOST_ROWS:
            raise InvalidOption(
                "per-worker * max", self.per_worker * self.most, f"at most {MOST_ROWS}: so many rows are read"
            )


def _is_whole(given: Any, least: int, most: int) -> bool:
    return type(given) is int and least <= given <= most


@dataclass
class Scale:
    """The figure of one queue. ``wanted`` None: it is not known, and ``error`` says why."""

    queue: str
    waiting: int | None
    leased: int | None
    oldest_seconds: float | None
    workers: int | None
    wanted: int | None
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def wanted(backlog: int, oldest_seconds: float | None, workers: int, rule: Rule) -> int:
    """The formula."""
    need, lag = ceil(backlog / rule.per_worker), 0
    if rule.late is not None and oldest_seconds is not None and oldest_seconds > rule.late.total_seconds():
        lag = ceil(workers * min(oldest_seconds / rule.late.total_seconds(), 2))
    return max(rule.least, min(rule.most, max(need, lag)))


def scales(queues: Iterable[Any], rule: Rule = Rule()) -> list[Scale]:
    """The figures of these queues."""
    return [scale_of(one, rule) for one in statistics.figures(queues)]


def scale_of(one: statistics.QueueFigures, rule: Rule = Rule()) -> Scale:
    """The same of figures that were read."""
    known = one.waiting is not None and one.leased is not None and one.subscribers is not None
    count = wanted(one.waiting + one.leased, one.oldest_seconds, one.subscribers, rule) if known else None  # type: ignore[operator,arg-type]
    return Scale(one.queue, one.waiting, one.leased, one.oldest_seconds, one.subscribers, count, one.error)


def text_for(queue: Any, rule: Rule = Rule()) -> str:
    """The same as one SELECT of one number, for whoever asks the database without this project."""
    connection = connections[router.db_for_read(queue) or "default"]
    late = None if rule.late is None else int(rule.late / timedelta(milliseconds=1))
    asked = WorkersWanted(rule.per_worker, late, rule.least, rule.most, Subscriber._meta.db_table, queue._meta.label)
    return queue_sql(queue, connection).figures.workers_wanted(asked)
