"""The watchdog and callbacks: hooks after a commit, policies, receivers of signals."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import pytest
from django.db import connection, transaction

from queueapp import Discard, Poison, RetryNow, consumer, signals
from queueapp.models import DelayedMessage, PoisonMessage
from tests.in_process_worker import Worker, eventually, real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import AtMostOnce, Effect, Leased, Transactional
from workers.processes import watchdog
from workers.processes.watchdog import Watchdog, interrupt_all
from workers.receiving.handlers import Interrupted, TimeLimitExceeded, WorkerStopped

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers", "soon_stuck")]
Start = Callable[..., Worker]
#: Seconds: of handlers that must not be interrupted, also on a machine that stands still for a moment.
LIMIT = 0.8
EVERY = pytest.mark.parametrize("queue", [Leased, Transactional, AtMostOnce])


class Hanging:
    """Code that hangs the first time, and what ended it."""

    def __init__(self, release: threading.Event, *, stubborn: bool = False) -> None:
        self.release, self.stubborn = release, stubborn
        self.began = threading.Event()
        self.ended_by: list[type[BaseException]] = []

    def hangs(self) -> bool:
        """Whether it is inside now: only then do time limits hold, which others are to keep on a busy machine as
        well."""
        return self.began.is_set() and not self.ended_by

    def __call__(self) -> None:
        if self.began.is_set():
            return
        self.began.set()
        while not self.release.is_set():
            try:
                while not self.release.is_set():
                    pass
            except Interrupted as error:
                self.ended_by.append(type(error))
                if not self.stubborn:
                    raise


@contextmanager
def receiving(signal: Any, receiver: Callable[..., None]) -> Iterator[None]:
    signal.connect(receiver)
    try:
        yield
    finally:
        signal.disconnect(receiver)


def messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == level and record.name == "queueapp.workers"
    ]


@pytest.mark.parametrize("crash_tracking", [False, True])
def test_a_hook_that_hangs_is_interrupted_and_its_message_stays_handled(
    start_worker: Start, release: threading.Event, caplog: pytest.LogCaptureFixture, crash_tracking: bool
) -> None:
    hang, after, calls = Hanging(release), [], []

    @consumer(Transactional, timeout=0.1, name="tests")
    def act(message: Nop) -> None:
        calls.append(message.number)
        Effect.objects.create(name=str(message.number))
        transaction.on_commit(hang)
        transaction.on_commit(lambda: after.append(message.number))

    worker = start_worker(Transactional, concurrency=1, limits_hold=hang.hangs)
    worker.pump.crash_tracking = crash_tracking
    first = Transactional.send(Nop(1, ""))
    Transactional.send(Nop(2, ""))
    del first
    eventually(lambda: after == [1, 2])
    eventually(lambda: not Transactional.objects.exists())

    assert calls == [1, 2]
    assert hang.ended_by == [TimeLimitExceeded]
    assert sorted(Effect.objects.values_list("name", flat=True)) == ["1", "2"]
    assert worker.pump.stats.failed == 0
    assert not PoisonMessage.objects.exists()
    (late,) = eventually(lambda: messages(caplog, logging.WARNING))
    assert late.startswith("testapp.Transactional: the hook Hanging of tests exceeds its time limit after ")
    assert re.search(r"exceeds its time limit after \d+\.\d s with message \d+ and is interrupted", late)
    assert "Error calling Hanging in on_commit()" in caplog.text


def test_a_hook_that_uses_the_connection_leaves_it_usable(start_worker: Start, release: threading.Event) -> None:
    """Interrupted between a statement and the driver's notes of it: the session is replaced."""
    sessions: list[int] = []
    began, ended = threading.Event(), threading.Event()

    def hook() -> None:
        began.set()
        try:
            while not sessions[1:] and not release.is_set():
                with connection.cursor() as cursor:
                    cursor.execute("SELECT 1")
        finally:
            ended.set()

    @consumer(Transactional, timeout=0.1, name="tests")
    def act(message: Nop) -> None:
        sessions.append(id(connection.connection))
        Effect.objects.create(name=str(message.number))
        transaction.on_commit(hook)

    start_worker(Transactional, concurrency=1, limits_hold=lambda: began.is_set() and not ended.is_set())
    for number in (1, 2):
        Transactional.send(Nop(number, ""))
    eventually(lambda: len(sessions) == 2)
    eventually(lambda: not Transactional.objects.exists())

    assert Effect.objects.count() == 2


def test_a_hook_that_ignores_its_time_limit_costs_the_process(
    start_worker: Start, release: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    hang = Hanging(release, stubborn=True)

    @consumer(Transactional, timeout=LIMIT, name="tests")
    def act(message: Nop) -> None:
        transaction.on_commit(hang)

    Transactional.send(Nop(1, ""))
    worker = start_worker(Transactional, watchdog=False)
    stuck: list[float] = []
    watching = Watchdog([worker.pump], lambda: stuck.append(monotonic()))
    watching.start()

    eventually(lambda: stuck)
    watching.check()
    release.set()
    assert watching.stop(30)

    assert len(stuck) == 1, "reported once"
    (critical,) = messages(caplog, logging.CRITICAL)
    assert "the hook Hanging of tests ignores its time limit with message " in critical
    assert hang.ended_by == [TimeLimitExceeded], "interrupted once"


def test_a_callback_that_hangs_without_a_limit_is_reported_once(
    start_worker: Start, release: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    hang = Hanging(release)

    @consumer(Transactional, name="tests")
    def act(message: Nop) -> None:
        transaction.on_commit(hang)

    Transactional.send(Nop(1, ""))
    worker = start_worker(Transactional, watchdog=False)
    watching = Watchdog([worker.pump], lambda: pytest.fail("it has no limit"))
    assert hang.began.wait(30)
    eventually(lambda: watching.check() and messages(caplog, logging.WARNING))
    assert watching.check()
    release.set()

    (slow,) = messages(caplog, logging.WARNING)
    assert slow.startswith("testapp.Transactional: the hook Hanging of tests, for message ")
    assert slow.endswith("and its consumer has no time limit.")
    assert hang.ended_by == []


@EVERY
def test_a_policy_that_hangs_is_interrupted_and_the_default_one_decides(
    start_worker: Start, release: threading.Event, caplog: pytest.LogCaptureFixture, queue: Any
) -> None:
    hang = Hanging(release)

    def policy(failure: Any) -> Any:
        Effect.objects.create(name="undone" if not hang.began.is_set() else "kept")
        hang()
        return Discard("the second")

    @consumer(queue, timeout=0.1, name="tests", policy=policy, attempts=1)
    def act(message: Nop) -> None:
        raise ValueError(message.number)

    for number in (1, 2):
        queue.send(Nop(number, ""))
    worker = start_worker(queue, concurrency=1, limits_hold=hang.hangs)
    eventually(lambda: not queue.objects.exists() and worker.pump.stats.failed == 2)

    eventually(lambda: Effect.objects.exists())
    assert hang.ended_by == [TimeLimitExceeded]
    assert [item.reason for item in PoisonMessage.objects.all()] == ["failed 1 of 1 attempts: ValueError: 1"]
    assert list(Effect.objects.values_list("name", flat=True)) == ["kept"]
    assert "the recoverability policy of tests exceeds its time limit" in caplog.text
    assert "a receiver failed" not in caplog.text


@EVERY
def test_receivers_of_a_signal_that_hang_are_interrupted_and_the_verdict_stands(
    start_worker: Start, release: threading.Event, caplog: pytest.LogCaptureFixture, queue: Any
) -> None:
    hang = Hanging(release)

    def hear(sender: Any, **kwargs: Any) -> None:
        hang()

    @consumer(queue, timeout=0.1, name="tests", policy=lambda failure: Poison("seen"))
    def act(message: Nop) -> None:
        raise ValueError(message.number)

    with receiving(signals.poisoned, hear):
        for number in (1, 2):
            queue.send(Nop(number, ""))
        worker = start_worker(queue, concurrency=1, limits_hold=hang.hangs)
        eventually(lambda: not queue.objects.exists() and PoisonMessage.objects.count() == 2)
        worker.stop()

    assert hang.ended_by == [TimeLimitExceeded]
    assert worker.pump.stats.failed == 2
    assert "the receivers of a signal of tests exceeds its time limit" in caplog.text
    assert "were interrupted" in caplog.text


@pytest.mark.parametrize("queue", [Leased, Transactional])
def test_an_interruption_that_arrives_when_a_policy_has_returned_goes_no_further(
    start_worker: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, queue: Any
) -> None:
    interrupted = threading.Event()
    really = watchdog.raise_in_thread

    def late(task: Any, exception: Any) -> None:
        interrupted.set()
        eventually(lambda: task.active_callback is None)
        really(task, exception)

    monkeypatch.setattr(watchdog, "raise_in_thread", late)
    attempts: list[int] = []

    def policy(failure: Any) -> Any:
        while failure.attempt == 1 and not interrupted.is_set():
            pass
        return RetryNow()

    @consumer(queue, timeout=LIMIT, name="tests", policy=policy)
    def act(message: Nop) -> None:
        attempts.append(message.number)
        if message.number == 1 and attempts.count(1) < 2:
            raise ValueError("the first attempt")

    for number in range(1, 5):
        queue.send(Nop(number, ""))
    worker = start_worker(queue, concurrency=1)
    eventually(lambda: sorted(attempts) == [1, 1, 2, 3, 4] and not queue.objects.exists())

    assert worker.pump.stats.failed == 1
    assert not DelayedMessage.objects.exists()
    assert "a receiver failed" not in caplog.text


def test_messages_that_wait_behind_a_policy_that_hangs_are_given_back(
    start_worker: Start, release: threading.Event
) -> None:
    hang, handled = Hanging(release), set()

    def policy(failure: Any) -> Any:
        hang()
        return Discard()

    @consumer(Leased, name="tests", policy=policy)
    def act(message: Nop) -> None:
        handled.add(message.number)
        if message.number == 0:
            raise ValueError("hangs after this")

    Leased.send_many(Nop(number, "") for number in range(300))
    start_worker(Leased, concurrency=2)
    assert hang.began.wait(30)

    eventually(lambda: Leased.objects.count() == 1)
    assert handled == set(range(300))
    release.set()
    eventually(lambda: not Leased.objects.exists())


def test_a_hard_stop_interrupts_a_hook(start_worker: Start, release: threading.Event) -> None:
    hang = Hanging(release)

    @consumer(Transactional, name="tests")
    def act(message: Nop) -> None:
        transaction.on_commit(hang)

    Transactional.send(Nop(1, ""))
    worker = start_worker(Transactional, concurrency=1)
    assert hang.began.wait(30)

    assert worker.cancel() == 0, "no handler"
    worker.stop()

    assert hang.ended_by == [WorkerStopped]
    assert not Transactional.objects.exists()


def test_a_hard_stop_lets_a_policy_decide(start_worker: Start, release: threading.Event) -> None:
    hang = Hanging(release)

    def policy(failure: Any) -> Any:
        hang()
        return Poison("decided")

    @consumer(Transactional, name="tests", policy=policy)
    def act(message: Nop) -> None:
        raise ValueError("fails")

    Transactional.send(Nop(1, ""))
    worker = start_worker(Transactional, concurrency=1)
    assert hang.began.wait(30)
    worker.ask_to_stop()
    interrupt_all([worker.pump])
    release.set()
    worker.stop()

    assert hang.ended_by == []
    assert PoisonMessage.objects.get().reason == "decided"


def test_without_hooks_nothing_is_recorded(start_worker: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[int] = []

    @consumer(Transactional, name="tests", timeout=30)
    def act(message: Nop) -> None:
        handled.append(message.number)

    worker = start_worker(Transactional, concurrency=1)
    Transactional.send_many(Nop(number, "") for number in range(20))
    eventually(lambda: len(handled) == 20 and not Transactional.objects.exists())

    (task,) = worker.pump.receivers
    assert task.callback_message is None
