"""Who waits for a database is watched: through the whole of a block, and through other such blocks inside it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction

from queueapp import consumer
from queueapp.services import connection_timeouts
from queueapp.services.connection_timeouts import ConnectionWatchdog, ResponseDeadline, restart_deadline
from tests.in_process_worker import Worker, eventually, real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import AtMostOnce, Leased, Transactional


def watched() -> Any:
    """The connection that this thread waits for, as far as the watching thread knows."""
    entry = connection_timeouts.deadline_of(threading.get_ident())
    return entry and entry[1]


def since() -> float:
    entry = connection_timeouts.deadline_of(threading.get_ident())
    assert entry is not None
    return entry[0]


class Clock:
    """A clock that advances by a second at each reading."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_timeouts, "monotonic", Clock())


class Named:
    connection: Any = None

    def __init__(self, alias: str) -> None:
        self.alias = alias


def test_after_an_inner_block_the_outer_one_is_watched_again_from_then_on(clock: None) -> None:
    outer, inner = Named("outer"), Named("inner")

    with ResponseDeadline(outer):
        began = since()
        with ResponseDeadline(inner):
            assert watched() is inner
            inside = since()
        assert watched() is outer
        assert since() > inside > began, "what the inner one took is not the outer one's"
        with ResponseDeadline(outer):
            pass
        assert watched() is outer

    assert watched() is None


def test_time_in_which_the_process_stood_still_is_not_counted_against_the_server(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler in C code kept the interpreter lock for a minute: no thread could read an answer that was there."""
    settings.QUEUEAPP = {"DATABASE_TIMEOUT": 5}
    now, closed_at = [0.0], list[float]()
    monkeypatch.setattr(connection_timeouts, "monotonic", lambda: now[0])
    monkeypatch.setattr(connection_timeouts, "_shut_down", lambda connection: closed_at.append(now[0]))
    steps = iter([60.0, *[0.25] * 30])

    class Watching(ConnectionWatchdog):
        def pause(self, seconds: float) -> bool:
            if (step := next(steps, None)) is None:
                self.ask_to_stop()
            now[0] += step or 0.0
            return False

    with ResponseDeadline(Named("one")):
        Watching().serve()

    assert closed_at == [65.0], "the five seconds in which this process could have read an answer"


def test_after_an_inner_block_that_failed_as_well(clock: None) -> None:
    outer = Named("outer")

    with ResponseDeadline(outer):
        with pytest.raises(ValueError), ResponseDeadline(Named("inner")):
            raise ValueError
        assert watched() is outer

    assert watched() is None


def test_a_handler_in_between_is_not_watched_and_neither_is_what_comes_after_its_own_blocks(clock: None) -> None:
    outer = Named("outer")

    with ResponseDeadline(outer) as deadline:
        deadline.pause()
        with ResponseDeadline(Named("of what the handler called")):
            pass
        assert watched() is None
        restart_deadline()
        assert watched() is None
        deadline.restart()
        assert watched() is outer

    assert watched() is None


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.parametrize(
    ("queue", "crash_tracking"),
    [(AtMostOnce, False), (Leased, False), (Transactional, False), (Transactional, True)],
    ids=["at most once", "at least once", "transactional", "crash tracking"],
)
def test_connection_of_a_receiver_is_not_watched_while_its_handler_runs(
    start_worker: Callable[..., Worker], queue: Any, crash_tracking: bool
) -> None:
    """A handler may take as long as it likes, and so may what it leaves for after the commit: it would be cut."""
    handling: list[Any] = []
    after_commit: list[Any] = []

    @consumer(queue, name="tests")
    def act(message: Nop) -> None:
        handling.append(watched())
        transaction.on_commit(lambda: after_commit.append(watched()))

    worker = start_worker(queue, concurrency=1)
    worker.pump.crash_tracking = crash_tracking
    queue.send(Nop(1, ""))
    worker.pump.wake()
    eventually(lambda: worker.pump.stats.handled == 1)

    assert handling == after_commit == [None]


@pytest.fixture
def connection_watchdog(settings: Any) -> Iterator[None]:
    settings.QUEUEAPP = {"DATABASE_TIMEOUT": 2}
    watch = ConnectionWatchdog()
    watch.start()
    yield
    assert watch.stop()


@real_commits
def test_a_statement_that_follows_an_inner_block_is_given_up_when_it_is_not_answered(connection_watchdog: None) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("needs a statement that takes its time: PostgreSQL's pg_sleep")
    second_connection = connection.copy()
    second_connection.inc_thread_sharing()
    second_connection.ensure_connection()
    session = second_connection.connection.info.backend_pid
    try:
        with ResponseDeadline(second_connection), second_connection.cursor() as cursor:
            with ResponseDeadline(connection), connection.cursor() as inner:
                inner.execute("SELECT 1")
            with pytest.raises(OperationalError):
                cursor.execute("SELECT pg_sleep(20)")
    finally:
        second_connection.close()
        with connection.cursor() as cursor:  # the server does not know yet that no client waits for it
            cursor.execute("SELECT pg_terminate_backend(%s)", (session,))
