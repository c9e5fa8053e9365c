"""Claims that the database refuses or does not answer, and what a receiver leaves for its next claim."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import pytest
from django.db import OperationalError, ProgrammingError, connection

from queueapp import BatchContext, Discard, MessageSet, consumer, set_consumer
from queueapp.services import connection_timeouts
from tests.databases import statements_of
from tests.in_process_worker import Worker, eventually, real_commits
from tests.kill_session import kill_this, session_of
from tests.testapp.messages import Nop
from tests.testapp.models import AtMostOnce, InSets, Leased, Several, Together, Transactional
from tests.workers.receiving.single_receiver import SingleReceiver


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.parametrize(
    ("queue", "verb"),
    [(AtMostOnce, "claim_by_delete"), (Leased, "claim_by_lease"), (Transactional, "claim_by_delete")],
)
def test_a_claim_that_fails_is_tried_again_by_the_same_task(
    start_worker: Callable[..., Worker],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    queue: Any,
    verb: str,
) -> None:
    really = getattr(statements_of(connection, "claims"), verb)
    claimed_by: list[int] = []

    def claim(self: Any, *arguments: Any, **options: Any) -> Any:
        claimed_by.append(threading.get_ident())
        if len(claimed_by) == 1:
            raise OperationalError("the server is away")
        return really(self, *arguments, **options)

    monkeypatch.setattr(statements_of(connection, "claims"), verb, claim)

    @consumer(queue, name="tests")
    def act(message: Nop) -> None:
        pass

    queue.send(Nop(1, ""))
    worker = start_worker(queue, concurrency=1)
    eventually(lambda: worker.pump.stats.handled == 1)

    assert claimed_by[0] == claimed_by[1]
    assert "a receiver failed" not in caplog.text
    assert f"Receive from testapp.{queue.__name__}" in caplog.text, "its breaker was notified"
    assert worker.pump.health.degraded_text() == "", "and of the claim that came through"


@pytest.fixture
def nothing_is_registered(no_consumers: None) -> Iterator[None]:
    yield
    connection.close()  # whatever a test has left of its session


def send(queue: Any, count: int) -> None:
    queue.send_many({"number": number} for number in range(count))


@real_commits
@pytest.mark.usefixtures("nothing_is_registered")
def test_an_empty_claim_of_sets_is_no_reason_to_claim_again() -> None:
    set_consumer(InSets, size=2)(lambda messages: None)
    send(InSets, 2)
    receiver = SingleReceiver(InSets)

    assert (receiver.receive(2), receiver.task.full) == (2, True)
    assert (receiver.receive(2), receiver.task.full) == (0, False)


@real_commits
@pytest.mark.usefixtures("nothing_is_registered")
def test_what_a_set_is_deleted_by_is_watched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that freezes in it would hold the worker up for ever."""
    watched: list[bool] = []
    me = threading.get_ident()

    @set_consumer(InSets)
    def handle(messages: MessageSet) -> None:
        watched.append(connection_timeouts.deadline_of(me) is not None)

    send(InSets, 2)
    receiver = SingleReceiver(InSets)
    verbs = type(receiver.task.sql.failures)
    remove = verbs.remove

    def removing(*arguments: Any) -> int:
        watched.append(connection_timeouts.deadline_of(me) is not None)
        return remove(*arguments)

    monkeypatch.setattr(verbs, "remove", removing)
    assert receiver.receive(2) == 2
    assert watched == [False, True]


@real_commits
@pytest.mark.usefixtures("nothing_is_registered")
def test_after_a_set_that_was_refused_something_the_next_has_another_session() -> None:
    sessions: list[int] = []

    def handle(messages: MessageSet) -> None:
        sessions.append(session_of(connection))
        if len(sessions) == 1:
            with connection.cursor() as cursor:
                cursor.execute("SELECT nothing FROM nowhere")

    set_consumer(InSets)(handle)
    send(InSets, 2)
    receiver = SingleReceiver(InSets)

    assert [receiver.receive(2) for _ in range(2)] == [2, 1], "it is halved"
    assert len(set(sessions)) == 2


@real_commits
@pytest.mark.usefixtures("nothing_is_registered")
def test_what_was_rolled_back_together_is_claimed_again_without_a_look() -> None:
    calls: list[int] = []

    @consumer(Together, policy=lambda failure: Discard("seen"))
    def handle(message: dict[str, int]) -> None:
        calls.append(message["number"])
        if message["number"] == 1:
            raise ProgrammingError("one")

    send(Together, 4)
    receiver = SingleReceiver(Together)
    while receiver.receive(50):
        pass

    assert sorted(set(calls)) == [0, 1, 2, 3]
    assert not Together.objects.exists()


@real_commits
@pytest.mark.usefixtures("nothing_is_registered")
def test_a_session_that_was_lost_at_an_early_ack_is_not_the_next_calls_doing() -> None:
    calls: list[list[int]] = []
    failures: list[Any] = []

    @consumer(Several, batch=4, policy=lambda failure: failures.append(failure) or Discard("seen"))
    def handle(messages: list[dict[str, int]], context: BatchContext) -> None:
        calls.append([message["number"] for message in messages])
        if len(messages) == 4:
            raise ValueError("halve it")
        if len(calls) == 2:
            receiver.batch.period, receiver.batch.expires = 100.0, monotonic() + 40.0  # time to ack what is done
            kill_this(connection)

    send(Several, 4)
    receiver = SingleReceiver(Several)
    receiver.receive(4)

    assert (calls, failures) == ([[0, 1, 2, 3], [0, 1], [2, 3]], [])
    assert not Several.objects.exists()
