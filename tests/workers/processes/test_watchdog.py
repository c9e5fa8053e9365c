"""The watchdog: what it does about handlers that ignore it, and that it never touches one that has ended."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest

from queueapp import Context, consumer
from tests.inprocess import Worker, eventually, real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import Leased, Transactional
from workers.processes.watchdog import Watchdog, interrupt, interrupt_all
from workers.receiving.handling import TimeLimitExceeded
from workers.receiving.strategies import Running

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers")]
Start = Callable[..., Worker]


@pytest.fixture(autouse=True)
def fast(settings: Any) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1, "RETRY_DELAY": 0, "WEDGED_AFTER": 0.2}


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Lets handlers go that ignore everything else."""
    event = threading.Event()
    yield event
    event.set()


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
    wedged: list[float] = []
    ended = threading.Event()
    watchdog = Watchdog([worker.pump], ended, lambda: wedged.append(monotonic()))
    watchdog.start()

    eventually(lambda: wedged)
    release.set()
    eventually(lambda: not Leased.objects.exists())
    ended.set()
    watchdog.join(30)

    assert len(wedged) == 1, "told once"
    critical = [record.getMessage() for record in caplog.records if record.levelno == logging.CRITICAL]
    assert len(critical) == 1
    assert "stubborn ignores its time limit" in critical[0]


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
    (task,) = worker.pump.tasks
    for _ in range(5):
        assert task.running is not None
        interrupt(task, task.running)

    release.set()

    eventually(lambda: not Transactional.objects.exists())
    assert interruptions == [True]
    assert caplog.text.count("is over the time limit") == 1


def test_what_has_ended_meanwhile_is_not_interrupted(start_worker: Start) -> None:
    handled: list[Context] = []

    def act(message: Nop, context: Context) -> None:
        handled.append(context)

    consumer(Leased, name="tests", timeout=30)(act)
    worker = start_worker(Leased, concurrency=1)
    Leased.send(Nop(1, ""))
    eventually(lambda: handled and not Leased.objects.exists())
    (task,) = worker.pump.tasks
    entry = worker.pump.handlers._by_name["tests"]

    interrupt(task, Running(handled[0].seq, entry, handled[0], 0.0, 1.0))
    assert interrupt_all([worker.pump]) == 0

    task.hurry = False
    Leased.send(Nop(2, ""))
    eventually(lambda: len(handled) == 2)
    assert worker.pump.stats.failed == 0


def test_batches_of_a_pump_that_stops_are_looked_after_to_the_end(start_worker: Start, monkeypatch: Any) -> None:
    monkeypatch.setattr(Leased.delivery, "lease_period", timedelta(milliseconds=600))
    hold = threading.Event()

    def act(message: Nop) -> None:
        hold.wait(30)

    consumer(Leased)(act)
    Leased.send(Nop(1, ""))
    worker = start_worker(Leased)
    eventually(lambda: worker.pump.stats.received == 1)
    worker.ask_to_stop()
    first = Leased.objects.get().lease_expires

    eventually(lambda: Leased.objects.get().lease_expires > first)

    hold.set()
    worker.stop()
    assert not Leased.objects.exists()
    assert worker.pump.stats.lost == 0
