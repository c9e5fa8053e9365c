"""Delayed messages: not before their time, in whatever transaction they were sent, and to a queue that exists."""

from __future__ import annotations

from datetime import timedelta
from time import monotonic

from django.db import transaction
from django.utils import timezone

from queueapp.delayed import dispatch_due, next_due_in, undeliverable
from queueapp.models import Now
from tests.conformance.endpoint import Endpoint, modes
from tests.in_process_worker import eventually

HOUR = timedelta(hours=1)


@modes("NRS")
def test_when_receiving_delayed_message_should_not_be_before_its_delay(endpoint: Endpoint) -> None:
    times: list[float] = []
    endpoint.handle(lambda message, context: times.append(monotonic()))
    sent = monotonic()
    endpoint.send(1, delay=timedelta(seconds=0.5))
    endpoint.start(dispatcher=True)

    eventually(lambda: times)

    assert times[0] - sent >= 0.5


@modes("NRS")
def test_when_delayed_to_a_time_should_not_be_before_that_time(endpoint: Endpoint) -> None:
    endpoint.handle()
    endpoint.send(1, at=timezone.now() + HOUR)

    assert dispatch_due(endpoint.alias, 100).moved == 0
    remaining = next_due_in(endpoint.alias)
    assert remaining is not None
    assert abs(remaining - HOUR) < timedelta(seconds=30)

    endpoint.delayed.update(due=Now())
    assert dispatch_due(endpoint.alias, 100).moved == 1
    assert endpoint.rows.count() == 1


@modes("NRS")
def test_when_delayed_to_the_past_should_be_received_at_once(endpoint: Endpoint) -> None:
    endpoint.handle()
    endpoint.send(1, at=timezone.now() - HOUR)
    endpoint.send(2, delay=timedelta(0))
    endpoint.start(dispatcher=True)

    eventually(lambda: endpoint.numbers == [1, 2])


@modes("NRS")
def test_when_a_long_delay_is_stored_should_not_starve_a_short_one(endpoint: Endpoint) -> None:
    endpoint.handle()
    endpoint.start(dispatcher=True)
    endpoint.send(1, delay=HOUR)
    endpoint.send(2, delay=timedelta(milliseconds=200))

    eventually(lambda: endpoint.numbers == [2])

    assert endpoint.delayed.count() == 1


@modes("NRS")
def test_when_delayed_with_ttbr_should_count_its_time_from_when_it_is_due(endpoint: Endpoint) -> None:
    # Upstream refuses the combination. Here the time to be received begins when the message can be received.
    endpoint.send(1, delay=HOUR, expires_in=timedelta(minutes=1))

    stored = endpoint.delayed.get()

    assert abs(stored.expires - stored.due - timedelta(minutes=1)) < timedelta(seconds=1)


@modes("NRS")
def test_when_delayed_to_a_missing_queue_should_be_left_for_a_process_that_knows_it(endpoint: Endpoint) -> None:
    # Upstream moves it to the error queue. Here another project on the same database may know the destination.
    endpoint.send(1, delay=timedelta(0), headers={"MyHeader": "MyValue"})
    endpoint.send(2, delay=timedelta(0))
    endpoint.delayed.filter(number=endpoint.delayed.earliest("number").number).update(destination="gone.Queue")

    done = dispatch_due(endpoint.alias, 100)

    assert (done.moved, done.poisoned) == (1, 0), "the other one of the batch is not held up"
    assert not endpoint.poison.exists()
    message = endpoint.delayed.get()
    assert (message.destination, message.retries) == ("gone.Queue", 0)
    assert "MyValue" in message.headers
    assert undeliverable(endpoint.alias, timedelta(0)) == {"gone.Queue": 1}


@modes("NRS")
def test_when_delayed_message_is_sent_in_a_transaction_that_rolls_back_should_not_exist(endpoint: Endpoint) -> None:
    with transaction.atomic(using=endpoint.alias):
        endpoint.send(1, delay=HOUR)
        transaction.set_rollback(True, using=endpoint.alias)

    assert endpoint.delayed.count() == 0


@modes("NRS")
def test_when_delayed_message_comes_should_be_as_it_was_sent(endpoint: Endpoint) -> None:
    sent = endpoint.send(1, delay=timedelta(0), headers={"k": "v"}, correlation_id="c", reply_to="r")
    dispatch_due(endpoint.alias, 100)

    row = endpoint.rows.get()

    assert (row.id, row.correlation_id, row.reply_to_address) == (sent, "c", "r")
    assert '"k":"v"' in row.headers
    assert (row.deliveries, row.cancels, row.failures) == (0, 0, None)


@modes("NRS")
def test_when_delayed_delivery_is_disabled_should_receive_all_others(endpoint: Endpoint) -> None:
    endpoint.handle()
    endpoint.send(1, delay=timedelta(0))
    endpoint.send(2)
    endpoint.start(dispatcher=False)

    eventually(lambda: endpoint.numbers == [2])

    assert endpoint.delayed.count() == 1
