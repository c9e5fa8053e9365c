"""TRANSACTIONAL: messages one after another, each in a transaction of its own, the commit of one with the claim of the next."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.admin.models import CHANGE, LogEntry
from django.db import DatabaseError, connection, transaction
from psycopg.errors import DeadlockDetected

from queueapp import Context, Poison, consumer
from queueapp.models import PoisonMessage
from queueapp.sql.postgresql.raw import plan_guard
from queueapp.sql.postgresql.raw.raw_statement import OpeningQuery
from tests.conformance.endpoint import Endpoint, Note
from tests.in_process_worker import DEADLINE, eventually, real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import Effect, Transactional
from tests.workers.receiving.batches import SingleReceiver
from workers.receiving import handlers
from workers.receiving.receivers import transactional

pytestmark = real_commits


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A streak that is over because the machine is busy would prove nothing."""
    monkeypatch.setattr(transactional, "STREAK_SECONDS", 60.0)


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each time that a commit took the next claim along."""
    taken: list[None] = []
    follow = OpeningQuery.follow

    def counted(self: OpeningQuery, *arguments: Any) -> Any:
        taken.append(None)
        return follow(self, *arguments)

    monkeypatch.setattr(OpeningQuery, "follow", counted)
    # On a busy machine the plan of a slow claim is looked at; one that sorts, of a table just emptied, follows no commit.
    monkeypatch.setattr(plan_guard, "SLOW", 60.0)
    return taken


@pytest.fixture
def endpoint(no_consumers: None) -> Iterator[Endpoint]:
    endpoint = Endpoint(Transactional, "default", "S")
    yield endpoint
    endpoint.close()


def transaction_number() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_current_xact_id()::text::bigint")
        return int(cursor.fetchone()[0])


def effects() -> list[str]:
    return list(Effect.objects.order_by("pk").values_list("name", flat=True))


def test_every_message_has_a_transaction_of_its_own(endpoint: Endpoint, followed: list[None]) -> None:
    numbers: list[int] = []
    endpoint.handle(lambda message, context: numbers.append(transaction_number()))
    endpoint.send_many(20)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    assert len(numbers) == len(set(numbers)) == 20
    assert followed


def test_one_that_fails_takes_nothing_with_it(endpoint: Endpoint, followed: list[None]) -> None:
    def act(message: Note, context: Context) -> None:
        Effect.objects.create(name=str(message.number))
        if message.number == 7:
            raise ValueError

    endpoint.handle(act, policy=lambda failure: Poison("seen"))
    endpoint.send_many(20)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    assert effects() == [str(number) for number in range(20) if number != 7]
    assert endpoint.poison.count() == 1
    assert followed


def test_a_commit_that_fails_is_the_failure_of_its_message_alone(endpoint: Endpoint, followed: list[None]) -> None:
    def act(message: Note, context: Context) -> None:
        Effect.objects.create(name=str(message.number))
        if message.number == 7:
            LogEntry.objects.create(user_id=-1, action_flag=CHANGE, object_repr="", change_message="")

    endpoint.handle(act, policy=lambda failure: Poison("seen"))
    endpoint.send_many(20)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    assert effects() == [str(number) for number in range(20) if number != 7]
    assert [failure.attempt for failure in endpoint.failures] == [1]
    assert followed


def test_hooks_run_after_their_own_commit_and_before_the_next_message(endpoint: Endpoint) -> None:
    told: list[str] = []

    def act(message: Note, context: Context) -> None:
        told.append(f"{message.number}")
        transaction.on_commit(lambda: told.append(f"{message.number} committed {connection.in_atomic_block}"))

    endpoint.handle(act)
    endpoint.send_many(3)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    eventually(lambda: len(told) == 6)
    assert told == ["0", "0 committed False", "1", "1 committed False", "2", "2 committed False"]


def test_a_task_that_is_to_stop_holds_nothing_more(endpoint: Endpoint) -> None:
    endpoint.handle(lambda message, context: worker.stopping.set() if message.number == 2 else None)
    endpoint.send_many(10)
    worker = endpoint.start(concurrency=1)
    eventually(lambda: worker.stopping.is_set() and not worker.pump.pool.receivers)

    assert endpoint.numbers == [0, 1, 2]
    assert Transactional.objects.select_for_update(nowait=True).count() == 7


def test_after_a_slow_handler_the_task_asks_whether_it_may_go_on(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactional, "STREAK_SECONDS", 0.02)

    def act(message: Note, context: Context) -> None:
        if message.number == 2:
            worker.pump.paused = True
            time.sleep(0.03)

    endpoint.handle(act)
    endpoint.send_many(10)
    worker = endpoint.start(concurrency=1)
    eventually(lambda: worker.pump.paused and not worker.pump.pool.busy)

    assert endpoint.numbers == [0, 1, 2]
    assert worker.pump.stats.handled == 3


def test_nobody_waits_for_a_handler_that_was_quick_until_now(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "QUICK", 60.0)  # whatever they take on a busy machine
    together = threading.Barrier(4)

    def act(message: Note, context: Context) -> None:
        if message.number >= 40:
            together.wait(DEADLINE)

    endpoint.handle(act)
    endpoint.send_many(44)
    worker = endpoint.start(concurrency=4)
    endpoint.wait_until_empty()

    assert worker.pump.stats.handled == 44
    assert worker.pump.stats.failed == 0


# -- one task, without a pump -----------------------------------------------------------------------------------------


@pytest.fixture
def handled(no_consumers: None) -> list[int]:
    """The messages that the consumer of these tests was called with."""
    numbers: list[int] = []

    def act(message: Nop) -> None:
        numbers.append(message.number)

    consumer(Transactional, name="tests")(act)
    return numbers


def test_a_task_takes_its_share_and_what_is_left_is_for_others(handled: list[int]) -> None:
    Transactional.send_many(Nop(number, "") for number in range(5))
    one = SingleReceiver(Transactional)

    assert one.receive(3) == 3
    assert one.task.full, "there may be more"
    assert Transactional.objects.select_for_update(nowait=True).count() == 2
    assert one.pump.stats.handled == 3

    assert one.receive(3) == 2
    assert not one.task.full
    assert handled == [0, 1, 2, 3, 4]
    assert one.pump.stats.handled == 5, "each is counted once, the last one as well"


def test_quick_handlers_take_turns_with_those_of_another_task(
    no_consumers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "QUICK", 60.0)
    taken: list[bool] = []

    def act(message: Nop) -> None:
        taken.append(not first.enter())
        if not taken[-1]:
            first.leave()

    consumer(Transactional, name="tests")(act)
    Transactional.send_many(Nop(number, "") for number in range(3))
    one = SingleReceiver(Transactional)
    first = one.task.gated.gate
    assert one.receive(3) == 3

    assert taken == [False, True, True], "of the first nobody knows that it is quick"
    assert first.enter(), "and it is left"
    assert next(one.pump.state.handler_gates) is not first
    assert next(one.pump.state.handler_gates) is first


def test_a_streak_ends_after_its_time_and_there_may_be_more(
    handled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactional, "STREAK_SECONDS", -1.0)
    Transactional.send_many(Nop(number, "") for number in range(3))
    one = SingleReceiver(Transactional)

    assert one.receive(3) == 1
    assert one.task.full


def test_what_was_handled_in_a_streak_is_not_kept_from_claims(handled: list[int]) -> None:
    """Claims step over what is in hand, one more stretch for each."""
    Transactional.send_many(Nop(number, "") for number in range(5))
    one = SingleReceiver(Transactional)

    assert one.receive(5) == 5
    assert not one.pump.state.claims._excluded


def test_a_claim_that_fails_behind_a_commit_is_not_the_end_of_the_queue(no_consumers: None) -> None:
    def act(message: Nop) -> None:
        connection.connection.execute("SET search_path = nowhere")  # past Django's cursors nobody notices

    consumer(Transactional, name="tests")(act)
    Transactional.send_many(Nop(number, "") for number in range(2))
    one = SingleReceiver(Transactional)
    try:
        assert one.receive(5) == 1
    finally:
        connection.close()

    assert one.task.full, "the pump is to claim again at once"
    assert one.pump.stats.handled == 1
    assert Transactional.objects.count() == 1


def test_a_task_that_has_to_be_careful_now_claims_nothing_more_in_passing(no_consumers: None) -> None:
    """From the next message on its hand-out is to be recorded before its handler runs."""

    def act(message: Nop) -> None:
        one.pump.crash_tracking = True

    consumer(Transactional, name="tests")(act)
    Transactional.send_many(Nop(number, "") for number in range(3))
    one = SingleReceiver(Transactional)

    assert one.receive(3) == 1
    assert one.task.full


def test_a_handler_that_is_always_the_victim_of_a_deadlock_fails_in_the_end(no_consumers: None) -> None:
    deadlock = DatabaseError("deadlock detected")
    deadlock.__cause__ = DeadlockDetected()
    attempts: list[int] = []

    def act(message: Nop, context: Context) -> None:
        attempts.append(context.attempt)
        raise deadlock

    consumer(Transactional, name="tests", policy=lambda failure: Poison("seen"))(act)
    Transactional.send(Nop(0, ""))
    one = SingleReceiver(Transactional)
    for _ in range(transactional.FREE_DEADLOCKS):
        one.receive(1)
    assert one.pump.stats.failed == 0
    one.receive(1)

    assert attempts == [1] * (transactional.FREE_DEADLOCKS + 1)
    assert PoisonMessage.objects.get().attempts == 1
