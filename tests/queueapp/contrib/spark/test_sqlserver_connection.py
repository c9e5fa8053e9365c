"""The sink's transactions on SQL Server, with Microsoft's driver on a line whose other end speaks TDS and is no
database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from queueapp.contrib.spark.client import SinkClient
from queueapp.contrib.spark.columns import Plan
from queueapp.contrib.spark.targets import Database, take_snapshot
from queueapp.models import SparkCommit
from queueapp.sql import spark_sql
from queueapp.sql.spark import STAGED, LedgerTable
from queueapp.sql.tables import QueueTable
from tests import odbc
from tests.queueapp.sql.drivers.tds import TdsServer, broken_line, refusal
from tests.testapp.models import Urgent


@pytest.fixture(scope="module")
def tds() -> Iterator[TdsServer]:
    with TdsServer() as server:
        yield server


@pytest.fixture
def client(tds: TdsServer) -> SinkClient:
    odbc.required()
    pytest.importorskip("mssql_python", exc_type=ImportError)
    from queueapp.contrib.spark.sqlserver import SqlServerClient

    database = Database("sqlserver", "microsoft", f"SERVER=127.0.0.1,{tds.port};UID=app;PWD=x;DATABASE=shop;Encrypt=no")
    sql = spark_sql("microsoft", QueueTable.of(Urgent), LedgerTable.of(SparkCommit))
    return SqlServerClient(database, take_snapshot().find("testapp.Urgent"), sql, Plan("testapp.Urgent", STAGED), None)


def transact(client: SinkClient, connection: Any, statement: str) -> None:
    with client.transaction(connection):
        assert connection.autocommit is False
        client.execute(connection, statement)


def test_connection_commits_by_itself_after_a_transaction(client: SinkClient) -> None:
    with client.connect() as connection:
        transact(client, connection, "SELECT 1")
        assert connection.autocommit is True


def test_connection_commits_by_itself_after_a_transaction_that_was_rolled_back(client: SinkClient) -> None:
    with client.connect() as connection:
        with pytest.raises(client.errors, match="wrong"):
            transact(client, connection, f"SELECT 1 {refusal(245, 16, 'wrong')}")
        assert connection.autocommit is True


def test_line_that_breaks_in_a_transaction_is_what_is_raised(client: SinkClient) -> None:
    with client.connect() as connection, pytest.raises(client.errors) as raised:
        transact(client, connection, f"SELECT 1 {broken_line()}")
    assert client.is_transient(raised.value)  # type: ignore[arg-type]
