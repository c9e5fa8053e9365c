"""PostgreSQL: ADBC's binary COPY from Arrow on executors and psycopg on the driver for the sink, ADBC for the source.

Measured on 2 cores, 200,000 rows of 200 bytes into an indexed queue: ADBC 220,000-280,000 rows/s, psycopg's binary COPY
row by row 125,000. ADBC has no uuid: the 16 bytes of a fixed-size binary are what COPY BINARY wants for one. The
low-level API is used because ``adbc_driver_manager.dbapi`` imports pandas, a second in every worker process.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

import adbc_driver_manager as adbc
import adbc_driver_postgresql
import psycopg
import pyarrow as pa

from ...sql.postgresql import prepared
from ...sql.postgresql.spark import BY_KEY, KEEP_ORDER
from ...sql.spark import PreparedName, StagingName
from ...sql.tables import QueueTable
from .client import Part, SinkClient
from .columns import Plan
from .errors import SinkUnavailable, SourceUnavailable, StagingLost
from .targets import Database

_TARGET_SCHEMA = "adbc.ingest.target_db_schema"
_APPLICATION = "queueapp spark sink"
_READING = "queueapp spark source"
#: 55000: another session is committing the prepared transaction.
_TRANSIENT_CLASSES = ("08", "57P", "40", "55000")
#: What PREPARE says where none is allowed, and where no place is left.
_NO_PLACE = ("55000", "53200")


class PostgresqlClient(SinkClient):
    """One queue on PostgreSQL."""

    errors = (psycopg.Error,)
    prepares = True

    # -- on executors -----------------------------------------------------------------------------------------------

    def stage(
        self, job: str, partition: int, attempt: int, schema: pa.Schema, batches: Iterator[pa.RecordBatch]
    ) -> tuple[str, int]:
        with self._adbc() as connection:
            name = StagingName.make(_one_value(connection, self.sql.clock) // 1000, job, partition, attempt)
            _run(connection, self.sql.create_staging(name, self.plan.stored, logged=not self.atomic))
            rows = _ingest(connection, name.name, schema, batches)
            connection.commit()
        return name.name, rows

    def append(self, job: str, partition: int, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> int:
        with self._adbc() as connection:
            rows = self._copy(connection, schema, batches)
            connection.commit()
        return rows

    def append_prepared(
        self, name: PreparedName, key: tuple[str, str, int], schema: pa.Schema, batches: Iterator[pa.RecordBatch]
    ) -> tuple[int, int]:
        with self._adbc() as connection:
            recorded = prepared.recorded(self.sql.ledger)
            if _one_value(connection, recorded, key):
                # A repetition: what would be copied and rolled back would bloat the queue. Spark wants its rows read.
                for _ in batches:
                    pass
                return 0, 0
            number = _one_value(connection, prepared.NUMBER)
            rows = self._copy(connection, schema, batches)
            _one_value(connection, prepared.LOCK_SESSION)
            if _one_value(connection, recorded, key):
                return 0, 0
            try:
                _run(connection, prepared.prepare(name))
            except adbc.Error as error:
                if getattr(error, "sqlstate", None) not in _NO_PLACE:
                    raise
                raise self._no_place(_first_line(error)) from error
        return rows, number

    def _copy(self, connection: adbc.AdbcConnection, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> int:
        lifetime = self.target.lifetime_ms
        # By the database's clock, read once per task.
        expires = None if lifetime is None else _one_value(connection, self.sql.clock) + lifetime
        whole = _whole_rows(schema, batches, self.plan, self.target.table, expires)
        first = next(whole, None)
        if first is None:
            return 0
        if self.target.table.barriers:
            _one_value(connection, self.sql.fence(exclusive=self.may_hold_barrier(self.target))[0])
        columns = self.target.table.columns
        named = pa.schema([field.with_name(columns[field.name]) for field in first.schema])
        renamed = (batch.rename_columns(named.names) for batch in _with_first(first, whole))
        return _ingest(connection, self.target.table.db_table, named, renamed)

    @contextmanager
    def _adbc(self) -> Iterator[adbc.AdbcConnection]:
        try:
            database, connection = _open(self.database, _APPLICATION)
        except adbc.Error as error:
            raise self._unreachable(error) from None
        try:
            connection.set_autocommit(False)
            yield connection
        except adbc.Error as error:
            raise self.explained(error) from error
        finally:
            # Closing without a commit is the rollback, also for a COPY that broke off in the middle.
            connection.close()
            database.close()

    # -- on the driver ----------------------------------------------------------------------------------------------

    @contextmanager
    def connect(self) -> Iterator[psycopg.Connection[Any]]:
        try:
            connection = psycopg.connect(self.database.conninfo, autocommit=True, application_name=_APPLICATION)
        except psycopg.Error as error:
            raise self._unreachable(error) from None
        with connection:
            yield connection

    @contextmanager
    def transaction(self, connection: psycopg.Connection[Any]) -> Iterator[None]:
        with connection.transaction():
            connection.execute(KEEP_ORDER)
            yield

    def execute(
        self, connection: psycopg.Connection[Any], sql: str, params: Sequence[Any] = ()
    ) -> tuple[int, list[Any]]:
        cursor = connection.execute(sql, params, prepare=False)
        return cursor.rowcount, cursor.fetchall() if cursor.description else []

    def check_two_phase(self, connection: psycopg.Connection[Any]) -> None:
        _, ((limit,),) = self.execute(connection, prepared.LIMIT)
        if not limit:
            raise self._no_place("max_prepared_transactions is 0")

    def _no_place(self, text: str) -> SinkUnavailable:
        return SinkUnavailable(
            f"Database {self.database.alias!r} prepares no further transaction ({text}). The option two_phase needs "
            "max_prepared_transactions of at least twice the tasks of a job: set it and restart the server, coalesce "
            "the DataFrame, or leave the option out."
        )

    def check_prepared(self, connection: psycopg.Connection[Any], parts: Sequence[Part]) -> None:
        wanted = {part.table: part for part in parts}
        self.execute(connection, prepared.lock(exclusive=False))
        _, rows = self.execute(connection, prepared.FOUND, (list(wanted),))
        for gone in wanted.keys() - {gid for (gid,) in rows}:
            raise _lost(wanted[gone])

    def commit_prepared(self, part: Part) -> None:
        assert part.prepared is not None
        # The caller's connection is in the transaction that holds the ledger row, so that one driver at a time is here.
        with self.connect() as connection:
            try:
                self.execute(connection, prepared.commit(part.prepared))
            except psycopg.errors.UndefinedObject:
                _, ((status,),) = self.execute(connection, prepared.STATUS, (part.number,))
                if status == "aborted":
                    raise _lost(part) from None

    def roll_back_prepared(
        self, connection: psycopg.Connection[Any], is_dead: Callable[[PreparedName, float], bool]
    ) -> None:
        if not self.two_phase and not self._dead(connection, is_dead):
            return
        # ROLLBACK PREPARED is not allowed in the transaction that holds the lock.
        with self.transaction(connection), self.connect() as second:
            self.execute(connection, prepared.lock(exclusive=True))
            waiting = self.waiting(second)
            for name in self._dead(second, is_dead):
                # Another session may be at it: gone, or about to be.
                with suppress(psycopg.errors.UndefinedObject, psycopg.errors.ObjectNotInPrerequisiteState):
                    if name.gid not in waiting:
                        self.execute(second, prepared.roll_back(name))

    def _dead(
        self, connection: psycopg.Connection[Any], is_dead: Callable[[PreparedName, float], bool]
    ) -> list[PreparedName]:
        _, rows = self.execute(connection, prepared.LISTED)
        found = ((PreparedName.find(gid), age) for gid, age in rows)
        return [name for name, age in found if name is not None and is_dead(name, age)]

    def is_transient(self, error: Exception) -> bool:
        state = getattr(error, "sqlstate", None)
        if state is None:
            return isinstance(error, psycopg.OperationalError)
        return state.startswith(_TRANSIENT_CLASSES)

    def is_missing(self, error: Exception) -> bool:
        return isinstance(error, psycopg.errors.UndefinedTable)

    def explained(self, error: Exception) -> Exception:
        state = getattr(error, "sqlstate", None)
        where = f"database {self.database.alias!r}"
        text = _first_line(error)
        if state in ("42P01", "42703"):
            return SinkUnavailable(f"A table or column is missing in {where} ({text}): run manage.py migrate.")
        if state == "42501":
            return SinkUnavailable(
                f"A privilege is missing in {where} ({text}). The sink inserts into the queue and into "
                "queueapp_sparkcommit, and creates staging tables in the first schema of the search path."
            )
        return error

    def _unreachable(self, error: Exception) -> SinkUnavailable:
        return SinkUnavailable(_unreachable_text(self.database, error))


def _lost(part: Part) -> StagingLost:
    return StagingLost(part.table, part.rows, None, kind="prepared transaction")


# -- the source --------------------------------------------------------------------------------------------------------


@contextmanager
def reading(database: Database) -> Iterator[Callable[[str, Sequence[Any]], pa.Table]]:
    """A connection that reads: a function of statement and parameters. Each statement is a transaction of its own.
    Raises SourceUnavailable."""
    try:
        handle, connection = _open(database, _READING)
    except adbc.Error as error:
        raise SourceUnavailable(_unreachable_text(database, error)) from None

    def fetch(sql: str, params: Sequence[Any]) -> pa.Table:
        # Set for the transaction, as a connection pooler gives the session to others afterwards.
        _run(connection, "BEGIN")
        _run(connection, BY_KEY)
        rows = _fetch(connection, sql, params)
        _run(connection, "COMMIT")
        return rows

    try:
        yield fetch
    except (adbc.Error, pa.ArrowException) as error:
        if getattr(error, "sqlstate", None) == "42501":
            raise SourceUnavailable(
                f"A privilege is missing in database {database.alias!r} ({_first_line(error)}): the source reads the "
                "table of its state."
            ) from error
        raise
    finally:
        connection.close()
        handle.close()


def _fetch(connection: adbc.AdbcConnection, sql: str, params: Sequence[Any] = ()) -> pa.Table:
    with adbc.AdbcStatement(connection) as statement:
        statement.set_sql_query(sql)
        if params:
            names = [str(number) for number in range(len(params))]
            schema, row = pa.record_batch([_array_of(value) for value in params], names=names).__arrow_c_array__()
            statement.bind(row, schema)
        stream, _ = statement.execute_query()
        with pa.RecordBatchReader._import_from_c(stream.address) as reader:
            return reader.read_all()


def _array_of(value: Any) -> pa.Array:
    return pa.array([value], pa.timestamp("us", "UTC")) if isinstance(value, datetime) else pa.array([value])


def _open(database: Database, application: str) -> tuple[adbc.AdbcDatabase, adbc.AdbcConnection]:
    handle = adbc_driver_postgresql.connect(
        psycopg.conninfo.make_conninfo(database.conninfo, application_name=application)
    )
    try:
        return handle, adbc.AdbcConnection(handle)
    except adbc.Error:
        handle.close()
        raise


def _unreachable_text(database: Database, error: Exception) -> str:
    return f"Database {database.alias!r} cannot be reached from {socket.gethostname()}: {str(error).strip()}"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _run(connection: adbc.AdbcConnection, sql: str) -> None:
    with adbc.AdbcStatement(connection) as statement:
        statement.set_sql_query(sql)
        statement.execute_update()


def _one_value(connection: adbc.AdbcConnection, sql: str, params: Sequence[Any] = ()) -> int:
    return int(_fetch(connection, sql, params).column(0)[0].as_py())


def _ingest(connection: adbc.AdbcConnection, table: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> int:
    """One COPY of all batches; returns how many rows the server took."""
    failure: list[BaseException] = []
    counted = [0]

    def watched() -> Iterator[pa.RecordBatch]:
        # ADBC turns an exception of this iterator into a text; the caller gets the exception itself.
        try:
            for batch in batches:
                counted[0] += batch.num_rows
                yield batch
        except BaseException as error:
            failure.append(error)
            raise

    schema_name, _, table_name = table.rpartition('"."')
    options = {adbc.INGEST_OPTION_TARGET_TABLE: table_name, adbc.INGEST_OPTION_MODE: adbc.INGEST_OPTION_MODE_APPEND}
    if schema_name:
        options[_TARGET_SCHEMA] = schema_name
    with adbc.AdbcStatement(connection) as statement:
        statement.set_options(**options)
        statement.bind_stream(pa.RecordBatchReader.from_batches(schema, watched()))
        try:
            rows = statement.execute_update()
        except adbc.Error:
            if failure:
                raise failure[0] from None
            raise
    if rows != counted[0]:
        raise SinkUnavailable(f"The server took {rows} of {counted[0]} rows; nothing was committed.")
    return rows


def _whole_rows(
    schema: pa.Schema, batches: Iterator[pa.RecordBatch], plan: Plan, table: QueueTable, expires_ms: int | None
) -> Iterator[pa.RecordBatch]:
    """Rows as the queue wants them, where no move fills in what all rows have in common."""
    for batch in batches:
        rows = batch.num_rows
        columns = dict(zip(schema.names, batch.columns, strict=True))
        if "headers" in plan.constants:
            columns["headers"] = pa.array([plan.headers] * rows, pa.string())
        if expires_ms is not None:
            later = pa.scalar(expires_ms * 1000, pa.timestamp("us", "UTC"))
            expires = columns.get("expires")
            columns["expires"] = pa.array([later] * rows, later.type) if expires is None else expires.fill_null(later)
        if table.naive_expires and "expires" in columns:
            # COPY BINARY takes a timestamp for a timestamptz and the other way round: both are microseconds of UTC.
            columns["expires"] = columns["expires"].cast(pa.int64()).cast(pa.timestamp("us"))
        for name, constant in table.filled.items():
            kind = pa.bool_() if constant is not None else pa.timestamp("us", "UTC")
            columns[name] = pa.array([constant] * rows, kind)
        yield pa.record_batch(list(columns.values()), names=list(columns))


def _with_first(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest
