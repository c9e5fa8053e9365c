"""SQL Server: statements beyond one queue: delayed store, liveness, version and error codes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from ...errors import UnsupportedServer
from ..base import Backend, ErrorKind, QueueSql
from ..journal import JournalSql
from ..message_columns import SENT, Kind, Outgoing
from ..tables import QueueTable, StoreTable
from .arriving import SqlServerArrivals
from .celery import SqlServerCeleryResults
from .deferred import SqlServerDeferred
from .definition import SqlServerDefinition
from .errors import error_kind, missing_driver
from .fenced import SqlServerFencedQueueSql
from .inserting import given
from .journal import SqlServerJournalSql
from .keys import SqlServerKeys
from .locking import KEYS, LOOKING, MAX_BATCH, TAKING
from .patience import SqlServerPatience
from .queue import SqlServerQueueSql
from .rights import SqlServerRights
from .session import LATER, execute, fetch, json_of, later_params, quote, quote_table
from .session_state import SqlServerSessions
from .wakeups import SqlServerWakeUps

#: 2017; OPENJSON and DATEDIFF_BIG are older, STRING_AGG and the rest of what the ORM sends is not.
OLDEST = 14
OLDEST_LEVEL = 130
_AZURE = {5: "Azure SQL Database", 8: "Azure SQL Managed Instance", 12: "SQL database in Fabric"}


class SqlServerBackend(
    SqlServerDeferred,
    SqlServerKeys,
    SqlServerSessions,
    SqlServerArrivals,
    SqlServerDefinition,
    SqlServerCeleryResults,
    SqlServerWakeUps,
    SqlServerRights,
    SqlServerPatience,
    Backend,
):
    """SQL Server 2017 and later, and Azure SQL."""

    vendor = "microsoft"
    max_batch = MAX_BATCH

    def queue(self, table: QueueTable) -> QueueSql:
        return SqlServerFencedQueueSql(table) if table.barriers else SqlServerQueueSql(table)

    def journal(self, table: str) -> JournalSql:
        return SqlServerJournalSql(table)

    def check_server(self, connection: Any) -> None:
        try:
            connection.ensure_connection()
        except Exception as error:
            line = missing_driver(error)
            if line is None:
                raise
            raise UnsupportedServer(line) from error
        # Index: none, server properties and one catalog row. By name: on Azure DB_ID() is not that of sys.databases.
        sql = (
            "SELECT CAST(SERVERPROPERTY('ProductVersion') AS nvarchar(128)), "
            "CAST(SERVERPROPERTY('EngineEdition') AS int), "
            "(SELECT CAST(d.[compatibility_level] AS int) FROM sys.databases AS d WHERE d.[name] = DB_NAME())"
        )
        version, edition, level = fetch(connection, sql, ())[0]
        # Azure calls itself 12 whatever it can do.
        if edition not in _AZURE and int(str(version).partition(".")[0]) < OLDEST:
            raise UnsupportedServer(
                f"SQL Server {version} is too old for queueapp: {OLDEST}.0 (SQL Server 2017) or later is needed."
            )
        if level is not None and level < OLDEST_LEVEL:
            raise UnsupportedServer(
                f"The database has compatibility level {level} on {_AZURE.get(edition, 'SQL Server')} {version}: "
                f"queueapp needs {OLDEST_LEVEL} or later, for OPENJSON "
                "(ALTER DATABASE CURRENT SET COMPATIBILITY_LEVEL = 140)."
            )

    def now(self, connection: Any) -> datetime:
        value: datetime = fetch(connection, "SELECT SYSUTCDATETIME()", ())[0][0]
        return value.replace(tzinfo=UTC)

    def error_kind(self, error: BaseException) -> ErrorKind:
        return error_kind(error)

    # -- delayed store --------------------------------------------------------------------------------------------

    def store_delayed(self, connection: Any, table: StoreTable, destination: str, message: Outgoing, due: Any) -> int:
        values: dict[str, tuple[str, tuple[Any, ...]]] = {
            "message_id": ("%s", (message.id,)),
            "destination": ("%s", (destination,)),
            "headers": ("%s", (message.headers,)),
            "due": ("%s", (due,)) if isinstance(due, datetime) else (LATER, later_params(due)),
        }
        if message.body is not None:
            values["body"] = "%s", (message.body,)
        for one in SENT:
            value = getattr(message, one.outgoing)
            if value is None:
                continue
            if one.kind is not Kind.TIME:
                values[one.name] = given(one, value)
            # It counts from when the message becomes due, not from now: else a long delay would drop it unseen.
            elif isinstance(due, datetime):
                values[one.name] = "%s", (due + timedelta(milliseconds=value),)
            else:
                values[one.name] = given(one, due + value)
        # Index: none is read. Safe: one row in the caller's transaction; due is by the database's clock.
        sql = (
            f"INSERT INTO {quote_table(table.db_table)} ({', '.join(quote(table.columns[name]) for name in values)}) "
            f"OUTPUT inserted.{quote(table.key)} VALUES ({', '.join(text for text, _ in values.values())})"
        )
        return int(fetch(connection, sql, [value for _, params in values.values() for value in params])[0][0])

    def first_due(self, connection: Any, table: StoreTable, destinations: Sequence[str]) -> list[tuple[str, int]]:
        due, destination = quote(table.columns["due"]), quote(table.columns["destination"])
        # Index: the one on (destination, due, key), the first entry of each destination that nobody is moving; one without
        # an entry is not returned. Safe: LOOKING. The difference is computed here, so no host's clock or zone takes part.
        sql = (
            f"SELECT d.[name], DATEDIFF_BIG(millisecond, SYSUTCDATETIME(), f.{due}) "
            "FROM OPENJSON(%s) WITH ([name] nvarchar(200) '$') AS d CROSS APPLY "
            f"(SELECT TOP (1) t.{due} FROM {quote_table(table.db_table)} AS t WITH ({_first(table)}{LOOKING}) "
            f"WHERE t.{destination} = d.[name] ORDER BY t.{due}) AS f ORDER BY f.{due}"
        )
        return [(name, int(ms)) for name, ms in fetch(connection, sql, (json_of(list(destinations)),))]

    def lock_due(self, connection: Any, table: StoreTable, destination: str, limit: int) -> list[int]:
        due, key = quote(table.columns["due"]), quote(table.key)
        # Index: the one on (destination, due, key), by name and FORCESEEK, because a scan, or the index on due, would lock
        # what is not due or goes elsewhere. Safe: TAKING; two dispatchers never wait for each other, and never move a row
        # twice.
        sql = (
            f"SELECT TOP (%s) t.{key} FROM {quote_table(table.db_table)} AS t WITH ({_first(table)}FORCESEEK, {TAKING}) "
            f"WHERE t.{quote(table.columns['destination'])} = %s AND t.{due} <= SYSUTCDATETIME() "
            f"ORDER BY t.{due}, t.{key}"
        )
        return [row[0] for row in fetch(connection, sql, (min(limit, MAX_BATCH), destination))]

    def delete_keys(self, connection: Any, table: StoreTable, keys: Sequence[int]) -> int:
        # Index: the primary key, one seek a key (KEYS). Safe: the caller holds the rows' locks.
        sql = f"DELETE t {KEYS} {quote_table(table.db_table)} AS t WITH (ROWLOCK) ON t.{quote(table.key)} = k.[key]"
        return execute(connection, sql, (json_of(list(keys)),))

    # -- liveness -------------------------------------------------------------------------------------------------

    def liveness_options(self, seconds: float) -> dict[str, Any]:
        return {}  # the drivers send keepalives by themselves: 30 s, then each second

    def handler_options(self) -> dict[str, Any]:
        return {}  # the server keeps plans by text

    def name_statements(self, connection: Any) -> None:
        """Nothing has a name: what the drivers prepare is a number that the session gave to one cursor of theirs, and no
        pooler hands a session of SQL Server to another process in the middle."""

    def watch_client(self, connection: Any, seconds: float) -> None:
        """Nothing to say: SQL Server sends keepalives, and rolls back what a client leaves behind."""

    def socket_of(self, connection: Any) -> int | None:
        return None  # neither driver tells; DATABASES' query_timeout does what a cut would

    def estimate_rows(self, connection: Any, db_table: str) -> int:
        # Index: none, the catalog: never reads the table. sys.partitions needs no right but to see the table.
        sql = (
            "SELECT COALESCE(SUM(p.[rows]), 0) FROM sys.partitions AS p "
            "WHERE p.[object_id] = OBJECT_ID(%s) AND p.[index_id] IN (0, 1)"
        )
        return int(fetch(connection, sql, (quote_table(db_table).replace("%%", "%"),))[0][0])


def _first(table: StoreTable) -> str:
    """The hint for the index on destination and due time: past the messages for others, however many there are."""
    return f"INDEX({quote(table.first_index)}), " if table.first_index else ""
