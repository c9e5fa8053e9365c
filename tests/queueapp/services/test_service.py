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
    """Ends by an error as soon as it is told to."""

    def __init__(self, error: BaseException | None) -> None:
        super().__init__("failing")
        self.error = error
        self.now = threading.Event()

    def serve(self) -> None:
        self.now.wait(DEADLINE)
        if self.error is not None:
            raise self.error


def test_a_service_that_is_stopped_ends_its_pause_at_once_and_tells_nobody(caplog: pytest.LogCaptureFixture) -> None:
    ends: list[Service] = []
    one = Waiting()

    one.start(ends.append)
    assert one.is_alive()
    assert one.stop(DEADLINE) is True

    assert not one.is_alive()
    assert ends == []
    assert caplog.records == []


def test_a_service_can_be_stopped_before_it_was_started_and_twice() -> None:
    one = Waiting()
    assert one.stop() is True

    one.start()
    one.start()  # nothing happens: it runs
    assert one.is_alive()

    assert one.stop(DEADLINE) is True
    assert one.stop() is True


def test_a_service_whose_thread_is_just_being_started_can_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Waiting()
    seen: list[tuple[bool, bool]] = []
    really_start = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        seen.append((one.is_alive(), one.join(DEADLINE)))
        really_start(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    one.start()

    assert seen == [(False, True)], "it has not begun"
    assert one.is_alive()
    assert one.stop(DEADLINE)


@pytest.mark.parametrize("there_is_a_thread", [True, False])
def test_a_service_whose_start_an_exit_strikes_does_not_run_and_can_be_started_again(
    monkeypatch: pytest.MonkeyPatch, there_is_a_thread: bool
) -> None:
    one = Waiting()
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
            one.start()

    assert not one.is_alive()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    one.start()
    assert one.is_alive()
    assert one.stop(DEADLINE)


def test_a_service_that_no_thread_could_be_had_for_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Waiting()

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            one.start()

    assert not one.is_alive()
    assert one.stop(DEADLINE)


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
    raise SystemExit  # as Celery does where it is told to shut down: it comes out wherever the main greenlet waits

one = Waiting("waiting")
one.start()
gevent.spawn_raw(strike)
try:
    one.is_alive()
    gevent.sleep(5)
except SystemExit:
    print(one.is_alive(), one.ended, one.stop(30), one.ended, one.is_alive())
"""


def test_an_exit_that_strikes_where_it_is_asked_whether_it_runs_changes_nothing() -> None:
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
    one = Waiting()
    one.start()

    if (child := os.fork()) == 0:
        os._exit(0 if not one.is_alive() and one.join(0) else 1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert one.is_alive()
    assert one.stop(DEADLINE)


def test_a_wake_up_during_a_round_is_not_lost() -> None:
    one = Waiting()
    one.start()
    for number in range(1, 50):
        one.wake()
        eventually(lambda least=number: one.woken >= least)
    assert one.stop(DEADLINE)


@pytest.mark.parametrize("error", [ValueError("of no database"), SystemExit(3), None])
def test_a_service_that_ends_unasked_is_reported_with_its_traceback(
    error: BaseException | None, caplog: pytest.LogCaptureFixture
) -> None:
    ends: list[Service] = []
    one = Failing(error)
    one.start(ends.append)

    one.now.set()
    eventually(lambda: ends)

    assert ends == [one]
    (record,) = caplog.records
    assert record.levelno == logging.CRITICAL
    assert "failing ended without having been asked to" in record.getMessage()
    assert (record.exc_info[1] if record.exc_info else None) is error
    assert one.join(DEADLINE)


def test_a_service_that_fails_while_it_stops_is_no_reason_to_replace_the_process() -> None:
    ends: list[Service] = []
    one = Failing(ValueError())
    one.start(ends.append)
    one.ask_to_stop()
    one.now.set()

    assert one.join(DEADLINE)

    assert ends == []


def test_a_service_is_not_started_again_before_its_last_life_has_ended() -> None:
    one = Failing(None)
    one.start()
    assert one.stop(0) is False

    with pytest.raises(RuntimeError, match="has not ended yet"):
        one.start()

    one.now.set()
    assert one.join(DEADLINE)


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


def housekeeping() -> Service:
    leadership = Elector("default", "housekeeping", uuid.uuid4())
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


MAKERS = [heartbeat, dispatcher, housekeeping, journal, listener, renewals, watchdog, ConnectionWatchdog, Waiting]


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
    one = make()
    before = threading.active_count()

    for number in range(20):
        one.start(ends.append)
        assert one.is_alive()
        if number % 4 == 3:  # most of the time in the middle of its first steps, now and then well into its work
            _into_its_work(one)
        assert one.stop(DEADLINE) is True
        assert not one.is_alive()

    assert ends == []
    assert threading.active_count() == before
    eventually(lambda: sessions() <= 0)


def _into_its_work(one: Service) -> None:
    if isinstance(one, Heartbeat):
        eventually(one.begun.is_set)
    elif isinstance(one, Listener) and connection.vendor == "postgresql":
        eventually(one.established.is_set)
    elif isinstance(one, DelayedDispatcher):
        eventually(lambda: one.elector.is_leader)
        assert Leader.objects.exists()


@pytest.mark.parametrize("make", MAKERS)
def test_starts_and_stops_from_many_threads_leave_it_stopped(make: Callable[[], Service], settings: Any) -> None:
    settings.QUEUEAPP = {"HEARTBEAT_INTERVAL": 0.1, "PEEK_DELAY": 0.1, "DISPATCH_INTERVAL": 0.05}
    one, ends, errors = make(), [], []  # type: ignore[var-annotated]
    go = threading.Barrier(4)

    def often(act: Callable[[], object]) -> None:
        go.wait(DEADLINE)
        for _ in range(10):
            try:
                act()
            except RuntimeError as error:
                errors.append(str(error))

    starters = [threading.Thread(target=often, args=(lambda: one.start(ends.append),)) for _ in range(2)]
    stoppers = [threading.Thread(target=often, args=(lambda: one.stop(DEADLINE),)) for _ in range(2)]
    for thread in (*starters, *stoppers):
        thread.start()
    for thread in (*starters, *stoppers):
        thread.join(DEADLINE)

    assert stop_all([one], DEADLINE)
    assert ends == []
    assert all("has not ended yet" in error for error in errors)
