"""PostgreSQL: a queue with barriers. No claim goes beyond the first one, and a send holds a lock.

A claim finds the first barrier in its own snapshot, one probe of the partial index. That is enough because of the lock: a
message with a higher seq than a barrier was sent when that barrier was committed, so who sees it sees the barrier.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from ...messages import new_id
from ..barriers import lock_numbers
from ..claims import MAX_SEQ
from ..fenced import FencedInserts
from ..message_columns import Outgoing, Row
from ..tables import QueueTable, StoreTable
from .claims import Where
from .holding import held
from .queue import PostgresqlQueueSql
from .rows import to_utc
from .session import fetch, quote, quote_table


class PostgresqlFencedQueueSql(FencedInserts, PostgresqlQueueSql):
    """The statements of such a queue."""

    def __init__(self, table: QueueTable) -> None:
        self._sending = lock_numbers("send", table.db_table)
        self._releasing = lock_numbers("release", table.db_table)
        super().__init__(table)

    # -- putting in -----------------------------------------------------------------------------------------------

    def fence(self, connection: Any, *, exclusive: bool) -> None:
        # No table is read. Safe: it is let go when the transaction ends, however that is.
        fetch(connection, f"SELECT {self._locking(exclusive)}", self._sending)

    @staticmethod
    def _locking(exclusive: bool) -> str:
        return f"pg_advisory_xact_lock{'' if exclusive else '_shared'}(%s::int, %s::int)"

    def _insert_fenced(self, message: Outgoing) -> tuple[str, tuple[Any, ...]]:
        sql, params = self._insert_of(message)
        head, _, values = sql.partition(" VALUES (")
        # One statement, since outside of a transaction a lock that was taken before it would be gone. Safe: the row of ``l`` is
        # there when the lock is held, and only then the number of the message is drawn. No index beyond those of the table.
        locked = f"WITH l AS MATERIALIZED (SELECT {self._locking(message.is_barrier)}::text AS held)"
        return f"{locked} {head} SELECT {values[:-1]} FROM l WHERE l.held IS NOT NULL", (*self._sending, *params)

    def holds_barrier(self, connection: Any, source: StoreTable, keys: Sequence[int]) -> bool:
        # Primary key of the source; the caller holds the locks of its rows.
        sql = (
            f"SELECT 1 FROM {quote_table(source.db_table)} s WHERE s.{quote(source.key)} = ANY(%s) "
            f"AND s.{quote(source.columns['is_barrier'])} LIMIT 1"
        )
        return bool(fetch(connection, sql, (list(keys),)))

    # -- taking out -----------------------------------------------------------------------------------------------

    def _unexpired(self) -> str:
        """Of a barrier: when its time is over it holds nothing any more."""
        expires = self._c["expires"]
        return f"(b.{expires} IS NULL OR b.{expires} > {to_utc(self.table, 'expires', 'statement_timestamp()')})"

    def _build_place(self, where: Where) -> tuple[str, str]:
        within, order = super()._build_place(where)
        seq = self._c["seq"]
        # The partial index on barriers, its first entry, once a statement; then a bound of the range as any other.
        last = (
            f"(SELECT coalesce(min(b.{seq}) - 1, {MAX_SEQ}) FROM {self._q} b "
            f"WHERE b.{self._c['is_barrier']} AND {self._unexpired()})"
        )
        if self.table.has_unevaluated and self.table.finds_barriers:
            # The partial index on what is held, its first entry: nobody knows yet whether that is a barrier.
            holding = held({name: f"h.{column}" for name, column in self._c.items()})
            first = f"(SELECT coalesce(min(h.{seq}) - 1, {MAX_SEQ}) FROM {self._q} h WHERE {holding})"
            last = f"least({last}, {first})"
        if self.table.claim_by:
            return within.replace("l.high", f"least(l.high, {last})"), order
        return f"{within} AND {seq} <= {last}", order

    def _unless_barred(self) -> str:
        # The index on (subscriber, number), one probe a claim. Safe: the barrier goes and its deliveries come in one commit.
        assert self.table.deliveries is not None
        table, subscriber = self.table.deliveries
        return f" AND NOT EXISTS (SELECT 1 FROM {quote_table(table)} d WHERE d.{quote(subscriber)} = %s::uuid)"

    def _claimant(self, owner: uuid.UUID | None) -> tuple[Any, ...]:
        return (owner,)

    # -- barriers -------------------------------------------------------------------------------------------------

    def first_barrier(self, connection: Any) -> int | None:
        seq = self._c["seq"]
        # The partial index on barriers, its first entry. No lock, no WAL.
        sql = f"SELECT min(b.{seq}) FROM {self._q} b WHERE b.{self._c['is_barrier']} AND {self._unexpired()}"
        found: int | None = fetch(connection, sql, ())[0][0]
        return found

    def lock_barrier(self, connection: Any, seq: int) -> Row | None:
        # Primary key. Safe: one at a time releases, and nobody waits; what a purge has in hand is left to it.
        if not fetch(connection, "SELECT pg_try_advisory_xact_lock(%s::int, %s::int)", self._releasing)[0][0]:
            return None
        sql = (
            f"SELECT {self._read(Row._fields)} FROM {self._q} WHERE {self._c['seq']} = %s AND {self._c['is_barrier']} "
            "FOR UPDATE SKIP LOCKED"
        )
        rows = self._in_order.fetch_by_key(connection, sql, (seq,))
        return Row(*rows[0])._replace(id=uuid.UUID(bytes=rows[0][1])) if rows else None

    def first_before(self, connection: Any, low: int, high: int) -> int | None:
        seq = self._c["seq"]
        # Primary key, from ``low`` on: dead rows are walked over once. No lock; what is deleted and not committed is seen.
        sql = f"SELECT {seq} FROM {self._q} WHERE {seq} >= %s AND {seq} < %s ORDER BY {seq} LIMIT 1"
        rows = self._in_order.fetch(connection, sql, (low, high))
        return rows[0][0] if rows else None

    def hold_back(self, connection: Any, seq: int, hold_ms: int) -> int:
        c = self._c
        # Primary key; the caller has the row locked. A token that nobody knows: nobody can end it but time.
        sql = (
            f"UPDATE {self._q} SET {c['lease_token']} = %s, {c['lease_owner']} = NULL, "
            f"{c['lease_expires']} = clock_timestamp() + %s * interval '1 ms' WHERE {c['seq']} = %s"
        )
        return self._in_order.execute_by_key(connection, sql, (new_id(), hold_ms, seq))
