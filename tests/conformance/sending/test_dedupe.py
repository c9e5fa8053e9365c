"""Keys of messages: of those with one key one waits, in the queue or in the delayed store; what a handler has begun
does not count; and messages that are processed once."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connection, connections, transaction

from queueapp import (
    Context,
    DuplicateMessage,
    InvalidMessage,
    OnConflict,
    QueueError,
    consumer,
    messages,
    processed_once,
    publish,
    publish_many,
)
from queueapp.consuming.registry import registered
from queueapp.failures import poison_operations
from queueapp.failures.poison_store import insert_poison
from queueapp.messages import new_id
from queueapp.models import DelayedMessage, MessageKey, Now, PoisonMessage, ProcessedMessage
from queueapp.receiving import inbox
from queueapp.sending import dedupe
from queueapp.sql import queue_sql
from queueapp.sql.journal import JournalRecord
from queueapp.testing import Kit
from queueapp.topics.backfill import insert
from tests.in_process_worker import eventually, real_commits
from tests.protocol_trace import traced
from tests.testapp.models import Addressed, Effect, Keyed, KeyedOnce, KeyedTransactional, Leased

pytestmark = real_commits
HOUR = timedelta(hours=1)
KEYED = [Keyed, KeyedTransactional, KeyedOnce]


@pytest.fixture(autouse=True)
def own_consumers(settings: Any, no_consumers: None) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1, "RETRY_DELAY": 0}


def body(n: int, key: str | None = None) -> dict[str, Any]:
    return {"n": n, "key": key}


def there(queue: Any) -> list[int]:
    """The numbers of what waits in the queue, in order."""
    return [messages.decode_body(row.body, messages.JSON)["n"] for row in queue.objects.order_by("seq")]


def asked(wire: list[str]) -> int:
    """How many statements that were."""
    return sum("\tBind\t" in item or "\tQuery\t" in item for item in wire)


def in_store() -> list[int]:
    return [messages.decode_body(row.body, messages.JSON)["n"] for row in DelayedMessage.objects.order_by("number")]


# -- what waits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", KEYED)
def test_while_one_waits_another_of_its_key_is_ignored_replaces_it_or_is_an_error(queue: Any) -> None:
    first = queue.send(body(1), dedupe_key="a", on_conflict="ignore")
    assert queue.send(body(2), dedupe_key="a", on_conflict=OnConflict.IGNORE) == first
    assert there(queue) == [1]

    with pytest.raises(DuplicateMessage) as raised:
        queue.send(body(3), dedupe_key="a", on_conflict="error")
    assert (raised.value.waiting, raised.value.key) == (first, "a")
    assert there(queue) == [1]

    second = queue.send(body(4), dedupe_key="b", on_conflict="error")
    last = queue.send(body(5), dedupe_key="a", on_conflict="replace")
    assert last not in (first, second)
    assert there(queue) == [4, 5]
    queue.send(body(6))
    assert there(queue) == [4, 5, 6]


def test_a_queue_sets_its_keys_and_the_treatment_of_the_second_message() -> None:
    Keyed.send(body(1, "a"))
    Keyed.send(body(2, "a"))  # ignored
    Keyed.send(body(3, "a"), dedupe_key="of its own")
    Keyed.send(body(4))
    KeyedTransactional.send(body(5), dedupe_key="a")  # a key is of its queue
    KeyedTransactional.send(body(6), dedupe_key="a")  # replaces
    KeyedOnce.send(body(7), dedupe_key="A")
    KeyedOnce.send(body(8), dedupe_key="a")  # another key, whatever the collation
    with pytest.raises(DuplicateMessage):
        KeyedOnce.send(body(9), dedupe_key="a")
    assert [there(queue) for queue in KEYED] == [[1, 3, 4], [6], [7, 8]]


@pytest.mark.parametrize("queue", KEYED)
def test_the_delayed_store_is_a_place_where_messages_wait(queue: Any, work: Any) -> None:
    queue.send(body(1), dedupe_key="a", delay=HOUR, on_conflict="ignore")
    queue.send(body(2), dedupe_key="a", delay=HOUR, on_conflict="ignore")
    queue.send(body(3), dedupe_key="a", on_conflict="ignore")
    assert (there(queue), in_store()) == ([], [1])

    before = DelayedMessage.objects.get().due
    queue.send(body(4), dedupe_key="a", delay=2 * HOUR, on_conflict="replace")
    assert (there(queue), in_store()) == ([], [4])
    assert DelayedMessage.objects.get().due > before + HOUR / 2

    queue.send(body(5), dedupe_key="a", on_conflict="replace")
    assert (there(queue), in_store()) == ([5], [])
    queue.send(body(6), dedupe_key="a", delay=timedelta(milliseconds=1), on_conflict="replace")
    assert (there(queue), in_store()) == ([], [6])
    calls: list[Any] = []

    @consumer(queue)
    def note(message: dict) -> None:
        calls.append(message["n"])

    work(queue, dispatcher=True)
    eventually(lambda: calls == [6])
    queue.send(body(7), dedupe_key="a", on_conflict="error")
    eventually(lambda: calls == [6, 7])


def test_what_came_out_of_the_delayed_store_still_has_its_key(work: Any) -> None:
    Keyed.send(body(1, "a"), delay=timedelta(milliseconds=1))
    worker = work(Keyed, dispatcher=True)
    eventually(lambda: there(Keyed) == [1])
    worker.stop()
    Keyed.send(body(2, "a"))
    assert there(Keyed) == [1]


def test_a_bulk_send_is_a_few_statements_whatever_its_size() -> None:
    assert Keyed.send_many([body(1, "a"), body(2), body(3, "b")]) == 3
    many = [body(1000 + n, f"k{n}") for n in range(900)]
    with traced() as wire:
        assert Keyed.send_many([body(4, "a"), *many, body(5, "k0"), body(6)]) == 901
    assert there(Keyed)[:3] == [1, 2, 3]
    assert Keyed.objects.count() == 904
    assert 4 <= asked(wire) < 12, "begin, keys, two looks, named anew, stored, commit"

    assert Keyed.send_many([body(7, "a"), body(8, "new"), body(9, "new")], on_conflict="replace") == 2
    assert there(Keyed)[-2:] == [7, 9]
    assert 1 not in there(Keyed)
    before = Keyed.objects.count()
    for part in ([body(10, "x"), body(11, "x")], [body(12, "y"), body(13, "a")]):
        with pytest.raises(DuplicateMessage):
            Keyed.send_many(part, on_conflict="error")
    assert Keyed.objects.count() == before
    assert KeyedOnce.send_many([body(1), body(2)], dedupe_key=lambda item: f"n{item['n']}") == 2
    assert KeyedOnce.send_many([body(2), body(3)], dedupe_key=lambda item: f"n{item['n']}", on_conflict="ignore") == 1


def test_an_async_send_and_a_publish_know_keys() -> None:
    first = async_to_sync(Keyed.asend)(body(1, "a"))
    assert async_to_sync(Keyed.asend)(body(2, "a")) == first
    assert async_to_sync(Keyed.asend_many)([body(3, "a"), body(4)]) == 1
    publish("Keyed", body(5, "a"))
    publish("Keyed", body(6, "b"))
    assert publish_many("Keyed", [body(7, "b"), body(8, "c")]) == 2
    publish("Keyed", body(9, "d"), delay=HOUR)
    publish("Keyed", body(10, "d"))
    assert there(Keyed) == [1, 4, 6, 8]
    assert in_store() == [9]


def test_a_send_that_is_rolled_back_leaves_no_key() -> None:
    with transaction.atomic():
        Keyed.send(body(1, "a"))
        transaction.set_rollback(True)
    Keyed.send(body(2, "a"), on_conflict="error")
    with transaction.atomic():
        Keyed.send(body(3, "b"))
        Keyed.send(body(4, "b"))
    assert there(Keyed) == [2, 3]


def test_what_has_expired_does_not_wait() -> None:
    Keyed.send(body(1, "a"), expires_in=timedelta(milliseconds=1))
    eventually(lambda: not queue_sql(Keyed, connection).claims.lock_waiting(connection, [Keyed.objects.get().id]))
    Keyed.send(body(2, "a"), on_conflict="error")
    assert 2 in there(Keyed)


# -- what a handler has begun ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", KEYED)
@pytest.mark.parametrize("conflict", ["ignore", "error", "replace"])
def test_origin_defect_07_a_message_that_is_being_processed_swallows_no_send(
    queue: Any, conflict: str, work: Any
) -> None:
    calls: list[int] = []
    inside, go_on = threading.Event(), threading.Event()

    @consumer(queue)
    def slow(message: dict) -> None:
        calls.append(message["n"])
        if message["n"] == 1:
            inside.set()
            assert go_on.wait(30)

    queue.send(body(1), dedupe_key="a")
    work(queue, concurrency=1)
    assert inside.wait(30)
    # It neither waits for the handler nor is it swallowed; the second one is, by the first that waits.
    with transaction.atomic():
        queue.send(body(2), dedupe_key="a", on_conflict=conflict)
    queue.send(body(3), dedupe_key="a", on_conflict="ignore")
    assert calls == [1]
    go_on.set()

    eventually(lambda: calls == [1, 2])
    eventually(lambda: not queue.objects.exists())


@pytest.mark.parametrize("queue", KEYED)
def test_a_handler_may_send_the_key_of_its_own_message(queue: Any, work: Any) -> None:
    calls: list[int] = []

    @consumer(queue)
    def again(message: dict) -> None:
        calls.append(message["n"])
        if message["n"] < 3:
            queue.send(body(message["n"] + 1), dedupe_key="a", on_conflict="error")

    queue.send(body(1), dedupe_key="a")
    work(queue, concurrency=1)

    eventually(lambda: calls == [1, 2, 3])


@pytest.mark.parametrize("queue", KEYED)
def test_a_message_in_whose_favour_another_was_ignored_does_not_begin_before_that_sender_commits(
    queue: Any, work: Any
) -> None:
    seen: list[int] = []

    @consumer(queue)
    def look(message: dict) -> None:
        seen.append(Effect.objects.filter(name="7").count())

    queue.send(body(1), dedupe_key="a")
    with transaction.atomic():
        Effect.objects.create(name="7")
        queue.send(body(2), dedupe_key="a", on_conflict="ignore")
        worker = work(queue)
        eventually(lambda: worker.pump.stats.peeks >= 3)
        assert seen == []

    eventually(lambda: seen == [1])


def test_a_message_that_waits_for_its_next_attempt_is_one_that_waits(work: Any) -> None:
    calls: list[int] = []

    @consumer(Keyed, attempts=2, retry_delay=3600)
    def fail(message: dict) -> None:
        calls.append(message["n"])
        raise ValueError("not now")

    Keyed.send(body(1, "a"))
    worker = work(Keyed)
    eventually(lambda: in_store() == [1])
    worker.stop()
    Keyed.send(body(2, "a"))
    assert (there(Keyed), in_store()) == ([], [1])
    Keyed.send(body(3, "a"), on_conflict="replace")
    assert (there(Keyed), in_store()) == ([3], [])
    assert calls == [1]


def test_poison_does_not_wait_and_a_requeued_message_does() -> None:
    identity = Keyed.send(body(1, "a"))
    row = Keyed.objects.get()
    PoisonMessage.objects.create(
        message_id=identity, queue=Keyed._meta.label, headers=row.headers, body=row.body, reason="x"
    )
    Keyed.objects.all().delete()
    assert poison_operations.requeue(poison_operations.find()) == 1
    Keyed.send(body(2, "a"))
    assert there(Keyed) == [1]


# -- races -----------------------------------------------------------------------------------------------------------

SENDER = """
import sys, django
from django.conf import settings
settings.DATABASES["default"]["NAME"] = sys.argv[4]
django.setup()
from tests.testapp.models import Keyed
from queueapp import DuplicateMessage
conflict, many, number = sys.argv[1], sys.argv[2] == "many", int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
bodies = [{"n": number * 1000 + n, "key": f"k{n % 25}"} for n in range(100)]
if many:
    for start in range(0, 100, 20):
        Keyed.send_many(bodies[start : start + 20], on_conflict=conflict)
else:
    for body in bodies if number % 2 else reversed(bodies):
        Keyed.send(body, on_conflict=conflict)
"""


@pytest.mark.parametrize("conflict", ["ignore", "replace"])
@pytest.mark.parametrize("how", ["single", "many"])
def test_processes_that_send_the_same_keys_at_once_leave_one_of_each(conflict: str, how: str) -> None:
    processes = [_sender(conflict, how, number) for number in range(3)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        out, error = process.communicate(timeout=90)
        assert process.returncode == 0, error + out
    keys = sorted(messages.decode_body(row.body, messages.JSON)["key"] for row in Keyed.objects.all())
    assert keys == sorted(f"k{n}" for n in range(25))
    assert MessageKey.objects.count() == 25


def _sender(conflict: str, how: str, number: int) -> Any:
    name = str(connection.settings_dict["NAME"])
    return subprocess.Popen(
        [sys.executable, "-c", SENDER, conflict, how, str(number), name],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"DJANGO_SETTINGS_MODULE": "tests.settings"},
    )  # fmt: skip


def test_workers_and_senders_at_once_lose_no_last_send(work: Any) -> None:
    """Of each key the last thing that was sent is seen: by the message that waited, or by one that was stored."""
    state: dict[str, int] = dict.fromkeys("abcd", 0)
    seen: dict[str, int] = dict.fromkeys("abcd", 0)

    @consumer(Keyed)
    def look(message: dict) -> None:
        # What it reads as it begins; two of one key may run side by side.
        seen[message["key"]] = max(seen[message["key"]], Effect.objects.filter(name=message["key"]).count())

    work(Keyed, concurrency=4)

    def send(key: str) -> None:
        with contextlib.closing(connection):
            for n in range(60):
                with transaction.atomic():
                    Effect.objects.create(name=key)
                    state[key] += 1
                    Keyed.send({"n": n, "key": key})

    threads = [threading.Thread(target=send, args=(key,)) for key in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    eventually(lambda: not Keyed.objects.exists())
    assert state == dict.fromkeys("abcd", 60)
    eventually(lambda: seen == state)


# -- refused ---------------------------------------------------------------------------------------------------------


def test_what_makes_no_sense_is_refused() -> None:
    for send, words in (
        (lambda: Leased.send(body(1), dedupe_key="a"), "its messages have no keys"),
        (lambda: Leased.send_many([body(1)], dedupe_key=lambda item: "a"), "its messages have no keys"),
        (lambda: Keyed.send(body(1), dedupe_key=""), "not empty"),
        (lambda: Keyed.send(body(1), dedupe_key=7), "not empty"),  # type: ignore[arg-type]
        (lambda: Keyed.send(body(1, "a"), on_conflict="merge"), "one of 'ignore', 'replace', 'error'"),
        (lambda: KeyedOnce.send_many([body(1)], dedupe_key="a"), "a callable of the body"),
        (lambda: KeyedOnce.send_many([body(1)], dedupe_key=lambda item: 7), "not empty"),  # type: ignore[arg-type, return-value]
    ):
        with pytest.raises(InvalidMessage, match=words):
            send()
    assert not Keyed.objects.exists()


def test_a_queue_without_keys_asks_nothing_for_them(settings: Any) -> None:
    settings.QUEUEAPP = {"NOTIFY": False}
    Leased.send(body(0))
    with traced() as wire:
        Leased.send(body(1, "a"))
    assert asked(wire) == 1
    with traced() as wire:
        Leased.send_many([body(2, "a")])
    assert asked(wire) == 3, "begin, COPY, commit"
    assert not any("messagekey" in item for item in wire)
    names = {index.name for index in Leased._meta.indexes}
    assert not any(name.endswith("_id") for name in names)
    assert {field.name for field in Keyed._meta.fields} == {field.name for field in Leased._meta.fields}
    assert not MessageKey.objects.exists()


# -- processed once ---------------------------------------------------------------------------------------------------


def test_a_message_that_comes_twice_is_processed_once(work: Any) -> None:
    outcomes: list[bool] = []

    @consumer(Keyed, name="first")
    def ship(message: dict, context: Context) -> None:
        with transaction.atomic():
            outcomes.append(processed_once(context))
            if outcomes[-1]:
                Effect.objects.create(name=str(message["n"]))

    identity = uuid.uuid4()
    for _ in range(3):
        Keyed.send(body(1), message_id=identity)
    Keyed.send(body(2))
    work(Keyed)

    eventually(lambda: len(outcomes) == 4 and not Keyed.objects.exists())
    assert sorted(outcomes) == [False, False, True, True]
    assert sorted(Effect.objects.values_list("name", flat=True)) == ["1", "2"]


def test_a_note_is_undone_with_the_effects_and_others_have_notes_of_their_own(work: Any) -> None:
    calls: list[str] = []

    @consumer(Keyed, attempts=2)
    def first(message: dict, context: Context) -> None:
        with transaction.atomic():
            calls.append(f"first {processed_once(context)}")
            if context.attempt == 1:
                raise ValueError("after its note")

    @consumer(KeyedTransactional, name="second")
    def second(message: dict, context: Context) -> None:
        calls.append(f"second {processed_once(context)}")

    identity = uuid.uuid4()
    Keyed.send(body(1), message_id=identity)
    KeyedTransactional.send(body(1), message_id=identity)
    work(Keyed)
    work(KeyedTransactional)

    eventually(lambda: sorted(calls) == ["first True", "first True", "second True"])


def test_a_consumer_that_was_renamed_has_processed_what_it_had_under_its_former_name(queue_kit: Kit) -> None:
    """In a rolling deploy, too, where the old code is handed what the new one has had."""
    calls: list[bool] = []

    def ship(message: dict, context: Context) -> None:
        with transaction.atomic():
            calls.extend((processed_once(context), processed_once(context)))

    for names in (("old", "new", "older"), ("new", "old", "older")):
        identity = uuid.uuid4()
        for name in names:
            registered.remove(names[names.index(name) - 1])
            former = {"old": ["older"], "new": ["older", "old"], "older": []}[name]
            consumer(Addressed, name=name, aliases=former)(ship)
            Addressed.send(body(1), message_id=identity, recipient=name, unknown_recipient=True)
            queue_kit.drain(Addressed)
        registered.remove(names[-1])
        assert calls == [True, False, False, False, False, False]
        calls.clear()


def test_a_header_of_foreign_producers_states_what_is_processed_once(work: Any) -> None:
    calls: list[tuple[int, bool]] = []

    @consumer(Keyed)
    def pay(message: dict, context: Context) -> None:
        with transaction.atomic():
            calls.append((message["n"], processed_once(context)))

    with connection.cursor() as cursor:  # as a writer does that knows nothing of us
        for n, key in ((1, "p-1"), (2, "p-1"), (3, "p-2")):
            headers = messages.encode_headers({"Idempotency-Key": key})
            cursor.execute(
                f"INSERT INTO {connection.ops.quote_name(Keyed._meta.db_table)} (id, headers, body) VALUES (%s, %s, "
                "%s)",
                [uuid.uuid4(), headers, b'{"n": %d}' % n],
            )
    work(Keyed, concurrency=1)

    eventually(lambda: calls == [(1, True), (2, False), (3, True)])


def test_a_note_outside_of_a_transaction_is_refused(work: Any) -> None:
    reported: list[str] = []

    @consumer(Keyed)
    def careless(message: dict, context: Context) -> None:
        try:
            processed_once(context)
        except QueueError as error:
            reported.append(str(error))

    Keyed.send(body(1))
    work(Keyed)
    eventually(lambda: len(reported) == 1)
    assert "with transaction.atomic()" in reported[0]
    assert not ProcessedMessage.objects.exists()


def test_maintenance_deletes_old_notes_and_keys_without_messages(
    monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    monkeypatch.setattr(inbox, "BATCH", 2)
    for n in range(5):
        Keyed.send(body(n, f"gone {n}"))
    Keyed.objects.all().delete()
    Keyed.send(body(7, "waits"))
    Keyed.send(body(8, "delayed"), delay=HOUR)
    for n in range(3):
        ProcessedMessage.objects.create(key=str(n), queue="x")
    inbox.run_maintenance("default", lambda: True)
    assert (MessageKey.objects.count(), ProcessedMessage.objects.count()) == (7, 3)

    from django.db.models import F

    MessageKey.objects.update(changed_at=F("changed_at") - 2 * HOUR)
    ProcessedMessage.objects.filter(key__in="01").update(processed_at=F("processed_at") - timedelta(days=8))
    inbox.run_maintenance("default", lambda: False)
    assert MessageKey.objects.count() == 7
    inbox.run_maintenance("default", lambda: True)
    assert (MessageKey.objects.count(), ProcessedMessage.objects.count()) == (2, 1)

    ProcessedMessage.objects.update(processed_at=F("processed_at") - 2 * HOUR)
    for retention, remaining in ((None, 1), (timedelta(hours=3), 1), (HOUR, 0)):
        settings.QUEUEAPP = {"PROCESSED_RETENTION": retention}
        inbox.run_maintenance("default", lambda: True)
        assert ProcessedMessage.objects.count() == remaining
    Keyed.send(body(9, "gone 0"), on_conflict="error")
    with pytest.raises(DuplicateMessage):
        Keyed.send(body(9, "waits"), on_conflict="error")


# -- stored messages -------------------------------------------------------------------------------------------------


def poisoned(queue: Any) -> PoisonMessage:
    """The one message of the queue, moved to poison."""
    connection = connections["default"]
    sql = queue_sql(queue, connection)
    with transaction.atomic():
        row = sql.failures.lock(connection, queue.objects.get().seq, None, 1000)
        assert row is not None
        insert_poison("default", queue._meta.label, row, "tests", attempts=1)
        sql.failures.remove(connection, [row.seq])
    return PoisonMessage.objects.get(message_id=row.id)


@pytest.mark.parametrize("queue", [Keyed, KeyedTransactional])
def test_requeued_poison_keeps_its_key_for_longer_than_an_hour(queue: Any) -> None:
    given = {} if queue is Keyed else {"dedupe_key": "k"}
    first = queue.send(body(1, "k"), **given)
    poisoned(queue)
    MessageKey.objects.update(changed_at=Now() - 2 * HOUR)
    inbox.run_maintenance("default", lambda: True)

    assert poison_operations.requeue(PoisonMessage.objects.all()) == 1

    assert queue.send(body(2, "k"), **given, on_conflict="ignore") == first
    assert queue.objects.count() == 1


def test_poison_stays_poison_while_another_message_with_its_key_waits() -> None:
    Keyed.send(body(1, "k"))
    old = poisoned(Keyed)
    Keyed.send(body(2, "k"))

    assert poison_operations.requeue(PoisonMessage.objects.all()) == 0
    assert poison_operations.requeue(PoisonMessage.objects.all(), to=Keyed) == 0
    Keyed.objects.all().delete()
    assert poison_operations.requeue(PoisonMessage.objects.all()) == 1

    assert Keyed.objects.get().id == old.message_id


def test_requeue_to_a_queue_with_keys_admits_one_message_of_each_key() -> None:
    Keyed.send(body(1, "k"))
    waiting = Keyed.objects.get().id
    for number in range(2):
        KeyedTransactional.send(body(number, "k"))
        poisoned(KeyedTransactional)

    assert poison_operations.requeue(PoisonMessage.objects.all(), to=Keyed) == 0
    Keyed.objects.all().delete()
    assert poison_operations.requeue(PoisonMessage.objects.all(), to=Keyed) == 1

    assert Keyed.objects.get().id != waiting


def test_messages_from_the_journal_are_left_out_while_one_with_their_key_waits() -> None:
    Keyed.send(body(1, "k"))
    entries = [
        JournalRecord(
            number,
            1,
            "t",
            new_id().bytes,
            "{}",
            json.dumps(body(number, key)).encode(),
            datetime.now(UTC),
            None,
            "",
            0,
            None,
            None,
            False,
        )
        for number, key in enumerate(["k", "other", "other", None])
    ]

    with transaction.atomic():
        assert insert(Keyed, connections["default"], entries) == 2

    assert there(Keyed) == [1, 1, 3]


def test_key_that_cannot_be_computed_of_a_stored_message_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(Keyed.delivery), "dedupe_key", lambda given: given["nowhere"])
    with pytest.raises(InvalidMessage, match=r"dedupe_key raises KeyError for the stored message"):
        dedupe.admit_stored(Keyed, connections["default"], [dedupe.Stored(new_id(), "{}", b"{}")])
