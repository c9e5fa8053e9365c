"""PostgreSQL: messages of another database as arrays, one for each column; what has arrived is left out by its key."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from ..message_columns import BY_NAME, Row, kind_of
from ..tables import QueueTable
from .rows import TYPES, to_utc
from .session import execute, fetch, quote_table, translated

_TYPES = {
    "id": "uuid",
    "headers": "text",
    "body": "bytea",
    "deliveries": "integer",
    "cancels": "integer",
    "failures": "text",
}
_TYPES |= {one.name: TYPES[one.kind] for one in BY_NAME.values()}
_RANKED_TYPES = _TYPES | {one.name: TYPES[kind_of(one, priority64=True)] for one in BY_NAME.values()}


class PostgresqlArriving:
    """The verbs of one queue; ``_q`` and ``_c`` are its names, quoted."""

    table: QueueTable
    _q: str
    _c: dict[str, str]
    _filled: dict[str, str]

    def insert_rows(self, connection: Any, rows: Sequence[Row]) -> int:
        rows = [self.table.within_levels(row) for row in rows]
        types = _RANKED_TYPES if self.table.priority64 else _TYPES
        carried = [name for name in self.table.moved(types) if name in self._c]
        said = [name for name in carried if any(getattr(row, name) is not None for row in rows)]
        columns = ", ".join(self._c[name] for name in [*said, *self._filled])
        values = ", ".join([*(to_utc(self.table, name, f"u.{name}") for name in said), *self._filled.values()])
        arrays = ", ".join(f"%s::{types[name]}[]" for name in said)
        # No index is read; safe: the caller's transaction. Numbers of seq follow the ORDER BY.
        sql = (
            f"INSERT INTO {self._q} ({columns}) SELECT {values} FROM unnest({arrays}) WITH ORDINALITY "
            f"AS u({', '.join(said)}, place) ORDER BY u.place"
        )
        with translated(connection, self.table.db_table):
            return execute(connection, sql, [[getattr(row, name) for row in rows] for name in said])


class PostgresqlArrivals:
    """The table of arrivals."""

    def note_arrivals(
        self, connection: Any, db_table: str, arrivals: Sequence[tuple[uuid.UUID, uuid.UUID]], origin: str
    ) -> set[uuid.UUID]:
        # Primary key. Safe: a key that another transaction is inserting is waited for, and left out if that commits; in the
        # order of the keys, so that two of them cannot deadlock.
        sql = (
            f"INSERT INTO {quote_table(db_table)} (id, message_id, origin, arrived_at) "
            "SELECT u.id, u.message_id, %s, clock_timestamp() FROM unnest(%s::uuid[], %s::uuid[]) AS u(id, message_id) "
            "ORDER BY u.id ON CONFLICT (id) DO NOTHING RETURNING id"
        )
        keys, ids = [key for key, _ in arrivals], [identity for _, identity in arrivals]
        return {uuid.UUID(bytes=key) for (key,) in fetch(connection, sql, (origin, keys, ids))}
