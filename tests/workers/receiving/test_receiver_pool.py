"""The receivers of a queue: which is called, which waits, and which ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.in_process_worker import DEADLINE, eventually
from workers.receiving import receiver_pool as pool_module
from workers.receiving.events import NoPump
from workers.receiving.receiver_pool import ReceiverPool


class Task:
    def bind(self) -> None:
        pass


class Work(NoPump):
    """The events of a pool: its receivers record what they were called for, and wait until the test lets them end."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int | None] = []
        self.may_end = threading.Semaphore(0)
        self.ended = 0
        self.make: Callable[[Any], Any] = lambda slot: Task()
        self.run: Callable[[Any, int | None], None] = self.wait
        self.done: Callable[[], object] = lambda: None

    def make_receiver(self, slot: Any) -> Any:
        return self.make(slot)

    def run_receiver(self, receiver: Any, messages: int | None) -> None:
        self.run(receiver, messages)

    def receiver_done(self) -> None:
        self.done()

    def wait(self, receiver: Any, messages: int | None) -> None:
        self.calls.append(messages)
        assert self.may_end.acquire(timeout=DEADLINE)
        self.ended += 1


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def make(work: Work) -> Iterator[Callable[[int], ReceiverPool]]:
    pools: list[ReceiverPool] = []

    def make(concurrency: int) -> ReceiverPool:
        pools.append(
            ReceiverPool(
                "tests",
                "default",
                work,
                concurrency=concurrency,
                slots=None,
            )
        )
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
        work.may_end.release(100)
        assert pool.join(DEADLINE)


def test_no_more_are_called_than_there_may_be(make: Callable[[int], ReceiverPool], work: Work) -> None:
    pool = make(2)

    assert pool.submit(5, 10) == 2
    assert pool.submit(1) == 0
    eventually(lambda: work.calls == [10, 10])
    assert (pool.busy, pool.idle, pool.assigned) == (2, 0, 0)

    work.may_end.release(2)
    eventually(lambda: pool.idle == 2)
    assert pool.submit(1, 3) == 1
    eventually(lambda: work.calls == [10, 10, 3])


def test_no_receiver_is_called_after_the_end(make: Callable[[int], ReceiverPool], work: Work) -> None:
    pool = make(2)
    pool.close()

    assert pool.submit(1) == 0
    assert pool.busy == 0
    assert pool.join(0), "no thread was started"
    assert work.calls == []


def test_when_it_ends_calls_without_a_receiver_are_dropped(make: Callable[[int], ReceiverPool], work: Work) -> None:
    pool = make(1)
    pool.submit(1)
    eventually(lambda: len(work.calls) == 1)
    pool.busy = 0  # as if it had just ended its work
    assert pool.submit(1, 7) == 1
    assert pool.assigned == 7

    pool.close()

    assert pool.assigned == 0
    assert pool.busy == 0


def test_a_raised_concurrency_is_used_and_a_lowered_one_ends_the_tasks_above_it(
    make: Callable[[int], ReceiverPool], work: Work
) -> None:
    pool = make(1)
    pool.submit(1)
    pool.set_concurrency(3)
    assert pool.submit(5) == 2
    eventually(lambda: len(work.calls) == 3)
    assert pool.may_continue()

    pool.set_concurrency(1)
    assert not pool.may_continue()
    work.may_end.release(3)
    eventually(lambda: len(pool.receivers) == pool.idle == 1)

    assert pool.submit(5) == 1
    eventually(lambda: len(work.calls) == 4)


def test_a_task_that_breaks_is_not_counted_on(make: Callable[[int], ReceiverPool], work: Work) -> None:
    pool = make(2)

    def breaks(task: Any, messages: int | None) -> None:
        raise RuntimeError("a bug")

    work.run = breaks
    pool.submit(2)
    eventually(lambda: not pool.receivers and pool.idle == 2)
    work.run = work.wait

    assert pool.submit(2) == 2
    eventually(lambda: len(work.calls) == 2)


def test_a_task_that_leaves_after_a_while_without_work_has_not_ended_any(
    make: Callable[[int], ReceiverPool], work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "IDLE_SECONDS", 0.05)
    ended: list[None] = []
    pool = make(2)
    work.done = lambda: ended.append(None)
    pool.submit(2)
    eventually(lambda: len(work.calls) == 2)
    work.may_end.release(2)

    eventually(lambda: len(pool.threads) == 1)

    assert len(ended) == 2


def test_a_task_whose_thread_is_left_with_a_running_loop_is_not_waited_for(
    make: Callable[[int], ReceiverPool], work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    """On such a thread Django refuses even to close a connection."""
    pool = make(1)

    def breaks(task: Any, messages: int | None) -> None:
        loop = asyncio.new_event_loop()
        loop.close()
        asyncio._set_running_loop(loop)
        raise RuntimeError("a bug")

    work.run = breaks
    pool.submit(1)
    eventually(lambda: not pool.receivers and pool.idle == 1)

    assert pool.join(DEADLINE)
    assert "could not close" not in caplog.text
    work.run = work.wait
    assert pool.submit(1) == 1
    eventually(lambda: len(work.calls) == 1)


class Door(threading.Condition):
    """Shows when a thread has to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.has_waiter = threading.Event()

    def __enter__(self) -> bool:
        if not self.acquire(blocking=False):
            self.has_waiter.set()
            self.acquire()
        return True


def test_one_that_is_stopped_while_a_thread_is_being_started_waits_for_its_handlers_all_the_same(
    make: Callable[[int], ReceiverPool], work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that was known before it ran could not be joined: the process ended by that error, and cut its
    handlers."""
    pool = make(2)
    pool.condition = door = Door()
    pool.submit(1)
    eventually(lambda: len(work.calls) == 1)
    door.has_waiter.clear()
    joined: list[bool | RuntimeError] = []

    def stop() -> None:
        try:
            joined.append(pool.join(0))
            pool.close()
            joined.append(pool.join(0))
        except RuntimeError as error:
            joined.append(error)

    stopper = threading.Thread(target=stop)
    really_start = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread is not stopper:
            stopper.start()
            eventually(lambda: joined or door.has_waiter.is_set())
        really_start(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    pool.submit(1)
    stopper.join(DEADLINE)

    assert joined == [False, False], "a handler still runs"
    work.may_end.release(2)
    assert pool.join(DEADLINE)
    assert work.ended == len(work.calls)


def test_a_task_that_cannot_be_made_leaves_no_call_behind(make: Callable[[int], ReceiverPool], work: Work) -> None:
    """With a concurrency of one no receiver was ever called again."""
    pool = make(1)
    makes, ended = work.make, list[int]()
    work.done = lambda: ended.append(1)

    def breaks(slot: Any) -> Any:
        raise MemoryError

    work.make = breaks
    pool.submit(1, 7)
    eventually(lambda: not pool.threads)
    assert (pool.assigned, pool.busy, pool.idle) == (0, 0, 1)
    assert not ended, "the next look tries again, and no sooner: each tells why"

    work.make = makes
    assert pool.submit(1, 3) == 1
    eventually(lambda: work.calls == [3])


def test_no_receiver_is_called_that_only_receivers_in_handlers_could_replace(
    make: Callable[[int], ReceiverPool], work: Work, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make(3)
    pool.submit(1)
    eventually(lambda: len(work.calls) == 1)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(3):
            assert pool.submit(2, 7) == 0
            assert (pool.assigned, pool.busy) == (0, 1)
        assert caplog.text.count("can be started") == 1, "and not for each message that is sent"

    assert pool.submit(1) == 1
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert pool.submit(1) == 0
    assert caplog.text.count("can be started") == 2
    assert pool.submit(1) == 1
    eventually(lambda: len(work.calls) == 3)


def test_a_task_that_breaks_while_another_one_is_idle_leaves_it_the_call(
    make: Callable[[int], ReceiverPool], work: Work
) -> None:
    pool = make(2)
    pool.submit(1)
    eventually(lambda: len(work.calls) == 1)
    makes, may_break = work.make, threading.Event()

    def breaks(slot: Any) -> Any:
        assert may_break.wait(DEADLINE)
        raise MemoryError

    work.make = breaks
    pool.submit(1, 7)
    work.may_end.release()
    eventually(lambda: work.calls == [None, 7])
    work.may_end.release()
    eventually(lambda: pool.waiting == 1)
    with pool.condition:
        pool.calls.append(3)  # and it has not heard of it yet
        pool.busy += 1
    may_break.set()

    eventually(lambda: work.calls == [None, 7, 3])
    work.make = makes
