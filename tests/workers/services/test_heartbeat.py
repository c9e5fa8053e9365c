"""The pulse of a worker: its rows, its number among the others, and what operators and deaths tell it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connections

from queueapp import consumer
from queueapp.circuit_breaker import CircuitBreaker
from queueapp.models import Now, QueueControl, Subscriber
from queueapp.operations import control
from queueapp.operations.live_workers import running_of
from queueapp.services.subscriber_rows import host_name, is_running, process_start_id
from tests.in_process_worker import DEADLINE, Worker, eventually, real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import Leased, Transactional
from workers.receiving.pump import QueuePump
from workers.receiving.quarantine import SMALL_BATCH
from workers.services import heartbeat as heartbeats
from workers.services.heartbeat import Heartbeat

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers")]
Start = Callable[..., Worker]


@pytest.fixture(autouse=True)
def fast(settings: Any) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1, "HEARTBEAT_INTERVAL": 0.1, "DEAD_AFTER": 20}


def foreign_worker(queue: Any = Leased, *, alive: bool = True, **values: Any) -> Subscriber:
    """A worker of another process tree, on another host where nothing else is said."""
    until = Now() + timedelta(hours=1) if alive else Now() - timedelta(seconds=1)
    given = {"host": "elsewhere", "process": 1, "supervisor": uuid.uuid4()} | values
    return Subscriber.objects.create(queue=queue._meta.label, alive_until=until, **given)


def dead_here(queue: Any = Leased) -> Subscriber:
    """A worker of this host whose number has another process by now."""
    return foreign_worker(queue, host=host_name(), process=os.getpid(), process_start="some boot:1")


def test_a_worker_is_a_row_per_queue_while_it_lives(start_worker: Start) -> None:
    worker = start_worker(Leased, heartbeat=True, concurrency=3)

    row = Subscriber.objects.get()

    assert row.id == worker.pump.subscriber
    assert (row.queue, row.table, row.concurrency) == ("testapp.Leased", "testapp_leased", 3)
    assert (row.host, row.process, row.process_start) == (host_name(), os.getpid(), process_start_id(os.getpid()))
    assert row.alive_until - row.heartbeat_at == pytest.approx(timedelta(seconds=20), abs=timedelta(seconds=1))
    eventually(lambda: Subscriber.objects.get().heartbeat_at > row.heartbeat_at)

    worker.stop()
    assert worker.heartbeat is not None
    worker.heartbeat.deregister()
    assert not Subscriber.objects.exists()


def test_its_row_reports_what_it_did_and_what_it_holds(start_worker: Start) -> None:
    hold = threading.Event()

    def act(message: Nop) -> None:
        if message.number == 2:
            hold.wait(30)

    consumer(Leased, name="tests", attempts=1)(act)
    Leased.send_many(Nop(number, "") for number in range(3))
    start_worker(Leased, heartbeat=True, concurrency=1)

    eventually(lambda: Subscriber.objects.get().outstanding >= 1 and Subscriber.objects.get().received == 3)
    eventually(lambda: running_of(Subscriber.objects.get().running))
    row = Subscriber.objects.get()
    [(seq, name, seconds)] = running_of(row.running)
    assert (seq, name, seconds >= 1.0) == (Leased.objects.latest("seq").pk, "tests", True)
    assert row.memory is None or row.memory > 0
    hold.set()
    eventually(lambda: Subscriber.objects.get().handled == 3)
    eventually(lambda: not running_of(Subscriber.objects.get().running))
    eventually(lambda: Subscriber.objects.get().outstanding == 0)


def test_a_worker_that_was_declared_dead_writes_its_row_again(start_worker: Start) -> None:
    start_worker(Leased, heartbeat=True)

    Subscriber.objects.all().delete()

    eventually(Subscriber.objects.exists)


def test_workers_learn_their_number_among_the_living(start_worker: Start) -> None:
    first, second = start_worker(Leased, heartbeat=True), start_worker(Leased, heartbeat=True)
    start_worker(Transactional, heartbeat=True)
    foreign_worker(alive=False)

    eventually(lambda: first.pump.workers == second.pump.workers == 2)
    assert sorted([first.pump.rank, second.pump.rank]) == [0, 1]

    foreign_worker()
    eventually(lambda: first.pump.workers == 3)


def test_a_pause_is_seen_and_a_resume_wakes_the_pump(start_worker: Start, settings: Any) -> None:
    settings.QUEUEAPP = settings.QUEUEAPP | {"PEEK_DELAY": 1}
    worker = start_worker(Leased, heartbeat=True)

    control.pause(Leased)
    eventually(lambda: worker.pump.paused)
    control.pause(Transactional)
    control.resume(Leased)

    eventually(lambda: not worker.pump.paused)


def test_a_worker_that_starts_alone_has_no_crash_tracking(start_worker: Start) -> None:
    worker = start_worker(Leased, heartbeat=True)

    assert worker.pump.crash_tracking is False
    assert Subscriber.objects.get().crash_tracking is False


def test_a_worker_that_starts_beside_live_workers_has_no_crash_tracking(start_worker: Start, settings: Any) -> None:
    """Its first handlers run side by side; under crash tracking they would wait for one another until the others have
    beaten."""
    settings.QUEUEAPP = settings.QUEUEAPP | {"HEARTBEAT_INTERVAL": 60}
    foreign_worker()
    foreign_worker(host=host_name(), process=os.getppid(), process_start=process_start_id(os.getppid()))
    side_by_side = threading.Event()
    in_flight: set[int] = set()

    def act(message: Nop) -> None:
        in_flight.add(message.number)
        if len(in_flight) >= 2:
            side_by_side.set()
        side_by_side.wait(DEADLINE)

    consumer(Leased, name="tests", attempts=1)(act)
    Leased.send_many(Nop(number, "") for number in range(12))

    worker = start_worker(Leased, heartbeat=True, concurrency=4)

    assert worker.pump.crash_tracking is False
    eventually(side_by_side.is_set)
    eventually(lambda: worker.pump.stats.handled == 12)


def test_a_worker_that_finds_dead_ones_of_its_host_is_crash_tracking_until_each_shows_that_it_lives(
    start_worker: Start,
) -> None:
    first, second = dead_here(), dead_here()
    worker = start_worker(Leased, heartbeat=True)
    assert worker.pump.crash_tracking is True

    Subscriber.objects.filter(pk=first.pk).update(heartbeat_at=Now())
    eventually(lambda: worker.heartbeat.previous_runs.unconfirmed == {second.pk})  # type: ignore[union-attr]
    assert worker.pump.crash_tracking is True

    Subscriber.objects.filter(pk=second.pk).update(heartbeat_at=Now())
    eventually(lambda: not worker.pump.crash_tracking)


def test_a_worker_of_this_host_without_proof_of_life_starts_crash_tracking(start_worker: Start) -> None:
    foreign_worker(host=host_name(), process=os.getppid())  # of an older version: it may be any process
    foreign_worker(Transactional, host=host_name(), process=2**22 + 1, process_start="some boot:1")

    assert start_worker(Leased, heartbeat=True).pump.crash_tracking is True
    assert start_worker(Transactional, heartbeat=True).pump.crash_tracking is True


def test_a_worker_of_another_host_that_misses_its_heartbeats_starts_crash_tracking(
    start_worker: Start, settings: Any
) -> None:
    settings.QUEUEAPP = settings.QUEUEAPP | {"HEARTBEAT_INTERVAL": 1}
    late = foreign_worker()
    worker = start_worker(Leased, heartbeat=True)
    assert worker.pump.crash_tracking is False

    eventually(lambda: worker.pump.crash_tracking)
    Subscriber.objects.filter(pk=late.pk).update(heartbeat_at=Now())
    eventually(lambda: not worker.pump.crash_tracking)


def test_a_process_has_one_life() -> None:
    first = process_start_id(os.getpid())
    assert first == process_start_id(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert process_start_id(child.pid) not in (None, first)
        assert is_running(child.pid)
        child.send_signal(signal.SIGSTOP)
        eventually(lambda: not is_running(child.pid))
        child.kill()
        # Dead and not waited for is dead: its row must not count as that of a living worker.
        eventually(lambda: process_start_id(child.pid) is None)
    finally:
        child.communicate()
    assert process_start_id(child.pid) is None


def test_a_worker_that_deregisters_starts_no_crash_tracking(start_worker: Start) -> None:
    leaving = dead_here()
    worker = start_worker(Leased, heartbeat=True)
    assert worker.pump.crash_tracking is True

    leaving.delete()

    eventually(lambda: not worker.pump.crash_tracking)


def test_crash_tracking_lasts_while_the_queue_has_a_dead_subscriber(start_worker: Start) -> None:
    dead = foreign_worker(alive=False)
    worker = start_worker(Leased, heartbeat=True)

    assert worker.pump.crash_tracking is True
    eventually(lambda: Subscriber.objects.get(pk=worker.pump.subscriber).crash_tracking)

    dead.delete()
    foreign_worker(Transactional, alive=False)
    eventually(lambda: not worker.pump.crash_tracking)


def test_a_dead_subscriber_does_not_extend_crash_tracking_for_ever(start_worker: Start, settings: Any) -> None:
    settings.QUEUEAPP = settings.QUEUEAPP | {"CRASH_TRACKING_PERIOD": 2, "DEAD_AFTER": 2}
    foreign_worker(alive=False)

    for _ in range(2):  # each start of a tree tracks crashes at first, however long the other one has been dead
        worker = start_worker(Leased, heartbeat=True)
        assert worker.pump.crash_tracking is True
        eventually(lambda it=worker: not it.pump.crash_tracking)  # type: ignore[misc]

    assert Subscriber.objects.filter(alive_until__lt=Now()).exists()


def test_crash_tracking_lasts_for_the_period_of_the_queue(start_worker: Start) -> None:
    worker = start_worker(Leased, heartbeat=True)
    assert not worker.pump.crash_tracking

    QueueControl.objects.create(queue="testapp.Leased", crash_tracking_until=Now() + timedelta(hours=1))
    eventually(lambda: worker.pump.crash_tracking)

    QueueControl.objects.update(crash_tracking_until=Now() - timedelta(seconds=1))
    eventually(lambda: not worker.pump.crash_tracking)


def test_workers_under_crash_tracking_record_each_delivery_and_handle_everything_once(start_worker: Start) -> None:
    queue = Transactional
    QueueControl.objects.create(queue=queue._meta.label, crash_tracking_until=Now() + timedelta(hours=1))
    handled: list[int] = []
    handed_out: list[int] = []
    second_connection = connections["default"].copy()
    second_connection.inc_thread_sharing()

    def act(message: Nop) -> None:
        handled.append(message.number)
        with second_connection.cursor() as cursor:
            cursor.execute(f'SELECT count(*) FROM "{queue._meta.db_table}" WHERE deliveries = 1')
            handed_out.append(cursor.fetchone()[0])

    consumer(queue, name="tests")(act)
    queue.send_many(Nop(number, "") for number in range(100))
    start_worker(queue, heartbeat=True, concurrency=1)

    eventually(lambda: not queue.objects.exists())

    second_connection.close()

    assert sorted(handled) == list(range(100))
    assert min(handed_out) > 0, "others see it before the handler runs"
    assert max(handed_out) <= SMALL_BATCH


def test_a_database_that_is_away_is_waited_for(start_worker: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        heartbeats, "CircuitBreaker", lambda name, **names: CircuitBreaker(name, failing_wait=timedelta(0), **names)
    )
    really_beat = Heartbeat.write_rows
    errors = [OperationalError("away")] * 3

    def beat(self: Heartbeat) -> None:
        if errors:
            raise errors.pop()
        really_beat(self)

    monkeypatch.setattr(Heartbeat, "write_rows", beat)
    pump = QueuePump(Leased, "default", stopping=threading.Event())
    heartbeat = Heartbeat("default", [pump], uuid.uuid4())
    heartbeat.start()

    eventually(heartbeat.begun.is_set)
    assert heartbeat.stop(DEADLINE)

    assert Subscriber.objects.count() == 1
    heartbeat.deregister()
