"""PostgreSQL: claims within a limit and messages that are shared out, under an advisory lock of the transaction."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from time import monotonic
from typing import Any

from psycopg.pq import TransactionStatus

from ..claims import FOREVER_MS, Claimed, SeqRange
from ..limits import KnownClaims, Leased, LimitedClaim
from ..tables import QueueTable
from .claims import Where
from .packed import BIGINT, TEXT, UUID, LockedQuery, packed, ready
from .recorded import PostgresqlRecorded
from .session import execute, fetch, hot_cursor, load

#: All uuids: an inequality of which the planner believes that it is true of few rows. Of a table that it has not analyzed it
#: would believe that every row is leased, and count by reading all of them.
_ANY_OWNER = "BETWEEN '00000000-0000-0000-0000-000000000000' AND 'ffffffff-ffff-ffff-ffff-ffffffffffff'"


class PostgresqlFlowing(PostgresqlRecorded):
    """The verbs of one queue."""

    def __init__(self, table: QueueTable) -> None:
        super().__init__(table)
        self._claims_within: dict[Where, str] = {}
        self._packed_within: dict[Where, LockedQuery] = {}
        if table.counts_in_flight:
            # What lapsed may be somebody else's place by now: see ``flowing``.
            self._alive = f" AND {self._c['lease_expires']} >= clock_timestamp()"
        if table.lease_index is not None:
            # "= token" alone says "is not null", which is what the index on leases is made for: the planner would walk over all that
            # is leased, by whomever, and compare each with each key of the array, where a seek a key does.
            self._fenced = f"({self._fenced}) IS TRUE"
            self._claims_within = {where: self._build_within(where) for where in self._claims}
            self._packed_within = {where: self._pack(where, sql) for where, sql in self._claims_within.items()}

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
        if self.table.claim_records is not None:
            return self._claim_recorded(connection, ranges, limit, token, owner, lease_ms, most, seen)
        where = self._where(ranges)
        sql, until = self._claims_within[where], FOREVER_MS if lease_ms is None else lease_ms
        params = (most, token, owner, until, *self._range_params(ranges, limit), *self._claimant(owner))
        rows: list[Any] | None = None
        if not self._in_order.sorts(sql) and ready(connection):
            started = monotonic()
            result = self._packed_within[where].fetch_locked(connection, self._lock, packed(params))
            if result is not None:
                rows = load(connection, result) if result.ntuples else []
                self._in_order.took(monotonic() - started, connection, sql, params)
        if rows is None:
            raw = hot_cursor(connection).connection
            if raw.autocommit and raw.pgconn.transaction_status == TransactionStatus.IDLE:
                with connection.wrap_database_errors, raw.transaction():
                    self.lock_flow(connection)
                    rows = self._in_order.fetch(connection, sql, params)
            else:
                self.lock_flow(connection)
                rows = self._in_order.fetch(connection, sql, params)
        if not rows:
            return LimitedClaim([], False)
        at_limit = len(rows) >= rows[0][-1]
        claimed = [row[:-1] for row in rows]
        if len(claimed) > 1:
            claimed.sort(key=self._order)
        return LimitedClaim(claimed, at_limit)

    def lock_flow(self, connection: Any) -> None:
        # No table. Safe: it is freed with the transaction; a statement behind it sees what the one before it committed, since
        # under READ COMMITTED each takes its own snapshot. In one statement with the count it would be taken too late.
        execute(connection, "SELECT pg_advisory_xact_lock(%s::bigint)", (self._lock,))

    def take_permits(self, connection: Any, most: int, wanted: int, *, more: bool = False) -> int:
        # No table: place n of the queue is the lock (its number's low half, n), of another kind than the lock above. Begun
        # somewhere, so that a queue with a hundred thousand places is not tried from the first each time. Safe: a try waits
        # for nobody, and only those that are counted were got: the limit ends the scan.
        low = (self._lock & 0xFFFFFFFF) - 2**31
        mine, of_mine = "", tuple[int, ...]()
        if more:
            # A session gets a lock that it has at once: those are passed over.
            mine = (
                " WHERE p.place NOT IN (SELECT l.objid::bigint FROM pg_locks AS l WHERE l.locktype = 'advisory' "
                "AND l.pid = pg_backend_pid() AND l.objsubid = 2 AND l.classid::bigint = %s)"
            )
            of_mine = (low & 0xFFFFFFFF,)
        sql = (
            "SELECT count(*) FROM (SELECT 1 FROM (SELECT p.place FROM (SELECT (generate_series(0, %s::int - 1) + s.begin) "
            "%% %s::int AS place FROM (SELECT floor(random() * %s::int)::int AS begin OFFSET 0) AS s) AS p"
            f"{mine} OFFSET 0) AS p WHERE pg_try_advisory_xact_lock(%s::int, p.place) LIMIT %s) AS got"
        )
        return int(fetch(connection, sql, (most, most, most, *of_mine, low, wanted))[0][0])

    def leases(self, connection: Any) -> list[Leased]:
        if self.table.claim_records is not None:
            return self._recorded_leases(connection)
        owner, token = self._c["lease_owner"], self._c["lease_token"]
        # The partial index on what is leased. No lock.
        sql = f"SELECT {owner}, {token}, count(*) FROM {self._q} WHERE {self._out()} GROUP BY {owner}, {token}"
        return [Leased(uuid.UUID(bytes=a), uuid.UUID(bytes=b), n) for a, b, n in fetch(connection, sql, ())]

    # -- sharing out ----------------------------------------------------------------------------------------------

    def lock_heads(self, connection: Any, ranges: Sequence[SeqRange], limit: int, *, bodies: bool) -> list[Claimed]:
        if not ranges:
            return []
        left_out = () if bodies else ("headers", "body")
        columns = ", ".join("NULL" if name in left_out else self._read((name,)) for name in self.table.claimed)
        # Primary key or claim index, as the claim, whose rows these are; then one seek a row. Safe: locked by the inner select,
        # and nobody waits for it.
        inner = self._build_inner(self._where(ranges))
        sql = f"SELECT {columns} FROM {self._q} WHERE {self._c['seq']} = ANY(ARRAY({inner}))"
        rows = self._in_order.fetch(connection, sql, self._range_params(ranges, limit))
        rows.sort(key=self._order)
        return rows

    def share_out(self, connection: Any, seqs: Sequence[int], owners: Sequence[uuid.UUID], lease_ms: int) -> int:
        c = self._c
        # Primary key, one seek a message. Safe: the caller has locked them.
        sql = (
            f"UPDATE {self._q} AS q SET {c['lease_token']} = s.owner, {c['lease_owner']} = s.owner, "
            f"{c['lease_expires']} = clock_timestamp() + %s * interval '1 ms' "
            f"FROM unnest(%s::bigint[], %s::uuid[]) AS s(seq, owner) WHERE q.{c['seq']} = s.seq"
        )
        return self._in_order.execute_by_key(connection, sql, (lease_ms, list(seqs), list(owners)))

    def count_shared_out(self, connection: Any, owner: uuid.UUID) -> int:
        c = self._c
        # The partial index on what is leased, by owner. No lock.
        sql = f"SELECT count(*) FROM {self._q} WHERE {c['lease_owner']} = %s AND {c['lease_token']} = %s{self._alive}"
        return int(self._in_order.fetch_by_key(connection, sql, (owner, owner))[0][0])

    def take_up(
        self, connection: Any, owner: uuid.UUID, limit: int, token: uuid.UUID, lease_ms: int | None
    ) -> list[Claimed]:
        c = self._c
        by_priority = self.table.priority64 or "priority" in self.table.claim_by
        order = f"{c['priority']} DESC, {c['seq']}" if by_priority else c["seq"]
        # The partial index on what is leased, by owner. Safe: SKIP LOCKED, so two tasks of one process take different ones;
        # only what has not lapsed, since the place of that may be given away.
        sql = (
            f"UPDATE {self._q} SET {c['lease_token']} = %s, {c['lease_expires']} = {self._until()}, "
            f"{c['deliveries']} = {c['deliveries']} + 1 WHERE {c['seq']} = ANY(ARRAY("
            f"SELECT {c['seq']} FROM {self._q} WHERE {c['lease_owner']} = %s AND {c['lease_token']} = %s{self._alive} "
            f"ORDER BY {order} LIMIT %s FOR UPDATE SKIP LOCKED)){self._unless_barred()} RETURNING {self._read(self.table.claimed)}"
        )
        until = FOREVER_MS if lease_ms is None else lease_ms
        params = (token, until, owner, owner, limit, *self._claimant(owner))
        rows = self._in_order.fetch_by_key(connection, sql, params)
        rows.sort(key=self._order)
        return rows

    def delete_sent(self, connection: Any, owner: uuid.UUID, limit: int) -> int:
        c = self._c
        # The partial index on what is leased, by owner, where there is one; else a scan, once per dead subscriber. Safe: SKIP
        # LOCKED; the owner is dead, and nobody else has its id.
        sql = (
            f"DELETE FROM {self._q} WHERE {c['seq']} = ANY(ARRAY(SELECT {c['seq']} FROM {self._q} "
            f"WHERE {c['lease_owner']} = %s AND {c['lease_token']} <> %s ORDER BY {c['seq']} LIMIT %s FOR UPDATE SKIP LOCKED))"
        )
        return execute(connection, sql, (owner, owner, limit))

    # -- how they are written --------------------------------------------------------------------------------------

    def _until(self) -> str:
        return "clock_timestamp() + %s * interval '1 ms'"

    def _out(self) -> str:
        """What is handed out and has not lapsed."""
        c = self._c
        return f"{c['lease_token']} IS NOT NULL AND {c['lease_owner']} {_ANY_OWNER}{self._alive}"

    def _build_within(self, where: Where) -> str:
        seq = self._c["seq"]
        # The claim's index, and the partial index on what is leased for the count, which is made once. Safe: under
        # ``lock_flow``, taken by a statement before this one.
        inner = self._build_inner(where).replace("LIMIT %s", "LIMIT least(%s::bigint, (SELECT n FROM room))")
        return (
            f"WITH room AS MATERIALIZED (SELECT greatest(0, %s::bigint - count(*)) AS n FROM {self._q} WHERE {self._out()}) "
            f"UPDATE {self._q} SET {self._c['lease_token']} = %s, {self._c['lease_owner']} = %s, "
            f"{self._c['lease_expires']} = {self._until()}, {self._c['deliveries']} = {self._c['deliveries']} + 1 "
            f"WHERE {seq} = ANY(ARRAY({inner})){self._unless_barred()} "
            f"RETURNING {self._read(self.table.claimed)}, (SELECT n FROM room)"
        )

    def _pack(self, where: Where, sql: str) -> LockedQuery:
        kinds = {Where.OPEN: 2 * [BIGINT], Where.CLOSED: 3 * [BIGINT], Where.SEVERAL: [*4 * [TEXT], BIGINT, BIGINT]}
        types = [BIGINT, UUID, UUID, BIGINT, *kinds[where], *([UUID] if self._unless_barred() else [])]
        return LockedQuery(sql, types)
