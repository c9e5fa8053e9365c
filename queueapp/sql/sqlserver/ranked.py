"""SQL Server: a queue with a priority of 64 bits, any number of which may be in use.

The claim index descends in the priority and ascends in seq. T-SQL has no row comparison, so a range of it is up to three
*stretches*, one after the other: the rest of the first priority, what lies between, the beginning of the last one. Each is one
seek, and one statement takes from it. Single places are rows that the caller knows: they are taken by key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..claims import MAX_PRIORITY, PRIORITY, WINDOW_ROWS, Claimed, PeekResult, SeqRange, order_key, split_order_key
from .claims import Claim, Claims
from .locking import KEYS, LOOKING, MAX_BATCH, TAKING
from .rows import Returned
from .session import fetch, json_of

_LOWEST, _HIGHEST = -MAX_PRIORITY - 1, MAX_PRIORITY


class Stretch(NamedTuple):
    """Of one priority the seqs from ``low`` to ``high``; or (``between``) the priorities from ``high`` down to ``low``."""

    between: bool
    priority: int
    low: int
    high: int

    @property
    def params(self) -> tuple[int, ...]:
        return (self.low, self.high) if self.between else (self.priority, self.low, self.high)


def stretches_of(only: SeqRange) -> list[Stretch]:
    """A range of places, in order."""
    (first, low), (last, high) = split_order_key(only.low), split_order_key(only.high)
    if only.low > only.high:
        return []
    if first == last:
        return [Stretch(False, ~first, low, high)]
    found = [Stretch(False, ~first, low, _HIGHEST)]
    if last - first > 1:
        found.append(Stretch(True, 0, ~(last - 1), ~(first + 1)))
    return [*found, Stretch(False, ~last, _LOWEST, high)]


def _is_place(only: SeqRange) -> bool:
    return only.low == only.high


class _RankedClaim(NamedTuple):
    """One way to take: the texts for the two kinds of stretches and for keys. Values first, then the limit."""

    of_one: str
    between: str
    by_key: str
    returned: Returned


class RankedClaims(Claims):
    """What can be taken from such a table."""

    # -- looking --------------------------------------------------------------------------------------------------

    def _in(self, stretch: Stretch, row: str = "q") -> str:
        priority, seq = f"{row}.{self._c['priority']}", f"{row}.{self._c['seq']}"
        return f"{priority} BETWEEN %s AND %s" if stretch.between else f"{priority} = %s AND {seq} BETWEEN %s AND %s"

    def _order_of(self, row: str) -> str:
        return f"{row}.{self._c['priority']} DESC, {row}.{self._c['seq']}"

    def peek(self, connection: Any, ahead: Sequence[SeqRange], behind: Sequence[SeqRange], limit: int) -> PeekResult:
        keys = [split_order_key(one.low)[1] for one in ahead if _is_place(one)]
        found: list[int] = []
        if keys:
            # Index: the primary key, one seek a key (KEYS). Safe: LOOKING.
            sql = f"SELECT {self._seq} {KEYS} {self._q} AS q WITH ({LOOKING}) ON {self._seq} = k.[key] WHERE {self.free()}"
            found += [seq for (seq,) in fetch(connection, sql, (json_of(keys[:limit]),))]
        for only in (one for one in ahead if not _is_place(one)):
            for stretch in stretches_of(only):
                if len(found) < limit:
                    # Index: the claim index, by hint: a stretch of it. Safe: LOOKING.
                    sql = (
                        f"SELECT TOP (%s) {self._seq} FROM {self._q} AS q WITH ({self._index}{LOOKING}) "
                        f"WHERE {self._in(stretch)} AND {self.free()} ORDER BY {self._order_of('q')}"
                    )
                    found += [seq for (seq,) in fetch(connection, sql, (limit - len(found), *stretch.params))]
        return PeekResult(len(found), 0, min(found, default=0))

    def read_heads(self, connection: Any, only: SeqRange, limit: int, *, bodies: bool = False) -> list[Any]:
        """Here they are (place, headers), or with the body."""
        found: list[Any] = []
        body = f", q.{self._c['body']}" if bodies else ""
        for stretch in stretches_of(only):
            if len(found) < limit:
                # Index: the claim index, by hint: a stretch of it. Safe: LOOKING.
                sql = (
                    f"SELECT TOP (%s) q.{self._c['priority']}, {self._seq}, q.{self._c['headers']}{body} "
                    f"FROM {self._q} AS q WITH ({self._index}{LOOKING}) "
                    f"WHERE {self._in(stretch)} AND {self.free()} ORDER BY {self._order_of('q')}"
                )
                rows = fetch(connection, sql, (limit - len(found), *stretch.params))
                found += [(order_key(priority, seq), *rest) for priority, seq, *rest in rows]
        return found

    def look_through(self, connection: Any, low: int, high: int, before: int, limit: int) -> tuple[list[int], int, int]:
        rank, before_seq = split_order_key(before)
        priority = f"q.{self._c['priority']}"
        # Index: the primary key, at most so many rows of it. Safe: LOOKING; what an open transaction has taken is passed by.
        sql = (
            f"SELECT TOP (%s) {self._seq}, {priority}, CASE WHEN ({priority} > %s OR ({priority} = %s AND {self._seq} < %s)) "
            f"AND {self.free()} THEN 1 ELSE 0 END FROM {self._q} AS q WITH ({LOOKING}) "
            f"WHERE {self._seq} BETWEEN %s AND %s ORDER BY {self._seq}"
        )
        rows = fetch(connection, sql, (min(limit, WINDOW_ROWS), ~rank, ~rank, before_seq, low, high))
        places = [order_key(priority, seq) for seq, priority, wanted in rows if wanted]
        return places, rows[-1][0] if rows else 0, len(rows)

    # -- taking ---------------------------------------------------------------------------------------------------

    def claim(self, verb: str, setting: str, source: str, returned: Returned) -> Claim:
        seq = self._c["seq"]

        def of(stretch: Stretch) -> str:
            # Index: the claim index, by hint, a stretch of it in its order; then the primary key, one seek a message. Safe: as
            # a claim by level (``Claims.claim``): LOOKING passes by what is not free, TAKING asks again and locks TOP rows.
            found = (
                f"SELECT TOP (%s) t.{seq} FROM {self._q} AS s WITH ({self._index}{LOOKING}) "
                f"INNER LOOP JOIN {self._q} AS t WITH ({TAKING}) ON t.{seq} = s.{seq} "
                f"WHERE {self._in(stretch, 's')} AND {self.free('s')} AND {self.free('t')} ORDER BY {self._order_of('s')}"
            )
            return (
                f"{verb} q{setting} OUTPUT {returned.of(source)} FROM ({found}) AS m "
                f"INNER LOOP JOIN {self._q} AS q WITH (ROWLOCK) ON q.{seq} = m.{seq}"
            )

        # Index: the primary key, one seek a key (KEYS). Safe: TAKING, which passes by what others hold; at most so many keys.
        by_key = (
            f"{verb} q{setting} OUTPUT {returned.of(source)} {KEYS} {self._q} AS q WITH ({TAKING}) "
            f"ON {self._seq} = k.[key] WHERE {self.free()}"
        )
        return _RankedClaim(of(Stretch(False, 0, 0, 0)), of(Stretch(True, 0, 0, 0)), by_key, returned)  # type: ignore[return-value]

    def take(
        self, connection: Any, claim: Any, values: tuple[Any, ...], ranges: Sequence[SeqRange], limit: int
    ) -> list[Claimed]:
        rows: list[Any] = []
        keys = [split_order_key(one.low)[1] for one in ranges if _is_place(one)][:limit]
        if keys:
            rows += fetch(connection, claim.by_key, (*values, json_of(keys)))
        for only in (one for one in ranges if not _is_place(one)):
            for stretch in stretches_of(only):
                if len(rows) < limit:
                    sql = claim.between if stretch.between else claim.of_one
                    rows += fetch(connection, sql, (*values, limit - len(rows), *stretch.params))
        return self._in_order(claim.returned.tuples(rows))

    @staticmethod
    def _in_order(rows: list[Claimed]) -> list[Claimed]:
        return sorted(rows, key=lambda row: (-row[PRIORITY], row[0]))

    def lock(self, connection: Any, ranges: Sequence[SeqRange], limit: int, *, bodies: bool) -> list[Claimed]:
        left_out = () if bodies else ("headers", "body")
        names = self._table.claimed
        returned = Returned(self._c, [name for name in names if name not in left_out])
        found: list[Any] = []
        keys = [split_order_key(one.low)[1] for one in ranges if _is_place(one)][: min(limit, MAX_BATCH)]
        if keys:
            # Index and safety: as a claim by key, whose rows these are.
            sql = (
                f"SELECT {returned.of('q')} {KEYS} {self._q} AS q WITH ({TAKING}) ON {self._seq} = k.[key] "
                f"WHERE {self.free()}"
            )
            found += fetch(connection, sql, (json_of(keys),))
        for only in (one for one in ranges if not _is_place(one)):
            for stretch in stretches_of(only):
                if len(found) < min(limit, MAX_BATCH):
                    # Index and safety: as a claim, whose rows these are.
                    sql = (
                        f"SELECT TOP (%s) {returned.of('t')} FROM {self._q} AS s WITH ({self._index}{LOOKING}) "
                        f"INNER LOOP JOIN {self._q} AS t WITH ({TAKING}) ON t.{self._c['seq']} = s.{self._c['seq']} "
                        f"WHERE {self._in(stretch, 's')} AND {self.free('s')} AND {self.free('t')} "
                        f"ORDER BY {self._order_of('s')}"
                    )
                    found += fetch(connection, sql, (min(limit, MAX_BATCH) - len(found), *stretch.params))
        rows = returned.tuples(found)
        if not bodies:
            place = names.index("headers")  # the body follows it
            rows = [(*row[:place], None, None, *row[place:]) for row in rows]
        return self._in_order(rows)
