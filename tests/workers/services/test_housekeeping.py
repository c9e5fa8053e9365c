"""What is done for all: expired messages go, and what the dead held is given back."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection

from queueapp import poison
from queueapp.models import DelayedMessage, Leader, Now, PoisonMessage, QueueControl, Subscriber
from tests.inprocess import DEADLINE, eventually, real_commits
from tests.testapp.models import Addressed, AtMostOnce, ForeignPostgres, Leased, Transactional
from workers.services import housekeeping, leadership
from workers.services.housekeeping import Housekeeping, LeftAlone, purge_expired, release_leases_of_dead_subscribers
from workers.services.leadership import Leadership
from workers.services.service import stop_all

pytestmark = real_commits
HOUR = timedelta(hours=1)


def subscriber(queue: Any = Leased, *, dead: bool, careful: bool = False) -> Subscriber:
    until = Now() - timedelta(seconds=1) if dead else Now() + HOUR
    return Subscriber.objects.create(
        queue=queue._meta.label, host="h", process=1, supervisor=uuid.uuid4(), alive_until=until, careful=careful
    )


def lease(owner: Subscriber, count: int) -> None:
    """So many messages, leased by this subscriber and delivered for the first time."""
    for number in range(count):
        Leased.send({"number": number})
    fresh = Leased.objects.filter(lease_token=None)
    fresh.update(lease_token=uuid.uuid4(), lease_owner=owner.id, lease_expires=Now() + HOUR, deliveries=1)


# -- the dead ------------------------------------------------------------------------------------------------------


def test_leases_of_a_dead_subscriber_are_given_back_and_it_is_forgotten() -> None:
    lease(subscriber(dead=True), 3)

    assert release_leases_of_dead_subscribers("default") == 3

    assert list(Leased.objects.values_list("lease_token", "deliveries")) == [(None, 1)] * 3, (
        "handed out, and nobody ended it"
    )
    assert not Subscriber.objects.exists()


def test_the_one_message_of_a_careful_subscriber_was_in_hand_and_stays_counted() -> None:
    lease(subscriber(dead=True, careful=True), 1)

    release_leases_of_dead_subscribers("default")

    assert Leased.objects.get().deliveries == 1


def test_leases_of_the_living_are_left_alone() -> None:
    alive = subscriber(dead=False)
    lease(alive, 2)

    assert release_leases_of_dead_subscribers("default") == 0

    assert Leased.objects.filter(lease_owner=alive.id).count() == 2
    assert Subscriber.objects.count() == 1
    assert not QueueControl.objects.exists()


def test_after_a_death_its_queue_is_received_carefully_for_a_while(settings: Any) -> None:
    settings.QUEUEAPP = {"CAREFUL_PERIOD": 3600}
    subscriber(dead=True)

    release_leases_of_dead_subscribers("default")

    control = QueueControl.objects.get(queue="testapp.Leased")
    assert QueueControl.objects.filter(careful_until__gt=Now() + HOUR - timedelta(minutes=1)).exists()
    assert control.paused is False


def test_leases_of_a_dead_subscriber_are_given_back_batch_by_batch_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "BATCH", 2)
    lease(subscriber(dead=True), 5)

    assert release_leases_of_dead_subscribers("default") == 5

    assert not Leased.objects.exclude(lease_token=None).exists()


def test_one_that_shows_that_it_lives_while_it_is_buried_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    really_release = housekeeping._release

    def release(*arguments: Any) -> int:
        Subscriber.objects.update(alive_until=Now() + HOUR)
        return really_release(*arguments)

    monkeypatch.setattr(housekeeping, "_release", release)
    subscriber(dead=True)

    release_leases_of_dead_subscribers("default")

    assert Subscriber.objects.exists()


def test_expired_messages_are_purged_batch_by_batch_to_the_last(settings: Any) -> None:
    settings.QUEUEAPP = {"PURGE_BATCH": 2}
    expire(Leased, 5)
    Leased.send({})

    assert purge_expired(Leased, "default") == 5

    assert Leased.objects.count() == 1


def test_a_pause_survives_a_death() -> None:
    QueueControl.objects.create(queue="testapp.Leased", paused=True)
    subscriber(dead=True)

    release_leases_of_dead_subscribers("default")

    assert QueueControl.objects.get().paused is True


def test_a_dead_subscriber_of_another_projects_queue_is_buried_by_its_table() -> None:
    lease(subscriber(dead=True), 3)
    Subscriber.objects.update(queue="another.Project", table=Leased._meta.db_table)

    assert release_leases_of_dead_subscribers("default") == 3

    assert list(Leased.objects.values_list("lease_token", "deliveries")) == [(None, 1)] * 3, (
        "handed out, and nobody ended it"
    )
    assert not Subscriber.objects.exists()
    assert QueueControl.objects.filter(queue="another.Project", careful_until__gt=Now()).exists(), (
        "its own workers see it"
    )


def test_two_projects_may_call_different_tables_by_one_name() -> None:
    lease(subscriber(Transactional, dead=True), 2)
    Subscriber.objects.update(table=Leased._meta.db_table)

    assert release_leases_of_dead_subscribers("default") == 2


@pytest.mark.parametrize("table", ["dropped_meanwhile", "foreign_without_leases", 'odd ".name'])
def test_a_table_that_holds_no_leases_keeps_nobody_unburied(table: str) -> None:
    subscriber(dead=True)
    Subscriber.objects.update(queue="another.Project", table=table)
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE foreign_without_leases (seq bigint PRIMARY KEY)")
    try:
        assert release_leases_of_dead_subscribers("default") == 0
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP TABLE foreign_without_leases")

    assert not Subscriber.objects.exists()


def test_a_dead_subscriber_that_does_not_say_where_it_received_from_is_left_alone_and_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        subscriber(dead=True)
    Subscriber.objects.update(queue="another.Project")
    left_alone: LeftAlone = {}

    for _ in range(3):
        assert release_leases_of_dead_subscribers("default", left_alone) == 0

    assert Subscriber.objects.count() == 2
    assert set(left_alone) == set(Subscriber.objects.values_list("pk", flat=True))
    assert caplog.text.count("another.Project: worker h:1 is dead and is left alone here") == 1
    assert not QueueControl.objects.exists(), "careful for ever is what must not be"


def test_a_table_that_may_not_be_written_to_is_left_alone_and_the_others_are_not() -> None:
    if connection.vendor != "postgresql":
        pytest.skip("the role of this test is PostgreSQL's")
    name = f"keeper_{uuid.uuid4().hex}"
    first, second = subscriber(dead=True), subscriber(AtMostOnce, dead=True)
    left_alone: LeftAlone = {}
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE ROLE {name}")
        for table in (Subscriber, QueueControl, AtMostOnce):
            cursor.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table._meta.db_table} TO {name}")
        cursor.execute(f"SET ROLE {name}")
        try:
            release_leases_of_dead_subscribers("default", left_alone)
        finally:
            cursor.execute("RESET ROLE")
            cursor.execute(f"DROP OWNED BY {name}")
            cursor.execute(f"DROP ROLE {name}")

    assert list(left_alone) == [first.pk]
    assert not Subscriber.objects.filter(pk=second.pk).exists()


@pytest.mark.parametrize("queue", [Transactional, AtMostOnce])
def test_a_dead_subscriber_without_leases_is_forgotten(queue: Any) -> None:
    subscriber(queue, dead=True)

    assert release_leases_of_dead_subscribers("default") == 0

    assert not Subscriber.objects.exists()


# -- the thread ----------------------------------------------------------------------------------------------------


@pytest.fixture
def start() -> Iterator[Callable[..., Housekeeping]]:
    services: list[Housekeeping] = []

    def begin(leader: bool = True, queues: Sequence[Any] = (Leased, AtMostOnce)) -> Housekeeping:
        leadership = Leadership("default", "housekeeping", uuid.uuid4())
        assert leadership.hold() is leader
        services.append(Housekeeping("default", queues, leadership))
        services[-1].start()
        return services[-1]

    yield begin
    assert stop_all(services, DEADLINE)


def expire(queue: Any, count: int) -> None:
    queue.send_many([{"number": number} for number in range(count)], expires_in=HOUR)
    queue.objects.update(expires=Now() - timedelta(seconds=1))


def test_expired_messages_go_at_the_start_and_live_ones_stay(start: Callable[..., Housekeeping]) -> None:
    for queue in (Leased, AtMostOnce):
        expire(queue, 3)
        queue.send({})

    start()

    eventually(lambda: Leased.objects.count() == AtMostOnce.objects.count() == 1)


def test_expired_messages_go_time_and_again(start: Callable[..., Housekeeping], settings: Any) -> None:
    settings.QUEUEAPP = {"PURGE_INTERVAL": 1, "PURGE_EXPIRED_ON_STARTUP": False, "HEARTBEAT_INTERVAL": 0.1}
    expire(Leased, 2)
    start()

    eventually(lambda: not Leased.objects.exists())
    expire(Leased, 2)
    eventually(lambda: not Leased.objects.exists())


def test_a_queue_that_has_no_table_yet_keeps_no_other_from_being_purged(
    start: Callable[..., Housekeeping], settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.QUEUEAPP = {"PURGE_INTERVAL": 1, "HEARTBEAT_INTERVAL": 0.1}
    one = start(queues=[ForeignPostgres, Leased])

    for _ in range(2):
        expire(Leased, 1)
        eventually(lambda: not Leased.objects.exists())

    assert caplog.text.count("testapp.ForeignPostgres: expired messages cannot be purged here") == 1
    assert one.breaker.failures == 0


def test_a_database_that_is_away_is_waited_for(
    start: Callable[..., Housekeeping], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    really_release, errors = release_leases_of_dead_subscribers, [OperationalError("away")]

    def release(*arguments: Any) -> int:
        if errors:
            raise errors.pop()
        return really_release(*arguments)

    monkeypatch.setattr(housekeeping, "release_leases_of_dead_subscribers", release)
    subscriber(dead=True)
    one = start()

    eventually(lambda: not Subscriber.objects.exists())
    eventually(lambda: one.breaker.failures == 0)
    assert "Housekeeping in default failed, trying again" in caplog.text


def test_purging_can_be_turned_off(start: Callable[..., Housekeeping], settings: Any) -> None:
    settings.QUEUEAPP = {"PURGE_INTERVAL": None, "PURGE_EXPIRED_ON_STARTUP": False, "HEARTBEAT_INTERVAL": 0.1}
    expire(Leased, 2)
    subscriber(dead=True)
    start()

    eventually(lambda: not Subscriber.objects.exists())

    assert Leased.objects.count() == 2


def test_who_does_not_lead_does_nothing(
    start: Callable[..., Housekeeping], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.QUEUEAPP = {"HEARTBEAT_INTERVAL": 0.1}
    rounds: list[float] = []
    really_pause = Housekeeping.pause

    def pause(self: Housekeeping, seconds: float) -> None:
        rounds.append(seconds)
        really_pause(self, seconds)

    monkeypatch.setattr(Housekeeping, "pause", pause)
    monkeypatch.setattr(housekeeping, "ELECTION_INTERVAL", 0.1)
    monkeypatch.setattr(leadership, "TERM", HOUR)
    Leader.objects.create(role="housekeeping", holder=uuid.uuid4(), expires=Now() + HOUR)
    expire(Leased, 1)
    idle = start(leader=False)
    eventually(lambda: len(rounds) >= 2)
    assert Leased.objects.count() == 1
    Leader.objects.update(expires=Now())  # the other has resigned
    subscriber(dead=True)

    eventually(lambda: not Subscriber.objects.exists() and not Leased.objects.exists())

    assert idle.is_alive()


def test_delayed_messages_that_nobody_delivers_are_named_once_and_counted(
    start: Callable[..., Housekeeping], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, settings: Any
) -> None:
    settings.QUEUEAPP = {"HEARTBEAT_INTERVAL": 0.1}
    monkeypatch.setattr(housekeeping, "NAMING_INTERVAL", 0.0)
    for number in range(3):
        Leased.send({"number": number}, delay=HOUR)
    DelayedMessage.objects.update(destination="gone.Queue", due=Now() - HOUR)
    Leased.send({}, delay=timedelta(0))
    one = start()

    eventually(lambda: one.undeliverable == {"gone.Queue": 3})
    DelayedMessage.objects.filter(pk=DelayedMessage.objects.earliest("pk").pk).delete()
    eventually(lambda: one.undeliverable == {"gone.Queue": 2})

    assert caplog.text.count("3 delayed messages in 'default' are overdue for 'gone.Queue'") == 1
    assert caplog.text.count("gone.Queue") == 1
    assert not PoisonMessage.objects.exists()


@pytest.mark.parametrize(("retention", "left"), [(3600, ["new", "unresolved"]), (None, ["new", "old", "unresolved"])])
def test_archived_poison_goes_when_its_retention_is_over(
    start: Callable[..., Housekeeping], settings: Any, retention: int | None, left: list[str]
) -> None:
    settings.QUEUEAPP = {"POISON_RETENTION": retention, "HEARTBEAT_INTERVAL": 0.1}
    for name in ("old", "new", "unresolved"):
        PoisonMessage.objects.create(queue="testapp.Leased", message_id=uuid.uuid4(), reason=name)
    poison.archive(PoisonMessage.objects.exclude(reason="unresolved"))
    PoisonMessage.objects.filter(reason="old").update(archived_at=Now() - 2 * HOUR)
    one = start()

    eventually(lambda: sorted(PoisonMessage.objects.values_list("reason", flat=True)) == left)

    # A later round of the same thread has come by, and left the rest.
    subscriber(dead=True)
    eventually(lambda: not Subscriber.objects.exists())
    assert one.is_alive()
    assert sorted(PoisonMessage.objects.values_list("reason", flat=True)) == left


def test_what_nobody_takes_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    subscriber(Addressed, dead=False)
    Subscriber.objects.update(consumers='[["tests.here", ""]]')
    for _ in range(2):
        Addressed.send({}, recipient="tests.gone", unknown_recipient=True)
    PoisonMessage.objects.create(message_id=uuid.uuid4(), queue="gone.\x1b[2J\nQueue", reason="r")
    housekeeping_ = Housekeeping("default", [], Leadership("default", "tests", uuid.uuid4()))
    for _ in range(2):
        housekeeping_._name_stranded()
    assert [record.getMessage() for record in caplog.records] == [
        "testapp.Addressed: 2 for recipient 'tests.gone', which no live worker has.",
        "gone.⟨U+001B⟩[2J Queue: 1 poison messages, and no queue here has that name.",
    ]
