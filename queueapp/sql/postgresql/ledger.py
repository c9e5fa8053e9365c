"""PostgreSQL: the ledger of queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..ledger import Entry, LedgerSql
from .raw.cursor import execute, fetch
from .statements import quote_table


class PostgresqlLedger(LedgerSql):
    """Under READ COMMITTED a statement has one snapshot."""

    minute = "date_trunc('minute', clock_timestamp())"

    def take(self, connection: Any, entries: str, level: int, keep_ms: int, limit: int) -> list[Entry]:
        table = self._table(entries)
        # Primary key, from its low end. Safe: SKIP LOCKED; the caller's transaction inserts the sums.
        sql = (
            f"DELETE FROM {table} WHERE number = ANY(ARRAY(SELECT number FROM {table} WHERE level = %s "
            f"AND minute < {self.minute} - %s * interval '1 ms' ORDER BY number LIMIT %s FOR UPDATE SKIP LOCKED)) "
            "RETURNING queue, place, kind, messages, minute"
        )
        return [Entry(*row) for row in fetch(connection, sql, (level, keep_ms, limit))]

    def reads_together(self, connection: Any) -> bool:
        return True

    def _execute(self, connection: Any, sql: str, params: Sequence[Any]) -> int:
        return execute(connection, sql, params)

    def _table(self, db_table: str) -> str:
        return quote_table(db_table)
