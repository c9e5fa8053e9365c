"""Statistics per task, beside those of the queue that holds the tasks."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from queueapp.contrib.tasks import task_stats as module
from queueapp.contrib.tasks.models import TaskQueue
from queueapp.models import Now
from queueapp.operations import statistics
from queueapp.operations.statistics import QueueStats, queue_stats
from queueapp.services import maintenance_hooks
from tests.in_process_worker import real_commits

from . import declared

pytestmark = [real_commits, pytest.mark.usefixtures("backend")]
PATH = f"{declared.__name__}."


def rows(alias: str) -> Any:
    return TaskQueue.objects.using(alias)


def found() -> dict[str, QueueStats]:
    return {stats.queue.removeprefix("task:"): stats for stats in queue_stats() if stats.queue.startswith("task:")}


def test_each_task_has_its_own_figures(alias: str) -> None:
    declared.noop.enqueue()
    old = declared.noop.using(priority=7).enqueue()
    leased = declared.add.enqueue(1, 2)
    declared.add.using(run_after=timezone.now() + timedelta(hours=1)).enqueue(3, 4)
    rows(alias).filter(id=old.id).update(enqueued_at=Now() - timedelta(seconds=100))
    rows(alias).filter(id=leased.id).update(lease_expires=Now() + timedelta(minutes=1))

    stats = found()

    assert sorted(stats) == [PATH + "add", PATH + "noop"]
    noop, add = stats[PATH + "noop"], stats[PATH + "add"]
    assert (noop.waiting, noop.leased, noop.delayed, noop.poison, noop.exact) == (2, 0, 0, 0, True)
    assert 99 < (noop.oldest_seconds or 0) < 130
    assert (add.waiting, add.leased, add.delayed, add.oldest_seconds) == (0, 1, 1, None)


def test_a_failed_task_counts_as_poison_of_its_path(drain: Any) -> None:
    declared.unrecoverable.enqueue()

    drain()

    (stats,) = found().values()
    assert (stats.queue, stats.waiting, stats.poison) == (f"task:{PATH}unrecoverable", 0, 1)


def test_they_are_in_queuestats_and_its_json() -> None:
    declared.noop.enqueue()
    text, as_json = StringIO(), StringIO()

    for options in ({"stdout": text}, {"stdout": as_json, "json": True}):
        with suppress(CommandError):  # tables of other projects are unknown
            call_command("queuestats", **options)

    assert f"task:{PATH}noop" in text.getvalue()
    loads = [load for load in json.loads(as_json.getvalue()) if load["database"] == "default"]
    (row,) = [load for load in loads if load["queue"] == f"task:{PATH}noop"]
    assert (row["waiting"], row["leased"], row["workers"]) == (1, 0, None)


def test_a_test_that_changes_the_installed_apps_doubles_nothing(alias: str, settings: Any) -> None:
    hooks = dict(maintenance_hooks)
    declared.noop.enqueue()

    settings.INSTALLED_APPS = [*settings.INSTALLED_APPS]  # each app is made ready once more

    assert maintenance_hooks == hooks
    assert [stats.queue for stats in queue_stats() if stats.queue.startswith("task:")] == [f"task:{PATH}noop"]


def test_they_are_metrics() -> None:
    pytest.importorskip("prometheus_client")
    from queueapp.metrics.views import StatsCollector

    declared.noop.enqueue()

    families = {family.name: family for family in StatsCollector(queue_stats).collect()}

    samples = {sample.labels["queue"]: sample.value for sample in families["queueapp_messages_waiting"].samples}
    assert samples[f"task:{PATH}noop"] == 1


def test_the_number_of_statements_does_not_depend_on_the_tasks(alias: str) -> None:
    def statements() -> int:
        with CaptureQueriesContext(connections[alias]) as queries:
            module._read(alias, [TaskQueue])
        return len(queries)

    declared.noop.enqueue()
    before = statements()
    for item in (declared.anoop, declared.add, declared.aadd, declared.elsewhere):
        item.enqueue(*([1, 2] if item in (declared.add, declared.aadd) else []))

    assert statements() == before


def test_the_tasks_with_the_fewest_messages_are_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TASKS", 2)
    for _ in range(3):
        declared.noop.enqueue()
    declared.anoop.enqueue()
    declared.elsewhere.enqueue()

    stats = found()

    assert sorted(stats) == ["(others)", PATH + "noop"]
    assert (stats["(others)"].waiting, stats["(others)"].note) == (2, "2 tasks")


def test_a_large_table_gives_lower_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "LIMIT", 2)
    for _ in range(3):
        declared.noop.enqueue()

    (stats,) = found().values()

    assert (stats.waiting, stats.exact) == (2, False)
