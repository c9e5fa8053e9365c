"""Circuit breakers: failing from the first failure, open after a time, closed by the first success."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
from django.db import OperationalError

from queueapp import circuit_breaker
from queueapp.circuit_breaker import CircuitBreaker, RateBreaker, State
from tests.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(circuit_breaker, "monotonic", clock)
    return clock


def breaker() -> CircuitBreaker:
    return CircuitBreaker("Test", timedelta(seconds=30), timedelta(seconds=1), timedelta(seconds=10))


def test_first_failure_starts_the_countdown_and_success_closes_it(clock: Clock) -> None:
    item = breaker()
    assert item.state is State.CLOSED

    assert item.failure(ValueError("first")) == 1.0
    assert item.state is State.FAILING
    assert (item.failures, item.last_error) == (1, "ValueError: first")

    item.success()
    assert item.state is State.CLOSED
    assert item.failures == 0


def test_failing_for_its_time_triggers(clock: Clock) -> None:
    item = breaker()
    item.failure(ValueError())
    clock.now += 29.9
    assert item.failure(ValueError()) == 1.0

    clock.now += 0.1

    assert item.failure(ValueError()) == 10.0
    assert item.state is State.OPEN
    assert item.failure(ValueError()) == 10.0


def test_success_in_between_starts_the_time_anew(clock: Clock) -> None:
    item = breaker()
    item.failure(ValueError())
    clock.now += 29
    item.success()
    clock.now += 29

    item.failure(ValueError())

    assert item.state is State.FAILING


def test_each_change_of_state_is_logged_once(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    item = breaker()
    for _ in range(100):
        item.failure(ValueError("down\nand a second line"))
        clock.now += 1
    item.success()
    item.success()

    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.WARNING, logging.CRITICAL, logging.WARNING]
    assert "second line" not in caplog.text
    assert "100 failures" in caplog.records[-1].getMessage()


def test_a_thousand_threads_start_and_close_it_once(caplog: pytest.LogCaptureFixture) -> None:
    item = breaker()
    start = threading.Barrier(50)

    def fail_often() -> None:
        start.wait()
        for _ in range(20):
            item.failure(ValueError())

    threads = [threading.Thread(target=fail_often) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert item.failures == 1000
    successes = [threading.Thread(target=item.success) for _ in range(50)]
    for thread in successes:
        thread.start()
    for thread in successes:
        thread.join()

    assert len(caplog.records) == 2, "started once, closed once"
    assert item.state is State.CLOSED


def test_rate_breaker_triggers_on_more_than_its_rate_in_a_window(clock: Clock) -> None:
    rate_breaker = RateBreaker("Test", per_second=1)

    waits = [rate_breaker.failure(ValueError()) for _ in range(31)]

    assert waits == [0.0] * 30 + [10.0]
    assert rate_breaker.state is State.OPEN


def test_rate_breaker_begins_anew_with_each_window(clock: Clock) -> None:
    rate_breaker = RateBreaker("Test", per_second=1)
    for _ in range(31):
        rate_breaker.failure(ValueError())
    clock.now += 31

    assert rate_breaker.failure(ValueError()) == 0.0
    assert rate_breaker.state is State.FAILING


def test_the_remedy_is_shown_as_long_as_the_error_lasts(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def mends(error: BaseException) -> str | None:
        asked.append(str(error))
        return "GRANT it" if isinstance(error, PermissionError) else None

    monkeypatch.setattr(circuit_breaker, "remedies", [mends])
    item = breaker()
    for _ in range(3):  # the tasks of one queue, and the same task again
        item.failure(PermissionError("table a"))
        assert item.last_error == "PermissionError: table a -- remedy: GRANT it"
    assert asked == ["table a"], "a look at the catalog for one error, not for each failure"

    item.failure(PermissionError("table b"))
    assert item.last_error.startswith("PermissionError: table b -- remedy")
    item.failure(ValueError("another"))
    assert item.last_error == "ValueError: another"

    item.success()
    item.failure(ValueError("another"))
    assert asked == ["table a", "table b", "another", "another"], "what is lacking may be something else by then"


def test_a_pool_without_a_free_connection_is_named_and_not_the_database() -> None:
    pool = pytest.importorskip("psycopg_pool")
    error = OperationalError("couldn't get a connection after 5.00 sec")
    assert circuit_breaker.first_line(error) == "OperationalError: couldn't get a connection after 5.00 sec"

    error.__cause__ = pool.PoolTimeout(str(error))

    assert circuit_breaker.first_line(error).endswith("5.00 sec" + circuit_breaker.pool_hint(error))
    assert "OPTIONS['pool'] needs a larger max_size" in circuit_breaker.pool_hint(error)
