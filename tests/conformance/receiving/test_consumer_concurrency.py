"""``@consumer(..., concurrency=N)``: at most N handlers of this consumer at once in a process, and no other message
waits for them."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from queueapp import BatchContext, Context, InvalidOption, consumer
from queueapp.consuming.registry import Registration
from queueapp.messages import encode_headers, new_id, type_name
from queueapp.models import PoisonMessage
from queueapp.sql.claims import RECIPIENT, SEQ
from tests.conformance.endpoint import Note
from tests.conformance.gate import Gate
from tests.in_process_worker import DEADLINE, eventually, real_commits
from tests.testapp.models import Addressed, AddressedOnce, AddressedUrgent, Leased
from workers.receiving.events import NoPump
from workers.receiving.limits import ConsumerLimiter

#: One of each semantics.
EACH_QUEUE = pytest.mark.parametrize("queue", [Addressed, AddressedUrgent, AddressedOnce])
pytestmark = real_commits


@pytest.fixture(autouse=True)
def no_polling(settings: Any, no_consumers: None) -> None:
    """No consumers but those of the test; and what waits for a place is not found by the next look, which no test waits
    for."""
    settings.QUEUEAPP = {"PEEK_DELAY": 3600, "RETRY_DELAY": 0, "DISPATCH_INTERVAL": 0.1}


def note(numbers: list[int]) -> Any:
    def handler(message: Note) -> None:
        numbers.append(message.number)

    return handler


@EACH_QUEUE
def test_so_many_at_once_and_no_more_while_others_go_on(queue: Any, work: Any) -> None:
    gate, rest = Gate(), list[int]()
    consumer(queue, name="limited", concurrency=2)(lambda message: gate.enter())
    consumer(queue, name="other")(lambda message: rest.append(message["number"]))
    queue.send_many({"number": number} for number in range(12))
    worker = work(queue, concurrency=5)

    eventually(lambda: gate.inside == 2 and sorted(rest) == list(range(12)))
    looks = worker.pump.stats.peeks + worker.pump.stats.empty
    gate.let(12)
    eventually(lambda: gate.passed == 12 and not queue.objects.exists())

    assert gate.max_inside == 2
    assert looks < 100, "tasks looked for what they could not take"
    assert worker.pump.stats.peeks + worker.pump.stats.empty < 200


@EACH_QUEUE
def test_what_comes_meanwhile_is_taken_once_a_place_is_free(queue: Any, work: Any) -> None:
    gate = Gate()
    consumer(queue, name="limited", concurrency=1)(lambda message: gate.enter())
    queue.send({"number": 0})
    worker = work(queue, concurrency=3)
    eventually(lambda: gate.inside == 1)

    for number in range(1, 4):
        queue.send({"number": number})
        worker.pump.wake()
    eventually(lambda: not worker.pump.pool.assigned and worker.pump.pool.busy == 1)
    gate.let(4)

    eventually(lambda: gate.passed == 4 and not queue.objects.exists())
    assert gate.max_inside == 1


@EACH_QUEUE
def test_messages_without_a_recipient_are_counted_too(queue: Any, work: Any) -> None:
    """A foreign producer's; the limited consumer is the only one of their type, so that there is nothing to copy."""
    gate, rest = Gate(), list[int]()
    consumer(queue, name="limited", concurrency=1)(lambda message: gate.enter())
    consumer(queue, name="other")(note(rest))
    note_headers = encode_headers({"type": type_name(Note), "content-type": "application/json"})
    rows = [queue(id=new_id(), headers=encode_headers({}), body=b'{"number": %d}' % n) for n in range(4)]
    rows += [queue(id=new_id(), headers=note_headers, body=b'{"tag": "", "number": %d}' % n) for n in range(4)]
    queue.objects.bulk_create(rows)
    work(queue, concurrency=4)

    eventually(lambda: gate.inside == 1 and sorted(rest) == list(range(4)))
    gate.let(4)

    eventually(lambda: gate.passed == 4 and not queue.objects.exists())
    assert gate.max_inside == 1


@pytest.mark.parametrize("queue", [Addressed, AddressedUrgent])
def test_failed_attempts_keep_no_place(queue: Any, work: Any) -> None:
    calls: list[tuple[int, int]] = []
    inside = threading.Lock()

    def fail(message: dict[str, Any], context: Context) -> None:
        assert inside.acquire(blocking=False), "two at once"
        try:
            calls.append((message["number"], context.attempt))
        finally:
            inside.release()
        raise ValueError("no")

    consumer(queue, name="limited", concurrency=1, attempts=3, retry_delay=0)(fail)
    queue.send_many({"number": number} for number in range(6))
    work(queue, concurrency=4)

    eventually(lambda: PoisonMessage.objects.count() == 6 and not queue.objects.exists())
    assert sorted(calls) == [(number, attempt) for number in range(6) for attempt in (1, 2, 3)]


@EACH_QUEUE
def test_batches_are_counted_as_calls(queue: Any, work: Any) -> None:
    gate, rest, seen = Gate(), list[int](), list[int]()

    def several(messages: list[Note], context: BatchContext) -> None:
        gate.enter()
        seen.extend(message.number for message in messages)

    consumer(queue, name="limited", concurrency=1, batch=4)(several)
    consumer(queue, name="other")(note(rest))
    queue.send_many(Note("", number) for number in range(20))
    work(queue, concurrency=4)

    eventually(lambda: gate.inside == 1)
    gate.let(100)

    eventually(lambda: sorted(seen) == sorted(rest) == list(range(20)) and not queue.objects.exists())
    assert gate.max_inside == 1


@pytest.mark.parametrize("queue", [Addressed, AddressedUrgent])
def test_a_batch_that_fails_and_is_halved_keeps_its_place(queue: Any, work: Any) -> None:
    inside, seen = threading.Lock(), list[int]()

    def several(messages: list[Note], context: BatchContext) -> None:
        assert inside.acquire(blocking=False), "two at once"
        try:
            if any(message.number == 5 for message in messages):
                raise ValueError("no")
            seen.extend(message.number for message in messages)
        finally:
            inside.release()

    consumer(queue, name="limited", concurrency=1, batch=8, attempts=1)(several)
    queue.send_many(Note("", number) for number in range(16))
    work(queue, concurrency=4)

    eventually(lambda: PoisonMessage.objects.count() == 1 and not queue.objects.exists())
    assert PoisonMessage.objects.get().exception_type.endswith("ValueError")
    assert sorted(seen) == [number for number in range(16) if number != 5]


@EACH_QUEUE
def test_a_worker_that_stops_waits_for_no_place(queue: Any, work: Any) -> None:
    gate = Gate()
    consumer(queue, name="limited", concurrency=1)(lambda message: gate.enter())
    queue.send_many({"number": number} for number in range(10))
    worker = work(queue, concurrency=4)
    eventually(lambda: gate.inside == 1)

    worker.ask_to_stop()
    gate.let(10)

    eventually(lambda: not worker.running)
    assert gate.max_inside == 1
    assert gate.passed + queue.objects.count() == 10


# -- the places themselves ---------------------------------------------------------------------------------------------


class Seen:
    """What a handler is given, as far as places look at it."""

    def __init__(self, seq: int) -> None:
        self.seq = seq


class Freed(NoPump):
    """Records each free permit."""

    def __init__(self, freed: list[bool]) -> None:
        super().__init__()
        self._freed = freed

    def permit_freed(self, passed_over: bool) -> None:
        self._freed.append(passed_over)


def test_a_slow_handler_of_another_consumer_keeps_no_place() -> None:
    """In one claim: two messages of the limited consumer around one of another."""
    limited = Registration(Addressed, "limited", dict, lambda message: None, {"concurrency": 1})
    second_registration = Registration(Addressed, "other", dict, lambda message: None, {})
    places, freed = ConsumerLimiter([limited]), list[bool]()
    places.events = Freed(freed)
    rows = [(seq, name) for seq, name in ((1, "limited"), (2, "other"), (3, "limited"))]
    as_claimed: Any = [_claimed(seq, name) for seq, name in rows]
    call_limited = places.around_handler(limited, lambda message, context: None)
    elsewhere: list[list[str]] = []

    assert places.take_permits() == []
    places.claimed(as_claimed)
    call_limited(None, Seen(1))
    others_call = places.around_handler(
        second_registration, lambda message, context: elsewhere.append(_in_another_thread(places.take_permits))
    )
    others_call(None, Seen(2))
    assert elsewhere == [["limited"]], "its second message waits in flight"

    def given_back(message: Any, context: Any) -> None:
        places.returned([3])
        elsewhere.append(_in_another_thread(places.take_permits))

    places.around_handler(second_registration, given_back)(None, Seen(2))

    assert elsewhere[1] == []
    assert freed == [False]


def _claimed(seq: int, recipient: str) -> Any:
    row: list[Any] = [None] * (max(SEQ, RECIPIENT) + 1)
    row[SEQ], row[RECIPIENT] = seq, recipient
    return tuple(row)


def _in_another_thread(call: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join(DEADLINE)
    return found[0]


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queue", "given", "words"),
    [
        (Addressed, 0, "concurrency = 0 is not accepted: it must be a whole number from 1 to 256"),
        (Addressed, "2", "concurrency = '2' is not accepted"),
        (Leased, 2, r"concurrency = 2 is not accepted: it must be absent: in testapp\.Leased nothing is addressed"),
    ],
)
def test_what_no_claim_could_keep_to_is_refused(queue: Any, given: Any, words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        consumer(queue, concurrency=given)(lambda message: None)
