"""PostgreSQL: held messages, by the partial index on them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from ..claims import FOREVER
from ..message_columns import Row
from ..tables import QueueTable
from .index_order import IndexOrder
from .rows import read
from .session import fetch


def held(columns: dict[str, str]) -> str:
    """The condition of a held message: literally that of the index, or the planner would not see that it is."""
    return f"({columns['lease_expires']} = '{FOREVER.isoformat()}'::timestamptz AND {columns['lease_token']} IS NULL)"


class PostgresqlHolding:
    """The verbs of one queue; ``_q`` and ``_c`` are its names, quoted."""

    table: QueueTable
    _q: str
    _c: dict[str, str]
    _in_order: IndexOrder

    def lock_held(self, connection: Any, limit: int) -> list[Row]:
        seq = self._c["seq"]
        whole = ", ".join(read(self.table, self._c, name) for name in Row._fields)
        # The partial index on what is held. Safe: SKIP LOCKED waits for nobody, so several share the work.
        sql = f"SELECT {whole} FROM {self._q} WHERE {held(self._c)} ORDER BY {seq} LIMIT %s FOR UPDATE SKIP LOCKED"
        return [Row(*row)._replace(id=uuid.UUID(bytes=row[1])) for row in fetch(connection, sql, (limit,))]

    def free_held(
        self, connection: Any, seqs: Sequence[int], priorities: Sequence[int] | None, barriers: Sequence[bool] | None
    ) -> int:
        c = self._c
        given = [("priority", "bigint", priorities), ("is_barrier", "boolean", barriers)]
        used = [(name, kind, list(values)) for name, kind, values in given if values is not None]
        names = ", ".join(["seq", *(name for name, _, _ in used)])
        arrays = ", ".join(["%s::bigint[]", *(f"%s::{kind}[]" for _, kind, _ in used)])
        setting = ", ".join([f"{c['lease_expires']} = NULL", *(f"{c[name]} = v.{name}" for name, _, _ in used)])
        # Primary key, one seek a key. Safe: the caller holds the locks from ``lock_held``; asked again all the same.
        sql = (
            f"UPDATE {self._q} AS q SET {setting} FROM unnest({arrays}) AS v({names}) "
            f"WHERE q.{c['seq']} = v.seq AND q.{c['seq']} = ANY(%s) AND {held({name: f'q.{column}' for name, column in c.items()})}"
        )
        params = (list(seqs), *(values for _, _, values in used), list(seqs))
        return self._in_order.execute_by_key(connection, sql, params)

    def count_held(self, connection: Any, limit: int) -> int:
        # The partial index on what is held. Safe: a plain read.
        sql = f"SELECT count(*) FROM (SELECT 1 FROM {self._q} WHERE {held(self._c)} LIMIT %s) AS h"
        return int(fetch(connection, sql, (limit,))[0][0])
