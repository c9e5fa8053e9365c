"""PostgreSQL: what holds back vacuum, and what it has to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..database_health import DatabaseHealth, SnapshotHolder, TableHealth
from .raw.cursor import fetch
from .statements import quote_table


class PostgresqlDatabaseHealth(DatabaseHealth):
    """From ``pg_stat_activity`` and its siblings. Without ``pg_monitor`` the sessions of other users have no times."""

    def snapshot_holders(self, connection: Any, limit: int) -> list[SnapshotHolder]:
        # No index: views of the server's memory. Safe: plain reads. Slots have no time, only an age in transactions.
        sql = (
            "SELECT kind, name, details, seconds FROM (SELECT 'session' AS kind, pid::text AS name, "
            "concat_ws(', ', usename, nullif(application_name, ''), state) AS details, "
            "extract(epoch FROM clock_timestamp() - xact_start)::float8 AS seconds, age(backend_xmin) AS age "
            "FROM pg_stat_activity WHERE xact_start IS NOT NULL AND pid <> pg_backend_pid() "
            "AND backend_type IN ('client backend', 'walsender') AND (datname = current_database() OR datname IS NULL) "
            "UNION ALL SELECT 'prepared transaction', gid, owner::text, "
            "extract(epoch FROM clock_timestamp() - prepared)::float8, age(transaction) FROM pg_prepared_xacts "
            "UNION ALL SELECT 'replication slot', slot_name::text, "
            "CASE WHEN active THEN 'active' ELSE 'not active' END, NULL, age(coalesce(xmin, catalog_xmin)) "
            "FROM pg_replication_slots WHERE xmin IS NOT NULL) AS h "
            "ORDER BY seconds DESC NULLS LAST, age DESC NULLS LAST LIMIT %s"
        )
        return [SnapshotHolder(*row) for row in fetch(connection, sql, (limit,))]

    def ending_of(self, holder: SnapshotHolder) -> str:
        endings = {
            "session": f"end it: SELECT pg_terminate_backend({holder.name})",
            "prepared transaction": "COMMIT PREPARED or ROLLBACK PREPARED it",
        }
        return endings.get(holder.kind, "advance or drop it")

    def tables(self, connection: Any, tables: Sequence[str]) -> list[TableHealth]:
        # Index: pg_class by oid. Safe: a plain read of the catalog.
        sql = (
            "SELECT t.name, s.n_live_tup, s.n_dead_tup, pg_table_size(c.oid), pg_indexes_size(c.oid), "
            "greatest(s.last_vacuum, s.last_autovacuum) FROM unnest(%s::text[], %s::text[]) AS t(name, quoted) "
            "JOIN pg_class AS c ON c.oid = to_regclass(t.quoted) LEFT JOIN pg_stat_user_tables AS s ON s.relid = c.oid "
            "ORDER BY 4 DESC"
        )
        rows = fetch(connection, sql, (list(tables), [quote_table(table).replace("%%", "%") for table in tables]))
        return [TableHealth(*row) for row in rows]

    def facts(self, connection: Any) -> list[tuple[str, str]]:
        names = ("server_version", "autovacuum", "autovacuum_naptime", "autovacuum_max_workers",
                 "idle_in_transaction_session_timeout", "max_connections")  # fmt: skip
        # No index: settings of the server. Safe: a plain read.
        rows = fetch(connection, "SELECT n, current_setting(n, true) FROM unnest(%s::text[]) AS n", (list(names),))
        # Views of the server's memory, as above.
        sql = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"
        return [*((str(name), str(value)) for name, value in rows), ("sessions", str(fetch(connection, sql, ())[0][0]))]
