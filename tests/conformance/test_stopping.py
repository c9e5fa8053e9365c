"""A stop lets handlers and policies finish; a stop that cannot wait interrupts handlers and gives their messages
back."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from time import monotonic
from typing import Any

from queueapp import Context, Discard, consumer
from tests.conformance.endpoint import Endpoint, Note, modes
from tests.conformance.gate import Gate
from tests.in_process_worker import DEADLINE, eventually
from workers.receiving.handlers import WorkerStopped


def spin() -> None:
    """Run until interrupted."""
    deadline = monotonic() + DEADLINE
    while monotonic() < deadline:
        pass
    raise AssertionError("the handler was not interrupted")


@modes("NRS")
def test_when_stopping_on_message_should_let_it_complete(endpoint: Endpoint) -> None:
    gate = Gate()
    endpoint.handle(gate.enter)
    endpoint.send(1)
    worker = endpoint.start()
    eventually(lambda: gate.inside == 1)

    worker.ask_to_stop()
    endpoint.send(2)
    gate.let(2)
    worker.stop()

    assert endpoint.calls == [(1, 1)]
    assert endpoint.rows.count() == 1, "what was sent meanwhile waits, what was being handled is done"


@modes("NRS")
def test_when_stopping_on_error_should_let_it_complete(endpoint: Endpoint) -> None:
    gate = Gate()

    def act(message: Note, context: Context) -> None:
        raise ValueError

    def policy(failure: Any) -> Any:
        gate.enter()
        return Discard("seen")

    endpoint.handle(act, policy=policy)
    endpoint.send(1)
    worker = endpoint.start()
    eventually(lambda: gate.inside == 1)

    worker.ask_to_stop()
    gate.let(1)
    worker.stop()

    assert gate.passed == 1
    assert endpoint.is_empty(), "the verdict was carried out"


@modes("RS")
def test_when_cancelling_stop_on_message_should_interrupt_it_and_give_the_message_back(endpoint: Endpoint) -> None:
    interrupted: list[type] = []
    started = threading.Event()

    def act(message: Note, context: Context) -> None:
        try:
            started.set()
            spin()
        except WorkerStopped:
            interrupted.append(WorkerStopped)
            raise

    endpoint.handle(act, policy=lambda failure: Discard("never asked"))
    endpoint.send(1)
    worker = endpoint.start()
    assert started.wait(DEADLINE)

    worker.ask_to_stop()
    assert worker.cancel() == 1
    worker.stop()

    assert interrupted == [WorkerStopped]
    assert endpoint.failures == [], "a cancelled handler has not failed"
    row = endpoint.rows.get()
    assert (row.deliveries, row.cancels, row.lease_token) == (0, 0, None)


@modes("N")
def test_when_cancelling_stop_on_message_at_most_once_should_keep_it_as_poison(endpoint: Endpoint) -> None:
    started = threading.Event()

    def act(message: Note, context: Context) -> None:
        started.set()
        spin()

    endpoint.handle(act, policy=lambda failure: Discard("never asked"))
    endpoint.send(1)
    worker = endpoint.start()
    assert started.wait(DEADLINE)

    assert worker.cancel() == 1
    worker.stop()

    assert endpoint.failures == []
    assert endpoint.poison.get().reason.startswith("at-most-once, not retried: ")


@modes("RS")
def test_when_stop_is_cancelled_should_interrupt_what_the_handler_made_of_it_all_the_same(endpoint: Endpoint) -> None:
    started = threading.Event()

    def act(message: Note, context: Context) -> None:
        try:
            started.set()
            spin()
        except Exception as error:
            raise RuntimeError("the handler's own view of it") from error

    endpoint.handle(act, policy=lambda failure: Discard("never asked"))
    endpoint.send(1)
    worker = endpoint.start()
    assert started.wait(DEADLINE)

    worker.cancel()
    worker.stop()

    assert endpoint.failures == []
    assert endpoint.rows.count() == 1


@modes("RS")
def test_when_cancelling_stop_on_async_message_should_cancel_its_coroutine(endpoint: Endpoint) -> None:
    cancelled: list[bool] = []
    started = threading.Event()

    async def act(message: Note, context: Context) -> None:
        try:
            started.set()
            await asyncio.sleep(DEADLINE)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    consumer(endpoint.queue, policy=lambda failure: endpoint.failures.append(failure))(act)
    endpoint.send(1)
    worker = endpoint.start()
    assert started.wait(DEADLINE)

    assert worker.cancel() == 1
    worker.stop()

    assert cancelled == [True]
    assert endpoint.failures == []
    assert endpoint.rows.get().deliveries == 0


@modes("RS")
def test_when_handler_ends_well_in_spite_of_the_cancelled_stop_should_end_the_message(endpoint: Endpoint) -> None:
    started = threading.Event()

    def act(message: Note, context: Context) -> None:
        with contextlib.suppress(WorkerStopped):
            started.set()
            spin()

    endpoint.handle(act)
    endpoint.send(1)
    worker = endpoint.start()
    assert started.wait(DEADLINE)

    worker.cancel()
    worker.stop()

    assert endpoint.is_empty()
    assert worker.pump.stats.handled == 1


@modes("R")
def test_when_stopping_with_a_batch_in_flight_should_give_back_what_was_not_started(endpoint: Endpoint) -> None:
    gate = Gate()

    def act(message: Note, context: Context) -> None:
        if message.number >= 60:
            gate.enter()

    endpoint.handle(act)
    endpoint.send_many(200)
    worker = endpoint.start(concurrency=1)
    eventually(lambda: gate.inside == 1)

    worker.ask_to_stop()
    gate.let(1)
    worker.stop()

    assert endpoint.numbers == list(range(61))
    remaining = endpoint.rows.values_list("deliveries", "lease_token")
    assert list(remaining) == [(0, None)] * 139


@modes("NRS")
def test_when_stopping_before_anything_was_sent_should_complete(endpoint: Endpoint) -> None:
    endpoint.handle()
    worker = endpoint.start()

    worker.stop()

    assert not worker.running
