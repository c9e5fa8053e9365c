"""An outage is one line when it begins and one when it ends, however many connections a process has."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from django.db import Error, OperationalError, ProgrammingError, connection, connections, transaction

from queueapp.circuit_breaker import CircuitBreaker, State
from queueapp.services import connection_timeouts
from queueapp.services.connection_timeouts import Outage, ResponseDeadline, outage_of
from tests.clock import Clock
from tests.in_process_worker import DEADLINE, real_commits
from tests.kill_session import kill, session_of

pytestmark = real_commits


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(connection_timeouts, "monotonic", clock)
    return clock


@pytest.fixture(autouse=True)
def outage() -> Iterator[Outage]:
    """That of the default database, of this test alone."""
    connection_timeouts.forget()
    yield outage_of("default")
    connection_timeouts.forget()


@pytest.fixture
def second_connection() -> Iterator[Any]:
    """Another session of this thread, which tests cut."""
    wrapper = connection.copy()
    wrapper.inc_thread_sharing()
    yield wrapper
    wrapper.close()


def cut(session: Any) -> None:
    """What a server that goes looks like to one of its sessions."""
    kill(connection, session_of(session))


def ask(session: Any, breaker: CircuitBreaker) -> None:
    """One statement of the engine, as its loops send them."""
    try:
        with ResponseDeadline(session), session.cursor() as cursor:
            cursor.execute("SELECT 1")
        breaker.success()
    except Error as error:
        session.close()
        breaker.failure(error)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What an operator reads: the lines above INFO."""
    return [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]


def test_many_connections_lose_their_server_and_get_it_back_with_two_lines(
    outage: Outage, caplog: pytest.LogCaptureFixture
) -> None:
    sessions = [connection.copy() for _ in range(5)]
    breakers = [CircuitBreaker(f"Loop {number}") for number in range(5)]
    for session in sessions:
        session.inc_thread_sharing()
        cut(session)

    for session, breaker in zip(sessions, breakers, strict=True):
        ask(session, breaker)
    assert outage.lasts
    assert [breaker.state for breaker in breakers] == [State.FAILING] * 5
    for session, breaker in zip(sessions, breakers, strict=True):
        ask(session, breaker)
        session.close()

    assert not outage.lasts
    assert [breaker.state for breaker in breakers] == [State.CLOSED] * 5
    first, last = logged(caplog)
    assert re.match(r"Database 'default' does not answer: \w+Error: ", first)
    assert last.startswith("Database 'default' answers again after ")
    assert sum("failed; trying again" in record.getMessage() for record in caplog.records) == 5, "noted, as information"


def test_its_end_is_reported_once_to_all_that_wait(outage: Outage, second_connection: Any) -> None:
    ends: list[str] = []
    with outage.on_recovery(lambda: ends.append("end")):
        outage.connection_failed(OperationalError("gone"))
        second_connection.connect()
        second_connection.close()
        assert ends == ["end"]
        second_connection.connect()
        assert ends == ["end"], "there was no outage"
    outage.connection_failed(OperationalError("gone"))
    second_connection.close()
    second_connection.connect()

    assert not outage.lasts
    assert ends == ["end"]


def test_what_an_old_connection_answers_is_no_end_of_it(outage: Outage, second_connection: Any) -> None:
    second_connection.connect()
    outage.connection_failed(OperationalError("gone"))

    ask(second_connection, CircuitBreaker("Loop"))

    assert outage.lasts


def test_an_error_of_a_server_that_answers_is_reported_by_its_own_breaker(
    outage: Outage, second_connection: Any, caplog: pytest.LogCaptureFixture
) -> None:
    breaker = CircuitBreaker("Loop")
    with (
        pytest.raises(ProgrammingError) as raised,
        ResponseDeadline(second_connection),
        second_connection.cursor() as cursor,
    ):
        cursor.execute("SELECT * FROM no_such_table")

    breaker.failure(raised.value)

    assert not outage.lasts
    assert logged(caplog) == [f"Loop failed; trying again: ProgrammingError: {str(raised.value).splitlines()[0]}"]
    breaker.success()
    assert "works again" in logged(caplog)[-1]


def test_a_server_that_has_become_read_only_is_no_outage(outage: Outage, second_connection: Any) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("PostgreSQL's way to be read-only")
    with second_connection.cursor() as cursor:
        cursor.execute("SET default_transaction_read_only = on")

    with (
        pytest.raises(Exception, match="read-only"),
        ResponseDeadline(second_connection),
        second_connection.cursor() as cursor,
    ):
        cursor.execute("DELETE FROM queueapp_leader")

    assert not outage.lasts


def test_a_connection_that_is_lost_in_a_transaction_is_an_outage_though_another_one_is_open_by_then(
    outage: Outage, second_connection: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Django opens it at the end of a block whose rollback could not be sent: the breaker need not tell of it again."""
    breaker = CircuitBreaker("Loop")
    session = session_of(connection)

    def is_cut_within() -> None:
        with ResponseDeadline(connection), transaction.atomic(), connection.cursor() as cursor:
            kill(second_connection, session)
            cursor.execute("SELECT 1")

    with pytest.raises(Error) as raised:
        is_cut_within()
    breaker.failure(raised.value)
    connection.ensure_connection()

    assert not outage.lasts
    first, last = logged(caplog)
    assert "does not answer" in first
    assert "answers again" in last


def test_a_breaker_that_fails_in_an_outage_and_then_by_itself_reports_it(
    outage: Outage, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    breaker, gone = CircuitBreaker("Loop"), OperationalError("gone")
    outage.connection_failed(gone)
    breaker.failure(gone)
    assert len(logged(caplog)) == 1

    breaker.failure(ValueError("something else"))
    breaker.failure(ValueError("something else"))

    assert logged(caplog)[1:] == ["Loop failed; trying again: ValueError: something else"]


def test_a_database_that_comes_and_goes_does_not_fill_the_log(
    outage: Outage, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(50):
        outage.connection_failed(OperationalError("gone"))
        clock.now += 0.1
        outage.recovered()
        clock.now += 0.1
    assert len(logged(caplog)) == 2

    outage.connection_failed(OperationalError("gone for longer"))
    clock.now += connection_timeouts.NOTABLE
    outage.connection_failed(OperationalError("still gone"))
    outage.recovered()
    assert len(logged(caplog)) == 4, "a lasting outage is reported all the same"

    clock.now += connection_timeouts.SPACING
    outage.connection_failed(OperationalError("gone again"))
    assert logged(caplog)[4:] == ["Database 'default' does not answer: OperationalError: gone again"]


def test_fifty_threads_make_one_outage(outage: Outage, caplog: pytest.LogCaptureFixture) -> None:
    go = threading.Barrier(50)

    def fail() -> None:
        go.wait(DEADLINE)
        for _ in range(20):
            outage.connection_failed(psycopg.OperationalError("gone"))

    threads = [threading.Thread(target=fail) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers = [threading.Thread(target=outage.recovered) for _ in range(50)]
    for thread in answers:
        thread.start()
    for thread in answers:
        thread.join()

    assert len(logged(caplog)) == 2


def test_each_database_has_its_own(caplog: pytest.LogCaptureFixture) -> None:
    error = OperationalError("gone")
    outage_of("elsewhere").connection_failed(error)

    assert outage_of("elsewhere").lasts
    assert not outage_of("default").lasts
    assert connection_timeouts.caused_by_outage(error)
    assert not connection_timeouts.caused_by_outage(OperationalError("gone"))
    connections["default"].ensure_connection()
    assert outage_of("elsewhere").lasts
