"""What a database error means follows from its code: errors made on real databases, and real drivers fed real
errors."""

from __future__ import annotations

import glob
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.db import Error, connections
from django.db.backends.postgresql import base as postgresql
from django.db.utils import DatabaseErrorWrapper

from queueapp.sql import queue_sql
from queueapp.sql.postgresql.backend import PostgresqlBackend
from queueapp.sql.sqlserver.backend import SqlServerBackend
from queueapp.sql.sqlserver.errors import LockTimeout, error_kind, missing_driver
from tests import odbc
from tests.in_process_worker import real_commits
from tests.queueapp.sql.drivers.tds import TdsServer, broken_line, refusal
from tests.queueapp.sql.server import ALL, Server
from tests.testapp.models import Leased, Transactional

# -- made on a database ----------------------------------------------------------------------------------------------


def failing(server: Server, connection: Any, sql: str) -> str:
    """The kind of the error that a statement raises."""
    with pytest.raises(Error) as raised, connection.cursor() as cursor:
        cursor.execute(sql)
    return server.kind_of(raised.value)


def test_deadlock_has_one_victim(server: Server) -> None:
    item, two = server.put(Transactional, 2)
    kinds: list[str] = []
    both_hold = threading.Barrier(2)

    def lock_both(first: int, second: int) -> None:
        connection = server.another()
        sql = queue_sql(Transactional, connection)
        try:
            with server.transaction(connection):
                sql.failures.lock(connection, first, None, 60_000)
                both_hold.wait()
                sql.failures.lock(connection, second, None, 60_000)
            kinds.append("done")
        except Error as error:
            kinds.append(server.kind_of(error))

    threads = [threading.Thread(target=lock_both, args=pair) for pair in ((item, two), (two, item))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(kinds) == ["deadlock", "done"]


def test_lock_timeout_is_locked(server: Server) -> None:
    (seq,) = server.put(Transactional)
    holder, waiter = server.another(), server.another()

    with server.rolled_back(holder), server.rolled_back(waiter):
        queue_sql(Transactional, holder).failures.lock(holder, seq, None, 1_000)
        with pytest.raises(Error) as raised:
            queue_sql(Transactional, waiter).failures.lock(waiter, seq, None, 50)

    assert server.kind_of(raised.value) == "locked"


@pytest.mark.parametrize("sql", ["SELECT * FROM no_such_table", "SELECT no_such_column FROM testapp_leased"])
def test_missing_table_or_column_is_missing(server: Server, sql: str) -> None:
    assert failing(server, server.another(), sql) == "missing"


def test_missing_privilege_is_denied(server: Server) -> None:
    name = f"nobody_{uuid.uuid4().hex}"
    create, become, drop = {
        "postgresql": (f"CREATE ROLE {name}", f"SET ROLE {name}", f"DROP ROLE {name}"),
        "microsoft": (f"CREATE USER {name} WITHOUT LOGIN", f"EXECUTE AS USER = '{name}'", f"DROP USER {name}"),
    }[server.vendor]
    server.run(create)
    second_session = server.another()
    with second_session.cursor() as cursor:
        cursor.execute(become)

    assert failing(server, second_session, "SELECT * FROM testapp_leased") == "denied"
    with pytest.raises(Error) as raised:
        queue_sql(Leased, second_session).claims.claim_by_delete(second_session, ALL, 1)
    assert server.kind_of(raised.value) == "denied"

    second_session.close()
    server.run(drop)


def test_terminated_session_is_a_lost_connection(server: Server) -> None:
    victim = server.another()
    with victim.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()" if server.vendor == "postgresql" else "SELECT @@SPID")
        session = int(cursor.fetchone()[0])
    if server.vendor == "postgresql":
        server.run("SELECT pg_terminate_backend(%s)", session)
    else:
        server.run(f"KILL {session}")

    with pytest.raises(Error) as raised:
        queue_sql(Leased, victim).maintenance.is_empty(victim)

    assert server.kind_of(raised.value) == "connection"


def test_duplicate_key_and_wrong_syntax_are_nothing_special(server: Server) -> None:
    second_session = server.another()
    assert failing(server, second_session, "SELEKT 1") == "unknown"
    assert failing(server, second_session, "INSERT INTO queueapp_leader (role) VALUES (NULL)") == "unknown"
    assert server.kind_of(ValueError("not of a database")) == "unknown"


@real_commits
def test_serialization_failure_is_like_a_deadlock() -> None:
    server = Server("default")
    (seq,) = server.put(Leased)
    second_session = server.another()

    with server.rolled_back(second_session), second_session.cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("SELECT 1")
        server.lease(Leased)
        with pytest.raises(Error) as raised:
            queue_sql(Leased, second_session).failures.requeue(
                second_session, seq, deliveries=0, cancels=0, failures=None
            )

    server.close()
    assert server.kind_of(raised.value) == "deadlock"


@pytest.mark.django_db
def test_postgresql_that_is_not_there_is_a_lost_connection() -> None:
    settings = connections.settings["default"] | {"HOST": "127.0.0.1", "PORT": "1"}
    with pytest.raises(Error) as raised:
        postgresql.DatabaseWrapper(settings, "nowhere").ensure_connection()

    assert PostgresqlBackend().error_kind(raised.value).value == "connection"


# -- the drivers of SQL Server ---------------------------------------------------------------------------------------

#: What SQL Server says, by its number and severity, and what that means.
MESSAGES = [
    (1205, 13, "Transaction (Process ID 55) was deadlocked on lock resources with another process and has been chosen "
               "as "
               "the deadlock victim. Rerun the transaction.", "deadlock"),
    (3960, 16, "Snapshot isolation transaction aborted due to update conflict. You cannot use snapshot isolation to "
               "access "
               "table 'dbo.orders' directly or indirectly in database 'shop' to update it.", "deadlock"),
    (3961, 16, "Snapshot isolation transaction failed in database 'shop' because the object accessed by the statement "
               "has "
               "been modified by a DDL statement in another concurrent transaction.", "deadlock"),
    (1222, 16, "Lock request time out period exceeded.", "locked"),
    (208, 16, "Invalid object name 'dbo.orders'.", "missing"),
    (207, 16, "Invalid column name 'lease_token'.", "missing"),
    (229, 14, "The DELETE permission was denied on the object 'orders', database 'shop', schema 'dbo'.", "denied"),
    (230, 14, "The SELECT permission was denied on the column 'body' of the object 'orders'.", "denied"),
    (262, 14, "CREATE TABLE permission denied in database 'shop'.", "denied"),
    (297, 16, "The user does not have permission to perform this action.", "denied"),
    (916, 14, 'The server principal "app" is not able to access the database "shop" under the current security '
              'context.',
     "connection"),
    (4060, 11, 'Cannot open database "shop" requested by the login. The login failed.', "connection"),
    (18456, 14, "Login failed for user 'app'.", "connection"),
    (596, 21, "Cannot continue the execution because the session is in the kill state.", "connection"),
    (6005, 14, "SHUTDOWN is in progress.", "connection"),
    (3906, 16, 'Failed to update database "shop" because the database is read-only.', "connection"),
    (976, 14, "The target database, 'shop', is participating in an availability group and is currently not accessible "
              "for "
              "queries.", "connection"),
    (983, 14, "Unable to access availability database 'shop' because the database replica is not in the PRIMARY or "
              "SECONDARY role.", "connection"),
    (40197, 20, "The service has encountered an error processing your request. Please try again. Error code 40143.",
     "connection"),
    (701, 17, "There is insufficient system memory in resource pool 'default' to run this query.", "exhausted"),
    (802, 17, "There is insufficient memory available in the buffer pool.", "exhausted"),
    (8645, 17, "A timeout occurred while waiting for memory resources to execute the query in resource pool 'default' "
               "(2). "
               "Rerun the query.", "exhausted"),
    (1204, 19, "The instance of the SQL Server Database Engine cannot obtain a LOCK resource at this "
               "time.", "exhausted"),
    (1101, 17, "Could not allocate a new page for database 'shop' because the 'PRIMARY' filegroup is "
               "full.", "exhausted"),
    (1105, 17, "Could not allocate space for object 'dbo.orders' in database 'shop' because the 'PRIMARY' filegroup is "
               "full.",
     "exhausted"),
    (9002, 17, "The transaction log for database 'shop' is full due to 'LOG_BACKUP'.", "exhausted"),
    (40544, 17, "The database 'shop' has reached its size quota. Partition or delete data.", "exhausted"),
    (40613, 17, "Database 'shop' on server 'x' is not currently available. Please retry the connection later.",
     "connection"),
    (40501, 20, "The service is currently busy. Retry the request after 10 seconds. Code: 0", "connection"),
    (49918, 16, "Cannot process request. Not enough resources to process request. The service is currently busy.",
     "connection"),
    (49920, 16, 'Cannot process request. Too many operations in progress for subscription "1".', "connection"),
    (10928, 20, "Resource ID: 1. The request limit for the database is 90 and has been reached.", "connection"),
    (10929, 20, "Resource ID: 1. However, the server is currently too busy to support requests greater than 0.",
     "connection"),
    (2627, 14, "Violation of PRIMARY KEY constraint 'PK'. Cannot insert duplicate key in object "
               "'dbo.orders'.", "unknown"),
    (515, 16, "Cannot insert the value NULL into column 'Recoverable', table 'dbo.orders'.", "unknown"),
    (102, 15, "Incorrect syntax near 'WITH'.", "unknown"),
    (650, 16, "You can only specify the READPAST lock in the READ COMMITTED or REPEATABLE READ isolation "
              "levels.", "unknown"),
    (50000, 16, "A trigger of the user's own says no.", "unknown"),
]  # fmt: skip

#: Those whose meaning must not depend on the server's language, because a message's fate hangs on it.
WITHOUT_TEXT = [(1205, 13, "deadlock"), (208, 16, "missing"), (207, 16, "missing"), (2627, 14, "unknown")]


@pytest.fixture(scope="module")
def tds() -> Iterator[TdsServer]:
    with TdsServer() as server:
        yield server


def mssql_python_connection(port: int) -> Any:
    odbc.required()
    driver = pytest.importorskip("mssql_python", exc_type=ImportError)
    return driver, driver.connect(_address(port), native_uuid=False)


def pyodbc_connection(port: int) -> Any:
    odbc.required()
    driver = pytest.importorskip("pyodbc", exc_type=ImportError)
    # Microsoft's ODBC driver comes with a package of the extra; unixODBC takes a path for a name.
    libraries = pytest.importorskip("mssql_python_odbc")
    (library,) = glob.glob(f"{Path(libraries.__file__).parent}/libs/linux/debian_ubuntu/*/lib/libmsodbcsql*") or ("",)
    if not library:
        pytest.skip("no ODBC driver of Microsoft for this system in mssql_python_odbc")
    return driver, driver.connect(f"DRIVER={library};{_address(port)}", autocommit=True)


def _address(port: int) -> str:
    return f"SERVER=127.0.0.1,{port};UID=app;PWD=secret;DATABASE=shop;Encrypt=no"


drivers = pytest.mark.parametrize("connect", [mssql_python_connection, pyodbc_connection])


@contextmanager
def as_django_raises_them(driver: Any) -> Iterator[None]:
    class Wrapper:
        Database = driver
        errors_occurred = False

    with DatabaseErrorWrapper(Wrapper()):
        yield


def refused(connect: Any, server: TdsServer, said: str, *parameters: Any) -> BaseException:
    """The error that Django raises when the server refuses a statement; ``said`` is how."""
    driver, connection = connect(server.port)
    sql = f"SELECT 1 {'WHERE 1 = ? ' if parameters else ''}{said}"
    with pytest.raises(Error) as raised, as_django_raises_them(driver):
        connection.cursor().execute(sql, *parameters)
    return raised.value


@drivers
@pytest.mark.parametrize(
    ("number", "severity", "text", "kind"), MESSAGES, ids=[str(message[0]) for message in MESSAGES]
)
def test_error_of_sql_server(tds: TdsServer, connect: Any, number: int, severity: int, text: str, kind: str) -> None:
    said = refusal(number, severity, text)

    assert error_kind(refused(connect, tds, said)).value == kind
    assert error_kind(refused(connect, tds, said, 1)).value == kind


@drivers
@pytest.mark.parametrize(("number", "severity", "kind"), WITHOUT_TEXT)
def test_error_of_a_server_that_speaks_another_language(
    tds: TdsServer, connect: Any, number: int, severity: int, kind: str
) -> None:
    assert error_kind(refused(connect, tds, refusal(number, severity, "Das geht leider nicht."))).value == kind


def test_number_decides_where_the_driver_reports_it(tds: TdsServer) -> None:
    said = refusal(1222, 16, "Das Timeout für Sperranforderungen wurde überschritten.")

    assert error_kind(refused(pyodbc_connection, tds, said)).value == "locked"


@drivers
def test_only_a_missing_table_is_a_queue_that_is_not_found(tds: TdsServer, connect: Any) -> None:
    table = refused(connect, tds, refusal(208, 16, "Invalid object name 'orders'."))
    column = refused(connect, tds, refusal(207, 16, "Invalid column name 'failures'."))

    assert error_kind(table, table_only=True).value == "missing"
    assert error_kind(column, table_only=True).value == "unknown"


@drivers
def test_line_that_breaks_is_a_lost_connection(tds: TdsServer, connect: Any) -> None:
    assert error_kind(refused(connect, tds, broken_line())).value == "connection"


def test_closed_connection_of_the_driver_is_a_lost_connection(tds: TdsServer) -> None:
    driver, connection = mssql_python_connection(tds.port)
    connection.close()

    with pytest.raises(Error) as raised, as_django_raises_them(driver):
        connection.cursor()

    assert error_kind(raised.value).value == "connection"


def sql_server_at(port: int) -> Any:
    """A Django connection to whatever listens there."""
    backend = pytest.importorskip("mssql.base", exc_type=ImportError)
    settings = connections.settings["default"] | {
        "ENGINE": "mssql", "NAME": "shop", "HOST": "127.0.0.1", "PORT": str(port), "USER": "app", "PASSWORD": "secret",
        "OPTIONS": {"python_driver": "mssql_python", "connection_timeout": 2, "extra_params": "Encrypt=no"},
    }  # fmt: skip
    return backend.DatabaseWrapper(settings, "nowhere")


@pytest.mark.django_db
def test_server_that_is_not_there_is_a_lost_connection() -> None:
    odbc.required()
    with pytest.raises(Error) as raised:
        SqlServerBackend().check_server(sql_server_at(1))

    assert error_kind(raised.value).value == "connection"
    assert missing_driver(raised.value) is None


def test_lock_timeout_that_was_caught_in_sql_is_locked() -> None:
    assert error_kind(LockTimeout(250)).value == "locked"
    assert "250 ms" in str(LockTimeout(250))


def test_future_attributes_of_the_driver_are_used(tds: TdsServer) -> None:
    error = refused(mssql_python_connection, tds, refusal(1222, 16, "unverständlich"))
    assert error_kind(error).value == "unknown"

    error.__cause__.native_error = 1222  # type: ignore[union-attr]
    assert error_kind(error).value == "locked"
