"""The sink's transactions on SQL Server, with Microsoft's driver on a line whose other end speaks TDS and is no
database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from queueapp.contrib.spark.client import SinkClient
from queueapp.contrib.spark.columns import Plan
from queueapp.contrib.spark.errors import InvalidDataFrame, SparkSinkError
from queueapp.contrib.spark.targets import Database, take_snapshot
from queueapp.models import SparkCommit
from queueapp.sql import spark_sql
from queueapp.sql.spark import STAGED, LedgerTable
from queueapp.sql.sqlserver.errors import DEADLOCKED
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


def test_rows_are_counted_whatever_the_server_has_set(client: SinkClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NOCOUNT on, a batch that was recorded before would not be known as such."""
    from queueapp.contrib.spark import sqlserver

    assert sqlserver.COUNT_ROWS == "SET NOCOUNT OFF"
    monkeypatch.setattr(sqlserver, "COUNT_ROWS", f"SET NOCOUNT OFF {refusal(50000, 16, 'seen by the server')}")
    with pytest.raises(client.errors, match="seen by the server"), client.connect():
        pytest.fail("connected without it")


class BulkCopy:
    """A cursor whose bulk copy ends as its arguments say."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def __enter__(self) -> BulkCopy:
        return self

    def __exit__(self, *_: object) -> None: ...

    def cursor(self) -> BulkCopy:
        return self

    def bulkcopy_arrow(self, table: str, source: Iterator[Any], **_: Any) -> dict[str, int]:
        try:
            rows = sum(batch.num_rows for batch in source)
        except Exception as error:
            raise RuntimeError("Failed to read the source") from error
        if self._error is not None:
            raise self._error
        return {"rows_copied": rows}


def batches(*, broken: bool = False) -> Iterator[pa.RecordBatch]:
    yield pa.record_batch([pa.array([1, 2])], names=["ord"])
    if broken:
        raise InvalidDataFrame("row 3: body = NaN is not accepted")


def test_a_task_that_cannot_copy_its_rows_says_why(client: Any) -> None:
    assert client._bulk_copy(BulkCopy(None), "stage", batches(), ["ord"]) == 2

    server = RuntimeError("Bulk copy failed:\n  Server Error 1105:\n  Could not allocate space: the disk is full.\n")
    outer = RuntimeError("The cursor was closed")
    outer.__cause__ = server
    with pytest.raises(SparkSinkError, match=r"could not be copied into stage: Could not allocate space: .* full\.$"):
        client._bulk_copy(BulkCopy(outer), "stage", batches(), ["ord"])


def test_a_value_that_cannot_be_encoded_is_named_and_not_the_drivers_word_for_it(client: Any) -> None:
    with pytest.raises(InvalidDataFrame, match="row 3: body = NaN"):
        client._bulk_copy(BulkCopy(None), "stage", batches(broken=True), ["ord"])


@pytest.mark.parametrize(
    ("words", "text", "again"),
    [
        ("Integrity constraint violation", "Cannot insert duplicate key in object 'dbo.queueapp_sparkcommit'", True),
        ("Integrity constraint violation", "Cannot insert duplicate key in object 'dbo.testapp_urgent'", False),
        ("Syntax error or access violation", DEADLOCKED[1], True),
        ("Syntax error or access violation", "Incorrect syntax", False),
    ],
)
def test_a_commit_that_another_one_was_before_is_tried_again(client: Any, words: str, text: str, again: bool) -> None:
    error = client.errors[0](words, text)
    assert client.is_transient(error) is again


def test_a_lock_that_is_refused_is_an_error(client: Any) -> None:
    sql, _ = client.sql.fence(exclusive=True)
    assert f"IF @held < 0 THROW {DEADLOCKED[0]}, '{DEADLOCKED[1]}', 1; SELECT @held" in sql
    assert "HOLDLOCK" not in client.sql.record()
