"""Which handler gets a message: by its type, by the consumer it is addressed to, and in which order."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from queueapp import Context, InvalidMessage, InvalidOption, consumer
from queueapp.messages import encode_headers, new_id, type_name
from queueapp.models import Now
from tests.conformance.endpoint import Endpoint, Note, modes
from tests.conformance.gate import Gate
from tests.in_process_worker import eventually, real_commits
from tests.late_commits import committed_late
from tests.testapp.models import Addressed, AddressedUrgent, Urgent


class Unrelated(msgspec.Struct):
    """A type that the tests' consumers do not take."""

    text: str = ""


@pytest.fixture
def calls(settings: Any, no_consumers: None) -> list[tuple[str, int]]:
    """No consumers but those of the test; (consumer, number) of each call."""
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1, "RETRY_DELAY": 0}
    return []


def noting(calls: list[tuple[str, int]], name: str) -> Any:
    def note(message: Note) -> None:
        calls.append((name, message.number))

    return note


# -- by type -------------------------------------------------------------------------------------------------------


@modes("NRS")
def test_when_message_type_is_unknown_should_leave_it_alone(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint.handle()
    for _ in range(3):
        endpoint.queue.send(Unrelated("for another consumer"), using=endpoint.alias)
    endpoint.send_many(5)
    worker = endpoint.start()

    eventually(lambda: endpoint.numbers == [0, 1, 2, 3, 4])
    eventually(lambda: endpoint.rows.count() == 3)
    worker.stop()

    assert list(endpoint.rows.values_list("deliveries", "cancels", "lease_token")) == [(0, 0, None)] * 3
    assert not endpoint.poison.exists()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    of_the_sender, of_the_worker = warnings  # once each, not for every message
    assert "was sent to" in of_the_sender
    assert "have no consumer in this process" in of_the_worker


@modes("NRS")
def test_when_message_type_is_unknown_should_be_handled_by_a_process_that_knows_it(endpoint: Endpoint) -> None:
    endpoint.handle()
    endpoint.queue.send(Unrelated(), using=endpoint.alias)
    ignorant = endpoint.start()
    eventually(lambda: ignorant.pump.stats.skipped == 1)

    taken: list[Unrelated] = []

    def take(message: Unrelated) -> None:
        taken.append(message)

    consumer(endpoint.queue)(take)
    endpoint.start()

    eventually(lambda: taken)
    endpoint.wait_until_empty()


@modes("NRS")
def test_when_body_has_no_type_should_go_to_the_untyped_consumer(endpoint: Endpoint) -> None:
    taken: list[Any] = []

    def take(message: Any, context: Context) -> None:
        taken.append(message)

    endpoint.handle()
    consumer(endpoint.queue)(take)
    endpoint.send(1)
    endpoint.queue.send({"plain": "JSON"}, using=endpoint.alias)
    endpoint.queue.send(b"\x00bytes", using=endpoint.alias)
    endpoint.start(concurrency=1)

    eventually(lambda: endpoint.numbers == [1] and len(taken) == 2)
    assert taken == [{"plain": "JSON"}, b"\x00bytes"]


@modes("NRS")
def test_when_two_consumers_want_one_type_should_refuse_the_second(endpoint: Endpoint) -> None:
    endpoint.handle()

    with pytest.raises(InvalidOption, match="handles it already"):
        consumer(endpoint.queue, name="second")(noting([], "second"))


# -- by consumer ---------------------------------------------------------------------------------------------------


@real_commits
@pytest.mark.parametrize("queue", [Addressed, AddressedUrgent])
def test_when_several_consumers_want_one_type_should_give_each_its_copy(queue: Any, calls: Any, work: Any) -> None:
    for name in ("first", "second"):
        consumer(queue, name=name)(noting(calls, name))
    sent = queue.send(Note("", 1))
    queue.send_many([Note("", 2), Note("", 3)])
    assert queue.objects.filter(id=sent).count() == 2
    work(queue)

    eventually(lambda: len(calls) == 6)

    assert sorted(calls) == [(name, number) for name in ("first", "second") for number in (1, 2, 3)]
    eventually(lambda: not queue.objects.exists())


@real_commits
def test_when_one_copy_fails_should_not_touch_the_other(calls: Any, work: Any) -> None:
    def fail(message: Note) -> None:
        calls.append(("failing", message.number))
        raise ValueError

    consumer(Addressed, name="failing", attempts=2)(fail)
    consumer(Addressed, name="working")(noting(calls, "working"))
    Addressed.send(Note("", 1))
    work(Addressed)

    eventually(lambda: not Addressed.objects.exists())

    assert sorted(calls) == [("failing", 1), ("failing", 1), ("working", 1)]


@real_commits
def test_when_message_is_addressed_should_reach_that_consumer_only(calls: Any, work: Any) -> None:
    for name in ("first", "second"):
        consumer(Addressed, name=name)(noting(calls, name))
    Addressed.send(Note("", 1), recipient="second")
    work(Addressed)

    eventually(lambda: not Addressed.objects.exists())

    assert calls == [("second", 1)]


@real_commits
def test_when_message_is_addressed_to_another_consumer_should_leave_it_alone(calls: Any, work: Any) -> None:
    consumer(Addressed, name="here")(noting(calls, "here"))
    Addressed.send(Note("", 1), recipient="elsewhere", unknown_recipient=True)
    Addressed.send(Note("", 2), recipient="here")
    worker = work(Addressed)

    eventually(lambda: calls == [("here", 2)])
    worker.stop()

    assert Addressed.objects.get().recipient == "elsewhere"


@real_commits
@pytest.mark.parametrize("queue", [Addressed, AddressedUrgent])
def test_when_a_foreign_producer_names_no_recipient_should_fan_out_on_receive(
    queue: Any, calls: Any, work: Any
) -> None:
    for name in ("first", "second"):
        consumer(queue, name=name)(noting(calls, name))
    headers = encode_headers({"type": type_name(Note), "content-type": "application/json"})
    queue.objects.bulk_create([queue(id=new_id(), headers=headers, body=b'{"tag": "", "number": 7}')])
    work(queue)

    eventually(lambda: sorted(calls) == [("first", 7), ("second", 7)])
    eventually(lambda: not queue.objects.exists())


# -- in which order ------------------------------------------------------------------------------------------------


@modes("NRS")
def test_when_messages_wait_should_be_handled_in_the_order_they_were_sent(endpoint: Endpoint) -> None:
    endpoint.handle()
    endpoint.send_many(200)
    endpoint.start(concurrency=1)

    eventually(lambda: len(endpoint.calls) == 200)

    assert [number for number, _ in endpoint.calls] == list(range(200))


@real_commits
@pytest.mark.parametrize("queue", [Urgent, AddressedUrgent])
def test_when_priorities_differ_should_handle_the_highest_first(queue: Any, calls: Any, work: Any) -> None:
    consumer(queue, name="only")(noting(calls, "only"))
    for number, priority in enumerate((0, 2, 1, 0, 2, 1)):
        queue.send(Note("", number), priority=priority)
    work(queue, concurrency=1)

    eventually(lambda: len(calls) == 6)

    assert [number for _, number in calls] == [1, 4, 2, 5, 0, 3]


@real_commits
def test_when_an_urgent_message_comes_late_should_not_wait_behind_the_others(calls: Any, work: Any) -> None:
    consumer(Urgent, name="only")(noting(calls, "only"))
    Urgent.send(Note("", 1), priority=2)
    work(Urgent, concurrency=1)
    eventually(lambda: len(calls) == 1)

    Urgent.send(Note("", 2), priority=0)
    eventually(lambda: len(calls) == 2)
    Urgent.send(Note("", 3), priority=2)

    eventually(lambda: len(calls) == 3)


@real_commits
def test_when_many_messages_are_committed_late_should_not_keep_an_urgent_one_waiting(calls: Any, work: Any) -> None:
    """Sequence numbers are given before the commit: what is committed late lies behind the floor of a worker."""
    gate = Gate()

    def handle(message: Note, context: Context) -> None:
        calls.append(("only", message.number))
        if message.tag == "wait":
            gate.enter(message, context)

    consumer(Urgent, name="only")(handle)
    with committed_late(lambda: Urgent.send_many(Note("", 0) for _ in range(8000))) as commit:
        worker = work(Urgent, concurrency=1)
        Urgent.send(Note("wait", 1))
        eventually(lambda: calls)
        commit()
    gate.let(1)
    eventually(lambda: len(calls) > 100)

    Urgent.send(Note("", 2), priority=2)
    sent = len(calls)
    worker.pump.wake()

    eventually(lambda: ("only", 2) in calls)
    place = calls.index(("only", 2))
    assert place - sent < 2_500, "behind what was in flight, and no more"
    eventually(lambda: len(calls) == 8002)


@real_commits
@pytest.mark.parametrize("priority", [-1, 3, 1000])
def test_when_priority_is_out_of_bounds_should_refuse_it_with_the_range(priority: int) -> None:
    with pytest.raises(InvalidMessage, match="from 0 to 2"):
        Urgent.send(Note("", 1), priority=priority)

    assert not Urgent.objects.exists()


@modes("NRS")
def test_when_many_messages_of_an_unknown_type_are_in_front_should_walk_over_them_once(endpoint: Endpoint) -> None:
    endpoint.handle()
    endpoint.queue.send_many((Unrelated() for _ in range(25_000)), using=endpoint.alias)
    endpoint.send_many(1000)
    worker = endpoint.start()

    eventually(lambda: len(endpoint.calls) == 1000)

    eventually(lambda: set(endpoint.rows.values_list("deliveries", flat=True)) == {0})
    assert worker.pump.stats.skipped < 2_500, "the rest was looked over and not claimed"
    assert sum(worker.pump.state.skipped.types.values()) < 30_000, "by one task and not by each"
    claimed = worker.pump.stats.received
    endpoint.send(1000)
    worker.pump.wake()
    eventually(lambda: len(endpoint.calls) == 1001)
    assert worker.pump.stats.received <= claimed + 10


@modes("NRS")
def test_when_known_and_unknown_types_alternate_should_handle_all_known_ones(endpoint: Endpoint) -> None:
    endpoint.handle()
    for number in range(300):
        endpoint.queue.send(Unrelated(), using=endpoint.alias)
        endpoint.send(number)
    worker = endpoint.start()

    eventually(lambda: len(endpoint.calls) == 300)
    worker.stop()

    assert sorted(endpoint.numbers) == list(range(300))
    assert endpoint.rows.count() == 300
    assert worker.pump.stats.skipped <= 4 * 300


@modes("R")
def test_when_a_lease_expires_among_messages_of_an_unknown_type_should_be_handled(endpoint: Endpoint) -> None:
    endpoint.handle()
    endpoint.queue.send_many((Unrelated() for _ in range(500)), using=endpoint.alias)
    endpoint.send(7)
    endpoint.queue.send_many((Unrelated() for _ in range(500)), using=endpoint.alias)
    (held,) = [row.seq for row in endpoint.rows.all() if b"7" in bytes(row.body)]
    endpoint.rows.filter(seq=held).update(lease_expires=Now() + timedelta(hours=1))
    worker = endpoint.start()
    endpoint.send(8)
    eventually(lambda: endpoint.numbers == [8])
    assert worker.pump.stats.skipped > 0

    endpoint.rows.filter(seq=held).update(lease_expires=Now() - timedelta(seconds=1))

    eventually(lambda: endpoint.numbers == [7, 8])
