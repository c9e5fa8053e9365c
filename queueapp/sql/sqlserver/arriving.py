"""SQL Server: messages of another database as one JSON document; what has arrived is left out by its key."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from ..message_columns import BY_NAME, Row
from ..tables import QueueTable
from .locking import KEEPING, MAX_BATCH
from .rows import guid, type_of
from .session import Json, execute, fetch, in_json, json_of, quote_table, translated

_TYPES = {"id": "uniqueidentifier", "headers": "nvarchar(max)", "body": "varchar(max)", "deliveries": "int",
          "cancels": "int", "failures": "nvarchar(max)"} | {one.name: type_of(one) for one in BY_NAME.values()}  # fmt: skip
_RANKED_TYPES = _TYPES | {one.name: type_of(one, priority64=True) for one in BY_NAME.values()}
#: A body is hex in JSON, which has no bytes.
_VALUES = {"body": "CONVERT(varbinary(max), r.[body], 2)"}


class SqlServerArriving:
    """The verbs of one queue; ``_q`` and ``_c`` are its names, quoted."""

    table: QueueTable
    _q: str
    _c: dict[str, str]
    _filled: list[tuple[str, str]]

    def insert_rows(self, connection: Any, rows: Sequence[Row]) -> int:
        rows = [self.table.within_levels(row) for row in rows]
        types = _RANKED_TYPES if self.table.priority64 else _TYPES
        carried = [name for name in self.table.moved(types) if name in self._c]
        said = [name for name in carried if any(getattr(row, name) is not None for row in rows)]
        pairs = [(self._c[name], _VALUES.get(name, f"r.[{name}]")) for name in said] + self._filled
        fields = ", ".join(f"[{name}] {types[name]} '$[{n + 1}]'" for n, name in enumerate(said))
        # Index: none is read. Safe: the caller's transaction; identity numbers follow the ORDER BY.
        sql = (
            f"INSERT INTO {self._q} ({', '.join(column for column, _ in pairs)}) "
            f"SELECT {', '.join(value for _, value in pairs)} FROM OPENJSON(%s) WITH ([n] int '$[0]', {fields}) AS r "
            "ORDER BY r.[n]"
        )
        count = 0
        with translated(connection, self.table.db_table):
            for first in range(0, len(rows), MAX_BATCH):
                some = rows[first : first + MAX_BATCH]
                told = [[n, *(in_json(getattr(row, name)) for name in said)] for n, row in enumerate(some)]
                count += execute(connection, sql, (Json(json.dumps(told, separators=(",", ":"))),))
        return count


class SqlServerArrivals:
    """The table of arrivals."""

    def note_arrivals(
        self, connection: Any, db_table: str, arrivals: Sequence[tuple[uuid.UUID, uuid.UUID]], origin: str
    ) -> set[uuid.UUID]:
        table = quote_table(db_table)
        # Index: the primary key, one seek a key. Safe: KEEPING, so of two transactions that note the same one
        # the second waits and then finds it.
        sql = (
            f"INSERT INTO {table} ([id], [message_id], [origin], [arrived_at]) OUTPUT inserted.[id] "
            "SELECT r.[id], r.[message_id], %s, SYSUTCDATETIME() FROM OPENJSON(%s) "
            "WITH ([id] uniqueidentifier '$[0]', [message_id] uniqueidentifier '$[1]') AS r WHERE NOT EXISTS "
            f"(SELECT 1 FROM {table} AS a WITH ({KEEPING}) WHERE a.[id] = r.[id])"
        )
        found: set[uuid.UUID] = set()
        for first in range(0, len(arrivals), MAX_BATCH):
            some = [list(one) for one in arrivals[first : first + MAX_BATCH]]
            found |= {uuid.UUID(bytes=guid(key)) for (key,) in fetch(connection, sql, (origin, json_of(some)))}
        return found
