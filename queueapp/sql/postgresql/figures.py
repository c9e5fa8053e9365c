"""PostgreSQL: figures of a table, by a bounded read of its head. No lock, no WAL."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from ..claims import MAX_SEQ
from ..figures import MAX_HEADS, Figures, Head, HeadQuery, Level, WorkersWanted, union_of_heads
from .claims import NOT_IN_FLIGHT, PostgresqlClaims, Where
from .raw.plan_guard import fetch_unsorted
from .statements import Statements, TableText, to_utc, unevaluated

_NUMBER = itemgetter(0)
#: A foreign writer may have stored ``infinity``, which has no age.
_EPOCH = "'epoch'::timestamptz"


class PostgresqlFigures(Statements, Figures):
    """Estimates of one queue."""

    def __init__(self, text: TableText, claims: PostgresqlClaims) -> None:
        super().__init__(text)
        self._claims = claims

    def head_query(self, limit: int, level: Level = ()) -> HeadQuery:
        # Index: as ``_head``. Safe: a plain read.
        text = (
            "count(*), count(*) FILTER (WHERE h.state IN ('free', 'lease expired')), "
            "count(*) FILTER (WHERE h.state = 'leased'), count(*) FILTER (WHERE h.state = 'lease expired'), "
            "count(*) FILTER (WHERE h.state = 'expired'), "
            "max(h.age) FILTER (WHERE h.state IN ('free', 'lease expired')), coalesce(min(h.seq), 0) "
            f"FROM ({self._head('', level)}) AS h(seq, state, age)"
        )
        return HeadQuery(text, (*self._level(level), limit))

    @staticmethod
    def heads(connection: Any, queries: Sequence[HeadQuery]) -> list[Head]:
        found: list[Head] = []
        for begin in range(0, len(queries), MAX_HEADS):
            rows = fetch_unsorted(connection, *union_of_heads(queries[begin : begin + MAX_HEADS]))
            found += [Head(*row[1:]) for row in sorted(rows, key=_NUMBER)]
        return found

    def head_types(self, connection: Any, limit: int, level: Level = ()) -> list[tuple[str, int | None]]:
        # Index: as ``_head``. Safe: a plain read. The state is filtered outside: a million leased rows are not scanned.
        sql = (
            f"SELECT h.headers, h.age FROM ({self._head(', ' + self._c['headers'], level)}) AS h(seq, state, age, "
            "headers) WHERE h.state IN ('free', 'lease expired') ORDER BY h.seq"
        )
        return self._by_index(connection, sql, (*self._level(level), limit))

    def last_seq(self, connection: Any) -> int:
        # Index: the primary key, its last entry. Safe: a plain read.
        seq = self._c["seq"]
        rows = self._by_index(connection, f"SELECT {seq} FROM {self._q} ORDER BY {seq} DESC LIMIT 1", ())
        return int(rows[0][0]) if rows else 0

    def next_level(self, connection: Any, after: Level | None) -> Level | None:
        keys = ", ".join(self._c[name] for name in self.table.claim_by)
        behind = f" WHERE ({keys}) > ({', '.join('%s' for _ in self.table.claim_by)})" if after is not None else ""
        # Index: the claim index, one seek: a row comparison on its first columns. Safe: a plain read.
        rows = self._by_index(connection, f"SELECT {keys} FROM {self._q}{behind} ORDER BY {keys} LIMIT 1", after or ())
        return tuple(rows[0]) if rows else None

    def workers_wanted(self, wanted: WorkersWanted) -> str:
        lag = "0"
        if wanted.late_ms is not None:
            late = wanted.late_ms
            lag = f"CASE WHEN b.oldest > {late} THEN ceil(w.workers * least(b.oldest / {late}::numeric, 2)) ELSE 0 END"
        subscribers = '"' + wanted.subscribers.replace('"', '""') + '"'
        # Index: the primary key, its first rows; of the subscribers the one on queue. Safe: a plain read.
        return (
            f"SELECT greatest({wanted.min_workers}, least({wanted.max_workers}, "
            f"greatest(ceil(b.backlog / {wanted.per_worker}::numeric), {lag})))::int AS wanted FROM "
            "(SELECT count(*) FILTER (WHERE h.state IN ('free', 'lease expired', 'leased', 'taken')) AS backlog, "
            "max(h.age) FILTER (WHERE h.state IN ('free', 'lease expired')) AS oldest "
            f"FROM ({self._head('', ()) % (wanted.rows,)}) AS h(seq, state, age)) AS b, "
            f"(SELECT count(*) AS workers FROM {subscribers} WHERE queue = '{wanted.quoted_label}' "
            "AND receives AND alive_until > statement_timestamp()) AS w"
        )

    def _head(self, more: str, level: Level) -> str:
        """The first rows with their state and age. Index: the primary key; of a level the claim index."""
        # The time of the statement: one moment for all rows.
        now = "statement_timestamp()"
        states = []
        if self.table.has_unevaluated:
            states.append(f"WHEN {unevaluated(self._c)} THEN 'pending'")
        if self.table.has("lease_expires"):
            states.append(f"WHEN {self._c['lease_expires']} >= {now} THEN 'leased'")
        # A row that an open transaction has deleted or leased is in flight, although this snapshot still sees it.
        states.append(f"WHEN NOT {NOT_IN_FLIGHT} THEN 'taken'")
        if self.table.expiry is not None:
            if over := self.table.expiry.over(self._expiry_terms(now)):
                states.append(f"WHEN {over} THEN 'expired'")
        elif self.table.has("expires"):
            states.append(f"WHEN {self._c['expires']} <= {to_utc(self.table, 'expires', now)} THEN 'expired'")
        if self.table.has("lease_expires"):
            states.append(f"WHEN {self._c['lease_expires']} IS NOT NULL THEN 'lease expired'")
        age = "NULL::bigint"
        if self.table.has("enqueued_at"):
            arrived = f"greatest(least({self._c['enqueued_at']}, {now}), {_EPOCH})"
            age = f"(extract(epoch FROM {now} - {arrived}) * 1000)::bigint"
        where, order = "", self._c["seq"]
        if level:
            within, order = self._claims.build_range(Where.CLOSED)
            where = f" WHERE {within}"
        return (
            f"SELECT {self._c['seq']}, CASE {' '.join(states)} ELSE 'free' END, {age}{more} "
            f"FROM {self._q}{where} ORDER BY {order} LIMIT %s"
        )

    @staticmethod
    def _by_index(connection: Any, sql: str, params: Any) -> list[Any]:
        """Run a statement whose order an index gives, and make it use that index. For an unanalyzed table the planner
        assumes scattered rows, and a generic plan may date from when there were few: both would read all rows and sort
        (observed with 300,000)."""
        return fetch_unsorted(connection, sql, params)

    @staticmethod
    def _level(level: Level) -> tuple[Any, ...]:
        return (*level, 0, *level, MAX_SEQ) if level else ()
