"""A claim that had begun before another task of the process took the same message, and comes after that one's rollback.

Between the rollback and the count of a failed attempt the row is free for a moment. No task of the process is to use it: its
handler would run once more than is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import pytest
from django.db import connection

from queueapp import RetryNow, consumer
from queueapp.receiving import priority64_marks
from queueapp.sql.claims import SEQ
from tests.in_process_worker import DEADLINE, real_commits
from tests.testapp.models import AddressedUrgent, SeveralTransactional, Together, Transactional
from tests.testapp.ordering import RankedTransactional
from tests.workers.receiving.batches import SingleReceiver

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers")]

QUEUES = pytest.mark.parametrize(
    "queue", [Transactional, AddressedUrgent, RankedTransactional], ids=lambda one: one.__name__
)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    connection.close()


def overtaken(monkeypatch: pytest.MonkeyPatch, claiming: Any, when: Callable[[], bool] = lambda: True) -> list[int]:
    """From now on another task has in hand what is claimed; the seqs."""
    in_hand: list[int] = []
    end = type(claiming).end

    def ended(self: Any, mine: Any) -> None:
        end(self, mine)
        for row in mine.rows or () if when() else ():
            in_hand.append(row[SEQ])
            claiming.exclude(row[SEQ])

    monkeypatch.setattr(type(claiming), "end", ended)
    return in_hand


@QUEUES
def test_what_another_task_has_in_hand_is_left_to_it(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[int] = []
    consumer(queue, name="one")(lambda message: handled.append(message["n"]))
    queue.send({"n": 1}, **({"recipient": "one"} if queue is AddressedUrgent else {}))
    receiver = SingleReceiver(queue)
    claiming = receiver.task.state.claims
    with monkeypatch.context() as patched:
        in_hand = overtaken(patched, claiming)
        assert receiver.receive(1) == 0

    assert handled == []
    assert queue.objects.count() == 1
    assert receiver.receive(1) == 0, "nor is it claimed again"

    # As after its verdict: to be retried now.
    receiver.task.state.retried(in_hand[0])
    claiming.include(in_hand[0])
    assert receiver.receive(1) == 1
    assert handled == [1]
    assert not queue.objects.exists()


@QUEUES
def test_what_nobody_has_in_hand_is_handled_meanwhile(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[int] = []
    consumer(queue, name="one")(lambda message: handled.append(message["n"]))
    recipient = {"recipient": "one"} if queue is AddressedUrgent else {}
    queue.send({"n": 1}, **recipient)
    receiver = SingleReceiver(queue)
    with monkeypatch.context() as patched:
        overtaken(patched, receiver.task.state.claims)
        assert receiver.receive(1) == 0
    queue.send({"n": 2}, **recipient)

    assert receiver.receive(1) == 1

    assert handled == [2]


@QUEUES
def test_what_its_task_had_in_hand_before_is_left_to_another_one_all_the_same(
    queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[int] = []

    def act(message: Any) -> None:
        attempts.append(message["n"])
        raise ValueError

    consumer(queue, name="one", policy=lambda failure: RetryNow())(act)
    queue.send({"n": 1}, **({"recipient": "one"} if queue is AddressedUrgent else {}))
    receiver = SingleReceiver(queue)
    assert receiver.receive(1) == 1
    with monkeypatch.context() as patched:
        (in_hand, claimed) = overtaken(patched, receiver.task.state.claims), receiver.receive(1)
        assert (len(in_hand), claimed) == (1, 0)

    assert receiver.receive(1) == 0

    assert attempts == [1]


@pytest.mark.parametrize("crash_tracking", [False, True], ids=["", "crash_tracking"])
@pytest.mark.parametrize("queue", [Transactional, Together, SeveralTransactional], ids=lambda one: one.__name__)
def test_it_is_left_to_it_among_several_too(queue: Any, crash_tracking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[int] = []
    if queue is SeveralTransactional:
        consumer(queue, name="one", batch=10)(lambda messages, context: handled.extend(one["n"] for one in messages))
    else:
        consumer(queue, name="one")(lambda message: handled.append(message["n"]))
    queue.send_many({"n": number} for number in range(3))
    receiver = SingleReceiver(queue)
    receiver.pump.crash_tracking = crash_tracking
    claiming = receiver.task.state.claims
    with monkeypatch.context() as patched:
        in_hand = overtaken(patched, claiming)
        receiver.receive(10)

    assert handled == []
    assert queue.objects.count() == 3
    assert set(queue.objects.values_list("deliveries", flat=True)) == {0}
    for seq in in_hand:
        claiming.include(seq)
    claiming.retreat_all(in_hand)
    until = monotonic() + DEADLINE
    while queue.objects.exists() and monotonic() < until:
        receiver.receive(10)
    assert sorted(handled) == [0, 1, 2]


def test_what_outlasts_all_that_is_remembered_of_places_is_let_go_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(priority64_marks, "MAX_REMEMBERED", 5)
    consumer(RankedTransactional, name="one")(lambda message: None)
    RankedTransactional.send({"n": 1})
    receiver = SingleReceiver(RankedTransactional)
    claiming = receiver.task.state.claims
    with monkeypatch.context() as patched:
        in_hand = overtaken(patched, claiming)
        receiver.receive(1)
    (seq,) = in_hand
    RankedTransactional.send_many({"n": number} for number in range(20))
    until = monotonic() + DEADLINE
    while RankedTransactional.objects.count() > 1 and monotonic() < until:
        receiver.receive(10)
    assert claiming.marks.order_key_of(seq) is None
    assert claiming.excludes(seq)

    receiver.task.state.retried(seq)
    claiming.include(seq)

    assert not claiming.excludes(seq)
    assert receiver.receive(1) == 1
    assert not RankedTransactional.objects.exists()


def test_in_the_middle_of_a_streak_what_came_before_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[int] = []
    consumer(Transactional, name="one")(lambda message: handled.append(message["n"]))
    Transactional.send_many({"n": number} for number in range(3))
    receiver = SingleReceiver(Transactional)
    if not hasattr(receiver.task.sql, "_of_one"):
        pytest.skip("there are no streaks on this database")
    claiming = receiver.task.state.claims

    with monkeypatch.context() as patched:
        in_hand = overtaken(patched, claiming, lambda: len(handled) == 1)
        # However slow the machine is: one streak.
        patched.setattr("workers.receiving.receivers.transactional.STREAK_SECONDS", 60.0)
        assert receiver.receive(3) == 1

    assert handled == [0]
    assert Transactional.objects.count() == 2
    claiming.include(in_hand[0])
    while receiver.receive(3):
        pass
    assert handled == [0, 1, 2]
