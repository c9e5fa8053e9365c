"""PostgreSQL: claims within a limit on a queue that counts by the records of its claims (see ``flowing``).

The record of a claim is a multirange of its seqs, mostly one range. Outside of a transaction a claim is two of its own. The
first takes places, under the lock, and does not wait for the disk: what follows it is not durable before it is. The second leases
as any claim does, beside others, and writes down what it got: under the lock, claims of 500 would come one after the other, and
a queue with a limit would be half as fast.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from psycopg.pq import TransactionStatus

from ..claims import FOREVER_MS, Claimed, SeqRange
from ..limits import KnownClaims, Leased, LimitedClaim, lock_number
from ..tables import QueueTable
from .claims import PostgresqlClaims, Where
from .packed import BIGINT, TEXT, LockedQuery, ready
from .session import execute, fetch, hot_cursor, quote_table

#: Nothing is known yet.
_NOTHING = KnownClaims(0, "{}", "{}")
#: A place is free so long after its lease has lapsed: who lengthens one looks at the clock before the row is changed.
_MARGIN = "interval '100 ms'"
#: Places that were taken and not filled in for so long are free: who took them is dead, or gets nothing for them.
_PATIENCE = "interval '5 s'"
#: Records that are looked at together.
_WINDOW = 5_000
#: Of the transaction in which places are taken. It may be lost in a crash of the server, together with the claim after it. And
#: its plan is kept: one that was made while the table had a page would read all of what an old snapshot lets it grow to.
_OPTIONS = {"synchronous_commit": "off", "enable_seqscan": "off"}


def _big(number: int) -> bytes:
    return number.to_bytes(8, "big", signed=True)


def _number(value: bytes | None) -> int | None:
    return None if value is None else int.from_bytes(value, "big", signed=True)


def _size(stretches: str) -> str:
    return f"(SELECT coalesce(sum(upper(r) - lower(r)), 0)::bigint FROM unnest({stretches}) AS r)"


class PostgresqlRecorded(PostgresqlClaims):
    """The verbs of one queue."""

    def __init__(self, table: QueueTable) -> None:
        super().__init__(table)
        self._lock = lock_number(table.db_table)
        self._records = quote_table(table.claim_records or "")
        self._recorded: dict[Where, str] = {}
        if table.claim_records is not None:
            self._recorded = {where: self._build_recorded(where) for where in self._claims}
            self._reserving = self._build_reserving()
            types = (BIGINT, TEXT, TEXT, BIGINT, BIGINT)
            self._packed_reserving = LockedQuery(self._reserving, types, _OPTIONS)

    # -- statements -----------------------------------------------------------------------------------------------

    def _build_reserving(self) -> str:
        """Parameters: those of ``KnownClaims``, what is wanted, and the limit."""
        seq = self._c["seq"]
        # Index: that of the records on (queue, number), from the last one known, and their primary key; the primary key of the
        # queue, a seek for each message that may be out, and only when they would not leave room. Safe: under ``lock_flow``, taken
        # by a statement before this one, so no number below the last one is still to come; what somebody is just filling in is
        # locked, and not taken for dead.
        return (
            "WITH fresh AS MATERIALIZED ("
            f"SELECT c.number, c.permits, c.seqs, c.made_at FROM {self._records} AS c WHERE c.queue = {self._lock} AND c.number > %s "
            f"UNION ALL SELECT c.number, c.permits, c.seqs, c.made_at FROM {self._records} AS c WHERE c.number = ANY(%s::bigint[])), "
            f"gone AS (DELETE FROM {self._records} WHERE number = ANY(ARRAY(SELECT r.number FROM {self._records} AS r "
            "WHERE r.number = ANY(ARRAY(SELECT f.number FROM fresh AS f WHERE f.seqs IS NULL "
            f"AND f.made_at < clock_timestamp() - {_PATIENCE})) AND r.seqs IS NULL FOR UPDATE SKIP LOCKED)) RETURNING number), "
            "pending AS MATERIALIZED (SELECT coalesce(sum(f.permits), 0)::bigint AS n, array_agg(f.number) AS numbers "
            "FROM fresh AS f WHERE f.seqs IS NULL AND f.number NOT IN (SELECT number FROM gone)), "
            "may AS MATERIALIZED (SELECT %s::int8multirange + coalesce((SELECT range_agg(r.r) "
            "FROM fresh AS f CROSS JOIN LATERAL unnest(f.seqs) AS r(r)), '{}') AS seqs), "
            "wanted AS MATERIALIZED (SELECT %s::bigint AS n, %s::bigint AS most), "
            f"out AS MATERIALIZED (SELECT CASE WHEN {_size('may.seqs')} + pending.n + wanted.n <= wanted.most THEN may.seqs "
            f"ELSE coalesce((SELECT range_agg(int8range(q.{seq}, q.{seq}, '[]')) FROM {self._q} AS q "
            f"WHERE q.{seq} = ANY(ARRAY({self._each('may.seqs')})) AND {self._still_out()}), '{{}}') END AS seqs "
            "FROM may, pending, wanted), "
            f"room AS MATERIALIZED (SELECT greatest(0, wanted.most - pending.n - {_size('out.seqs')}) AS n FROM out, pending, wanted), "
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
        read = ", ".join(f"{self._read((one,))} AS {name}" for one, name in zip(self.table.claimed, names, strict=True))
        inner = self._build_inner(where).replace(
            "LIMIT %s", "LIMIT least(%s::bigint, coalesce((SELECT permits FROM held), 0))"
        )
        # Index: the claim's, and the primary key of the records. Safe: as a claim; the record is locked before a message is, so it
        # is not taken for dead meanwhile, and if it was, nothing is claimed.
        return (
            f"WITH held AS MATERIALIZED (SELECT permits FROM {self._records} WHERE number = %s AND seqs IS NULL FOR UPDATE), "
            f"claimed AS (UPDATE {self._q} SET {c['lease_token']} = %s, {c['lease_owner']} = %s, "
            f"{c['lease_expires']} = clock_timestamp() + %s * interval '1 ms', {c['deliveries']} = {c['deliveries']} + 1 "
            f"WHERE {c['seq']} = ANY(ARRAY({inner})){self._unless_barred()} RETURNING {read}), "
            # Mostly one stretch, which is found in a third of the time.
            "got AS MATERIALIZED (SELECT CASE WHEN count(*) = 0 THEN '{}' WHEN max(a0) - min(a0) + 1 = count(*) "
            "THEN int8multirange(int8range(min(a0), max(a0), '[]')) END AS seqs FROM claimed), "
            f"record AS (UPDATE {self._records} SET seqs = coalesce((SELECT seqs FROM got), "
            "(SELECT range_agg(int8range(a0, a0, '[]')) FROM claimed)) WHERE number = %s) "
            f"SELECT {', '.join(names)} FROM claimed"
        )

    def _claim_recorded(
        self,
        connection: Any,
        ranges: Sequence[SeqRange],
        limit: int,
        token: uuid.UUID,
        owner: uuid.UUID,
        lease_ms: int | None,
        most: int,
        seen: KnownClaims | None,
    ) -> LimitedClaim:
        """``claim_within``."""
        known = seen or _NOTHING
        room, record, upto, pending, out = self._reserve(connection, known, limit, most, begins=seen is None)
        seen = KnownClaims(known.upto if upto is None else max(upto, known.upto), pending, out)
        if record is None:
            return LimitedClaim([], True, seen)
        until = FOREVER_MS if lease_ms is None else lease_ms
        params = (record, token, owner, until, *self._range_params(ranges, limit), *self._claimant(owner), record)
        rows: list[Claimed] = self._in_order.fetch(connection, self._recorded[self._where(ranges)], params)
        if len(rows) > 1:
            rows.sort(key=self._order)
        return LimitedClaim(rows, len(rows) >= room, seen)

    def _reserve(self, connection: Any, known: KnownClaims, limit: int, most: int, *, begins: bool) -> tuple[Any, ...]:
        """Take places, under the queue's lock. ``begins``: the queue may never have been counted."""
        if not begins and ready(connection):
            values = [_big(known.upto), known.pending.encode(), known.in_flight.encode(), _big(limit), _big(most)]
            result = self._packed_reserving.fetch_locked(connection, self._lock, values)
            if result is not None:
                # By hand: making psycopg's loaders takes longer than the statement.
                room, record, upto, pending, out = (result.get_value(0, n) for n in range(5))
                return _number(room), _number(record), _number(upto), (pending or b"").decode(), (out or b"").decode()
        raw = hot_cursor(connection).connection
        own = raw.autocommit and raw.pgconn.transaction_status == TransactionStatus.IDLE
        with connection.wrap_database_errors, raw.transaction() if own else nullcontext():
            self.lock_flow(connection)
            if begins:
                self._begin_counting(connection)
            return tuple(
                fetch(connection, self._reserving, (known.upto, known.pending, known.in_flight, limit, most))[0]
            )

    # -- records --------------------------------------------------------------------------------------------------

    def _begin_counting(self, connection: Any) -> None:
        c = self._c
        # A scan of the table, where there is no record yet, and none elsewhere. Safe: under ``lock_flow``.
        none = f"NOT EXISTS (SELECT FROM {self._records} WHERE queue = {self._lock})"
        sql = (
            f"INSERT INTO {self._records} (queue, permits, seqs) SELECT {self._lock}, 0, "
            f"coalesce(range_agg(int8range({c['seq']}, {c['seq']}, '[]')), '{{}}') FROM {self._q} "
            f"WHERE {c['lease_owner']} IS NOT NULL AND {none} HAVING {none}"
        )
        execute(connection, sql, ())

    def drop_records(self, connection: Any, after: int) -> int:
        c = self._c
        # The index on (queue, number), and a seek in the primary key for each message until one is leased. Safe: a message that
        # is leased anew has a record of that claim, so who sees none leased sees a record that is of no use; whoever changes one
        # of them now holds it leased in this snapshot until the commit.
        look = (
            f"SELECT c.number, c.seqs IS NULL OR EXISTS (SELECT FROM {self._q} AS q "
            f"WHERE q.{c['seq']} = ANY(ARRAY({self._each('c.seqs')})) "
            f"AND q.{c['lease_token']} IS NOT NULL) FROM {self._records} AS c WHERE c.queue = {self._lock} AND c.number > %s "
            "ORDER BY c.number LIMIT %s"
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

    def _recorded_leases(self, connection: Any) -> list[Leased]:
        owner, token = self._c["lease_owner"], self._c["lease_token"]
        # The index on (queue, number), and a seek in the primary key for each message that may be out. No lock.
        all_ = f"SELECT g.s FROM {self._records} AS c CROSS JOIN LATERAL ({self._each('c.seqs')}) AS g(s) WHERE c.queue = {self._lock}"
        sql = (
            f"SELECT q.{owner}, q.{token}, count(*) FROM {self._q} AS q WHERE q.{self._c['seq']} = ANY(ARRAY({all_})) "
            f"AND q.{token} IS NOT NULL AND q.{owner} IS NOT NULL AND q.{self._c['lease_expires']} >= clock_timestamp() "
            f"GROUP BY q.{owner}, q.{token}"
        )
        return [Leased(uuid.UUID(bytes=a), uuid.UUID(bytes=b), n) for a, b, n in fetch(connection, sql, ())]

    # -- pieces ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _each(stretches: str) -> str:
        return f"SELECT generate_series(lower(r), upper(r) - 1) FROM unnest({stretches}) AS r"

    def _still_out(self) -> str:
        """Of a row ``q``: it is leased, and the lease has not lapsed, or somebody who is still to commit has it in hand, who may
        have lengthened it in time."""
        c = self._c
        in_flight = f"NOT {self._NOT_IN_FLIGHT}".replace("xmax = ", "q.xmax = ").replace("xmax::text", "q.xmax::text")
        return f"q.{c['lease_owner']} IS NOT NULL AND (q.{c['lease_expires']} >= clock_timestamp() - {_MARGIN} OR {in_flight})"
