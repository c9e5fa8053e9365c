"""PostgreSQL: looking at a queue and taking from it. What a claim and a peek share is written once, here."""

from __future__ import annotations

import enum
import uuid
from collections.abc import Sequence
from operator import itemgetter
from time import monotonic
from typing import Any

from ..base import QueueSql
from ..claims import MAX_SEQ, PRIORITY, WINDOW_ROWS, Claimed, PeekResult, SeqRange
from ..message_columns import REST
from ..tables import QueueTable, Terms
from . import index_order
from .index_order import IndexOrder
from .opening import Leasing, OfOne, Opening
from .packed import ready, ready_to_open
from .rows import read, to_utc
from .session import load, quote, quote_table

_BY_SEQ = itemgetter(0)
#: The places of a message's values in a result of one row.
_FIRST, _COLUMNS = (0,) * 7, range(7)


def _by_priority(row: Claimed) -> tuple[int, int]:
    return -row[PRIORITY], row[0]


def _mostly(condition: str) -> str:
    """A condition that the planner takes to be true of nearly every row."""
    return f"(CASE WHEN {condition} THEN 1 END) IS NOT NULL"


class Where(enum.Enum):
    """Where a statement looks.

    Of a table that was just filled the planner knows nothing but its size. It believes then that a two-hundredth of it lies
    between two bounds, and a tenth of that is free: less than the limit, so each claim read and sorted all of it until the first
    ANALYZE was through (seen: 3,000,000 messages, 6 s a claim). So an upper bound that is none is left out, and what is free is
    asked for in a way in which it is believed to be nearly all (``_mostly``).
    """

    OPEN = "one range without an end"
    CLOSED = "one range"
    SEVERAL = "several ranges, or by level"


def _single(result: Any) -> list[Claimed]:
    """The message of a claim of one, if it got it: by hand in half of a cursor's time."""
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


class PostgresqlClaims(QueueSql):
    """Peek, claim by lease and claim by delete of one queue."""

    def __init__(self, table: QueueTable) -> None:
        super().__init__(table)
        self._q = quote_table(table.db_table)
        self._c = {name: quote(column) for name, column in table.columns.items()}
        # The clock is turned into the column's UTC wall time, never the stored time into a zone.
        self._clock = to_utc(table, "expires", "clock_timestamp()")
        self._free = self._build_free()
        self._order = _by_priority if table.priority64 or "priority" in table.claim_by else _BY_SEQ
        #: On a queue with recipients or levels there are always several ranges, elsewhere seldom.
        self._always_several = bool(table.claim_by or table.priority64)
        all_ = (Where.SEVERAL,) if self._always_several else tuple(Where)
        self._claims = {where: self._build_claims(where) for where in all_}
        self._peeks = {(one, two): self._build_peek(one, two) for one in all_ for two in all_}
        shapes = (Where.CLOSED, *([] if self._always_several else [Where.OPEN]))
        self._heads = {
            (where, bodies): self._build_heads(where, bodies) for where in shapes for bodies in (False, True)
        }
        #: As the first statement of a transaction: a claim of one, and of whole rows; none on a queue with recipients or levels.
        self._of_one: OfOne | None = None
        self._opening_claims: tuple[Opening, ...] = ()
        #: The claim by lease of such a queue: most claims are that.
        self._packed_lease: Leasing | None = None
        if not (self._always_several or table.barriers):
            self._opening_claims = tuple(map(Opening, self._claims[Where.OPEN][1:]))
            self._of_one = OfOne(self._opening_claims[0])
            if by_lease := self._claims[Where.OPEN][0]:
                self._packed_lease = Leasing(by_lease)
        self._in_order = IndexOrder()
        #: What a lease that is lengthened must fulfil beside its token.
        self._alive = ""
        #: The token fences: a condition with one parameter, of a row that is found by its key.
        self._fenced = f"{self._c['lease_token']} = %s" if table.has("lease_token") else ""

    # -- taking out -----------------------------------------------------------------------------------------------

    def peek(
        self,
        connection: Any,
        ahead: Sequence[SeqRange],
        behind: Sequence[SeqRange],
        limit: int,
    ) -> PeekResult:
        ahead, behind = ahead or [SeqRange(1, 0)], behind or [SeqRange(1, 0)]
        where = self._where(ahead), self._where(behind)
        window = self._range_params(behind, WINDOW_ROWS)
        if where[1] is Where.SEVERAL:
            window = window[:-1]  # no limit over all ranges
        params = (*self._range_params(ahead, limit), WINDOW_ROWS, *window)
        found, back, *places = self._in_order.fetch(connection, self._peeks[where], params)[0]
        return PeekResult(found, min(back, limit), *places)

    def read_heads(self, connection: Any, only: SeqRange, limit: int) -> list[tuple[int, str]]:
        return self._read_heads(connection, only, limit, False)

    def read_heads_and_bodies(self, connection: Any, only: SeqRange, limit: int) -> list[tuple[int, str, bytes | None]]:
        return self._read_heads(connection, only, limit, True)

    def _read_heads(self, connection: Any, only: SeqRange, limit: int, bodies: bool) -> list[Any]:
        if self._where([only]) is Where.OPEN:
            return self._in_order.fetch(connection, self._heads[Where.OPEN, bodies], (only.low, limit))
        level = [getattr(only, name) for name in self.table.claim_by]
        params = (*level, only.low, *level, only.high, limit)
        return self._in_order.fetch(connection, self._heads[Where.CLOSED, bodies], params)

    #: xmax is 32 bits: the latest full xid at or below the snapshot's end with these low bits is meant. A locker that
    #: finished or aborted is "visible" in the snapshot, so its row is not in flight.
    _NOT_IN_FLIGHT = (
        "(xmax = '0'::xid OR pg_visible_in_snapshot((pg_snapshot_xmax(pg_current_snapshot())::text::bigint - "
        "((pg_snapshot_xmax(pg_current_snapshot())::text::bigint - xmax::text::bigint) & 4294967295))::text::xid8, "
        "pg_current_snapshot()))"
    )

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
        where = self._where(ranges)
        sql = self._claims[where][0]
        params = (token, owner, lease_ms, *self._range_params(ranges, limit), *self._claimant(owner))
        packed = self._packed_lease if where is Where.OPEN else None
        if packed is not None and not self._in_order.keeps_from_it(sql) and ready(connection):
            started = monotonic()
            result = packed.run(connection, params)
            self._in_order.took(monotonic() - started, connection, sql, params)
            rows = _single(result) if result.ntuples < 2 else load(connection, result)
        else:
            rows = self._in_order.fetch(connection, sql, params)
        if len(rows) > 1:
            rows.sort(key=self._order)  # RETURNING has no order of its own
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
        where = self._where(ranges)
        sql = self._claims[where][2 if whole else 1]
        rows = None
        if self._opening_claims and where is Where.OPEN and not self._in_order.sorts(sql) and ready_to_open(connection):
            rows = self._open_with_claim(connection, ranges[0], limit, whole)
        if rows is None:
            params = (*self._range_params(ranges, limit), *self._claimant(owner))
            rows = self._in_order.fetch(connection, sql, params)
        if len(rows) > 1:
            rows.sort(key=self._order)
        return rows

    def _open_with_claim(self, connection: Any, only: SeqRange, limit: int, whole: bool) -> list[Claimed] | None:
        of_one = self._of_one if limit == 1 and not whole else None
        opening = of_one.ways(self._in_order)[0] if of_one is not None else self._opening_claims[whole]
        started = monotonic()
        result = opening.query.fetch(connection, opening.values(only, limit))
        if result is None:
            return None
        self._in_order.took(monotonic() - started, connection, opening.sql, opening.params(only, limit))
        if of_one is not None:
            of_one.claimed(result)
            return _single(result)
        return load(connection, result) if result.ntuples else []

    def commits_with_claim(self, connection: Any, ranges: Sequence[SeqRange]) -> Opening | None:
        if (
            self._of_one is None
            or self._where(ranges) is not Where.OPEN
            or self._in_order.sorts(self._claims[Where.OPEN][1])
        ):
            return None
        return self._of_one.following(connection, self._in_order)

    def commit_and_claim(self, connection: Any, ranges: Sequence[SeqRange], way: Opening) -> list[Claimed] | None:
        assert self._of_one is not None, "commits_with_claim() has said so"
        # Index and safety as the claim by delete, which it is. COMMIT comes first: when it fails the server skips the others.
        started = monotonic()
        result = way.query.follow(connection, way.values(ranges[0], 1))
        if result is None:
            return None
        seconds = monotonic() - started
        if seconds > index_order.SLOW:
            self._in_order.took(seconds, connection, way.sql, way.params(ranges[0], 1))
        self._of_one.claimed(result)
        return _single(result)

    # -- how they are written --------------------------------------------------------------------------------------

    def _build_claims(self, where: Where) -> tuple[str, str, str]:
        """(claim by lease, claim by delete, the same returning the whole row)."""
        table, seq = self.table, self._c["seq"]
        inner, claimed = self._build_inner(where), self._read(table.claimed)
        by_lease = ""
        # Index: the primary key, or the claim index for a queue with recipients or levels (row comparison, below).
        # Safe: the LIMIT sits inside ARRAY(...), so exactly that many rows are locked; SKIP LOCKED never waits for a
        # receiver. Never combined with an ack: claim and ack rows in one transaction deadlock (reproduced).
        if table.has("lease_token", "lease_owner", "lease_expires", "deliveries"):
            by_lease = (
                f"UPDATE {self._q} SET {self._c['lease_token']} = %s, {self._c['lease_owner']} = %s, "
                f"{self._c['lease_expires']} = clock_timestamp() + %s * interval '1 ms', "
                f"{self._c['deliveries']} = {self._c['deliveries']} + 1 "
                f"WHERE {seq} = ANY(ARRAY({inner})){self._unless_barred()} RETURNING {claimed}"
            )
        # Index and safety as above; the row lock is kept until the caller's transaction ends, which is the ownership.
        by_delete = (
            f"DELETE FROM {self._q} WHERE {seq} = ANY(ARRAY({inner})){self._unless_barred()} RETURNING {claimed}"
        )
        return by_lease, by_delete, f"{by_delete}, {self._read(REST)}"

    def _unless_barred(self) -> str:
        """A further condition of a claim; with the values of ``_claimant``."""
        return ""

    def _claimant(self, owner: uuid.UUID | None) -> tuple[Any, ...]:
        return ()

    # -- pieces ---------------------------------------------------------------------------------------------------

    def _build_free(self) -> str:
        """Neither leased nor expired. Not indexed on purpose: an unindexed lease leaves the updates HOT."""
        # When the statement came, not when the row is looked at: a claim does not wait, and to ask the clock once a row
        # is a tenth of a walk over a million rows that nobody may take.
        now = "statement_timestamp()"
        parts = []
        if self.table.has("lease_expires"):
            parts.append("({0} IS NULL OR {0} < {1})".format(self._c["lease_expires"], now))
        if self.table.expiry is not None:
            parts += filter(None, [self.table.expiry.alive(self._expiry_terms(now))])
        elif self.table.has("expires"):
            parts.append("({0} IS NULL OR {0} > {1})".format(self._c["expires"], to_utc(self.table, "expires", now)))
        return _mostly(" AND ".join(parts)) if parts else "true"

    def _expiry_terms(self, now: str) -> Terms:
        after = self.table.expiry.after_ms if self.table.expiry is not None else None
        return Terms(self._c["expires"], self._c["enqueued_at"], now, f"{now} - {after or 0} * interval '1 ms'")

    def _where(self, ranges: Sequence[SeqRange]) -> Where:
        if self._always_several or len(ranges) != 1:
            return Where.SEVERAL
        return Where.OPEN if ranges[0].high == MAX_SEQ else Where.CLOSED

    def _build_place(self, where: Where) -> tuple[str, str]:
        """(condition, order) of one range. A row comparison where there is a claim index: with ``recipient = x AND
        seq >= n`` the planner takes the primary key and filters (measured 1,300 against 72,000 messages a second)."""
        keys = ", ".join([*(self._c[name] for name in self.table.claim_by), self._c["seq"]])
        low, high = (
            ", ".join(f"l.{name}" if where is Where.SEVERAL else "%s" for name in (*self.table.claim_by, end))
            for end in ("low", "high")
        )
        return f"({keys}) >= ({low})" + (f" AND ({keys}) <= ({high})" if where is not Where.OPEN else ""), keys

    def _scan(self, where: Where, extra: str = "") -> str:
        """The ordered scan of one range for what is free."""
        within, order = self._build_place(where)
        return f"{self._c['seq']} FROM {self._q} WHERE {within} AND {self._free}{extra} ORDER BY {order}"

    _LEVELS = "unnest(%s::varchar[], %s::smallint[], %s::bigint[], %s::bigint[]) AS l(recipient, priority, low, high)"

    def _build_inner(self, where: Where) -> str:
        scan = f"SELECT {self._scan(where)} LIMIT %s FOR UPDATE SKIP LOCKED"
        if where is not Where.SEVERAL:
            return scan
        # The ranges come in claim order; the nested loop stops at the outer LIMIT, so later ranges are not touched
        # when earlier ones fill the batch, and never more than LIMIT rows are locked (checked from a second session).
        return f"SELECT m.seq FROM {self._LEVELS} CROSS JOIN LATERAL ({scan}) AS m(seq) LIMIT %s"

    def _build_heads(self, where: Where, bodies: bool) -> str:
        within, order = self._build_place(where)
        # Primary key or claim index, as the claim. No lock, no WAL.
        names = ", ".join(self._c[name] for name in ("seq", "headers", *(("body",) if bodies else ())))
        return f"SELECT {names} FROM {self._q} WHERE {within} AND {self._free} ORDER BY {order} LIMIT %s"

    def _build_peek(self, ahead: Where, behind: Where) -> str:
        # Primary key or claim index, as the claim. No lock, no WAL. A row that an open transaction has deleted or locked
        # has that transaction in xmax: not available, though this snapshot still sees it (NServiceBus #1412).
        scan = f"SELECT {self._scan(ahead, f' AND {_mostly(self._NOT_IN_FLIGHT)}')} LIMIT %s"
        if ahead is Where.SEVERAL:
            scan = f"SELECT m.seq FROM {self._LEVELS} CROSS JOIN LATERAL ({scan}) AS m(seq) LIMIT %s"
        return (
            "SELECT a.n, b.n, coalesce(least(a.first, b.first), 0), coalesce(b.reached, 0) "
            f"FROM (SELECT count(*) AS n, min(x.seq) AS first FROM ({scan}) AS x(seq)) a, "
            f"({self._build_window(behind)}) b"
        )

    def _build_window(self, where: Where) -> str:
        """(free rows, the first of them, where the look ended before the end of the window or NULL) of a rescan window.
        It looks at so many rows, free or not: a window over a million leased ones must not take a third of a
        second."""
        within, order = self._build_place(where)
        rows = (
            f"SELECT {self._c['seq']}, {self._free} AND {self._NOT_IN_FLIGHT} FROM {self._q} "
            f"WHERE {within} ORDER BY {order} LIMIT %s"
        )
        level = (
            "SELECT count(*) FILTER (WHERE w.free) AS n, min(w.seq) FILTER (WHERE w.free) AS first, "
            f"CASE WHEN count(*) = %s THEN max(w.seq) END AS reached FROM ({rows}) AS w(seq, free)"
        )
        if where is not Where.SEVERAL:
            return level
        total = "SELECT sum(m.n)::bigint AS n, min(m.first) AS first, min(m.reached) AS reached"
        return f"{total} FROM (SELECT %s AS most) AS c, {self._LEVELS} CROSS JOIN LATERAL ({level.replace('%s', 'c.most', 1)}) AS m"

    def _range_params(self, ranges: Sequence[SeqRange], limit: int) -> tuple[Any, ...]:
        where, only = self._where(ranges), ranges[0]
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

    def _read(self, names: Sequence[str]) -> str:
        """These attributes as the list of a SELECT or RETURNING."""
        return ", ".join(read(self.table, self._c, name) for name in names)
