"""What AsyncMonolith does wrong, one test each: the numbers are those of the list that its code was read for.

Its processors fetch a batch in one transaction, run it all at once, and write down what became of it in that
transaction. The seventh, about duplicates, is in ``sending/test_dedupe.py``.
"""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from django.db import connections, transaction

from queueapp import Context, InvalidMessage, InvalidOption, consumer, delayed
from queueapp.failures import poison_operations
from queueapp.messages import new_id
from queueapp.models import DelayedMessage, Now, PoisonMessage
from queueapp.operations import subscriptions
from queueapp.sql import backend_of
from tests.conformance.endpoint import Endpoint, Note, modes
from tests.conformance.gate import Gate
from tests.databases import only_on_postgresql
from tests.in_process_worker import DEADLINE, eventually, real_commits
from tests.kill_session import kill_this
from tests.telemetry import is_child_of, telemetry
from tests.testapp.messages import Ping
from tests.testapp.models import Addressed, AtMostOnce, Effect, Leased, Transactional
from tests.workers.trees import Tree


class New(msgspec.Struct):
    """A type that only a newer release has a consumer for."""

    number: int


@pytest.fixture
def calls(settings: Any, no_consumers: None) -> list[tuple[str, int]]:
    """No consumers but those of the test; (consumer, number) of each call."""
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1, "RETRY_DELAY": 0, "DISPATCH_INTERVAL": 0.1}
    return []


def have(queue: Any, calls: list[tuple[str, int]], name: str, **options: Any) -> None:
    def note(message: Note) -> None:
        calls.append((name, message.number))

    consumer(queue, name=name, **options)(note)


@modes("NRS")
def test_origin_defect_01_a_slow_message_holds_the_whole_batch(endpoint: Endpoint) -> None:
    """Here the others of its batch are handled and gone, and nothing of them waits for it."""
    gate = Gate()
    endpoint.handle(lambda message, context: gate.enter() if message.number == 0 else None)
    endpoint.send_many(50)
    endpoint.start(concurrency=2)
    try:
        eventually(lambda: gate.inside == 1 and endpoint.numbers == list(range(50)))
        # A row that is being received in a transaction is still seen by others.
        eventually(lambda: {row.body for row in endpoint.rows.all()} <= {msgspec.json.encode(Note(endpoint.tag, 0))})
        if endpoint.queue is Leased:
            with transaction.atomic(using=endpoint.alias):
                assert endpoint.rows.select_for_update(nowait=True).get(), "no transaction locks it"
    finally:
        gate.let(1)
    endpoint.wait_until_empty()
    assert len(endpoint.calls) == 50


@modes("S")
def test_origin_defect_02_effect_and_ack_are_two_transactions(endpoint: Endpoint) -> None:
    """Here they are one: a session that dies between them leaves neither."""

    def act(message: Note, context: Context) -> None:
        Effect.objects.using(endpoint.alias).create(name=endpoint.tag)
        if context.attempt == 1:
            kill_this(connections[endpoint.alias])

    endpoint.handle(act, attempts=3)
    endpoint.send()
    endpoint.start(concurrency=1)

    endpoint.wait_until_empty()

    assert len(endpoint.calls) == 2
    assert Effect.objects.using(endpoint.alias).filter(name=endpoint.tag).count() == 1


@real_commits
@pytest.mark.parametrize("queue", [Leased, Transactional])
def test_origin_defect_03_a_message_that_kills_its_process_is_tried_for_ever(
    queue: Any, child_environment: dict[str, str], tmp_path: Path
) -> None:
    """Here each death is an attempt, and the last one makes it poison; no other message is counted."""
    queue.send(Ping("pill", die=True))
    queue.send(Ping("victim"))
    command = ["manage.py", "runqueueworker", queue._meta.label, "--processes", "1"]
    tree = Tree(command, child_environment, tmp_path / "tree.log")
    try:
        eventually(lambda: PoisonMessage.objects.exists() and not queue.objects.exists(), 3 * DEADLINE)
    finally:
        tree.kill()

    found = PoisonMessage.objects.get()
    assert found.attempts == 3
    assert b"pill" in bytes(found.body)
    # What was handled and not yet acked when the process died comes again where that is the contract; no other message
    # is poison.
    assert set(Effect.objects.values_list("name", flat=True)) == {"victim"}


@modes("RS")
def test_origin_defect_04_one_failure_undoes_what_became_of_its_whole_batch(endpoint: Endpoint) -> None:
    """Here an error that can hardly be written down costs no other message a second run."""

    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("nor can this be said")

        __repr__ = __str__

    def act(message: Note, context: Context) -> None:
        if message.number % 10 == 3:
            raise Unspeakable("\0", "\ud800")

    endpoint.handle(act, attempts=1)
    endpoint.send_many(60)
    endpoint.start()

    endpoint.wait_until_empty()

    assert endpoint.numbers == list(range(60)), "each of them once"
    eventually(lambda: endpoint.poison.count() == 6)


@modes("NRS")
def test_origin_defect_05_two_processors_fetch_the_same_messages(endpoint: Endpoint) -> None:
    """Here four workers at once handle each message once."""
    endpoint.handle()
    endpoint.send_many(400)
    for _ in range(4):
        endpoint.start(concurrency=2)
    endpoint.send_many(200)

    endpoint.wait_until_empty()
    eventually(lambda: len(endpoint.calls) >= 600)

    assert Counter(endpoint.numbers) == Counter([*range(400), *range(200)])
    assert not endpoint.poison.exists()


@real_commits
def test_origin_defect_06_a_message_that_one_consumer_has_still_to_handle_is_not_produced_for_the_other(
    calls: Any, work: Any
) -> None:
    """Here what is sent again is sent to both, and who sends at once with others never collides with them."""
    for name in ("quick", "slow"):
        subscriptions.subscribe(Addressed, name, "tests.conformance.endpoint.Note")
    identity = new_id()
    Addressed.send(Note("", 1), message_id=identity)
    Addressed.objects.filter(recipient="quick").delete()  # it has handled its copy

    Addressed.send(Note("", 1), message_id=identity)

    assert Counter(Addressed.objects.values_list("recipient", flat=True)) == {"quick": 1, "slow": 2}
    start, errors = threading.Barrier(8), []

    def send() -> None:
        try:
            start.wait(DEADLINE)
            for _ in range(10):
                Addressed.send(Note("", 1), message_id=identity)
        except Exception as error:
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert errors == []
    assert Addressed.objects.count() == 3 + 160


@modes("NRS")
def test_origin_defect_08_a_delay_is_taken_for_a_point_in_time(endpoint: Endpoint) -> None:
    """Here a bare number is refused, and a minute from now is a minute from now, by the database's clock."""
    for number in (60, 60.0, -1):
        with pytest.raises(InvalidMessage, match="it must be a timedelta"):
            endpoint.send(delay=number)  # type: ignore[arg-type]
    endpoint.send(delay=timedelta(seconds=60))

    (due,) = endpoint.delayed.values_list("due", flat=True)
    remaining = due - backend_of(connections[endpoint.alias]).now(connections[endpoint.alias])
    assert timedelta(seconds=30) < remaining <= timedelta(seconds=60)
    assert delayed.dispatch_due(endpoint.alias, 10).moved == 0


@modes("NRS")
def test_origin_defect_09_there_is_no_order_within_a_second_and_a_retry_keeps_its_place(
    endpoint: Endpoint, nothing_is_stuck: None
) -> None:
    """Here a burst is handled in the order in which it was sent, and who waits for a retry lets the others pass."""

    def act(message: Note, context: Context) -> None:
        if message.number == 0 and context.attempt == 1:
            raise ValueError("once")

    endpoint.handle(act, attempts=2, retry_delay=0.2)
    endpoint.send_many(300)
    endpoint.start(concurrency=1, dispatcher=True)

    most_once = endpoint.queue is AtMostOnce
    eventually(lambda: len(endpoint.calls) == 300 + (not most_once))

    first = [number for number, attempt in endpoint.calls if attempt == 1]
    assert first == list(range(300))
    if not most_once:
        assert endpoint.calls.index((0, 2)) > 1, "behind those that waited while it did"


@modes("NRS")
def test_origin_defect_10_a_consumer_that_an_instance_does_not_know_costs_attempts(endpoint: Endpoint) -> None:
    """Here an older instance leaves its messages to a newer one, untouched."""

    endpoint.handle()
    endpoint.queue.send(New(1), using=endpoint.alias)
    endpoint.send(2)
    older = endpoint.start()
    eventually(lambda: endpoint.numbers == [2] and older.pump.stats.skipped >= 1)
    older.pump.wake()
    eventually(lambda: older.pump.stats.peeks > 3 and endpoint.rows.count() == 1)

    (row,) = endpoint.rows.all()
    assert (row.deliveries, row.cancels, row.failures, row.lease_token) == (0, 0, None, None)
    assert not endpoint.poison.exists()
    taken: list[int] = []

    def take(message: New) -> None:
        taken.append(message.number)

    consumer(endpoint.queue, name="new")(take)
    endpoint.start()
    eventually(lambda: taken == [1])


@real_commits
def test_origin_defect_10_nor_does_a_copy_for_a_consumer_of_another_release(calls: Any, work: Any) -> None:
    have(Addressed, calls, "old")
    subscriptions.subscribe(Addressed, "new", "tests.conformance.endpoint.Note")
    for number in range(5):
        Addressed.send(Note("", number))
    work(Addressed)

    eventually(lambda: sorted(calls) == [("old", number) for number in range(5)])
    eventually(lambda: Addressed.objects.count() == 5)

    assert set(Addressed.objects.values_list("recipient", "deliveries", "lease_token")) == {("new", 0, None)}
    assert not PoisonMessage.objects.exists()


@real_commits
def test_origin_defect_11_one_bad_schedule_stops_all_behind_it(calls: Any, work: Any) -> None:
    """There are no schedules here. Of delayed messages the same is asked: one that cannot be delivered is in no other's
    way."""
    for number, destination in enumerate(["gone.Queue", "", "x" * 200]):
        DelayedMessage.objects.create(
            destination=destination, message_id=uuid.uuid4(), due=Now() - timedelta(hours=1), body=b"%d" % number
        )
    have(Leased, calls, "consumer")
    for number in range(20):
        Leased.send(Note("", number), delay=timedelta(0))
    DelayedMessage.objects.create(
        destination=Leased._meta.label,
        message_id=uuid.uuid4(),
        due=Now() - timedelta(days=1),
        headers="no JSON",
        body=b"{",
    )
    work(Leased, dispatcher=True)

    eventually(lambda: sorted(number for _, number in calls) == list(range(20)))
    eventually(lambda: PoisonMessage.objects.count() == 1 and not Leased.objects.exists())
    assert set(DelayedMessage.objects.values_list("destination", flat=True)) == {"gone.Queue", "", "x" * 200}


@real_commits
def test_origin_defect_12_what_was_missed_is_collapsed_to_one(calls: Any, work: Any) -> None:
    """There are no schedules here. Of delayed messages: however long no dispatcher ran, each is delivered, in the order
    in which they were due. Sent again at each start, each is a message of its own; an id of its own makes none of them
    one."""
    for number in (3, 1, 2):
        Leased.send(Note("", number), delay=timedelta(hours=number), message_id=uuid.UUID(int=7))
    for row in DelayedMessage.objects.all():
        DelayedMessage.objects.filter(pk=row.pk).update(due=row.due - timedelta(days=100))
    have(Leased, calls, "consumer")
    work(Leased, dispatcher=True, concurrency=1)

    eventually(lambda: len(calls) == 3)

    assert calls == [("consumer", 1), ("consumer", 2), ("consumer", 3)]


@modes("R")
def test_origin_defect_13_a_long_list_has_too_many_parameters(endpoint: Endpoint) -> None:
    """Here it has none: beyond the 65,535 of PostgreSQL and the 2,100 of SQL Server."""
    assert endpoint.send_many(70_000) == 70_000
    assert endpoint.rows.count() == 70_000
    endpoint.rows.all().delete()


@real_commits
def test_origin_defect_13_nor_has_a_list_for_many_consumers(calls: Any) -> None:
    for number in range(10):
        subscriptions.subscribe(Addressed, f"consumer {number}", "tests.conformance.endpoint.Note")

    assert Addressed.send_many(Note("", number) for number in range(3_000)) == 30_000

    assert Addressed.objects.values("recipient").distinct().count() == 10


@real_commits
def test_origin_defect_14_the_type_of_an_exception_is_not_reported_and_a_delay_breaks_the_trace(
    calls: Any, work: Any
) -> None:
    def fail(message: Note) -> None:
        raise ZeroDivisionError("no")

    consumer(Leased, name="failing", attempts=1)(fail)
    with telemetry(PEEK_DELAY=0.1, DISPATCH_INTERVAL=0.1, RETRY_DELAY=0) as found:
        with found.tracer.start_as_current_span("the view"):
            Leased.send(Note("", 1), delay=timedelta(0))
        work(Leased, dispatcher=True)
        eventually(lambda: PoisonMessage.objects.exists())
        eventually(lambda: any("error.type" in (span.attributes or {}) for span in found.spans))
        (view,) = found.named("the view")
        failed = [span for span in found.spans if "error.type" in (span.attributes or {})]
        assert {(span.attributes or {})["error.type"] for span in failed} == {"ZeroDivisionError"}
        traces = {span.context.trace_id for span in (view, *failed) if span.context is not None}
        assert len(traces) == 1, "delayed, and still in the trace of the view"
        sent = [span for span in found.spans if is_child_of(span, view)]
        assert sent, "the send is in the trace of the view"


@modes("RS")
def test_origin_defect_15_a_message_that_is_requeued_has_one_attempt(endpoint: Endpoint) -> None:
    """Here it has all of them again, unless that is not wanted."""

    def act(message: Note, context: Context) -> None:
        raise ValueError("always")

    endpoint.handle(act, attempts=3)
    endpoint.send(1)
    worker = endpoint.start()
    eventually(lambda: endpoint.poison.count() == 1)
    assert [attempt for _, attempt in endpoint.calls] == [1, 2, 3]

    rows = endpoint.poison.filter(status=PoisonMessage.Status.UNRESOLVED)
    assert poison_operations.requeue(rows) == 1
    worker.pump.wake()
    eventually(lambda: len(endpoint.calls) == 6 and endpoint.poison.count() == 1)

    assert [attempt for _, attempt in endpoint.calls] == [1, 2, 3] * 2
    assert poison_operations.requeue(rows, reset_counts=False) == 1
    worker.pump.wake()
    eventually(lambda: len(endpoint.calls) == 7 and endpoint.poison.count() == 1)


@only_on_postgresql
def test_origin_defect_16_nothing_looks_at_the_code_before_it_runs(calls: Any) -> None:
    """There it has no analyzer. Here what an analyzer would find is refused where it is written, with file and line."""
    with pytest.raises(InvalidOption, match=r"test_origin_defects\.py, line \d+"):

        @consumer(Leased)
        def generator(message: Note) -> Any:
            yield message

    with pytest.raises(InvalidOption, match=r"test_origin_defects\.py, line \d+"):

        @consumer(Leased)
        def more(message: Note, context: Context, third: int) -> None: ...

    with pytest.raises(InvalidOption, match="attempts"):
        consumer(Leased, attempts=0)(lambda message: None)
    have(Leased, calls, "first")
    with pytest.raises(InvalidOption, match="handles it already"):
        have(Leased, calls, "second")
