"""Messages in flight: how far they are, and asking one to stop."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from queueapp import (
    BatchContext,
    Context,
    InvalidMessage,
    MessageCancelled,
    Queue,
    RetryNow,
    cancel_running,
    consumer,
    progress_of,
)
from queueapp.consuming.context import checked
from queueapp.failures.poison_operations import requeue
from queueapp.models import Now, PoisonMessage, QueueControl, Subscriber
from queueapp.operations import control, running_handlers
from queueapp.sending.isolation import outside_transaction
from queueapp.testing import Kit
from tests.databases import DATABASES, known_as, marks_of
from tests.in_process_worker import Worker, eventually, real_commits
from tests.testapp.models import AtMostOnce, Effect, ForeignPostgres, Leased, Transactional, Urgent

SEMANTICS = (Leased, Transactional, AtMostOnce)


class Rollback(Exception):
    """Undoes a transaction."""


_soon = threading.Event()


@pytest.fixture(autouse=True)
def quick(no_consumers: None, settings: Any) -> None:
    settings.QUEUEAPP = {
        "PEEK_DELAY": 0.1,
        "HEARTBEAT_INTERVAL": 0.1,
        "DEAD_AFTER": 5,
        "CANCEL_GRACE": 0,
        "RETRY_DELAY": 0,
    }


@pytest.fixture
def start() -> Iterator[Any]:
    workers: list[Worker] = []

    def begin(queue: Any, alias: str = "default") -> Worker:
        workers.append(Worker(queue, alias, heartbeat=True, concurrency=2).start())
        return workers[-1]

    yield begin
    for worker in workers:
        worker.stop()


def wait_until(event: threading.Event | None = None) -> None:
    """What a handler that takes long does, in Python."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not (event is not None and event.is_set()):
        _soon.wait(0.005)


@pytest.mark.parametrize(
    ("alias", "queue"),
    [
        pytest.param(alias, queue, marks=marks_of(alias), id=f"{kind}-{queue.__name__}")
        for kind, alias in DATABASES.items()
        for queue in SEMANTICS
    ],
)
def test_how_far_a_handler_is_can_be_read_while_it_runs(alias: str, queue: type[Queue], start: Any) -> None:
    release = threading.Event()

    @consumer(queue, name="counting")
    def count(message: dict, context: Context) -> None:
        context.progress(30, 120, "reading")
        wait_until(release)
        context.progress(120, 120)

    start(queue, alias)
    identity = queue.send({}, using=alias)
    found = eventually(lambda: progress_of(identity, using=alias))
    assert (found.queue, found.consumer, found.attempt) == (queue._meta.label, "counting", 1)
    assert (found.done, found.total, found.note, found.share) == (30, 120, "reading", 0.25)
    assert found.running_for.total_seconds() >= 0
    assert progress_of(uuid.uuid4(), using=alias) is None
    release.set()
    eventually(lambda: progress_of(identity, using=alias) is None)


@real_commits
@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_a_handler_is_asked_to_stop_from_within_a_transaction_that_never_sees_it_end(start: Any, ends: str) -> None:
    begun = threading.Event()

    @consumer(Leased, name="endless")
    def work(message: dict, context: Context) -> None:
        context.progress(1, 2)
        begun.set()
        wait_until()

    with suppress(Rollback), transaction.atomic():
        with connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("SELECT 1")
        assert not Subscriber.objects.exists(), "the snapshot is older than the worker"
        start(Leased)
        identity = outside_transaction("default", lambda: Leased.send({}))
        assert begun.wait(30)
        eventually(lambda: progress_of(identity))
        assert cancel_running(identity, queue=Leased, reason="enough")
        eventually(lambda: outside_transaction("default", PoisonMessage.objects.exists))
        if ends == "rollback":
            raise Rollback

    assert "enough" in PoisonMessage.objects.get().reason


@real_commits
def test_a_request_of_a_transaction_that_has_paused_the_queue_does_not_wait_for_itself(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_handlers, "LOCK_WAIT_MS", 50)
    begun = threading.Event()

    @consumer(Leased, name="endless")
    def work(message: dict) -> None:
        begun.set()
        wait_until()

    start(Leased)
    identity = Leased.send({})
    assert begun.wait(30)
    with transaction.atomic():
        control.pause(Leased)
        assert cancel_running(identity, queue=Leased)

    eventually(PoisonMessage.objects.exists)


@real_commits
def test_a_handler_that_reports_nothing_has_no_progress(start: Any) -> None:
    release, begun = threading.Event(), threading.Event()

    @consumer(Leased)
    def work(message: dict, context: Context) -> None:
        begun.set()
        wait_until(release)

    worker = start(Leased)
    identity = Leased.send({})
    assert begun.wait(30)
    heartbeat_at = Subscriber.objects.get().heartbeat_at
    eventually(lambda: Subscriber.objects.get().heartbeat_at > heartbeat_at)
    assert progress_of(identity) is None
    assert Subscriber.objects.get().progress == ""
    release.set()
    eventually(lambda: worker.pump.stats.handled == 1)


@pytest.mark.parametrize(
    ("alias", "queue"),
    [
        pytest.param(alias, queue, marks=marks_of(alias), id=f"{kind}-{queue.__name__}")
        for kind, alias in DATABASES.items()
        for queue in SEMANTICS
    ],
)
@pytest.mark.parametrize("discard", [False, True], ids=["poison", "discard"])
def test_a_handler_that_is_asked_to_stop_is_interrupted(
    alias: str, queue: type[Queue], discard: bool, start: Any
) -> None:
    begun = threading.Event()
    policy_asked = []

    @consumer(queue, attempts=5, policy=lambda failure: policy_asked.append(failure) or RetryNow())
    def hang(message: dict, context: Context) -> None:
        begun.set()
        with transaction.atomic(using=alias):
            Effect.objects.using(alias).create(name="x")
            wait_until()

    worker = start(queue, alias)
    identity = queue.send({}, using=alias)
    assert begun.wait(30)
    assert cancel_running(identity, queue=queue, reason="it was wrong", discard=discard, using=alias)
    eventually(lambda: not queue.objects.using(alias).exists())
    eventually(lambda: not any(task.active_handler for task in worker.pump.receivers))
    if discard:
        eventually(lambda: worker.pump.stats.received == 1)
        assert not PoisonMessage.objects.using(alias).exists()
    else:
        row = eventually(lambda: PoisonMessage.objects.using(alias).first())
        assert row.reason == "cancelled while it was handled: it was wrong"
        assert row.attempts == 0
    assert not Effect.objects.using(alias).exists()
    assert policy_asked == []
    assert worker.pump.stats.failed == 0


@real_commits
@pytest.mark.parametrize("queue", SEMANTICS)
def test_an_async_handler_is_cancelled_and_may_put_things_in_order(queue: type[Queue], start: Any) -> None:
    begun, seen = threading.Event(), []

    @consumer(queue)
    async def hang(message: dict, context: Context) -> None:
        begun.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            seen.append(context.cancelled)
            raise

    start(queue)
    identity = queue.send({})
    assert begun.wait(30)
    assert cancel_running(identity, reason="enough")
    row = eventually(PoisonMessage.objects.first)
    assert row.reason == "cancelled while it was handled: enough"
    assert seen == [True]


@real_commits
def test_a_sync_handler_that_looks_ends_in_its_own_way(start: Any, settings: Any) -> None:
    settings.QUEUEAPP |= {"CANCEL_GRACE": 60}
    begun = threading.Event()

    @consumer(Leased)
    def polite(message: dict, context: Context) -> None:
        begun.set()
        deadline = time.monotonic() + 30
        while not context.cancelled and time.monotonic() < deadline:
            _soon.wait(0.005)
        Effect.objects.create(name="in order")
        if message["raises"]:
            raise MessageCancelled

    worker = start(Leased)
    for raises in (False, True):
        begun.clear()
        identity = Leased.send({"raises": raises})
        assert begun.wait(30)
        assert cancel_running(identity, queue=Leased)
        eventually(lambda: not Leased.objects.exists())
    eventually(lambda: worker.pump.stats.handled == 1)
    assert eventually(PoisonMessage.objects.count) == 1
    assert Effect.objects.count() == 2


@real_commits
def test_a_request_is_for_the_attempt_that_runs_and_no_later_one(start: Any) -> None:
    begun = threading.Event()
    again = []

    @consumer(Leased)
    def hang(message: dict, context: Context) -> None:
        if begun.is_set():
            again.append(context.attempt)
            wait_for = time.monotonic() + 0.5
            while time.monotonic() < wait_for:
                _soon.wait(0.01)
            return
        begun.set()
        wait_until()

    worker = start(Leased)
    identity = Leased.send({})
    assert begun.wait(30)
    assert cancel_running(identity, queue=Leased)
    eventually(PoisonMessage.objects.exists)
    waited = time.monotonic() + 0.4  # longer than a request is late
    eventually(lambda: time.monotonic() > waited)
    assert requeue(PoisonMessage.objects.all())
    eventually(lambda: worker.pump.stats.handled == 1)
    assert again == [1]


@real_commits
def test_others_go_on(start: Any) -> None:
    begun, release = threading.Semaphore(0), threading.Event()

    @consumer(Leased)
    def hang(message: dict) -> None:
        begun.release()
        wait_until(release)

    worker = start(Leased)
    first, _second = Leased.send({"n": 1}), Leased.send({"n": 2})
    assert begun.acquire(timeout=30)
    assert begun.acquire(timeout=30)
    assert cancel_running(first)
    eventually(PoisonMessage.objects.exists)
    assert sum(task.active_handler is not None for task in worker.pump.receivers) == 1
    release.set()
    eventually(lambda: worker.pump.stats.handled == 1)
    assert PoisonMessage.objects.count() == 1


@real_commits
def test_of_a_batch_each_message_is_flagged_and_none_is_stopped(start: Any) -> None:
    release = threading.Event()

    @consumer(Leased, batch=2)
    def both(messages: list[dict], context: BatchContext) -> None:
        for place, message in enumerate(messages):
            context[place].progress(message["n"])
            Urgent.send({})
        wait_until(release)

    ids = {n: uuid.uuid4() for n in (1, 2)}
    for n, identity in ids.items():
        Leased.send({"n": n}, message_id=identity)
    worker = start(Leased)
    for n, identity in ids.items():
        found = eventually(lambda identity=identity: progress_of(identity))
        assert found.done == n
    assert cancel_running(ids[1])
    release.set()
    eventually(lambda: worker.pump.stats.handled == 2)
    assert not PoisonMessage.objects.exists()
    assert "related-to" not in Urgent.objects.all()[0].headers


@pytest.mark.parametrize(
    "alias", [pytest.param(database, marks=marks_of(database), id=kind) for kind, database in DATABASES.items()]
)
def test_what_several_ask_at_once_is_all_kept_and_what_is_asked_again_once(alias: str) -> None:
    Subscriber.objects.using(alias).create(
        queue="testapp.Leased", host="h", process=1, supervisor=uuid.uuid4(), alive_until=Now() + timedelta(hours=1)
    )
    ids = [uuid.uuid4() for _ in range(4)]
    start = threading.Barrier(len(ids))

    def ask(identity: uuid.UUID) -> None:
        start.wait(30)
        try:
            assert cancel_running(identity, queue=Leased, reason="first", using=alias)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=ask, args=(identity,)) for identity in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert cancel_running(ids[1], queue=Leased, reason="second", discard=True, using=alias)

    asked = json.loads(QueueControl.objects.using(alias).get(queue="testapp.Leased").cancelling)
    assert {item["id"]: (item["reason"], item["discard"]) for item in asked} == {
        str(identity): ("second", True) if identity == ids[1] else ("first", False) for identity in ids
    }
    assert len(asked) == len(ids)
    assert asked[-1]["id"] == str(ids[1])


@pytest.mark.django_db
def test_without_a_live_worker_no_request_is_made() -> None:
    assert not cancel_running(uuid.uuid4())
    assert not cancel_running(uuid.uuid4(), queue=Leased)
    assert not QueueControl.objects.exists()


@pytest.mark.django_db
@pytest.mark.parametrize("wrong", ["x", None, 7])
def test_what_is_no_id_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidMessage, match="uuid"):
        cancel_running(wrong)


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((-1,), "done"),
        ((float("nan"),), "done"),
        ((float("inf"),), "done"),
        ((10**400,), "done"),
        ((10**18,), "done"),
        ((1, 10**400), "total"),
        (("1",), "done"),
        ((True,), "done"),
        ((1, -2), "total"),
        ((1, 2, "x" * 201), "note"),
        ((1, 2, None), "note"),
    ],
)
def test_progress_that_makes_no_sense_is_refused(queue_kit: Kit, arguments: tuple[Any, ...], said: str) -> None:
    consumer(Leased, attempts=1)(lambda message, context: context.progress(*arguments))
    Leased.send({})
    [outcome] = queue_kit.drain()
    assert isinstance(outcome.error, InvalidMessage)
    assert str(outcome.error).startswith(f"{said} = ")


def test_a_note_can_be_shown_and_stored_whatever_it_holds() -> None:
    assert checked(0, 0, "x" * 200) == (0, 0, "x" * 200)
    assert checked(1, None, "a\0b\ud800c") == (1, None, "ab?c")


@real_commits
def test_requests_and_progress_cost_a_worker_no_statement_of_their_own(start: Any) -> None:
    """A beat and a look at the controls are two updates or reads each, whatever there is to tell."""
    from workers.services.heartbeat import Heartbeat

    worker = start(Leased)
    worker.stop()
    beating = Heartbeat("default", [worker.pump], uuid.uuid4())

    def statements() -> list[str]:
        with CaptureQueriesContext(connection) as captured:
            beating.write_rows()
            beating.read_controls()
        return [
            message["sql"] for message in captured if "cancelling" in message["sql"] or '"progress" =' in message["sql"]
        ]

    statements()  # the first beats have something to tell
    statements()
    (look,) = statements()
    assert look.startswith("SELECT")
    QueueControl.objects.create(queue="testapp.Leased", cancelling='[{"id": "x", "at": "?"}, 7, {"at": 1}]')
    assert len(statements()) == 1


@pytest.mark.django_db
@pytest.mark.parametrize("written", ["x", "[]", "[7]", '[{"id": "x"}]', '{"id": 1}'])
def test_rows_of_another_version_are_read_tolerantly(written: str) -> None:
    identity = uuid.uuid4()
    Subscriber.objects.create(
        queue="testapp.Leased", host="h", process=1, supervisor=identity, alive_until="2999-01-01T00:00Z",
        progress=written.replace("x", str(identity)),
    )  # fmt: skip
    assert progress_of(identity) is None


def test_progress_is_looked_for_where_only_foreign_queues_lie(
    settings: Any, monkeypatch: pytest.MonkeyPatch, no_consumers: None
) -> None:
    class Routes:
        def db_for_write(self, model: Any, **hints: Any) -> str | None:
            return "warehouse" if model is ForeignPostgres else None

    settings.DATABASE_ROUTERS = [Routes()]
    consumer(ForeignPostgres, name="tests")(lambda message: None)
    asked: list[str] = []

    def look(alias: str, read: Any) -> list[Any]:
        asked.append(alias)
        return []

    monkeypatch.setattr(running_handlers, "as_of_now", look)
    with known_as("warehouse"):
        assert progress_of(uuid.uuid4()) is None
    assert asked == ["default", "warehouse"]
