"""Limits, fairness and filters in workers of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction

from queueapp import consumer
from queueapp.messages import new_id
from queueapp.models import PoisonMessage, QueueControl, Subscriber
from queueapp.operations import control
from queueapp.services.orphaned_leases import release_orphaned_leases
from queueapp.sql import queue_sql
from queueapp.sql.claims import SeqRange
from tests.in_process_worker import Worker, eventually, real_commits
from tests.testapp.messages import Nop, Ping
from tests.testapp.models import (
    Capped,
    CappedEach,
    CappedOnce,
    CappedTransactional,
    InProportion,
    InTurns,
    InTurnsOnce,
    Leased,
)

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers")]


Start = Callable[..., Worker]


@pytest.fixture(autouse=True)
def quick(settings: Any) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1, "HEARTBEAT_INTERVAL": 0.5, "RETRY_DELAY": 0}


class Gate:
    """A handler that counts how many of it run at once, and waits until it is let through."""

    def __init__(self, queue: Any, fails: bool = False) -> None:
        self.open = threading.Event()
        self.inside = self.max_running = self.ended = 0
        self.numbers: list[int] = []
        self._fails = fails
        self._lock = threading.Lock()
        consumer(queue, name="gate")(self._handle)

    def _handle(self, message: Nop) -> None:
        with self._lock:
            self.inside += 1
            self.max_running = max(self.max_running, self.inside)
            self.numbers.append(message.number)
        self.open.wait(30)
        with self._lock:
            self.inside -= 1
            self.ended += 1
        if self._fails:
            raise ValueError("on request")


@contextmanager
def never_more_out(queue: Any, limit: int) -> Iterator[list[int]]:
    """While the block runs no look from outside finds more leased messages than this. What the looks saw is
    returned."""
    seen, done = [0], threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.append(sum(lease.messages for lease in queue_sql(queue, connection).limits.leases(connection)))
        connection.close()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join(30)
        assert max(seen) <= limit


@pytest.mark.parametrize("queue", [Capped, CappedOnce])
def test_max_backlog_holds_for_all_workers_together(start_worker: Start, queue: Any) -> None:
    gate, max_backlog = Gate(queue), queue.delivery.max_backlog
    queue.send_many(Nop(number, "") for number in range(60))
    with never_more_out(queue, max_backlog):
        for _ in range(3):
            start_worker(queue, heartbeat=True, concurrency=4)
        eventually(
            lambda: (
                sum(lease.messages for lease in queue_sql(queue, connection).limits.leases(connection)) == max_backlog
            )
        )
        gate.open.set()
        eventually(lambda: not queue.objects.exists())
    assert gate.ended == 60


def test_max_backlog_of_a_transactional_queue_bounds_its_open_handlers(start_worker: Start) -> None:
    gate = Gate(CappedTransactional)
    CappedTransactional.send_many(Nop(number, "") for number in range(20))
    for _ in range(2):
        start_worker(CappedTransactional, heartbeat=True, concurrency=4)
    eventually(lambda: gate.inside == 3)
    with CappedTransactional.receive(max_backlog=5) as batch:
        assert len(batch) == 0
    gate.open.set()
    eventually(lambda: not CappedTransactional.objects.exists())
    assert (gate.max_running, gate.ended) == (3, 20)


def test_slow_handlers_claim_no_batch_of_what_other_receivers_could_handle(start_worker: Start) -> None:
    """Of five messages in flight two receivers had all, and the others none: half the rate."""
    slow, batches = threading.Event(), []

    @consumer(Capped, name="slow")
    def handle(message: Ping) -> None:
        slow.wait(0.02)

    start_worker(Capped, heartbeat=True, concurrency=Capped.delivery.max_backlog + 1)
    Capped.send_many(Ping(str(number)) for number in range(200))

    def drained() -> bool:
        batches.extend(lease.messages for lease in queue_sql(Capped, connection).limits.leases(connection))
        return not Capped.objects.exists()

    eventually(drained, 60)
    assert max(batches) == 1


def test_a_process_at_its_backlog_calls_no_receiver_that_could_claim_nothing(start_worker: Start) -> None:
    gate = Gate(CappedEach)
    CappedEach.send_many(Nop(number, "") for number in range(600))
    worker = start_worker(CappedEach, backlog=1, heartbeat=True, concurrency=4)
    eventually(lambda: gate.inside == 1)
    peeks = worker.pump.stats.peeks
    eventually(lambda: worker.pump.stats.peeks >= peeks + 3)
    assert len(worker.pump.receivers) == 1
    gate.open.set()
    eventually(lambda: gate.ended > 300)
    assert len(worker.pump.receivers) == 1
    assert worker.pump.stats.peeks < peeks + 300, "none for each message"


def test_max_backlog_bounds_receive_as_well(start_worker: Start) -> None:
    Capped.send_many({"n": n} for n in range(9))
    with Capped.receive(max_backlog=3) as first, Capped.receive(max_backlog=9) as second, Capped.receive() as third:
        assert [len(batch) for batch in (first, second, third)] == [3, 2, 0]
        for message in first:
            message.ack()
        with Capped.receive(max_backlog=9) as fourth:
            assert len(fourth) == 3


def test_max_backlog_wakes_who_waits_for_room(start_worker: Start, settings: Any) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 30.0, "HEARTBEAT_INTERVAL": 0.5}
    gate = Gate(Capped)
    gate.open.set()
    worker = start_worker(Capped, heartbeat=True, listener=True)
    eventually(lambda: worker.pump.stats.peeks)
    with Capped.receive(max_backlog=5):
        pass
    Capped.send_many(Nop(number, "") for number in range(40))
    eventually(lambda: not Capped.objects.exists(), 20)


def test_max_backlog_set_at_run_time_is_in_force_for_workers(start_worker: Start) -> None:
    gate = Gate(Capped)
    control.set_option(Capped, "max_backlog", 2)
    start_worker(Capped, heartbeat=True, concurrency=6)
    Capped.send_many(Nop(number, "") for number in range(20))
    eventually(lambda: gate.inside == 2)
    control.set_option(Capped, "max_backlog", None)
    eventually(lambda: gate.inside == 5)
    gate.open.set()
    eventually(lambda: not Capped.objects.exists())
    assert gate.max_running == 5


def test_lease_period_set_at_run_time_is_in_force_for_workers_and_receive(start_worker: Start) -> None:
    gate = Gate(Leased)
    control.set_option(Leased, "lease_period", timedelta(hours=1))
    worker = start_worker(Leased, heartbeat=True)
    Leased.send_many([Nop(1, "")])
    eventually(lambda: gate.inside)
    row = Leased.objects.get()
    assert row.lease_expires is not None
    assert row.lease_expires - row.enqueued_at > timedelta(minutes=50)
    gate.open.set()
    eventually(lambda: not Leased.objects.exists())
    worker.stop()  # it would look at the next message, and have it for a moment
    control.set_option(Leased, "lease_period", timedelta(hours=2))
    Leased.send_many([{"n": 1}])
    with transaction.atomic(), Leased.receive():
        row = Leased.objects.get()
        assert row.lease_expires is not None
        assert row.lease_expires - row.enqueued_at > timedelta(minutes=110)


def test_max_per_subscription_backlog_holds_for_each_process(start_worker: Start) -> None:
    gate = Gate(CappedEach)
    CappedEach.send_many(Nop(number, "") for number in range(30))
    workers = [start_worker(CappedEach, heartbeat=True, concurrency=6) for _ in range(2)]

    def held() -> list[int]:
        owners = CappedEach.objects.filter(lease_token__isnull=False).values_list("lease_owner", flat=True)
        return [list(owners).count(worker.pump.subscriber) for worker in workers]

    eventually(lambda: held() == [4, 4])
    assert gate.max_running <= 8
    gate.open.set()
    eventually(lambda: not CappedEach.objects.exists())
    assert set(Subscriber.objects.values_list("backlog", flat=True)) == {4}


def test_max_per_subscription_backlog_bounds_one_receive() -> None:
    CappedEach.send_many({"n": n} for n in range(9))
    with CappedEach.receive(max_backlog=100) as batch, CappedEach.receive(max_backlog=100) as second_batch:
        assert (len(batch), len(second_batch)) == (4, 4)


def test_a_declared_backlog_is_bounded_by_the_queues(start_worker: Start) -> None:
    Gate(CappedEach).open.set()
    start_worker(CappedEach, heartbeat=True, backlog=2)
    start_worker(CappedEach, heartbeat=True, backlog=20)
    eventually(lambda: set(Subscriber.objects.values_list("backlog", flat=True)) == {2, 4})


def test_a_backlog_of_0_is_given_no_message(start_worker: Start) -> None:
    gate = Gate(Leased)
    gate.open.set()
    idle = start_worker(Leased, heartbeat=True, backlog=0)
    Leased.send_many(Nop(number, "") for number in range(3))
    eventually(lambda: idle.pump.stats.peeks > 3)
    assert gate.ended == 0
    start_worker(Leased, heartbeat=True)
    eventually(lambda: gate.ended == 3)
    assert idle.pump.stats.received == 0


@pytest.mark.parametrize("queue", [InTurns, InTurnsOnce])
def test_fairness_model_round_robin_gives_every_subscriber_its_turn(start_worker: Start, queue: Any) -> None:
    gate = Gate(queue)
    workers = [start_worker(queue, heartbeat=True, concurrency=2) for _ in range(3)]
    eventually(lambda: all(worker.pump.workers == 3 for worker in workers))
    queue.send_many(Nop(number, "") for number in range(9))
    eventually(lambda: gate.inside == 6)

    def held() -> list[int]:
        owners = list(queue.objects.filter(lease_token__isnull=False).values_list("lease_owner", flat=True))
        return [owners.count(worker.pump.subscriber) for worker in workers]

    eventually(lambda: held() == [3, 3, 3])
    gate.open.set()
    eventually(lambda: not queue.objects.exists())
    assert gate.ended == 9


def test_fairness_model_gives_to_others_what_a_stopped_worker_did_not_come_for(
    start_worker: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InTurns.delivery, "lease_period", timedelta(hours=1))  # no lease expires
    gate = Gate(InTurns)
    leaving, second_worker = (start_worker(InTurns, heartbeat=True, concurrency=1) for _ in range(2))
    eventually(lambda: leaving.pump.workers == second_worker.pump.workers == 2)
    InTurns.send_many(Nop(number, "") for number in range(6))
    eventually(lambda: gate.inside == 2)
    eventually(lambda: InTurns.objects.filter(lease_owner=leaving.pump.subscriber).count() == 3)
    leaving.ask_to_stop()
    gate.open.set()
    leaving.stop()
    assert leaving.heartbeat is not None
    leaving.heartbeat.deregister()
    assert not InTurns.objects.filter(lease_owner=leaving.pump.subscriber).exists()
    eventually(lambda: not InTurns.objects.exists())
    assert gate.ended == 6


def test_semantics_at_most_once_with_a_limit_pending_acks_are_sent_at_deregistration(start_worker: Start) -> None:
    worker = start_worker(CappedOnce, heartbeat=True)
    worker.pump.paused = True
    CappedOnce.send_many({"n": n} for n in range(4))
    # As a worker leaves it whose database did not answer while it stopped.
    queue_sql(CappedOnce, connection).limits.claim_within(
        connection, [SeqRange()], 3, new_id(), worker.pump.subscriber, None, 3
    )
    worker.stop()
    assert worker.heartbeat is not None
    worker.heartbeat.deregister()
    assert not Subscriber.objects.exists()
    assert CappedOnce.objects.count() == 1
    assert not CappedOnce.objects.filter(lease_token__isnull=False).exists()


def test_fairness_model_proportional_fills_each_by_its_backlog(start_worker: Start) -> None:
    gate = Gate(InProportion)
    workers = [start_worker(InProportion, heartbeat=True, backlog=backlog) for backlog in (2, 6)]
    eventually(lambda: all(worker.pump.workers == 2 for worker in workers))
    InProportion.send_many(Nop(number, "") for number in range(4))
    eventually(lambda: gate.inside == 4)
    held = list(InProportion.objects.values_list("lease_owner", flat=True))
    assert [held.count(worker.pump.subscriber) for worker in workers] == [1, 3]
    gate.open.set()
    eventually(lambda: not InProportion.objects.exists())


def test_fairness_model_gives_nothing_to_the_dead(start_worker: Start) -> None:
    gate = Gate(InTurns)
    gate.open.set()
    Subscriber.objects.create(
        queue=InTurns._meta.label, host="gone", process=1, supervisor=new_id(), backlog=100,
        alive_until="2020-01-01T00:00:00Z",
    )  # fmt: skip
    start_worker(InTurns, heartbeat=True)
    InTurns.send_many(Nop(number, "") for number in range(5))
    eventually(lambda: not InTurns.objects.exists())
    assert gate.ended == 5


def test_fairness_model_when_there_is_more_than_room_fills_everybody(start_worker: Start) -> None:
    gate = Gate(InTurns)
    InTurns.send_many(Nop(number, "") for number in range(100))
    workers = [start_worker(InTurns, heartbeat=True, concurrency=12) for _ in range(2)]
    eventually(lambda: gate.inside == 20)
    gate.open.set()
    eventually(lambda: not InTurns.objects.exists())
    assert gate.ended == 100
    assert all(worker.pump.stats.received >= 10 for worker in workers)


def test_filter_of_a_subscriber_leaves_the_rest_to_others(start_worker: Start) -> None:
    gate = Gate(Leased)
    gate.open.set()
    worker = start_worker(Leased, heartbeat=True, filter="/number >= 3000")
    Leased.send_many(Nop(number, "") for number in range(3010))
    eventually(lambda: gate.ended == 10)
    assert min(gate.numbers) == 3000
    eventually(lambda: Leased.objects.count() == 3000)  # a batch is acked behind its last handler
    assert worker.pump.stats.received < 700  # what does not match was walked over, not claimed
    assert worker.pump.state.skipped.types == {}
    assert Subscriber.objects.get().filter == "/number >= 3000"
    start_worker(Leased, heartbeat=True)
    eventually(lambda: not Leased.objects.exists())


def test_filters_and_a_fairness_model_give_each_what_it_takes(start_worker: Start) -> None:
    gate = Gate(InTurns)
    low = start_worker(InTurns, heartbeat=True, filter="/number < 10")
    high = start_worker(InTurns, heartbeat=True, filter="/number >= 15")
    eventually(lambda: low.pump.workers == high.pump.workers == 2)
    InTurns.send_many(Nop(number, "") for number in range(20))
    gate.open.set()
    eventually(lambda: gate.ended == 15)
    eventually(lambda: InTurns.objects.count() == 5)
    eventually(lambda: (low.pump.stats.handled, high.pump.stats.handled) == (10, 5))
    assert sorted(gate.numbers) == [*range(10), *range(15, 20)]


def test_semantics_at_most_once_with_a_limit_keeps_a_failure_as_poison_and_frees_its_place(start_worker: Start) -> None:
    gate = Gate(CappedOnce, fails=True)
    gate.open.set()
    start_worker(CappedOnce, heartbeat=True)
    CappedOnce.send_many(Nop(number, "") for number in range(7))
    eventually(lambda: not CappedOnce.objects.exists())
    assert (gate.ended, PoisonMessage.objects.count()) == (7, 7)
    assert set(PoisonMessage.objects.values_list("deliveries", flat=True)) == {1}


def test_semantics_at_most_once_with_a_limit_is_gone_with_the_subscriber_that_it_was_sent_to() -> None:
    CappedOnce.send_many({"n": n} for n in range(5))
    sql, dead = queue_sql(CappedOnce, connection), new_id()
    Subscriber.objects.create(
        id=dead, queue=CappedOnce._meta.label, host="gone", process=1, supervisor=new_id(), at_most_once=True,
        alive_until="2020-01-01T00:00:00Z",
    )  # fmt: skip
    sql.limits.claim_within(connection, [SeqRange()], 3, new_id(), dead, None, 3)

    release_orphaned_leases("default")

    assert CappedOnce.objects.filter(lease_token__isnull=True).count() == CappedOnce.objects.count() == 2


def test_semantics_at_most_once_with_a_limit_frees_places_of_receive_as_they_are_acked() -> None:
    CappedOnce.send_many({"n": n} for n in range(5))
    with CappedOnce.receive(max_backlog=3) as batch:
        with CappedOnce.receive(max_backlog=3) as none:
            assert len(none) == 0
        next(iter(batch)).ack()
        with CappedOnce.receive(max_backlog=3) as item:
            assert len(item) == 1
    assert CappedOnce.objects.count() == 1
    assert not Subscriber.objects.exists()


def test_what_is_set_for_a_queue_is_taken_back() -> None:
    assert control.set_option(Capped, "max_backlog", 2)
    assert not control.set_option(Capped, "max_backlog", 2)
    assert QueueControl.objects.get().max_backlog == 2
    Capped.send_many({"n": n} for n in range(9))
    with Capped.receive(max_backlog=9) as batch:
        assert len(batch) == 2
    assert control.set_option(Capped, "max_backlog", None)
    with Capped.receive(max_backlog=9) as batch:
        assert len(batch) == 5
