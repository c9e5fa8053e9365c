"""A handler whose body has not run when it returns: it is run to its end, or the attempt has failed. Never is it
lost."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from time import monotonic
from typing import Any

import pytest
from django.db import connections

from queueapp import Context, Poison, consumer
from queueapp.sql import backend_of
from tests.conformance.endpoint import Endpoint, Note, modes
from tests.conformance.gate import Gate
from tests.in_process_worker import DEADLINE, eventually
from tests.testapp.models import Effect
from workers.receiving import handlers


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """What decorators look like that know nothing of async functions."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    return call


@modes("NRS")
def test_when_a_sync_wrapper_returns_a_coroutine_should_run_it(endpoint: Endpoint) -> None:
    async def act(message: Note, context: Context) -> None:
        await asyncio.sleep(0)
        endpoint.calls.append((message.number, context.attempt))

    consumer(endpoint.queue)(wrapped(act))
    endpoint.send_many(3)
    endpoint.start()

    endpoint.wait_until_empty()
    eventually(lambda: endpoint.numbers == [0, 1, 2])


@modes("NRS")
@pytest.mark.parametrize("with_context", [False, True])
def test_when_a_plain_function_returns_an_awaitable_should_await_it(endpoint: Endpoint, with_context: bool) -> None:
    class Later:
        def __init__(self, message: Note) -> None:
            self.number = message.number

        def __await__(self) -> Any:
            yield from asyncio.sleep(0).__await__()
            endpoint.calls.append((self.number, 1))

    def alone(message: Note) -> Awaitable[None]:
        return Later(message)

    def act(message: Note, context: Context) -> Awaitable[None]:
        return Later(message)

    consumer(endpoint.queue)(act if with_context else alone)
    endpoint.send(7)
    endpoint.start()

    endpoint.wait_until_empty()
    eventually(lambda: endpoint.numbers == [7])


@modes("NRS")
def test_when_an_async_handler_returns_a_coroutine_should_run_that_too(endpoint: Endpoint) -> None:
    async def inner(message: Note) -> None:
        await asyncio.sleep(0)
        endpoint.calls.append((message.number, 1))

    async def act(message: Note) -> Any:
        return inner(message)

    consumer(endpoint.queue)(act)
    endpoint.send(1)
    endpoint.start()

    endpoint.wait_until_empty()
    eventually(lambda: endpoint.numbers == [1])


@modes("NRS")
def test_when_what_is_awaited_raises_should_fail_the_attempt(endpoint: Endpoint) -> None:
    async def act(message: Note) -> None:
        await asyncio.sleep(0)
        raise LookupError("in the coroutine")

    consumer(endpoint.queue, attempts=1)(wrapped(act))
    endpoint.send(1)
    endpoint.start()

    assert eventually(endpoint.poison.first).exception_message == "in the coroutine"


@modes("S")
def test_when_a_sync_wrapper_returns_a_coroutine_should_be_in_the_transaction_of_the_receive(
    endpoint: Endpoint,
) -> None:
    async def act(message: Note, context: Context) -> None:
        await Effect.objects.using(endpoint.alias).acreate(name=f"attempt {context.attempt}")
        if context.attempt == 1:
            raise ValueError("after the write")

    consumer(endpoint.queue)(wrapped(act))
    endpoint.send(1)
    endpoint.start()

    endpoint.wait_until_empty()

    assert Effect.objects.using(endpoint.alias).get().name == "attempt 2"


@modes("NRS")
def test_when_what_is_awaited_passes_the_time_limit_should_interrupt_it(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one time limit for both parts: what is awaited has none of its own here, that would begin when it
    does."""
    timeout = asyncio.timeout
    monkeypatch.setattr(handlers.asyncio, "timeout", lambda delay: timeout(None))
    cancelled: list[bool] = []

    async def act(message: Note) -> None:
        try:
            await asyncio.sleep(DEADLINE)
        except asyncio.CancelledError:
            cancelled.append(True)
            # Cleaning up on the handler's own connection works: its thread waits for it, and is not interrupted.
            await Effect.objects.using(endpoint.alias).acount()
            raise

    def slow(message: Note) -> Awaitable[None]:
        end = monotonic() + 0.2
        while monotonic() < end:
            pass
        return act(message)

    consumer(endpoint.queue, timeout=0.9, attempts=1)(slow)
    endpoint.send(1)
    endpoint.start()

    poisoned = eventually(endpoint.poison.first)

    assert poisoned.exception_type == "workers.receiving.handlers.TimeLimitExceeded"
    assert cancelled == [True]


@modes("RS")
def test_when_the_worker_has_to_stop_should_give_back_what_is_awaited(endpoint: Endpoint) -> None:
    begun = Gate()

    async def act(message: Note) -> None:
        begun.inside += 1
        await asyncio.sleep(DEADLINE)

    consumer(endpoint.queue)(wrapped(act))
    endpoint.send(1)
    worker = endpoint.start()
    eventually(lambda: begun.inside)

    assert worker.cancel() == 1
    eventually(lambda: not worker.running)

    row = endpoint.rows.get()
    assert (row.deliveries, row.lease_token) == (0, None)


@modes("NRS")
@pytest.mark.parametrize("kind", ["generator", "generator expression", "async generator", "of an async function"])
def test_when_a_handler_returns_a_generator_should_fail_the_attempt(endpoint: Endpoint, kind: str) -> None:
    def steps(message: Note) -> Iterator[int]:
        endpoint.calls.append((message.number, 1))
        yield 1

    async def async_steps(message: Note) -> AsyncIterator[int]:
        endpoint.calls.append((message.number, 1))
        yield 1

    def act(message: Note) -> Any:
        if kind == "generator":
            return steps(message)
        return (item for item in [message]) if kind == "generator expression" else async_steps(message)

    async def async_act(message: Note) -> Any:
        return steps(message)

    handler = async_act if kind == "of an async function" else act
    reported: list[Any] = []

    def policy(failure: Any) -> Any:
        reported.append(failure.exception)
        return Poison(str(failure.exception))

    consumer(endpoint.queue, name="steps", policy=policy)(handler)
    endpoint.send(1)
    endpoint.start()

    poisoned = eventually(endpoint.poison.first)

    assert "generator" in poisoned.reason
    assert "body did not run" in poisoned.reason
    assert endpoint.calls == []
    assert backend_of(connections[endpoint.alias]).now(connections[endpoint.alias])


@modes("NRS")
@pytest.mark.parametrize("value", [0, "text", [1], object()], ids=["number", "text", "list", "object"])
def test_when_a_handler_returns_any_other_value_should_have_handled_the_message(endpoint: Endpoint, value: Any) -> None:
    def act(message: Note) -> Any:
        endpoint.calls.append((message.number, 1))
        return value

    consumer(endpoint.queue)(act)
    endpoint.send(1)
    endpoint.start()

    endpoint.wait_until_empty()
    eventually(lambda: endpoint.numbers == [1])
    assert not endpoint.poison.exists()
