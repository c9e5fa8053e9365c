"""SQL Server: copies for consumers. A statement has no snapshot here, so originals are locked, copied and deleted in three."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from ..inserts import Subscribed
from ..message_columns import Outgoing
from ..tables import QueueTable
from .claims import Claims
from .inserting import Pairs, insert_statement
from .locking import KEYS, MAX_BATCH, TAKING
from .session import execute, fetch, json_of, quote_table, translated

_NAMES = "OPENJSON(%s) WITH ([n] int '$[0]', [name] nvarchar(200) '$[1]') AS r"


def _numbered(names: Sequence[str]) -> str:
    return json_of(list(enumerate(names)))


class SqlServerCopying:
    """The verbs of one queue; ``_q`` and ``_c`` are its names, quoted."""

    table: QueueTable
    _q: str
    _c: dict[str, str]
    _claims: Claims
    _filled: Pairs
    _inserts: dict[tuple[bool, ...], str]

    def read_subscriptions(self, connection: Any, subscriptions: str) -> list[Subscribed]:
        # Index: the unique one, which begins with the queue; a handful of rows. Safe: what is not committed yet is waited for.
        sql = (
            f"SELECT s.[consumer], s.[type_name], s.[aliases], s.[mark] FROM {quote_table(subscriptions)} AS s "
            "WITH (READCOMMITTEDLOCK) WHERE s.[queue] = %s ORDER BY s.[number]"
        )
        return [Subscribed(*row) for row in fetch(connection, sql, (self.table.label,))]

    def insert_copies(
        self, connection: Any, message: Outgoing, recipients: Sequence[str], subscriptions: str, mark: int
    ) -> int:
        single, params = insert_statement(self._q, self._c, self._filled, self._inserts, message)
        head, _, values = single.partition(") VALUES (")
        # Index: the unique one of the subscriptions, once a statement; none of the queue. Safe: one statement, so all copies or none;
        # a subscription that is not committed yet is waited for. Identity numbers follow the ORDER BY.
        sql = (
            f"{head}, {self._c['recipient']}) SELECT {values[:-1]}, r.[name] FROM {_NAMES} WHERE (SELECT COALESCE(SUM(s.[mark]), 0) "
            f"FROM {quote_table(subscriptions)} AS s WITH (READCOMMITTEDLOCK) WHERE s.[queue] = %s) = %s ORDER BY r.[n]"
        )
        with translated(connection, self.table.db_table):
            return execute(connection, sql, (*params, _numbered(recipients), self.table.label, mark))

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
        columns = ", ".join([*(c[name] for name in names), c["recipient"]])
        values = ", ".join([*(f"q.{c[name]}" for name in names), "r.[name]"])
        if self.table.has_unevaluated:
            columns, values = f"{columns}, {c['lease_expires']}", f"{values}, NULL"
        mine = f"q.{c['lease_token']} = %s" if token else self._claims.free()
        # Index: the primary key, one seek a key (KEYS), in all three. Safe: TAKING waits for nobody, and what it has locked is this
        # transaction's to its end: the same rows are copied and deleted. Identity numbers follow the ORDER BY.
        lock = (
            f"SELECT q.{c['seq']} {KEYS} {self._q} AS q WITH ({TAKING}) ON q.{c['seq']} = k.[key] "
            f"WHERE q.{c['recipient']} = %s AND {mine} ORDER BY q.{c['seq']}"
        )
        copy = (
            f"INSERT INTO {self._q} ({columns}) SELECT {values} {KEYS} {self._q} AS q WITH (ROWLOCK) ON q.{c['seq']} = k.[key] "
            f"CROSS JOIN {_NAMES} ORDER BY q.{c['seq']}, r.[n]"
        )
        delete = f"DELETE q {KEYS} {self._q} AS q WITH (ROWLOCK) ON q.{c['seq']} = k.[key]"
        done = 0
        size = max(1, MAX_BATCH // max(1, len(recipients)))
        with translated(connection, self.table.db_table):
            for first in range(0, len(seqs), size):
                asked = (json_of(list(seqs[first : first + size])), recipient, *([str(token)] if token else []))
                keys = json_of([seq for (seq,) in fetch(connection, lock, asked)])
                if recipients:
                    execute(connection, copy, (keys, _numbered(recipients)))
                done += execute(connection, delete, (keys,))
        return done
