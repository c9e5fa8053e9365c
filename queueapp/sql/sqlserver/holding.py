"""SQL Server: held messages, by the filtered index on them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from ..claims import FOREVER
from ..message_columns import Row
from ..tables import QueueTable
from .locking import LOOKING, MAX_BATCH, TAKING
from .rows import Returned
from .session import execute, fetch, json_of

#: As it stands in the filter of the index.
_FOREVER = f"'{FOREVER:%Y-%m-%d %H:%M:%S}'"


def held(columns: dict[str, str], row: str = "q") -> str:
    """The condition of a held message: that of the index."""
    return f"({row}.{columns['lease_expires']} = {_FOREVER} AND {row}.{columns['lease_token']} IS NULL)"


class SqlServerHolding:
    """The verbs of one queue; ``_q`` and ``_c`` are its names, quoted."""

    table: QueueTable
    _q: str
    _c: dict[str, str]

    def lock_held(self, connection: Any, limit: int) -> list[Row]:
        whole = Returned(self._c, Row._fields)
        # Index: the filtered one on what is held. Safe: TAKING waits for nobody, so several share the work; fewer rows than
        # escalate to a table lock.
        sql = (
            f"SELECT TOP (%s) {whole.of('q')} FROM {self._q} AS q WITH ({TAKING}) "
            f"WHERE {held(self._c)} ORDER BY q.{self._c['seq']}"
        )
        found = whole.tuples(fetch(connection, sql, (min(limit, MAX_BATCH),)))
        return [Row(*row)._replace(id=uuid.UUID(bytes=row[1])) for row in found]

    def free_held(
        self, connection: Any, seqs: Sequence[int], priorities: Sequence[int] | None, barriers: Sequence[bool] | None
    ) -> int:
        c = self._c
        given = [("priority", "bigint", priorities), ("is_barrier", "bit", barriers)]
        used = [(name, kind, list(values)) for name, kind, values in given if values is not None]
        fields = ["[seq] bigint '$[0]'", *(f"[{name}] {kind} '$[{n}]'" for n, (name, kind, _) in enumerate(used, 1))]
        setting = ", ".join([f"{c['lease_expires']} = NULL", *(f"{c[name]} = k.[{name}]" for name, _, _ in used)])
        # Index: the primary key, one seek a key (the loop join). Safe: the caller holds the locks from ``lock_held``; asked
        # again all the same.
        sql = (
            f"UPDATE q SET {setting} FROM OPENJSON(%s) WITH ({', '.join(fields)}) AS k "
            f"INNER LOOP JOIN {self._q} AS q WITH (ROWLOCK) ON q.{c['seq']} = k.[seq] WHERE {held(c)}"
        )
        rows = list(zip(seqs, *(values for _, _, values in used), strict=True))
        return execute(connection, sql, (json_of(rows),))

    def count_held(self, connection: Any, limit: int) -> int:
        # Index: the filtered one on what is held. Safe: LOOKING.
        sql = (
            f"SELECT COUNT(*) FROM (SELECT TOP (%s) 1 AS [one] FROM {self._q} AS q WITH ({LOOKING}) "
            f"WHERE {held(self._c)}) AS h"
        )
        return int(fetch(connection, sql, (limit,))[0][0])
