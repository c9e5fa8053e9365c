"""The watchdog: what it does about handlers that ignore it, and that it never touches one that has ended."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection

from queueapp import Context, Discard, consumer
from tests.in_process_worker import DEADLINE, Worker, eventually, real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import AtMostOnce, Leased, Transactional
from workers.processes import watchdog
from workers.processes.watchdog import Watchdog, interrupt, interrupt_all
from workers.receiving.handlers import TimeLimitExceeded
from workers.receiving.receivers import ActiveHandler, Receiver

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers", "soon_stuck")]
Start = Callable[..., Worker]


def stubborn(release: threading.Event) -> Any:
    """A handler that swallows its interruption and goes on."""

    def act(message: Nop) -> None:
        while not release.is_set():
            try:
                while not release.is_set():
                    pass
            except TimeLimitExceeded:
                continue

    return act


def test_a_handler_that_ignores_its_time_limit_costs_the_process(
    start_worker: Start, release: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    consumer(Leased, timeout=0.05, name="stubborn")(stubborn(release))
    Leased.send(Nop(1, ""))
    worker = start_worker(Leased)
    stuck: list[float] = []
    watching = Watchdog([worker.pump], lambda: stuck.append(monotonic()))
    watching.start()

    eventually(lambda: stuck)
    watching.check()
    release.set()
    eventually(lambda: not Leased.objects.exists())
    assert watching.stop(30)

    assert len(stuck) == 1, "reported once"
    critical = [record.getMessage() for record in caplog.records if record.levelno == logging.CRITICAL]
    assert len(critical) == 1
    assert "stubborn ignores its time limit" in critical[0]


def test_a_handler_is_interrupted_before_it_counts_as_stuck(start_worker: Start, release: threading.Event) -> None:
    """The process stood still beyond the limit, and for as long again: nothing could have ended it before."""
    interrupted: list[bool] = []

    def act(message: Nop) -> None:
        try:
            while not release.is_set():
                pass
        except TimeLimitExceeded:
            interrupted.append(True)
            raise

    consumer(Leased, timeout=0.05, attempts=1)(act)
    Leased.send(Nop(1, ""))
    worker = start_worker(Leased, watchdog=False)
    handlers = lambda: [receiver.active_handler for receiver in worker.pump.receivers]  # noqa: E731
    eventually(lambda: any(handler is not None and watchdog.is_stuck(handler) for handler in handlers()))
    stuck: list[bool] = []

    Watchdog([worker.pump], lambda: stuck.append(True)).check()

    eventually(lambda: interrupted)
    assert stuck == []


def test_a_handler_is_interrupted_once(
    start_worker: Start, release: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    interruptions: list[bool] = []

    def act(message: Nop) -> None:
        while not release.is_set():
            try:
                while not release.is_set():
                    pass
            except TimeLimitExceeded:
                interruptions.append(True)

    consumer(Transactional, timeout=0.05)(act)
    Transactional.send(Nop(1, ""))
    worker = start_worker(Transactional)
    eventually(lambda: interruptions)
    (task,) = worker.pump.receivers
    for _ in range(5):
        assert task.active_handler is not None
        interrupt(task, task.active_handler)

    release.set()

    eventually(lambda: not Transactional.objects.exists())
    assert interruptions == [True]
    assert caplog.text.count("exceeds its time limit") == 1


def test_what_has_ended_meanwhile_is_not_interrupted(start_worker: Start) -> None:
    handled: list[Context] = []

    def act(message: Nop, context: Context) -> None:
        handled.append(context)

    consumer(Leased, name="tests", timeout=30)(act)
    worker = start_worker(Leased, concurrency=1)
    Leased.send(Nop(1, ""))
    eventually(lambda: handled and not Leased.objects.exists())
    (task,) = worker.pump.receivers
    assert task.active_handler is None, "else it would be interrupted at its limit, in the middle of something else"
    entry = worker.pump.handlers.by_name["tests"]

    interrupt(task, ActiveHandler(handled[0].seq, entry, handled[0], 0.0, 1.0))
    assert interrupt_all([worker.pump]) == 0

    task.hard_stop = False
    Leased.send(Nop(2, ""))
    eventually(lambda: len(handled) == 2)
    assert worker.pump.stats.failed == 0


@pytest.mark.parametrize("queue", [Leased, AtMostOnce])
def test_a_session_that_a_limit_may_have_interrupted_is_not_used_again(start_worker: Start, queue: Any) -> None:
    """Between an answer of the server and the driver's own notes of it: no check can see that it did."""
    sessions: list[Any] = []
    over = threading.Event()

    @consumer(queue, timeout=0.05, name="tests", policy=lambda failure: Discard("late"))
    def act(message: Nop) -> None:
        connection.ensure_connection()
        sessions.append(connection.connection)
        limit = monotonic() + DEADLINE
        try:
            while message.number == 1 and monotonic() < limit:
                pass
        finally:
            over.set()

    # The others have to connect anew, which takes longer than their limit on a busy machine.
    worker = start_worker(queue, concurrency=1, limits_hold=lambda: bool(sessions) and not over.is_set())
    for number in range(1, 4):
        queue.send(Nop(number, ""))
        worker.pump.wake()
        eventually(lambda number=number: len(sessions) == number and not queue.objects.exists())

    interrupted, second, third = sessions
    assert interrupted is not second
    assert second is third, "only for that"


def interrupting_as_it_returns(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An interruption that was decided on while the handler ran, and is sent when it has just returned. The event is
    set in between."""
    interrupted = threading.Event()
    really = watchdog.raise_in_thread

    def late(task: Any, exception: Any) -> None:
        interrupted.set()
        eventually(lambda: task.active_handler is None)
        really(task, exception)

    monkeypatch.setattr(watchdog, "raise_in_thread", late)
    return interrupted


@pytest.mark.parametrize("queue", [Leased, Transactional, AtMostOnce])
def test_an_interruption_that_arrives_when_the_handler_has_returned_goes_no_further(
    start_worker: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, queue: Any
) -> None:
    """It is late, and nothing else: not the next message, whose turn it is by then, and not the worker."""
    interrupted = interrupting_as_it_returns(monkeypatch)
    calls: list[int] = []
    failures: list[Any] = []

    def note(failure: Any) -> Any:
        failures.append(failure)
        return Discard("late")

    @consumer(queue, timeout=0.05, name="tests", policy=note)
    def act(message: Nop) -> None:
        calls.append(message.number)
        while message.number == 1 and not interrupted.is_set():
            pass

    for number in range(1, 6):
        queue.send(Nop(number, ""))
    worker = start_worker(queue, concurrency=1)
    eventually(lambda: len(calls) == 5 and not queue.objects.exists())

    assert calls == [1, 2, 3, 4, 5]
    assert [type(failure.exception) for failure in failures] == [TimeLimitExceeded]
    assert worker.pump.stats.failed == 1
    assert "a receiver failed" not in caplog.text


@pytest.mark.parametrize("queue", [Leased, Transactional, AtMostOnce])
def test_an_interruption_that_arrives_before_the_task_looks_out_for_it_goes_no_further(
    start_worker: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, queue: Any
) -> None:
    """It was sent while the handler ran, and the very next instruction after that is where Python delivers it."""
    calls: list[int] = []
    failures: list[Any] = []
    interrupted: list[bool] = []

    def note(failure: Any) -> Any:
        failures.append(failure)
        return Discard("late")

    def run(task: Any, running: ActiveHandler | None) -> None:
        before = task.__dict__.get("active_handler")
        task.__dict__["active_handler"] = running
        if before is not None and running is None and not interrupted:
            interrupted.append(True)
            raise TimeLimitExceeded("sent while it ran")

    monkeypatch.setattr(
        Receiver, "active_handler", property(lambda task: task.__dict__["active_handler"], run), raising=False
    )

    @consumer(queue, name="tests", policy=note)
    def act(message: Nop) -> None:
        calls.append(message.number)

    for number in range(1, 6):
        queue.send(Nop(number, ""))
    worker = start_worker(queue, concurrency=1)
    eventually(lambda: len(calls) == 5 and not queue.objects.exists())

    assert calls == [1, 2, 3, 4, 5]
    assert [type(failure.exception) for failure in failures] == [TimeLimitExceeded]
    assert worker.pump.stats.failed == 1
    assert "a receiver failed" not in caplog.text


@pytest.mark.parametrize("queue", [Leased, Transactional])
def test_a_stop_that_arrives_when_the_handler_has_returned_goes_no_further(
    start_worker: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, queue: Any
) -> None:
    interrupted = interrupting_as_it_returns(monkeypatch)
    running = threading.Event()

    @consumer(queue, name="tests")
    def act(message: Nop) -> None:
        running.set()
        while not interrupted.is_set():
            pass

    queue.send(Nop(1, ""))
    worker = start_worker(queue, concurrency=1)
    assert running.wait(DEADLINE)

    assert worker.cancel() == 1
    worker.stop()

    row = queue.objects.get()
    assert (row.deliveries, row.cancels, row.lease_token) == (0, 0, None), "given back uncounted"
    assert worker.pump.stats.failed == 0
    assert "a receiver failed" not in caplog.text


def test_no_limit_waits_for_the_reader_of_the_log(start_worker: Start, release: threading.Event) -> None:
    """Two handlers are over their limits, and the log takes nothing until both are interrupted."""
    interrupted: list[int] = []

    @consumer(Leased, timeout=0.2, name="tests", attempts=1)
    def act(message: Nop) -> None:
        try:
            while not release.is_set():
                pass
        except TimeLimitExceeded:
            interrupted.append(message.number)
            raise

    class Blocked(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "exceeds its time limit" in record.getMessage():
                eventually(lambda: len(interrupted) == 2)

    worker = start_worker(Leased, concurrency=2, watchdog=False)
    for number in (1, 2):
        Leased.send(Nop(number, ""))
    eventually(lambda: len([task for task in worker.pump.receivers if task.active_handler]) == 2)
    deadlines = [task.active_handler.deadline for task in worker.pump.receivers if task.active_handler]
    eventually(lambda: monotonic() > max(deadline or 0.0 for deadline in deadlines))
    blocked = Blocked()
    logging.getLogger("queueapp.workers").addHandler(blocked)
    try:
        watching = Watchdog([worker.pump])
        watching.start()
        eventually(lambda: not Leased.objects.exists())
    finally:
        logging.getLogger("queueapp.workers").removeHandler(blocked)
        assert watching.stop(DEADLINE)

    assert sorted(interrupted) == [1, 2]


@pytest.mark.parametrize("stopping", [False, True], ids=["a limit", "a stop"])
def test_a_handler_whose_event_loop_has_just_closed_needs_no_cancelling(stopping: bool) -> None:
    """It was async, and its thread has not said yet that it has ended. The watchdog lives on."""
    loop = asyncio.new_event_loop()
    loop.close()
    context = SimpleNamespace(_cancel=lambda **_: loop.call_soon_threadsafe(print))
    entry = SimpleNamespace(registration=SimpleNamespace(is_async=False))
    running: Any = SimpleNamespace(consumer=entry, context=context)
    task: Any = SimpleNamespace(
        interrupt_lock=threading.Lock(),
        active_handler=running,
        interrupted_for_timeout=None,
        interrupted_for_shutdown=None,
        hard_stop=False,
    )
    pump: Any = SimpleNamespace(receivers=[task])

    assert interrupt_all([pump]) == 1 if stopping else interrupt(task, running)


def test_batches_of_a_pump_that_stops_are_looked_after_to_the_end(start_worker: Start, monkeypatch: Any) -> None:
    monkeypatch.setattr(Leased.delivery, "lease_period", timedelta(seconds=2))
    hold = threading.Event()

    def act(message: Nop) -> None:
        hold.wait(30)

    consumer(Leased)(act)
    Leased.send(Nop(1, ""))
    worker = start_worker(Leased, concurrency=1)
    eventually(lambda: worker.pump.stats.received == 1)
    worker.ask_to_stop()
    first = Leased.objects.get().lease_expires

    eventually(lambda: Leased.objects.get().lease_expires > first)

    hold.set()
    worker.stop()
    assert not Leased.objects.exists()
    assert worker.pump.stats.lost == 0
