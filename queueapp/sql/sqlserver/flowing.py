"""SQL Server: claims within a limit and messages that are shared out, under an application lock of the transaction."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import UTC
from typing import Any

from django.db import transaction

from ..claims import FOREVER, Claimed, SeqRange
from ..limits import KnownClaims, Leased, LimitedClaim, lock_number
from .claims import Claim, Claims
from .locking import KEYS, LOOKING, MAX_BATCH, TAKING
from .recorded import SqlServerRecorded
from .rows import Returned, guid
from .session import LATER, execute, fetch, json_of, later_params, quote

_FOREVER = f"CAST('{FOREVER.astimezone(UTC).replace(tzinfo=None).isoformat()}' AS datetime2)"
#: How long a claim waits for others that count, in milliseconds at a time, and what the procedure says when that was over.
_PATIENCE_MS, _TIMED_OUT = 60_000, -1


class SqlServerFlowing(SqlServerRecorded):
    """The verbs of one queue; ``_claims`` is what can be taken from it."""

    _claims: Claims
    _by_lease: Claim
    _by_sending: Claim

    def _prepare_flow(self) -> None:
        table, c = self.table, self._c
        self._lock = lock_number(table.db_table)
        self._resource = f"queueapp:{self._lock & 0xFFFFFFFFFFFFFFFF:016x}"
        #: A table of another project has the index under a name that is not known here.
        self._leased_index = self._by_leased_index = ""
        if not table.counts_in_flight:
            return
        if table.lease_index is not None:
            hint = f"INDEX({quote(table.lease_index)})"
            self._leased_index, self._by_leased_index = f"{hint}, ", f"WITH ({hint})"
        sending = (
            f" SET {c['lease_token']} = %s, {c['lease_owner']} = %s, {c['lease_expires']} = {_FOREVER}, "
            f"{c['deliveries']} = {c['deliveries']} + 1"
        )
        self._by_sending = self._claims.claim("UPDATE", sending, "inserted", Returned(c, table.claimed))

    # -- within a limit -------------------------------------------------------------------------------------------

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
        if not ranges:
            return LimitedClaim([], False, seen)
        claim, values = (
            (self._by_sending, (token, owner))
            if lease_ms is None
            else (self._by_lease, (token, owner, *later_params(lease_ms)))
        )
        if self.table.claim_records is not None:
            return self._claim_recorded(connection, claim, values, ranges, limit, most, seen)
        with transaction.atomic(using=connection.alias, savepoint=False):
            self.lock_flow(connection)
            # Index: the filtered one on what is leased, by hint. Safe: under the lock nobody adds to it. No READPAST: a row that
            # is being renewed or acked counts until that has committed.
            sql = (
                f"SELECT COUNT(*) FROM {self._q} AS q {self._by_leased_index} "
                f"WHERE q.{self._c['lease_token']} IS NOT NULL{self._alive()}"
            )
            room = max(0, most - int(fetch(connection, sql, ())[0][0]))
            rows = self._claims.take(connection, claim, values, ranges, min(limit, room)) if room else []
        return LimitedClaim(rows, len(rows) >= room)

    def lock_flow(self, connection: Any) -> None:
        # No table: a lock by name, of the transaction, which is freed with it. The procedure raises nothing when it does not
        # get it.
        sql = (
            "SET NOCOUNT ON; DECLARE @got int; EXEC @got = sp_getapplock @Resource = %s, @LockMode = 'Exclusive', "
            f"@LockOwner = 'Transaction', @LockTimeout = {_PATIENCE_MS}; SELECT @got"
        )
        while (got := int(fetch(connection, sql, (self._resource,))[0][0])) == _TIMED_OUT:
            pass
        if got < 0:
            raise RuntimeError(f"The lock of {self.table.label} was refused: sp_getapplock said {got}.")

    def take_permits(self, connection: Any, most: int, wanted: int, *, more: bool = False) -> int:
        # No table: place n of the queue is a lock by name, of the transaction. Begun somewhere, so that a queue with many places
        # is not tried from the first each time. Safe: a try waits for nobody (a timeout of 0), and one that the transaction has
        # already is passed over.
        sql = (
            "SET NOCOUNT ON; DECLARE @most bigint = %s, @wanted bigint = %s, @got int = 0, @taken int = 0, @tried bigint = 0, "
            "@place bigint, @name nvarchar(255), @of nvarchar(200) = %s; "
            "SET @place = ABS(CAST(CHECKSUM(NEWID()) AS bigint)) %% @most; "
            "WHILE @tried < @most AND @taken < @wanted BEGIN "
            "SET @name = CONCAT(@of, ':', @place); "
            "IF APPLOCK_MODE('public', @name, 'Transaction') = 'NoLock' BEGIN "
            "EXEC @got = sp_getapplock @Resource = @name, @LockMode = 'Exclusive', @LockOwner = 'Transaction', @LockTimeout = 0; "
            "IF @got = 0 SET @taken = @taken + 1; END; "
            "SET @tried = @tried + 1; SET @place = (@place + 1) %% @most; END; SELECT @taken"
        )
        return int(fetch(connection, sql, (most, wanted, self._resource))[0][0])

    def leases(self, connection: Any) -> list[Leased]:
        c = self._c
        if self.table.claim_records is not None:
            return self._recorded_leases(connection)
        # Index: the filtered one on what is leased, by hint. Safe: as the count of a claim, which has to be right.
        sql = (
            f"SELECT DISTINCT q.{c['lease_owner']}, q.{c['lease_token']}, "
            f"COUNT(*) OVER (PARTITION BY q.{c['lease_owner']}, q.{c['lease_token']}) FROM {self._q} AS q {self._by_leased_index} "
            f"WHERE q.{c['lease_token']} IS NOT NULL{self._alive()}"
        )
        rows = fetch(connection, sql, ())
        return [Leased(uuid.UUID(bytes=guid(a)), uuid.UUID(bytes=guid(b)), int(n)) for a, b, n in rows]

    # -- sharing out ----------------------------------------------------------------------------------------------

    def lock_heads(self, connection: Any, ranges: Sequence[SeqRange], limit: int, *, bodies: bool) -> list[Claimed]:
        return self._claims.lock(connection, ranges, limit, bodies=bodies)

    def share_out(self, connection: Any, seqs: Sequence[int], owners: Sequence[uuid.UUID], lease_ms: int) -> int:
        c, done = self._c, 0
        # Index: the primary key, one seek a message (the loop join). Safe: the caller has locked them.
        sql = (
            f"UPDATE q SET {c['lease_token']} = k.[owner], {c['lease_owner']} = k.[owner], {c['lease_expires']} = {LATER} "
            "FROM OPENJSON(%s) WITH ([key] bigint '$[0]', [owner] uniqueidentifier '$[1]') AS k "
            f"INNER LOOP JOIN {self._q} AS q WITH (ROWLOCK) ON q.{c['seq']} = k.[key]"
        )
        pairs = list(zip(seqs, owners, strict=True))
        for start in range(0, len(pairs), MAX_BATCH):
            piece = json_of([(seq, str(owner)) for seq, owner in pairs[start : start + MAX_BATCH]])
            done += execute(connection, sql, (*later_params(lease_ms), piece))
        return done

    def count_shared_out(self, connection: Any, owner: uuid.UUID) -> int:
        c = self._c
        # Index: the filtered one on what is leased, by owner. Safe: LOOKING; it is only a hint.
        sql = (
            f"SELECT COUNT(*) FROM {self._q} AS q WITH ({self._leased_index}{LOOKING}) WHERE q.{c['lease_token']} IS NOT NULL "
            f"AND q.{c['lease_owner']} = %s AND q.{c['lease_token']} = %s{self._alive()}"
        )
        return int(fetch(connection, sql, (owner, owner))[0][0])

    def take_up(
        self, connection: Any, owner: uuid.UUID, limit: int, token: uuid.UUID, lease_ms: int | None
    ) -> list[Claimed]:
        c = self._c
        returned = Returned(c, self.table.claimed)
        until, of_until = (_FOREVER, ()) if lease_ms is None else (LATER, later_params(lease_ms))
        by_priority = self.table.priority64 or "priority" in self.table.claim_by
        order = f"q.{c['priority']} DESC, q.{c['seq']}" if by_priority else f"q.{c['seq']}"
        mine = f"q.{c['lease_owner']} = %s AND q.{c['lease_token']} = %s{self._alive()}"
        # Index: the filtered one on what is leased, by hint, by owner. Safe: LOOKING; what it finds is taken below.
        look = (
            f"SELECT TOP (%s) q.{c['seq']} FROM {self._q} AS q WITH ({self._leased_index}{LOOKING}) "
            f"WHERE q.{c['lease_token']} IS NOT NULL AND {mine} ORDER BY {order}"
        )
        keys = sorted(seq for (seq,) in fetch(connection, look, (min(limit, MAX_BATCH), owner, owner)))
        if not keys:
            return []
        # Index: the primary key, one seek a key (KEYS). Safe: TAKING, asking again under the lock, so two tasks of one process
        # take different ones.
        take = (
            f"UPDATE q SET {c['lease_token']} = %s, {c['lease_expires']} = {until}, "
            f"{c['deliveries']} = q.{c['deliveries']} + 1 OUTPUT {returned.of('inserted')} "
            f"{KEYS} {self._q} AS q WITH ({TAKING}) ON q.{c['seq']} = k.[key] WHERE {mine}"
        )
        rows = returned.tuples(fetch(connection, take, (token, *of_until, json_of(keys), owner, owner)))
        return sorted(rows, key=self._claims.order)

    def delete_sent(self, connection: Any, owner: uuid.UUID, limit: int) -> int:
        c = self._c
        mine = f"q.{c['lease_owner']} = %s AND q.{c['lease_token']} <> %s"
        # Index: the filtered one on what is leased, by hint, by owner, where there is one; else a scan, once per dead subscriber.
        # Safe: LOOKING; what it finds is taken below.
        look = (
            f"SELECT TOP (%s) q.{c['seq']} FROM {self._q} AS q WITH ({self._leased_index}{LOOKING}) "
            f"WHERE q.{c['lease_token']} IS NOT NULL AND {mine} ORDER BY q.{c['seq']}"
        )
        keys = [seq for (seq,) in fetch(connection, look, (min(limit, MAX_BATCH), owner, owner))]
        # Index: the primary key, one seek a key (KEYS). Safe: TAKING; the owner is dead, and nobody else has its id.
        take = f"DELETE q {KEYS} {self._q} AS q WITH ({TAKING}) ON q.{c['seq']} = k.[key] WHERE {mine}"
        return execute(connection, take, (json_of(keys), owner, owner)) if keys else 0
