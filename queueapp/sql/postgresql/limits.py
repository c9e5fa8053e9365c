"""PostgreSQL: claims under a limit and messages that are shared out, under an advisory lock of the transaction."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

from psycopg.pq import TransactionStatus

from ..claims import FOREVER_MS, Claimed, SeqRange
from ..limits import ConcurrencyLimits, KnownClaims, Leased, LimitedClaim, lock_number
from .claims import NOT_IN_FLIGHT, PostgresqlClaims, Where
from .raw.cursor import execute, fetch, hot_cursor, load
from .raw.raw_statement import BIGINT, TEXT, UUID, LockedQuery, can_run_raw, pack_params
from .statements import Statements, TableText, quote_table

#: No record is known yet.
_NOTHING = KnownClaims(0, "{}", "{}")
#: A slot is free this long after its lease has expired: an extension reads the clock before it changes the row.
MARGIN = "interval '100 ms'"
#: Slots that were reserved and not filled in for this long are free: the claim has died, or will find its record gone.
_PATIENCE = "interval '5 s'"
#: The number of records per batch.
_WINDOW = 5_000
#: Settings of the transaction that reserves slots. A crash of the server may lose it, together with the claim after it.
#: And its generic plan is kept: one that was made while the table had a page would read all of what an old snapshot
#: lets it grow to.
_OPTIONS = {"synchronous_commit": "off", "enable_seqscan": "off"}
#: All uuids: an inequality that the planner estimates to be true for few rows. For an unanalyzed table it would
#: estimate that every row is leased, and count by reading all of them.
_ANY_OWNER = "BETWEEN '00000000-0000-0000-0000-000000000000' AND 'ffffffff-ffff-ffff-ffff-ffffffffffff'"


def _big(number: int) -> bytes:
    return number.to_bytes(8, "big", signed=True)


def _number(value: bytes | None) -> int | None:
    return None if value is None else int.from_bytes(value, "big", signed=True)


def _size(stretches: str) -> str:
    return f"(SELECT coalesce(sum(upper(r) - lower(r)), 0)::bigint FROM unnest({stretches}) AS r)"


@contextmanager
def locked(connection: Any, number: int) -> Iterator[None]:
    """Hold the lock of a queue until the open transaction ends, or one of its own."""
    raw = hot_cursor(connection).connection
    if raw.autocommit and raw.pgconn.transaction_status == TransactionStatus.IDLE:
        with connection.wrap_database_errors, raw.transaction():
            _lock_queue(connection, number)
            yield
    else:
        _lock_queue(connection, number)
        yield


def _lock_queue(connection: Any, number: int) -> None:
    # No table. Safe: released with the transaction; a later statement sees what the previous holder committed, since
    # under READ COMMITTED each statement takes its own snapshot. In one statement with the count the snapshot would be
    # too old.
    execute(connection, "SELECT pg_advisory_xact_lock(%s::bigint)", (number,))


class PostgresqlLimits(Statements, ConcurrencyLimits):
    """Claims under a limit of one queue."""

    def __init__(self, text: TableText, claims: PostgresqlClaims) -> None:
        super().__init__(text)
        self._claims, self._lock = claims, lock_number(text.table.db_table)
        self.records = ClaimRecords(text, claims) if text.table.claim_records is not None else None
        self._claims_within: dict[Where, str] = {}
        self._raw_within: dict[Where, LockedQuery] = {}
        if text.table.lease_index is not None:
            self._claims_within = {where: self._build_within(where) for where in claims.shapes}
            self._raw_within = {where: self._raw(where, sql) for where, sql in self._claims_within.items()}

    # -- under a limit ----------------------------------------------------------------------------------------------

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
        if not ranges:
            return LimitedClaim([], False, known)
        if self.records is not None:
            return self.records.claim(connection, ranges, limit, token, owner, lease_ms, max_in_flight, known)
        where = self._claims.shape_of(ranges)
        sql, until = self._claims_within[where], FOREVER_MS if lease_ms is None else lease_ms
        params = (
            max_in_flight,
            token,
            owner,
            until,
            *self._claims.range_params(ranges, limit),
            *self._claims.claimant(owner),
        )
        rows: list[Any] | None = None
        if not self._guard.sorts(sql) and can_run_raw(connection):
            started = monotonic()
            result = self._raw_within[where].fetch_locked(connection, self._lock, pack_params(params))
            if result is not None:
                rows = load(connection, result) if result.ntuples else []
                self._guard.record_time(monotonic() - started, connection, sql, params)
        if rows is None:
            with locked(connection, self._lock):
                rows = self._guard.fetch(connection, sql, params)
        if not rows:
            return LimitedClaim([], False)
        at_limit = len(rows) >= rows[0][-1]
        claimed = [row[:-1] for row in rows]
        if len(claimed) > 1:
            claimed.sort(key=self._order)
        return LimitedClaim(claimed, at_limit)

    def drop_records(self, connection: Any, after: int) -> int:
        return self.records.drop(connection, after) if self.records is not None else after

    def lock(self, connection: Any) -> None:
        _lock_queue(connection, self._lock)

    def take_permits(self, connection: Any, permits: int, wanted: int, *, more: bool = False) -> int:
        # No table: permit n of the queue is the lock (its number's low half, n), of another kind than the lock above.
        # Starts at a random n, so that a queue with a hundred thousand permits is not tried from the first each time.
        # Safe: a try never waits, and exactly the locks that are counted were taken: the LIMIT ends the scan.
        low = (self._lock & 0xFFFFFFFF) - 2**31
        unless_held, held_params = "", tuple[int, ...]()
        if more:
            # A session is granted a lock that it holds already: those are skipped.
            unless_held = (
                " WHERE p.place NOT IN (SELECT l.objid::bigint FROM pg_locks AS l WHERE l.locktype = 'advisory' "
                "AND l.pid = pg_backend_pid() AND l.objsubid = 2 AND l.classid::bigint = %s)"
            )
            held_params = (low & 0xFFFFFFFF,)
        sql = (
            "SELECT count(*) FROM (SELECT 1 FROM (SELECT p.place FROM (SELECT (generate_series(0, %s::int - 1) + "
            "s.begin) %% %s::int AS place FROM (SELECT floor(random() * %s::int)::int AS begin OFFSET 0) AS s) AS p"
            f"{unless_held} OFFSET 0) AS p WHERE pg_try_advisory_xact_lock(%s::int, p.place) LIMIT %s) AS got"
        )
        return int(fetch(connection, sql, (permits, permits, permits, *held_params, low, wanted))[0][0])

    def leases(self, connection: Any) -> list[Leased]:
        if self.records is not None:
            return self.records.leases(connection)
        owner, token = self._c["lease_owner"], self._c["lease_token"]
        # The partial index on leased rows. No lock.
        sql = f"SELECT {owner}, {token}, count(*) FROM {self._q} WHERE {self._out()} GROUP BY {owner}, {token}"
        return [Leased(uuid.UUID(bytes=a), uuid.UUID(bytes=b), n) for a, b, n in fetch(connection, sql, ())]

    # -- sharing out ------------------------------------------------------------------------------------------------

    def lock_heads(self, connection: Any, ranges: Sequence[SeqRange], limit: int, *, bodies: bool) -> list[Claimed]:
        if not ranges:
            return []
        left_out = () if bodies else ("headers", "body")
        columns = ", ".join("NULL" if name in left_out else self._read((name,)) for name in self.table.claimed)
        # Primary key or claim index, as the claim, whose rows these are; then one seek a row. Safe: locked by the inner
        # select with SKIP LOCKED, which waits for no row.
        inner = self._claims.build_seqs(self._claims.shape_of(ranges))
        sql = f"SELECT {columns} FROM {self._q} WHERE {self._c['seq']} = ANY(ARRAY({inner}))"
        rows = self._guard.fetch(connection, sql, self._claims.range_params(ranges, limit))
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
        return self._guard.execute_by_key(connection, sql, (lease_ms, list(seqs), list(owners)))

    def count_shared_out(self, connection: Any, owner: uuid.UUID) -> int:
        c = self._c
        # The partial index on leased rows, by owner. No lock.
        sql = f"SELECT count(*) FROM {self._q} WHERE {c['lease_owner']} = %s AND {c['lease_token']} = %s{self._alive}"
        return int(self._guard.fetch_by_key(connection, sql, (owner, owner))[0][0])

    def take_up(
        self, connection: Any, owner: uuid.UUID, limit: int, token: uuid.UUID, lease_ms: int | None
    ) -> list[Claimed]:
        c = self._c
        by_priority = self.table.priority64 or "priority" in self.table.claim_by
        order = f"{c['priority']} DESC, {c['seq']}" if by_priority else c["seq"]
        # The partial index on leased rows, by owner. Safe: SKIP LOCKED, so two receivers of one process take different
        # rows; only unexpired leases, since the slot of an expired one may be reassigned.
        sql = (
            f"UPDATE {self._q} SET {c['lease_token']} = %s, {c['lease_expires']} = {self._until()}, "
            f"{c['deliveries']} = {c['deliveries']} + 1 WHERE {c['seq']} = ANY(ARRAY("
            f"SELECT {c['seq']} FROM {self._q} WHERE {c['lease_owner']} = %s AND {c['lease_token']} = %s{self._alive} "
            f"ORDER BY {order} LIMIT %s FOR UPDATE SKIP LOCKED)){self._claims.unless_barred()} RETURNING "
            f"{self._read(self.table.claimed)}"
        )
        until = FOREVER_MS if lease_ms is None else lease_ms
        params = (token, until, owner, owner, limit, *self._claims.claimant(owner))
        rows = self._guard.fetch_by_key(connection, sql, params)
        rows.sort(key=self._order)
        return rows

    def delete_in_flight(self, connection: Any, owner: uuid.UUID, limit: int) -> int:
        c = self._c
        # The partial index on leased rows, by owner, where it exists; otherwise a scan, once per dead subscriber. Safe:
        # SKIP LOCKED; the owner is dead, and its id is unique.
        sql = (
            f"DELETE FROM {self._q} WHERE {c['seq']} = ANY(ARRAY(SELECT {c['seq']} FROM {self._q} "
            f"WHERE {c['lease_owner']} = %s AND {c['lease_token']} <> %s ORDER BY {c['seq']} LIMIT %s FOR UPDATE SKIP "
            "LOCKED))"
        )
        return execute(connection, sql, (owner, owner, limit))

    # -- how they are written -----------------------------------------------------------------------------------------

    def _until(self) -> str:
        return "clock_timestamp() + %s * interval '1 ms'"

    def _out(self) -> str:
        """Leased rows whose lease has not expired."""
        c = self._c
        return f"{c['lease_token']} IS NOT NULL AND {c['lease_owner']} {_ANY_OWNER}{self._alive}"

    def _build_within(self, where: Where) -> str:
        seq = self._c["seq"]
        # The claim's index, and the partial index on leased rows for the count, which is made once. Safe: under
        # ``lock``, taken by an earlier statement.
        inner = self._claims.build_seqs(where).replace("LIMIT %s", "LIMIT least(%s::bigint, (SELECT n FROM room))")
        return (
            f"WITH room AS MATERIALIZED (SELECT greatest(0, %s::bigint - count(*)) AS n FROM {self._q} WHERE "
            f"{self._out()}) UPDATE {self._q} SET {self._c['lease_token']} = %s, {self._c['lease_owner']} = %s, "
            f"{self._c['lease_expires']} = {self._until()}, {self._c['deliveries']} = {self._c['deliveries']} + 1 "
            f"WHERE {seq} = ANY(ARRAY({inner})){self._claims.unless_barred()} "
            f"RETURNING {self._read(self.table.claimed)}, (SELECT n FROM room)"
        )

    def _raw(self, where: Where, sql: str) -> LockedQuery:
        kinds = {Where.OPEN: 2 * [BIGINT], Where.CLOSED: 3 * [BIGINT], Where.RANGES: [*4 * [TEXT], BIGINT, BIGINT]}
        types = [BIGINT, UUID, UUID, BIGINT, *kinds[where], *([UUID] if self._claims.unless_barred() else [])]
        return LockedQuery(sql, types)


class ClaimRecords(Statements):
    """Claims within a limit on a queue that counts by the records of its claims.

    The record of a claim is a multirange of its seqs, mostly one range. Outside of a transaction a claim is two of its
    own. The first reserves slots, under the lock, and does not wait for the disk: the second is not durable before it.
    The second leases as any claim does, concurrently with others, and records what it got: under the lock, claims of
    500 would run one after the other, and a queue with a limit would be half as fast.
    """

    def __init__(self, text: TableText, claims: PostgresqlClaims) -> None:
        super().__init__(text)
        self._claims, self._lock = claims, lock_number(text.table.db_table)
        self._records = quote_table(text.table.claim_records or "")
        self._recorded = {where: self._build_recorded(where) for where in claims.shapes}
        self._reserving = self._build_reserving()
        types = (BIGINT, TEXT, TEXT, BIGINT, BIGINT)
        self._raw_reserving = LockedQuery(self._reserving, types, _OPTIONS)

    # -- claims -----------------------------------------------------------------------------------------------------

    def claim(
        self,
        connection: Any,
        ranges: Sequence[SeqRange],
        limit: int,
        token: uuid.UUID,
        owner: uuid.UUID,
        lease_ms: int | None,
        max_in_flight: int,
        known: KnownClaims | None,
    ) -> LimitedClaim:
        """``ConcurrencyLimits.claim_within``."""
        before = known or _NOTHING
        room, record, upto, pending, out = self._reserve(connection, before, limit, max_in_flight, begins=known is None)
        after = KnownClaims(before.upto if upto is None else max(upto, before.upto), pending, out)
        if record is None:
            return LimitedClaim([], True, after)
        until = FOREVER_MS if lease_ms is None else lease_ms
        params = (
            record,
            token,
            owner,
            until,
            *self._claims.range_params(ranges, limit),
            *self._claims.claimant(owner),
            record,
        )
        rows: list[Claimed] = self._guard.fetch(connection, self._recorded[self._claims.shape_of(ranges)], params)
        if len(rows) > 1:
            rows.sort(key=self._order)
        return LimitedClaim(rows, len(rows) >= room, after)

    def _reserve(
        self, connection: Any, known: KnownClaims, limit: int, max_backlog: int, *, begins: bool
    ) -> tuple[Any, ...]:
        """Reserve slots, under the queue's lock. ``begins``: the queue may never have been counted."""
        if not begins and can_run_raw(connection):
            values = [
                _big(known.upto),
                known.pending.encode(),
                known.in_flight.encode(),
                _big(limit),
                _big(max_backlog),
            ]
            result = self._raw_reserving.fetch_locked(connection, self._lock, values)
            if result is not None:
                # Decoded here: making psycopg's loaders takes longer than the statement.
                room, record, upto, pending, out = (result.get_value(0, n) for n in range(5))
                return _number(room), _number(record), _number(upto), (pending or b"").decode(), (out or b"").decode()
        with locked(connection, self._lock):
            if begins:
                self._begin_counting(connection)
            return tuple(
                fetch(connection, self._reserving, (known.upto, known.pending, known.in_flight, limit, max_backlog))[0]
            )

    # -- statements ---------------------------------------------------------------------------------------------------

    def _build_reserving(self) -> str:
        """Parameters: those of ``KnownClaims``, the number wanted, and the limit."""
        seq = self._c["seq"]
        # Index: that of the records on (queue, number), from the last known one, and their primary key; the primary key
        # of the queue, a seek for each message that may be in flight, and only when they would reach the limit. Safe:
        # under the queue's lock, taken by an earlier statement, so no number below the last one can still appear; a
        # record that is being filled in is locked, and not dropped as dead.
        return (
            "WITH fresh AS MATERIALIZED ("
            f"SELECT c.number, c.permits, c.seqs, c.made_at FROM {self._records} AS c WHERE c.queue = {self._lock} AND "
            "c.number > %s "
            f"UNION ALL SELECT c.number, c.permits, c.seqs, c.made_at FROM {self._records} AS c WHERE c.number = "
            "ANY(%s::bigint[])), "
            f"gone AS (DELETE FROM {self._records} WHERE number = ANY(ARRAY(SELECT r.number FROM {self._records} AS r "
            "WHERE r.number = ANY(ARRAY(SELECT f.number FROM fresh AS f WHERE f.seqs IS NULL "
            f"AND f.made_at < clock_timestamp() - {_PATIENCE})) AND r.seqs IS NULL FOR UPDATE SKIP LOCKED)) RETURNING "
            "number), "
            "pending AS MATERIALIZED (SELECT coalesce(sum(f.permits), 0)::bigint AS n, array_agg(f.number) AS numbers "
            "FROM fresh AS f WHERE f.seqs IS NULL AND f.number NOT IN (SELECT number FROM gone)), "
            "may AS MATERIALIZED (SELECT %s::int8multirange + coalesce((SELECT range_agg(r.r) "
            "FROM fresh AS f CROSS JOIN LATERAL unnest(f.seqs) AS r(r)), '{}') AS seqs), "
            "wanted AS MATERIALIZED (SELECT %s::bigint AS n, %s::bigint AS most), "
            f"out AS MATERIALIZED (SELECT CASE WHEN {_size('may.seqs')} + pending.n + wanted.n <= wanted.most THEN "
            f"may.seqs ELSE coalesce((SELECT range_agg(int8range(q.{seq}, q.{seq}, '[]')) FROM {self._q} AS q "
            f"WHERE q.{seq} = ANY(ARRAY({self._unnested('may.seqs')})) AND {self._in_flight()}), '{{}}') END AS seqs "
            "FROM may, pending, wanted), "
            f"room AS MATERIALIZED (SELECT greatest(0, wanted.most - pending.n - {_size('out.seqs')}) AS n FROM out, "
            "pending, wanted), "
            f"mine AS (INSERT INTO {self._records} (queue, permits) SELECT {self._lock}, least(room.n, wanted.n) "
            "FROM room, wanted WHERE least(room.n, wanted.n) > 0 RETURNING number) "
            "SELECT room.n, mine.number, coalesce(mine.number, (SELECT max(f.number) FROM fresh AS f)), "
            "coalesce(pending.numbers || mine.number, pending.numbers, ARRAY[]::bigint[])::text, out.seqs::text "
            "FROM room CROSS JOIN out CROSS JOIN pending LEFT JOIN mine ON true"
        )

    def _build_recorded(self, where: Where) -> str:
        """Parameters: the record, the claim's, and the record again."""
        c = self._c
        names = [f"a{n}" for n in range(len(self.table.claimed))]
        read = ", ".join(
            f"{self._read((column,))} AS {name}" for column, name in zip(self.table.claimed, names, strict=True)
        )
        inner = self._claims.build_seqs(where).replace(
            "LIMIT %s", "LIMIT least(%s::bigint, coalesce((SELECT permits FROM held), 0))"
        )
        # Index: the claim's, and the primary key of the records. Safe: as a claim; the record is locked before a
        # message is, so it is not dropped as dead meanwhile, and if it was before, nothing is claimed.
        return (
            f"WITH held AS MATERIALIZED (SELECT permits FROM {self._records} WHERE number = %s AND seqs IS NULL FOR "
            "UPDATE), "
            f"claimed AS (UPDATE {self._q} SET {c['lease_token']} = %s, {c['lease_owner']} = %s, "
            f"{c['lease_expires']} = clock_timestamp() + %s * interval '1 ms', {c['deliveries']} = {c['deliveries']} + "
            f"1 WHERE {c['seq']} = ANY(ARRAY({inner})){self._claims.unless_barred()} RETURNING {read}), "
            # Mostly one range, which is found in a third of the time.
            "got AS MATERIALIZED (SELECT CASE WHEN count(*) = 0 THEN '{}' WHEN max(a0) - min(a0) + 1 = count(*) "
            "THEN int8multirange(int8range(min(a0), max(a0), '[]')) END AS seqs FROM claimed), "
            f"record AS (UPDATE {self._records} SET seqs = coalesce((SELECT seqs FROM got), "
            "(SELECT range_agg(int8range(a0, a0, '[]')) FROM claimed)) WHERE number = %s) "
            f"SELECT {', '.join(names)} FROM claimed"
        )

    # -- records ----------------------------------------------------------------------------------------------------

    def _begin_counting(self, connection: Any) -> None:
        c = self._c
        # A scan of the table where there is no record yet; otherwise no scan. Safe: under the queue's lock.
        none = f"NOT EXISTS (SELECT FROM {self._records} WHERE queue = {self._lock})"
        sql = (
            f"INSERT INTO {self._records} (queue, permits, seqs) SELECT {self._lock}, 0, "
            f"coalesce(range_agg(int8range({c['seq']}, {c['seq']}, '[]')), '{{}}') FROM {self._q} "
            f"WHERE {c['lease_owner']} IS NOT NULL AND {none} HAVING {none}"
        )
        execute(connection, sql, ())

    def drop(self, connection: Any, after: int) -> int:
        c = self._c
        # The index on (queue, number), and a seek in the primary key for each message until one is leased. Safe: a
        # message that is leased again has a record of that claim, so a record with no leased message is obsolete; a
        # message that is being changed now is leased in this snapshot until the commit.
        look = (
            f"SELECT c.number, c.seqs IS NULL OR EXISTS (SELECT FROM {self._q} AS q "
            f"WHERE q.{c['seq']} = ANY(ARRAY({self._unnested('c.seqs')})) "
            f"AND q.{c['lease_token']} IS NOT NULL) FROM {self._records} AS c WHERE c.queue = {self._lock} AND "
            "c.number > %s ORDER BY c.number LIMIT %s"
        )
        found = fetch(connection, look, (after, _WINDOW))
        if not after:
            after, found = (found[0][0], found[1:]) if found else (0, [])
        needed = [number for number, leased in found if leased]
        if ended := [number for number, leased in found if not leased]:
            # Primary key.
            execute(connection, f"DELETE FROM {self._records} WHERE number = ANY(%s)", (ended,))
        if needed:
            return int(needed[0]) - 1
        return int(found[-1][0]) if found else after

    def leases(self, connection: Any) -> list[Leased]:
        owner, token = self._c["lease_owner"], self._c["lease_token"]
        # The index on (queue, number), and a seek in the primary key for each message that may be in flight. No lock.
        all_ = (
            f"SELECT g.s FROM {self._records} AS c CROSS JOIN LATERAL ({self._unnested('c.seqs')}) AS g(s) "
            f"WHERE c.queue = {self._lock}"
        )
        sql = (
            f"SELECT q.{owner}, q.{token}, count(*) FROM {self._q} AS q WHERE q.{self._c['seq']} = ANY(ARRAY({all_})) "
            f"AND q.{token} IS NOT NULL AND q.{owner} IS NOT NULL AND q.{self._c['lease_expires']} >= "
            f"clock_timestamp() GROUP BY q.{owner}, q.{token}"
        )
        return [Leased(uuid.UUID(bytes=a), uuid.UUID(bytes=b), n) for a, b, n in fetch(connection, sql, ())]

    # -- pieces -----------------------------------------------------------------------------------------------------

    @staticmethod
    def _unnested(stretches: str) -> str:
        return f"SELECT generate_series(lower(r), upper(r) - 1) FROM unnest({stretches}) AS r"

    def _in_flight(self) -> str:
        """The condition of a row ``q`` in flight: leased, and the lease has not expired, or an uncommitted transaction
        is changing it, which may have extended it in time."""
        c = self._c
        in_flight = f"NOT {NOT_IN_FLIGHT}".replace("xmax = ", "q.xmax = ").replace("xmax::text", "q.xmax::text")
        return (
            f"q.{c['lease_owner']} IS NOT NULL AND (q.{c['lease_expires']} >= clock_timestamp() - {MARGIN} OR "
            f"{in_flight})"
        )
