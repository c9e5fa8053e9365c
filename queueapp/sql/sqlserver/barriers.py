"""SQL Server: a queue with barriers. No claim passes the first barrier, and a send holds a lock.

A statement has no snapshot here, so a claim reads twice before it takes: the highest seq, and then the first barrier. A
barrier below that seq was committed when its row was (``lock_sends``), so the second read finds it; later rows are
above both. The claim's transaction holds the release's lock shared meanwhile, so no barrier is released during it. (A
TRANSACTIONAL claim holds it while its handler runs: its message blocks every barrier anyway.)
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...messages import new_id
from ..barriers import Barriers, lock_name
from ..claims import Claimed, PeekResult, SeqRange
from ..limits import KnownClaims, LimitedClaim
from ..message_columns import Outgoing, Row
from ..tables import StoreTable
from .claims import SqlServerClaims
from .errors import DEADLOCKED, LockRefused, LockTimeout
from .figures import SqlServerFigures
from .inserts import SqlServerInserts
from .limits import SqlServerLimits
from .statements import (
    KEYS,
    LATER,
    LOOKING,
    TAKING,
    Statements,
    TableText,
    execute,
    fetch,
    fetch_within,
    json_of,
    later_params,
    quote,
    quote_table,
    translated,
    unevaluated,
)


def _locking(mode: str, wait_ms: int) -> str:
    """T-SQL that takes a lock of the transaction; its name is the parameter."""
    return (
        f"EXEC @held = sp_getapplock @Resource = %s, @LockMode = '{mode}', @LockOwner = 'Transaction', "
        f"@LockTimeout = {wait_ms}"
    )


@contextmanager
def _in_transaction(connection: Any) -> Iterator[None]:
    """The caller's transaction, or one for the block."""
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


class SqlServerBarriers(Statements, Barriers):
    """Locks and barriers of one queue."""

    def __init__(self, text: TableText) -> None:
        super().__init__(text)
        self._figures = SqlServerFigures(text)

    # -- sends --------------------------------------------------------------------------------------------------------

    def _lock_for(self, connection: Any, purpose: str, mode: str, wait_ms: int = -1) -> bool:
        # No table is read. Safe: released when the transaction ends in any way.
        sql = f"SET NOCOUNT ON; DECLARE @held int; {_locking(mode, wait_ms)}; SELECT @held"
        name = lock_name(purpose, self.table.db_table)
        answer = int(fetch(connection, sql, (name,))[0][0])
        if answer < -1:  # not a timeout: the victim of a deadlock, which the caller retries, or an error
            raise LockRefused(name, answer)
        return answer >= 0

    def lock_sends(self, connection: Any, *, exclusive: bool) -> None:
        if not self._lock_for(connection, "send", "Exclusive" if exclusive else "Shared"):
            raise LockTimeout(0)

    def any_barrier(self, connection: Any, source: StoreTable, keys: Sequence[int]) -> bool:
        # Index: the primary key of the source, one seek a key (KEYS). Safe: the caller holds the locks of its rows.
        sql = (
            f"SELECT TOP (1) 1 {KEYS} {quote_table(source.db_table)} AS q ON q.{quote(source.key)} = k.[key] "
            f"WHERE q.{quote(source.columns['is_barrier'])} = 1"
        )
        return bool(fetch(connection, sql, (json_of(list(keys)),)))

    # -- barriers -----------------------------------------------------------------------------------------------------

    def first(self, connection: Any) -> int | None:
        seq, expires = f"q.{self._c['seq']}", f"q.{self._c['expires']}"
        # Index: the filtered one on barriers, its first entry. Safe: LOOKING; an uncommitted one blocks no committed
        # message.
        sql = (
            f"SELECT TOP (1) {seq} FROM {self._q} AS q WITH ({LOOKING}) WHERE q.{self._c['is_barrier']} = 1 "
            f"AND ({expires} IS NULL OR {expires} > SYSUTCDATETIME()) ORDER BY {seq}"
        )
        rows = fetch(connection, sql, ())
        return int(rows[0][0]) if rows else None

    def lock(self, connection: Any, seq: int) -> Row | None:
        if not self._lock_for(connection, "release", "Exclusive", wait_ms=0):
            return None
        # Index: the primary key. Safe: TAKING; a row that a purge has locked is skipped.
        sql = (
            f"SELECT {self._row.of('q')} FROM {self._q} AS q WITH ({TAKING}) "
            f"WHERE q.{self._c['seq']} = %s AND q.{self._c['is_barrier']} = 1"
        )
        return self._as_row(fetch(connection, sql, (seq,)))

    def first_seq(self, connection: Any, low: int, high: int) -> int | None:
        seq = f"q.{self._c['seq']}"
        # Index: the primary key, from ``low`` on. Safe: it waits for no lock; a locked row exists.
        sql = (
            f"SELECT TOP (1) {seq} FROM {self._q} AS q WITH (READCOMMITTEDLOCK) "
            f"WHERE {seq} >= %s AND {seq} < %s ORDER BY {seq}"
        )
        try:
            rows = fetch_within(connection, 0, sql, (low, high))
        except LockTimeout:
            return low
        return int(rows[0][0]) if rows else None

    def postpone(self, connection: Any, seq: int, hold_ms: int) -> int:
        c = self._c
        # Index: the primary key; the caller has locked the row. An unknown token: the lease ends by its time only.
        sql = (
            f"UPDATE {self._q} SET {c['lease_token']} = %s, {c['lease_owner']} = NULL, {c['lease_expires']} = {LATER} "
            f"WHERE {c['seq']} = %s"
        )
        return execute(connection, sql, (new_id(), *later_params(hold_ms), seq))

    # -- claims -------------------------------------------------------------------------------------------------------

    def before(self, connection: Any, ranges: Sequence[SeqRange]) -> list[SeqRange]:
        """The parts of the ranges before the first barrier."""
        last = self._figures.last_seq(connection)  # before the barrier: see above
        barrier = self.first(connection)
        end = last if barrier is None else min(last, barrier - 1)
        if (
            self.table.has_unevaluated
            and self.table.finds_barriers
            and (pending := self._first_unevaluated(connection)) is not None
        ):
            end = min(end, pending - 1)
        cut = (only._replace(high=min(only.high, end)) for only in ranges)
        return [only for only in cut if only.low <= only.high]

    def _first_unevaluated(self, connection: Any) -> int | None:
        # Index: the filtered one on pending messages, its first entry. Safe: LOOKING; an uncommitted one blocks no
        # committed message.
        sql = (
            f"SELECT TOP (1) q.{self._c['seq']} FROM {self._q} AS q WITH ({LOOKING}) WHERE {unevaluated(self._c)} "
            f"ORDER BY q.{self._c['seq']}"
        )
        rows = fetch(connection, sql, ())
        return int(rows[0][0]) if rows else None

    def share_release(self, connection: Any) -> bool:
        """Lock out releases of barriers for the rest of the transaction."""
        return self._lock_for(connection, "release", "Shared")

    def claimable(self, connection: Any, ranges: Sequence[SeqRange], owner: uuid.UUID | None) -> list[SeqRange]:
        if not self.share_release(connection) or (owner and self.is_barred(connection, owner)):
            return []
        return self.before(connection, ranges)

    def is_barred(self, connection: Any, owner: uuid.UUID) -> bool:
        assert self.table.deliveries is not None
        table, subscriber = self.table.deliveries
        # Index: the one on (subscriber, number), one seek. Safe: under the lock no barrier is released; a locked row is
        # being taken.
        sql = f"SELECT TOP (1) 1 FROM {quote_table(table)} AS d WITH ({LOOKING}) WHERE d.{quote(subscriber)} = %s"
        return bool(fetch(connection, sql, (owner,)))


class LockingInserts(SqlServerInserts):
    """Single sends of such a queue, which take the send lock in their own batch."""

    def insert(self, connection: Any, message: Outgoing) -> None:
        (sql, params), (number, text) = self.insert_of(message), DEADLOCKED
        # One batch with a transaction of its own if there is none: outside of one the lock would be released before the
        # INSERT. No index is read. Safe: a failure is rolled back here; the transaction of a caller is left to the
        # caller.
        batch = (
            "DECLARE @own bit = CASE WHEN @@TRANCOUNT = 0 THEN 1 ELSE 0 END; DECLARE @held int; "
            "BEGIN TRY IF @own = 1 BEGIN TRANSACTION; "
            f"{_locking('Exclusive' if message.is_barrier else 'Shared', -1)}; "
            f"IF @held = -3 THROW {number}, '{text}', 1; "
            "IF @held < 0 THROW 51000, 'The lock of the queue was not granted.', 1; "
            f"{sql}; IF @own = 1 COMMIT TRANSACTION; END TRY "
            "BEGIN CATCH IF @own = 1 AND @@TRANCOUNT > 0 ROLLBACK TRANSACTION; THROW; END CATCH"
        )
        with translated(connection, self.table.db_table):
            execute(connection, batch, (lock_name("send", self.table.db_table), *params))


class FencedClaims(SqlServerClaims):
    """Claims of such a queue."""

    def __init__(self, text: TableText, barriers: SqlServerBarriers) -> None:
        super().__init__(text)
        self._barriers = barriers

    def peek(self, connection: Any, ahead: Sequence[SeqRange], behind: Sequence[SeqRange], limit: int) -> PeekResult:
        before = self._barriers.before(connection, ahead), self._barriers.before(connection, behind)
        return super().peek(connection, *before, limit)

    def read_heads(self, connection: Any, only: SeqRange, limit: int) -> list[tuple[int, str]]:
        before = self._barriers.before(connection, [only])
        return super().read_heads(connection, before[0], limit) if before else []

    def read_heads_and_bodies(self, connection: Any, only: SeqRange, limit: int) -> list[tuple[int, str, bytes | None]]:
        before = self._barriers.before(connection, [only])
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
            before = self._barriers.claimable(connection, ranges, owner)
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
            before = self._barriers.claimable(connection, ranges, owner)
            return super().claim_by_delete(connection, before, limit, whole)


class FencedLimits(SqlServerLimits):
    """Claims under a limit of such a queue."""

    def __init__(self, text: TableText, claims: FencedClaims, barriers: SqlServerBarriers) -> None:
        super().__init__(text, claims)
        self._barriers = barriers

    def claim_within(
        self,
        connection: Any,
        ranges: Sequence[SeqRange],
        limit: int,
        token: uuid.UUID,
        owner: uuid.UUID,
        lease_ms: int | None,
        max_in_flight: int,
        known: KnownClaims | None = None,
    ) -> LimitedClaim:
        with _in_transaction(connection):
            before = self._barriers.claimable(connection, ranges, owner)
            return super().claim_within(connection, before, limit, token, owner, lease_ms, max_in_flight, known)

    def lock_heads(self, connection: Any, ranges: Sequence[SeqRange], limit: int, *, bodies: bool) -> list[Claimed]:
        before = self._barriers.before(connection, ranges) if self._barriers.share_release(connection) else []
        return super().lock_heads(connection, before, limit, bodies=bodies)

    def take_up(
        self, connection: Any, owner: uuid.UUID, limit: int, token: uuid.UUID, lease_ms: int | None
    ) -> list[Claimed]:
        with _in_transaction(connection):
            if not self._barriers.share_release(connection) or self._barriers.is_barred(connection, owner):
                return []
            return super().take_up(connection, owner, limit, token, lease_ms)
