"""PostgreSQL: statements beyond one queue: delayed store, liveness, error codes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from operator import itemgetter
from typing import Any

import psycopg

from ...conf import settings
from ...errors import UnsupportedServer
from ..base import Backend, ErrorKind, QueueSql
from ..journal import JournalSql
from ..message_columns import SENT, Kind, Outgoing
from ..tables import QueueTable, StoreTable
from .arriving import PostgresqlArrivals
from .celery import PostgresqlCeleryResults
from .deferred import PostgresqlDeferred
from .definition import PostgresqlDefinition
from .fenced import PostgresqlFencedQueueSql
from .index_order import IndexOrder
from .journal import PostgresqlJournalSql
from .keys import PostgresqlKeys
from .patience import PostgresqlPatience
from .queue import PostgresqlQueueSql
from .ranked import PostgresqlRankedQueueSql
from .rights import PostgresqlRights
from .session import fetch, name_statements, quote, quote_table
from .session_state import PostgresqlSessions
from .wakeups import PostgresqlWakeUps

#: xid8 snapshots came with 13; 14 is the oldest that is still maintained and tested against.
OLDEST = 140000

#: How often a worker's handlers run a statement before it is prepared; psycopg's own default, which Django turns off.
_PREPARE_THRESHOLD = 5

_KINDS = {
    "40001": ErrorKind.DEADLOCK,
    "40P01": ErrorKind.DEADLOCK,
    # A prepared statement that is missing, or there already: sessions are shared behind a pooler. In a transaction it cannot
    # be run again by itself; the next time nothing is prepared (``naming``).
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
    "25006": ErrorKind.CONNECTION,  # read-only: a failover left us on a standby; reconnect to find the primary
}
#: Of the codes that are not above: what their first two characters say.
_CLASSES = {
    "08": ErrorKind.CONNECTION,
    "53": ErrorKind.EXHAUSTED,  # disk full, out of memory
    "57": ErrorKind.EXHAUSTED,  # an operator has intervened: a statement timeout
    "58": ErrorKind.EXHAUSTED,  # what the server runs on has failed
}


class PostgresqlBackend(
    PostgresqlDeferred,
    PostgresqlKeys,
    PostgresqlSessions,
    PostgresqlArrivals,
    PostgresqlDefinition,
    PostgresqlCeleryResults,
    PostgresqlWakeUps,
    PostgresqlRights,
    PostgresqlPatience,
    Backend,
):
    """PostgreSQL 14 to 18."""

    vendor = "postgresql"
    max_batch = 10_000

    def __init__(self) -> None:
        super().__init__()
        self._in_order = IndexOrder()

    def queue(self, table: QueueTable) -> QueueSql:
        if table.barriers:
            return PostgresqlFencedQueueSql(table)
        return PostgresqlRankedQueueSql(table) if table.priority64 else PostgresqlQueueSql(table)

    def journal(self, table: str) -> JournalSql:
        return PostgresqlJournalSql(table, self._in_order)

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
            return ErrorKind.OTHER
        state = cause.sqlstate
        if state is None:
            # No SQLSTATE: the error is the client's. Lost connections are OperationalError and InterfaceError.
            lost = isinstance(cause, psycopg.OperationalError | psycopg.InterfaceError)
            return ErrorKind.CONNECTION if lost else ErrorKind.OTHER
        return _KINDS.get(state) or _CLASSES.get(state[:2], ErrorKind.OTHER)

    # -- delayed store --------------------------------------------------------------------------------------------

    def store_delayed(self, connection: Any, table: StoreTable, destination: str, message: Outgoing, due: Any) -> int:
        c = {name: quote(column) for name, column in table.columns.items()}
        by_clock = not isinstance(due, datetime)
        params: list[Any] = [due, message.id, destination, message.headers, message.body]
        times = ["due"]
        for one in SENT:
            value = getattr(message, one.outgoing)
            if one.kind is Kind.TIME:
                times.append(one.name)
                if value is not None:
                    # It counts from when the message becomes due, not from now: a long delay would drop it unseen.
                    value = due + (value if by_clock else timedelta(milliseconds=value))
            params.append(value)
        columns = ("due", "message_id", "destination", "headers", "body", *(one.name for one in SENT))
        later = "clock_timestamp() + %s * interval '1 ms'"
        values = [later if by_clock and name in times else "%s" for name in columns]
        # No index is read; safe: one row in the caller's transaction. due is timestamptz from the database's clock.
        sql = (
            f"INSERT INTO {quote_table(table.db_table)} ({', '.join(c[name] for name in columns)}) "
            f"VALUES ({', '.join(values)}) RETURNING {quote(table.key)}"
        )
        return int(fetch(connection, sql, params)[0][0])

    def first_due(self, connection: Any, table: StoreTable, destinations: Sequence[str]) -> list[tuple[str, int]]:
        due, destination = quote(table.columns["due"]), quote(table.columns["destination"])
        # Index on (destination, due, key): the entry at which each destination begins, or would, a few microseconds apiece.
        # Row comparisons, because with an equality the planner may take the index on due and filter, past all messages
        # for others. Locks nothing. The difference is computed here, so no host's clock or zone takes part.
        sql = (
            f"SELECT d.name, (extract(epoch FROM f.{due} - clock_timestamp()) * 1000)::bigint "
            "FROM unnest(%s::text[]) AS d(name) CROSS JOIN LATERAL "
            f"(SELECT t.{destination}, t.{due} FROM {quote_table(table.db_table)} t "
            f"WHERE (t.{destination}, t.{due}) >= (d.name, '-infinity'::timestamptz) "
            f"ORDER BY t.{destination}, t.{due}, t.{quote(table.key)} LIMIT 1) AS f "
            f"WHERE f.{destination} = d.name"
        )
        # Sorted here: a plan that always sorts says nothing of whether the index is used.
        return sorted(self._in_order.fetch(connection, sql, (list(destinations),)), key=itemgetter(1))

    def lock_due(self, connection: Any, table: StoreTable, destination: str, limit: int) -> list[int]:
        due, to, key = quote(table.columns["due"]), quote(table.columns["destination"]), quote(table.key)
        # Index on (destination, due, key), a stretch of it in its order: row comparisons as above, and the clock is read
        # once, in a sub-select, because a volatile condition does not end a scan. SKIP LOCKED: two dispatchers never wait
        # for each other, and never move a row twice.
        sql = (
            f"SELECT {key} FROM {quote_table(table.db_table)} WHERE ({to}, {due}) >= (%s, '-infinity'::timestamptz) "
            f"AND ({to}, {due}) <= (%s, (SELECT clock_timestamp())) ORDER BY {to}, {due}, {key} LIMIT %s "
            "FOR UPDATE SKIP LOCKED"
        )
        return [row[0] for row in self._in_order.fetch(connection, sql, (destination, destination, limit))]

    def delete_keys(self, connection: Any, table: StoreTable, keys: Sequence[int]) -> int:
        # Primary key.
        sql = f"DELETE FROM {quote_table(table.db_table)} WHERE {quote(table.key)} = ANY(%s)"
        return self._in_order.execute_by_key(connection, sql, (list(keys),))

    # -- liveness -------------------------------------------------------------------------------------------------

    def liveness_options(self, seconds: float) -> dict[str, Any]:
        idle, interval = self._keepalives(seconds)
        return {
            "connect_timeout": max(2, min(10, int(seconds))),
            "keepalives": 1,
            "keepalives_idle": idle,
            "keepalives_interval": interval,
            "keepalives_count": 3,
            "tcp_user_timeout": int(seconds * 1000),
        }

    def handler_options(self) -> dict[str, Any]:
        # Django's default is None: every statement is planned anew. Of use to cursors that bind on the server only.
        return {"prepare_threshold": _PREPARE_THRESHOLD} if settings.PREPARED_STATEMENTS else {}

    def name_statements(self, connection: Any) -> None:
        if settings.PREPARED_STATEMENTS:
            name_statements(connection)

    def watch_client(self, connection: Any, seconds: float) -> None:
        idle, interval = self._keepalives(seconds)
        # Settings of the session, all of which any user may set. A pooler in transaction mode applies them to one of its
        # own server connections, where they do no harm.
        sql = (
            "SELECT set_config('tcp_keepalives_idle', %s, false), set_config('tcp_keepalives_interval', %s, false), "
            "set_config('tcp_keepalives_count', '3', false), set_config('tcp_user_timeout', %s, false), "
            "set_config('client_connection_check_interval', %s, false)"
        )
        fetch(connection, sql, (str(idle), str(interval), f"{int(seconds * 1000)}ms", f"{interval}s"))

    @staticmethod
    def _keepalives(seconds: float) -> tuple[int, int]:
        """(idle, interval) in seconds: with three probes a silent peer is found in two thirds of the time."""
        return max(1, int(seconds / 3)), max(1, int(seconds / 9))

    def socket_of(self, connection: Any) -> int | None:
        raw = connection.connection
        if raw is None or raw.closed:
            return None
        try:
            return int(raw.fileno())
        except psycopg.Error:
            return None

    def estimate_rows(self, connection: Any, db_table: str) -> int:
        # Catalog only: never reads the table. The density of the last ANALYZE times the present size, as the planner does.
        sql = (
            "SELECT (greatest(reltuples, 0)::float8 * CASE WHEN relpages > 0 THEN pg_relation_size(oid)::float8 "
            "/ current_setting('block_size')::int / relpages ELSE 1 END)::bigint FROM pg_class WHERE oid = to_regclass(%s)"
        )
        rows = fetch(connection, sql, (quote_table(db_table).replace("%%", "%"),))
        return int(rows[0][0]) if rows else 0
