"""PostgreSQL: a queue with barriers. No claim passes the first barrier, and a send holds a lock.

A claim finds the first barrier in its own snapshot, one probe of the partial index. That suffices because of the lock:
a message with a higher seq than a barrier was sent after that barrier was committed, so a snapshot that contains it
contains the barrier.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from ...messages import new_id
from ..barriers import Barriers, lock_numbers
from ..claims import MAX_SEQ
from ..message_columns import Outgoing, Row
from ..tables import StoreTable
from .claims import PostgresqlClaims, Where
from .raw.cursor import fetch
from .statements import Statements, TableText, quote, quote_table, to_utc, unevaluated


def _unexpired(text: TableText) -> str:
    """The condition of a barrier ``b`` that has not expired: an expired one blocks nothing."""
    expires = text.columns["expires"]
    return f"(b.{expires} IS NULL OR b.{expires} > {to_utc(text.table, 'expires', 'statement_timestamp()')})"


class PostgresqlBarriers(Statements, Barriers):
    """Locks and barriers of one queue."""

    def __init__(self, text: TableText) -> None:
        super().__init__(text)
        self._sending = lock_numbers("send", text.table.db_table)
        self._releasing = lock_numbers("release", text.table.db_table)
        self._unexpired = _unexpired(text) if text.table.barriers else ""

    # -- sends ------------------------------------------------------------------------------------------------------

    def lock_sends(self, connection: Any, *, exclusive: bool) -> None:
        # No table is read. Safe: released when the transaction ends in any way.
        fetch(connection, f"SELECT {self._locking(exclusive)}", self._sending)

    @staticmethod
    def _locking(exclusive: bool) -> str:
        return f"pg_advisory_xact_lock{'' if exclusive else '_shared'}(%s::int, %s::int)"

    def fence(self, message: Outgoing, sql: str, params: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
        """The INSERT of a message that takes the send lock first, in the same statement."""
        head, _, values = sql.partition(" VALUES (")
        # One statement, since outside of a transaction a lock taken by an earlier one would be released. Safe: the row
        # of ``l`` exists once the lock is held, and only then the message's seq is drawn. No index beyond those of the
        # table.
        locked = f"WITH l AS MATERIALIZED (SELECT {self._locking(message.is_barrier)}::text AS held)"
        return f"{locked} {head} SELECT {values[:-1]} FROM l WHERE l.held IS NOT NULL", (*self._sending, *params)

    def any_barrier(self, connection: Any, source: StoreTable, keys: Sequence[int]) -> bool:
        # Primary key of the source; the caller holds the locks of its rows.
        sql = (
            f"SELECT 1 FROM {quote_table(source.db_table)} s WHERE s.{quote(source.key)} = ANY(%s) "
            f"AND s.{quote(source.columns['is_barrier'])} LIMIT 1"
        )
        return bool(fetch(connection, sql, (list(keys),)))

    # -- barriers ---------------------------------------------------------------------------------------------------

    def first(self, connection: Any) -> int | None:
        seq = self._c["seq"]
        # The partial index on barriers, its first entry. No lock, no WAL.
        sql = f"SELECT min(b.{seq}) FROM {self._q} b WHERE b.{self._c['is_barrier']} AND {self._unexpired}"
        found: int | None = fetch(connection, sql, ())[0][0]
        return found

    def lock(self, connection: Any, seq: int) -> Row | None:
        # Primary key. Safe: one session at a time releases, and none waits; a row that a purge has locked is skipped.
        if not fetch(connection, "SELECT pg_try_advisory_xact_lock(%s::int, %s::int)", self._releasing)[0][0]:
            return None
        sql = (
            f"SELECT {self._read(Row._fields)} FROM {self._q} WHERE {self._c['seq']} = %s AND {self._c['is_barrier']} "
            "FOR UPDATE SKIP LOCKED"
        )
        rows = self._guard.fetch_by_key(connection, sql, (seq,))
        return Row(*rows[0])._replace(id=uuid.UUID(bytes=rows[0][1])) if rows else None

    def first_seq(self, connection: Any, low: int, high: int) -> int | None:
        seq = self._c["seq"]
        # Primary key, from ``low`` on: dead rows are scanned once. No lock; rows with an uncommitted delete are seen.
        sql = f"SELECT {seq} FROM {self._q} WHERE {seq} >= %s AND {seq} < %s ORDER BY {seq} LIMIT 1"
        rows = self._guard.fetch(connection, sql, (low, high))
        return rows[0][0] if rows else None

    def postpone(self, connection: Any, seq: int, hold_ms: int) -> int:
        c = self._c
        # Primary key; the caller has locked the row. An unknown token: the lease ends by its time only.
        sql = (
            f"UPDATE {self._q} SET {c['lease_token']} = %s, {c['lease_owner']} = NULL, "
            f"{c['lease_expires']} = clock_timestamp() + %s * interval '1 ms' WHERE {c['seq']} = %s"
        )
        return self._guard.execute_by_key(connection, sql, (new_id(), hold_ms, seq))


class FencedClaims(PostgresqlClaims):
    """Claims of such a queue."""

    def __init__(self, text: TableText) -> None:
        self._unexpired = _unexpired(text)
        super().__init__(text)

    def build_range(self, where: Where) -> tuple[str, str]:
        within, order = super().build_range(where)
        seq = self._c["seq"]
        # The partial index on barriers, its first entry, once a statement; then a bound of the range like any other.
        last = (
            f"(SELECT coalesce(min(b.{seq}) - 1, {MAX_SEQ}) FROM {self._q} b "
            f"WHERE b.{self._c['is_barrier']} AND {self._unexpired})"
        )
        if self.table.has_unevaluated and self.table.finds_barriers:
            # The partial index on messages pending evaluation, its first entry: it may turn out to be a barrier.
            pending = unevaluated({name: f"h.{column}" for name, column in self._c.items()})
            first = f"(SELECT coalesce(min(h.{seq}) - 1, {MAX_SEQ}) FROM {self._q} h WHERE {pending})"
            last = f"least({last}, {first})"
        if self.table.claim_by:
            return within.replace("l.high", f"least(l.high, {last})"), order
        return f"{within} AND {seq} <= {last}", order

    def unless_barred(self) -> str:
        # The index on (subscriber, number), one probe a claim. Safe: one commit deletes the barrier and adds its
        # deliveries.
        assert self.table.deliveries is not None
        table, subscriber = self.table.deliveries
        return f" AND NOT EXISTS (SELECT 1 FROM {quote_table(table)} d WHERE d.{quote(subscriber)} = %s::uuid)"

    def claimant(self, owner: uuid.UUID | None) -> tuple[Any, ...]:
        return (owner,)
