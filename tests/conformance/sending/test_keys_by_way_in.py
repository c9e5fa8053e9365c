"""Dedupe keys by each way into a queue: the key holds, or the way is refused, or its messages have no keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections, transaction

import queueapp
from queueapp import InvalidMessage, delayed, messages, publish, publish_many
from queueapp.checks import check_dedupe
from queueapp.contrib.celery.models import BrokerQueue
from queueapp.errors import InvalidOption
from queueapp.failures import poison_operations
from queueapp.failures.poison_operations import edit_and_requeue
from queueapp.failures.poison_store import insert_poison
from queueapp.models import DelayedMessage, MessageKey, PoisonMessage
from queueapp.operations import move_messages
from queueapp.sending import dedupe
from queueapp.sql import queue_sql
from queueapp.topics.backfill import QueueFeeder
from queueapp.topics.publisher import publish_stored
from tests.in_process_worker import eventually, real_commits
from tests.testapp.keyed import key_in
from tests.testapp.models import Keyed, KeyedOnce, KeyedTransactional, Recovered

pytestmark = real_commits
HOUR = timedelta(hours=1)
KEY = "k"
JOURNALED = "journaled.orders"


@pytest.fixture(autouse=True)
def journaled(settings: Any) -> None:
    settings.QUEUEAPP = {"JOURNAL": {JOURNALED: None}, "RETRY_DELAY": 0}


def body(number: int) -> dict[str, Any]:
    return {"n": number, "key": KEY}


def send(queue: Any, number: int, **options: Any) -> None:
    """A message with the key: the sender gives it, or the queue computes it."""
    given = {"dedupe_key": KEY} if queue.delivery.dedupe_key is True else {}
    queue.send(body(number), **given, **({"on_conflict": "ignore"} | options))


def waiting(queue: Any) -> list[int]:
    """The numbers of the messages that wait in the queue or, for it, in the delayed store."""
    rows = [*queue.objects.all(), *DelayedMessage.objects.filter(destination=queue._meta.label)]
    return sorted(messages.decode_body(bytes(row.body), messages.JSON)["n"] for row in rows)


def second_key(queue: Any) -> Any:
    """A queue whose senders give the keys."""
    return KeyedTransactional if queue is Keyed else KeyedOnce


def poisoned(queue: Any, number: int) -> PoisonMessage:
    """A message with the key, moved to poison."""
    send(queue, number)
    sql = queue_sql(queue, connections["default"])
    with transaction.atomic():
        row = sql.failures.lock(connections["default"], queue.objects.get().seq, None, 1000)
        assert row is not None
        insert_poison("default", queue._meta.label, row, "tests", attempts=1)
        sql.failures.remove(connections["default"], [row.seq])
    return PoisonMessage.objects.get(message_id=row.id)


# -- ways: each prepares what it needs, and returns what brings message 2 into the queue -------------------------------


def by_send(queue: Any) -> Callable[[], Any]:
    return lambda: send(queue, 2)


def by_send_many(queue: Any) -> Callable[[], Any]:
    given = (lambda _: KEY) if queue.delivery.dedupe_key is True else None
    return lambda: queue.send_many([body(2)], dedupe_key=given, on_conflict="ignore")


def by_the_delayed_store(queue: Any) -> Callable[[], Any]:
    return lambda: send(queue, 2, delay=HOUR)


def by_dispatch(queue: Any) -> Callable[[], Any]:
    def bring() -> None:
        send(queue, 2, delay=timedelta(milliseconds=1))
        eventually(lambda: delayed.dispatch_due("default", 10) is not None and not DelayedMessage.objects.exists())

    return bring


def by_requeue(queue: Any) -> Callable[[], Any]:
    poisoned(queue, 2)
    return lambda: poison_operations.requeue(PoisonMessage.objects.all())


def by_requeue_to(queue: Any) -> Callable[[], Any]:
    poisoned(second_key(queue), 2)
    return lambda: call_command("requeuepoison", "--all", "--to", queue._meta.label)


def by_edit(queue: Any) -> Callable[[], Any]:
    number = poisoned(queue, 7).number

    def bring() -> None:
        with suppress(InvalidMessage):
            edit_and_requeue(number, body=b'{"n":2,"key":"k"}')

    return bring


def by_edit_to(queue: Any) -> Callable[[], Any]:
    number = poisoned(second_key(queue), 2).number

    def bring() -> None:
        with suppress(InvalidMessage):
            edit_and_requeue(number, to=queue)

    return bring


def by_move(queue: Any) -> Callable[[], Any]:
    send(second_key(queue), 2)
    return lambda: move_messages.move_type(second_key(queue), "", queue)


def by_move_of_delayed(queue: Any) -> Callable[[], Any]:
    send(second_key(queue), 2, delay=HOUR)
    return lambda: call_command("movedelayed", second_key(queue)._meta.label, queue._meta.label)


def by_publish(queue: Any) -> Callable[[], Any]:
    return lambda: publish(queue._meta.object_name, body(2))


def by_publish_many(queue: Any) -> Callable[[], Any]:
    return lambda: publish_many(queue._meta.object_name, [body(2)])


def by_expiry(queue: Any) -> Callable[[], Any]:
    headers, data = messages.encode(body(2))

    def bring() -> None:
        with transaction.atomic():
            publish_stored(
                queue._meta.object_name, data, headers=messages.decode_headers(headers), using="default",
                original=messages.new_id(),
            )  # fmt: skip

    return bring


def by_replay_to(queue: Any) -> Callable[[], Any]:
    publish(JOURNALED, body(2))
    Recovered.objects.all().delete()
    return lambda: call_command("replay", JOURNALED, "--to", queue._meta.label)


BOTH: list[Callable[[Any], Callable[[], Any]]] = [
    by_send, by_send_many, by_the_delayed_store, by_dispatch, by_requeue, by_requeue_to, by_edit, by_edit_to, by_move,
    by_move_of_delayed,
]  # fmt: skip
#: Ways on which no sender gives a key.
COMPUTED = [by_publish, by_publish_many, by_expiry, by_replay_to]
CELLS = [
    pytest.param(queue, way, id=f"{queue.__name__}-{way.__name__}")
    for queue in (Keyed, KeyedTransactional)
    for way in (BOTH + COMPUTED if queue is Keyed else BOTH)
]


@pytest.mark.parametrize(("queue", "way"), CELLS)
def test_while_a_message_waits_no_other_with_its_key_comes(queue: Any, way: Any) -> None:
    bring = way(queue)
    send(queue, 1)
    bring()
    assert waiting(queue) == [1]


@pytest.mark.parametrize(("queue", "way"), CELLS)
def test_message_that_comes_holds_its_key(queue: Any, way: Any) -> None:
    way(queue)()
    assert waiting(queue) == [2]

    send(queue, 3)
    assert waiting(queue) == [2]


@pytest.mark.parametrize(("queue", "way"), CELLS)
def test_key_holds_though_it_was_used_again_and_forgotten(queue: Any, way: Any) -> None:
    """After the window in which the table of keys knows it."""
    bring = way(queue)
    send(queue, 1)
    queue.objects.all().delete()  # handled
    MessageKey.objects.all().delete()
    bring()
    assert waiting(queue) == [2]

    send(queue, 3)
    assert waiting(queue) == [2]


@pytest.mark.parametrize("encoding", [(), ("zlib",)])
def test_each_message_of_a_bulk_send_has_the_key_that_its_sender_gave(
    monkeypatch: pytest.MonkeyPatch, encoding: tuple[str, ...]
) -> None:
    monkeypatch.setitem(vars(KeyedOnce.delivery), "encoding", encoding)
    keys = ["a", None, "b", "c", None]
    bodies = [{"n": number, "key": key} for number, key in enumerate(keys)]

    assert KeyedOnce.send_many(bodies, dedupe_key=lambda body: body["key"], headers={"mine": "x"}) == 5

    rows = list(KeyedOnce.objects.order_by("seq"))
    headers = [messages.decode_headers(row.headers) for row in rows]
    stored = [messages.read_stored(bytes(row.body), row.headers, row.id, "default") for row in rows]
    assert stored == bodies
    assert [decoded.get("dedupe-key") for decoded in headers] == [key and dedupe.digest(key) for key in keys]
    assert {decoded["mine"] for decoded in headers} == {"x"}


def test_message_that_was_not_admitted_stays_where_it_was() -> None:
    send(KeyedTransactional, 1)
    for way in (by_requeue_to, by_move, by_move_of_delayed):
        way(Keyed)
        Keyed.objects.all().delete()
    send(Keyed, 3)
    call_command("requeuepoison", "--all", "--to", Keyed._meta.label)
    call_command("movemessages", KeyedTransactional._meta.label, "--type", "", "--to", Keyed._meta.label)
    call_command("movedelayed", KeyedTransactional._meta.label, Keyed._meta.label)
    assert waiting(Keyed) == [3]
    assert PoisonMessage.objects.count() == 1


@contextmanager
def with_keys(queue: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setitem(vars(queue.delivery), "dedupe_key", key_in)
        yield


@pytest.mark.parametrize("again", [False, True])
def test_queue_that_is_filled_from_the_journal_has_one_message_of_a_key(
    monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    publish_many(JOURNALED, [body(1), body(2), {"n": 3, "key": "another"}])
    Recovered.objects.all().delete()
    if not again:
        from queueapp.models import JournalEntry

        JournalEntry.objects.update(queues="")
    with with_keys(Recovered, monkeypatch):
        if again:
            call_command("rebuildqueue", Recovered._meta.label, "--from", "epoch", "--again", "--yes")
        else:
            feeder = QueueFeeder(Recovered, "default")
            feeder.attach()
            feeder.fill()
        assert waiting(Recovered) == [1, 3]
        send(Recovered, 4)
        assert waiting(Recovered) == [1, 3]


# -- refused, and without keys -----------------------------------------------------------------------------------------


def test_send_from_is_refused_where_keys_are_computed() -> None:
    with pytest.raises(InvalidMessage, match="its keys are made of bodies"):
        Keyed.send_from("SELECT 2 AS n, 'k' AS key")


def test_spark_is_refused_where_keys_are_computed() -> None:
    pytest.importorskip("pyspark")
    from pyspark.sql.types import BinaryType, StructType

    from queueapp.contrib.spark.columns import make_plan
    from queueapp.contrib.spark.errors import InvalidDataFrame
    from queueapp.contrib.spark.targets import take_snapshot

    with pytest.raises(InvalidDataFrame, match="computes dedupe keys from bodies"):
        make_plan(take_snapshot().find("testapp.Keyed"), StructType().add("body", BinaryType()), None)


def test_delayed_messages_of_another_database_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(Keyed.delivery), "delayed_in", ("elsewhere",))
    assert "queueapp.E087" in [found.id for found in check_dedupe()]
    with pytest.raises(InvalidMessage, match="exclude each other"):
        Keyed.send(body(1), delay=HOUR, delayed_in="elsewhere")
    with pytest.raises(InvalidOption):
        move_messages.move_delayed("shop.Old", Keyed, using="elsewhere")


def test_celery_queues_have_no_keys() -> None:
    assert BrokerQueue.delivery.dedupe_key is None


#: Modules that insert into the table of a queue -> the way above, or why no key is passed over.
INSERTING = {
    "contrib/celery/channel.py": "BrokerQueue has no keys",
    "delayed/dispatch.py": "by_dispatch; a send with a key is refused where the store is a third party's",
    "delayed/forward.py": "queueapp.E087",
    "failures/apply_verdict.py": "the message was in this queue",
    "failures/poison_operations.py": "by_requeue, by_edit",
    "flow/workflow.py": "Queue.prepare refuses queues with keys",
    "operations/move_messages.py": "by_move",
    "sending/bulk.py": "by_send_many, test_send_from",
    "sending/early_acks.py": "by_send_many",
    "sending/fanout.py": "keys are refused with recipients",
    "sending/send.py": "by_send",
    "sending/workflows.py": "queueapp.E045, and Queue.prepare refuses queues with keys",
    "topics/backfill.py": "by_replay_to",
    "topics/publisher.py": "by_publish",
    "workers/receiving/receivers/outcomes.py": "the message was in this queue",
}


def test_each_module_that_inserts_into_a_queue_is_in_the_table() -> None:
    calls = re.compile(
        r"inserts\.insert|early_acks\.insert_runs\(|send\.insert\(|inserts\.insert_select|insert_routed\("
    )
    package = Path(queueapp.__file__).parent
    found = {
        str(path.relative_to(root))
        for root, top in ((package, package), (package.parent, package.parent / "workers"))
        for path in top.rglob("*.py")
        if "sql" not in path.relative_to(root).parts and calls.search(path.read_text())
    }
    assert found == set(INSERTING)
