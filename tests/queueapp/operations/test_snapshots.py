"""Snapshots of the statistics: as many statements for 5 queues as for 50, and a history that is combined and ends."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from queueapp import registry
from queueapp.models import Now, PoisonMessage, QueueControl, QueueSnapshot, Subscriber
from queueapp.operations import snapshots, statistics
from queueapp.operations.snapshots import SnapshotRecorder, combine, drop_old, latest, latest_stats, points
from queueapp.sql import backend_of
from tests.databases import only_on_postgresql
from tests.in_process_worker import real_commits
from tests.testapp.models import Leased, Short, Transactional

pytestmark = real_commits
LABEL = "testapp.Leased"
HOUR = timedelta(hours=1)


def worker(queue: str = LABEL, **columns: Any) -> Subscriber:
    return Subscriber.objects.create(
        queue=queue, host="h", process=1, supervisor=uuid.uuid4(), alive_until=Now() + HOUR, **columns
    )


def of(label: str = LABEL) -> statistics.QueueStats:
    return next(stats for stats in latest_stats() if stats.queue == label)


def known_queues(count: int) -> list[Any]:
    """Queues with a table, each with a poison message and a worker."""
    queues = [queue for queue in registry.queues if queue._meta.managed and not queue._meta.abstract][:count]
    assert len(queues) == count
    for queue in queues:
        PoisonMessage.objects.create(message_id=uuid.uuid4(), queue=queue._meta.label, reason="r")
        worker(queue._meta.label)
    return queues


def only(monkeypatch: pytest.MonkeyPatch, queues: Sequence[Any]) -> None:
    monkeypatch.setattr(snapshots, "registry", SimpleNamespace(queues=queues))


@only_on_postgresql
def test_the_statements_are_as_many_for_50_queues_as_for_5(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    for count in (5, 50):
        PoisonMessage.objects.all().delete()
        queues = known_queues(count)
        SnapshotRecorder("default", queues).record()
        only(monkeypatch, queues)
        with CaptureQueriesContext(connection) as statements:
            found = latest(history=True)
        assert len(found.ages) == count, "all were read from their snapshots"
        assert [stats.poison for stats in found.queues[:count]] == [1] * count
        counted.append(len(statements))
    assert counted[0] == counted[1] < 15, counted


def test_a_snapshot_says_what_the_statistics_say() -> None:
    Leased.send_many({"n": n} for n in range(3))
    Leased.send({}, delay=HOUR)
    PoisonMessage.objects.create(message_id=uuid.uuid4(), queue="gone.Queue", reason="r")
    SnapshotRecorder("default", [Leased, Short]).record()

    found = of()

    (read,) = statistics.queue_stats([Leased])
    assert found.oldest_seconds is not None
    read.oldest_seconds, read.amps.seconds_behind = found.oldest_seconds, found.amps.seconds_behind
    assert found == read
    assert of("gone.Queue").poison == 1
    assert of("testapp.Transactional").waiting == 0, "without a snapshot it is read"


def test_pauses_and_workers_are_those_of_now() -> None:
    SnapshotRecorder("default", [Leased]).record()
    assert (of().paused, of().workers, of().in_flight) == (False, 0, 0)
    QueueControl.objects.create(queue=LABEL, paused=True)
    worker(outstanding=5)
    worker(outstanding=3)
    assert (of().paused, of().workers, of().in_flight) == (True, 2, 8)


def test_workers_of_a_queue_without_leases_say_how_many_are_in_flight() -> None:
    worker("testapp.Transactional", outstanding=8)
    (stats,) = statistics.queue_stats([Transactional])
    assert (stats.leased, stats.in_flight) == (0, 8)


def test_a_queue_that_an_operator_changed_is_read_again() -> None:
    Leased.send({})
    SnapshotRecorder("default", [Leased]).record()
    Leased.objects.all().delete()
    assert of().waiting == 1
    snapshots.forget(Leased)
    assert of().waiting == 0


def test_an_old_snapshot_and_one_of_another_version_are_not_shown() -> None:
    SnapshotRecorder("default", [Leased]).record()
    Leased.send({})
    QueueSnapshot.objects.update(stats='{"queue": "testapp.Leased", "colour": "green"}')
    assert of().waiting == 1
    SnapshotRecorder("default", [Leased]).record()
    Leased.send({})
    QueueSnapshot.objects.update(at=Now() - timedelta(minutes=4))
    assert of().waiting == 2


# -- the history -----------------------------------------------------------------------------------------------------


def test_a_minute_counts_what_came_and_what_was_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = SnapshotRecorder("default", [Leased])
    first = worker(received=100, handled=100)
    recorder.record()
    Leased.send_many({"n": n} for n in range(7))
    Subscriber.objects.filter(pk=first.pk).update(received=110, handled=108, failed=2)
    worker(received=4, handled=4, handling_p50=0.01, handling_p95=0.5)
    recorder.minute -= timedelta(minutes=1)  # type: ignore[operator]

    recorder.record()

    row = QueueSnapshot.objects.get(period=60, queue=LABEL)
    assert (row.received, row.handled, row.failed) == (14, 12, 2)
    assert (row.ready, row.arrived) == (7, 19), "what was handled, and what the queue has grown by"
    assert (row.handling_p50, row.handling_p95) == (0.01, 0.5)
    (point,) = points("default", 60, HOUR)[LABEL]
    assert point.handled_rate == pytest.approx(12 / row.seconds)


def history(period: int, ages: Sequence[int], **figures: Any) -> None:
    now = backend_of(connection).now(connection)
    QueueSnapshot.objects.bulk_create(
        QueueSnapshot(queue=LABEL, period=period, at=now - timedelta(seconds=age), **figures) for age in ages
    )


def test_rows_are_combined_once() -> None:
    end = backend_of(connection).now(connection)
    for minute, ready in enumerate((2, 4, 6)):
        QueueSnapshot.objects.create(
            queue=LABEL, period=60, at=end - timedelta(minutes=minute + 1), ready=ready, handled=10, seconds=60,
            oldest_ms=ready * 1000, handling_p95=ready, poison=None,
        )  # fmt: skip
    for _ in range(2):
        combine("default", 60, 300, end)
    row = QueueSnapshot.objects.get(period=300)
    assert (row.ready, row.poison, row.handled, row.seconds) == (4, None, 30, 180)
    assert (row.oldest_ms, row.handling_p95, row.at) == (6000, 6, end - timedelta(minutes=5))


def test_the_history_ends_with_its_retention(settings: Any) -> None:
    settings.QUEUEAPP = {"STATISTICS_RETENTION": timedelta(days=10)}
    day = 86_400
    history(60, (60, 3 * 3600))
    history(300, (day, 3 * day))
    history(3600, (9 * day, 11 * day))
    assert drop_old("default", lambda: True) == 3
    assert drop_old("default", lambda: True) == 0
    settings.QUEUEAPP = {"STATISTICS_RETENTION": None}
    history(3600, (5000 * day,))
    assert drop_old("default", lambda: True) == 0
