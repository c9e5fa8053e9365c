"""``receive()`` and the limits of its queue: messages with too many deliveries or cancels are poison, and no receiver
gets it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction

from queueapp import LeaseLost
from queueapp.models import Now, PoisonMessage
from tests.in_process_worker import real_commits
from tests.testapp.models import Leased, Transactional

pytestmark = real_commits
LEASING = pytest.mark.parametrize("queue", [Leased, Transactional])


def send(queue: Any, count: int) -> None:
    queue.send_many({"number": number} for number in range(count))


def bodies(rows: Any) -> list[bytes]:
    return [bytes(row.body) for row in rows]


@LEASING
def test_max_cancels_the_one_that_reaches_it_makes_it_poison(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue.delivery, "max_cancels", 2)
    send(queue, 2)
    for _ in range(2):
        with queue.receive(1) as batch:
            for message in batch:
                message.cancel()

    kept = PoisonMessage.objects.get()
    assert kept.reason == "max_cancels: given back 2 times"
    assert (kept.deliveries, kept.cancels, kept.attempts, kept.queue) == (2, 2, 0, queue._meta.label)
    assert bytes(kept.body) == b'{"number":0}'
    assert bodies(queue.objects.all()) == [b'{"number":1}']


@LEASING
def test_a_block_that_is_left_gives_back_within_the_limit(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue.delivery, "max_cancels", 1)
    send(queue, 3)
    with queue.receive(3) as batch:
        iterator = iter(batch)
        next(iterator).ack()
        next(iterator)  # begun and not ended; the third is not even begun

    assert bodies(PoisonMessage.objects.all()) == [b'{"number":1}']
    (row,) = queue.objects.all()
    assert (bytes(row.body), row.deliveries, row.cancels) == (b'{"number":2}', 0, 0)


@LEASING
def test_max_deliveries_the_one_that_reaches_it_is_the_last(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue.delivery, "max_deliveries", 2)
    send(queue, 1)
    for expected in (1, 2):
        with queue.receive() as batch:
            assert [message.deliveries for message in batch] == [expected]

    assert PoisonMessage.objects.get().reason == "max_deliveries: handed out 2 times"
    assert not queue.objects.exists()


@LEASING
def test_reasons_of_all_limits_that_are_reached_are_named(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue.delivery, "max_deliveries", 1)
    monkeypatch.setattr(queue.delivery, "max_cancels", 1)
    send(queue, 1)
    with queue.receive() as batch:
        next(iter(batch)).cancel()

    reason = "max_cancels, max_deliveries: given back 1 times and handed out 1 times"
    assert PoisonMessage.objects.get().reason == reason


@LEASING
def test_an_ack_is_in_time_however_often_it_was_handed_out(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue.delivery, "max_deliveries", 1)
    monkeypatch.setattr(queue.delivery, "max_cancels", 1)
    send(queue, 1)
    with queue.receive() as batch:
        next(iter(batch)).ack()

    assert not PoisonMessage.objects.exists()
    assert not queue.objects.exists()


@LEASING
def test_too_many_unacknowledged_deliveries_are_poison(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue.delivery, "max_deliveries", 2)
    send(queue, 4)
    # The scripts that had these were killed: their leases expired.
    spent = list(queue.objects.order_by("seq").values_list("seq", flat=True)[:2])
    queue.objects.filter(seq__in=spent).update(
        deliveries=2, lease_token="0" * 32, lease_owner="0" * 32, lease_expires=Now() - timedelta(seconds=1)
    )

    with queue.receive(2) as batch:
        assert [message.body for message in batch] == [{"number": 2}, {"number": 3}], "others are in their place"

    assert bodies(PoisonMessage.objects.order_by("number")) == [b'{"number":0}', b'{"number":1}']
    assert {row.deliveries for row in PoisonMessage.objects.all()} == {2}
    assert queue.objects.count() == 2


def test_a_lease_that_was_lost_makes_nothing_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leased.delivery, "max_cancels", 1)
    send(Leased, 1)
    with Leased.receive() as batch:
        message = next(iter(batch))
        Leased.objects.update(lease_token="1" * 32)
        with pytest.raises(LeaseLost):
            message.cancel()

    assert not PoisonMessage.objects.exists()
    assert Leased.objects.count() == 1


def test_it_is_poison_when_the_block_commits_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transactional.delivery, "max_cancels", 1)
    send(Transactional, 1)

    def script() -> None:
        with Transactional.receive() as batch:
            next(iter(batch)).cancel()
            assert PoisonMessage.objects.count() == 1
            raise RuntimeError

    with pytest.raises(RuntimeError):
        script()

    assert not PoisonMessage.objects.exists()
    assert Transactional.objects.get().cancels == 0


@pytest.mark.skipif(connection.vendor != "postgresql", reason="lock_timeout is PostgreSQL's")
def test_the_users_transaction_keeps_its_own_lock_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leased.delivery, "max_cancels", 1)
    send(Leased, 1)
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL lock_timeout = '1234ms'")
        with Leased.receive() as batch:
            next(iter(batch)).cancel()
        cursor.execute("SHOW lock_timeout")
        assert cursor.fetchone() == ("1234ms",)
    assert PoisonMessage.objects.exists()
