"""The dispatcher process: one of them moves what is due, in order, whatever the others and the queues do."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import IntegrityError, OperationalError, connection
from django.db.models import F

from queueapp import delayed
from queueapp.circuit_breaker import CircuitBreaker, State
from queueapp.models import DelayedMessage, Leader, Now, PoisonMessage
from queueapp.registry import queues
from queueapp.services.delayed_dispatcher import DelayedDispatcher
from queueapp.services.leader_election import TERM, role_name
from queueapp.services.service import stop_all
from queueapp.sql import backend_of
from tests.databases import statements_of
from tests.in_process_worker import DEADLINE, eventually, real_commits
from tests.testapp.models import AtMostOnce, Leased
from tests.workers.services.slow_handler import another

pytestmark = real_commits
Start = Callable[[], DelayedDispatcher]


@pytest.fixture
def start(settings: Any) -> Iterator[Start]:
    """Starts dispatchers, each as a process would; they stop with the test."""
    settings.QUEUEAPP = {"DISPATCH_INTERVAL": 0.05, "DISPATCH_BATCH": 10}
    started: list[DelayedDispatcher] = []

    def begin() -> DelayedDispatcher:
        started.append(DelayedDispatcher("default", uuid.uuid4()))
        started[-1].start()
        return started[-1]

    yield begin
    assert stop_all(started, DEADLINE)


def store(count: int, *, due_in: timedelta = timedelta(0), queue: Any = Leased) -> None:
    for number in range(count):
        queue.send({"number": number}, delay=due_in)


def test_all_that_is_due_is_moved_in_due_order(start: Start) -> None:
    for number in (3, 1, 2):
        Leased.send({"number": number}, delay=timedelta(hours=number))
    DelayedMessage.objects.update(due=F("due") - timedelta(hours=4))
    start()

    eventually(lambda: not DelayedMessage.objects.exists())

    assert [row.body for row in Leased.objects.order_by("seq")] == [b'{"number":%d}' % n for n in (1, 2, 3)]


def test_more_than_a_batch_is_moved_at_once(start: Start, settings: Any) -> None:
    settings.QUEUEAPP = settings.QUEUEAPP | {"DISPATCH_INTERVAL": 60}
    store(35)
    worker = start()

    eventually(lambda: worker.dispatched == 35)


def test_it_sleeps_until_the_next_is_due(start: Start, settings: Any) -> None:
    settings.QUEUEAPP = settings.QUEUEAPP | {"DISPATCH_INTERVAL": 60}
    store(1, due_in=timedelta(milliseconds=300))
    store(1, due_in=timedelta(hours=1))
    worker = start()

    eventually(lambda: worker.dispatched == 1)

    assert DelayedMessage.objects.count() == 1


def test_a_wake_up_lets_it_look_at_once(start: Start, settings: Any) -> None:
    settings.QUEUEAPP = settings.QUEUEAPP | {"DISPATCH_INTERVAL": 60}
    worker = start()
    eventually(lambda: worker.elector.is_leader)
    store(1)

    worker.wake()

    eventually(lambda: worker.dispatched == 1)


def test_one_of_many_does_the_work(start: Start) -> None:
    dispatchers = [start() for _ in range(3)]
    eventually(lambda: any(dispatcher.elector.is_leader for dispatcher in dispatchers))
    store(50)

    eventually(lambda: sum(dispatcher.dispatched for dispatcher in dispatchers) == 50)

    assert sorted(dispatcher.dispatched for dispatcher in dispatchers) == [0, 0, 50]
    assert Leased.objects.count() == 50


def test_another_takes_over_when_the_leader_is_gone(start: Start) -> None:
    Leader.objects.create(role=role_name("delayed dispatcher"), holder=uuid.uuid4(), expires=Now() + TERM)
    worker = start()
    store(1)
    Leader.objects.update(expires=Now() - timedelta(seconds=1))

    eventually(lambda: worker.dispatched == 1)


def test_a_leader_that_stops_hands_over_at_once(start: Start) -> None:
    first = start()
    eventually(lambda: first.elector.is_leader)
    second = start()

    assert first.stop(DEADLINE)

    eventually(lambda: second.elector.is_leader)


def test_two_projects_on_one_database_each_dispatch_their_own(start: Start) -> None:
    """Neither touches what is addressed to the other, and neither has to wait for the other's lease to expire."""
    store(3)
    store(3, queue=AtMostOnce)
    with queues.isolated(Leased):
        first = start()
        eventually(lambda: Leased.objects.count() == 3)
        looked = first.elector.renew_at
        first.elector.renew_at = 0.0
        eventually(lambda: first.elector.renew_at > looked)
        assert DelayedMessage.objects.filter(destination="testapp.AtMostOnce", retries=0).count() == 3

    with queues.isolated(AtMostOnce):
        second = start()
        eventually(lambda: AtMostOnce.objects.count() == 3)

        eventually(lambda: first.elector.is_leader)
        eventually(lambda: second.elector.is_leader)
        assert not PoisonMessage.objects.exists()
        assert not DelayedMessage.objects.exists()


def test_undeliverable_messages_neither_block_nor_wake_the_dispatcher(start: Start, settings: Any) -> None:
    settings.QUEUEAPP = settings.QUEUEAPP | {"DISPATCH_INTERVAL": 60}
    store(25)  # more than a batch, all of them overdue
    DelayedMessage.objects.update(destination="another.Project", due=F("due") - timedelta(hours=1))
    store(2)
    worker = start()

    eventually(lambda: worker.dispatched == 2)

    assert DelayedMessage.objects.count() == 25
    assert delayed.next_due_in("default") is None, "nothing to get up for"


def refuse(monkeypatch: pytest.MonkeyPatch, queue: Any, poisonous: bytes) -> None:
    """The queue's table refuses this message, as a constraint would."""
    really_insert = statements_of(connection, "inserts").insert_from

    def insert_from(self: Any, connection: Any, source: Any, keys: Any, **options: Any) -> int:
        refused = DelayedMessage.objects.filter(pk__in=keys, body=poisonous).exists()
        if self.table.label == queue._meta.label and refused:
            raise IntegrityError("a constraint of the user's own")
        return really_insert(self, connection, source, keys, **options)

    monkeypatch.setattr(statements_of(connection, "inserts"), "insert_from", insert_from)


def test_a_message_that_its_queue_refuses_is_tried_again_and_then_poison(
    start: Start, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    settings.QUEUEAPP = settings.QUEUEAPP | {"NUMBER_OF_RETRIES": 1}
    monkeypatch.setattr("queueapp.services.delayed_dispatcher.CircuitBreaker", _impatient)
    refuse(monkeypatch, Leased, b'{"number":1}')
    store(3)
    store(2, queue=AtMostOnce)
    start()

    poisoned = eventually(PoisonMessage.objects.first)

    assert poisoned.body == b'{"number":1}'
    assert poisoned.attempts == 2
    assert "could not be forwarded to testapp.Leased" in poisoned.reason
    assert Leased.objects.count() == 2, "the others of its batch were not held up"
    assert AtMostOnce.objects.count() == 2
    assert not DelayedMessage.objects.exists()


def test_a_database_that_is_away_is_waited_for(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("queueapp.services.delayed_dispatcher.CircuitBreaker", _impatient)
    really_dispatch = delayed.dispatch_due
    errors = [OperationalError("away")] * 3
    monkeypatch.setattr(
        delayed, "dispatch_due", lambda *given: _raise(errors.pop()) if errors else really_dispatch(*given)
    )
    store(1)
    worker = start()

    eventually(lambda: worker.dispatched == 1)

    eventually(lambda: worker.fetch_breaker.state is State.CLOSED)


def test_a_round_that_breaks_is_not_the_end_of_the_dispatcher(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    really_dispatch = delayed.dispatch_due
    errors = [RuntimeError("Dispatch of 1 messages inserted 1 and removed 0.")]
    monkeypatch.setattr(
        delayed, "dispatch_due", lambda *given: _raise(errors.pop()) if errors else really_dispatch(*given)
    )
    store(1)
    worker = start()

    eventually(lambda: worker.dispatched == 1)

    assert worker.recovery_breaker.failures == 1
    assert "A round of the dispatcher of 'default' failed" in caplog.text


def _raise(error: Exception) -> Any:
    raise error


def _impatient(name: str, time_to_trigger: timedelta, **facts: str) -> Any:
    return CircuitBreaker(name, time_to_trigger, failing_wait=timedelta(milliseconds=1), **facts)


def test_rows_locked_by_another_session_are_polled_less_and_less_often(settings: Any) -> None:
    """A cancel in a long transaction keeps the dispatcher from nothing else, and busy with
    nothing."""
    settings.QUEUEAPP = {"DISPATCH_INTERVAL": 60}
    delayed_dispatcher = DelayedDispatcher("default", uuid.uuid4())
    store(1)
    with another() as second_session:
        with second_session.cursor() as cursor:
            cursor.execute("DELETE FROM queueapp_delayedmessage")
        waits = [delayed_dispatcher.dispatch_once() for _ in range(12)]
        assert waits[:3] == [0.005, 0.01, 0.02]
        assert waits[-1] == 1.0
        store(1)
        delayed_dispatcher.dispatch_once()
        assert delayed_dispatcher.dispatched == 1, "the others are moved"

    eventually(lambda: delayed_dispatcher.dispatch_once() == 60 and delayed_dispatcher.dispatched == 2)
    store(1)
    with another() as second_session, second_session.cursor() as cursor:
        cursor.execute("DELETE FROM queueapp_delayedmessage")
        assert delayed_dispatcher.dispatch_once() == 0.005, "from the beginning"


def test_an_idle_round_asks_its_store_once(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.QUEUEAPP = {"DISPATCH_INTERVAL": 60}
    backend = type(backend_of(connection).delayed)
    really, asked = backend.first_due, []

    def first_due(self: Any, *given: Any) -> Any:
        asked.append(really(self, *given))
        return asked[-1]

    monkeypatch.setattr(backend, "first_due", first_due)
    delayed_dispatcher = DelayedDispatcher("default", uuid.uuid4())
    assert (delayed_dispatcher.dispatch_once(), len(asked)) == (60, 1)

    store(1, due_in=timedelta(seconds=30))
    assert 0 < delayed_dispatcher.dispatch_once() <= 30
    assert len(asked) == 2

    store(1)
    assert 0 < delayed_dispatcher.dispatch_once() <= 30
    assert (len(asked), delayed_dispatcher.dispatched) == (4, 1), "what was moved is not what is due next"
    delayed_dispatcher.elector.resign()
