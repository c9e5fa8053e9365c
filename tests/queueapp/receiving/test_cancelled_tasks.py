"""A task that is cancelled while it receives: wherever it stood, its thread's connection is as it was, and every
message is ended or free.

``cancelled_at`` cancels at the n-th await of a coroutine; the tests take n = 1, 2, ... until the coroutine gets
through. A ``Hold`` stops the thread in the middle of what it does, so that the task is cancelled before, while or after
it does it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connections, transaction

from queueapp import Context, LeaseLost, consumer
from queueapp.consuming.shielded import run_shielded
from queueapp.models import Now
from queueapp.receiving.receive import Receive
from tests.in_process_worker import DEADLINE, Worker, eventually, real_commits
from tests.testapp.messages import Ping
from tests.testapp.models import Effect, Leased, Transactional

pytestmark = real_commits
LEASING = pytest.mark.parametrize("queue", [Leased, Transactional])


class Stepping:
    """Awaits a coroutine and calls ``at`` when it is about to wait for the n-th time."""

    def __init__(self, work: Coroutine[Any, Any, Any], n: int, at: Callable[[], object]) -> None:
        self._work, self._n, self._at = work, n, at

    def __await__(self) -> Generator[Any, Any, Any]:
        waits = 0
        thrown: BaseException | None = None
        while True:
            try:
                waiting = self._work.send(None) if thrown is None else self._work.throw(thrown)
            except StopIteration as end:
                return end.value
            thrown = None
            waits += 1
            if waits == self._n:
                self._at()
            try:
                yield waiting
            except BaseException as error:
                thrown = error


async def cancelled_at(work: Coroutine[Any, Any, Any], n: int, after: float | None = None) -> bool:
    """Cancel the work at its n-th wait, at once or so many seconds ``after`` it; whether it came to that."""

    def cancel() -> None:
        if after is None:
            task.cancel()
        else:
            asyncio.get_running_loop().call_later(after, task.cancel)

    async def stepping() -> Any:
        return await Stepping(work, n, cancel)

    task = asyncio.create_task(stepping())
    with suppress(asyncio.CancelledError):
        await task
    return task.cancelled()


class Hold:
    """Stops what runs on the thread of the async ORM, until it is released."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.go.wait(DEADLINE)

    async def until_reached(self) -> None:
        await asyncio.to_thread(self.reached.wait, DEADLINE)


def assert_nothing_was_left(queue: Any) -> None:
    """On the thread of the async ORM."""
    connection = connections["default"]
    assert not connection.in_atomic_block
    assert connection.get_autocommit()
    assert not connection.savepoint_ids
    if connection.vendor == "postgresql":
        assert connection.connection.info.transaction_status == 0
    Effect.objects.create(name="after it")


async def run(work: Callable[[], Coroutine[Any, Any, Any]], queue: Any) -> Any:
    """Run, look at the thread's connection, and close it."""
    try:
        result = await work()
        await sync_to_async(assert_nothing_was_left)(queue)
        return result
    finally:
        await sync_to_async(connections.close_all)()


def assert_free(queue: Any, count: int) -> None:
    """So many messages are left, and none is leased."""
    assert [row.lease_token for row in queue.objects.all()] == [None] * count
    with queue.receive(100) as batch:
        assert len(list(batch)) == count


async def receive_and_end(queue: Any, ended: list[str]) -> None:
    async with queue.areceive(5, lease_period=timedelta(hours=1)) as batch:
        hows = iter(["ack", "cancel", "expire", "extend"])
        async for message in batch:
            how = next(hows, "")
            if not how:
                break
            await getattr(message, how)()
            ended.append(how)


@LEASING
@pytest.mark.parametrize("when", ["at once", "a little later"])
def test_a_task_may_be_cancelled_at_every_await(queue: Any, when: str) -> None:
    for n in count(1):
        queue.objects.all().delete()
        queue.send_many({"number": number} for number in range(5))
        ended: list[str] = []

        async def work() -> bool:
            after = None if when == "at once" else 0.0003 * (n % 7)  # noqa: B023
            return await cancelled_at(receive_and_end(queue, ended), n, after)  # noqa: B023

        was_cancelled = asyncio.run(run(work, queue))

        if not was_cancelled and (when == "at once" or n > 40):
            assert ended == ["ack", "cancel", "expire", "extend"]
            assert queue.objects.count() == 3
            break
        remaining = queue.objects.count()
        if queue is Transactional and was_cancelled:
            # Cancelled in the block, it is undone as a whole; in its commit, it is not.
            assert remaining in (5, 3)
        else:
            assert remaining in {5, 4, 3}
        assert_free(queue, remaining)
    assert Effect.objects.filter(name="after it").count() == n
    assert n > 5


@LEASING
def test_a_task_that_is_cancelled_while_it_enters_gives_back_what_it_claimed(queue: Any, monkeypatch: Any) -> None:
    hold = Hold()
    claim = Receive._claim

    def claim_and_hold(self: Receive) -> Any:
        rows = claim(self)
        hold()
        return rows

    monkeypatch.setattr(Receive, "_claim", claim_and_hold)
    queue.send_many([{}, {}])

    async def enter() -> None:
        async with queue.areceive(2):
            raise AssertionError("it was cancelled before")

    async def work() -> None:
        task = asyncio.create_task(enter())
        await hold.until_reached()
        for _ in range(3):  # however often
            task.cancel()
            await asyncio.sleep(0)
        hold.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run(work, queue))
    monkeypatch.undo()

    assert_free(queue, 2)
    assert Effect.objects.filter(name="after it").exists()


@LEASING
def test_a_time_limit_around_it_is_still_a_time_limit(queue: Any, monkeypatch: Any) -> None:
    hold = Hold()
    claim = Receive._claim
    monkeypatch.setattr(Receive, "_claim", lambda self: (claim(self), hold())[0])
    queue.send({})

    async def work() -> None:
        async def release() -> None:
            await hold.until_reached()
            await asyncio.sleep(0.05)
            hold.go.set()

        letting = asyncio.create_task(release())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), queue.areceive():
                pass
        await letting

    asyncio.run(run(work, queue))
    monkeypatch.undo()

    assert_free(queue, 1)


@LEASING
@pytest.mark.parametrize("failing", [False, True])
def test_a_task_that_is_cancelled_while_it_leaves_has_left(queue: Any, failing: bool, monkeypatch: Any) -> None:
    hold = Hold()
    leave = Receive.__exit__
    monkeypatch.setattr(Receive, "__exit__", lambda self, *exc: (hold(), leave(self, *exc))[1])
    queue.send_many([{}, {}])

    async def receive() -> None:
        async with queue.areceive(2) as batch:
            async for message in batch:
                await message.ack()
                if failing:
                    raise LookupError
                break

    async def work() -> None:
        task = asyncio.create_task(receive())
        await hold.until_reached()
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        hold.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run(work, queue))
    monkeypatch.undo()

    assert_free(queue, 2 if failing and queue is Transactional else 1)


@LEASING
@pytest.mark.parametrize("place", ["__enter__", "__exit__"])
def test_tasks_that_are_left_over_when_the_loop_ends_leave_nothing(queue: Any, place: str, monkeypatch: Any) -> None:
    hold = Hold()
    original = getattr(Receive, place)
    monkeypatch.setattr(Receive, place, lambda self, *exc: (original(self, *exc), hold())[0])
    queue.send_many([{}, {}])
    tasks: list[asyncio.Task[None]] = []

    async def receive() -> None:
        async with queue.areceive(2):
            pass

    async def main() -> None:
        tasks.append(asyncio.create_task(receive()))
        await hold.until_reached()
        asyncio.get_running_loop().call_later(0.05, hold.go.set)  # while all tasks are being cancelled

    asyncio.run(main())
    asyncio.run(run(lambda: asyncio.sleep(0), queue))  # the thread is the same
    monkeypatch.undo()

    assert tasks[0].cancelled()
    assert_free(queue, 2)


@LEASING
def test_a_task_that_is_cancelled_before_its_turn_on_the_thread_does_nothing(queue: Any) -> None:
    hold = Hold()
    queue.send({})

    async def receive() -> None:
        async with queue.areceive():
            raise AssertionError("it was cancelled before")

    async def work() -> None:
        busy = asyncio.create_task(sync_to_async(hold)())
        await hold.until_reached()
        task = asyncio.create_task(receive())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, DEADLINE)  # though the thread is busy
        hold.go.set()
        await busy

    asyncio.run(run(work, queue))

    assert_free(queue, 1)
    assert queue.objects.get().deliveries == 1, "by the look of this test"


def test_what_the_thread_raised_is_raised() -> None:
    def fail() -> None:
        raise LookupError("on the thread")

    async def work() -> None:
        with pytest.raises(LookupError, match="on the thread"):
            await run_shielded(fail)

    asyncio.run(run(work, Leased))


# -- handlers ------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_other_consumers(no_consumers: None) -> None:
    """Only the consumers that the test registers."""


@pytest.mark.usefixtures("no_other_consumers")
def test_an_async_handler_extends_its_lease() -> None:
    remaining: list[timedelta] = []
    lost: list[LeaseLost] = []

    @consumer(Leased)
    async def handle(message: Ping, context: Context) -> None:
        await context.aextend(timedelta(hours=1))
        row = await Leased.objects.aget()
        remaining.append(
            row.lease_expires - await Leased.objects.annotate(now=Now()).values_list("now", flat=True).aget()
        )
        await Leased.objects.aupdate(lease_token=None, lease_expires=None)
        try:
            await context.aextend()
        except LeaseLost as error:
            lost.append(error)

    Leased.send(Ping())
    worker = Worker(Leased, concurrency=1).start()
    eventually(lambda: lost)
    worker.stop()

    assert remaining[0] > timedelta(minutes=59)


@pytest.mark.usefixtures("no_other_consumers")
def test_a_handler_that_is_cut_off_while_it_receives_leaves_its_threads_connection_as_it_was() -> None:
    Transactional.send_many([{}, {}])
    open_blocks: list[bool] = []

    # More attempts than two: on a busy machine the second one may be over its limit as well, while it connects.
    @consumer(Leased, timeout=0.2, attempts=20, retry_delay=0)
    async def handle(message: Ping, context: Context) -> None:
        open_blocks.append(transaction.get_connection().in_atomic_block)
        if context.attempt == 1:
            async with Transactional.areceive(2) as batch:
                async for item in batch:
                    await item.ack()
                    await asyncio.sleep(DEADLINE)
        await Effect.objects.acreate(name="second attempt")

    Leased.send(Ping())
    worker = Worker(Leased, concurrency=1).start()
    eventually(lambda: not Leased.objects.exists())
    worker.stop()

    assert len(open_blocks) >= 2
    assert not any(open_blocks)
    assert Effect.objects.get().name == "second attempt"
    assert_free(Transactional, 2)
