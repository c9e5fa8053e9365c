"""PostgreSQL: a queue with a priority of 64 bits, any number of which may be in use. One index, and claims begin in its middle.

The index is on ``(~priority, seq)``, written ``priority # -1`` as Django writes it: both ascend, so that a row comparison is a
range of it. A claim of 100 of 2,000,000 takes as long whatever lies dead before its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..claims import MAX_PRIORITY, SeqRange, order_key, split_order_key
from .claims import Where
from .queue import PostgresqlQueueSql


class PostgresqlRankedQueueSql(PostgresqlQueueSql):
    """The statements of such a queue. A ``SeqRange`` is of places, and what they share with other queues stays as it is."""

    _LEVELS = (
        "unnest(%s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[]) AS l(low_rank, low_seq, high_rank, high_seq)"
    )

    def _build_place(self, where: Where) -> tuple[str, str]:
        # The claim index, a range of it: see above. (A single place is one, too: a seek.)
        keys = f"({self._c['priority']} # -1), {self._c['seq']}"
        low, high = (
            (f"l.{end}_rank, l.{end}_seq" if where is Where.SEVERAL else "%s::bigint, %s::bigint")
            for end in ("low", "high")
        )
        # First the index's own condition, which makes it this statement's: see ``Priority64Index``.
        mine = f"{self._c['priority']} <= {MAX_PRIORITY}"
        return f"{mine} AND ({keys}) >= ({low}) AND ({keys}) <= ({high})", keys

    def _range_params(self, ranges: Sequence[SeqRange], limit: int) -> tuple[Any, ...]:
        lows, highs = [split_order_key(one.low) for one in ranges], [split_order_key(one.high) for one in ranges]
        ends = (
            [rank for rank, _ in lows],
            [seq for _, seq in lows],
            [rank for rank, _ in highs],
            [seq for _, seq in highs],
        )
        return (*ends, limit, limit)

    def _read_heads(self, connection: Any, only: SeqRange, limit: int, bodies: bool) -> list[Any]:
        """Here they are (place, headers), or with the body."""
        c = self._c
        within, order = self._build_place(Where.CLOSED)
        # The claim index, as a claim. No lock, no WAL.
        body = f", {c['body']}" if bodies else ""
        sql = (
            f"SELECT {c['priority']}, {c['seq']}, {c['headers']}{body} FROM {self._q} WHERE {within} AND {self._free} "
            f"ORDER BY {order} LIMIT %s"
        )
        rows = self._in_order.fetch(connection, sql, (*split_order_key(only.low), *split_order_key(only.high), limit))
        return [(order_key(priority, seq), *rest) for priority, seq, *rest in rows]

    def look_through(self, connection: Any, low: int, high: int, before: int, limit: int) -> tuple[list[int], int, int]:
        priority, seq = self._c["priority"], self._c["seq"]
        # Primary key, at most so many rows of it. No lock, no WAL; what an open transaction has taken is not available.
        sql = (
            f"WITH w AS MATERIALIZED (SELECT {seq} AS seq, {priority} AS priority, "
            f"({priority} # -1, {seq}) < (%s::bigint, %s::bigint) AND {self._free} AND {self._NOT_IN_FLIGHT} AS wanted "
            f"FROM {self._q} WHERE {seq} >= %s AND {seq} <= %s ORDER BY {seq} LIMIT %s) "
            "SELECT seq, priority, false FROM w WHERE wanted "
            "UNION ALL SELECT coalesce(max(seq), 0), count(*), true FROM w"
        )
        *rows, (last, count, _) = self._in_order.fetch(connection, sql, (*split_order_key(before), low, high, limit))
        return [order_key(priority, seq) for seq, priority, _ in rows], last, count
