"""What an operator does to a queue takes effect on its workers, within a peek delay."""

from __future__ import annotations

from queueapp.models import QueueControl
from queueapp.operations import control
from tests.conformance.endpoint import Endpoint, modes
from tests.conformance.gate import Gate
from tests.in_process_worker import eventually


@modes("NRS")
def test_when_queue_is_paused_should_handle_nothing_until_it_is_resumed(endpoint: Endpoint) -> None:
    endpoint.handle()
    worker = endpoint.start(heartbeat=True)
    endpoint.send(1)
    eventually(lambda: endpoint.numbers == [1])

    control.pause(endpoint.queue, using=endpoint.alias)
    eventually(lambda: worker.pump.paused)
    endpoint.send(2)
    peeks = worker.pump.stats.peeks
    control.resume(endpoint.queue, using=endpoint.alias)

    eventually(lambda: endpoint.numbers == [1, 2])
    assert worker.pump.stats.peeks >= peeks


@modes("NRS")
def test_when_queue_is_paused_before_the_worker_starts_should_receive_nothing(endpoint: Endpoint) -> None:
    endpoint.handle()
    endpoint.send(1)
    control.pause(endpoint.queue, using=endpoint.alias)
    worker = endpoint.start(heartbeat=True)
    eventually(lambda: worker.pump.paused)
    worker.stop()

    assert worker.pump.stats.received == 0
    assert endpoint.rows.count() == 1


@modes("NRS")
def test_when_queue_is_paused_while_handling_should_end_what_is_in_flight_and_take_no_more(endpoint: Endpoint) -> None:
    gate = Gate()
    endpoint.handle(gate.enter)
    endpoint.send_many(10)
    worker = endpoint.start(heartbeat=True, concurrency=2)
    eventually(lambda: gate.inside == 2)

    control.pause(endpoint.queue, using=endpoint.alias)
    eventually(lambda: worker.pump.paused)
    gate.let(10)
    eventually(lambda: gate.passed == 2)
    worker.stop()

    assert len(endpoint.calls) == 2
    assert endpoint.rows.count() == 8


@modes("NRS")
def test_when_queue_is_purged_on_startup_should_receive_what_comes_after(endpoint: Endpoint) -> None:
    endpoint.handle()
    endpoint.send_many(5)

    assert control.purge(endpoint.queue, using=endpoint.alias).deleted == 5
    endpoint.send(7)
    endpoint.start()

    eventually(lambda: endpoint.numbers == [7])
    endpoint.wait_until_empty()


@modes("RS")
def test_when_queue_is_purged_should_leave_what_a_receiver_holds(endpoint: Endpoint) -> None:
    gate = Gate()
    endpoint.handle(gate.enter)
    endpoint.send_many(10)
    endpoint.start(concurrency=1)
    eventually(lambda: gate.inside == 1)

    purged = control.purge(endpoint.queue, using=endpoint.alias)
    gate.let(1)

    endpoint.wait_until_empty()
    assert (purged.deleted, purged.complete) == (9, True)
    assert len(endpoint.calls) == 1


@modes("NRS")
def test_when_queue_is_paused_twice_should_state_that_it_was_paused_already(endpoint: Endpoint) -> None:
    assert control.pause(endpoint.queue, using=endpoint.alias) is True
    assert control.pause(endpoint.queue, using=endpoint.alias) is False
    assert QueueControl.objects.using(endpoint.alias).get().paused
    assert control.resume(endpoint.queue, using=endpoint.alias) is True
    assert control.resume(endpoint.queue, using=endpoint.alias) is False
