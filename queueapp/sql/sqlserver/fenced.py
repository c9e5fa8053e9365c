"""SQL Server: a queue with barriers. No claim goes beyond the first one, and a send holds a lock.

A statement has no snapshot here, so a claim reads twice before it takes: the highest seq, and then the first barrier. A barrier
below that seq was committed when its row was (``fence``), so the second read finds it; what comes later is above both. The
claim's transaction holds the release's lock shared meanwhile, so no barrier is released under it. (A TRANSACTIONAL one goes
on to hold it while it handles: then its message holds every barrier anyway.)
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...messages import new_id
from ..barriers import lock_name
from ..claims import Claimed, PeekResult, SeqRange
from ..fenced import FencedInserts
from ..limits import KnownClaims, LimitedClaim
from ..message_columns import Outgoing, Row
from ..tables import StoreTable
from .errors import LockTimeout
from .holding import held
from .inserting import insert_statement
from .locking import KEYS, LOOKING, TAKING
from .queue import SqlServerQueueSql
from .session import LATER, execute, fetch, fetch_within, json_of, later_params, quote, quote_table, translated


def _locking(mode: str, wait_ms: int) -> str:
    """Take a lock of the transaction; its name is the parameter."""
    return (
        f"EXEC @held = sp_getapplock @Resource = %s, @LockMode = '{mode}', @LockOwner = 'Transaction', "
        f"@LockTimeout = {wait_ms}"
    )


@contextmanager
def _in_transaction(connection: Any) -> Iterator[None]:
    """The caller's transaction, or one for what is within."""
    if connection.in_atomic_block or not connection.get_autocommit():
        yield
        return
    connection.set_autocommit(False)
    try:
        yield
    except BaseException:
        connection.rollback()
        raise
    else:
        connection.commit()
    finally:
        connection.set_autocommit(True)


class SqlServerFencedQueueSql(FencedInserts, SqlServerQueueSql):
    """The statements of such a queue."""

    # -- putting in -----------------------------------------------------------------------------------------------

    def _lock_for(self, connection: Any, purpose: str, mode: str, wait_ms: int = -1) -> bool:
        # No table is read. Safe: it is let go when the transaction ends, however that is.
        sql = f"SET NOCOUNT ON; DECLARE @held int; {_locking(mode, wait_ms)}; SELECT @held"
        return bool(fetch(connection, sql, (lock_name(purpose, self.table.db_table),))[0][0] >= 0)

    def fence(self, connection: Any, *, exclusive: bool) -> None:
        if not self._lock_for(connection, "send", "Exclusive" if exclusive else "Shared"):
            raise LockTimeout(0)

    def insert(self, connection: Any, message: Outgoing) -> None:
        sql, params = insert_statement(self._q, self._c, self._filled, self._inserts, message)
        # One batch with a transaction of its own where there is none: outside of one the lock would be gone before the INSERT.
        # No index is read. Safe: what fails is rolled back here, and the transaction of a caller is left to the caller.
        batch = (
            "DECLARE @own bit = CASE WHEN @@TRANCOUNT = 0 THEN 1 ELSE 0 END; DECLARE @held int; "
            "BEGIN TRY IF @own = 1 BEGIN TRANSACTION; "
            f"{_locking('Exclusive' if message.is_barrier else 'Shared', -1)}; "
            "IF @held < 0 THROW 51000, 'The lock of the queue was not granted.', 1; "
            f"{sql}; IF @own = 1 COMMIT TRANSACTION; END TRY "
            "BEGIN CATCH IF @own = 1 AND @@TRANCOUNT > 0 ROLLBACK TRANSACTION; THROW; END CATCH"
        )
        with translated(connection, self.table.db_table):
            execute(connection, batch, (lock_name("send", self.table.db_table), *params))

    def holds_barrier(self, connection: Any, source: StoreTable, keys: Sequence[int]) -> bool:
        # Index: the primary key of the source, one seek a key (KEYS). Safe: the caller holds the locks of its rows.
        sql = (
            f"SELECT TOP (1) 1 {KEYS} {quote_table(source.db_table)} AS q ON q.{quote(source.key)} = k.[key] "
            f"WHERE q.{quote(source.columns['is_barrier'])} = 1"
        )
        return bool(fetch(connection, sql, (json_of(list(keys)),)))

    # -- taking out -----------------------------------------------------------------------------------------------

    def _before_barriers(self, connection: Any, ranges: Sequence[SeqRange]) -> list[SeqRange]:
        last = self.last(connection)  # first, and then the barrier: see above
        barrier = self.first_barrier(connection)
        end = last if barrier is None else min(last, barrier - 1)
        if (
            self.table.has_unevaluated
            and self.table.finds_barriers
            and (unknown := self._first_held(connection)) is not None
        ):
            end = min(end, unknown - 1)
        cut = (only._replace(high=min(only.high, end)) for only in ranges)
        return [only for only in cut if only.low <= only.high]

    def _first_held(self, connection: Any) -> int | None:
        # Index: the filtered one on what is held, its first entry. Safe: LOOKING; one that is not committed holds nothing that is.
        sql = (
            f"SELECT TOP (1) q.{self._c['seq']} FROM {self._q} AS q WITH ({LOOKING}) WHERE {held(self._c)} "
            f"ORDER BY q.{self._c['seq']}"
        )
        rows = fetch(connection, sql, ())
        return int(rows[0][0]) if rows else None

    def peek(self, connection: Any, ahead: Sequence[SeqRange], behind: Sequence[SeqRange], limit: int) -> PeekResult:
        before = self._before_barriers(connection, ahead), self._before_barriers(connection, behind)
        return super().peek(connection, *before, limit)

    def read_heads(self, connection: Any, only: SeqRange, limit: int) -> list[tuple[int, str]]:
        before = self._before_barriers(connection, [only])
        return super().read_heads(connection, before[0], limit) if before else []

    def read_heads_and_bodies(self, connection: Any, only: SeqRange, limit: int) -> list[tuple[int, str, bytes | None]]:
        before = self._before_barriers(connection, [only])
        return super().read_heads_and_bodies(connection, before[0], limit) if before else []

    def claim_by_lease(
        self,
        connection: Any,
        ranges: Sequence[SeqRange],
        limit: int,
        token: uuid.UUID,
        owner: uuid.UUID,
        lease_ms: int,
    ) -> list[Claimed]:
        with _in_transaction(connection):
            before = self._claimable(connection, ranges, owner)
            return super().claim_by_lease(connection, before, limit, token, owner, lease_ms)

    def claim_by_delete(
        self,
        connection: Any,
        ranges: Sequence[SeqRange],
        limit: int,
        whole: bool = False,
        owner: uuid.UUID | None = None,
    ) -> list[Claimed]:
        with _in_transaction(connection):
            before = self._claimable(connection, ranges, owner)
            return super().claim_by_delete(connection, before, limit, whole)

    def claim_within(
        self,
        connection: Any,
        ranges: Sequence[SeqRange],
        limit: int,
        token: uuid.UUID,
        owner: uuid.UUID,
        lease_ms: int | None,
        most: int,
        seen: KnownClaims | None = None,
    ) -> LimitedClaim:
        with _in_transaction(connection):
            before = self._claimable(connection, ranges, owner)
            return super().claim_within(connection, before, limit, token, owner, lease_ms, most, seen)

    def lock_heads(self, connection: Any, ranges: Sequence[SeqRange], limit: int, *, bodies: bool) -> list[Claimed]:
        before = self._before_barriers(connection, ranges) if self._lock_for(connection, "release", "Shared") else []
        return super().lock_heads(connection, before, limit, bodies=bodies)

    def take_up(
        self, connection: Any, owner: uuid.UUID, limit: int, token: uuid.UUID, lease_ms: int | None
    ) -> list[Claimed]:
        with _in_transaction(connection):
            if not self._lock_for(connection, "release", "Shared") or self._is_barred(connection, owner):
                return []
            return super().take_up(connection, owner, limit, token, lease_ms)

    def _claimable(self, connection: Any, ranges: Sequence[SeqRange], owner: uuid.UUID | None) -> list[SeqRange]:
        if not self._lock_for(connection, "release", "Shared") or (owner and self._is_barred(connection, owner)):
            return []
        return self._before_barriers(connection, ranges)

    def _is_barred(self, connection: Any, owner: uuid.UUID) -> bool:
        assert self.table.deliveries is not None
        table, subscriber = self.table.deliveries
        # Index: the one on (subscriber, number), one seek. Safe: under the lock nobody releases; a row that is locked is taken.
        sql = f"SELECT TOP (1) 1 FROM {quote_table(table)} AS d WITH ({LOOKING}) WHERE d.{quote(subscriber)} = %s"
        return bool(fetch(connection, sql, (owner,)))

    # -- barriers -------------------------------------------------------------------------------------------------

    def first_barrier(self, connection: Any) -> int | None:
        seq, expires = f"q.{self._c['seq']}", f"q.{self._c['expires']}"
        # Index: the filtered one on barriers, its first entry. Safe: LOOKING; one that is not committed holds nothing that is.
        sql = (
            f"SELECT TOP (1) {seq} FROM {self._q} AS q WITH ({LOOKING}) WHERE q.{self._c['is_barrier']} = 1 "
            f"AND ({expires} IS NULL OR {expires} > SYSUTCDATETIME()) ORDER BY {seq}"
        )
        rows = fetch(connection, sql, ())
        return int(rows[0][0]) if rows else None

    def lock_barrier(self, connection: Any, seq: int) -> Row | None:
        if not self._lock_for(connection, "release", "Exclusive", wait_ms=0):
            return None
        # Index: the primary key. Safe: TAKING; what a purge has in hand is left to it.
        sql = (
            f"SELECT {self._row.of('q')} FROM {self._q} AS q WITH ({TAKING}) "
            f"WHERE q.{self._c['seq']} = %s AND q.{self._c['is_barrier']} = 1"
        )
        return self._as_row(fetch(connection, sql, (seq,)))

    def first_before(self, connection: Any, low: int, high: int) -> int | None:
        seq = f"q.{self._c['seq']}"
        # Index: the primary key, from ``low`` on. Safe: it waits for nobody; a row that is locked is a row that is there.
        sql = (
            f"SELECT TOP (1) {seq} FROM {self._q} AS q WITH (READCOMMITTEDLOCK) "
            f"WHERE {seq} >= %s AND {seq} < %s ORDER BY {seq}"
        )
        try:
            rows = fetch_within(connection, 0, sql, (low, high))
        except LockTimeout:
            return low
        return int(rows[0][0]) if rows else None

    def hold_back(self, connection: Any, seq: int, hold_ms: int) -> int:
        c = self._c
        # Index: the primary key; the caller has the row locked. A token that nobody knows: nobody can end it but time.
        sql = (
            f"UPDATE {self._q} SET {c['lease_token']} = %s, {c['lease_owner']} = NULL, {c['lease_expires']} = {LATER} "
            f"WHERE {c['seq']} = %s"
        )
        return execute(connection, sql, (new_id(), *later_params(hold_ms), seq))
