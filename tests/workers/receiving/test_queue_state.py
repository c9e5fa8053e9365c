"""What the receivers of a queue share: its health, throttle and probing, and what becomes of returned messages."""

from __future__ import annotations

import threading
from time import monotonic
from typing import Any

import msgspec
import pytest
from django.db import OperationalError, connections

from queueapp.sql.claims import SeqRange
from tests.databases import statements_of
from tests.in_process_worker import eventually, real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import Leased
from tests.workers.receiving.single_receiver import SingleReceiver
from workers.receiving.pump import QueuePump
from workers.receiving.receivers.base import ActiveHandler


@real_commits
def test_what_held_nothing_is_read_again_for_a_tenth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SingleReceiver(Leased).pump.state
    state.claims.extend_skipped(SeqRange(1), 5)
    statements = statements_of(connections["default"], "claims")
    read_heads, reads = statements.read_heads, list[float]()

    def slowly(self: Any, *arguments: Any) -> Any:
        reads.append(monotonic())
        while monotonic() < reads[-1] + 0.02:
            pass
        return read_heads(self, *arguments)

    monkeypatch.setattr(statements, "read_heads", slowly)
    state.skipped.reread(1)
    state.skipped.reread(1)
    assert len(reads) == 1
    eventually(lambda: state.skipped.reread(1) or len(reads) == 2)

    assert reads[1] - reads[0] >= 10 * 0.02


@real_commits
def test_what_is_to_be_received_again_is_looked_for_at_once() -> None:
    pump = SingleReceiver(Leased).pump
    pump.schedule.is_due = False

    pump.state.messages_returned([7, 5])

    assert pump.schedule.is_due
    assert pump.schedule.wake.is_set()
    assert pump.stats.returned == 2


class Stopping(threading.Event):
    """Records how long a thread wanted to wait, and does not wait."""

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
    """(tasks, messages for each) of every call of a pump that does not run."""
    return []


@pytest.fixture
def pump(stopping: Stopping, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> QueuePump:
    queue_pump = QueuePump(Leased, "default", stopping=stopping, concurrency=4)
    queue_pump.marks.reset()

    def call(tasks: int, messages: int | None = None) -> int:
        calls.append((tasks, messages))
        return tasks

    monkeypatch.setattr(queue_pump.pool, "submit", call)
    Leased.send_many(Nop(number, "") for number in range(20))
    return queue_pump


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.parametrize(("counted", "well", "in_trouble"), [(100, (4, 5), (1, 20)), (10, (4, None), (1, None))])
def test_a_look_calls_one_task_however_much_it_sees(
    pump: QueuePump, calls: list[Any], counted: int, well: Any, in_trouble: Any
) -> None:
    pump.peek_limit = counted
    pump.peek_and_submit()
    assert calls == [well]

    pump.state.health.breaker.failure(OperationalError("away"))
    pump.peek_and_submit()
    assert calls == [well, in_trouble]

    pump.pool.busy = 1  # that one
    pump.peek_and_submit()
    pump.wake()
    assert calls == [well, in_trouble]

    pump.state.claimed([], full=False)
    pump.peek_and_submit()
    assert len(calls) == 3, "a claim that came through ends it"


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_failures_in_a_row_are_followed_by_rests_until_one_succeeds(
    pump: QueuePump, stopping: Stopping, settings: Any
) -> None:
    settings.QUEUEAPP = {"THROTTLE_AFTER": 3, "THROTTLE_WAIT": 30}

    for _ in range(5):
        pump.state.health.failed()
    assert stopping.waits == [30.0] * 3

    pump.state.health.succeeded(1)
    pump.state.health.failed()
    assert stopping.waits == [30.0] * 3


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_a_full_claim_has_the_pump_look_for_more_and_in_trouble_it_does_not(pump: QueuePump, settings: Any) -> None:
    settings.QUEUEAPP = {"THROTTLE_AFTER": 1, "THROTTLE_WAIT": 30}
    pump.state.claimed([], full=False)
    assert not pump.schedule.wake.is_set()

    pump.state.claimed([], full=True)
    assert pump.schedule.wake.is_set()
    assert pump.schedule.grow_at is not None

    pump.schedule.grow_at = None
    pump.state.health.failed()
    pump.state.claimed([], full=True)
    assert pump.schedule.grow_at is None


@pytest.fixture
def task(pump: QueuePump) -> Any:
    """The one task at work."""
    task = pump.make_receiver(None)
    pump.pool.receivers, pump.pool.busy = [task], 1
    return task


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_while_the_database_fails_no_receiver_in_a_handler_probes(pump: QueuePump, calls: list[Any], task: Any) -> None:
    """It may last an hour, and nothing is learnt meanwhile; the claim or the ack that failed may have been its own."""
    pump.state.health.breaker.failure(OperationalError("away"))
    pump.peek_and_submit()
    assert calls == [], "that one asks the database"

    task.active_handler = ActiveHandler(1, None, None, monotonic(), None)  # type: ignore[arg-type]
    pump.peek_and_submit()
    assert calls == [(1, 20)]


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.parametrize("inside", ["active_handler", "active_callback"])
def test_in_an_outage_a_receiver_that_was_in_a_handler_does_not_probe(
    pump: QueuePump, calls: list[Any], task: Any, inside: str, settings: Any
) -> None:
    settings.QUEUEAPP = {"THROTTLE_AFTER": 2, "THROTTLE_WAIT": 30}
    began = monotonic()
    pump.state.health.failed()
    pump.state.health.failed()
    pump.state.health.failed()
    now = ActiveHandler(1, None, None, monotonic(), None)  # type: ignore[arg-type]
    setattr(task, inside, now)
    pump.peek_and_submit()
    assert calls == [], "its handler began after it, and says how things are"

    setattr(task, inside, msgspec.structs.replace(now, started=began))
    pump.peek_and_submit()
    assert calls == [(1, 20)]


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_the_end_of_an_outage_is_not_the_beginning_of_the_next_one(pump: QueuePump, task: Any, settings: Any) -> None:
    settings.QUEUEAPP = {"THROTTLE_AFTER": 2, "THROTTLE_WAIT": 30}
    pump.state.health.failed()
    pump.state.health.failed()
    between = ActiveHandler(1, None, None, monotonic(), None)  # type: ignore[arg-type]
    pump.state.health.succeeded(1)
    task.active_handler = between

    pump.state.health.failed()
    pump.state.health.failed()

    assert pump.probing_receivers() == 0


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_more_handlers_than_busy_receivers_means_no_probe(pump: QueuePump, task: Any) -> None:
    """It has just ended: the two are not counted in one breath."""
    pump.state.health.breaker.failure(OperationalError("away"))
    task.active_handler = ActiveHandler(1, None, None, monotonic(), None)  # type: ignore[arg-type]
    pump.pool.busy = 0

    assert pump.probing_receivers() == 0


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_an_outage_begins_once_however_many_attempts_fail_in_it(pump: QueuePump, task: Any, settings: Any) -> None:
    settings.QUEUEAPP = {"THROTTLE_AFTER": 2, "THROTTLE_WAIT": 30}
    pump.state.health.failed()
    pump.state.health.failed()
    task.active_handler = ActiveHandler(1, None, None, monotonic(), None)  # type: ignore[arg-type]

    pump.state.health.failed()

    assert pump.probing_receivers() == 1


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_a_claim_that_is_answered_has_worked_though_it_got_nothing(pump: QueuePump) -> None:
    Leased.objects.all().delete()
    pump.state.health.breaker.failure(OperationalError("away"))
    task = pump.make_receiver(None)
    task.bind()

    pump.receive_messages(task, None)

    assert pump.health.degraded_text() == ""


@real_commits
@pytest.mark.usefixtures("no_consumers")
def test_in_an_outage_a_task_that_is_not_alone_gives_way(pump: QueuePump, task: Any, settings: Any) -> None:
    settings.QUEUEAPP = {"THROTTLE_AFTER": 2, "THROTTLE_WAIT": 30}
    pump.state.health.failed()
    pump.state.health.failed()
    limits: list[int] = []

    def receive(limit: int) -> int:
        limits.append(limit)
        return 0

    task.receive = receive
    pump.pool.busy = 2

    pump.receive_messages(task, None)
    assert limits == []

    pump.pool.busy = 1
    pump.receive_messages(task, None)
    assert limits == [1]
