"""SQL Server: the composition of a queue's statements, server checks, and error codes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from ...errors import UnsupportedServer
from ..barriers import FencedFanout, FencedInserts
from ..base import Backend, ErrorKind, QueueSql
from ..journal import JournalSql
from ..tables import QueueTable
from .acks import SqlServerAckBySeq, SqlServerAcks
from .barriers import FencedClaims, FencedLimits, LockingInserts, SqlServerBarriers
from .claims import Priority64Claims, SqlServerClaims
from .database import SqlServerNotifications, SqlServerSchema, SqlServerSessions
from .database_health import SqlServerDatabaseHealth
from .errors import error_kind, missing_driver
from .fair_claims import FairClaims
from .figures import SqlServerFigures
from .groups import SqlServerGroups
from .inserts import SqlServerDedupe, SqlServerEarlyAcks, SqlServerFanout, SqlServerInserts
from .journal import SqlServerJournalSql
from .ledger import SqlServerLedger
from .limits import SqlServerLimits
from .maintenance import SqlServerDelayedStore, SqlServerFailures, SqlServerMaintenance, SqlServerUnevaluated
from .ordering import OrderedClaims
from .results import SqlServerCeleryResults, SqlServerTaskResults
from .statements import MAX_BATCH, TableText, fetch, quote_table

#: 2017: OPENJSON and DATEDIFF_BIG are older; STRING_AGG and other functions that the ORM uses are not.
OLDEST = 14
OLDEST_LEVEL = 130
_AZURE = {5: "Azure SQL Database", 8: "Azure SQL Managed Instance", 12: "SQL database in Fabric"}


class SqlServerQueueSql(QueueSql):
    """The statements of one queue on SQL Server 2017 and later and Azure SQL, written once when the queue is first
    used."""

    def __init__(self, table: QueueTable) -> None:
        super().__init__(table)
        text = TableText(table)
        self.acks, self.ack_by_seq = SqlServerAcks(text), SqlServerAckBySeq(text)
        self.results = SqlServerTaskResults(text)
        self.failures = SqlServerFailures(text)
        self.maintenance, self.unevaluated = SqlServerMaintenance(text), SqlServerUnevaluated(text)
        self.barriers = barriers = SqlServerBarriers(text)
        self.figures = SqlServerFigures(text)
        if table.barriers:
            inserts: SqlServerInserts = LockingInserts(text)
            self.inserts = FencedInserts(table, barriers, inserts)
            self.fanout = FencedFanout(barriers, SqlServerFanout(text, inserts))
            self.claims = fenced = FencedClaims(text, barriers)
            self.limits = FencedLimits(text, fenced, barriers)
        else:
            self.inserts = inserts = SqlServerInserts(text)
            self.fanout = SqlServerFanout(text, inserts)
            kind = Priority64Claims if table.priority64 else SqlServerClaims
            if table.claims_by_key:
                kind = OrderedClaims if table.is_ordered else FairClaims
            self.claims = claims = kind(text)
            self.limits = SqlServerLimits(text, claims)


class SqlServerBackend(Backend):
    """SQL Server 2017 and later, and Azure SQL."""

    vendor = "microsoft"
    max_batch = MAX_BATCH

    def __init__(self) -> None:
        self.sessions = SqlServerSessions()
        self.health = SqlServerDatabaseHealth()
        self.delayed = SqlServerDelayedStore()
        self.early_acks, self.dedupe = SqlServerEarlyAcks(), SqlServerDedupe()
        self.schema = SqlServerSchema()
        self.celery_results = SqlServerCeleryResults()
        self.groups = SqlServerGroups()
        self.ledger = SqlServerLedger()
        self.notifications = SqlServerNotifications()

    def queue(self, table: QueueTable) -> QueueSql:
        return SqlServerQueueSql(table)

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
        # Azure reports 12 for every version.
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

    def estimate_rows(self, connection: Any, db_table: str) -> int:
        # Index: none, the catalog: never reads the table. sys.partitions requires only that the table is visible.
        sql = (
            "SELECT COALESCE(SUM(p.[rows]), 0) FROM sys.partitions AS p "
            "WHERE p.[object_id] = OBJECT_ID(%s) AND p.[index_id] IN (0, 1)"
        )
        return int(fetch(connection, sql, (quote_table(db_table).replace("%%", "%"),))[0][0])
