"""What a task of several messages leaves for its next claim, and for whoever watches its statements."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest
from django.db import ProgrammingError, connection

from queueapp import BatchContext, Discard, MessageSet, consumer, set_consumer
from queueapp.consuming.registry import registered
from queueapp.services import connection_timeouts
from tests.in_process_worker import real_commits
from tests.kill_session import kill_this, session_of
from tests.testapp.models import InSets, Several, Together
from tests.workers.receiving.batches import SingleReceiver

pytestmark = real_commits


@pytest.fixture(autouse=True)
def nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registered, "_by_queue", {})
    yield
    connection.close()  # whatever a test has left of its session


def send(queue: Any, count: int) -> None:
    queue.send_many({"number": number} for number in range(count))


def test_an_empty_claim_of_sets_is_no_reason_to_claim_again() -> None:
    set_consumer(InSets, size=2)(lambda messages: None)
    send(InSets, 2)
    receiver = SingleReceiver(InSets)

    assert (receiver.receive(2), receiver.task.full) == (2, True)
    assert (receiver.receive(2), receiver.task.full) == (0, False)


def test_what_a_set_is_deleted_by_is_watched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that freezes in it would hold the worker up for ever."""
    watched: list[bool] = []
    me = threading.get_ident()

    @set_consumer(InSets)
    def handle(messages: MessageSet) -> None:
        watched.append(me in connection_timeouts._waiting)

    send(InSets, 2)
    receiver = SingleReceiver(InSets)
    verbs = type(receiver.task.sql)
    remove = verbs.remove

    def removing(*arguments: Any) -> int:
        watched.append(me in connection_timeouts._waiting)
        return remove(*arguments)

    monkeypatch.setattr(verbs, "remove", removing)
    assert receiver.receive(2) == 2
    assert watched == [False, True]


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
