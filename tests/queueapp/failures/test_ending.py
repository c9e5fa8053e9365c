"""What a queue does with what it gives up: ``on_expired``, for each of the four reasons, on every path."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import DatabaseError, connections, transaction

from queueapp import Drop, InvalidMessage, InvalidOption, KeepAsPoison, Leasing, PublishTo, signals
from queueapp.failures import expire_actions
from queueapp.models import Now, PoisonMessage, Subscriber
from queueapp.operations import control
from queueapp.operations.expiration import delete_expired
from queueapp.services.orphaned_leases import release_orphaned_leases
from queueapp.sql import queue_sql
from tests.databases import DATABASES, marks_of
from tests.testapp.leases import Aging
from tests.testapp.models import AtMostOnce, Leased, Transactional, Urgent

HOUR = timedelta(hours=1)


@pytest.fixture(params=[pytest.param(alias, id=kind, marks=marks_of(alias)) for kind, alias in DATABASES.items()])
def alias(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def reported() -> Iterator[list[tuple[Any, ...]]]:
    """What receivers of ``expired`` got: (queue, count, reason, reasons)."""
    found: list[tuple[Any, ...]] = []

    def receiver(sender: Any, queue: Any, count: int, ids: Any, reason: str, reasons: Any, **_: Any) -> None:
        assert len(ids) == count
        found.append((queue.__name__, count, reason, reasons))

    signals.expired.connect(receiver)
    yield found
    signals.expired.disconnect(receiver)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Topics are queues here: "urgent" is one, and no other is there."""

    def publish(topic: str, body: Any, *, headers: Any, using: str, **_: Any) -> None:
        if topic != "urgent":
            raise InvalidMessage(f"no topic {topic}")
        Urgent.send(body, headers=headers, using=using)

    monkeypatch.setattr(expire_actions, "publisher", publish)


def wants(monkeypatch: pytest.MonkeyPatch, queue: Any, **options: Any) -> None:
    for name, value in options.items():
        monkeypatch.setattr(queue.delivery, name, value)


def send_expired(queue: Any, alias: str, count: int = 1) -> None:
    queue.send_many([{"n": n} for n in range(count)], expires_in=HOUR, using=alias)
    queue.objects.using(alias).update(expires=Now() - timedelta(seconds=1))


def reasons_of(alias: str) -> list[str]:
    return list(PoisonMessage.objects.using(alias).order_by("number").values_list("reason", flat=True))


# -- time_limit -----------------------------------------------------------------------------------------------------


def test_time_limit_drops_by_default(alias: str, reported: list[Any]) -> None:
    send_expired(Leased, alias, 2)
    assert delete_expired(Leased, alias, 10) == 2
    assert reasons_of(alias) == []
    assert reported == [("Leased", 2, "its time was over", ("time_limit",))]


@pytest.mark.parametrize("queue", [Leased, Transactional, AtMostOnce])
def test_time_limit_is_kept_as_poison(
    alias: str, queue: Any, reported: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wants(monkeypatch, queue, on_expired=KeepAsPoison())
    send_expired(queue, alias, 3)

    assert [delete_expired(queue, alias, 2) for _ in range(2)] == [2, 1]

    kept = PoisonMessage.objects.using(alias).order_by("number")
    assert [bytes(message.body) for message in kept] == [b'{"n":0}', b'{"n":1}', b'{"n":2}']
    assert {item.reason for item in kept} == {"time_limit: its time was over"}
    assert [notification[1:] for notification in reported] == [
        (2, "its time was over", ("time_limit",)),
        (1, "its time was over", ("time_limit",)),
    ]


def test_time_limit_is_published_in_the_same_transaction(
    alias: str, reported: list[Any], published: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wants(monkeypatch, Leased, on_expired=PublishTo("urgent", reasons={"time_limit"}))
    Leased.send({"n": 1}, headers={"tenant": "a"}, expires_in=HOUR, using=alias)
    Leased.objects.using(alias).update(expires=Now() - timedelta(seconds=1))

    with transaction.atomic(using=alias):
        assert delete_expired(Leased, alias, 10) == 1
        assert Urgent.objects.using(alias).count() == 1
        transaction.set_rollback(True, using=alias)
    assert (Leased.objects.using(alias).count(), Urgent.objects.using(alias).count()) == (1, 0)
    assert reported == []

    assert delete_expired(Leased, alias, 10) == 1
    with Urgent.receive(using=alias) as batch:
        (message,) = batch
        assert message.body == {"n": 1}
        assert message.headers["tenant"] == "a"
        assert message.headers["expired-from"] == Leased._meta.label
        assert message.headers["expired-for"] == "time_limit"


@pytest.mark.parametrize("body", [{"n": 1}, b"\x00\xff", None])
def test_time_limit_is_published_to_a_topic(alias: str, body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The topic of a queue that has no other name for it; what the body is stays as it was said."""
    wants(monkeypatch, Leased, on_expired=PublishTo("Urgent"))
    Leased.send(body, headers={"tenant": "a"}, expires_in=HOUR, using=alias)
    Leased.objects.using(alias).update(expires=Now() - timedelta(seconds=1))

    assert delete_expired(Leased, alias, 10) == 1

    assert reasons_of(alias) == []
    with Urgent.receive(using=alias) as batch:
        (message,) = batch
        assert message.body == body
        assert message.headers["expired-from"] == Leased._meta.label
        assert message.headers["tenant"] == "a"


def test_what_cannot_be_published_is_poison_with_its_bytes(
    alias: str, published: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wants(monkeypatch, Leased, on_expired=PublishTo("nowhere"))
    send_expired(Leased, alias)
    Leased.objects.using(alias).update(body=b"\xff")

    assert delete_expired(Leased, alias, 10) == 1

    (kept,) = PoisonMessage.objects.using(alias)
    assert bytes(kept.body) == b"\xff"
    assert "time_limit: its time was over [it could not be published to nowhere: " in kept.reason
    assert "no topic nowhere" in kept.reason


@pytest.mark.parametrize("published_before", [0, 1])
def test_what_meets_a_lock_while_it_is_published_stays_in_its_queue(
    alias: str, published: None, monkeypatch: pytest.MonkeyPatch, published_before: int
) -> None:
    """A lock passes by itself, so it makes nothing poison: what was published before it is taken back, and a later look
    publishes all."""
    wants(monkeypatch, Leased, on_expired=PublishTo("urgent"))
    send_expired(Leased, alias, 2)
    Transactional.send({}, using=alias)
    seq = Transactional.objects.using(alias).get().seq
    publish, bodies = expire_actions.publisher, list[Any]()

    def publish_and_meet_a_lock(topic: str, body: Any, **options: Any) -> None:
        assert publish is not None
        publish(topic, body, **options)
        bodies.append(body)
        if len(bodies) > published_before:  # late: the message is there already
            queue_sql(Transactional, connections[alias]).failures.lock(connections[alias], seq, None, 50)

    second_connection = connections[alias].copy()
    try:
        with second_connection.cursor():
            second_connection.set_autocommit(False)
            queue_sql(Transactional, second_connection).failures.lock(second_connection, seq, None, 1_000)
        monkeypatch.setattr(expire_actions, "publisher", publish_and_meet_a_lock)
        with pytest.raises(DatabaseError):
            delete_expired(Leased, alias, 10)
    finally:
        second_connection.rollback()
        second_connection.close()
    assert (Leased.objects.using(alias).count(), Urgent.objects.using(alias).count()) == (2, 0)
    assert reasons_of(alias) == []

    assert delete_expired(Leased, alias, 10) == 2
    assert (Leased.objects.using(alias).count(), Urgent.objects.using(alias).count()) == (0, 2)


# -- forced_expire --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", [Leased, Transactional, AtMostOnce])
def test_forced_expire_is_kept_as_poison(
    alias: str, queue: Any, reported: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wants(monkeypatch, queue, on_expired=KeepAsPoison())
    queue.send({"n": 1}, using=alias)
    with queue.receive(using=alias) as batch:
        next(iter(batch)).expire("recalled")

    (kept,) = PoisonMessage.objects.using(alias)
    assert (kept.reason, bytes(kept.body), kept.deliveries) == ("forced_expire: recalled", b'{"n":1}', 1)
    assert not queue.objects.using(alias).exists()
    assert [notification[2:] for notification in reported] == [("recalled", ("forced_expire",))]


def test_forced_expire_by_bookmark_is_published(alias: str, published: None, monkeypatch: pytest.MonkeyPatch) -> None:
    wants(monkeypatch, Leased, on_expired=PublishTo("urgent"), leasing=Leasing.SUBLET)
    Leased.send_many([{}] * 2, using=alias)

    assert Leased.expire([row.seq for row in Leased.objects.using(alias)], using=alias) == 2
    assert Urgent.objects.using(alias).count() == 2


def test_reasons_forced_expire_and_time_limit_are_both_named(
    alias: str, reported: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wants(monkeypatch, Leased, on_expired=KeepAsPoison())
    Leased.send({}, expires_in=HOUR, using=alias)
    with Leased.receive(using=alias) as batch:
        (message,) = batch
        Leased.objects.using(alias).update(expires=Now() - timedelta(seconds=1))
        message.expire("recalled")

    assert reasons_of(alias) == ["time_limit, forced_expire: its time was over and recalled"]
    assert reported[0][3] == ("time_limit", "forced_expire")


# -- limits ---------------------------------------------------------------------------------------------------------


def test_limits_may_drop(alias: str, reported: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    wants(monkeypatch, Leased, max_cancels=1, on_expired=Drop(reasons=("max_cancels",)))
    Leased.send({}, using=alias)
    with Leased.receive(using=alias) as batch:
        next(iter(batch)).cancel()

    assert not Leased.objects.using(alias).exists()
    assert reasons_of(alias) == []
    assert [notification[2:] for notification in reported] == [("max_cancels", ("max_cancels",))]


def test_limits_are_poison_where_only_time_is_named(
    alias: str, published: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wants(monkeypatch, Leased, max_cancels=1, on_expired=PublishTo("urgent", reasons="time_limit"))
    Leased.send({}, using=alias)
    with Leased.receive(using=alias) as batch:
        next(iter(batch)).cancel()

    assert reasons_of(alias) == ["max_cancels: given back 1 times"]
    assert not Urgent.objects.using(alias).exists()


def test_max_deliveries_when_a_dead_subscribers_leases_are_released(
    alias: str, reported: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wants(monkeypatch, Leased, max_deliveries=2)
    Leased.send_many([{"n": n} for n in range(3)], using=alias)
    dead = uuid.uuid4()
    Leased.objects.using(alias).filter(body=b'{"n":1}').update(deliveries=1)
    with Leased.receive(3, client=dead, using=alias) as batch:
        batch._messages.clear()  # as of a process that is gone
    Subscriber.objects.using(alias).create(
        pk=dead,
        queue=Leased._meta.label,
        table=Leased._meta.db_table,
        host="h",
        process=1,
        supervisor=1,
        alive_until=Now() - HOUR,
    )

    assert release_orphaned_leases(alias) == 3

    assert reasons_of(alias) == ["max_deliveries: handed out 2 times"]
    assert [bytes(row.body) for row in Leased.objects.using(alias).order_by("seq")] == [b'{"n":0}', b'{"n":2}']
    assert not Leased.objects.using(alias).filter(lease_token__isnull=False).exists()
    assert [notification[2:] for notification in reported] == [("max_deliveries", ("max_deliveries",))]


def test_max_deliveries_when_an_operator_releases_leases(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Leased.send_many([{"n": n} for n in range(2)], using=alias)
    Leased.objects.using(alias).filter(body=b'{"n":1}').update(deliveries=1)
    with Leased.receive(2, using=alias) as batch:
        seqs = [message.seq for message in batch]
        batch._messages.clear()
    wants(monkeypatch, Leased, max_deliveries=2)

    assert control.release_leases(Leased, seqs, using=alias) == 2

    assert reasons_of(alias) == ["max_deliveries: handed out 2 times"]
    assert Leased.objects.using(alias).get().lease_token is None


def test_reasons_time_limit_is_named_beside_a_limit(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it follows from the queue's time; and what a limit gives up is not dropped for that."""
    wants(monkeypatch, Aging, max_cancels=1)
    Aging.send({}, using=alias)
    with Aging.receive(using=alias) as batch:
        (message,) = batch
        Aging.objects.using(alias).update(enqueued_at=Now() - 2 * HOUR)
        message.cancel()

    assert reasons_of(alias) == ["time_limit, max_cancels: its time was over and given back 1 times"]


# -- the classes ----------------------------------------------------------------------------------------------------


def test_bad_actions_are_refused_with_what_is_accepted() -> None:
    with pytest.raises(InvalidOption, match=r"Drop\.reasons = 'age' .* some of 'time_limit', 'forced_expire'"):
        Drop(reasons="age")
    with pytest.raises(InvalidOption, match=r"KeepAsPoison\.reasons = \(\)"):
        KeepAsPoison(reasons=())
    with pytest.raises(InvalidOption, match=r"PublishTo\.topic = ' '"):
        PublishTo(" ")
    assert PublishTo("a", reasons={"max_deliveries", "time_limit"}).reasons == ("time_limit", "max_deliveries")
