"""SQL Server: messages from the rows of a SELECT. FOR JSON writes a row, a collation of UTF-8 its bytes (2019 and later)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..inserts import Source
from ..message_columns import NO_OPTIONS, SENT, Outgoing
from ..tables import QueueTable
from .inserting import Pairs, given
from .session import execute, names_of, quote, translated

#: Of an id: its last 64 bits, of which the first is set, as a signed number.
_LOW = 2**64
_UTF8 = "Latin1_General_100_BIN2_UTF8"


class SqlServerSelecting:
    """The verb of one queue; ``_q`` and ``_c`` are its names, quoted."""

    table: QueueTable
    _q: str
    _c: dict[str, str]
    _filled: Pairs

    def ordered(self, select: str) -> str:
        # Without it no derived table may have an order. mssql-django ends an ordered SELECT with it, a union it may not.
        return select if select.endswith("OFFSET 0 ROWS") else f"{select} OFFSET 0 ROWS"

    def columns_of(self, connection: Any, source: Source) -> list[tuple[str, int]]:
        if source.names is not None:
            return [(name, 0) for name in source.names]
        # Index: none; no row is read.
        sql = f"SELECT * FROM ({source.sql}) AS s WHERE 1 = 0"
        return [(name, 0) for name in names_of(connection, sql, source.params)]

    def insert_select(self, connection: Any, like: Outgoing, source: Source, columns: Sequence[tuple[str, int]]) -> int:
        number = "CAST(%s AS bigint) + ROW_NUMBER() OVER (ORDER BY (SELECT NULL))"
        # The last eight bytes of an id are stored as they are written.
        pairs = [
            (self._c["id"], f"CAST(CAST(%s AS binary(8)) + CAST({number} AS binary(8)) AS uniqueidentifier)"),
            (self._c["headers"], "%s"),
            (self._c["body"], f"CAST(CAST(j.[body] COLLATE {_UTF8} AS varchar(max)) AS varbinary(max))"),
        ]
        params: list[Any] = [like.id.bytes_le[:8], like.id.int % _LOW - _LOW - 1, like.headers]
        for one, value, default in zip(SENT, like[3:], NO_OPTIONS, strict=True):
            if value != default and one.name in self._c:
                text, some = given(one, value)
                pairs.append((self._c[one.name], text))
                params += some
        # What is evaluated when it enters is held by the table's default.
        held = {self._c["lease_expires"]} if self.table.has_unevaluated else set()
        pairs += [pair for pair in self._filled if pair[0] not in held]
        names = ", ".join(f"[c{n}]" for n in range(len(columns)))
        fields = ", ".join(f"s.[c{n}] AS {quote(name)}" for n, (name, _) in enumerate(columns))
        # Index: whatever the caller's SELECT uses. Safe: the caller's transaction. From some thousand rows on the server locks
        # the table, and receivers wait for the commit.
        sql = (
            f"INSERT INTO {self._q} ({', '.join(column for column, _ in pairs)}) "
            f"SELECT {', '.join(value for _, value in pairs)} FROM ({source.sql}) AS s({names}) "
            f"CROSS APPLY (SELECT (SELECT {fields} FOR JSON PATH, INCLUDE_NULL_VALUES, WITHOUT_ARRAY_WRAPPER) AS [body]) AS j"
        )
        with translated(connection, self.table.db_table):
            return execute(connection, sql, (*params, *source.params))
