"""The ledger of queues: counting messages as they come and go, and comparing the counts with the tables.

What the two databases share is here: a reading, and an opening balance, are one statement each, so all tables are read
as of one moment, and a transaction that commits meanwhile is in it with its messages and its counts, or not at all.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

QUEUE, DELAYED, POISON = range(3)
OPENING, SENT, ACKED, EXPIRED, MOVED = "opening", "sent", "acked", "expired", "moved"
#: The kind of what ``read`` has counted in the tables.
ROWS = ""


class Count(NamedTuple):
    """So many messages came into a table (``place``), or left it (below 0)."""

    place: int
    kind: str
    messages: int


class LedgerTables(NamedTuple):
    """The tables of the entries, of delayed messages and of poison."""

    entries: str
    delayed: str
    poison: str


class Entry(NamedTuple):
    """One row of the ledger, without its number and its level."""

    queue: str
    place: int
    kind: str
    messages: int
    minute: datetime


class LedgerSql(abc.ABC):
    """Verbs of the tables of all queues of a database."""

    #: The present minute, as SQL.
    minute: str

    def add(self, connection: Any, entries: str, queue: str, counts: Sequence[Count]) -> None:
        """Insert entries of the present minute, in the transaction that changes what they count. Waits for no lock."""
        rows = ", ".join([f"(%s, %s, %s, %s, {self.minute})"] * len(counts))
        # No row is read. Safe: inserted with what it counts.
        sql = f"INSERT INTO {self._table(entries)} (queue, place, kind, messages, minute) VALUES {rows}"
        self._execute(connection, sql, [value for count in counts for value in (queue, *count)])

    @abc.abstractmethod
    def take(self, connection: Any, entries: str, level: int, keep_ms: int, limit: int) -> list[Entry]:
        """Delete at most ``limit`` entries of this level whose minute began longer ago, and return them, for the caller
        to insert their sums in the same transaction. Skips locked rows."""

    @abc.abstractmethod
    def reads_together(self, connection: Any) -> bool:
        """Whether a statement of this database reads all its tables as of one moment."""

    def read(
        self, connection: Any, tables: LedgerTables, queue_table: str, queue: str, names: Sequence[str]
    ) -> list[Count]:
        """The sums of a queue's entries by place and kind, and what is in its tables (kind ``ROWS``). ``names``: by
        which delayed and poison messages name it."""
        # Not GROUP BY, before which mssql-django declares a variable for each parameter. No index: the entries are few,
        # since maintenance adds them up; the rows of the queue's table are counted by its primary key, the others by
        # their indexes on the name. Safe: one statement, one snapshot.
        sql = (
            "SELECT DISTINCT place, kind, CAST(SUM(messages) OVER (PARTITION BY place, kind) AS bigint) "
            f"FROM {self._table(tables.entries)} WHERE queue = %s UNION ALL SELECT c.place, '{ROWS}', c.messages "
            f"FROM ({self._counted(tables, queue_table)}) AS c"
        )
        with connection.cursor() as cursor:
            cursor.execute(sql, [queue, *self._named(names)])
            return [Count(int(place), kind, int(messages)) for place, kind, messages in cursor.fetchall()]

    def open(self, connection: Any, tables: LedgerTables, queue_table: str, queue: str, names: Sequence[str]) -> None:
        """Insert opening balances with which the ledger closes now. The caller keeps others from doing so."""
        entries = self._table(tables.entries)
        # Index and safety: as ``read``. What is counted and what was counted are of one moment.
        sql = (
            f"INSERT INTO {entries} (queue, place, kind, messages, minute, level) SELECT %s, c.place, '{OPENING}', "
            f"c.messages - COALESCE((SELECT SUM(e.messages) FROM {entries} AS e WHERE e.queue = %s "
            f"AND e.place = c.place), 0), {self.minute}, 1 FROM ({self._counted(tables, queue_table)}) AS c"
        )
        with connection.cursor() as cursor:
            cursor.execute(sql, [queue, queue, *self._named(names)])

    @abc.abstractmethod
    def _execute(self, connection: Any, sql: str, params: Sequence[Any]) -> int:
        """Run a statement of the hot path."""

    @abc.abstractmethod
    def _table(self, db_table: str) -> str:
        """A table's name, quoted, in a statement with parameters."""

    def _counted(self, tables: LedgerTables, queue_table: str) -> str:
        counted = ((QUEUE, queue_table, ""), (DELAYED, tables.delayed, "destination"), (POISON, tables.poison, "queue"))
        return " UNION ALL ".join(
            f"SELECT {place} AS place, CAST(COUNT(*) AS bigint) AS messages FROM {self._table(table)}"
            + (f" WHERE {column} IN (%s, %s)" if column else "")
            for place, table, column in counted
        )

    @staticmethod
    def _named(names: Sequence[str]) -> list[str]:
        label, table = names
        return [label, table, label, table]
