"""One worker process: what happens to it when one of its threads ends without a request."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connections

from queueapp import consumer
from queueapp.models import Subscriber
from queueapp.services.connection_timeouts import ConnectionWatchdog
from queueapp.services.delayed_dispatcher import DelayedDispatcher
from queueapp.services.listener import Listener
from queueapp.services.maintenance import Maintenance
from tests.in_process_worker import DEADLINE, eventually, real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import Leased
from workers.processes import child
from workers.processes.child import ChildOptions, ShutdownStages, run_dispatcher, run_worker
from workers.processes.crash_recovery import FAILED, exit_text
from workers.processes.watchdog import Watchdog
from workers.receiving.pump import QueuePump
from workers.services.heartbeat import Heartbeat
from workers.services.lease_renewer import LeaseRenewer

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers")]


class Process:
    """``run_worker`` or ``run_dispatcher`` as the main thread of a process would call it."""

    def __init__(self, run: Callable[[ChildOptions, ShutdownStages], int], options: ChildOptions) -> None:
        self.stages = ShutdownStages()
        self.code: int | None = None
        self._run, self._options = run, options
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        self.code = self._run(self._options, self.stages)
        connections.close_all()

    def stop(self) -> int | None:
        self.stages.stopping.set()
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()
        return self.code


@pytest.fixture
def start(settings: Any) -> Iterator[Callable[[str], Process]]:
    settings.QUEUEAPP = {"HEARTBEAT_INTERVAL": 0.1, "PEEK_DELAY": 0.1, "DISPATCH_INTERVAL": 0.05}
    started: list[Process] = []

    def begin(role: str) -> Process:
        options = ChildOptions(role, ["testapp.Leased"], str(uuid.uuid4()), aliases=["default"])
        started.append(Process(run_worker if role == "worker" else run_dispatcher, options))
        return started[-1]

    yield begin
    for process in started:
        process.stop()


SERVICES = [
    ("worker", Heartbeat, "read_controls"),
    ("worker", Listener, "_listen"),
    ("worker", Watchdog, "check"),
    ("worker", LeaseRenewer, "renew_once"),
    ("worker", ConnectionWatchdog, "serve"),
    ("worker", QueuePump, "peek_and_submit"),
    ("dispatcher", DelayedDispatcher, "serve"),
    ("dispatcher", Maintenance, "pause"),
    ("dispatcher", Listener, "_listen"),
    ("dispatcher", ConnectionWatchdog, "serve"),
]


@pytest.mark.parametrize(("role", "service", "method"), SERVICES, ids=lambda item: getattr(item, "__name__", item))
def test_a_service_that_dies_ends_its_process_in_order(
    start: Callable[[str], Process],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    role: str,
    service: type,
    method: str,
) -> None:
    """By an error that is none of a database's; it takes the message in flight to its end first."""
    broken, in_flight, ended = threading.Event(), threading.Event(), threading.Event()
    really = getattr(service, method)

    def breaks(self: Any, *given: Any) -> Any:
        if method in ("serve", "run", "_listen"):
            broken.wait(DEADLINE)
        if broken.is_set():
            raise ValueError("unexpected")
        return really(self, *given)

    def act(message: Nop) -> None:
        in_flight.set()
        eventually(lambda: "This process stops because" in caplog.text)
        ended.set()

    consumer(Leased, name="tests", attempts=1)(act)
    busy = role == "worker" and service is not QueuePump  # which handles itself, and does not look meanwhile
    if busy:
        Leased.send(Nop(1, ""))
    monkeypatch.setattr(service, method, breaks)
    process = start(role)
    if busy:
        assert in_flight.wait(DEADLINE)

    broken.set()
    eventually(lambda: process.code is not None)

    assert process.code == FAILED
    assert exit_text(FAILED) == "was replaced because one of its services ended"
    assert "ended without having been asked to" in caplog.text
    assert "unexpected" in caplog.text
    assert ended.is_set() is busy
    assert not Leased.objects.exists(), "it was handled, and acked"
    assert not Subscriber.objects.exists(), "it deregistered"


@pytest.mark.parametrize("role", ["worker", "dispatcher"])
def test_a_process_that_gets_a_stop_request_ends_with_status_zero(
    start: Callable[[str], Process], caplog: pytest.LogCaptureFixture, role: str
) -> None:
    consumer(Leased, name="tests")(lambda message: None)
    process = start(role)
    if role == "worker":
        eventually(Subscriber.objects.exists)

    assert process.stop() == 0

    assert "unasked" not in caplog.text
    assert not Subscriber.objects.exists()


def test_a_healthy_worker_logs_one_line_a_minute_and_nothing_else(
    start: Callable[[str], Process], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert child.STATS_INTERVAL == 60
    monkeypatch.setattr(child, "STATS_INTERVAL", 0.3)
    caplog.set_level(logging.INFO)

    @consumer(Leased, name="tests")
    def act(message: Nop) -> None:
        pass

    process = start("worker")

    def said() -> list[str]:
        product = [record for record in caplog.records if record.name in ("queueapp", "queueapp.workers")]
        return [our.getMessage() for our in product]

    def minutes() -> list[int]:
        return [number for number, item in enumerate(said()) if ", in 0 s: testapp.Leased " in item]

    eventually(minutes)
    for number in range(5):
        Leased.send(Nop(number, ""))
        known = len(minutes())
        eventually(lambda known=known: len(minutes()) > known)
    eventually(lambda: not Leased.objects.exists())
    known = len(minutes())
    eventually(lambda: len(minutes()) > known)
    since = said()[minutes()[0] :]

    assert len(since) == len(minutes()), since
    assert sum(int(item.partition(" handled")[0].rpartition(" ")[2]) for item in since) == 5
    assert process.stop() == 0
