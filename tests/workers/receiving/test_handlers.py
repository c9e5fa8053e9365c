"""Which consumer takes a message, how often, and the gate of quick handlers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from queueapp import Context, Discard, RetryNow, consumer
from queueapp.models import PoisonMessage
from tests.in_process_worker import real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import Leased
from tests.workers.receiving.single_receiver import SingleReceiver
from workers.receiving import handlers
from workers.receiving.handlers import QUICK, GatedHandler, HandlerGate


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.parametrize(
    ("options", "attempts"), [({}, 4), ({"attempts": 3}, 3)], ids=["as often as it says", "bounded where asked for"]
)
def test_a_policy_of_its_own_may_want_more_attempts_than_the_project_has(
    settings: Any, options: dict[str, Any], attempts: int
) -> None:
    settings.QUEUEAPP = {"ATTEMPTS": 2}
    seen: list[int] = []

    def act(message: Nop, context: Context) -> None:
        seen.append(context.attempt)
        raise ValueError

    def policy(failure: Any) -> Any:
        return RetryNow() if failure.attempt < 4 else Discard("enough")

    consumer(Leased, name="tests", policy=policy, **options)(act)
    Leased.send(Nop(0, ""))
    single_receiver = SingleReceiver(Leased)
    while single_receiver.receive(1):
        pass

    assert seen == list(range(1, attempts + 1))
    assert PoisonMessage.objects.exists() == (attempts == 3)


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_max_deliveries_of_the_queue_bound_every_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leased.delivery, "max_deliveries", 2)
    seen: list[int] = []

    def act(message: Nop, context: Context) -> None:
        seen.append(context.attempt)
        raise ValueError

    consumer(Leased, name="tests", policy=lambda failure: RetryNow())(act)
    Leased.send(Nop(0, ""))
    single_receiver = SingleReceiver(Leased)
    while single_receiver.receive(1):
        pass

    assert seen == [1, 2]
    assert PoisonMessage.objects.exists()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(handlers, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter waits for ever: a test that should not wait does not end."""
    monkeypatch.setattr(handlers, "GATE_PATIENCE", threading.TIMEOUT_MAX)


def handle(task: GatedHandler, clock: list[float], seconds: float, times: int = 1) -> None:
    for _ in range(times):
        with task:
            clock[0] += seconds


@pytest.fixture
def taken() -> Iterator[HandlerGate]:
    turn = HandlerGate()
    assert turn.enter()
    yield turn
    turn.leave()


def test_who_has_waited_in_vain_goes_on_without(taken: HandlerGate) -> None:
    assert not taken.enter()


def test_no_handler_waits_for_an_overdue_handler(taken: HandlerGate, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not taken.enter()
    monkeypatch.setattr(handlers, "GATE_PATIENCE", threading.TIMEOUT_MAX)
    assert not taken.enter()


@pytest.mark.usefixtures("patient")
def test_a_turn_that_was_left_is_the_next_ones() -> None:
    turn = HandlerGate()
    assert turn.enter()
    waiting = threading.Thread(target=turn.enter, daemon=True)
    waiting.start()
    turn.leave()
    waiting.join(30)
    assert not waiting.is_alive()


@pytest.mark.usefixtures("patient")
def test_after_one_who_had_overstayed_turns_are_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = HandlerGate()
    with monkeypatch.context() as patched:
        patched.setattr(handlers, "GATE_PATIENCE", 0.0)
        assert turn.enter()
        assert not turn.enter()
    turn.leave()
    assert turn.enter()
    waiting = threading.Thread(target=turn.enter, daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive(), "it waits again"
    turn.leave()
    waiting.join(30)


@pytest.mark.usefixtures("patient")
def test_a_waiter_that_gave_up_when_the_permit_was_released_blocks_no_other() -> None:
    turn = HandlerGate()
    turn.overstayed = True  # set after the other one had left
    assert turn.enter()


def test_until_a_handler_was_quick_none_takes_a_turn(clock: list[float]) -> None:
    turn = HandlerGate()
    task = GatedHandler(turn)
    with task:
        assert turn.enter()
        turn.leave()
        clock[0] += QUICK / 2
    with task:
        assert not turn.enter()


def test_slow_handlers_take_no_turns(clock: list[float]) -> None:
    turn = HandlerGate()
    task = GatedHandler(turn)
    handle(task, clock, QUICK * 1.1, times=50)
    with task:
        assert turn.enter()
        turn.leave()


def test_a_slow_one_among_quick_ones_is_forgotten_soon(clock: list[float]) -> None:
    turn = HandlerGate()
    task = GatedHandler(turn)
    handle(task, clock, QUICK / 4, times=20)
    handle(task, clock, 3600.0)
    with task:
        assert turn.enter(), "it may be one of many"
        turn.leave()
    handle(task, clock, QUICK / 4, times=10)
    with task:
        assert not turn.enter()


def test_a_handler_that_raises_leaves_its_turn(clock: list[float]) -> None:
    turn = HandlerGate()
    task = GatedHandler(turn)
    handle(task, clock, 0.0)
    with pytest.raises(SystemExit), task:
        raise SystemExit
    assert turn.enter()
