"""A service is started and stopped at any time, and its end is never unseen."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection

from queueapp.models import Leader
from queueapp.services.connection_timeouts import ConnectionWatchdog
from queueapp.services.delayed_dispatcher import DelayedDispatcher
from queueapp.services.journal_service import JournalService
from queueapp.services.leader_election import Elector
from queueapp.services.listener import Listener
from queueapp.services.maintenance import Maintenance
from queueapp.services.service import FunctionService, Service, stop_all
from tests.in_process_worker import DEADLINE, eventually, real_commits
from tests.testapp.models import Deep, Leased, Recovered
from tests.workers.trees import CHECKOUT
from workers.processes.watchdog import Watchdog
from workers.receiving.pump import QueuePump
from workers.services.heartbeat import Heartbeat
from workers.services.lease_renewer import LeaseRenewer

pytestmark = real_commits


class Waiting(Service):
    """Waits, and counts how often it was woken."""

    def __init__(self) -> None:
        super().__init__("waiting")
        self.woken = 0

    def serve(self) -> None:
        while not self.stopping:
            self.woken += self.pause(3600)


class Failing(Service):
    """Ends by an error on request."""

    def __init__(self, error: BaseException | None) -> None:
        super().__init__("failing")
        self.error = error
        self.now = threading.Event()

    def serve(self) -> None:
        self.now.wait(DEADLINE)
        if self.error is not None:
            raise self.error


def test_a_service_that_is_stopped_ends_its_pause_at_once_and_reports_nothing(caplog: pytest.LogCaptureFixture) -> None:
    ends: list[Service] = []
    waiting = Waiting()

    waiting.start(ends.append)
    assert waiting.is_alive()
    assert waiting.stop(DEADLINE) is True

    assert not waiting.is_alive()
    assert ends == []
    assert caplog.records == []


def test_a_service_can_be_stopped_before_it_was_started_and_twice() -> None:
    waiting = Waiting()
    assert waiting.stop() is True

    waiting.start()
    waiting.start()  # nothing happens: it runs
    assert waiting.is_alive()

    assert waiting.stop(DEADLINE) is True
    assert waiting.stop() is True


def test_a_service_whose_thread_is_just_being_started_can_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting()
    seen: list[tuple[bool, bool]] = []
    really_start = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        seen.append((waiting.is_alive(), waiting.join(DEADLINE)))
        really_start(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    waiting.start()

    assert seen == [(False, True)], "it has not begun"
    assert waiting.is_alive()
    assert waiting.stop(DEADLINE)


@pytest.mark.parametrize("there_is_a_thread", [True, False])
def test_a_service_whose_start_an_exit_interrupts_does_not_run_and_can_be_started_again(
    monkeypatch: pytest.MonkeyPatch, there_is_a_thread: bool
) -> None:
    waiting = Waiting()
    really_start = threading.Thread.start
    threads: list[threading.Thread] = []

    def start(thread: threading.Thread) -> None:
        if there_is_a_thread:
            really_start(thread)
            threads.append(thread)
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(SystemExit):
            waiting.start()

    assert not waiting.is_alive()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    waiting.start()
    assert waiting.is_alive()
    assert waiting.stop(DEADLINE)


def test_a_service_that_no_thread_could_be_had_for_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting()

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            waiting.start()

    assert not waiting.is_alive()
    assert waiting.stop(DEADLINE)


UNDER_GEVENT = """
from gevent import monkey
monkey.patch_all()
import gevent, sys
from django.conf import settings
settings.configure()
from queueapp.services.service import Service

class Waiting(Service):
    ended = False
    def serve(self):
        while not self.stopping:
            self.pause(60)
        gevent.sleep(0.1)
        self.ended = True

def strike():
    raise SystemExit  # as Celery does at a shutdown request: it comes out wherever the main greenlet waits

one = Waiting("waiting")
one.start()
gevent.spawn_raw(strike)
try:
    one.is_alive()
    gevent.sleep(5)
except SystemExit:
    print(one.is_alive(), one.ended, one.stop(30), one.ended, one.is_alive())
"""


def test_an_exit_that_interrupts_is_running_changes_nothing() -> None:
    """Seen on a busy machine: Python marked the thread as ended, and its process did not wait until it had signed
    off."""
    pytest.importorskip("gevent")

    done = subprocess.run(
        [sys.executable, "-c", UNDER_GEVENT],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )

    assert (done.stdout.split(), done.stderr) == (["True", "False", "True", "True", "False"], "")


def test_a_forked_child_has_none_of_its_parents_services() -> None:
    waiting = Waiting()
    waiting.start()

    if (child := os.fork()) == 0:
        os._exit(0 if not waiting.is_alive() and waiting.join(0) else 1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert waiting.is_alive()
    assert waiting.stop(DEADLINE)


def test_a_wake_up_during_a_round_is_not_lost() -> None:
    waiting = Waiting()
    waiting.start()
    for number in range(1, 50):
        waiting.wake()
        eventually(lambda least=number: waiting.woken >= least)
    assert waiting.stop(DEADLINE)


@pytest.mark.parametrize("error", [ValueError("of no database"), SystemExit(3), None])
def test_a_service_that_ends_unasked_is_reported_with_its_traceback(
    error: BaseException | None, caplog: pytest.LogCaptureFixture
) -> None:
    ends: list[Service] = []
    failing = Failing(error)
    failing.start(ends.append)

    failing.now.set()
    eventually(lambda: ends)

    assert ends == [failing]
    (record,) = caplog.records
    assert record.levelno == logging.CRITICAL
    assert "failing ended without having been asked to" in record.getMessage()
    assert (record.exc_info[1] if record.exc_info else None) is error
    assert failing.join(DEADLINE)


def test_a_service_that_fails_while_it_stops_is_no_reason_to_replace_the_process() -> None:
    ends: list[Service] = []
    failing = Failing(ValueError())
    failing.start(ends.append)
    failing.ask_to_stop()
    failing.now.set()

    assert failing.join(DEADLINE)

    assert ends == []


def test_a_service_is_not_started_again_before_its_last_life_has_ended() -> None:
    failing = Failing(None)
    failing.start()
    assert failing.stop(0) is False

    with pytest.raises(RuntimeError, match="has not ended yet"):
        failing.start()

    failing.now.set()
    assert failing.join(DEADLINE)


def test_a_job_may_return_when_its_event_is_set_and_not_before() -> None:
    ends: list[Service] = []
    stopping = threading.Event()
    waiting = FunctionService("waiting", lambda: stopping.wait(DEADLINE) and None, stopping)
    hasty = FunctionService("hasty", lambda: None, threading.Event())
    waiting.start(ends.append)
    hasty.start(ends.append)
    eventually(lambda: ends == [hasty])

    assert waiting.stop(DEADLINE)

    assert stopping.is_set()
    assert ends == [hasty]


# -- all of them ---------------------------------------------------------------------------------------------------


def heartbeat() -> Service:
    return Heartbeat("default", [QueuePump(Leased, "default", stopping=threading.Event())], uuid.uuid4())


def dispatcher() -> Service:
    return DelayedDispatcher("default", uuid.uuid4())


def maintenance() -> Service:
    leadership = Elector("default", "maintenance", uuid.uuid4())
    leadership.try_lead()
    return Maintenance("default", [Leased], leadership)


def journal() -> Service:
    return JournalService("default", [Deep, Recovered], Elector("default", "journal", uuid.uuid4()))


def listener() -> Service:
    return Listener("default", lambda payload: None)


def renewals() -> Service:
    return LeaseRenewer("default", [QueuePump(Leased, "default", stopping=threading.Event())])


def watchdog() -> Service:
    return Watchdog([QueuePump(Leased, "default", stopping=threading.Event())])


MAKERS = [heartbeat, dispatcher, maintenance, journal, listener, renewals, watchdog, ConnectionWatchdog, Waiting]


@pytest.fixture
def sessions() -> Iterator[Callable[[], int]]:
    """How many sessions there are in this database beyond those at the start of the test (PostgreSQL)."""

    def count() -> int:
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
            return int(cursor.fetchone()[0])

    if connection.vendor != "postgresql":
        yield lambda: 0
        return
    before = count()
    yield lambda: count() - before


@pytest.mark.parametrize("make", MAKERS)
def test_every_service_is_started_and_stopped_twenty_times(
    make: Callable[[], Service], settings: Any, sessions: Callable[[], int]
) -> None:
    settings.QUEUEAPP = {
        "HEARTBEAT_INTERVAL": 0.1, "PEEK_DELAY": 0.1, "DISPATCH_INTERVAL": 0.05, "JOURNAL": {"^journaled": None},
    }  # fmt: skip
    ends: list[Service] = []
    made = make()
    before = threading.active_count()

    for number in range(20):
        made.start(ends.append)
        assert made.is_alive()
        if number % 4 == 3:  # most of the time in the middle of its first steps, now and then well into its work
            _into_its_work(made)
        assert made.stop(DEADLINE) is True
        assert not made.is_alive()

    assert ends == []
    assert threading.active_count() == before
    eventually(lambda: sessions() <= 0)


def _into_its_work(service: Service) -> None:
    if isinstance(service, Heartbeat):
        eventually(service.begun.is_set)
    elif isinstance(service, Listener) and connection.vendor == "postgresql":
        eventually(service.established.is_set)
    elif isinstance(service, DelayedDispatcher):
        eventually(lambda: service.elector.is_leader)
        assert Leader.objects.exists()


@pytest.mark.parametrize("make", MAKERS)
def test_starts_and_stops_from_many_threads_leave_it_stopped(make: Callable[[], Service], settings: Any) -> None:
    settings.QUEUEAPP = {"HEARTBEAT_INTERVAL": 0.1, "PEEK_DELAY": 0.1, "DISPATCH_INTERVAL": 0.05}
    made, ends, errors = make(), [], []  # type: ignore[var-annotated]
    go = threading.Barrier(4)

    def often(act: Callable[[], object]) -> None:
        go.wait(DEADLINE)
        for _ in range(10):
            try:
                act()
            except RuntimeError as error:
                errors.append(str(error))

    starters = [threading.Thread(target=often, args=(lambda: made.start(ends.append),)) for _ in range(2)]
    stoppers = [threading.Thread(target=often, args=(lambda: made.stop(DEADLINE),)) for _ in range(2)]
    for thread in (*starters, *stoppers):
        thread.start()
    for thread in (*starters, *stoppers):
        thread.join(DEADLINE)

    assert stop_all([made], DEADLINE)
    assert ends == []
    assert all("has not ended yet" in error for error in errors)
