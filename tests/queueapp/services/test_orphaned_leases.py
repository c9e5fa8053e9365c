"""Messages of a dead subscriber are released, and its row is deleted; which rows stay, and which signal is sent
afterwards."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection, connections

from queueapp import consumer
from queueapp.models import Now, QueueControl, Subscriber
from queueapp.services import orphaned_leases
from queueapp.services.orphaned_leases import Unreleasable, release_orphaned_leases
from tests.in_process_worker import Worker, eventually, real_commits
from tests.queueapp.services.subscribers import HOUR, lease, subscriber
from tests.testapp.messages import Nop
from tests.testapp.models import AtMostOnce, Leased, Transactional
from workers.receiving.pump import QueuePump

pytestmark = real_commits


def test_disconnect_of_a_dead_subscriber_gives_its_leases_back() -> None:
    lease(subscriber(dead=True), 3)

    assert release_orphaned_leases("default") == 3

    assert list(Leased.objects.values_list("lease_token", "deliveries")) == [(None, 1)] * 3, (
        "delivered and not acknowledged"
    )
    assert not Subscriber.objects.exists()
    control = QueueControl.objects.get(queue="testapp.Leased")
    assert control.last_death.endswith(" (leases released: 3)")
    assert control.last_death_at is not None


def test_the_single_message_of_a_subscriber_under_crash_tracking_was_in_flight_and_stays_counted() -> None:
    lease(subscriber(dead=True, crash_tracking=True), 1)

    release_orphaned_leases("default")

    assert Leased.objects.get().deliveries == 1


def test_leases_of_the_living_are_left_alone() -> None:
    alive = subscriber(dead=False)
    lease(alive, 2)

    assert release_orphaned_leases("default") == 0

    assert Leased.objects.filter(lease_owner=alive.id).count() == 2
    assert Subscriber.objects.count() == 1
    assert not QueueControl.objects.exists()


def test_after_a_crash_its_queue_is_under_crash_tracking_for_a_while(settings: Any) -> None:
    settings.QUEUEAPP = {"CRASH_TRACKING_PERIOD": 3600}
    subscriber(dead=True)

    release_orphaned_leases("default")

    control = QueueControl.objects.get(queue="testapp.Leased")
    assert QueueControl.objects.filter(crash_tracking_until__gt=Now() + HOUR - timedelta(minutes=1)).exists()
    assert control.paused is False


def test_leases_of_a_dead_subscriber_are_given_back_batch_by_batch_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphaned_leases, "BATCH", 2)
    lease(subscriber(dead=True), 5)

    assert release_orphaned_leases("default") == 5

    assert not Leased.objects.exclude(lease_token=None).exists()


def test_one_that_shows_that_it_lives_while_it_is_removed_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    really_release = orphaned_leases.release

    def release(*arguments: Any) -> int:
        Subscriber.objects.update(alive_until=Now() + HOUR)
        return really_release(*arguments)

    monkeypatch.setattr(orphaned_leases, "release", release)
    subscriber(dead=True)

    release_orphaned_leases("default")

    assert Subscriber.objects.exists()


def test_one_that_shows_that_it_lives_while_others_are_removed_keeps_what_it_has(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its heartbeat is back, and it has leased again since: another worker would handle the same messages beside it."""
    first, second = (subscriber(dead=True) for _ in range(2))
    really_release = orphaned_leases.release

    def release(sql: Any, alias: str, row: Subscriber) -> int:
        back = Subscriber.objects.get(pk=({first.pk, second.pk} - {row.pk}).pop())
        Subscriber.objects.filter(pk=back.pk).update(alive_until=Now() + HOUR)
        lease(back, 2)
        return really_release(sql, alias, row)

    monkeypatch.setattr(orphaned_leases, "release", release)

    assert release_orphaned_leases("default") == 0

    assert Leased.objects.filter(lease_owner=Subscriber.objects.get().pk).count() == 2
    assert caplog.text.count("stopped without deregistering") == 1


def test_one_that_shows_that_it_lives_between_two_batches_keeps_the_rest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(orphaned_leases, "BATCH", 2)
    back = subscriber(dead=True)
    lease(back, 5)
    monkeypatch.setattr(
        orphaned_leases,
        "restart_deadline",
        lambda: (
            Leased.objects.filter(lease_token=None).exists() and Subscriber.objects.update(alive_until=Now() + HOUR)
        ),
    )

    assert release_orphaned_leases("default") == 2

    assert Leased.objects.filter(lease_owner=back.pk).count() == 3
    assert "and has come back since; released 2 leases" in caplog.text


def test_a_pause_survives_a_death() -> None:
    QueueControl.objects.create(queue="testapp.Leased", paused=True)
    subscriber(dead=True)

    release_orphaned_leases("default")

    assert QueueControl.objects.get().paused is True


def test_a_dead_subscriber_of_another_projects_queue_is_removed_by_its_table() -> None:
    lease(subscriber(dead=True), 3)
    Subscriber.objects.update(queue="another.Project", table=Leased._meta.db_table)

    assert release_orphaned_leases("default") == 3

    assert list(Leased.objects.values_list("lease_token", "deliveries")) == [(None, 1)] * 3, (
        "delivered and not acknowledged"
    )
    assert not Subscriber.objects.exists()
    assert QueueControl.objects.filter(queue="another.Project", crash_tracking_until__gt=Now()).exists(), (
        "its own workers see it"
    )


def test_two_projects_may_call_different_tables_by_one_name() -> None:
    lease(subscriber(Transactional, dead=True), 2)
    Subscriber.objects.update(table=Leased._meta.db_table)

    assert release_orphaned_leases("default") == 2


@pytest.mark.parametrize("table", ["dropped_meanwhile", "foreign_without_leases", 'odd ".name'])
def test_a_table_without_leases_does_not_keep_dead_subscribers(table: str) -> None:
    subscriber(dead=True)
    Subscriber.objects.update(queue="another.Project", table=table)
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE foreign_without_leases (seq bigint PRIMARY KEY)")
    try:
        assert release_orphaned_leases("default") == 0
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP TABLE foreign_without_leases")

    assert not Subscriber.objects.exists()


def test_a_dead_subscriber_that_does_not_report_where_it_received_from_is_left_alone_and_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        subscriber(dead=True)
    Subscriber.objects.update(queue="another.Project")
    unreleasable: Unreleasable = {}

    for _ in range(3):
        assert release_orphaned_leases("default", unreleasable) == 0

    assert Subscriber.objects.count() == 2
    assert set(unreleasable) == set(Subscriber.objects.values_list("pk", flat=True))
    assert (
        caplog.text.count(
            "another.Project: the leases of dead workers of this queue (h, pid 1) cannot be released here"
        )
        == 1
    )
    assert not QueueControl.objects.exists(), "crash tracking must end"


def test_a_table_that_may_not_be_written_to_is_left_alone_and_the_others_are_not() -> None:
    if connection.vendor != "postgresql":
        pytest.skip("the role of this test is PostgreSQL's")
    name = f"keeper_{uuid.uuid4().hex}"
    first, second = subscriber(dead=True), subscriber(AtMostOnce, dead=True)
    unreleasable: Unreleasable = {}
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE ROLE {name}")
        for table in (Subscriber, QueueControl, AtMostOnce):
            cursor.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table._meta.db_table} TO {name}")
        cursor.execute(f"SET ROLE {name}")
        try:
            release_orphaned_leases("default", unreleasable)
        finally:
            cursor.execute("RESET ROLE")
            cursor.execute(f"DROP OWNED BY {name}")
            cursor.execute(f"DROP ROLE {name}")

    assert list(unreleasable) == [first.pk]
    assert not Subscriber.objects.filter(pk=second.pk).exists()


@pytest.mark.parametrize("queue", [Transactional, AtMostOnce])
def test_a_dead_subscriber_without_leases_is_forgotten(queue: Any) -> None:
    subscriber(queue, dead=True)

    assert release_orphaned_leases("default") == 0

    assert not Subscriber.objects.exists()


def test_an_error_that_is_no_lack_of_a_right_ends_the_burial_and_it_is_tried_again() -> None:
    if connection.vendor != "postgresql":
        pytest.skip("the time-out of this test is PostgreSQL's")
    lease(subscriber(dead=True), 1)
    unreleasable: Unreleasable = {}
    second_connection = connections["default"].copy()
    try:
        with second_connection.cursor() as holder, connection.cursor() as cursor:
            holder.execute(f"BEGIN; LOCK TABLE {Leased._meta.db_table}")
            cursor.execute("SET lock_timeout = '50ms'")
            with pytest.raises(OperationalError):
                release_orphaned_leases("default", unreleasable)
            assert unreleasable == {}
            assert Subscriber.objects.exists(), "the next process finds it"
            holder.execute("ROLLBACK")
            assert release_orphaned_leases("default", unreleasable) == 1
    finally:
        second_connection.close()
        connection.close()


@pytest.mark.usefixtures("no_consumers")
def test_released_leases_are_received_at_once_by_workers_that_sleep(
    start_worker: Callable[..., Worker], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 3600}
    handled: list[int] = []
    waits: list[float] = []
    really_wait = QueuePump.wait

    def wait(self: QueuePump, seconds: float) -> bool:
        waits.append(seconds)
        return really_wait(self, seconds)

    monkeypatch.setattr(QueuePump, "wait", wait)

    def act(message: Nop) -> None:
        handled.append(message.number)

    consumer(Leased, name="tests")(act)
    dead = subscriber(dead=True)
    Leased.send(Nop(1, ""))
    Leased.objects.update(lease_token=uuid.uuid4(), lease_owner=dead.id, lease_expires=Now() + HOUR, deliveries=1)
    start_worker(Leased, listener=True)
    eventually(lambda: waits and waits[-1] > HOUR.total_seconds() / 2)
    assert handled == []

    assert release_orphaned_leases("default") == 1

    eventually(lambda: handled == [1])
