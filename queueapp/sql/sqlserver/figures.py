"""SQL Server: figures of a table, by a bounded read of its head under LOOKING: neither it nor a receiver waits for the
other, under any READ_COMMITTED_SNAPSHOT setting. Locked rows are skipped, so they are in no figure."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from ..figures import MAX_HEADS, Figures, Head, HeadQuery, Level, WorkersWanted, union_of_heads
from .statements import LOOKING, Statements, fetch, quote, unevaluated

_WAITING = "h.[state] IN ('free', 'lease expired')"
_NUMBER = itemgetter(0)
#: A priority as a parameter: a bigint would make the comparison a range to the optimizer.
_AS = {"recipient": "%s", "priority": "CAST(%s AS smallint)"}


class SqlServerFigures(Statements, Figures):
    """Estimates of one queue."""

    def head_query(self, limit: int, level: Level = ()) -> HeadQuery:
        # Index: as ``_head``. Safe: LOOKING.
        text = (
            f"COUNT(*), COUNT(CASE WHEN {_WAITING} THEN 1 END), COUNT(CASE WHEN h.[state] = 'leased' THEN 1 "
            "END), "
            "COUNT(CASE WHEN h.[state] = 'lease expired' THEN 1 END), COUNT(CASE WHEN h.[state] = 'expired' THEN 1 "
            "END), "
            f"MAX(CASE WHEN {_WAITING} THEN h.[age] END), COALESCE(MIN(h.[seq]), 0) FROM ({self._head('', level)}) AS h"
        )
        return HeadQuery(text, (limit, *level))

    @staticmethod
    def heads(connection: Any, queries: Sequence[HeadQuery]) -> list[Head]:
        found: list[Head] = []
        for begin in range(0, len(queries), MAX_HEADS):
            rows = fetch(connection, *union_of_heads(queries[begin : begin + MAX_HEADS]))
            found += [Head(*row[1:]) for row in sorted(rows, key=_NUMBER)]
        return found

    def head_types(self, connection: Any, limit: int, level: Level = ()) -> list[tuple[str, int | None]]:
        # Index: as ``_head``. Safe: LOOKING.
        inner = self._head(f", q.{self._c['headers']} AS [headers]", level)
        sql = f"SELECT h.[headers], h.[age] FROM ({inner}) AS h WHERE {_WAITING} ORDER BY h.[seq]"
        return [(headers, age) for headers, age in fetch(connection, sql, (limit, *level))]

    def last_seq(self, connection: Any) -> int:
        # Index: the primary key, its last entry. Safe: LOOKING.
        seq = f"q.{self._c['seq']}"
        rows = fetch(connection, f"SELECT TOP (1) {seq} FROM {self._q} AS q WITH ({LOOKING}) ORDER BY {seq} DESC", ())
        return int(rows[0][0]) if rows else 0

    def next_level(self, connection: Any, after: Level | None) -> Level | None:
        names = self.table.claim_by
        columns = [f"q.{self._c[name]}" for name in names]
        # Index: the claim index, by hint, one seek a statement: the next priority of the recipient, then the next
        # recipient. An OR of both would scan all earlier rows. Safe: LOOKING.
        select = f"SELECT TOP (1) {', '.join(columns)} FROM {self._q} AS q WITH ({self._by_claim()}{LOOKING})"
        order = f"ORDER BY {', '.join(columns)}"
        if after is None:
            rows = fetch(connection, f"{select} {order}", ())
            return tuple(rows[0]) if rows else None
        for n in reversed(range(len(names))):
            same = [f"{columns[i]} = {_AS[names[i]]}" for i in range(n)]
            where = " AND ".join([*same, f"{columns[n]} > {_AS[names[n]]}"])
            if rows := fetch(connection, f"{select} WHERE {where} {order}", after[: n + 1]):
                return tuple(rows[0])
        return None

    def workers_wanted(self, wanted: WorkersWanted) -> str:
        lag, least, highest = "0", wanted.min_workers, wanted.max_workers
        if wanted.late_ms is not None:
            late = wanted.late_ms
            share = f"CASE WHEN b.[oldest] > {2 * late} THEN 2.0 ELSE b.[oldest] / {late}.0 END"
            lag = f"CASE WHEN b.[oldest] > {late} THEN CEILING(w.[workers] * {share}) ELSE 0 END"
        # Index: the primary key, its first rows; of the subscribers the one on queue. Safe: LOOKING.
        return (
            f"SELECT CAST(CASE WHEN m.[more] < {least} THEN {least} WHEN m.[more] > {highest} THEN {highest} "
            "ELSE m.[more] END AS int) AS [wanted] FROM (SELECT CASE WHEN n.[need] > n.[lag] THEN n.[need] ELSE "
            "n.[lag] END AS [more] "
            f"FROM (SELECT CEILING(b.[backlog] / {wanted.per_worker}.0) AS [need], {lag} AS [lag] FROM "
            "(SELECT COUNT(CASE WHEN h.[state] IN ('free', 'lease expired', 'leased') THEN 1 END) AS [backlog], "
            "MAX(CASE WHEN h.[state] IN ('free', 'lease expired') THEN h.[age] END) AS [oldest] "
            f"FROM ({self._head('', ()) % (wanted.rows,)}) AS h) AS b CROSS JOIN "
            f"(SELECT COUNT(*) AS [workers] FROM {quote(wanted.subscribers)} AS s WITH ({LOOKING}) "
            f"WHERE s.[queue] = '{wanted.quoted_label}' AND s.[receives] = 1 AND s.[alive_until] > SYSUTCDATETIME()) "
            "AS w) AS n) AS m"
        )

    def _by_claim(self) -> str:
        return f"INDEX({quote(self.table.claim_index)}), " if self.table.claim_by and self.table.claim_index else ""

    def _head(self, more: str, level: Level) -> str:
        """The first rows with their state and age. Index: the primary key; of a level the claim index."""
        now, states = "SYSUTCDATETIME()", []
        lease, expires = (f"q.{self._c[name]}" if name in self._c else "" for name in ("lease_expires", "expires"))
        states += [f"WHEN {unevaluated(self._c)} THEN 'pending'"] if self.table.has_unevaluated else []
        states += [f"WHEN {lease} >= {now} THEN 'leased'"] if lease else []
        over = f"{expires} <= {now}" if expires else ""
        if self.table.expiry is not None:
            over = self.table.expiry.over(self.expiry_terms())
        states += [f"WHEN {over} THEN 'expired'"] if over else []
        states += [f"WHEN {lease} IS NOT NULL THEN 'lease expired'"] if lease else []
        state = f"CASE {' '.join(states)} ELSE 'free' END" if states else "'free'"
        arrived = f"q.{self._c['enqueued_at']}" if "enqueued_at" in self._c else ""
        age = f"DATEDIFF_BIG(millisecond, {arrived}, {now})" if arrived else "CAST(NULL AS bigint)"
        where = " AND ".join(f"q.{self._c[name]} = {_AS[name]}" for name in self.table.claim_by) if level else ""
        return (
            f"SELECT TOP (%s) q.{self._c['seq']} AS [seq], {state} AS [state], {age} AS [age]{more} "
            f"FROM {self._q} AS q WITH ({self._by_claim() if level else ''}{LOOKING}) "
            f"{f'WHERE {where} ' if where else ''}ORDER BY q.{self._c['seq']}"
        )
