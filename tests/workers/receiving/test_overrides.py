"""What an operator sets while a worker runs is in force for that worker and for senders, without a restart."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

from queueapp import consumer, overrides, publish_many
from queueapp.models import JournalEntry, Now, QueueControl, Subscriber
from queueapp.operations import control
from queueapp.operations.journal import inactive_messages
from queueapp.services.journal_service import JournalService
from queueapp.services.leader_election import Elector
from queueapp.sql import queue_sql
from queueapp.topics.backfill import Filled, QueueFeeder
from tests.in_process_worker import DEADLINE, Worker, eventually, real_commits
from tests.testapp.leases import Aging
from tests.testapp.messages import Nop
from tests.testapp.models import Capped, Deep, Leased
from workers.receiving.pump import QueuePump
from workers.services.heartbeat import Heartbeat

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers")]


Start = Callable[..., Worker]


@pytest.fixture(autouse=True)
def quick(settings: Any) -> None:
    settings.QUEUEAPP = {
        "PEEK_DELAY": 0.1, "HEARTBEAT_INTERVAL": 0.5, "JOURNAL": {"^journaled": timedelta(days=1)}
    }  # fmt: skip


class Gate:
    """A handler that holds what it is given until it is opened."""

    def __init__(self, queue: Any) -> None:
        self.open, self.inside = threading.Event(), 0
        self._lock = threading.Lock()
        consumer(queue, name="gate")(self._handle)

    def _handle(self, message: Nop) -> None:
        with self._lock:
            self.inside += 1
        self.open.wait(DEADLINE)
        with self._lock:
            self.inside -= 1


@pytest.fixture
def gate() -> Iterator[Callable[[Any], Gate]]:
    made: list[Gate] = []

    def make(queue: Any) -> Gate:
        made.append(Gate(queue))
        return made[-1]

    yield make
    for item in made:
        item.open.set()


def leased(queue: Any) -> int:
    return sum(lease.messages for lease in queue_sql(queue, connection).limits.leases(connection))


def test_max_backlog_set_at_run_time_is_lowered_and_raised_for_a_running_worker(start_worker: Start, gate: Any) -> None:
    held = gate(Capped)
    start_worker(Capped, heartbeat=True, concurrency=6)
    Capped.send_many(Nop(number, "") for number in range(40))
    eventually(lambda: held.inside == 5)

    control.set_option(Capped, "max_backlog", 2)
    worker_has_override(Capped, "max_backlog", 2)
    held.open.set()  # those five go; from now on there are two at a time
    eventually(lambda: leased(Capped) <= 2)
    held.open.clear()
    Capped.send_many(Nop(number, "") for number in range(20))
    eventually(lambda: held.inside == 2)
    assert leased(Capped) == 2

    control.set_option(Capped, "max_backlog", 4)
    eventually(lambda: held.inside == 4)
    held.open.set()
    eventually(lambda: not Capped.objects.exists())


def worker_has_override(queue: Any, name: str, value: Any) -> None:
    eventually(lambda: overrides.effective_value(queue, name, "default") == value)


def test_lease_period_set_at_run_time_holds_for_the_next_claim_of_a_running_worker(
    start_worker: Start, gate: Any
) -> None:
    held = gate(Leased)
    start_worker(Leased, heartbeat=True, renewals=False)
    Leased.send(Nop(1, ""))
    eventually(lambda: held.inside == 1)

    control.set_option(Leased, "lease_period", timedelta(hours=3))
    worker_has_override(Leased, "lease_period", timedelta(hours=3))
    for number in (2, 3):  # the second may have gone with a claim that was under way
        Leased.send(Nop(number, ""))
        eventually(lambda number=number: held.inside == number)

    periods = [row.lease_expires - row.enqueued_at for row in Leased.objects.order_by("seq")]
    assert periods[0] < timedelta(hours=1)
    assert periods[2] > timedelta(hours=2)


def test_what_was_set_while_a_heartbeat_was_reading_is_not_taken_back_by_it() -> None:
    """Seen beside four busy loops: for a second the lease period was as before."""
    pump = QueuePump(Leased, "default", stopping=threading.Event())
    heartbeat = Heartbeat("default", [pump], uuid.uuid4())

    def set_then(execute: Any, sql: Any, *given: Any) -> Any:
        result = execute(sql, *given)
        if "crash_tracking_until" in sql and not was_read:
            was_read.append(sql)
            control.set_option(Leased, "lease_period", timedelta(hours=3))
            assert overrides.effective_value(Leased, "lease_period", "default") == timedelta(hours=3)
        return result

    was_read: list[str] = []
    QueueControl.objects.create(queue=Leased._meta.label)
    with connection.execute_wrapper(set_then):
        heartbeat.read_controls()
    assert was_read
    assert overrides.lease_period(Leased, "default") == timedelta(hours=3)
    heartbeat.read_controls()
    assert overrides.lease_period(Leased, "default") == timedelta(hours=3)
    control.set_option(Leased, "lease_period", None)
    heartbeat.read_controls()
    assert overrides.lease_period(Leased, "default") == Leased.delivery.lease_period


def test_concurrency_set_at_run_time_is_in_force_for_a_running_worker(start_worker: Start, gate: Any) -> None:
    held = gate(Leased)
    start_worker(Leased, heartbeat=True, concurrency=1)
    Leased.send_many(Nop(number, "") for number in range(12))
    eventually(lambda: held.inside == 1)

    control.set_concurrency(Leased, 3)
    eventually(lambda: held.inside == 3)
    held.open.set()
    eventually(lambda: not Leased.objects.exists())


def test_paused_at_run_time_a_running_worker_takes_nothing_and_producers_send_on(
    start_worker: Start, gate: Any
) -> None:
    gate(Leased).open.set()
    worker = start_worker(Leased, heartbeat=True)
    Leased.send(Nop(1, ""))
    eventually(lambda: not Leased.objects.exists())

    control.pause(Leased)
    eventually(lambda: worker.pump.paused)
    Leased.send(Nop(2, ""))
    Leased.send_many([Nop(3, "")])
    beaten = Subscriber.objects.get().alive_until
    eventually(lambda: Subscriber.objects.get().alive_until > beaten)
    assert Leased.objects.count() == 2

    control.resume(Leased)
    eventually(lambda: not Leased.objects.exists())


def test_expiration_set_at_run_time_is_in_force_for_a_running_worker(start_worker: Start) -> None:
    """For what waits already and for what is sent from now on; who sends need not know."""
    handled: list[int] = []

    @consumer(Aging, name="noted")
    def note(message: Nop) -> None:
        handled.append(message.number)

    worker = start_worker(Aging, heartbeat=True)
    control.pause(Aging)
    eventually(lambda: worker.pump.paused)
    Aging.send(Nop(1, ""))
    Aging.objects.update(enqueued_at=Now() - timedelta(minutes=5))
    Aging.send(Nop(2, ""))

    control.set_option(Aging, "expiration", timedelta(minutes=1))
    worker_has_override(Aging, "expiration", timedelta(minutes=1))
    control.resume(Aging)
    eventually(lambda: handled)
    assert handled == [2]
    # The first is over, and maintenance removes it. The second's ack comes after its handler.
    eventually(lambda: Aging.objects.count() == 1)

    control.set_option(Aging, "expiration", None)
    eventually(lambda: handled == [2, 1])
    eventually(lambda: not Aging.objects.exists())


@pytest.fixture
def topped_up() -> Iterator[None]:
    """Deep is filled from the journal."""
    service = JournalService("default", [Deep], Elector("default", "journal of a test", uuid.uuid4()))
    service.start()
    yield
    service.stop(DEADLINE)


@pytest.mark.usefixtures("topped_up")
def test_target_queue_depth_set_at_run_time_is_in_force_for_who_tops_up() -> None:
    """And publishers write into the journal alone, whatever it is."""
    publish_many("journaled.deep", ({"n": n} for n in range(3000)))
    eventually(lambda: Deep.objects.count() == 1000)
    control.set_option(Deep, "target_queue_depth", 1500)
    eventually(lambda: Deep.objects.count() == 1500)
    publish_many("journaled.deep", ({"n": n} for n in range(10)))
    assert inactive_messages(Deep, "default") == (1510, True)
    assert JournalEntry.objects.count() == 3010


@pytest.mark.usefixtures("topped_up")
def test_target_queue_depth_raised_when_the_queue_has_just_been_found_full_is_in_force(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen to fail: the queue was taken to be full with the new depth, and stayed as it was until it was half empty."""
    fill, raised = QueueFeeder.fill, []

    def fill_and_raise(feeder: QueueFeeder) -> Filled:
        filled = fill(feeder)
        if filled.full_with is not None and not raised:
            raised.append(control.set_option(Deep, "target_queue_depth", 1500))
        return filled

    monkeypatch.setattr(QueueFeeder, "fill", fill_and_raise)
    publish_many("journaled.deep", ({"n": n} for n in range(3000)))
    eventually(lambda: Deep.objects.count() == 1500)
    assert raised == [True]
