"""Maintenance: expired messages and old poison are deleted, and unroutable messages are named."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError

from queueapp.failures import poison_operations
from queueapp.models import DelayedMessage, Leader, Now, PoisonMessage, Subscriber
from queueapp.services import leader_election as leadership
from queueapp.services import maintenance
from queueapp.services.leader_election import Elector
from queueapp.services.maintenance import Maintenance, purge_expired
from queueapp.services.orphaned_leases import release_orphaned_leases
from queueapp.services.service import stop_all
from tests.clock import Clock
from tests.in_process_worker import DEADLINE, eventually, real_commits
from tests.queueapp.services.subscribers import HOUR, subscriber
from tests.testapp.models import Addressed, AtMostOnce, ForeignPostgres, Leased

pytestmark = real_commits


def test_expired_messages_are_purged_batch_by_batch_to_the_last(settings: Any) -> None:
    settings.QUEUEAPP = {"PURGE_BATCH": 2}
    expire(Leased, 5)
    Leased.send({})

    assert purge_expired(Leased, "default") == 5

    assert Leased.objects.count() == 1


@pytest.mark.parametrize("ended_by", ["a stop", "another leader"])
def test_a_purge_ends_after_the_batch_in_which_its_process_is_stopped_or_leads_no_more(
    settings: Any, monkeypatch: pytest.MonkeyPatch, ended_by: str
) -> None:
    settings.QUEUEAPP = {"PURGE_BATCH": 2}
    expire(Leased, 6)
    elector = Elector("default", "maintenance", uuid.uuid4())
    assert elector.try_lead()
    service = Maintenance("default", [Leased], elector)
    purged: list[int] = []

    def end_after_two(alias: str, queue: Any, count: int) -> None:
        purged.append(count)
        if sum(purged) < 4:
            return
        if ended_by == "a stop":
            service.stop(0)
            return
        Leader.objects.update(holder=uuid.uuid4(), term=2)
        elector.renew_at = 0.0

    really = maintenance.delete_expired

    def delete(queue: Any, alias: str, batch: int) -> int:
        count = really(queue, alias, batch)
        end_after_two(alias, queue, count)
        return count

    monkeypatch.setattr(maintenance, "delete_expired", delete)

    assert purge_expired(Leased, "default", service) == 4

    assert Leased.objects.count() == 2


# -- the thread ----------------------------------------------------------------------------------------------------


@pytest.fixture
def start() -> Iterator[Callable[..., Maintenance]]:
    services: list[Maintenance] = []

    def begin(leader: bool = True, queues: Sequence[Any] = (Leased, AtMostOnce)) -> Maintenance:
        leadership = Elector("default", "maintenance", uuid.uuid4())
        assert leadership.try_lead() is leader
        services.append(Maintenance("default", queues, leadership))
        services[-1].start()
        return services[-1]

    yield begin
    assert stop_all(services, DEADLINE)


def expire(queue: Any, count: int) -> None:
    queue.send_many([{"number": number} for number in range(count)], expires_in=HOUR)
    queue.objects.update(expires=Now() - timedelta(seconds=1))


def test_expired_messages_go_at_the_start_and_live_ones_stay(start: Callable[..., Maintenance]) -> None:
    for queue in (Leased, AtMostOnce):
        expire(queue, 3)
        queue.send({})

    start()

    eventually(lambda: Leased.objects.count() == AtMostOnce.objects.count() == 1)


def test_expired_messages_go_time_and_again(start: Callable[..., Maintenance], settings: Any) -> None:
    settings.QUEUEAPP = {"PURGE_INTERVAL": 1, "PURGE_EXPIRED_ON_STARTUP": False, "HEARTBEAT_INTERVAL": 0.1}
    expire(Leased, 2)
    start()

    eventually(lambda: not Leased.objects.exists())
    expire(Leased, 2)
    eventually(lambda: not Leased.objects.exists())


def test_a_queue_that_has_no_table_yet_keeps_no_other_from_being_purged(
    start: Callable[..., Maintenance], settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.QUEUEAPP = {"PURGE_INTERVAL": 1, "HEARTBEAT_INTERVAL": 0.1}
    worker = start(queues=[ForeignPostgres, Leased])

    for _ in range(2):
        expire(Leased, 1)
        eventually(lambda: not Leased.objects.exists())

    assert caplog.text.count("testapp.ForeignPostgres: expired messages cannot be purged") == 1
    assert worker.breaker.failures == 0


def test_a_database_that_is_away_is_waited_for(
    start: Callable[..., Maintenance], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    really_release, errors = release_orphaned_leases, [OperationalError("away")]

    def release(*arguments: Any) -> int:
        if errors:
            raise errors.pop()
        return really_release(*arguments)

    monkeypatch.setattr(maintenance, "release_orphaned_leases", release)
    subscriber(dead=True)
    worker = start()

    eventually(lambda: not Subscriber.objects.exists())
    eventually(lambda: worker.breaker.failures == 0)
    assert "Maintenance in default failed; trying again" in caplog.text


def test_purging_can_be_turned_off(start: Callable[..., Maintenance], settings: Any) -> None:
    settings.QUEUEAPP = {"PURGE_INTERVAL": None, "PURGE_EXPIRED_ON_STARTUP": False, "HEARTBEAT_INTERVAL": 0.1}
    expire(Leased, 2)
    subscriber(dead=True)
    start()

    eventually(lambda: not Subscriber.objects.exists())

    assert Leased.objects.count() == 2


def test_who_does_not_lead_does_nothing(
    start: Callable[..., Maintenance], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.QUEUEAPP = {"HEARTBEAT_INTERVAL": 0.1}
    rounds: list[float] = []
    really_pause = Maintenance.pause

    def pause(self: Maintenance, seconds: float) -> None:
        rounds.append(seconds)
        really_pause(self, seconds)

    monkeypatch.setattr(Maintenance, "pause", pause)
    monkeypatch.setattr(maintenance, "ELECTION_INTERVAL", 0.1)
    monkeypatch.setattr(leadership, "TERM", HOUR)
    Leader.objects.create(role="maintenance", holder=uuid.uuid4(), expires=Now() + HOUR)
    expire(Leased, 1)
    idle = start(leader=False)
    eventually(lambda: len(rounds) >= 2)
    assert Leased.objects.count() == 1
    Leader.objects.update(expires=Now())  # the other has resigned
    subscriber(dead=True)

    eventually(lambda: not Subscriber.objects.exists() and not Leased.objects.exists())

    assert idle.is_alive()


def test_undeliverable_delayed_messages_are_named_once_and_counted(
    start: Callable[..., Maintenance], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, settings: Any
) -> None:
    settings.QUEUEAPP = {"HEARTBEAT_INTERVAL": 0.1}
    monkeypatch.setattr(maintenance, "REPORT_INTERVAL", 0.0)
    for number in range(3):
        Leased.send({"number": number}, delay=HOUR)
    DelayedMessage.objects.update(destination="gone.Queue", due=Now() - HOUR)
    Leased.send({}, delay=timedelta(0))
    worker = start()

    eventually(lambda: worker.undeliverable == {"gone.Queue": 3})
    DelayedMessage.objects.filter(pk=DelayedMessage.objects.earliest("pk").pk).delete()
    eventually(lambda: worker.undeliverable == {"gone.Queue": 2})

    assert caplog.text.count("3 delayed messages in 'default' for 'gone.Queue' are overdue") == 1
    assert caplog.text.count("gone.Queue") == 1
    assert not PoisonMessage.objects.exists()


@pytest.mark.parametrize(
    ("retention", "remaining"), [(3600, ["new", "unresolved"]), (None, ["new", "old", "unresolved"])]
)
def test_archived_poison_goes_when_its_retention_is_over(
    start: Callable[..., Maintenance], settings: Any, retention: int | None, remaining: list[str]
) -> None:
    settings.QUEUEAPP = {"POISON_RETENTION": retention, "HEARTBEAT_INTERVAL": 0.1}
    for name in ("old", "new", "unresolved"):
        PoisonMessage.objects.create(queue="testapp.Leased", message_id=uuid.uuid4(), reason=name)
    poison_operations.archive(PoisonMessage.objects.exclude(reason="unresolved"))
    PoisonMessage.objects.filter(reason="old").update(archived_at=Now() - 2 * HOUR)
    worker = start()

    eventually(lambda: sorted(PoisonMessage.objects.values_list("reason", flat=True)) == remaining)

    # A later round of the same thread has come by, and left the rest.
    subscriber(dead=True)
    eventually(lambda: not Subscriber.objects.exists())
    assert worker.is_alive()
    assert sorted(PoisonMessage.objects.values_list("reason", flat=True)) == remaining


def test_unroutable_messages_are_logged_once_and_again_after_an_hour(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    monkeypatch.setattr(maintenance, "monotonic", clock)
    subscriber(Addressed, dead=False)
    Subscriber.objects.update(consumers='[["tests.here", ""]]')
    for _ in range(2):
        Addressed.send({}, recipient="tests.gone", unknown_recipient=True)
    PoisonMessage.objects.create(message_id=uuid.uuid4(), queue="gone.\x1b[2J\nQueue", reason="r")
    maintenance_ = Maintenance("default", [], Elector("default", "tests", uuid.uuid4()))
    Leased.send({}, delay=HOUR)
    DelayedMessage.objects.update(destination="gone.Queue", due=Now() - HOUR)

    def name() -> list[str]:
        caplog.clear()
        maintenance_.report_undeliverable()
        maintenance_.report_unroutable()
        return [record.getMessage() for record in caplog.records]

    said = name()
    assert said[0].startswith("1 delayed message in 'default' for 'gone.Queue' is overdue")
    assert "movedelayed" in said[0]
    assert said[1:] == [
        "testapp.Addressed: 2 messages for recipient 'tests.gone', no consumer in a live worker.",
        "gone.⟨U+001B⟩[2J Queue: 1 poison message, no such queue in this project.",
    ]
    clock.now += 3599
    assert name() == []
    Addressed.send({}, recipient="tests.another", unknown_recipient=True)
    assert name() == ["testapp.Addressed: 1 message for recipient 'tests.another', no consumer in a live worker."]
    clock.now += 1
    assert name() == said
