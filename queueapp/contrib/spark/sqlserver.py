"""The sink on SQL Server: mssql-python's bulk copy from Arrow on executors, its ordinary cursor on the driver.

Bulk copy opens a connection of its own, so the staging table is committed before it is filled, and an attempt that
fails drops it. Column mapping is by name. What was not seen on a real server: the speed, and how much is logged.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import mssql_python
import pyarrow as pa

from ...sql.spark import StagingName
from ...sql.sqlserver.errors import DEADLOCKED
from ...sql.sqlserver.spark import COUNT_ROWS
from .client import SinkClient
from .errors import SinkUnavailable, SourceUnavailable, SparkSinkError
from .targets import Database

_ROWS_PER_BATCH = 10_000
_NO_TIMEOUT = 0
#: The driver's words for SQLSTATEs of class 08 and for 40001; it gives no codes.
_TRANSIENT = (
    "Communication link failure",
    "Serialization failure",
    "Client unable to establish",
    "Connection",
    "Timeout",
)
#: The driver's words for SQLSTATE 23000.
_DUPLICATE = "Integrity constraint violation"
_MISSING = ("Base table or view not found", "Column not found")


class SqlServerClient(SinkClient):
    """One queue on SQL Server."""

    errors = (mssql_python.Error,)

    # -- on executors -----------------------------------------------------------------------------------------------

    def stage(
        self, job: str, partition: int, attempt: int, schema: pa.Schema, batches: Iterator[pa.RecordBatch]
    ) -> tuple[str, int]:
        with self.connect() as connection:
            _, ((now,),) = self.execute(connection, self.sql.clock)
            name = StagingName.make(int(now) // 1000, job, partition, attempt)
            self.execute(connection, self.sql.create_staging(name, self.plan.stored, logged=not self.atomic))
            try:
                rows = self._bulk_copy(connection, name.name, numbered(batches), ["ord", *self.plan.stored])
            except BaseException:
                with suppress(mssql_python.Error):
                    self.execute(connection, self.sql.drop_staging(name))
                raise
        return name.name, rows

    def append(self, job: str, partition: int, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> int:
        # Bulk copy straight into the queue would commit in pieces and know neither constants nor the queue's lifetime:
        # so the task stages and moves its own rows. That spares the wait for the slowest task, not the second write.
        table, count = self.stage(job, partition, 0, schema, batches)
        name = StagingName.parse(table)
        with self.connect() as connection:
            try:
                with self.transaction(connection):
                    rows = self.move_all(connection, [(table, count)])
            finally:
                # What is left is dropped by a later job: no reason to do a committed task again, which doubles its
                # rows.
                with suppress(mssql_python.Error):
                    self.execute(connection, self.sql.drop_staging(name))
        return rows

    def _bulk_copy(self, connection: Any, table: str, batches: Iterator[pa.RecordBatch], columns: list[str]) -> int:
        failure: list[BaseException] = []

        def watched() -> Iterator[pa.RecordBatch]:
            # The driver may turn an exception of this iterator into another; the caller gets the exception itself.
            try:
                yield from batches
            except BaseException as error:
                failure.append(error)
                raise

        with connection.cursor() as cursor:
            try:
                result = cursor.bulkcopy_arrow(
                    table,
                    watched(),
                    batch_size=_ROWS_PER_BATCH,
                    timeout=_NO_TIMEOUT,
                    column_mappings=columns,
                    table_lock=True,
                )
            except Exception as error:
                if failure:
                    raise failure[0] from None
                # Spark shows the last line of a task's traceback first.
                raise SparkSinkError(f"The rows could not be copied into {table}: {_last_line(error)}") from error
        return int(result["rows_copied"])

    # -- on the driver ----------------------------------------------------------------------------------------------

    @contextmanager
    def connect(self) -> Iterator[Any]:
        try:
            connection = mssql_python.connect(self.database.conninfo, autocommit=True)
        except mssql_python.Error as error:
            raise SinkUnavailable(
                f"Database {self.database.alias!r} cannot be reached from {socket.gethostname()}: {error}"
            ) from None
        try:
            self.execute(connection, COUNT_ROWS)
            yield connection
        finally:
            with suppress(
                mssql_python.Error
            ):  # it rolls back first, which a broken line refuses, in place of what broke it
                connection.close()

    @contextmanager
    def transaction(self, connection: Any) -> Iterator[None]:
        connection.autocommit = False
        try:
            yield
            connection.commit()
        except BaseException:
            # A broken connection cannot roll back, and need not: the server does.
            with suppress(mssql_python.Error):
                connection.rollback()
                connection.autocommit = True
            raise
        # Otherwise later statements on this connection would be in a transaction without a commit.
        connection.autocommit = True

    def execute(self, connection: Any, sql: str, params: Sequence[Any] = ()) -> tuple[int, list[Any]]:
        with connection.cursor() as cursor:
            cursor.execute(sql, *params)
            # Without OUTPUT the row count is right at once.
            rows = [tuple(row) for row in cursor.fetchall()] if cursor.description else []
            return cursor.rowcount, rows

    def is_transient(self, error: Exception) -> bool:
        words = str(getattr(error, "driver_error", ""))
        # Another commit of the same batch was first: the next try finds its ledger row.
        recorded = words.startswith(_DUPLICATE) and self.sql.ledger.db_table in str(error)
        return recorded or words.startswith(_TRANSIENT) or DEADLOCKED[1] in str(error)

    def is_missing(self, error: Exception) -> bool:
        return str(getattr(error, "driver_error", "")).startswith(_MISSING)

    def explained(self, error: Exception) -> Exception:
        if self.is_missing(error):
            return SinkUnavailable(
                f"A table or column is missing in database {self.database.alias!r} ({error}): run manage.py migrate."
            )
        return error


def _last_line(error: BaseException) -> str:
    """The last line of the first cause: the server's own words stand at the end of what the driver says."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__


@contextmanager
def reading(database: Database) -> Iterator[Callable[[str, Sequence[Any]], pa.Table]]:
    """A connection that reads: a function of statement and parameters. Each statement is a transaction of its own.
    Raises SourceUnavailable."""
    try:
        connection = mssql_python.connect(database.conninfo, autocommit=True)
    except mssql_python.Error as error:
        raise SourceUnavailable(
            f"Database {database.alias!r} cannot be reached from {socket.gethostname()}: {error}"
        ) from None

    def fetch(sql: str, params: Sequence[Any]) -> pa.Table:
        # datetime2 holds UTC without a zone; a parameter with one would be converted by the server.
        plain = [
            value.astimezone(UTC).replace(tzinfo=None) if isinstance(value, datetime) else value for value in params
        ]
        with connection.cursor() as cursor:
            cursor.execute(sql, *plain)
            return cursor.arrow()

    try:
        yield fetch
    finally:
        with suppress(mssql_python.Error):
            connection.close()


def numbered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches as the staging table wants them: a running number first, ids as text, times in UTC without a zone."""
    start = 0
    for batch in batches:
        columns = {"ord": pa.array(range(start, start + batch.num_rows), pa.int64())}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if name == "id":
                column = pa.array([str(uuid.UUID(bytes=value)) for value in column.to_pylist()], pa.string())
            elif name in ("expires", "due_at"):
                column = column.cast(pa.timestamp("us", "UTC")).cast(pa.int64()).cast(pa.timestamp("us"))
            columns[name] = column
        start += batch.num_rows
        yield pa.record_batch(list(columns.values()), names=list(columns))
