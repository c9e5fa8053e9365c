"""Options of different subjects on one queue: limits, expiry, topics, leases, and what an operator sets meanwhile."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from queueapp import (
    NEVER,
    InvalidOption,
    KeepAsPoison,
    Leasing,
    PublishTo,
    Semantics,
    checks,
    consumer,
    overrides,
    publish,
)
from queueapp.consuming.registry import registered
from queueapp.flow.filters import SubscriberFilter
from queueapp.models import JournalEntry, Now, PoisonMessage
from queueapp.operations import control, statistics
from queueapp.operations.expiration import delete_expired, in_time, settle
from queueapp.operations.expiration import waiting as deferred_acks
from queueapp.topics.backfill import QueueFeeder
from queueapp.topics.evaluate_pending import evaluate_pending_messages
from tests.databases import DATABASES, marks_of
from tests.in_process_worker import eventually, real_commits
from tests.testapp.leases import Aging, Deferring, Forever
from tests.testapp.models import (
    Bookings,
    CappedOnce,
    CappedUrgent,
    FlightAudit,
    FlightMail,
    LateFlights,
    Leased,
    Packed,
    Readable,
    Recovered,
)

pytestmark = real_commits
HOUR, MOMENT = timedelta(hours=1), timedelta(milliseconds=1)
Change = Callable[..., None]


class Note(msgspec.Struct):
    minutes: int


@pytest.fixture(params=[pytest.param(alias, id=kind, marks=marks_of(alias)) for kind, alias in DATABASES.items()])
def alias(request: pytest.FixtureRequest) -> Iterator[str]:
    overrides.forget()
    yield request.param
    overrides.load(request.param, {})
    overrides.forget()


def put(queue: Any, alias: str, body: bytes, headers: str = "{}") -> int:
    """As a producer does that knows nothing of us; the seq."""
    return int(queue.objects.using(alias).create(id=uuid.uuid4(), headers=headers, body=body).seq)


def give_up_one(queue: Any, alias: str) -> None:
    queue.objects.using(alias).update(expires=Now() - timedelta(seconds=1))
    assert delete_expired(queue, alias, 10) == 1


def reasons(alias: str) -> list[str]:
    return list(PoisonMessage.objects.using(alias).values_list("reason", flat=True))


def with_expired_lease(queue: Any, alias: str) -> tuple[Any, Any]:
    """(batch, message) of a lease that is over."""
    batch = queue.receive(1, lease_period=MOMENT, using=alias).__enter__()
    (message,) = batch
    eventually(lambda: queue.objects.using(alias).filter(seq=message.seq, lease_expires__lt=Now()).exists())
    return batch, message


# -- PublishTo and topics --------------------------------------------------------------------------------------------


def test_published_to_a_topic_a_message_is_what_it_was_in_its_queue(alias: str, delivery: Change) -> None:
    delivery(Leased, on_expired=PublishTo("AUDIT_DIRECT"))
    put(Leased, alias, b'{"minutes": 7}')
    give_up_one(Leased, alias)
    with FlightAudit.receive(using=alias) as batch:
        (message,) = batch
        assert message.body == {"minutes": 7}


def test_published_to_a_topic_with_a_filter_a_message_of_no_content_type_has_fields(
    alias: str, delivery: Change
) -> None:
    delivery(Leased, on_expired=PublishTo("DEPARTURES"))
    put(Leased, alias, b'{"minutes": 70}')
    give_up_one(Leased, alias)
    assert LateFlights.objects.using(alias).count() == 1
    assert reasons(alias) == []


def test_what_every_filter_of_the_topic_refuses_is_poison(alias: str, delivery: Change) -> None:
    delivery(Leased, on_expired=PublishTo("DEPARTURES"))
    Leased.send({"minutes": 1}, expires_in=HOUR, using=alias)
    give_up_one(Leased, alias)
    (reason,) = reasons(alias)
    assert "could not be published to DEPARTURES" in reason
    assert "no queue of the topic 'DEPARTURES' has a filter that matches it" in reason


def test_published_to_a_topic_each_consumer_gets_its_copy(alias: str, delivery: Change) -> None:
    delivery(Leased, on_expired=PublishTo("FLIGHTS"))

    def handle(message: Note) -> None: ...

    try:
        for name in ("one", "two"):
            consumer(FlightMail, name=name)(handle)
        Leased.send(Note(1), expires_in=HOUR, correlation_id="c", reply_to="r", using=alias)
        give_up_one(Leased, alias)
        rows = FlightMail.objects.using(alias).order_by("recipient")
        assert list(rows.values_list("recipient", "correlation_id", "reply_to_address")) == [
            ("one", "c", "r"),
            ("two", "c", "r"),
        ]
    finally:
        for registration in registered.of(FlightMail):
            registered.remove(registration.name)


def test_bytes_with_a_type_go_to_each_consumer_of_it(alias: str) -> None:
    def handle(message: Note) -> None: ...

    try:
        for name in ("one", "two"):
            consumer(FlightMail, name=name)(handle)
        headers = {"type": registered.of(FlightMail)[0].type_name, "content-type": "application/json"}
        FlightMail.send(b'{"minutes":1}', headers=headers, using=alias)
        FlightMail.send_many([b'{"minutes":2}'], headers=headers, using=alias)
        recipients = FlightMail.objects.using(alias).order_by("seq").values_list("recipient", flat=True)
        assert sorted(recipients) == ["one", "one", "two", "two"]
    finally:
        for registration in registered.of(FlightMail):
            registered.remove(registration.name)


@pytest.mark.parametrize("options", [{"underlying_topic": "^a"}, {"underlying_topic": "("}])
def test_checks_of_leases_leave_wrong_topics_to_those_of_topics(delivery: Change, options: dict[str, Any]) -> None:
    delivery(Leased, on_expired=PublishTo("Readable"))
    delivery(Readable, **options)
    assert checks.check_leases() == []
    assert {finding.id for finding in checks.check_topics()} & {"queueapp.E020", "queueapp.E022"}


def test_publish_to_a_name_that_no_topic_may_have_is_refused() -> None:
    with pytest.raises(InvalidOption, match=r"PublishTo\.topic = 'xxx.*1 to 255 characters"):
        PublishTo("x" * 256)


# -- AT_MOST_ONCE that keeps what it sent ----------------------------------------------------------------------------


def test_expire_of_a_sent_message_keeps_it_whole(alias: str, delivery: Change) -> None:
    delivery(CappedOnce, on_expired=KeepAsPoison())
    CappedOnce.send({"n": 1}, correlation_id="c", reply_to="r", expires_in=HOUR, using=alias)
    with CappedOnce.receive(using=alias) as batch:
        (message,) = batch
        assert message.deliveries == 1
        message.expire("not wanted")
    kept = PoisonMessage.objects.using(alias).get()
    assert (kept.correlation_id, kept.reply_to_address, kept.deliveries) == ("c", "r", 1)
    assert kept.expires is not None
    assert not CappedOnce.objects.using(alias).exists()


def test_release_of_leases_leaves_what_was_sent_alone(alias: str) -> None:
    CappedOnce.send({"n": 1}, using=alias)
    with CappedOnce.receive(using=alias) as batch:
        (message,) = batch
        assert control.release_leases(CappedOnce, [message.seq], using=alias) == 0
        with CappedOnce.receive(using=alias) as second_batch:
            assert len(second_batch) == 0


# -- expiry and the journal ------------------------------------------------------------------------------------------


def test_never_may_be_published_to_a_journaled_topic(alias: str, settings: Any) -> None:
    settings.QUEUEAPP = {"JOURNAL": {"^journaled": HOUR}}
    publish("journaled.orders", {"n": 1}, expires_in=NEVER, using=alias)
    assert Recovered.objects.using(alias).get().expires is None
    assert JournalEntry.objects.using(alias).get().expires.year > 9000


def test_filled_from_the_journal_a_queue_keeps_its_own_time_in_its_statements(
    alias: str, delivery: Change, settings: Any
) -> None:
    settings.QUEUEAPP = {"JOURNAL": {"^journaled": HOUR}}
    publish("journaled.aging", {"n": 1}, unrouted=True, using=alias)
    publish("journaled.aging", {"n": 2}, expires_in=NEVER, unrouted=True, using=alias)
    delivery(Aging, underlying_topic="journaled.aging", recovery_point="epoch")
    Aging.delivery.expires_by_age = True
    filler = QueueFeeder(Aging, alias)
    filler.attach()
    eventually(lambda: filler.fill(10) is not None and Aging.objects.using(alias).count() == 2)
    said_nothing, never = Aging.objects.using(alias).order_by("seq").values_list("expires", flat=True)
    assert said_nothing is None
    assert never.year > 9000


# -- acks by expression ----------------------------------------------------------------------------------------------


def test_ack_by_expression_reads_bodies_by_the_message_type_of_the_queue(alias: str, delivery: Change) -> None:
    delivery(Packed, leasing=Leasing.SUBLET)
    Packed.send({"n": 1}, using=alias)
    put(Packed, alias, msgspec.msgpack.encode({"n": 2}))
    put(Packed, alias, b"\xc1")
    evaluate_pending_messages(Packed, alias)
    assert Packed.ack(where="/n < 5", using=alias) == 2
    assert len(reasons(alias)) == 1


def test_ack_by_expression_knows_the_topic(alias: str, delivery: Change) -> None:
    delivery(Bookings, leasing=Leasing.SUBLET, semantics=Semantics.AT_LEAST_ONCE)
    Bookings.send({"n": 1}, using=alias)
    publish("bookings", {"n": 2}, using=alias)
    assert Bookings.ack(where="TOPIC_NAME() = 'bookings'", using=alias) == 0
    assert Bookings.ack(where="TOPIC_NAME() = 'FLIGHTS'", using=alias) == 2


def test_filter_of_a_subscriber_reads_as_the_queue_does() -> None:
    passes = SubscriberFilter("/n = 2", "testapp.Packed").passes
    packed = msgspec.msgpack.encode
    assert [passes("{}", packed({"n": n})) for n in (1, 2)] == [False, True]
    knows = SubscriberFilter("TOPIC_NAME() = 'FLIGHTS'", "testapp.Bookings").passes
    assert [knows(headers, b"{}") for headers in ("{}", '{"topic": "AUDIT_DIRECT"}')] == [True, False]


@pytest.mark.parametrize("given", [None, 5.0, "abc", [1, None], object()])
def test_bookmarks_that_are_none_are_refused_by_name(delivery: Change, given: Any) -> None:
    delivery(Leased, leasing=Leasing.SUBLET)
    for end in (Leased.ack, Leased.cancel, Leased.expire, lambda item: Leased.extend(item, HOUR)):
        with pytest.raises(InvalidOption, match="bookmarks = "):
            end(given)


@pytest.mark.parametrize("given", [5, b"/n > 1", object()])
def test_where_that_is_no_text_is_refused_by_name(delivery: Change, given: Any) -> None:
    delivery(Leased, leasing=Leasing.SUBLET)
    with pytest.raises(InvalidOption, match="where = "):
        Leased.ack(where=given)


@pytest.mark.parametrize("given", [5, "abc", uuid.uuid4(), [None]])
def test_ids_that_are_none_are_refused_by_name(given: Any) -> None:
    with pytest.raises(InvalidOption, match="ids = "):
        Deferring.ack(ids=given)


def test_ack_by_id_of_a_message_that_is_held_waits_for_it(alias: str, delivery: Change) -> None:
    delivery(LateFlights, leasing=Leasing.SUBLET, deferred_ack_expiration=HOUR)
    put(LateFlights, alias, b'{"minutes": 20}')
    identity = LateFlights.objects.using(alias).get().id
    assert LateFlights.ack(ids=[identity], using=alias) == 0
    assert settle(LateFlights, alias) == (0, 0)
    assert deferred_acks(LateFlights, alias) == 1
    assert evaluate_pending_messages(LateFlights, alias).freed == 1
    assert settle(LateFlights, alias) == (1, 0)
    assert not LateFlights.objects.using(alias).exists()
    assert deferred_acks(LateFlights, alias) == 0


# -- leases and limits of what is out --------------------------------------------------------------------------------


def test_extend_of_an_expired_lease_takes_no_permit_of_another_message(alias: str, delivery: Change) -> None:
    delivery(CappedUrgent, max_backlog=1)
    CappedUrgent.send({"n": 1}, using=alias)
    batch, message = with_expired_lease(CappedUrgent, alias)
    CappedUrgent.send({"n": 2}, priority=2, using=alias)
    # Its permit is free a moment after the lease has expired.
    over = CappedUrgent.objects.using(alias).filter(seq=message.seq, lease_expires__lt=Now() - timedelta(seconds=0.2))
    eventually(over.exists)
    with CappedUrgent.receive(1, using=alias) as second_batch:
        assert [message.body["n"] for message in second_batch] == [2]
        assert CappedUrgent.extend(message.seq, HOUR, client=batch._batch.lease, using=alias) == 0
        leased = CappedUrgent.objects.using(alias).filter(lease_token__isnull=False, lease_expires__gte=Now())
        assert leased.count() == 1


# -- what an operator sets -------------------------------------------------------------------------------------------


def test_lease_period_that_is_set_is_enough_to_receive(alias: str) -> None:
    Forever.send({"n": 1}, using=alias)
    control.set_option(Forever, "lease_period", timedelta(seconds=20), using=alias)
    with Forever.receive(using=alias) as batch:
        assert len(batch) == 1
        remaining = Forever.objects.using(alias).filter(lease_expires__lte=Now() + timedelta(seconds=21))
        assert remaining.count() == 1
    control.set_option(Forever, "lease_period", None, using=alias)
    with pytest.raises(InvalidOption, match="do not expire"), Forever.receive(using=alias):
        pass


def test_expiration_that_is_set_holds_for_purges_figures_and_lists_of_other_processes(alias: str) -> None:
    Aging.send({"n": 1}, using=alias)
    control.set_option(Aging, "expiration", MOMENT, using=alias)
    waiting = Aging.objects.using(alias).filter
    eventually(lambda: not waiting(in_time(Aging, alias)).exists())
    overrides.load(alias, {})  # a process without the override yet
    overrides.forget()
    assert waiting(in_time(Aging, alias)).count() == 0
    overrides.load(alias, {})
    overrides.forget()
    assert delete_expired(Aging, alias, 10) == 1

    control.set_option(Aging, "expiration", None, using=alias)
    Aging.send({"n": 2}, using=alias)
    assert waiting(in_time(Aging, alias)).count() == 1
    assert delete_expired(Aging, alias, 10) == 0


def test_expiration_that_is_set_holds_for_the_figures() -> None:
    Aging.send({"n": 1})
    control.set_option(Aging, "expiration", MOMENT)
    eventually(lambda: [(stats.waiting, stats.expired) for stats in statistics.queue_stats([Aging])] == [(0, 1)])
    control.set_option(Aging, "expiration", None)
    assert [(stats.waiting, stats.expired) for stats in statistics.queue_stats([Aging])] == [(1, 0)]
