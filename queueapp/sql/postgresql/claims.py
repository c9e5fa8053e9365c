"""PostgreSQL: looking at a queue and taking from it. What a claim and a peek share is written once, here."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from ..base import PRIORITY, WINDOW_ROWS, Claimed, Peek, QueueSql, QueueTable, Range
from ..rows import REST
from .packed import BIGINT, OpeningQuery, ready_to_open
from .rows import read, to_utc
from .session import fetch, load, quote, quote_table

_BY_SEQ = itemgetter(0)
#: The places of a message's values in a result of one row.
_FIRST, _COLUMNS = (0,) * 7, range(7)


def _by_priority(row: Claimed) -> tuple[int, int]:
    return -row[PRIORITY], row[0]


class PostgresqlClaims(QueueSql):
    """Peek, claim by lease and claim by delete of one queue."""

    def __init__(self, table: QueueTable) -> None:
        super().__init__(table)
        self._q = quote_table(table.db_table)
        self._c = {name: quote(column) for name, column in table.columns.items()}
        # The clock is turned into the column's UTC wall time, never the stored time into a zone.
        self._clock = to_utc(table, "expires", "clock_timestamp()")
        self._free = self._build_free()
        self._place = self._build_place()
        self._order = _by_priority if "priority" in table.claim_by else _BY_SEQ
        self._claims = {skip: self._build_claims(skip) for skip in (False, True)}
        self._peeks = {skip: self._build_peek(skip) for skip in (False, True)}
        self._opening_claims = self._build_opening_claims()

    # -- taking out -----------------------------------------------------------------------------------------------

    def peek(
        self,
        connection: Any,
        ahead: Sequence[Range],
        behind: Sequence[Range],
        limit: int,
        skip: Sequence[int] = (),
    ) -> Peek:
        window = self._range_params(behind or [Range(1, 0)], WINDOW_ROWS, skip)
        if self.table.claim_by:
            window = window[:-1]  # no limit over all levels
        params = (*self._range_params(ahead, limit, skip), WINDOW_ROWS, *window)
        found, back, first, reached = fetch(connection, self._peeks[bool(skip)], params)[0]
        return Peek(found, min(back, limit), first, reached)

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
        ranges: Sequence[Range],
        limit: int,
        token: uuid.UUID,
        owner: uuid.UUID,
        lease_ms: int,
        skip: Sequence[int] = (),
    ) -> list[Claimed]:
        params = (token, owner, lease_ms, *self._range_params(ranges, limit, skip))
        rows = fetch(connection, self._claims[bool(skip)][0], params)
        if len(rows) > 1:
            rows.sort(key=self._order)  # RETURNING has no order of its own
        return rows

    def claim_by_delete(
        self,
        connection: Any,
        ranges: Sequence[Range],
        limit: int,
        whole: bool = False,
        skip: Sequence[int] = (),
    ) -> list[Claimed]:
        if self._opening_claims and not skip and ready_to_open(connection):
            rows = self._open_with_claim(connection, ranges[0], limit, whole)
        else:
            sql = self._claims[bool(skip)][2 if whole else 1]
            rows = fetch(connection, sql, self._range_params(ranges, limit, skip))
        if len(rows) > 1:
            rows.sort(key=self._order)
        return rows

    def _open_with_claim(self, connection: Any, only: Range, limit: int, whole: bool) -> list[Claimed]:
        bounds = (only.low.to_bytes(8, "big"), only.high.to_bytes(8, "big"), limit.to_bytes(8, "big"))
        result = self._opening_claims[whole].fetch(connection, bounds)
        if not result.ntuples:
            return []
        if whole or limit > 1:
            return load(connection, result)
        # One message a transaction: by hand in half the time.
        seq, identity, headers, body, deliveries, cancels, failures = map(result.get_value, _FIRST, _COLUMNS)
        number = int.from_bytes
        return [
            (
                number(seq or b"", "big"), identity, (headers or b"").decode(), body, number(deliveries or b"", "big"),
                number(cancels or b"", "big"), None if failures is None else failures.decode(),
            )
        ]  # fmt: skip

    # -- how they are written --------------------------------------------------------------------------------------

    def _build_claims(self, skip: bool) -> tuple[str, str, str]:
        """(claim by lease, claim by delete, the same returning the whole row)."""
        table, seq = self.table, self._c["seq"]
        inner, claimed = self._build_inner(skip), self._read(table.claimed)
        by_lease = ""
        # Index: the primary key, or the claim index for a queue with recipients or levels (row comparison, below).
        # Safe: the LIMIT sits inside ARRAY(...), so exactly that many rows are locked; SKIP LOCKED never waits for a
        # receiver. Never combined with an ack: claim and ack rows in one transaction deadlock (reproduced).
        if table.has("lease_token", "lease_owner", "lease_expires", "deliveries"):
            by_lease = (
                f"UPDATE {self._q} SET {self._c['lease_token']} = %s, {self._c['lease_owner']} = %s, "
                f"{self._c['lease_expires']} = clock_timestamp() + %s * interval '1 ms', "
                f"{self._c['deliveries']} = {self._c['deliveries']} + 1 "
                f"WHERE {seq} = ANY(ARRAY({inner})) RETURNING {claimed}"
            )
        # Index and safety as above; the row lock is kept until the caller's transaction ends, which is the ownership.
        by_delete = f"DELETE FROM {self._q} WHERE {seq} = ANY(ARRAY({inner})) RETURNING {claimed}"
        return by_lease, by_delete, f"{by_delete}, {self._read(REST)}"

    def _build_opening_claims(self) -> tuple[OpeningQuery, ...]:
        """(claim by delete, the same returning the whole row) as the first statement of a transaction; none on a queue with
        recipients or levels."""
        if self.table.claim_by:
            return ()
        opening = []
        for sql in self._claims[False][1:]:
            # Index and safety as the claim by delete: it is that statement.
            for place in ("$1", "$2", "$3"):
                sql = sql.replace("%s", place, 1)
            opening.append(OpeningQuery(sql.replace("%%", "%"), (BIGINT, BIGINT, BIGINT)))
        return tuple(opening)

    # -- pieces ---------------------------------------------------------------------------------------------------

    def _build_free(self) -> str:
        """Neither leased nor expired. Not indexed on purpose: an unindexed lease keeps half of the updates HOT."""
        # When the statement came, not when the row is looked at: a claim does not wait, and to ask the clock once a row
        # is a tenth of a walk over a million rows that nobody may take.
        now = "statement_timestamp()"
        parts = []
        if self.table.has("lease_expires"):
            parts.append("({0} IS NULL OR {0} < {1})".format(self._c["lease_expires"], now))
        if self.table.has("expires"):
            parts.append("({0} IS NULL OR {0} > {1})".format(self._c["expires"], to_utc(self.table, "expires", now)))
        return " AND ".join(parts) or "true"

    def _build_place(self) -> tuple[str, str]:
        """(condition, order) of one range. A row comparison where there is a claim index: with ``recipient = x AND
        seq >= n`` the planner takes the primary key and filters (measured 1,300 against 72,000 messages a second)."""
        seq = self._c["seq"]
        if not self.table.claim_by:
            return f"{seq} >= %s AND {seq} <= %s", seq
        keys = ", ".join([*(self._c[name] for name in self.table.claim_by), seq])
        low = ", ".join([*(f"l.{name}" for name in self.table.claim_by), "l.low"])
        high = ", ".join([*(f"l.{name}" for name in self.table.claim_by), "l.high"])
        return f"({keys}) >= ({low}) AND ({keys}) <= ({high})", keys

    def _scan(self, extra: str = "") -> str:
        """The ordered scan of one range for what is free."""
        within, order = self._place
        return f"{self._c['seq']} FROM {self._q} WHERE {within} AND {self._free}{extra} ORDER BY {order}"

    _LEVELS = "unnest(%s::varchar[], %s::smallint[], %s::bigint[], %s::bigint[]) AS l(recipient, priority, low, high)"

    def _skipping(self, skip: bool) -> str:
        return f" AND {self._c['seq']} <> ALL(%s)" if skip else ""

    def _build_inner(self, skip: bool) -> str:
        scan = f"SELECT {self._scan(self._skipping(skip))} LIMIT %s FOR UPDATE SKIP LOCKED"
        if not self.table.claim_by:
            return scan
        # The ranges come in claim order; the nested loop stops at the outer LIMIT, so lower levels are not touched
        # when higher ones fill the batch, and never more than LIMIT rows are locked (checked from a second session).
        return f"SELECT m.seq FROM {self._LEVELS} CROSS JOIN LATERAL ({scan}) AS m(seq) LIMIT %s"

    def _build_peek(self, skip: bool) -> str:
        # Primary key or claim index, as the claim. No lock, no WAL. A row that an open transaction has deleted or locked
        # has that transaction in xmax: not available, though this snapshot still sees it (NServiceBus #1412).
        scan = f"SELECT {self._scan(f' AND {self._NOT_IN_FLIGHT}{self._skipping(skip)}')} LIMIT %s"
        if self.table.claim_by:
            scan = f"SELECT m.seq FROM {self._LEVELS} CROSS JOIN LATERAL ({scan}) AS m(seq) LIMIT %s"
        return (
            "SELECT a.n, b.n, coalesce(least(a.first, b.first), 0), coalesce(b.reached, 0) "
            f"FROM (SELECT count(*) AS n, min(x.seq) AS first FROM ({scan}) AS x(seq)) a, ({self._build_window(skip)}) b"
        )

    def _build_window(self, skip: bool) -> str:
        """(free rows, the first of them, where the look ended before the end of the window or NULL) of a rescan window. It
        looks at so many rows, free or not: a window over a million leased ones must not take a third of a second."""
        within, order = self._place
        rows = (
            f"SELECT {self._c['seq']}, {self._free} AND {self._NOT_IN_FLIGHT} FROM {self._q} "
            f"WHERE {within}{self._skipping(skip)} ORDER BY {order} LIMIT %s"
        )
        level = (
            "SELECT count(*) FILTER (WHERE w.free) AS n, min(w.seq) FILTER (WHERE w.free) AS first, "
            f"CASE WHEN count(*) = %s THEN max(w.seq) END AS reached FROM ({rows}) AS w(seq, free)"
        )
        if not self.table.claim_by:
            return level
        total = "SELECT sum(m.n)::bigint AS n, min(m.first) AS first, min(m.reached) AS reached"
        return f"{total} FROM (SELECT %s AS most) AS c, {self._LEVELS} CROSS JOIN LATERAL ({level.replace('%s', 'c.most', 1)}) AS m"

    def _range_params(self, ranges: Sequence[Range], limit: int, skip: Sequence[int]) -> tuple[Any, ...]:
        skipped = (list(skip),) if skip else ()
        if not self.table.claim_by:
            only = ranges[0]
            return only.low, only.high, *skipped, limit
        return (
            [r.recipient for r in ranges],
            [r.priority for r in ranges],
            [r.low for r in ranges],
            [r.high for r in ranges],
            *skipped,
            limit,
            limit,
        )

    def _read(self, names: Sequence[str]) -> str:
        """These attributes as the list of a SELECT or RETURNING."""
        return ", ".join(read(self.table, self._c, name) for name in names)
