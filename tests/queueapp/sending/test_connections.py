"""The engine's statements run on Django's connections, so what Django does to connections holds for them: health
checks, ``close_old_connections``, ``close_all``, ages. The spare connection of isolated sends is no exception, nor is a
fork."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from django.core import signals
from django.db import OperationalError, close_old_connections, connection, connections, transaction
from django.db.transaction import TransactionManagementError

from project.paths import CHECKOUT
from queueapp.sending.isolation import close_isolated, isolated_connection
from queueapp.sql import queue_sql
from queueapp.sql.claims import SeqRange
from tests.in_process_worker import eventually, real_commits
from tests.testapp.models import Addressed, Effect, Leased, Transactional

pytestmark = real_commits


@pytest.fixture(autouse=True)
def of_postgresql() -> Iterator[None]:
    if connection.vendor != "postgresql":
        pytest.skip("sessions are looked up and terminated in PostgreSQL's way")
    yield
    close_isolated()


@pytest.fixture
def server() -> Iterator[psycopg.Connection]:
    """A session of the test's own, which Django knows nothing of."""
    params = connection.get_connection_params()
    named = {name: params[name] for name in ("host", "port", "user", "password", "dbname") if params.get(name)}
    with psycopg.connect(**named, autocommit=True) as raw:
        yield raw


@pytest.fixture
def opened() -> Iterator[Callable[..., None]]:
    """Open the thread's connection anew, with other settings of its DATABASES entry until the end of the test."""
    before = dict(connection.settings_dict)

    def reopen(**settings: Any) -> None:
        connection.close()
        connection.settings_dict.update(settings)
        connection.ensure_connection()

    yield reopen
    connection.close()
    connection.settings_dict.update(before)


def session_of(django_connection: Any) -> int:
    """The server's process that serves a connection."""
    return int(django_connection.connection.info.backend_pid)


def session_of_the_spare() -> int:
    with isolated_connection("default") as spare:
        return session_of(spare)


def is_there(server: psycopg.Connection, session: int) -> bool:
    return server.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", [session]).fetchone() is not None


def terminate(server: psycopg.Connection, session: int) -> None:
    server.execute("SELECT pg_terminate_backend(%s)", [session])
    eventually(lambda: not is_there(server, session))


# -- a session that died while it was idle -------------------------------------------------------------------------

FIRST_STATEMENTS = {
    "send": lambda: Leased.send({}),
    "send with options": lambda: Leased.send({}, expires_in=timedelta(hours=1)),
    "send to a recipient": lambda: Addressed.send({}, recipient="x", unknown_recipient=True),
    "send in a transaction": transaction.atomic(lambda: Leased.send({})),
    "send_many": lambda: Leased.send_many([{}, {}]),
    "send later": lambda: Leased.send({}, delay=timedelta(hours=1)),
    "receive": lambda: Leased.receive().__enter__(),
    "receive in a transaction": lambda: Transactional.receive().__enter__().__exit__(None, None, None),
    "peek": lambda: queue_sql(Leased, connections["default"]).claims.peek(connections["default"], [SeqRange()], [], 1),
    "the ORM": lambda: Effect.objects.count(),
}


@pytest.mark.parametrize("statement", FIRST_STATEMENTS)
def test_a_dead_session_is_healed_before_the_first_statement_of_a_request(
    server: psycopg.Connection, opened: Callable[..., None], statement: str
) -> None:
    opened(CONN_MAX_AGE=None, CONN_HEALTH_CHECKS=True)
    Leased.send({})
    first = session_of(connection)
    terminate(server, first)

    signals.request_started.send(sender=None)
    FIRST_STATEMENTS[statement]()

    assert session_of(connection) != first


def test_a_dead_spare_session_is_healed_before_the_first_isolated_send_of_a_request(
    server: psycopg.Connection, opened: Callable[..., None]
) -> None:
    opened(CONN_MAX_AGE=None, CONN_HEALTH_CHECKS=True)
    Leased.send({}, isolated=True)
    first = session_of_the_spare()
    terminate(server, first)

    signals.request_started.send(sender=None)
    Leased.send({}, isolated=True)

    assert session_of_the_spare() != first
    assert Leased.objects.count() == 2


def test_within_a_request_a_session_is_checked_once(opened: Callable[..., None], monkeypatch: Any) -> None:
    opened(CONN_MAX_AGE=None, CONN_HEALTH_CHECKS=True)
    checks: list[int] = []
    is_usable = connection.is_usable
    monkeypatch.setattr(connections["default"], "is_usable", lambda: (checks.append(1), is_usable())[1])

    signals.request_started.send(sender=None)
    for _ in range(3):
        Leased.send({})

    assert len(checks) == 1


def test_without_health_checks_an_error_heals_with_the_next_request(
    server: psycopg.Connection, opened: Callable[..., None]
) -> None:
    opened(CONN_MAX_AGE=None, CONN_HEALTH_CHECKS=False)
    Leased.send({})
    terminate(server, session_of(connection))

    signals.request_started.send(sender=None)
    with pytest.raises(OperationalError):
        Leased.send({})
    signals.request_started.send(sender=None)
    Leased.send({})

    assert Leased.objects.count() == 2


# -- the spare connection lives as the ordinary one does -----------------------------------------------------------


@pytest.mark.parametrize(
    "close", [connections.close_all, lambda: connection.close(), close_isolated], ids=["all", "this", "own"]
)
def test_what_closes_the_connection_closes_the_spare_one(server: psycopg.Connection, close: Callable[[], None]) -> None:
    Leased.send({}, isolated=True)
    spare = session_of_the_spare()
    assert is_there(server, spare)

    close()

    eventually(lambda: not is_there(server, spare))
    Leased.send({}, isolated=True)
    assert Leased.objects.count() == 2


@pytest.mark.parametrize("uses_the_ordinary_one", [False, True])
def test_the_spare_one_is_closed_even_if_the_ordinary_one_was_never_opened(
    server: psycopg.Connection, uses_the_ordinary_one: bool
) -> None:
    connections.close_all()
    Leased.send({}, isolated=True)
    if uses_the_ordinary_one:
        connection.ensure_connection()
    spare = session_of_the_spare()

    connections.close_all()

    eventually(lambda: not is_there(server, spare))


@pytest.mark.parametrize(("age", "lives"), [(0, False), (3600, True), (None, True)])
def test_the_spare_one_lives_as_long_as_connections_may(
    server: psycopg.Connection, opened: Callable[..., None], age: int | None, lives: bool
) -> None:
    opened(CONN_MAX_AGE=age)
    Leased.send({}, isolated=True)
    spare = session_of_the_spare()

    close_old_connections()

    if not lives:
        eventually(lambda: not is_there(server, spare))
    Leased.send({}, isolated=True)
    assert (session_of_the_spare() == spare) is lives


def test_a_spare_one_that_broke_is_not_kept(server: psycopg.Connection) -> None:
    Leased.send({}, isolated=True)
    terminate(server, session_of_the_spare())

    with pytest.raises(OperationalError):
        Leased.send({}, isolated=True)
    Leased.send({}, isolated=True)

    assert Leased.objects.count() == 2


def test_closing_in_a_transaction_closes_both(server: psycopg.Connection) -> None:
    with pytest.raises(TransactionManagementError), transaction.atomic():  # noqa: PT012
        spare = _send_isolated_and_close()
        eventually(lambda: not is_there(server, spare))
        Leased.send({})

    assert Leased.objects.count() == 1


def _send_isolated_and_close() -> int:
    Leased.send({}, isolated=True)
    session = session_of_the_spare()
    connection.close()
    return session


# -- forks -----------------------------------------------------------------------------------------------------------


def in_a_child(work: Callable[[], Any]) -> Any:
    """Fork, run it there, and return what it returned; the child ends as children of multiprocessing do."""
    here, there = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        try:
            there.send(work())
        except BaseException as error:
            there.send(repr(error))
            raise

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    assert here.poll(30)
    result = here.recv()
    child.join(30)
    assert child.exitcode == 0, result
    return result


def send_isolated_and_say_where() -> tuple[int, int]:
    Leased.send({}, isolated=True)
    return os.getpid(), session_of_the_spare()


def close_everything() -> str:
    connections.close_all()
    gc.collect()
    return "closed"


def send_and_close() -> tuple[int, int]:
    where = send_isolated_and_say_where()
    close_everything()
    return where


def look_after() -> str:
    signals.request_started.send(sender=None)
    signals.request_finished.send(sender=None)
    gc.collect()
    return "looked after"


@pytest.mark.parametrize("work", [send_isolated_and_say_where, close_everything, send_and_close, look_after, os.getpid])
def test_a_forked_child_leaves_its_parents_spare_one_alone(server: psycopg.Connection, work: Callable[[], Any]) -> None:
    connections.close_all()  # as a process that forks has to do
    Leased.send({}, isolated=True)
    session = session_of_the_spare()

    result = in_a_child(work)

    assert is_there(server, session)
    assert session_of_the_spare() == session
    Leased.send({}, isolated=True)
    sent_by_the_child = 0
    if isinstance(result, tuple):
        sent_by_the_child = 1
        assert result[0] != os.getpid()
        assert result[1] != session, "the child opened one of its own"
    assert Leased.objects.count() == 2 + sent_by_the_child


# -- Django's own tests ----------------------------------------------------------------------------------------------


def test_a_test_database_can_be_dropped_after_isolated_sends(child_environment: dict[str, str]) -> None:
    label = "tests.queueapp.sending.isolated_in_django_tests"
    command = [sys.executable, "manage.py", "test", "--noinput", label]

    run = subprocess.run(command, cwd=CHECKOUT, env=child_environment, capture_output=True, text=True, timeout=300)

    assert run.returncode == 0, run.stdout + run.stderr
    assert "Ran 3 tests" in run.stderr
