"""PostgreSQL: the composition of a queue's statements, server checks, and error codes."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import psycopg

from ...errors import UnsupportedServer
from ..barriers import FencedFanout, FencedInserts
from ..base import Backend, ErrorKind, QueueSql
from ..journal import JournalSql
from ..tables import QueueTable
from .acks import PostgresqlAckBySeq, PostgresqlAcks
from .barriers import FencedClaims, PostgresqlBarriers
from .claims import PostgresqlClaims, Priority64Claims
from .database import PostgresqlNotifications, PostgresqlSchema, PostgresqlSessions
from .database_health import PostgresqlDatabaseHealth
from .fair_claims import FairClaims
from .figures import PostgresqlFigures
from .groups import PostgresqlGroups
from .inserts import PostgresqlDedupe, PostgresqlEarlyAcks, PostgresqlFanout, PostgresqlInserts
from .journal import PostgresqlJournalSql
from .ledger import PostgresqlLedger
from .limits import PostgresqlLimits
from .maintenance import PostgresqlDelayedStore, PostgresqlFailures, PostgresqlMaintenance, PostgresqlUnevaluated
from .ordering import OrderedClaims
from .raw.cursor import fetch
from .raw.plan_guard import PlanGuard
from .results import PostgresqlCeleryResults, PostgresqlTaskResults
from .statements import TableText, quote_table

#: xid8 snapshots exist since 13; 14 is the oldest version that is maintained and tested.
OLDEST = 140000

_KINDS = {
    "40001": ErrorKind.DEADLOCK,
    "40P01": ErrorKind.DEADLOCK,
    # A prepared statement that is missing or exists already: sessions are shared behind a pooler. Within a transaction
    # it cannot be retried by itself; the next time nothing is prepared (``StatementNames``).
    "26000": ErrorKind.DEADLOCK,
    "42P05": ErrorKind.DEADLOCK,
    "55P03": ErrorKind.LOCKED,
    "42P01": ErrorKind.MISSING,
    "42703": ErrorKind.MISSING,
    "42501": ErrorKind.DENIED,
    "53300": ErrorKind.CONNECTION,  # too many connections
    "57P01": ErrorKind.CONNECTION,  # admin shutdown, pg_terminate_backend
    "57P02": ErrorKind.CONNECTION,  # crash shutdown
    "57P03": ErrorKind.CONNECTION,  # cannot connect now: starting up
    "57P05": ErrorKind.CONNECTION,  # idle session timeout
    "25P03": ErrorKind.CONNECTION,  # idle in transaction timeout
    "25006": ErrorKind.CONNECTION,  # read-only: after a failover this is a standby; reconnect to find the primary
}
#: Other codes, by their class (the first two characters).
_CLASSES = {
    "08": ErrorKind.CONNECTION,
    "53": ErrorKind.EXHAUSTED,  # disk full, out of memory
    "57": ErrorKind.EXHAUSTED,  # operator intervention: a statement timeout
    "58": ErrorKind.EXHAUSTED,  # the system below the server has failed
}


class PostgresqlQueueSql(QueueSql):
    """The statements of one queue on PostgreSQL 14 to 18, written once when the queue is first used."""

    def __init__(self, table: QueueTable) -> None:
        super().__init__(table)
        text = TableText(table)
        self.guard = text.guard
        kind = FencedClaims if table.barriers else Priority64Claims if table.priority64 else PostgresqlClaims
        if table.claims_by_key:
            kind = OrderedClaims if table.is_ordered else FairClaims
        self.claims = claims = kind(text)
        self.acks, self.ack_by_seq = PostgresqlAcks(text), PostgresqlAckBySeq(text)
        self.results = PostgresqlTaskResults(text)
        self.failures = PostgresqlFailures(text)
        self.maintenance, self.unevaluated = PostgresqlMaintenance(text), PostgresqlUnevaluated(text)
        self.barriers = barriers = PostgresqlBarriers(text)
        inserts = PostgresqlInserts(text, barriers.fence if table.barriers else None)
        fanout = PostgresqlFanout(text, inserts)
        self.inserts = FencedInserts(table, barriers, inserts) if table.barriers else inserts
        self.fanout = FencedFanout(barriers, fanout) if table.barriers else fanout
        self.limits = PostgresqlLimits(text, claims)
        self.figures = PostgresqlFigures(text, claims)


class PostgresqlBackend(Backend):
    """PostgreSQL 14 to 18."""

    vendor = "postgresql"
    max_batch = 10_000

    def __init__(self) -> None:
        self.guard = guard = PlanGuard()
        self.sessions = PostgresqlSessions()
        self.health = PostgresqlDatabaseHealth()
        self.delayed = PostgresqlDelayedStore(guard)
        self.early_acks, self.dedupe = PostgresqlEarlyAcks(guard), PostgresqlDedupe(guard)
        self.schema = PostgresqlSchema()
        self.celery_results = PostgresqlCeleryResults()
        self.groups = PostgresqlGroups(guard)
        self.ledger = PostgresqlLedger()
        self.notifications = PostgresqlNotifications()

    def queue(self, table: QueueTable) -> QueueSql:
        return PostgresqlQueueSql(table)

    def journal(self, table: str) -> JournalSql:
        return PostgresqlJournalSql(table, self.guard)

    def check_server(self, connection: Any) -> None:
        connection.ensure_connection()
        version = connection.connection.info.server_version
        if version < OLDEST:
            raise UnsupportedServer(
                f"PostgreSQL {version // 10000}.{version % 10000} is too old for queueapp: "
                f"{OLDEST // 10000} or later is needed (pg_visible_in_snapshot with xid8, used by the peek)."
            )

    def now(self, connection: Any) -> datetime:
        return fetch(connection, "SELECT clock_timestamp()", ())[0][0]  # type: ignore[no-any-return]

    def error_kind(self, error: BaseException) -> ErrorKind:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, psycopg.Error):
            cause = cause.__cause__
        if cause is None:
            return ErrorKind.UNKNOWN
        state = cause.sqlstate
        if state is None:
            # No SQLSTATE: a client error. Lost connections are OperationalError and InterfaceError.
            lost = isinstance(cause, psycopg.OperationalError | psycopg.InterfaceError)
            return ErrorKind.CONNECTION if lost else ErrorKind.UNKNOWN
        return _KINDS.get(state) or _CLASSES.get(state[:2], ErrorKind.UNKNOWN)

    def estimate_rows(self, connection: Any, db_table: str) -> int:
        # Catalog only: never reads the table. The density of the last ANALYZE times the present size, like the planner.
        sql = (
            "SELECT (greatest(reltuples, 0)::float8 * CASE WHEN relpages > 0 THEN pg_relation_size(oid)::float8 "
            "/ current_setting('block_size')::int / relpages ELSE 1 END)::bigint FROM pg_class WHERE oid = "
            "to_regclass(%s)"
        )
        rows = fetch(connection, sql, (quote_table(db_table).replace("%%", "%"),))
        return int(rows[0][0]) if rows else 0
