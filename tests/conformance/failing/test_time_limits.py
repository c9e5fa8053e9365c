"""A handler that runs longer than its time limit is interrupted and has failed, sync or async."""

from __future__ import annotations

import asyncio
import threading
from time import monotonic

from django.db import transaction

from queueapp import Context, Poison, RetryNow, consumer
from tests.conformance.endpoint import Endpoint, Note, modes
from tests.in_process_worker import DEADLINE, eventually
from tests.testapp.models import Effect
from workers.receiving.handlers import TimeLimitExceeded


def spin() -> None:
    """Run until interrupted."""
    deadline = monotonic() + DEADLINE
    while monotonic() < deadline:
        pass
    raise AssertionError("the handler was not interrupted")


@modes("NRS")
def test_when_handler_passes_its_time_limit_should_interrupt_it(endpoint: Endpoint) -> None:
    endpoint.handle(lambda message, context: spin(), timeout=0.1, policy=lambda failure: Poison("late"))
    endpoint.send(1)
    endpoint.start()

    eventually(endpoint.poison.exists)

    assert isinstance(endpoint.failures[0].exception, TimeLimitExceeded)
    assert endpoint.calls == [(1, 1)]


@modes("S")
def test_when_handler_passes_its_time_limit_should_undo_what_it_wrote(endpoint: Endpoint) -> None:
    spinning = threading.Event()

    def act(message: Note, context: Context) -> None:
        Effect.objects.using(endpoint.alias).create(name=f"attempt {context.attempt}")
        if context.attempt == 1:
            spinning.set()
            try:
                spin()
            finally:
                spinning.clear()

    endpoint.handle(act, timeout=0.1)
    endpoint.send(1)
    endpoint.start(limits_hold=spinning.is_set)

    endpoint.wait_until_empty()

    assert Effect.objects.using(endpoint.alias).get().name == "attempt 2"


@modes("NRS")
def test_when_time_limit_interrupts_the_entry_of_an_atomic_block_should_not_touch_the_next_message(
    endpoint: Endpoint,
) -> None:
    entered = threading.Event()

    class Entering(transaction.Atomic):
        """Interrupted before ``with`` has it: its exit never runs."""

        def __enter__(self) -> None:
            super().__enter__()
            entered.set()
            try:
                spin()
            finally:
                entered.clear()

    def act(message: Note, context: Context) -> None:
        Effect.objects.using(endpoint.alias).create(name=f"message {message.number}")
        if message.number == 0:
            with Entering(endpoint.alias, savepoint=True, durable=False):
                raise AssertionError("the handler was not interrupted")

    endpoint.handle(act, timeout=0.1, policy=lambda failure: Poison("late"))
    endpoint.send_many(10)
    endpoint.start(concurrency=1, limits_hold=entered.is_set)

    endpoint.wait_until_empty()

    (failure,) = endpoint.failures
    assert isinstance(failure.exception, TimeLimitExceeded)
    assert endpoint.numbers == list(range(10)), "each of the others was handled once"
    names = set(Effect.objects.using(endpoint.alias).values_list("name", flat=True))
    assert names >= {f"message {number}" for number in range(1, 10)}, "and what it wrote is committed"


@modes("RS")
def test_when_one_handler_passes_its_time_limit_should_not_touch_the_next_message(endpoint: Endpoint) -> None:
    def act(message: Note, context: Context) -> None:
        if message.number % 10 == 0 and context.attempt == 1:
            spin()

    endpoint.handle(act, timeout=0.05, policy=lambda failure: RetryNow())
    endpoint.send_many(40)
    endpoint.start(concurrency=2)

    endpoint.wait_until_empty()

    late = sorted(failure.row.seq for failure in endpoint.failures)
    assert len(late) == 4
    assert len(endpoint.calls) == 44, "each of the others was handled once"


@modes("RS")
def test_when_handler_ends_at_its_time_limit_should_be_one_attempt_or_the_other(endpoint: Endpoint) -> None:
    def act(message: Note, context: Context) -> None:
        end = monotonic() + 0.01
        while monotonic() < end:
            pass

    endpoint.handle(act, timeout=0.01, policy=lambda failure: Poison("late"))
    endpoint.send_many(60)
    endpoint.start(concurrency=2)

    endpoint.wait_until_empty()

    assert endpoint.numbers == list(range(60))
    assert endpoint.poison.count() == len(endpoint.failures)
    assert {type(failure.exception) for failure in endpoint.failures} <= {TimeLimitExceeded}


@modes("NRS")
def test_when_async_handler_passes_its_time_limit_should_interrupt_it(endpoint: Endpoint) -> None:
    cancelled: list[int] = []

    async def act(message: Note) -> None:
        try:
            await asyncio.sleep(DEADLINE)
        except asyncio.CancelledError:
            cancelled.append(message.number)
            raise

    consumer(endpoint.queue, timeout=0.1, attempts=1)(act)
    endpoint.send(1)
    endpoint.start()

    poisoned = eventually(endpoint.poison.first)

    assert cancelled == [1]
    assert poisoned.exception_type == "workers.receiving.handlers.TimeLimitExceeded"


@modes("NRS")
def test_when_async_handler_raises_a_timeout_of_its_own_should_keep_that(endpoint: Endpoint) -> None:
    async def act(message: Note) -> None:
        raise TimeoutError("of another server")

    consumer(endpoint.queue, timeout=10, attempts=1)(act)
    endpoint.send(1)
    endpoint.start()

    poisoned = eventually(endpoint.poison.first)

    assert poisoned.exception_type == "TimeoutError"
    assert poisoned.exception_message == "of another server"


@modes("NRS")
def test_when_async_handler_is_cancelled_by_itself_should_fail_the_attempt(endpoint: Endpoint) -> None:
    async def act(message: Note) -> None:
        raise asyncio.CancelledError("by the handler")

    consumer(endpoint.queue, attempts=1)(act)
    endpoint.send(1)
    worker = endpoint.start()

    poisoned = eventually(endpoint.poison.first)

    assert poisoned.exception_type == "asyncio.exceptions.CancelledError"
    assert worker.running


@modes("NRS")
def test_when_handler_exits_the_interpreter_should_fail_the_attempt(endpoint: Endpoint) -> None:
    def act(message: Note, context: Context) -> None:
        raise SystemExit(3)

    endpoint.handle(act, attempts=1)
    endpoint.send(1)
    worker = endpoint.start()

    poisoned = eventually(endpoint.poison.first)

    assert poisoned.exception_type == "SystemExit"
    assert worker.running


@modes("S")
def test_when_async_handler_uses_the_async_orm_should_be_in_the_transaction_of_the_receive(endpoint: Endpoint) -> None:
    async def act(message: Note, context: Context) -> None:
        await Effect.objects.using(endpoint.alias).acreate(name=f"attempt {context.attempt}")
        await endpoint.queue.asend(Note(endpoint.tag, 2), using=endpoint.alias) if message.number == 1 else None
        if context.attempt == 1 and message.number == 1:
            raise ValueError("after the writes")

    async def note(message: Note, context: Context) -> None:
        endpoint.calls.append((message.number, context.attempt))
        await act(message, context)

    consumer(endpoint.queue)(note)
    endpoint.send(1)
    endpoint.start()

    eventually(lambda: 2 in endpoint.numbers)
    endpoint.wait_until_empty()

    assert endpoint.numbers == [1, 1, 2], "what the failed attempt sent was not delivered"
    names = Effect.objects.using(endpoint.alias).values_list("name", flat=True)
    assert sorted(names) == ["attempt 1", "attempt 2"], "of message 2, and of message 1's second attempt"


@modes("NRS")
def test_when_async_handlers_are_called_should_run_as_many_at_once_as_the_concurrency(endpoint: Endpoint) -> None:
    inside: list[int] = []
    limit: list[int] = []

    async def act(message: Note) -> None:
        inside.append(message.number)
        limit.append(len(inside))
        deadline = monotonic() + DEADLINE
        while len(limit) < 3 and monotonic() < deadline:
            await asyncio.sleep(0.01)
        inside.remove(message.number)

    consumer(endpoint.queue)(act)
    endpoint.send_many(3)
    endpoint.start(concurrency=3)

    eventually(lambda: max(limit, default=0) == 3)
    endpoint.wait_until_empty()
