"""Independent consumption: each consumer has a copy of its own, whichever process sent the message, whichever copies
it, whichever dies."""

from __future__ import annotations

import subprocess
import sys
import threading
import uuid
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.utils import timezone

from queueapp import Context, consumer
from queueapp.consuming.registry import registered
from queueapp.messages import encode_headers, new_id, type_name
from queueapp.models import DelayedMessage, PoisonMessage, Subscription
from queueapp.operations import subscriptions
from queueapp.sending import fanout
from tests.conformance.endpoint import Note
from tests.in_process_worker import DEADLINE, eventually, real_commits
from tests.testapp.models import Addressed, AddressedOnce, AddressedUrgent, Effect

#: One of each semantics.
EACH_QUEUE = pytest.mark.parametrize("queue", [Addressed, AddressedUrgent, AddressedOnce])
RETRIED = pytest.mark.parametrize("queue", [Addressed, AddressedUrgent])
HEADERS = encode_headers({"type": type_name(Note), "content-type": "application/json"})
pytestmark = real_commits


@pytest.fixture
def calls(settings: Any, no_consumers: None) -> list[tuple[str, int]]:
    """No consumers but those of the test; (consumer, number) of each call."""
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1, "RETRY_DELAY": 0, "DISPATCH_INTERVAL": 0.1}
    return []


def have(queue: Any, calls: list[tuple[str, int]], *names: str, **options: Any) -> None:
    """Consumers in this process' code."""

    def noting(name: str) -> Any:
        def note(message: Note) -> None:
            calls.append((name, message.number))

        return note

    for name in names:
        consumer(queue, name=name, **options)(noting(name))


def subscribe(queue: Any, *names: str) -> None:
    """Consumers of other code: rows are all that this process knows of them."""
    for name in names:
        assert subscriptions.subscribe(queue, name, type_name(Note))


def put_foreign(queue: Any, *numbers: int, **columns: Any) -> None:
    """As plain SQL does that knows of no consumers."""
    rows = [
        queue(id=new_id(), headers=HEADERS, body=b'{"tag": "", "number": %d}' % number, **columns) for number in numbers
    ]
    queue.objects.bulk_create(rows)


def recipients(queue: Any) -> Counter[str]:
    return Counter(queue.objects.values_list("recipient", flat=True))


# -- each for itself -------------------------------------------------------------------------------------------------


@RETRIED
def test_a_consumer_that_fails_has_attempts_delay_and_poison_of_its_own(queue: Any, calls: Any, work: Any) -> None:
    def fail(message: Note, context: Context) -> None:
        calls.append(("failing", context.attempt))
        raise ValueError("no")

    consumer(queue, name="failing", attempts=3, retry_delay=0)(fail)
    have(queue, calls, "working")
    put_foreign(queue, 1)
    queue.send(Note("", 2))
    # One task: between the rollback of a TRANSACTIONAL attempt and its count another one may take the message. Then two
    # attempts get the same number, or one begins that is too many.
    work(queue, concurrency=1)

    eventually(lambda: PoisonMessage.objects.count() == 2 and not queue.objects.exists())

    assert Counter(name for name, _ in calls) == {"failing": 6, "working": 2}
    assert {("failing", 1), ("working", 1), ("working", 2)} <= set(calls)
    assert set(PoisonMessage.objects.values_list("consumer", "recipient", "attempts")) == {("failing", "failing", 3)}


@RETRIED
def test_a_copy_that_waits_for_its_retry_holds_no_other(queue: Any, calls: Any, work: Any) -> None:
    def fail(message: Note) -> None:
        calls.append(("failing", message.number))
        raise ValueError("no")

    consumer(queue, name="failing", attempts=2, retry_delay=3600)(fail)
    have(queue, calls, "working")
    put_foreign(queue, 1)
    work(queue)

    eventually(lambda: sorted(calls) == [("failing", 1), ("working", 1)] and not queue.objects.exists())

    assert DelayedMessage.objects.get().recipient == "failing"


# -- all senders, all copying processes-------------------------------------------------------------------------------


@EACH_QUEUE
def test_a_producer_that_imports_no_consumers_makes_a_copy_for_each(queue: Any, calls: Any) -> None:
    subscribe(queue, "one", "two")

    queue.send(Note("", 1))
    queue.send_many([Note("", 2), Note("", 3)])

    assert recipients(queue) == {"one": 3, "two": 3}


@EACH_QUEUE
def test_a_process_that_knows_some_makes_a_copy_for_the_others_as_well(queue: Any, calls: Any) -> None:
    have(queue, calls, "old", "here")
    subscribe(queue, "old", "new")

    queue.send(Note("", 1))

    assert recipients(queue) == {"old": 1, "new": 1, "here": 1}


@EACH_QUEUE
def test_a_consumer_that_was_added_a_moment_ago_misses_nothing(queue: Any, calls: Any) -> None:
    """Deterministically: whatever a process remembers of who subscribes, the next send after the commit of a row knows
    it."""
    have(queue, calls, "old")
    for number in range(20):
        queue.send(Note("", number))
        subscribe(queue, f"new {number}")
        queue.send(Note("", 100 + number))

    counts = recipients(queue)
    assert counts["old"] == 40
    assert [counts[f"new {number}"] for number in range(20)] == [2 * (19 - number) + 1 for number in range(20)]


def test_a_consumer_added_while_others_send_gets_all_that_is_sent_after_its_row(calls: Any) -> None:
    """Real concurrency: senders that remember the rows race with a row's commit."""
    subscribe(Addressed, "old")
    added = threading.Event()
    sent: list[tuple[bool, uuid.UUID]] = []
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            after = added.is_set()
            sent.append((after, Addressed.send(Note("", 1))))
        connections.close_all()

    threads = [threading.Thread(target=send) for _ in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(sent) > 100)
    subscribe(Addressed, "new")
    added.set()
    eventually(lambda: sum(after for after, _ in sent) > 100)
    stop.set()
    for thread in threads:
        thread.join(DEADLINE)

    got = set(Addressed.objects.filter(recipient="new").values_list("id", flat=True))
    assert {identity for after, identity in sent if after} <= got
    assert Addressed.objects.filter(recipient="old").count() == len(sent)
    assert not Addressed.objects.filter(recipient="").exists()


def test_a_send_whose_row_is_rolled_back_makes_no_copy_for_it(calls: Any) -> None:
    subscribe(Addressed, "old")
    try:
        with transaction.atomic():
            subscribe(Addressed, "new")
            Addressed.send(Note("", 1))
            assert recipients(Addressed) == {"old": 1, "new": 1}
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass

    Addressed.send(Note("", 2))

    assert recipients(Addressed) == {"old": 1}


@EACH_QUEUE
def test_copies_go_with_the_transaction_of_their_send(queue: Any, calls: Any) -> None:
    subscribe(queue, "one", "two")
    with transaction.atomic():
        queue.send(Note("", 1))
        transaction.set_rollback(True)

    assert not queue.objects.exists()


@EACH_QUEUE
def test_a_message_of_plain_sql_is_copied_for_consumers_that_this_worker_has_not(
    queue: Any, calls: Any, work: Any
) -> None:
    have(queue, calls, "here")
    subscribe(queue, "elsewhere", "far away")
    put_foreign(queue, *range(30))
    work(queue)

    eventually(lambda: recipients(queue) == {"elsewhere": 30, "far away": 30})
    # AT_MOST_ONCE: what is gone from the queue is still to be handled.
    eventually(lambda: len(calls) >= 30)

    assert sorted(calls) == [("here", number) for number in range(30)]


@EACH_QUEUE
def test_a_worker_without_any_of_the_consumers_copies_for_them(queue: Any, calls: Any, work: Any) -> None:
    """Another consumer filter: it has the queue and none of these."""

    class Unrelated:
        pass

    def later_consumer(message: dict[str, Any]) -> None:
        calls.append(("other", 0))

    consumer(queue, name="other")(later_consumer)
    subscribe(queue, "one", "two")
    put_foreign(queue, *range(600))
    work(queue)

    eventually(lambda: recipients(queue) == {"one": 600, "two": 600})
    assert calls == []


@EACH_QUEUE
def test_a_message_that_one_consumer_wants_is_handled_as_it_is(queue: Any, calls: Any, work: Any) -> None:
    have(queue, calls, "only")
    subscribe(queue, "only")
    put_foreign(queue, 1, 2, 3)
    work(queue, concurrency=1)

    eventually(lambda: not queue.objects.exists() and len(calls) == 3)

    assert calls == [("only", 1), ("only", 2), ("only", 3)]
    put_foreign(queue, 4)
    eventually(lambda: len(calls) == 4 and not queue.objects.exists())
    subscribe(queue, "another")
    put_foreign(queue, 5)
    eventually(lambda: recipients(queue) == {"another": 1})


def test_what_was_claimed_when_another_consumer_subscribes_is_for_both(calls: Any, work: Any) -> None:
    """It has left its table by then, and another task of the process has learned of the newcomer."""
    queue = AddressedOnce

    def note(message: Note) -> None:
        calls.append(("only", message.number))
        if message.number == 1:
            subscribe(queue, "another")
            workers[0].pump.handlers.refresh_subscribers(connection)

    consumer(queue, name="only")(note)
    put_foreign(queue, *range(6))
    workers = [work(queue, concurrency=1)]

    eventually(lambda: sorted(calls) == [("only", number) for number in range(6)] and recipients(queue)["another"])
    eventually(lambda: set(recipients(queue)) == {"another"})
    assert not PoisonMessage.objects.exists()
    assert 0 < recipients(queue)["another"] <= 4, "those that were in flight by then are the first one's alone"


@EACH_QUEUE
def test_a_message_whose_only_consumer_is_elsewhere_is_left_to_it(queue: Any, calls: Any, work: Any) -> None:
    subscribe(queue, "elsewhere")
    have(queue, calls, "here", unrecoverable=None)
    registered.remove("here")

    def later_consumer(message: dict[str, Any]) -> None: ...

    consumer(queue, name="other")(later_consumer)
    put_foreign(queue, 1)
    worker = work(queue)
    eventually(lambda: worker.pump.stats.skipped)

    assert recipients(queue) == {"": 1}
    assert queue.objects.get().deliveries == 0


def test_a_delayed_message_is_copied_for_who_subscribes_when_it_is_due(calls: Any, work: Any) -> None:
    have(Addressed, calls, "old")
    Addressed.send(Note("", 1), delay=timedelta(0))
    subscribe(Addressed, "late")
    work(Addressed, dispatcher=True)

    eventually(lambda: calls == [("old", 1)] and recipients(Addressed) == {"late": 1})


@EACH_QUEUE
def test_a_copy_keeps_all_that_the_message_carried(queue: Any, calls: Any, work: Any) -> None:
    subscribe(queue, "one", "two")

    def later_consumer(message: dict[str, Any]) -> None: ...

    consumer(queue, name="other")(later_consumer)
    expires, before = timezone.now() + timedelta(days=5), timezone.now() - timedelta(days=2)
    carried = {
        "correlation_id": "c", "reply_to_address": "r", "recoverable": False, "expires": expires, "enqueued_at": before,
        "priority": 2 if queue is AddressedUrgent else 0,
    }  # fmt: skip
    put_foreign(queue, 7, **carried)
    (identity,) = queue.objects.values_list("id", flat=True)
    work(queue)

    eventually(lambda: recipients(queue) == {"one": 1, "two": 1})

    for row in queue.objects.all():
        assert {name: getattr(row, name) for name in carried} == carried
        assert (row.id, row.headers, bytes(row.body)) == (identity, HEADERS, b'{"tag": "", "number": 7}')
        assert (row.deliveries, row.cancels, row.failures, row.lease_token) == (0, 0, None, None)


@pytest.mark.parametrize("size", [2, 50])
def test_several_messages_of_a_transaction_are_copied_and_those_between_are_handled(
    size: int, calls: Any, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AddressedUrgent.delivery, "transaction_size", size)

    def note(message: Note, context: Context) -> None:
        Effect.objects.create(name=context.consumer.name, detail=str(message.number))

    for name in ("one", "two"):
        consumer(AddressedUrgent, name=name)(note)
    for number in range(20):
        put_foreign(AddressedUrgent, number)
        AddressedUrgent.send(Note("", 100 + number))
    work(AddressedUrgent)

    eventually(lambda: not AddressedUrgent.objects.exists())

    done = Counter(Effect.objects.values_list("name", "detail"))
    assert done == {(name, str(number)): 1 for name in ("one", "two") for number in (*range(20), *range(100, 120))}


@EACH_QUEUE
def test_headers_that_cannot_be_read_are_poison_and_no_reason_to_stop(queue: Any, calls: Any, work: Any) -> None:
    have(queue, calls, "one", "two")
    queue.objects.bulk_create([queue(id=new_id(), headers="not JSON", body=b"kept")])
    put_foreign(queue, 1)
    work(queue)

    eventually(lambda: sorted(calls) == [("one", 1), ("two", 1)])
    eventually(lambda: PoisonMessage.objects.count() == 1)

    assert bytes(PoisonMessage.objects.get().body) == b"kept"


def test_who_receives_without_a_worker_gets_its_copies(calls: Any) -> None:
    subscribe(Addressed, "script", "another")
    put_foreign(Addressed, *range(5))

    with Addressed.receive(max_backlog=10, recipient="script") as batch:
        for message in batch:
            calls.append(("script", message.decode()["number"] if hasattr(message, "decode") else 0))
            message.ack()

    assert len(calls) == 5
    assert recipients(Addressed) == {"another": 5}


# -- crashes ------------------------------------------------------------------------------------------------------


@EACH_QUEUE
def test_a_kill_at_any_statement_loses_and_doubles_no_copy(
    queue: Any, calls: Any, child_environment: dict[str, str]
) -> None:
    subscribe(queue, "one", "two")
    put_foreign(queue, *range(40))
    ids = set(queue.objects.values_list("id", flat=True))

    done = subprocess.run(
        [sys.executable, "-m", "tests.workers.killed_copying", queue._meta.label],
        env=child_environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    remaining = list(queue.objects.values_list("id", "recipient"))
    for identity in ids:
        first = sorted(name for item, name in remaining if item == identity)
        assert first in ([""], ["one", "two"]), "the message or its copies, never both, never neither"
    assert any(name for _, name in remaining)


@EACH_QUEUE
def test_many_workers_make_each_copy_once(queue: Any, calls: Any, work: Any) -> None:
    have(queue, calls, "one", "two", "three")
    put_foreign(queue, *range(300))
    for _ in range(3):
        work(queue)
    put_foreign(queue, *range(300, 400))

    eventually(lambda: not queue.objects.exists())

    expected = Counter({(name, number): 1 for name in ("one", "two", "three") for number in range(400)})
    eventually(lambda: len(calls) >= expected.total())  # what AT_MOST_ONCE takes is gone before it is handled
    assert Counter(calls) == expected


# -- renamed ---------------------------------------------------------------------------------------------------------


def test_a_renamed_consumer_keeps_its_row_and_gets_one_copy_in_either_version(calls: Any, work: Any) -> None:
    have(Addressed, calls, "old name")
    subscriptions.register("default")
    registered.remove("old name")
    have(Addressed, calls, "new name", aliases=["old name"])
    subscriptions.register("default")

    assert [row.consumer for row in Subscription.objects.all()] == ["old name"]
    Addressed.send(Note("", 1))
    put_foreign(Addressed, 2)
    work(Addressed)
    eventually(lambda: sorted(calls) == [("new name", 1), ("new name", 2)] and not Addressed.objects.exists())


def test_the_old_code_that_starts_after_the_new_one_makes_no_second_row(calls: Any) -> None:
    have(Addressed, calls, "new name", aliases=["old name"])
    subscriptions.register("default")
    registered.remove("new name")
    have(Addressed, calls, "old name")
    subscriptions.register("default")

    assert [row.consumer for row in Subscription.objects.all()] == ["new name"]
    Addressed.send(Note("", 1))
    assert recipients(Addressed) == {"new name": 1}


def test_two_that_start_at_once_under_both_names_make_one_row(calls: Any) -> None:
    start = threading.Barrier(6)

    def write(name: str, aliases: tuple[str, ...]) -> None:
        start.wait(DEADLINE)
        with subscriptions.SubscriptionLock(Addressed, "default"):
            subscriptions.write(Addressed, "default", name, "", aliases)
        connections.close_all()

    ways = [("old", ()), ("new", ("old",))] * 3
    threads = [threading.Thread(target=write, args=way) for way in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)

    assert Subscription.objects.count() == 1


# -- what it costs ---------------------------------------------------------------------------------------------------


def test_a_send_asks_nothing_beside_its_insert(calls: Any) -> None:
    from queueapp.sql.postgresql import inserts
    from queueapp.sql.postgresql.raw import cursor as raw_cursor

    if connection.vendor != "postgresql":
        pytest.skip("counts the statements of PostgreSQL")
    subscribe(Addressed, "one", "two")
    Addressed.send(Note("", 1))
    statements: list[str] = []
    execute = inserts.execute

    def counted(connection: Any, sql: str, params: Any) -> Any:
        statements.append(sql)
        return execute(connection, sql, params)

    assert raw_cursor.execute is execute
    inserts.execute = counted
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fanout, "read_subscribers", lambda *_: pytest.fail("it asked who subscribes"))
            Addressed.send(Note("", 2))
    finally:
        inserts.execute = execute
    assert len(statements) == 1
    assert recipients(Addressed) == {"one": 2, "two": 2}


@pytest.mark.skipif(connection.vendor != "postgresql", reason="REPEATABLE READ of SQL Server reads what is committed")
@pytest.mark.parametrize("many", [False, True], ids=["send", "send_many"])
def test_new_consumer_gets_a_copy_from_a_sender_in_repeatable_read(calls: list[tuple[str, int]], many: bool) -> None:
    subscribe(Addressed, "first")
    Addressed.send(Note("", 0))
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("SELECT count(*) FROM testapp_addressed")
        thread = threading.Thread(target=lambda: (subscribe(Addressed, "late"), connections.close_all()))
        thread.start()
        thread.join(DEADLINE)

        if many:
            Addressed.send_many([Note("", 1), Note("", 2)])
        else:
            Addressed.send(Note("", 1))

    for name in ("first", "late"):
        with Addressed.receive(10, recipient=name) as batch:
            got = [message.body["number"] for message in batch if message.body["number"]]
        assert got == ([1, 2] if many else [1])
