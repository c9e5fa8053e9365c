"""Settings of the project that no queue and no consumer says otherwise: each is read, or its test fails."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest
from django.db import connection, models

from queueapp import Poison, RetryLater, RetryNow, consumer
from queueapp.circuit_breaker import State
from queueapp.failures.recoverability import Failure, default_policy
from queueapp.models import PoisonMessage
from queueapp.sql.message_columns import Row
from tests.in_process_worker import DEADLINE, Worker, eventually, real_commits
from tests.testapp.messages import Pong
from tests.testapp.models import AtMostOnce, Leased
from workers.receiving.pump import QueuePump

pytestmark = pytest.mark.usefixtures("no_consumers")
SECOND = timedelta(seconds=1)
Start = Callable[..., Worker]


def verdict(attempt: int) -> Any:
    return default_policy(Failure(Leased, None, Row(1, uuid.uuid4(), "{}", b""), ValueError(), attempt))


# -- retries ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("immediate", [0, 2])
def test_immediate_retries(settings: Any, immediate: int) -> None:
    settings.QUEUEAPP = {"IMMEDIATE_RETRIES": immediate}

    found = [verdict(attempt) for attempt in range(1, 5)]

    assert found == [RetryNow()] * immediate + [RetryLater(10 * SECOND)] * (4 - immediate)


@pytest.mark.parametrize("increase", [0, 7])
def test_retry_delay_increase(settings: Any, increase: int) -> None:
    settings.QUEUEAPP = {"RETRY_DELAY": 3, "RETRY_DELAY_INCREASE": increase}

    found = [verdict(attempt) for attempt in range(1, 4)]

    assert found == [RetryLater((3 + n * increase) * SECOND) for n in range(3)]


def test_retry_jitter(settings: Any) -> None:
    settings.QUEUEAPP = {"RETRY_DELAY": 10, "RETRY_JITTER": 0.5}

    waits = [verdict(1).delay for _ in range(500)]

    assert min(waits) >= 10 * SECOND
    assert max(waits) <= 15 * SECOND
    assert max(waits) - min(waits) > 4 * SECOND


def test_retry_backoff_doubles_the_wait_up_to_its_bound(settings: Any) -> None:
    settings.QUEUEAPP = {"RETRY_DELAY": 3, "RETRY_BACKOFF": 2, "RETRY_BACKOFF_MAX": 40, "ATTEMPTS": 1000}

    assert [verdict(attempt).delay for attempt in range(1, 7)] == [n * SECOND for n in (3, 6, 12, 24, 40, 40)]
    assert verdict(999).delay == 40 * SECOND, "no power of two is too large"


def test_retry_backoff_with_jitter_stays_under_its_bound_and_spread(settings: Any) -> None:
    settings.QUEUEAPP = {
        "RETRY_DELAY": 1,
        "RETRY_BACKOFF": 3,
        "RETRY_BACKOFF_MAX": 30,
        "RETRY_JITTER": 0.5,
        "ATTEMPTS": 99,
    }

    waits = [verdict(50).delay for _ in range(500)]

    assert 20 * SECOND <= min(waits) < 21 * SECOND
    assert 29 * SECOND < max(waits) <= 30 * SECOND


def test_retry_backoff_does_not_shorten_a_longer_delay(settings: Any) -> None:
    settings.QUEUEAPP = {"RETRY_DELAY": 100, "RETRY_BACKOFF": 2, "RETRY_BACKOFF_MAX": 40}

    assert [verdict(attempt).delay for attempt in (1, 4)] == [100 * SECOND, 100 * SECOND]


def test_retry_backoff_of_a_delay_of_zero_retries_at_once(settings: Any) -> None:
    settings.QUEUEAPP = {"RETRY_DELAY": 0, "RETRY_BACKOFF": 2}

    assert verdict(3) == RetryNow()


def test_attempts(settings: Any) -> None:
    settings.QUEUEAPP = {"ATTEMPTS": 2}

    assert isinstance(verdict(1), RetryLater)
    assert isinstance(verdict(2), Poison)


# -- a worker --------------------------------------------------------------------------------------------------------


@real_commits
def test_timeout(settings: Any, start_worker: Start) -> None:
    settings.QUEUEAPP = {"TIMEOUT": 0.05, "ATTEMPTS": 1, "PEEK_DELAY": 0.1}
    never = threading.Event()

    @consumer(Leased)
    def wait(message: Pong) -> None:
        for _ in range(int(DEADLINE * 1000)):
            never.wait(0.001)

    Leased.send(Pong())
    start_worker(Leased)

    assert eventually(PoisonMessage.objects.first).exception_type.endswith("TimeLimitExceeded")


@real_commits
@pytest.mark.parametrize("limit", [3, 40])
def test_at_most_once_batch(settings: Any, start_worker: Start, limit: int) -> None:
    """What is neither in the table nor handled is in flight, and would be lost with the process."""
    settings.QUEUEAPP = {"AT_MOST_ONCE_BATCH": limit, "BATCH_TARGET": 30, "PEEK_DELAY": 0.1}
    count = 150
    in_flight: list[int] = []

    @consumer(AtMostOnce)
    def note(message: Pong) -> None:
        in_flight.append(count - AtMostOnce.objects.count() - len(in_flight))

    AtMostOnce.send_many(Pong() for _ in range(count))
    start_worker(AtMostOnce, concurrency=1)

    eventually(lambda: len(in_flight) == count)

    assert max(in_flight) == limit


@real_commits
def test_claim_pause(settings: Any, start_worker: Start) -> None:
    settings.QUEUEAPP = {"AT_MOST_ONCE_BATCH": 1, "CLAIM_PAUSE": 0.3, "PEEK_DELAY": 0.1}
    at: list[float] = []

    @consumer(AtMostOnce)
    def note(message: Pong) -> None:
        at.append(monotonic())

    AtMostOnce.send_many(Pong() for _ in range(3))
    start_worker(AtMostOnce, concurrency=1)
    eventually(lambda: len(at) == 3)

    assert min(at[1] - at[0], at[2] - at[1]) >= 0.3


@real_commits
def test_max_records_to_peek(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look counts no further, however much is there; a queue may say otherwise."""
    settings.QUEUEAPP = {"MAX_RECORDS_TO_PEEK": 7}
    Leased.send_many(Pong() for _ in range(20))

    def counted() -> int:
        pump = QueuePump(Leased, "default", stopping=threading.Event(), concurrency=1)
        pump.marks.reset()
        seen = pump.peek()
        assert seen is not None
        return seen.ahead

    assert counted() == 7
    monkeypatch.setattr(Leased.delivery, "max_records_to_peek", 12)
    assert counted() == 12


@pytest.fixture
def refusing_leases() -> Iterator[None]:
    """A constraint of the user's own that lets nothing be leased: it can be peeked at and not be received."""
    constraint = models.CheckConstraint(condition=models.Q(lease_token__isnull=True), name="tests_no_leases")
    with connection.schema_editor() as editor:
        editor.add_constraint(Leased, constraint)
    yield
    with connection.schema_editor() as editor:
        editor.remove_constraint(Leased, constraint)


@pytest.fixture
def no_table() -> Iterator[None]:
    """The queue's table is away."""
    with connection.schema_editor() as editor:
        editor.alter_db_table(Leased, "testapp_leased", "testapp_elsewhere")
    yield
    with connection.schema_editor() as editor:
        editor.alter_db_table(Leased, "testapp_elsewhere", "testapp_leased")


@real_commits
@pytest.mark.parametrize(("seconds", "then"), [(0.001, State.OPEN), (3600, State.FAILING)])
@pytest.mark.parametrize(("trouble", "name"), [("refusing_leases", "breaker"), ("no_table", "peek_breaker")])
def test_time_to_trigger_receive_circuit_breaker(
    settings: Any, request: pytest.FixtureRequest, trouble: str, name: str, seconds: float, then: State
) -> None:
    settings.QUEUEAPP = {"TIME_TO_TRIGGER_RECEIVE_CIRCUIT_BREAKER": seconds, "PEEK_DELAY": 0.1}

    @consumer(Leased)
    def nothing(message: Pong) -> None: ...

    Leased.send(Pong())
    request.getfixturevalue(trouble)
    worker = request.getfixturevalue("start_worker")(Leased)
    breaker = getattr(worker.pump.health, name)

    eventually(lambda: breaker.failures >= 2)

    assert breaker.state is then
