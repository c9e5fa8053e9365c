"""``Queue.receive()``: every way in which a message that a script took can end, in every semantics."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.db.models import F

from queueapp import InvalidMessage, InvalidOption, LeaseLost, QueueError, UndecodableMessage, signals
from queueapp.models import Now
from tests.in_process_worker import real_commits
from tests.testapp.messages import Ping
from tests.testapp.models import Addressed, AtMostOnce, Effect, Leased, Transactional, Urgent

pytestmark = real_commits
LEASING = pytest.mark.parametrize("queue", [Leased, Transactional])
EVERY = pytest.mark.parametrize("queue", [Leased, Transactional, AtMostOnce])


def numbers(batch: Any) -> list[int]:
    return [message.body["number"] for message in batch]


def send(queue: Any, count: int) -> None:
    queue.send_many({"number": number} for number in range(count))


def elsewhere(work: Callable[[], Any]) -> Any:
    """Run on another thread, so on another connection; returns its result."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    (result,) = results
    return result


def expire_lease(queue: Any) -> None:
    queue.objects.update(lease_expires=Now() - timedelta(seconds=1))


# -- taking --------------------------------------------------------------------------------------------------------


@EVERY
def test_a_batch_is_the_lowest_messages_in_order(queue: Any) -> None:
    send(queue, 5)

    with queue.receive(3) as batch:
        assert len(batch) == 3
        assert numbers(batch) == [0, 1, 2]
        assert len(batch) == 3


@EVERY
def test_batch_can_be_iterated_again_indexed_and_measured(queue: Any) -> None:
    send(queue, 3)

    with queue.receive(3) as batch:
        assert numbers(batch) == numbers(batch) == [0, 1, 2]
        assert (batch[0].body["number"], batch[-1].body["number"], numbers(batch[1:])) == (0, 2, [1, 2])
        assert len(batch) == 3
        assert batch[0] in batch
        with pytest.raises(IndexError):
            batch[3]
        for message in batch:
            message.ack()

    assert not queue.objects.exists()


def test_message_taken_by_index_counts_as_handed_out() -> None:
    send(Leased, 3)

    with Leased.receive(3) as batch:
        assert batch[1].body["number"] == 1

    assert list(Leased.objects.order_by("seq").values_list("cancels", flat=True)) == [0, 1, 0]


@EVERY
def test_an_empty_queue_is_an_empty_batch(queue: Any) -> None:
    with queue.receive(10) as batch:
        assert list(batch) == []


@EVERY
def test_a_message_knows_what_it_is(queue: Any) -> None:
    sent = queue.send(Ping("x"), headers={"k": "v"})

    with queue.receive() as batch:
        (message,) = batch
        assert message.id == sent
        assert message.headers["k"] == "v"
        assert message.decode(Ping) == Ping("x")
        assert message.body["name"] == "x"
        assert message.raw_body.startswith(b"{")
        assert message.deliveries == 1
        assert repr(message) == f"<message {message.seq} of {queue._meta.label}>"


@LEASING
def test_a_message_that_does_not_parse_reports_it_and_can_still_be_ended(queue: Any) -> None:
    queue.send({})
    queue.objects.update(headers="not JSON")

    with queue.receive() as batch:
        (message,) = batch
        with pytest.raises(UndecodableMessage):
            _ = message.body
        message.ack()

    assert not queue.objects.exists()


@pytest.mark.parametrize("backlog", [0, -1, 3501, 1.5, "10"])
def test_a_backlog_out_of_bounds_is_refused(backlog: Any) -> None:
    with pytest.raises(InvalidOption, match="from 1 to 3500"):
        Leased.receive(backlog)


@pytest.mark.parametrize("period", [5, timedelta(0)])
def test_a_lease_period_that_is_none_is_refused(period: Any) -> None:
    with pytest.raises(InvalidMessage, match="lease_period"):
        Leased.receive(lease_period=period)


def test_messages_of_a_recipient_are_received_by_name() -> None:
    for name in ("first", "second"):
        Addressed.send({"number": 1}, recipient=name, unknown_recipient=True)

    with Addressed.receive(10, recipient="second") as batch:
        (message,) = batch
        message.ack()

    assert Addressed.objects.get().recipient == "first"


def test_the_highest_priority_is_received_first() -> None:
    for priority in (0, 2, 1):
        Urgent.send({"number": priority}, priority=priority)

    with Urgent.receive(2) as batch:
        assert numbers(batch) == [2, 1]


# -- ending --------------------------------------------------------------------------------------------------------


@LEASING
def test_semantics_what_is_acked_is_gone_and_the_rest_is_back_in_its_place(queue: Any) -> None:
    send(queue, 4)

    with queue.receive(4) as batch:
        for message in batch:
            if message.body["number"] == 1:
                message.ack()
            if message.body["number"] == 2:
                break

    rows = queue.objects.order_by("seq")
    assert [row.body for row in rows] == [b'{"number":0}', b'{"number":2}', b'{"number":3}']
    assert [(row.deliveries, row.cancels, row.lease_token) for row in rows] == [
        (1, 1, None),
        (1, 1, None),
        (0, 0, None),
    ]
    with queue.receive(10) as batch:
        assert numbers(batch) == [0, 2, 3]


@LEASING
def test_a_cancelled_message_is_received_again_in_its_old_place(queue: Any) -> None:
    send(queue, 2)

    with queue.receive(2) as batch:
        first, second = batch
        first.cancel()
        second.ack()

    with queue.receive() as batch:
        (message,) = batch
        assert message.body == {"number": 0}
        assert message.deliveries == 2


@LEASING
def test_an_expired_message_is_gone_and_reported(queue: Any) -> None:
    reported: list[tuple[Any, ...]] = []
    receiver = lambda sender, queue, count, ids, reason, **kwargs: reported.append((count, ids, reason))  # noqa: E731
    signals.expired.connect(receiver, sender=queue)
    send(queue, 2)

    with queue.receive(2) as batch:
        first, second = batch
        first.expire()
        second.expire("the customer is gone")
    signals.expired.disconnect(receiver, sender=queue)

    assert reported == [(1, [first.id], "dropped by its receiver"), (1, [second.id], "the customer is gone")]
    assert not queue.objects.exists()


@LEASING
@pytest.mark.parametrize("how", ["ack", "cancel", "expire"])
def test_a_message_ends_once(queue: Any, how: str) -> None:
    send(queue, 1)

    with queue.receive() as batch:
        (message,) = batch
        getattr(message, how)()
        with pytest.raises(QueueError, match="already"):
            message.ack()


def test_semantics_at_most_once_is_gone_when_it_is_received() -> None:
    send(AtMostOnce, 2)

    with AtMostOnce.receive(2) as batch:
        first, _ = batch
        assert not AtMostOnce.objects.exists()
        first.cancel()

    assert not AtMostOnce.objects.exists()


def test_disconnect_by_an_error_in_the_block_gives_leased_messages_back() -> None:
    send(Leased, 3)

    with pytest.raises(LookupError), Leased.receive(3) as batch:
        _fail_after_ack(batch)

    assert list(Leased.objects.order_by("seq").values_list("deliveries", "cancels")) == [(1, 1), (0, 0)]


def test_an_error_in_the_block_undoes_a_transactional_one_whole() -> None:
    send(Transactional, 3)

    with pytest.raises(LookupError), Transactional.receive(3) as batch:
        _fail_after_ack(batch)

    assert Transactional.objects.count() == 3
    assert list(Transactional.objects.values_list("deliveries", "cancels")) == [(0, 0)] * 3
    assert not Effect.objects.exists()


def _fail_after_ack(batch: Any) -> None:
    messages = iter(batch)
    next(messages).ack()
    Effect.objects.create(name="of the block")
    next(messages)
    raise LookupError


def test_acks_of_a_transactional_block_are_seen_with_its_writes() -> None:
    send(Transactional, 1)

    with Transactional.receive() as batch:
        (message,) = batch
        Effect.objects.create(name="of the block")
        message.ack()
        assert elsewhere(lambda: (Transactional.objects.count(), Effect.objects.count())) == (1, 0)

    assert elsewhere(lambda: (Transactional.objects.count(), Effect.objects.count())) == (0, 1)


# -- leases --------------------------------------------------------------------------------------------------------


@EVERY
def test_no_other_receiver_gets_a_message_in_flight(queue: Any) -> None:
    send(queue, 3)

    with queue.receive(2):
        assert elsewhere(lambda: _take_numbers(queue, 10)) == [2]


def _take_numbers(queue: Any, count: int) -> list[int]:
    with queue.receive(count) as batch:
        return numbers(batch)


def test_a_lease_lasts_as_long_as_the_queue_states_or_the_caller() -> None:
    send(Leased, 2)

    with Leased.receive(), Leased.receive(lease_period=timedelta(hours=1)):
        remaining = [row.left for row in Leased.objects.annotate(left=F("lease_expires") - Now()).order_by("seq")]

    assert timedelta(seconds=2) < remaining[0] <= timedelta(seconds=5)
    assert timedelta(minutes=59) < remaining[1] <= timedelta(hours=1)


def test_a_lease_can_be_extended() -> None:
    send(Leased, 1)

    with Leased.receive() as batch:
        (message,) = batch
        message.extend(timedelta(hours=1))
        remaining = Leased.objects.annotate(left=F("lease_expires") - Now()).get().left

    assert remaining > timedelta(minutes=59)


@pytest.mark.parametrize("how", ["ack", "cancel", "expire", "extend"])
def test_a_lease_that_another_receiver_has_now_ends_nothing(how: str) -> None:
    send(Leased, 1)

    with Leased.receive() as batch:
        (message,) = batch
        expire_lease(Leased)
        with Leased.receive() as second_batch:
            (same,) = second_batch
            with pytest.raises(LeaseLost) as raised:
                getattr(message, how)()
            same.ack()

    assert (raised.value.queue, raised.value.seq) == ("testapp.Leased", message.seq)
    assert not Leased.objects.exists()


def test_an_expired_lease_that_was_not_taken_over_is_still_valid() -> None:
    send(Leased, 1)

    with Leased.receive() as batch:
        (message,) = batch
        expire_lease(Leased)
        message.ack()

    assert not Leased.objects.exists()


def test_leaving_the_block_with_a_lost_lease_touches_nothing() -> None:
    send(Leased, 1)

    with Leased.receive():
        expire_lease(Leased)
        elsewhere(lambda: _ack_all(Leased))

    assert not Leased.objects.exists()


def _ack_all(queue: Any) -> None:
    with queue.receive(100) as batch:
        for message in batch:
            message.ack()


def test_a_message_outside_of_its_block_is_nobodys() -> None:
    send(Leased, 1)
    with Leased.receive() as batch:
        (message,) = batch

    with pytest.raises(LeaseLost):
        message.ack()

    assert Leased.objects.get().cancels == 1


# -- async ---------------------------------------------------------------------------------------------------------


@LEASING
def test_async_code_receives_too(queue: Any) -> None:
    send(queue, 4)

    async def receive() -> list[int]:
        seen = []
        try:
            async with queue.areceive(4) as batch:
                assert len(batch) == 4
                endings = iter(["ack", "cancel", "expire", "extend"])
                async for message in batch:
                    seen.append(message.body["number"])
                    await getattr(message, next(endings))()
        finally:
            await sync_to_async(connections.close_all)()
        return seen

    assert asyncio.run(receive()) == [0, 1, 2, 3]

    assert [row.body for row in queue.objects.order_by("seq")] == [b'{"number":1}', b'{"number":3}']
