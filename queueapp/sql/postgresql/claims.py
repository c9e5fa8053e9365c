"""PostgreSQL: peeks and claims. The parts that they share are written once, here."""

from __future__ import annotations

import enum
import uuid
from collections.abc import Sequence
from time import monotonic
from typing import Any

from ...messages.ids import as_uuid
from ..claims import (
    MAX_PRIORITY,
    MAX_SEQ,
    WINDOW_ROWS,
    Claimed,
    Claims,
    PeekResult,
    SeqRange,
    order_key,
    split_order_key,
)
from ..message_columns import REST
from .raw import plan_guard
from .raw.cursor import load
from .raw.pipelined_claims import LeaseClaim, OpeningClaim, SingleClaims
from .raw.raw_statement import can_open_transaction, can_run_raw
from .statements import Statements, TableText, mostly

#: The places of a message's values in a result of one row.
_FIRST, _COLUMNS = (0,) * 7, range(7)

#: The row is not locked or deleted by a running transaction. xmax is 32 bits: the latest full xid at or below the
#: snapshot's end with these low bits is meant. A locker that finished or aborted is "visible" in the snapshot, so its
#: row is not in flight.
NOT_IN_FLIGHT = (
    "(xmax = '0'::xid OR pg_visible_in_snapshot((pg_snapshot_xmax(pg_current_snapshot())::text::bigint - "
    "((pg_snapshot_xmax(pg_current_snapshot())::text::bigint - xmax::text::bigint) & 4294967295))::text::xid8, "
    "pg_current_snapshot()))"
)


class Where(enum.Enum):
    """The shape of a statement's ranges.

    Of a table that was just filled the planner knows only the size. It estimates that a two-hundredth of it lies
    between two bounds, and that a tenth of that is available: less than the limit, so each claim read and sorted all of
    it until the first ANALYZE had run (observed: 3,000,000 messages, 6 s a claim). So an upper bound that bounds
    nothing is omitted, and availability is written as a condition that is estimated to be true for nearly all rows
    (``mostly``).
    """

    OPEN = "one range without an end"
    CLOSED = "one range"
    RANGES = "several ranges, or by level"


def _single(result: Any) -> list[Claimed]:
    """The message of a single claim, or []: decoded here in half of a cursor's time."""
    if not result.ntuples:
        return []
    seq, identity, headers, body, deliveries, cancels, failures = map(result.get_value, _FIRST, _COLUMNS)
    number = int.from_bytes
    return [
        (
            number(seq or b"", "big", signed=True), identity, (headers or b"").decode(), body,
            number(deliveries or b"", "big", signed=True), number(cancels or b"", "big", signed=True),
            None if failures is None else failures.decode(),
        )
    ]  # fmt: skip


class PostgresqlClaims(Statements, Claims):
    """Peek, claim by lease and claim by delete of one queue."""

    def __init__(self, text: TableText) -> None:
        super().__init__(text)
        table = text.table
        #: A queue with recipients or levels always has several ranges, others rarely.
        self._always_ranges = bool(table.claim_by or table.priority64)
        #: The shapes that the ranges of this queue can have.
        self.shapes = (Where.RANGES,) if self._always_ranges else tuple(Where)
        self.statements = {shape: self._build_claims(shape) for shape in self.shapes}
        self.peeks = {(shape, two): self._build_peek(shape, two) for shape in self.shapes for two in self.shapes}
        heads = (Where.CLOSED, *([] if self._always_ranges else [Where.OPEN]))
        self.heads = {(where, bodies): self._build_heads(where, bodies) for where in heads for bodies in (False, True)}
        #: Claims that open their transaction, by ``whole``, and single claims; none on a queue with recipients or
        #: levels.
        self.single_claims: SingleClaims | None = None
        self._opening_claims: tuple[OpeningClaim, ...] = ()
        #: The claim by lease of such a queue, the most frequent statement.
        self._packed_lease: LeaseClaim | None = None
        if not (self._always_ranges or table.barriers):
            self._opening_claims = tuple(map(OpeningClaim, self.statements[Where.OPEN][1:]))
            self.single_claims = SingleClaims(self._opening_claims[0])
            if by_lease := self.statements[Where.OPEN][0]:
                self._packed_lease = LeaseClaim(by_lease)

    def peek(
        self,
        connection: Any,
        ahead: Sequence[SeqRange],
        behind: Sequence[SeqRange],
        limit: int,
    ) -> PeekResult:
        ahead, behind = ahead or [SeqRange(1, 0)], behind or [SeqRange(1, 0)]
        where = self.shape_of(ahead), self.shape_of(behind)
        window = self.range_params(behind, WINDOW_ROWS)
        if where[1] is Where.RANGES:
            window = window[:-1]  # no limit over all ranges
        params = (*self.range_params(ahead, limit), WINDOW_ROWS, *window)
        found, back, *places = self._guard.fetch(connection, self.peeks[where], params)[0]
        return PeekResult(found, min(back, limit), *places)

    def read_heads(self, connection: Any, only: SeqRange, limit: int) -> list[tuple[int, str]]:
        return self._read_heads(connection, only, limit, False)

    def read_heads_and_bodies(self, connection: Any, only: SeqRange, limit: int) -> list[tuple[int, str, bytes | None]]:
        return self._read_heads(connection, only, limit, True)

    def _read_heads(self, connection: Any, only: SeqRange, limit: int, bodies: bool) -> list[Any]:
        if self.shape_of([only]) is Where.OPEN:
            return self._guard.fetch(connection, self.heads[Where.OPEN, bodies], (only.low, limit))
        level = [getattr(only, name) for name in self.table.claim_by]
        params = (*level, only.low, *level, only.high, limit)
        return self._guard.fetch(connection, self.heads[Where.CLOSED, bodies], params)

    def claim_by_lease(
        self,
        connection: Any,
        ranges: Sequence[SeqRange],
        limit: int,
        token: uuid.UUID,
        owner: uuid.UUID,
        lease_ms: int,
    ) -> list[Claimed]:
        if not ranges:
            return []
        where = self.shape_of(ranges)
        sql = self.statements[where][0]
        params = (token, owner, lease_ms, *self.range_params(ranges, limit), *self.claimant(owner))
        packed = self._packed_lease if where is Where.OPEN else None
        if packed is not None and not self._guard.restrains(sql) and can_run_raw(connection):
            started = monotonic()
            result = packed.run(connection, params)
            self._guard.record_time(monotonic() - started, connection, sql, params)
            rows = _single(result) if result.ntuples < 2 else load(connection, result)
        else:
            rows = self._guard.fetch(connection, sql, params)
        if len(rows) > 1:
            rows.sort(key=self._order)  # RETURNING has no order
        return rows

    def claim_by_delete(
        self,
        connection: Any,
        ranges: Sequence[SeqRange],
        limit: int,
        whole: bool = False,
        owner: uuid.UUID | None = None,
    ) -> list[Claimed]:
        if not ranges:
            return []
        where = self.shape_of(ranges)
        sql = self.statements[where][2 if whole else 1]
        rows = None
        if (
            self._opening_claims
            and where is Where.OPEN
            and not self._guard.sorts(sql)
            and can_open_transaction(connection)
        ):
            rows = self._open_with_claim(connection, ranges[0], limit, whole)
        if rows is None:
            params = (*self.range_params(ranges, limit), *self.claimant(owner))
            rows = self._guard.fetch(connection, sql, params)
        if len(rows) > 1:
            rows.sort(key=self._order)
        return rows

    def _open_with_claim(self, connection: Any, only: SeqRange, limit: int, whole: bool) -> list[Claimed] | None:
        single = self.single_claims if limit == 1 and not whole else None
        opening = single.ways(self._guard)[0] if single is not None else self._opening_claims[whole]
        started = monotonic()
        result = opening.query.fetch(connection, opening.values(only, limit))
        if result is None:
            return None
        self._guard.record_time(monotonic() - started, connection, opening.sql, opening.params(only, limit))
        if single is not None:
            single.claimed(result)
            return _single(result)
        return load(connection, result) if result.ntuples else []

    def lock_waiting(self, connection: Any, ids: Sequence[uuid.UUID]) -> list[tuple[int, uuid.UUID]]:
        seq, identity = self._c["seq"], self._c["id"]
        unleased = f" AND {self._c['lease_token']} IS NULL" if self.table.has("lease_token") else ""
        # The index on id. Safe: a row that a receiver has locked is skipped, since its delivery has begun; a row that
        # is locked here is skipped by claims until this transaction ends.
        sql = (
            f"SELECT {seq}, {identity} FROM {self._q} WHERE {identity} = ANY(%s) AND {self._free}{unleased} ORDER BY "
            f"{seq} FOR UPDATE SKIP LOCKED"
        )
        return [(number, as_uuid(key)) for number, key in self._guard.fetch_by_key(connection, sql, (list(ids),))]

    def pipelined_claim(self, connection: Any, ranges: Sequence[SeqRange]) -> OpeningClaim | None:
        if (
            self.single_claims is None
            or self.shape_of(ranges) is not Where.OPEN
            or self._guard.sorts(self.statements[Where.OPEN][1])
        ):
            return None
        return self.single_claims.following(connection, self._guard)

    def commit_and_claim(self, connection: Any, ranges: Sequence[SeqRange], plan: OpeningClaim) -> list[Claimed] | None:
        assert self.single_claims is not None, "pipelined_claim() returned a plan"
        # Index and safety: the claim by delete, which it is. COMMIT comes first: when it fails the server skips the
        # rest.
        started = monotonic()
        result = plan.query.follow(connection, plan.values(ranges[0], 1))
        if result is None:
            return None
        seconds = monotonic() - started
        if seconds > plan_guard.SLOW:
            self._guard.record_time(seconds, connection, plan.sql, plan.params(ranges[0], 1))
        self.single_claims.claimed(result)
        return _single(result)

    # -- how claims are written -------------------------------------------------------------------------------------

    def _build_claims(self, where: Where) -> tuple[str, str, str]:
        """(claim by lease, claim by delete, the same returning the whole row)."""
        table, seq = self.table, self._c["seq"]
        inner, claimed = self.build_seqs(where), self._read(table.claimed)
        by_lease = ""
        # Index: the primary key, or the claim index for a queue with recipients or levels (row comparison, below).
        # Safe: the LIMIT sits inside ARRAY(...), so exactly that many rows are locked; SKIP LOCKED never waits for a
        # receiver. Never combined with an ack: claim and ack rows in one transaction deadlock (reproduced).
        if table.has("lease_token", "lease_owner", "lease_expires", "deliveries"):
            by_lease = (
                f"UPDATE {self._q} SET {self._c['lease_token']} = %s, {self._c['lease_owner']} = %s, "
                f"{self._c['lease_expires']} = clock_timestamp() + %s * interval '1 ms', "
                f"{self._c['deliveries']} = {self._c['deliveries']} + 1 "
                f"WHERE {seq} = ANY(ARRAY({inner})){self.unless_barred()} RETURNING {claimed}"
            )
        # Index and safety as above; the row lock is kept until the caller's transaction ends, which is the ownership.
        by_delete = f"DELETE FROM {self._q} WHERE {seq} = ANY(ARRAY({inner})){self.unless_barred()} RETURNING {claimed}"
        return by_lease, by_delete, f"{by_delete}, {self._read(REST)}"

    def unless_barred(self) -> str:
        """A further condition of a claim, with the parameters of ``claimant``."""
        return ""

    def claimant(self, owner: uuid.UUID | None) -> tuple[Any, ...]:
        return ()

    # -- pieces -----------------------------------------------------------------------------------------------------

    def shape_of(self, ranges: Sequence[SeqRange]) -> Where:
        if self._always_ranges or len(ranges) != 1:
            return Where.RANGES
        return Where.OPEN if ranges[0].high == MAX_SEQ else Where.CLOSED

    def build_range(self, where: Where) -> tuple[str, str]:
        """(condition, order) of one range. A row comparison where there is a claim index: with ``recipient = x AND
        seq >= n`` the planner takes the primary key and filters (measured 1,300 against 72,000 messages a second)."""
        keys = ", ".join([*(self._c[name] for name in self.table.claim_by), self._c["seq"]])
        low, high = (
            ", ".join(f"l.{name}" if where is Where.RANGES else "%s" for name in (*self.table.claim_by, end))
            for end in ("low", "high")
        )
        return f"({keys}) >= ({low})" + (f" AND ({keys}) <= ({high})" if where is not Where.OPEN else ""), keys

    def _scan(self, where: Where, extra: str = "") -> str:
        """The ordered scan of one range for available messages."""
        within, order = self.build_range(where)
        return f"{self._c['seq']} FROM {self._q} WHERE {within} AND {self._free}{extra} ORDER BY {order}"

    _LEVELS = "unnest(%s::varchar[], %s::smallint[], %s::bigint[], %s::bigint[]) AS l(recipient, priority, low, high)"

    def build_seqs(self, where: Where) -> str:
        scan = f"SELECT {self._scan(where)} LIMIT %s FOR UPDATE SKIP LOCKED"
        if where is not Where.RANGES:
            return scan
        # The ranges come in claim order; the nested loop stops at the outer LIMIT, so later ranges are not touched
        # when earlier ones fill the batch, and never more than LIMIT rows are locked (checked from a second session).
        return f"SELECT m.seq FROM {self._LEVELS} CROSS JOIN LATERAL ({scan}) AS m(seq) LIMIT %s"

    def _build_heads(self, where: Where, bodies: bool) -> str:
        within, order = self.build_range(where)
        # Primary key or claim index, as the claim. No lock, no WAL.
        names = ", ".join(self._c[name] for name in ("seq", "headers", *(("body",) if bodies else ())))
        return f"SELECT {names} FROM {self._q} WHERE {within} AND {self._free} ORDER BY {order} LIMIT %s"

    def _build_peek(self, ahead: Where, behind: Where) -> str:
        # Primary key or claim index, as the claim. No lock, no WAL. A row that an open transaction has deleted or
        # locked has that transaction in xmax: not available, although this snapshot still sees it (NServiceBus #1412).
        scan = f"SELECT {self._scan(ahead, f' AND {mostly(NOT_IN_FLIGHT)}')} LIMIT %s"
        if ahead is Where.RANGES:
            scan = f"SELECT m.seq FROM {self._LEVELS} CROSS JOIN LATERAL ({scan}) AS m(seq) LIMIT %s"
        return (
            "SELECT a.n, b.n, coalesce(least(a.first, b.first), 0), coalesce(b.reached, 0) "
            f"FROM (SELECT count(*) AS n, min(x.seq) AS first FROM ({scan}) AS x(seq)) a, "
            f"({self._build_window(behind)}) b"
        )

    def _build_window(self, where: Where) -> str:
        """(available rows, the first of them, where the scan stopped before the end of the window or NULL) of a rescan
        window. It reads a bounded number of rows, available or not: a window over a million leased ones must not take a
        third of a second."""
        within, order = self.build_range(where)
        rows = (
            f"SELECT {self._c['seq']}, {self._free} AND {NOT_IN_FLIGHT} FROM {self._q} "
            f"WHERE {within} ORDER BY {order} LIMIT %s"
        )
        level = (
            "SELECT count(*) FILTER (WHERE w.free) AS n, min(w.seq) FILTER (WHERE w.free) AS first, "
            f"CASE WHEN count(*) = %s THEN max(w.seq) END AS reached FROM ({rows}) AS w(seq, free)"
        )
        if where is not Where.RANGES:
            return level
        total = "SELECT sum(m.n)::bigint AS n, min(m.first) AS first, min(m.reached) AS reached"
        return (
            f"{total} FROM (SELECT %s AS most) AS c, {self._LEVELS} CROSS JOIN LATERAL "
            f"({level.replace('%s', 'c.most', 1)}) AS m"
        )

    def range_params(self, ranges: Sequence[SeqRange], limit: int) -> tuple[Any, ...]:
        where, only = self.shape_of(ranges), ranges[0]
        if where is Where.OPEN:
            return only.low, limit
        if where is Where.CLOSED:
            return only.low, only.high, limit
        return (
            [r.recipient for r in ranges],
            [r.priority for r in ranges],
            [r.low for r in ranges],
            [r.high for r in ranges],
            limit,
            limit,
        )


class Priority64Claims(PostgresqlClaims):
    """Claims of a queue with a 64-bit priority, any number of which may be in use. A ``SeqRange`` holds order keys.

    One index serves it, and claims begin in its middle. It is on ``(~priority, seq)``, written ``priority # -1`` as
    Django writes it: both ascend, so that a row comparison is a range of it. The time of a claim is independent of the
    dead rows before its range.
    """

    _LEVELS = (
        "unnest(%s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[]) AS l(low_rank, low_seq, high_rank, high_seq)"
    )

    def build_range(self, where: Where) -> tuple[str, str]:
        # The claim index, a range of it: see above.
        keys = f"({self._c['priority']} # -1), {self._c['seq']}"
        low, high = (
            (f"l.{end}_rank, l.{end}_seq" if where is Where.RANGES else "%s::bigint, %s::bigint")
            for end in ("low", "high")
        )
        # First the condition of the partial index, so that the planner uses it: see ``Priority64Index``.
        within_index = f"{self._c['priority']} <= {MAX_PRIORITY}"
        return f"{within_index} AND ({keys}) >= ({low}) AND ({keys}) <= ({high})", keys

    def range_params(self, ranges: Sequence[SeqRange], limit: int) -> tuple[Any, ...]:
        lows, highs = [split_order_key(only.low) for only in ranges], [split_order_key(only.high) for only in ranges]
        ends = (
            [rank for rank, _ in lows],
            [seq for _, seq in lows],
            [rank for rank, _ in highs],
            [seq for _, seq in highs],
        )
        return (*ends, limit, limit)

    def _read_heads(self, connection: Any, only: SeqRange, limit: int, bodies: bool) -> list[Any]:
        """(order key, headers), or with the body."""
        c = self._c
        within, order = self.build_range(Where.CLOSED)
        # The claim index, as a claim. No lock, no WAL.
        body = f", {c['body']}" if bodies else ""
        sql = (
            f"SELECT {c['priority']}, {c['seq']}, {c['headers']}{body} FROM {self._q} WHERE {within} AND {self._free} "
            f"ORDER BY {order} LIMIT %s"
        )
        rows = self._guard.fetch(connection, sql, (*split_order_key(only.low), *split_order_key(only.high), limit))
        return [(order_key(priority, seq), *rest) for priority, seq, *rest in rows]

    def scan_order_keys(
        self, connection: Any, low: int, high: int, before: int, limit: int
    ) -> tuple[list[int], int, int]:
        priority, seq = self._c["priority"], self._c["seq"]
        # Primary key, at most so many rows of it. No lock, no WAL; what an open transaction has taken is not available.
        sql = (
            f"WITH w AS MATERIALIZED (SELECT {seq} AS seq, {priority} AS priority, "
            f"({priority} # -1, {seq}) < (%s::bigint, %s::bigint) AND {self._free} AND {NOT_IN_FLIGHT} AS wanted "
            f"FROM {self._q} WHERE {seq} >= %s AND {seq} <= %s ORDER BY {seq} LIMIT %s) "
            "SELECT seq, priority, false FROM w WHERE wanted "
            "UNION ALL SELECT coalesce(max(seq), 0), count(*), true FROM w"
        )
        *rows, (last, count, _) = self._guard.fetch(connection, sql, (*split_order_key(before), low, high, limit))
        return [order_key(priority, seq) for seq, priority, _ in rows], last, count
