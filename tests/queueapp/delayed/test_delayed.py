"""The delayed store: the built-in one by its contract, one of a third party, and what can be done by hand."""

from __future__ import annotations

import threading
import uuid
from datetime import UTC, datetime, timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.db.models import F
from django.utils import timezone

from queueapp import InvalidMessage, InvalidOption, delayed
from queueapp.delayed import Delayed, DelayedStore, SqlDelayedStore, dispatch_due, dispatch_next, store_of
from queueapp.models import DelayedMessage, Now, PoisonMessage
from queueapp.models.delivery import Semantics
from tests.in_process_worker import real_commits
from tests.testapp.models import AtMostOnce, Leased, Urgent

pytestmark = real_commits
HOUR = timedelta(hours=1)


def message(**values: Any) -> Delayed:
    given = {"message_id": uuid.uuid4(), "destination": "testapp.Urgent", "due": timezone.now(), "headers": "{}"}
    return Delayed(**(given | {"body": b"x"} | values))


# -- the contract of NServiceBus' delayed stores --------------------------------------------------------------------


def test_the_oldest_due_message_is_fetched_first_and_whole() -> None:
    store = SqlDelayedStore("default")
    store.initialize("tests", Semantics.TRANSACTIONAL)
    now = timezone.now()
    for age in (1, 3, 2):
        store.store(message(due=now - age * HOUR, headers=f'{{"k":"{age}"}}', priority=2, correlation_id="c"))
    store.store(message(due=now + HOUR))

    with transaction.atomic():
        fetched = store.fetch_next_due(now)

    assert fetched is not None
    assert (fetched.headers, fetched.body, fetched.priority, fetched.correlation_id) == ('{"k":"3"}', b"x", 2, "c")
    assert fetched.due == now - 3 * HOUR
    assert store.next() == now - 3 * HOUR


def test_nothing_due_is_none() -> None:
    store = SqlDelayedStore("default")
    assert store.next() is None
    store.store(message(due=timezone.now() + HOUR))

    with transaction.atomic():
        assert store.fetch_next_due(timezone.now()) is None


def test_a_message_that_is_gone_already_is_reported() -> None:
    store = SqlDelayedStore("default")
    store.store(message())
    with transaction.atomic():
        fetched = store.fetch_next_due(timezone.now())
        assert fetched is not None

        assert store.increment_failure_count(fetched) is True
        assert store.remove(fetched) is True
        assert store.remove(fetched) is False
        assert store.increment_failure_count(fetched) is False


def test_a_fetched_message_is_locked_against_other_dispatchers() -> None:
    store = SqlDelayedStore("default")
    store.store(message())
    seen: list[Any] = []

    def fetch() -> None:
        with transaction.atomic():
            seen.append(store.fetch_next_due(timezone.now()))
        connections.close_all()

    with transaction.atomic():
        assert store.fetch_next_due(timezone.now()) is not None
        second_thread = threading.Thread(target=fetch)
        second_thread.start()
        second_thread.join(30)

    assert seen == [None]


# -- dispatch ------------------------------------------------------------------------------------------------------


def test_two_dispatchers_at_once_move_every_message_once() -> None:
    for number in range(60):
        Leased.send({"number": number}, delay=timedelta(0))
    start = threading.Barrier(3)
    moved: list[int] = []

    def run() -> None:
        start.wait(30)
        while (done := dispatch_due("default", 7)).moved:
            moved.append(done.moved)
        connections.close_all()

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert sum(moved) == 60 - DelayedMessage.objects.count()
    assert Leased.objects.count() == sum(moved)


def test_a_dispatch_that_is_rolled_back_moves_nothing() -> None:
    Leased.send({}, delay=timedelta(0))

    with transaction.atomic():
        assert dispatch_due("default", 10).moved == 1
        transaction.set_rollback(True)

    assert DelayedMessage.objects.count() == 1
    assert not Leased.objects.exists()


def test_a_delayed_retry_keeps_its_counts() -> None:
    DelayedMessage.objects.create(
        destination="testapp.Leased", due=Now(), message_id=uuid.uuid4(), deliveries=3, cancels=1, failures="[1]"
    )

    dispatch_due("default", 10)

    assert list(Leased.objects.values_list("deliveries", "cancels", "failures")) == [(3, 1, "[1]")]


def test_the_next_due_time_is_of_the_databases_clock() -> None:
    assert delayed.next_due_in("default") is None
    Leased.send({}, delay=HOUR)
    AtMostOnce.send({}, delay=2 * HOUR)

    remaining = delayed.next_due_in("default")

    assert remaining is not None
    assert abs(remaining - HOUR) < timedelta(seconds=5)


def test_undeliverable_messages_are_found_by_destination_and_those_of_known_queues_are_not_among_them() -> None:
    for number, destination in enumerate(["gone.Queue", "gone.Queue", "gone.Other", "testapp.Leased", "young.Queue"]):
        late = timedelta(seconds=0 if destination == "young.Queue" else 120 + number)
        DelayedMessage.objects.create(destination=destination, due=Now() - late, message_id=uuid.uuid4())

    assert delayed.undeliverable("default") == {"gone.Queue": 2, "gone.Other": 1}


@pytest.mark.parametrize("name", ["testapp.Leased", "testapp_leased", "TESTAPP.leased"])
def test_a_destination_may_be_spelled_as_the_registry_understands_it(name: str) -> None:
    DelayedMessage.objects.create(destination=name, due=Now() - HOUR, message_id=uuid.uuid4())

    assert delayed.undeliverable("default") == {}

    assert dispatch_due("default", 10) == (1, 0, 0)
    assert Leased.objects.count() == 1


def test_several_queues_share_a_round_by_the_age_of_their_first_message() -> None:
    for queue, late in ((Leased, 10), (AtMostOnce, 30), (Leased, 20), (AtMostOnce, 1)):
        queue.send({}, delay=timedelta(0))
        newest = DelayedMessage.objects.latest("pk")
        DelayedMessage.objects.filter(pk=newest.pk).update(due=Now() - timedelta(seconds=late))

    assert dispatch_due("default", 3).moved == 3

    assert (AtMostOnce.objects.count(), Leased.objects.count()) == (2, 1)
    assert dispatch_due("default", 3).moved == 1


# -- by hand -------------------------------------------------------------------------------------------------------


def test_a_delayed_message_can_be_cancelled() -> None:
    sent = Leased.send({}, delay=HOUR)

    assert delayed.cancel(sent) == 1
    assert delayed.cancel(sent) == 0
    assert not DelayedMessage.objects.exists()


def test_a_delayed_message_can_be_rescheduled_in_a_time_or_to_a_time() -> None:
    sent = Leased.send({}, delay=HOUR)

    assert delayed.reschedule(sent, at=datetime(2050, 1, 1, tzinfo=UTC)) == 1
    assert DelayedMessage.objects.get().due == datetime(2050, 1, 1, tzinfo=UTC)
    assert delayed.reschedule(sent, delay=timedelta(0)) == 1
    assert dispatch_due("default", 10).moved == 1
    assert delayed.reschedule(sent, delay=HOUR) == 0


@pytest.mark.parametrize("when", [{"delay": 48 * HOUR}, {"at": datetime(2050, 1, 1, tzinfo=UTC)}])
def test_rescheduling_moves_the_expiry_with_the_time_from_which_it_counts(when: dict[str, Any]) -> None:
    sent = Leased.send({}, delay=HOUR, expires_in=HOUR)
    Leased.send({}, delay=HOUR)
    lifetime = DelayedMessage.objects.annotate(lifetime=F("expires") - F("due")).values_list("lifetime", flat=True)

    assert delayed.reschedule(sent, **when) == 1

    assert abs(lifetime.get(message_id=sent) - HOUR) < timedelta(seconds=1)
    assert lifetime.exclude(message_id=sent).get() is None


@pytest.mark.parametrize("when", [{}, {"delay": HOUR, "at": datetime(2050, 1, 1, tzinfo=UTC)}])
def test_rescheduling_needs_one_time(when: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="either delay or at"):
        delayed.reschedule(uuid.uuid4(), **when)


@pytest.mark.parametrize(
    ("when", "accepted"),
    [
        ({"at": datetime(2050, 1, 1)}, "an aware datetime"),
        ({"at": "2050-01-01"}, "an aware datetime"),
        ({"delay": 5}, "a timedelta"),
        ({"at": datetime(9999, 12, 31, 23, tzinfo=UTC)}, "within 100 years"),
        ({"delay": timedelta(days=200 * 365)}, "100 years"),
    ],
)
def test_rescheduling_takes_the_times_that_a_send_takes(when: dict[str, Any], accepted: str) -> None:
    """A naive time was one of the project's zone on PostgreSQL, and one of the process' on SQL Server."""
    sent = Leased.send({}, delay=HOUR)
    due = DelayedMessage.objects.get().due

    for call in (lambda: delayed.reschedule(sent, **when), lambda: Leased.send({}, **when)):
        with pytest.raises(InvalidMessage, match=accepted):
            call()

    assert DelayedMessage.objects.get().due == due


def test_delayed_messages_can_be_made_due() -> None:
    for _ in range(3):
        Leased.send({}, delay=HOUR)

    assert delayed.make_due(DelayedMessage.objects.all()) == 3

    assert dispatch_due("default", 10).moved == 3


def test_messages_of_a_queue_that_is_no_more_are_moved_to_another_by_a_command() -> None:
    for n in range(3):
        Leased.send({"n": n}, delay=timedelta(0))
    Leased.send({"n": 3}, delay=HOUR)
    DelayedMessage.objects.update(destination="gone.Shop", retries=2)
    Leased.send({"n": 4}, delay=HOUR)
    assert delayed.undeliverable("default", timedelta(0)) == {"gone.Shop": 3}
    out = StringIO()

    call_command("movedelayed", "gone.Shop", "testapp.Urgent", dry_run=True, stdout=out)
    assert dispatch_due("default", 10).moved == 0
    call_command("movedelayed", "gone.Shop", "testapp.Urgent", stdout=out)

    assert out.getvalue().splitlines() == [
        "4 delayed messages would go to testapp.Urgent.",
        "4 delayed messages of gone.Shop go to testapp.Urgent now.",
    ]
    assert dispatch_due("default", 10).moved == 3
    assert [row.body for row in Urgent.objects.order_by("seq")] == [b'{"n":0}', b'{"n":1}', b'{"n":2}']
    assert sorted(DelayedMessage.objects.values_list("destination", "retries")) == [
        ("testapp.Leased", 0),
        ("testapp.Urgent", 0),
    ]


def test_delayed_messages_are_moved_in_batches_and_only_where_a_dispatcher_delivers_them() -> None:
    for _ in range(5):
        Leased.send({}, delay=HOUR)

    moved = [delayed.readdress("testapp.Leased", Urgent, limit=2) for _ in range(4)]

    assert moved == [2, 2, 1, 0]
    with pytest.raises(InvalidOption, match="another one than they go to already"):
        delayed.readdress("testapp.Urgent", Urgent)
    with pytest.raises(CommandError, match=r"one that delivers to testapp\.Urgent: 'default'"):
        call_command("movedelayed", "gone.Shop", "testapp.Urgent", database="elsewhere")
    with pytest.raises(CommandError, match="There is no queue"):
        call_command("movedelayed", "testapp.Urgent", "gone.Shop")


# -- a store of a third party --------------------------------------------------------------------------------------


class ListStore(DelayedStore):
    """Keeps messages in memory, with the shortcomings that a test gives it."""

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        self.messages: list[Delayed] = []
        self.vanishing = False

    def initialize(self, name: str, semantics: Semantics) -> None: ...

    def store(self, message: Delayed) -> None:
        self.messages.append(message)

    def fetch_next_due(self, at: datetime) -> Delayed | None:
        return next(
            (message for message in sorted(self.messages, key=lambda item: item.due) if message.due <= at), None
        )

    def remove(self, message: Delayed) -> bool:
        if self.vanishing or message not in self.messages:
            return False
        self.messages.remove(message)
        return True

    def increment_failure_count(self, message: Delayed) -> bool:
        message.retries += 1
        return True

    def next(self) -> datetime | None:
        return min((message.due for message in self.messages), default=None)


@pytest.fixture
def lists(settings: Any) -> ListStore:
    settings.QUEUEAPP = {"DELAYED_STORE": "tests.queueapp.delayed.test_delayed.ListStore"}
    store = store_of("default")
    assert isinstance(store, ListStore)
    return store


def later() -> datetime:
    return timezone.now() + 2 * HOUR


def test_a_third_partys_store_keeps_delayed_messages(lists: ListStore) -> None:
    sent = Urgent.send({}, delay=HOUR, expires_in=HOUR, priority=1, headers={"k": "v"})

    assert not DelayedMessage.objects.exists()
    (kept,) = lists.messages
    assert (kept.message_id, kept.destination, kept.priority) == (sent, "testapp.Urgent", 1)
    assert kept.expires is not None
    assert kept.expires - kept.due == HOUR


def test_what_is_due_in_it_goes_to_its_queue(lists: ListStore) -> None:
    sent = Urgent.send({"a": 1}, delay=HOUR, priority=1)

    assert dispatch_next(lists, timezone.now()) is None
    assert dispatch_next(lists, later()) == (1, 0, 0)

    row = Urgent.objects.get()
    assert (row.id, row.body, row.priority) == (sent, b'{"a":1}', 1)
    assert lists.messages == []


def test_what_it_states_was_dispatched_already_is_not_sent_twice(lists: ListStore) -> None:
    Urgent.send({}, delay=HOUR)
    lists.vanishing = True

    assert dispatch_next(lists, later()) == (0, 0, 0)

    assert not Urgent.objects.exists()


def test_a_message_of_it_without_a_queue_is_poison(lists: ListStore) -> None:
    lists.store(message(destination="gone.Queue"))

    assert dispatch_next(lists, later()) == (0, 1, 0)

    assert PoisonMessage.objects.get().destination == "gone.Queue"
    assert lists.messages == []


@pytest.mark.parametrize("headers", ["\0", "\ud800"])
def test_a_message_of_it_that_no_table_takes_is_poison_after_so_many_tries_and_in_nobodys_way(
    lists: ListStore, headers: str, settings: Any
) -> None:
    settings.QUEUEAPP |= {"NUMBER_OF_RETRIES": 1}
    lists.store(message(headers=headers, priority=1, is_barrier=True))
    sent = Urgent.send({}, delay=timedelta(0))

    rounds = [dispatch_next(lists, later()) for _ in range(3)]

    assert rounds == [(0, 0, 1), (0, 1, 0), (1, 0, 0)]
    kept = PoisonMessage.objects.get()
    assert (kept.body, kept.queue, kept.priority, kept.is_barrier) == (b"x", "testapp.Urgent", 1, True)
    assert kept.attempts == 2
    assert kept.reason.startswith("could not be forwarded to testapp.Urgent [kept without details: ")
    assert Urgent.objects.get().id == sent


def test_its_next_due_time_counts_as_well(lists: ListStore) -> None:
    Urgent.send({}, delay=HOUR)
    DelayedMessage.objects.create(destination="testapp.Leased", due=Now() + 5 * HOUR, message_id=uuid.uuid4())

    remaining = delayed.next_due_in("default")

    assert remaining is not None
    assert abs(remaining - HOUR) < timedelta(seconds=5)


@pytest.mark.parametrize("path", ["no.such.module", "queueapp.delayed.Dispatched", "queueapp.delayed.Nothing"])
def test_a_store_that_is_none_is_refused(settings: Any, path: str) -> None:
    settings.QUEUEAPP = {"DELAYED_STORE": path}

    with pytest.raises(InvalidOption, match="DELAYED_STORE"):
        store_of("default")
