"""SQL Server: peeks and claims.

A claim is an ordered ``TOP (n)``, updated or deleted with OUTPUT, one statement per range: T-SQL has no row comparison,
and one TOP over several ranges may be planned with a sort, which reads and locks all of them first. In table order it
takes what it finds; by the claim index it looks, and takes by key.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...messages.ids import as_uuid
from ..claims import (
    MAX_PRIORITY,
    WINDOW_ROWS,
    Claimed,
    Claims,
    PeekResult,
    SeqRange,
    order_key,
    split_order_key,
)
from ..message_columns import REST
from .statements import (
    KEYS,
    LATER,
    LOOKING,
    MAX_BATCH,
    TAKING,
    Returned,
    Statements,
    TableText,
    fetch,
    json_of,
    later_params,
)

_RANGES = (
    "OPENJSON(%s) WITH ([n] int '$[0]', [recipient] nvarchar(200) '$[1]', [priority] smallint '$[2]', "
    "[low] bigint '$[3]', [high] bigint '$[4]') AS l"
)
#: A bigint compared with the smallint column would be a range to the optimizer, and not one level in order of seq.
PARAMETERS = {"recipient": "%s", "priority": "CAST(%s AS smallint)", "low": "%s", "high": "%s"}
_OF_RANGES = {name: f"l.[{name}]" for name in PARAMETERS}
_IDS = "OPENJSON(%s) WITH ([id] uniqueidentifier '$') AS u"


def _numbered(ranges: Sequence[SeqRange]) -> str:
    return json_of([(n, only.recipient, only.priority, only.low, only.high) for n, only in enumerate(ranges)])


class Claim(NamedTuple):
    """A claim statement and what it returns. Parameters of ``in_range``: the limit and the range, then the claim's own
    values, or these first (``values_first``)."""

    in_range: str
    returned: Returned
    values_first: bool


class SqlServerClaims(Statements, Claims):
    """Peek, claim by lease and claim by delete of one queue."""

    def __init__(self, text: TableText) -> None:
        super().__init__(text)
        table, c = text.table, text.columns
        if table.has("lease_token", "lease_owner", "lease_expires", "deliveries"):
            # The count is unqualified: ``m.deliveries + 1`` is refused by some servers.
            lease = (
                f" SET {c['lease_token']} = %s, {c['lease_owner']} = %s, {c['lease_expires']} = {LATER}, "
                f"{c['deliveries']} = {c['deliveries']} + 1"
            )
            self.by_lease = self.claim("UPDATE", lease, "inserted", Returned(c, table.claimed))
        # The row locks are kept until the caller's transaction ends, which is the ownership.
        self._by_delete = self.claim("DELETE", "", "deleted", Returned(c, table.claimed))
        self._whole = self.claim("DELETE", "", "deleted", Returned(c, (*table.claimed, *REST)))

    # -- peeks --------------------------------------------------------------------------------------------------------

    def peek(self, connection: Any, ahead: Sequence[SeqRange], behind: Sequence[SeqRange], limit: int) -> PeekResult:
        ahead, behind = ahead or [SeqRange(1, 0)], behind or [SeqRange(1, 0)]
        look, window = self._look(several=self._has_ranges(ahead)), self._window()
        # Index: as the claim. Safe: LOOKING; rows that an open transaction has deleted or leased are not available,
        # rows that it has only locked (``Failures.lock``) still count. One plan for any number of levels.
        sql = (
            "SELECT a.[n], b.[n], a.[first], b.[first], b.[reached] "
            f"FROM (SELECT COUNT(*) AS [n], MIN(x.[seq]) AS [first] FROM ({look}) AS x) AS a CROSS JOIN ({window}) AS b"
        )
        params = (*self._look_params(ahead, limit), _numbered(behind))
        n_ahead, n_behind, *firsts, reached = fetch(connection, sql, params)[0]
        first = min((first for first in firsts if first is not None), default=0)
        return PeekResult(n_ahead, min(n_behind or 0, limit), first, reached or 0)

    def read_heads(self, connection: Any, only: SeqRange, limit: int) -> list[tuple[int, str]]:
        return self._read_heads(connection, only, limit)

    def read_heads_and_bodies(self, connection: Any, only: SeqRange, limit: int) -> list[tuple[int, str, bytes | None]]:
        return self._read_heads(connection, only, limit, bodies=True)

    def _read_heads(self, connection: Any, only: SeqRange, limit: int, *, bodies: bool = False) -> list[Any]:
        rest = f", q.{self._c['body']}" if bodies else ""
        # Index: as the claim. Safe: LOOKING.
        sql = (
            f"SELECT TOP (%s) {self._seq}, q.{self._c['headers']}{rest} FROM {self._q} AS q WITH "
            f"({self._index}{LOOKING}) WHERE {self._within(PARAMETERS)} AND {self.free()} ORDER BY {self._seq}"
        )
        level = (getattr(only, name) for name in self.table.claim_by)
        return [tuple(row) for row in fetch(connection, sql, (limit, *level, only.low, only.high))]

    def _has_ranges(self, ranges: Sequence[SeqRange]) -> bool:
        return bool(self.table.claim_by) or len(ranges) > 1

    def _look(self, *, several: bool) -> str:
        """SELECT of the available seqs, at most TOP."""
        table = f"FROM {self._q} AS q WITH ({self._index}{LOOKING})"
        where = f"{self.free()} ORDER BY {self._seq}"
        if not several:
            return f"SELECT TOP (%s) {self._seq} AS [seq] {table} WHERE {self._within(PARAMETERS)} AND {where}"
        return (
            f"SELECT TOP (%s) m.[seq] FROM {_RANGES} CROSS APPLY (SELECT TOP (%s) {self._seq} AS [seq] {table} "
            f"WHERE {self._within(_OF_RANGES)} AND {where}) AS m"
        )

    def _window(self) -> str:
        """(available rows, the first of them, where the scan stopped before the end of the window or NULL) of a rescan
        window. It reads a bounded number of rows of a level, available or not: a window over a million leased ones must
        be fast."""
        rows = (
            f"SELECT TOP ({WINDOW_ROWS}) {self._seq} AS [seq], CASE WHEN {self.free()} THEN {self._seq} END AS [free] "
            f"FROM {self._q} AS q WITH ({self._index}{LOOKING}) "
            f"WHERE {self._within(_OF_RANGES)} ORDER BY {self._seq}"
        )
        return (
            "SELECT SUM(m.[n]) AS [n], MIN(m.[first]) AS [first], MIN(m.[reached]) AS [reached] FROM "
            f"{_RANGES} CROSS APPLY (SELECT COUNT(w.[free]) AS [n], MIN(w.[free]) AS [first], "
            f"CASE WHEN COUNT(*) = {WINDOW_ROWS} THEN MAX(w.[seq]) END AS [reached] FROM ({rows}) AS w) AS m"
        )

    def _look_params(self, ranges: Sequence[SeqRange], limit: int) -> tuple[Any, ...]:
        if not self._has_ranges(ranges):
            return limit, ranges[0].low, ranges[0].high
        return limit, _numbered(ranges), limit

    def _occupied(self, connection: Any, ranges: Sequence[SeqRange]) -> list[SeqRange]:
        """The ranges with available messages, so that empty levels cost one round trip and not one each."""
        # Index: the claim index, one seek a level. Safe: LOOKING; a message that is claimed in between is merely not
        # found.
        sql = (
            f"SELECT l.[n] FROM {_RANGES} WHERE EXISTS (SELECT 1 FROM {self._q} AS q WITH ({self._index}{LOOKING}) "
            f"WHERE {self._within(_OF_RANGES)} AND {self.free()}) ORDER BY l.[n]"
        )
        return [ranges[n] for (n,) in fetch(connection, sql, (_numbered(ranges),))]

    def _within(self, value: dict[str, str], row: str = "q") -> str:
        parts = [f"{row}.{self._c[name]} = {value[name]}" for name in self.table.claim_by]
        return " AND ".join([*parts, f"{row}.{self._c['seq']} BETWEEN {value['low']} AND {value['high']}"])

    # -- claims -------------------------------------------------------------------------------------------------------

    def claim_by_lease(
        self,
        connection: Any,
        ranges: Sequence[SeqRange],
        limit: int,
        token: uuid.UUID,
        owner: uuid.UUID,
        lease_ms: int,
    ) -> list[Claimed]:
        values = (token, owner, *later_params(lease_ms))
        return self.take(connection, self.by_lease, values, ranges, limit)

    def claim_by_delete(
        self,
        connection: Any,
        ranges: Sequence[SeqRange],
        limit: int,
        whole: bool = False,
        owner: uuid.UUID | None = None,
    ) -> list[Claimed]:
        return self.take(connection, self._whole if whole else self._by_delete, (), ranges, limit)

    def lock_waiting(self, connection: Any, ids: Sequence[uuid.UUID]) -> list[tuple[int, uuid.UUID]]:
        seq, identity = f"q.{self._c['seq']}", f"q.{self._c['id']}"
        unleased = f" AND q.{self._c['lease_token']} IS NULL" if self.table.has("lease_token") else ""
        found: list[tuple[int, uuid.UUID]] = []
        for first in range(0, len(ids), MAX_BATCH):
            piece = json_of([str(key) for key in ids[first : first + MAX_BATCH]])
            # Index: the one on id, one seek an id. Safe: TAKING skips rows that a receiver has locked, since their
            # delivery has begun; claims skip rows that are locked here until this transaction ends.
            sql = (
                f"SELECT {seq}, {identity} FROM {_IDS} INNER LOOP JOIN {self._q} AS q WITH ({TAKING}) ON {identity} = "
                f"u.[id] WHERE {self.free('q')}{unleased}"
            )
            found += [(number, as_uuid(key)) for number, key in fetch(connection, sql, (piece,))]
        return sorted(found)

    def claim(self, verb: str, setting: str, source: str, returned: Returned) -> Claim:
        """The statement of a claim that updates or deletes the messages that it takes."""
        output = f"OUTPUT {returned.of(source)}"
        if self._index:
            seq = self._c["seq"]
            # Index: the claim index, by hint, because equality on its first columns makes ORDER BY look free and the
            # clustered key look cheap; then the primary key, one seek a message (the loop joins, which keep that
            # order). Safe: leased or expired rows are skipped under LOOKING, so that their locks do not add up to an
            # escalation; TAKING, checking again, locks each found row before the next is sought, and TOP counts the
            # rows that it got.
            found = (
                f"SELECT TOP (%s) t.{seq} FROM {self._q} AS s WITH ({self._index}{LOOKING}) "
                f"INNER LOOP JOIN {self._q} AS t WITH ({TAKING}) ON t.{seq} = s.{seq} "
                f"WHERE {self._within(PARAMETERS, 's')} AND {self.free('s')} AND {self.free('t')} ORDER BY s.{seq}"
            )
            in_range = (
                f"{verb} q{setting} {output} FROM ({found}) AS m "
                f"INNER LOOP JOIN {self._q} AS q WITH (ROWLOCK) ON q.{seq} = m.{seq}"
            )
            return Claim(in_range, returned, values_first=True)
        into = "DELETE FROM m" if verb == "DELETE" else f"{verb} m"
        columns = ", ".join(f"q.{column}" for column in self._c.values())
        # Index: the primary key. Safe: TAKING, which releases at once the locks of rows that are not available; at most
        # TOP rows.
        in_range = (
            f"WITH m AS (SELECT TOP (%s) {columns} FROM {self._q} AS q WITH ({TAKING}) "
            f"WHERE {self._within(PARAMETERS)} AND {self.free()} ORDER BY {self._seq}) {into}{setting} {output}"
        )
        return Claim(in_range, returned, values_first=False)

    def take(
        self,
        connection: Any,
        claim: Claim,
        values: tuple[Any, ...],
        ranges: Sequence[SeqRange],
        limit: int,
    ) -> list[Claimed]:
        """Take at most ``limit`` messages of the ranges, in claim order."""
        rows: list[Any] = []
        if ranges:
            first, *rest = ranges
            rows += self._take_range(connection, claim, values, first, limit)
            if len(rows) < limit and len(rest) > 1:
                rest = self._occupied(connection, rest)
            for only in rest:
                if len(rows) == limit:
                    break
                rows += self._take_range(connection, claim, values, only, limit - len(rows))
        taken = claim.returned.tuples(rows)
        if len(taken) > 1:
            taken.sort(key=self._order)  # OUTPUT has no order
        return taken

    def _take_range(
        self, connection: Any, claim: Claim, values: tuple[Any, ...], only: SeqRange, limit: int
    ) -> list[Any]:
        level = (getattr(only, name) for name in self.table.claim_by)
        of_range = (limit, *level, only.low, only.high)
        params = (*values, *of_range) if claim.values_first else (*of_range, *values)
        return fetch(connection, claim.in_range, params)

    def lock_heads(self, connection: Any, ranges: Sequence[SeqRange], limit: int, *, bodies: bool) -> list[Claimed]:
        """``ConcurrencyLimits.lock_heads``."""
        left_out = () if bodies else ("headers", "body")
        names = self.table.claimed
        returned = Returned(self._c, [name for name in names if name not in left_out])
        # Index and safety: as a claim, whose rows these are.
        sql = (
            f"SELECT TOP (%s) {returned.of('t')} FROM {self._q} AS s WITH ({self._index}{LOOKING}) "
            f"INNER LOOP JOIN {self._q} AS t WITH ({TAKING}) ON t.{self._c['seq']} = s.{self._c['seq']} "
            f"WHERE {self._within(PARAMETERS, 's')} AND {self.free('s')} AND {self.free('t')} ORDER BY "
            f"s.{self._c['seq']}"
        )
        found: list[Any] = []
        for only in ranges:
            remaining = min(limit, MAX_BATCH) - len(found)
            if remaining <= 0:
                break
            level = (getattr(only, name) for name in self.table.claim_by)
            found += fetch(connection, sql, (remaining, *level, only.low, only.high))
        rows = returned.tuples(found)
        if not bodies:
            place = names.index("headers")  # the body follows it
            rows = [(*row[:place], None, None, *row[place:]) for row in rows]
        return sorted(rows, key=self._order)


# -- a queue with a 64-bit priority -----------------------------------------------------------------------------------

_LOWEST, _HIGHEST = -MAX_PRIORITY - 1, MAX_PRIORITY


class IndexRange(NamedTuple):
    """The seqs from ``low`` to ``high`` of one priority; or (``between``) the priorities from ``high`` down to
    ``low``."""

    between: bool
    priority: int
    low: int
    high: int

    @property
    def params(self) -> tuple[int, ...]:
        return (self.low, self.high) if self.between else (self.priority, self.low, self.high)


def index_ranges_of(only: SeqRange) -> list[IndexRange]:
    """A range of order keys as index ranges, in order."""
    (first, low), (last, high) = split_order_key(only.low), split_order_key(only.high)
    if only.low > only.high:
        return []
    if first == last:
        return [IndexRange(False, ~first, low, high)]
    found = [IndexRange(False, ~first, low, _HIGHEST)]
    if last - first > 1:
        found.append(IndexRange(True, 0, ~(last - 1), ~(first + 1)))
    return [*found, IndexRange(False, ~last, _LOWEST, high)]


def _is_single(only: SeqRange) -> bool:
    return only.low == only.high


class _Priority64Claim(NamedTuple):
    """A claim: the statements for the two kinds of index ranges and for keys. Own values first, then the limit."""

    of_one: str
    between: str
    by_key: str
    returned: Returned


class Priority64Claims(SqlServerClaims):
    """Claims of a queue with a 64-bit priority, any number of which may be in use.

    The claim index descends in the priority and ascends in seq. T-SQL has no row comparison, so a range of order keys
    is up to three *index ranges*, one after the other: the rest of the first priority, the priorities in between, the
    beginning of the last one. Each is one seek and one statement. Single order keys denote rows that the caller knows:
    they are taken by key.
    """

    def _in(self, part: IndexRange, row: str = "q") -> str:
        priority, seq = f"{row}.{self._c['priority']}", f"{row}.{self._c['seq']}"
        return f"{priority} BETWEEN %s AND %s" if part.between else f"{priority} = %s AND {seq} BETWEEN %s AND %s"

    def _order_of(self, row: str) -> str:
        return f"{row}.{self._c['priority']} DESC, {row}.{self._c['seq']}"

    def peek(self, connection: Any, ahead: Sequence[SeqRange], behind: Sequence[SeqRange], limit: int) -> PeekResult:
        keys = [split_order_key(item.low)[1] for item in ahead if _is_single(item)]
        found: list[int] = []
        if keys:
            # Index: the primary key, one seek a key (KEYS). Safe: LOOKING.
            sql = (
                f"SELECT {self._seq} {KEYS} {self._q} AS q WITH ({LOOKING}) ON {self._seq} = k.[key] WHERE "
                f"{self.free()}"
            )
            found += [seq for (seq,) in fetch(connection, sql, (json_of(keys[:limit]),))]
        for only in (item for item in ahead if not _is_single(item)):
            for part in index_ranges_of(only):
                if len(found) < limit:
                    # Index: the claim index, by hint: a part of it. Safe: LOOKING.
                    sql = (
                        f"SELECT TOP (%s) {self._seq} FROM {self._q} AS q WITH ({self._index}{LOOKING}) "
                        f"WHERE {self._in(part)} AND {self.free()} ORDER BY {self._order_of('q')}"
                    )
                    found += [seq for (seq,) in fetch(connection, sql, (limit - len(found), *part.params))]
        return PeekResult(len(found), 0, min(found, default=0))

    def _read_heads(self, connection: Any, only: SeqRange, limit: int, *, bodies: bool = False) -> list[Any]:
        # (order key, headers), or with the body.
        found: list[Any] = []
        body = f", q.{self._c['body']}" if bodies else ""
        for part in index_ranges_of(only):
            if len(found) < limit:
                # Index: the claim index, by hint: a part of it. Safe: LOOKING.
                sql = (
                    f"SELECT TOP (%s) q.{self._c['priority']}, {self._seq}, q.{self._c['headers']}{body} "
                    f"FROM {self._q} AS q WITH ({self._index}{LOOKING}) "
                    f"WHERE {self._in(part)} AND {self.free()} ORDER BY {self._order_of('q')}"
                )
                rows = fetch(connection, sql, (limit - len(found), *part.params))
                found += [(order_key(priority, seq), *rest) for priority, seq, *rest in rows]
        return found

    def scan_order_keys(
        self, connection: Any, low: int, high: int, before: int, limit: int
    ) -> tuple[list[int], int, int]:
        rank, before_seq = split_order_key(before)
        priority = f"q.{self._c['priority']}"
        # Index: the primary key, a bounded number of rows. Safe: LOOKING; rows that an open transaction has claimed are
        # skipped.
        sql = (
            f"SELECT TOP (%s) {self._seq}, {priority}, CASE WHEN ({priority} > %s OR ({priority} = %s AND {self._seq} "
            f"< %s)) AND {self.free()} THEN 1 ELSE 0 END FROM {self._q} AS q WITH ({LOOKING}) "
            f"WHERE {self._seq} BETWEEN %s AND %s ORDER BY {self._seq}"
        )
        rows = fetch(connection, sql, (min(limit, WINDOW_ROWS), ~rank, ~rank, before_seq, low, high))
        places = [order_key(priority, seq) for seq, priority, wanted in rows if wanted]
        return places, rows[-1][0] if rows else 0, len(rows)

    def claim(self, verb: str, setting: str, source: str, returned: Returned) -> Claim:
        seq = self._c["seq"]

        def of(part: IndexRange) -> str:
            # Index: the claim index, by hint, a part of it in its order; then the primary key, one seek a message.
            # Safe: as a claim by level (``SqlServerClaims.claim``): LOOKING skips unavailable rows, TAKING checks again
            # and locks TOP rows.
            found = (
                f"SELECT TOP (%s) t.{seq} FROM {self._q} AS s WITH ({self._index}{LOOKING}) "
                f"INNER LOOP JOIN {self._q} AS t WITH ({TAKING}) ON t.{seq} = s.{seq} "
                f"WHERE {self._in(part, 's')} AND {self.free('s')} AND {self.free('t')} ORDER BY {self._order_of('s')}"
            )
            return (
                f"{verb} q{setting} OUTPUT {returned.of(source)} FROM ({found}) AS m "
                f"INNER LOOP JOIN {self._q} AS q WITH (ROWLOCK) ON q.{seq} = m.{seq}"
            )

        # Index: the primary key, one seek a key (KEYS). Safe: TAKING, which skips locked rows; a bounded number of
        # keys.
        by_key = (
            f"{verb} q{setting} OUTPUT {returned.of(source)} {KEYS} {self._q} AS q WITH ({TAKING}) "
            f"ON {self._seq} = k.[key] WHERE {self.free()}"
        )
        return _Priority64Claim(of(IndexRange(False, 0, 0, 0)), of(IndexRange(True, 0, 0, 0)), by_key, returned)  # type: ignore[return-value]

    def take(
        self, connection: Any, claim: Any, values: tuple[Any, ...], ranges: Sequence[SeqRange], limit: int
    ) -> list[Claimed]:
        rows: list[Any] = []
        keys = [split_order_key(item.low)[1] for item in ranges if _is_single(item)][:limit]
        if keys:
            rows += fetch(connection, claim.by_key, (*values, json_of(keys)))
        for only in (item for item in ranges if not _is_single(item)):
            for part in index_ranges_of(only):
                if len(rows) < limit:
                    sql = claim.between if part.between else claim.of_one
                    rows += fetch(connection, sql, (*values, limit - len(rows), *part.params))
        return sorted(claim.returned.tuples(rows), key=self._order)

    def lock_heads(self, connection: Any, ranges: Sequence[SeqRange], limit: int, *, bodies: bool) -> list[Claimed]:
        left_out = () if bodies else ("headers", "body")
        names = self.table.claimed
        returned = Returned(self._c, [name for name in names if name not in left_out])
        found: list[Any] = []
        keys = [split_order_key(item.low)[1] for item in ranges if _is_single(item)][: min(limit, MAX_BATCH)]
        if keys:
            # Index and safety: as a claim by key, whose rows these are.
            sql = (
                f"SELECT {returned.of('q')} {KEYS} {self._q} AS q WITH ({TAKING}) ON {self._seq} = k.[key] "
                f"WHERE {self.free()}"
            )
            found += fetch(connection, sql, (json_of(keys),))
        for only in (item for item in ranges if not _is_single(item)):
            for part in index_ranges_of(only):
                if len(found) < min(limit, MAX_BATCH):
                    # Index and safety: as a claim, whose rows these are.
                    sql = (
                        f"SELECT TOP (%s) {returned.of('t')} FROM {self._q} AS s WITH ({self._index}{LOOKING}) "
                        f"INNER LOOP JOIN {self._q} AS t WITH ({TAKING}) ON t.{self._c['seq']} = s.{self._c['seq']} "
                        f"WHERE {self._in(part, 's')} AND {self.free('s')} AND {self.free('t')} "
                        f"ORDER BY {self._order_of('s')}"
                    )
                    found += fetch(connection, sql, (min(limit, MAX_BATCH) - len(found), *part.params))
        rows = returned.tuples(found)
        if not bodies:
            place = names.index("headers")  # the body follows it
            rows = [(*row[:place], None, None, *row[place:]) for row in rows]
        return sorted(rows, key=self._order)
