"""Who waits for results hears of them, and asks seldom; who hears nothing asks more and more seldom."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest
from celery import Celery, states
from celery.exceptions import TimeoutError
from celery.result import AsyncResult, GroupResult
from django.db import connections
from django.test.utils import CaptureQueriesContext

from queueapp.contrib.celery import results
from queueapp.sql import backend_of
from tests.in_process_worker import eventually, patience


@pytest.fixture
def later(alias: str) -> Any:
    """Calls something on a thread of its own, whose connection is closed; all have ended when the test has."""
    threads = []

    def later(call: Callable[[], Any]) -> threading.Thread:
        def run() -> None:
            try:
                call()
            finally:
                connections[alias].close()

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return threads[-1]

    yield later
    for thread in threads:
        thread.join()


def _hears(alias: str) -> bool:
    return backend_of(connections[alias]).celery_results.listener(connections[alias]) is not None


def test_a_waiter_is_notified(
    backend: Any, app: Celery, alias: str, later: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not _hears(alias):
        pytest.skip("results are polled there")
    monkeypatch.setattr(results, "MAX_WAIT", 60.0)  # without a notification the next poll is too late
    listener = results.listener_of(alias)

    def end() -> None:
        eventually(listener.established.is_set)
        backend.store_result("a", 5, states.SUCCESS)

    later(end)
    began = monotonic()
    assert AsyncResult("a", app=app).get(timeout=90) == 5
    assert monotonic() - began < 45


def test_an_idle_wait_polls_rarely(backend: Any, app: Celery, alias: str) -> None:
    with CaptureQueriesContext(connections[alias]) as queries, pytest.raises(TimeoutError):
        AsyncResult("a", app=app).get(timeout=1.5)

    assert len(queries) <= 15


def test_many_wait_on_one_connection(backend: Any, app: Celery, alias: str, later: Any) -> None:
    found: list[int] = []
    for n in range(20):
        later(lambda n=n: found.append(AsyncResult(f"t{n}", app=app).get(timeout=30)))
    if _hears(alias):
        assert eventually(results.listener_of(alias).established.is_set)
    for n in range(20):
        backend.store_result(f"t{n}", n, states.SUCCESS)
    eventually(lambda: len(found) == 20)
    named = [item for item in threading.enumerate() if item.name == f"results of {alias}"]
    assert len(named) <= 1


def test_no_notification_is_sent_without_waiters(backend: Any, alias: str) -> None:
    if not _hears(alias):
        pytest.skip("results are polled there")
    listener = results.listener_of(alias)
    waiter = results.ResultWaiter({"a"})
    with listener.subscribed(waiter):
        eventually(listener.established.is_set)
        waiter.notified.clear()
        backend.store_result("b", 1, states.SUCCESS)
        backend.store_result("a", 1, states.STARTED)
        assert not waiter.notified.wait(0.2)
        backend.store_result("a", 1, states.SUCCESS)
        assert waiter.notified.wait(30)


def test_without_wake_ups_results_are_polled(backend: Any, app: Celery, alias: str, later: Any, settings: Any) -> None:
    settings.QUEUEAPP = {"NOTIFY": False}
    results.listeners.clear()
    later(lambda: backend.store_result("a", 5, states.SUCCESS))

    assert AsyncResult("a", app=app).get(timeout=30) == 5
    assert not results.listeners


def test_the_time_is_over(backend: Any, app: Celery, alias: str) -> None:
    began = monotonic()
    with pytest.raises(TimeoutError):
        AsyncResult("a", app=app).get(timeout=0)
    with pytest.raises(TimeoutError):
        AsyncResult("a", app=app).get(timeout=0.2, interval=30)
    assert monotonic() - began < 10, "the interval is no reason to wait for longer"


def test_a_waiter_sees_each_state(backend: Any, app: Celery, alias: str, later: Any) -> None:
    seen: list[str] = []
    backend.store_result("a", None, states.STARTED)

    def on_message(meta: Any) -> None:
        seen.append(meta["status"])
        if meta["status"] == states.STARTED:
            later(lambda: backend.store_result("a", 5, states.SUCCESS))

    assert AsyncResult("a", app=app).get(timeout=30, on_message=on_message) == 5
    assert seen == [states.STARTED, states.SUCCESS]


def test_a_group_is_joined_in_its_order(backend: Any, app: Celery, alias: str, later: Any) -> None:
    inner = GroupResult("inner", [AsyncResult("c", app=app), AsyncResult("d", app=app)], app=app)
    group = GroupResult("g", [AsyncResult("a", app=app), inner, AsyncResult("b", app=app)], app=app)

    def end() -> None:
        for task_id in "dcba":
            backend.store_result(task_id, task_id.upper(), states.SUCCESS)

    later(end)
    assert group.join_native(timeout=30) == ["A", ["C", "D"], "B"]


def test_results_come_as_they_end(backend: Any, app: Celery, alias: str, later: Any) -> None:
    group = GroupResult("g", [AsyncResult(character, app=app) for character in "abc"], app=app)
    came, following = [], ["c", "a"]
    backend.store_result("b", 1, states.SUCCESS)
    for task_id, _ in group.iter_native(timeout=30):
        came.append(task_id)
        if following:
            ends = following.pop(0)
            later(lambda ends=ends: backend.store_result(ends, 1, states.SUCCESS))

    assert came == ["b", "c", "a"]


def test_a_member_that_failed_raises(backend: Any, app: Celery, alias: str) -> None:
    group = GroupResult("g", [AsyncResult(character, app=app) for character in "ab"], app=app)
    backend.store_result("a", 1, states.SUCCESS)
    backend.store_result("b", KeyError("b"), states.FAILURE)

    with pytest.raises(KeyError):
        group.join_native(timeout=30)
    assert group.join_native(timeout=30, propagate=False)[0] == 1


_FORKS = """
import os, sys, threading
import django; django.setup()
from django.db import connections
from celery import Celery
from celery.result import AsyncResult
from queueapp.contrib.celery import results as waiting
app = Celery("forks", broker="memory://", backend="queueapp://", set_as_current=False)
waiter = waiting.ResultWaiter({"never"})
with waiting.listener_of("default").subscribed(waiter):
    assert waiting.listener_of("default").established.wait(30)
    child = os.fork()
    if not child:
        connections["default"].connection = None  # as Celery's fixup does
        with waiting.listener_of("default").subscribed(waiting.ResultWaiter({"a"})):
            hears = waiting.listener_of("default").established.wait(30)
            found = AsyncResult("a", app=app).get(timeout=30)
        os._exit(0 if hears and found == 5 else 3)
    assert AsyncResult("none", app=app).status == "PENDING"
    app.backend.store_result("a", 5, "SUCCESS")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    waiter.notified.clear()
    app.backend.store_result("never", 1, "SUCCESS")
    assert waiter.notified.wait(30), "the child has taken the parent's listener along"
"""

_GREENLETS = """
from gevent import monkey; monkey.patch_all()
import gevent
import django; django.setup()
from celery import Celery
from celery.result import AsyncResult
app = Celery("greenlets", broker="memory://", backend="queueapp://", set_as_current=False)
waiting = [gevent.spawn(AsyncResult(f"t{n}", app=app).get, timeout=30) for n in range(20)]
from queueapp.contrib.celery import results as listener
gevent.sleep(0)
assert listener.listener_of("default").established.wait(30)
for n in range(20):
    app.backend.store_result(f"t{n}", n, "SUCCESS")
gevent.joinall(waiting, timeout=30)
assert [one.value for one in waiting] == list(range(20)), [one.exception for one in waiting]
"""


@pytest.mark.parametrize("script", [_FORKS, _GREENLETS], ids=["forks", "greenlets"])
def test_processes_that_fork_and_greenlets_wait(app: Celery, alias: str, script: str, child_environment: Any) -> None:
    if not _hears(alias):
        pytest.skip("results are polled there")
    done = subprocess.run(
        [sys.executable, "-c", script], env=child_environment, capture_output=True, text=True, timeout=patience(60)
    )
    assert done.returncode == 0, done.stderr
