"""Statistics per task, for ``queuestats``, metrics and alerts: rows named ``task:<path>``, beside that of the queue.

A task without messages has no row. At most ``LIMIT`` rows of each table are counted; beyond that the counts are lower
bounds, and ``exact`` is False. The paths are those of message headers, so their number is bounded as well: the tasks
with the fewest messages are added up as ``task:(others)``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from django.db import connections, router
from django.db.models import Count

from ...models import DelayedMessage, PoisonMessage
from ...operations import statistics
from ...operations.safe_reads import Reader
from ...operations.statistics import QueueStats, head_of
from ...sql import backend_of
from .consumers import backends, queue_of
from .serialization import TaskHeaders

PREFIX, REMAINDER = "task:", "task:(others)"
#: Tasks of one database that have a row of their own.
MAX_TASKS = 200


def install() -> None:
    """Add the statistics to those of all queues."""
    statistics.sources[PREFIX] = task_stats


def task_stats(alias: str, reader: Reader) -> list[QueueStats] | None:
    """The statistics of the tasks in one database; none where it has no queue of tasks. None: they cannot be read."""
    queues = {queue for backend in backends() if (queue := queue_of(backend)) is not None}
    of_alias = [queue for queue in queues if (router.db_for_read(queue) or "default") == alias]
    return reader.read(lambda: _read(alias, of_alias))[0] if of_alias else []


def _read(alias: str, queues: list[Any]) -> list[QueueStats]:
    stats: dict[str, QueueStats] = {}
    inexact: set[str] = set()

    def of(path: str) -> QueueStats:
        if path not in stats:
            stats[path] = QueueStats(PREFIX + path, "", alias, "", waiting=0, leased=0, expired=0, delayed=0, poison=0)
        return stats[path]

    now = backend_of(connections[alias]).now(connections[alias])
    for queue in queues:
        rows, exact = head_of(queue._base_manager.using(alias))
        inexact |= set() if exact else {"waiting"}
        # Most messages of one task have equal headers.
        statistics.add_by_state(rows, "headers", lambda headers: of(_path(headers)), now)
    labels = [queue._meta.label for queue in queues]
    rows, exact = head_of(DelayedMessage.objects.using(alias).filter(destination__in=labels))
    inexact |= set() if exact else {"delayed"}
    for headers, count in rows.values_list("headers").annotate(Count("pk")):
        of(_path(headers)).delayed = (of(_path(headers)).delayed or 0) + count
    unresolved = PoisonMessage.objects.using(alias).filter(queue__in=labels, status=PoisonMessage.Status.UNRESOLVED)
    rows, exact = head_of(unresolved)
    inexact |= set() if exact else {"poison"}
    for path, count in rows.values_list("message_type").annotate(Count("pk")):
        of(path).poison = (of(path).poison or 0) + count
    _join_others(stats, alias)
    for of_task in stats.values():
        of_task.exact, of_task.delayed_exact, of_task.poison_exact = (
            name not in inexact for name in ("waiting", "delayed", "poison")
        )
    return [stats[path] for path in sorted(stats)]


@lru_cache(maxsize=1024)
def _path(headers: str) -> str:
    return TaskHeaders.by(headers).path


def _join_others(stats: dict[str, QueueStats], alias: str) -> None:
    """Add up the tasks with the fewest messages, so that ``MAX_TASKS`` rows remain."""
    if len(stats) <= MAX_TASKS:
        return

    def total(found: list[QueueStats], name: str) -> int:
        return sum(getattr(item, name) or 0 for item in found)

    names = ("waiting", "leased", "expired", "delayed", "poison")
    by_size = sorted(stats, key=lambda path: (-sum(total([stats[path]], name) for name in names), path))
    joined = [stats.pop(path) for path in by_size[MAX_TASKS - 1 :]]
    remainder = QueueStats(REMAINDER, "", alias, "", note=f"{len(joined)} tasks")
    for name in names:
        setattr(remainder, name, total(joined, name))
    remainder.oldest_seconds = max(
        (item.oldest_seconds for item in joined if item.oldest_seconds is not None), default=None
    )
    stats[REMAINDER.removeprefix(PREFIX)] = remainder
