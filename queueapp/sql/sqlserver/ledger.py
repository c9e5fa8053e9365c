"""SQL Server: the ledger of queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..ledger import Entry, LedgerSql
from .statements import MAX_BATCH, TAKING, aware, execute, fetch, later_params, quote_table

_READ = ("queue", "place", "kind", "messages", "minute")


class SqlServerLedger(LedgerSql):
    """With READ_COMMITTED_SNAPSHOT a statement has one snapshot; without it a scan sees what commits while it runs."""

    minute = "DATEADD(minute, DATEDIFF(minute, 0, SYSUTCDATETIME()), 0)"

    def take(self, connection: Any, entries: str, level: int, keep_ms: int, limit: int) -> list[Entry]:
        # Index: the primary key, from its low end. Safe: TAKING skips locked rows; the caller's transaction inserts the
        # sums.
        sql = (
            f"DELETE t OUTPUT {', '.join(f'deleted.[{name}]' for name in _READ)} FROM (SELECT TOP (%s) * "
            f"FROM {self._table(entries)} WITH ({TAKING}) WHERE level = %s AND minute < "
            "DATEADD(millisecond, %s, DATEADD(day, %s, "
            f"{self.minute})) ORDER BY number) AS t"
        )
        rows = fetch(connection, sql, (min(limit, MAX_BATCH), level, *later_params(-keep_ms)))
        return [Entry(queue, place, kind, messages, aware(at)) for queue, place, kind, messages, at in rows]  # type: ignore[arg-type]

    def reads_together(self, connection: Any) -> bool:
        # Catalog only. By name: on Azure DB_ID() is not that of sys.databases.
        sql = "SELECT CAST(d.[is_read_committed_snapshot_on] AS int) FROM sys.databases AS d WHERE d.[name] = DB_NAME()"
        rows = fetch(connection, sql, ())
        return bool(rows and rows[0][0])

    def _execute(self, connection: Any, sql: str, params: Sequence[Any]) -> int:
        return execute(connection, sql, params)

    def _table(self, db_table: str) -> str:
        return quote_table(db_table)
