"""What a session is left in, as each driver knows it; SQL Server's drivers against a server that speaks just enough of
TDS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from django.db import Error, connections

from queueapp.sql import SessionState
from queueapp.sql.sqlserver.backend import SqlServerBackend
from queueapp.sql.sqlserver.statements import execute, fetch
from tests import odbc
from tests.queueapp.sql.drivers.tds import NUMBER, TdsServer, broken_line, message, refusal
from tests.queueapp.sql.server import Server


def state(server: Server, connection: Any) -> SessionState:
    """The state, which must be the same whether the server is asked or not."""
    known = server.backend.sessions.state(connection)
    asked = server.backend.sessions.state(connection, ask=True)
    assert known is asked
    return asked


def run(connection: Any, sql: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql)


def test_state_of_a_session_from_its_first_to_its_last(server: Server) -> None:
    connection = server.another()
    assert state(server, connection) is SessionState.GONE

    run(connection, "SELECT 1")
    assert state(server, connection) is SessionState.IDLE

    connection.set_autocommit(False)
    run(connection, "DELETE FROM testapp_effect")
    assert state(server, connection) is SessionState.IN_TRANSACTION

    connection.rollback()
    connection.set_autocommit(True)
    assert state(server, connection) is SessionState.IDLE

    connection.connection.close()
    assert state(server, connection) is SessionState.GONE


def test_transaction_of_raw_sql_is_known_to_who_asks(server: Server) -> None:
    connection = server.another()
    run(connection, "BEGIN" if server.vendor == "postgresql" else "BEGIN TRANSACTION")

    assert server.backend.sessions.state(connection, ask=True) is SessionState.IN_TRANSACTION


def test_failed_transaction(server: Server) -> None:
    if server.vendor != "postgresql":
        pytest.skip("SQL Server goes on with a transaction after most errors")
    connection = server.another()
    connection.set_autocommit(False)
    assert state(server, connection) is SessionState.MANUAL

    with suppress(Error):
        run(connection, "SELECT * FROM no_such_table")
    assert state(server, connection) is SessionState.FAILED


def test_session_that_the_server_has_ended_is_known_to_have_hung_up(server: Server) -> None:
    if server.vendor != "postgresql":
        pytest.skip("the drivers of SQL Server do not tell before the next statement")
    connection = server.another()
    run(connection, "SELECT 1")
    assert not server.backend.sessions.is_disconnected(connection)

    server.run("SELECT pg_terminate_backend(%s, 10000)", connection.connection.info.backend_pid)

    assert server.backend.sessions.state(connection) is SessionState.IDLE, "not examined yet"
    assert server.backend.sessions.is_disconnected(connection)
    assert server.backend.sessions.state(connection) is SessionState.GONE


def test_abandoned_session_releases_its_locks(server: Server) -> None:
    connection = server.another()
    connection.set_autocommit(False)
    run(connection, "DELETE FROM queueapp_leader")
    if server.vendor == "postgresql":
        connection.connection.pgconn.send_query(b"SELECT pg_sleep(600)")
    raw = connection.connection

    server.backend.sessions.discard(raw)
    server.backend.sessions.discard(raw)

    connection.connection = None
    server.run("DELETE FROM queueapp_leader")


# -- the drivers of SQL Server ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tds() -> Iterator[TdsServer]:
    odbc.required()
    with TdsServer() as server:
        yield server


@pytest.fixture
def sql_server(tds: TdsServer) -> Iterator[Any]:
    """A Django connection whose session is that of the real driver."""
    backend = pytest.importorskip("mssql.base", exc_type=ImportError)
    driver = pytest.importorskip("mssql_python", exc_type=ImportError)
    connection = backend.DatabaseWrapper(connections.settings["default"] | {"ENGINE": "mssql", "OPTIONS": {}}, "tds")
    connection.Database = driver
    connection._use_python_driver = True
    connection.connection = driver.connect(
        f"SERVER=127.0.0.1,{tds.port};UID=app;PWD=secret;DATABASE=shop;Encrypt=no", native_uuid=False, autocommit=True
    )
    yield connection
    SqlServerBackend().sessions.discard(connection.connection)


def test_driver_of_sql_server_knows_its_mode(sql_server: Any) -> None:
    backend = SqlServerBackend()
    assert backend.sessions.state(sql_server) is SessionState.IDLE

    sql_server.connection.autocommit = False
    assert backend.sessions.state(sql_server) is SessionState.IN_TRANSACTION

    sql_server.connection.close()
    assert backend.sessions.state(sql_server) is SessionState.GONE
    assert backend.sessions.state(sql_server, ask=True) is SessionState.GONE


def test_message_of_the_server_is_no_result(sql_server: Any) -> None:
    """The driver gives it as one without columns: of a trigger's PRINT, say, before the count of an INSERT."""
    sql_server.ensure_connection = lambda: None  # it is connected, and no database of the tests
    assert [tuple(row) for row in fetch(sql_server, f"SELECT 1 {message('hello')}", ())] == [(NUMBER,)]
    assert execute(sql_server, f"DELETE FROM [t] {message('hello')}", ()) == NUMBER


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (broken_line(), SessionState.GONE),
        (
            refusal(596, 16, "Cannot continue the execution because the session is in the kill state."),
            SessionState.GONE,
        ),
        (refusal(50000, 16, "Connection is busy with results for another command"), SessionState.BUSY),
    ],
    ids=["line breaks", "killed", "busy"],
)
def test_session_of_sql_server_that_does_not_answer_as_it_should(
    sql_server: Any, answer: str, expected: SessionState
) -> None:
    cursor_of_the_driver = sql_server.create_cursor

    def create_cursor() -> Any:
        cursor = cursor_of_the_driver()
        execute = cursor.execute
        cursor.execute = lambda sql: execute(f"{sql} {answer}")
        return cursor

    sql_server.create_cursor = create_cursor

    assert SqlServerBackend().sessions.state(sql_server, ask=True) is expected


def test_transaction_of_sql_server_is_suspected_after_an_error_alone(sql_server: Any) -> None:
    backend = SqlServerBackend()
    mark = backend.sessions.transaction_mark(sql_server)
    assert not backend.sessions.may_be_another_transaction(sql_server, mark)

    with suppress(Error), sql_server.wrap_database_errors:
        sql_server.connection.cursor().execute(f"SELECT 1 {refusal(1205, 13, 'chosen as the deadlock victim')}")

    assert backend.sessions.may_be_another_transaction(sql_server, mark)
    assert not backend.sessions.is_disconnected(sql_server)
