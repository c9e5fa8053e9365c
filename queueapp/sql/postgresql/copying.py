"""PostgreSQL: copies for consumers, and the question whether all of them are known in the INSERT itself."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from ..inserts import Subscribed
from ..message_columns import Outgoing
from ..tables import QueueTable
from .session import execute, fetch, quote_table, translated


class PostgresqlCopying:
    """The verbs of one queue; ``_q`` and ``_c`` are its names, quoted, ``_free`` and ``_fenced`` conditions."""

    table: QueueTable
    _q: str
    _c: dict[str, str]
    _free: str
    _fenced: str

    def _insert_of(self, message: Outgoing) -> tuple[str, tuple[Any, ...]]:
        raise NotImplementedError  # of ``queue``

    def read_subscriptions(self, connection: Any, subscriptions: str) -> list[Subscribed]:
        # The unique index, which begins with the queue; a handful of rows. No lock, no WAL.
        sql = f"SELECT consumer, type_name, aliases, mark FROM {quote_table(subscriptions)} WHERE queue = %s ORDER BY number"
        return [Subscribed(*row) for row in fetch(connection, sql, (self.table.label,))]

    def insert_copies(
        self, connection: Any, message: Outgoing, recipients: Sequence[str], subscriptions: str, mark: int
    ) -> int:
        single, params = self._insert_of(message)
        head, _, values = single.partition(") VALUES (")
        # The unique index of the subscriptions, once a statement; of the queue none is read. Safe: one statement, so all copies or
        # none; a subscription that is committed before it begins is in its snapshot. Numbers of seq follow the ORDER BY.
        asked = f"(SELECT coalesce(sum(s.mark), 0)::bigint FROM {quote_table(subscriptions)} s WHERE s.queue = %s) = %s::bigint"
        names: Any = list(recipients)
        if len(names) == 1:  # nothing to sort, which is most of what the statement would cost
            sql, names = f"{head}, {self._c['recipient']}) SELECT {values[:-1]}, %s::varchar WHERE {asked}", names[0]
        else:
            sql = (
                f"{head}, {self._c['recipient']}) SELECT {values[:-1]}, r.name FROM unnest(%s::varchar[]) WITH ORDINALITY "
                f"AS r(name, place) WHERE {asked} ORDER BY r.place"
            )
        with translated(connection, self.table.db_table):
            return execute(connection, sql, (*params, names, self.table.label, mark))

    def replace_by_copies(
        self,
        connection: Any,
        seqs: Sequence[int],
        recipients: Sequence[str],
        token: uuid.UUID | None = None,
        recipient: str = "",
    ) -> int:
        c = self._c
        names = [name for name in self.table.copied if name in c]
        columns = ", ".join(c[name] for name in names)
        free = ", ".join([columns, c["recipient"], *([c["lease_expires"]] if self.table.has_unevaluated else [])])
        values = ", ".join(
            [*(f"g.{c[name]}" for name in names), "r.name", *(["NULL"] if self.table.has_unevaluated else [])]
        )
        mine = self._fenced if token else self._free
        # Primary key. Safe: one statement, so a message and its copies are never both there, and never both gone; SKIP LOCKED
        # waits for nobody, the token fences. Copies of one message stand side by side, in the order of the originals.
        sql = (
            f"WITH gone AS (DELETE FROM {self._q} WHERE {c['seq']} = ANY(ARRAY(SELECT {c['seq']} FROM {self._q} "
            f"WHERE {c['seq']} = ANY(%s) AND {c['recipient']} = %s AND {mine} ORDER BY {c['seq']} FOR UPDATE SKIP LOCKED)) "
            f"RETURNING {c['seq']}, {columns}), put AS (INSERT INTO {self._q} ({free}) SELECT {values} FROM gone g "
            f"CROSS JOIN unnest(%s::varchar[]) WITH ORDINALITY AS r(name, place) ORDER BY g.{c['seq']}, r.place) "
            "SELECT count(*) FROM gone"
        )
        params = (list(seqs), recipient, *([token] if token else []), list(recipients))
        with translated(connection, self.table.db_table):
            return int(fetch(connection, sql, params)[0][0])
