"""The state machine of one queue: when it peeks, when it receives, and how many tasks it has meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError

from queueapp import Context, InvalidOption, RetryNow, consumer
from queueapp.models import Now
from queueapp.sql.postgresql.queue import PostgresqlQueueSql
from tests.conformance.gate import Gate
from tests.inprocess import Worker, eventually, real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import AtMostOnce, Leased, Transactional
from workers.connections.circuit_breaker import CircuitBreaker, State
from workers.receiving import crew, pump
from workers.receiving.pump import QueuePump
from workers.receiving.rounds import Estimate
from workers.receiving.strategies import LeaseTask

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers")]
Start = Callable[..., Worker]


@pytest.fixture(autouse=True)
def fast(settings: Any) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1, "RETRY_DELAY": 0}


def handle(queue: Any, act: Callable[[Nop, Context], Any] = lambda message, context: None, **options: Any) -> None:
    def handler(message: Nop, context: Context) -> None:
        act(message, context)

    consumer(queue, name="tests", **options)(handler)


def send(queue: Any, count: int) -> None:
    queue.send_many(Nop(number, "") for number in range(count))


def idle_pump(queue: Any = Leased, **options: Any) -> QueuePump:
    """A pump that nobody runs."""
    return QueuePump(queue, "default", stopping=threading.Event(), **options)


# -- peeking -------------------------------------------------------------------------------------------------------


def test_an_idle_pump_waits_one_peek_delay_between_peeks(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 7}
    one = idle_pump()
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            one.stopping.set()

    monkeypatch.setattr(one, "_wait", wait)
    one.run()

    assert waits == [7.0, 7.0, 7.0]
    assert one.stats.peeks == 3
    assert one.stats.empty == 0, "no receive without something to receive"


def test_after_a_round_it_looks_once_more_soon(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 7, "WAKE_UP_INTERVAL": 0.05}
    handle(Leased)
    send(Leased, 1)
    one = idle_pump()
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            one.stopping.set()

    monkeypatch.setattr(one, "_wait", wait)
    one.run()

    assert waits == [0.05, 7.0], "for what a throttled wake-up did not tell"


def test_a_wake_up_ends_the_wait(start_worker: Start, settings: Any) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 3600}
    handle(Leased)
    worker = start_worker(Leased)
    eventually(lambda: worker.pump.stats.peeks == 1)

    send(Leased, 1)
    worker.pump.wake()

    eventually(lambda: worker.pump.stats.handled == 1)


def test_a_peek_that_fails_is_tried_again_and_counted(
    start_worker: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handle(Leased)
    send(Leased, 1)
    really_peek = PostgresqlQueueSql.peek
    errors = [OperationalError("the server is away") for _ in range(3)]

    def peek(self: Any, *arguments: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return really_peek(self, *arguments, **options)

    monkeypatch.setattr(PostgresqlQueueSql, "peek", peek)
    monkeypatch.setattr(pump, "CircuitBreaker", lambda name, time: CircuitBreaker(name, time, timedelta(0)))

    worker = start_worker(Leased)

    eventually(lambda: worker.pump.stats.handled == 1)
    assert worker.pump.peek_breaker.state is State.DISARMED
    assert worker.pump.trouble() == ""
    assert "works again after 3 failures" in caplog.text


def test_what_came_back_behind_the_floor_is_found(start_worker: Start) -> None:
    handle(Leased)
    send(Leased, 50)
    first = Leased.objects.earliest("seq").seq
    Leased.objects.filter(seq=first).update(lease_expires=Now() + timedelta(hours=1))
    worker = start_worker(Leased)
    eventually(lambda: worker.pump.stats.handled == 49)
    assert worker.pump.floors.lowest > first

    Leased.objects.filter(seq=first).update(lease_expires=Now() - timedelta(seconds=1))

    eventually(lambda: worker.pump.stats.handled == 50)


# -- the number of tasks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", [Leased, Transactional, AtMostOnce])
def test_there_are_no_more_tasks_than_messages(start_worker: Start, queue: Any) -> None:
    gate = Gate()
    handle(queue, gate.enter)
    send(queue, 2)
    worker = start_worker(queue, concurrency=10)

    eventually(lambda: gate.inside == 2)
    tasks = len(worker.pump.tasks)
    gate.let(2)

    assert tasks == 2
    eventually(lambda: worker.pump.stats.handled == 2)


def test_a_task_is_added_after_so_many_successes(start_worker: Start, settings: Any) -> None:
    settings.QUEUEAPP = settings.QUEUEAPP | {"GROW_AFTER": 3}
    gate = Gate()
    handle(Transactional, gate.enter)
    send(Transactional, 20)
    worker = start_worker(Transactional, concurrency=4)
    for passed in (0, 1):
        eventually(lambda passed=passed: gate.passed == passed and gate.inside == 1)
        assert len(worker.pump.tasks) == 1
        gate.let(1)

    eventually(lambda: gate.inside == 2)
    gate.let(18)
    eventually(lambda: worker.pump.stats.handled == 20)


@pytest.mark.parametrize("end_after", [1, 3])
def test_a_task_ends_after_so_many_empty_receives(
    monkeypatch: pytest.MonkeyPatch, settings: Any, end_after: int
) -> None:
    settings.QUEUEAPP = settings.QUEUEAPP | {"END_AFTER": end_after}
    one = idle_pump(concurrency=1)
    monkeypatch.setattr(one, "_peek", lambda: Estimate(1000, True, 1, None))
    monkeypatch.setattr(one, "_wait", lambda seconds: None)
    really_work = one._work

    def work_once(task: Any, round_: Any) -> None:
        really_work(task, round_)
        one.stopping.set()

    monkeypatch.setattr(one, "_work", work_once)
    one.run()

    assert one.stats.empty == end_after


def test_helpers_without_work_end(start_worker: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "HELPER_IDLE", 0.05)
    gate = Gate()
    # One message a task: a batch would hold two of them behind one that waits.
    handle(Transactional, gate.enter)
    send(Transactional, 4)
    worker = start_worker(Transactional, concurrency=4)
    eventually(lambda: gate.inside == 4)

    gate.let(4)

    eventually(lambda: len(worker.pump.tasks) == 1)
    send(Transactional, 4)
    eventually(lambda: gate.inside == 4)
    gate.let(4)


def test_a_task_that_breaks_does_not_take_the_pump_with_it(
    start_worker: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    really_receive = LeaseTask.receive
    broken: list[str] = []

    def receive(self: Any, *arguments: Any) -> int:
        if not broken and threading.current_thread().name.startswith("testapp"):
            broken.append(threading.current_thread().name)
            raise RuntimeError("a bug")
        return really_receive(self, *arguments)

    monkeypatch.setattr(LeaseTask, "receive", receive)
    handle(Leased)
    send(Leased, 500)
    worker = start_worker(Leased, concurrency=3)

    eventually(lambda: worker.pump.stats.handled == 500)
    send(Leased, 500)
    eventually(lambda: worker.pump.stats.handled == 1000)

    assert broken
    assert "a receive task failed" in caplog.text


@pytest.mark.parametrize("concurrency", [0, -1, 257])
def test_a_concurrency_out_of_bounds_is_refused(concurrency: int) -> None:
    with pytest.raises(InvalidOption, match="from 1 to 256"):
        idle_pump().set_concurrency(concurrency)


def test_concurrency_cannot_be_raised_above_the_slots_that_a_supervisor_reads() -> None:
    with pytest.raises(InvalidOption, match="from 1 to 2"):
        idle_pump(concurrency=2, slots=[None, None]).set_concurrency(3)


# -- sharing with other workers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("waiting", [1, 2, 5, 7])
@pytest.mark.parametrize("first", [1, 2, 3, 1000])
def test_of_many_workers_as_many_take_part_as_there_are_messages(waiting: int, first: int) -> None:
    one = idle_pump()
    one.workers = 8
    places = []
    for one.rank in range(8):
        places.append(one._place_in_line(Estimate(waiting, False, first, None)))

    assert places.count(0) == waiting
    assert sorted(place for place in places if place) == list(range(waiting, 8)), "the others come one after the other"


@pytest.mark.parametrize("waiting", [8, 9, 16, 23, 100])
@pytest.mark.parametrize("first", [1, 6])
def test_the_parts_of_all_workers_add_up_to_a_small_backlog(waiting: int, first: int) -> None:
    one = idle_pump()
    one.workers = 8
    parts = []
    for one.rank in range(8):
        parts.append(one._part_of(Estimate(waiting, False, first, None)).waiting)

    assert sum(parts) == waiting
    assert max(parts) - min(parts) <= 1


def test_a_large_backlog_is_for_everybody() -> None:
    one = idle_pump()
    one.workers = 8
    estimate = Estimate(1000, True, 1, None)

    assert one._part_of(estimate) == estimate
    assert one._place_in_line(estimate) == 0


def test_a_message_that_nobody_took_in_turn_is_taken_by_whoever_looks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = idle_pump()
    one.workers, one.rank = 8, 5
    seen = Estimate(1, False, 8, None)
    monkeypatch.setattr(one, "_peek", lambda: seen)

    assert one._place_in_line(seen) == 5
    round_ = one._peek_for_round()

    assert round_ is not None
    assert round_.remaining == 1


# -- an outage of what the handlers need ---------------------------------------------------------------------------


def test_after_many_failures_in_a_row_one_task_feels_its_way(
    start_worker: Start, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.QUEUEAPP = settings.QUEUEAPP | {"THROTTLE_AFTER": 5, "THROTTLE_WAIT": 0.01}
    outage = threading.Event()
    outage.set()
    inside: list[int] = []
    lock, running = threading.Lock(), [0]

    def act(message: Nop, context: Context) -> None:
        with lock:
            running[0] += 1
            inside.append(running[0])
        try:
            if outage.is_set():
                raise ConnectionError("somebody else's server")
        finally:
            with lock:
                running[0] -= 1

    handle(Transactional, act, policy=lambda failure: RetryNow())
    send(Transactional, 20)
    worker = start_worker(Transactional, concurrency=4)
    eventually(lambda: worker.pump.stats.failed >= 20)
    assert worker.pump.throttled
    assert "throttled after" in worker.pump.trouble()
    assert max(inside[-10:]) == 1

    outage.clear()

    eventually(lambda: worker.pump.stats.handled == 20)
    assert not worker.pump.throttled
    assert worker.pump.trouble() == ""
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("failed in a row" in text for text in warnings) == 1


def test_without_the_throttle_failures_change_nothing(start_worker: Start) -> None:
    handle(Leased, lambda message, context: 1 / 0, attempts=1)
    send(Leased, 30)
    worker = start_worker(Leased, concurrency=2)

    eventually(lambda: worker.pump.stats.failed == 30)

    assert not worker.pump.throttled
