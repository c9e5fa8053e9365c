"""Circuit breakers: armed by the first failure, triggered by time, disarmed by the first success."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest

from queueapp import breakers
from workers.connections import circuit_breaker
from workers.connections.circuit_breaker import CircuitBreaker, RateBreaker, State


class Clock:
    """A monotonic clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(breakers, "monotonic", clock)
    monkeypatch.setattr(circuit_breaker, "monotonic", clock)
    return clock


def breaker() -> CircuitBreaker:
    return CircuitBreaker("Test", timedelta(seconds=30), timedelta(seconds=1), timedelta(seconds=10))


def test_first_failure_arms_and_success_disarms(clock: Clock) -> None:
    one = breaker()
    assert one.state is State.DISARMED

    assert one.failure(ValueError("first")) == 1.0
    assert one.state is State.ARMED
    assert (one.failures, one.last_error) == (1, "ValueError: first")

    one.success()
    assert one.state is State.DISARMED
    assert one.failures == 0


def test_failing_for_its_time_triggers(clock: Clock) -> None:
    one = breaker()
    one.failure(ValueError())
    clock.now += 29.9
    assert one.failure(ValueError()) == 1.0

    clock.now += 0.1

    assert one.failure(ValueError()) == 10.0
    assert one.state is State.TRIGGERED
    assert one.failure(ValueError()) == 10.0


def test_success_in_between_starts_the_time_anew(clock: Clock) -> None:
    one = breaker()
    one.failure(ValueError())
    clock.now += 29
    one.success()
    clock.now += 29

    one.failure(ValueError())

    assert one.state is State.ARMED


def test_each_change_of_state_is_logged_once(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    one = breaker()
    for _ in range(100):
        one.failure(ValueError("down\nand a second line"))
        clock.now += 1
    one.success()
    one.success()

    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.WARNING, logging.CRITICAL, logging.WARNING]
    assert "second line" not in caplog.text
    assert "100 failures" in caplog.records[-1].getMessage()


def test_a_thousand_threads_arm_and_disarm_it_once(caplog: pytest.LogCaptureFixture) -> None:
    one = breaker()
    start = threading.Barrier(50)

    def fail_often() -> None:
        start.wait()
        for _ in range(20):
            one.failure(ValueError())

    threads = [threading.Thread(target=fail_often) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert one.failures == 1000
    successes = [threading.Thread(target=one.success) for _ in range(50)]
    for thread in successes:
        thread.start()
    for thread in successes:
        thread.join()

    assert len(caplog.records) == 2, "armed once, disarmed once"
    assert one.state is State.DISARMED


def test_rate_breaker_triggers_on_more_than_its_rate_in_a_window(clock: Clock) -> None:
    one = RateBreaker("Test", per_second=1)

    waits = [one.failure(ValueError()) for _ in range(31)]

    assert waits == [0.0] * 30 + [10.0]
    assert one.state is State.TRIGGERED


def test_rate_breaker_begins_anew_with_each_window(clock: Clock) -> None:
    one = RateBreaker("Test", per_second=1)
    for _ in range(31):
        one.failure(ValueError())
    clock.now += 31

    assert one.failure(ValueError()) == 0.0
    assert one.state is State.ARMED
