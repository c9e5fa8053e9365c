"""While the database or what the handlers need is away, one task feels its way, and not without a rest."""

from __future__ import annotations

import threading
from time import monotonic
from typing import Any

import msgspec
import pytest
from django.db import OperationalError

from tests.inprocess import real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import Leased
from workers.receiving.pump import QueuePump
from workers.receiving.strategies.base import Running

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers")]


class Stopping(threading.Event):
    """Notes how long somebody wanted to wait, and does not let him."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        return self.is_set()


@pytest.fixture
def stopping() -> Stopping:
    return Stopping()


@pytest.fixture
def calls() -> list[tuple[int, int | None]]:
    """(tasks, messages for each) of every call of a pump that nobody runs."""
    return []


@pytest.fixture
def pump(stopping: Stopping, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> QueuePump:
    one = QueuePump(Leased, "default", stopping=stopping, concurrency=4)
    one.floors.reset()

    def call(tasks: int, messages: int | None = None) -> int:
        calls.append((tasks, messages))
        return tasks

    monkeypatch.setattr(one.crew, "call", call)
    Leased.send_many(Nop(number, "") for number in range(20))
    return one


@pytest.mark.parametrize(("counted", "well", "in_trouble"), [(100, (4, 5), (1, 20)), (10, (4, None), (1, None))])
def test_a_look_calls_one_task_however_much_it_sees(
    pump: QueuePump, calls: list[Any], counted: int, well: Any, in_trouble: Any
) -> None:
    pump.peek_limit = counted
    pump._look()
    assert calls == [well]

    pump.desk.breaker.failure(OperationalError("away"))
    pump._look()
    assert calls == [well, in_trouble]

    pump.crew._working = 1  # that one
    pump._look()
    pump.wake()
    assert calls == [well, in_trouble]

    pump.desk.claimed([], full=False)
    pump._look()
    assert len(calls) == 3, "a claim that came through ends it"


def test_failures_in_a_row_are_followed_by_rests_until_one_succeeds(
    pump: QueuePump, stopping: Stopping, settings: Any
) -> None:
    settings.QUEUEAPP = {"THROTTLE_AFTER": 3, "THROTTLE_WAIT": 30}

    for _ in range(5):
        pump.desk.failed()
    assert stopping.waits == [30.0] * 3

    pump.desk.succeeded(1)
    pump.desk.failed()
    assert stopping.waits == [30.0] * 3


def test_a_full_claim_has_the_pump_look_for_more_and_in_trouble_it_does_not(pump: QueuePump, settings: Any) -> None:
    settings.QUEUEAPP = {"THROTTLE_AFTER": 1, "THROTTLE_WAIT": 30}
    pump.desk.claimed([], full=False)
    assert not pump._wake.is_set()

    pump.desk.claimed([], full=True)
    assert pump._wake.is_set()
    assert pump._grow_at is not None

    pump._grow_at = None
    pump.desk.failed()
    pump.desk.claimed([], full=True)
    assert pump._grow_at is None


def test_who_feels_the_way_is_none_of_those_whose_handlers_began_before_the_trouble(
    pump: QueuePump, calls: list[Any]
) -> None:
    """Such a handler may last an hour, and nothing is learnt from it meanwhile."""
    task = pump.crew._make(None)
    task.running = running = Running(1, None, None, monotonic(), None)  # type: ignore[arg-type]
    pump.crew.tasks, pump.crew._working = [task], 1
    pump.desk.breaker.failure(OperationalError("away"))

    pump._look()
    assert len(calls) == 1

    task.running = msgspec.structs.replace(running, started=monotonic())  # a message that was claimed since then
    pump._look()
    assert len(calls) == 1
