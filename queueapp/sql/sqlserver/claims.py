"""Taking messages on SQL Server: where to look, how to claim, and what is left alone.

A claim is an ordered ``TOP (n)``, updated or deleted with OUTPUT, one statement per range: T-SQL has no row
comparison, and one TOP over several ranges may be planned with a sort, which reads and locks all of them first. In the order
of the table it takes what it finds; by the claim index it looks, and takes by key.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from ..claims import PRIORITY, WINDOW_ROWS, Claimed, PeekResult, SeqRange
from ..tables import QueueTable, Terms
from .locking import KEYS, LOOKING, MAX_BATCH, TAKING
from .rows import Returned
from .session import fetch, json_of, quote

_RANGES = (
    "OPENJSON(%s) WITH ([n] int '$[0]', [recipient] nvarchar(200) '$[1]', [priority] smallint '$[2]', "
    "[low] bigint '$[3]', [high] bigint '$[4]') AS l"
)
_SIDES = "OPENJSON(%s) WITH ([n] int '$[0]', [recipient] nvarchar(200) '$[1]', [low] smallint '$[2]', [high] smallint '$[3]') AS l"
#: A bigint compared with the smallint column would be a range to the optimizer, no longer one level in order of seq.
_PARAMETERS = {"recipient": "%s", "priority": "CAST(%s AS smallint)", "low": "%s", "high": "%s"}
_OF_RANGES = {name: f"l.[{name}]" for name in _PARAMETERS}
_BY_SEQ = itemgetter(0)
_DAY_MS = 86_400_000


def _by_priority(row: Claimed) -> tuple[int, int]:
    return -row[PRIORITY], row[0]


def _numbered(ranges: Sequence[SeqRange]) -> str:
    return json_of([(n, only.recipient, only.priority, only.low, only.high) for n, only in enumerate(ranges)])


class Claim(NamedTuple):
    """One way to take messages of a range, and what it returns. ``in_range`` takes the limit and the range, and after them the
    claim's own values, or before them (``values_first``)."""

    in_range: str
    returned: Returned
    values_first: bool


class Claims:
    """What can be taken from one table."""

    def __init__(self, table: QueueTable, quoted: str, columns: dict[str, str]) -> None:
        self._table, self._q, self._c = table, quoted, columns
        self._seq = f"q.{columns['seq']}"
        indexed = table.claim_by or table.priority64
        self._index = f"INDEX({quote(table.claim_index)}), " if indexed and table.claim_index else ""
        self.order = _by_priority if table.priority64 or "priority" in table.claim_by else _BY_SEQ

    # -- conditions -----------------------------------------------------------------------------------------------

    def unleased(self, row: str = "q") -> str:
        """Nobody has a lease on it. Not indexed on purpose: the lease changes with every delivery."""
        if "lease_expires" not in self._c:
            return "1 = 1"
        lease = f"{row}.{self._c['lease_expires']}"
        return f"({lease} IS NULL OR {lease} < SYSUTCDATETIME())"

    def free(self, row: str = "q") -> str:
        """Anybody may take it: neither leased nor expired."""
        if self._table.expiry is not None:
            alive = self._table.expiry.alive(self.expiry_terms(row))
            return " AND ".join(filter(None, (self.unleased(row), alive)))
        if "expires" not in self._c:
            return self.unleased(row)
        expires = f"{row}.{self._c['expires']}"
        return f"{self.unleased(row)} AND ({expires} IS NULL OR {expires} > SYSUTCDATETIME())"

    def expiry_terms(self, row: str = "q") -> Terms:
        """The parts of the condition under which a message expires by its age."""
        after = self._table.expiry.after_ms if self._table.expiry is not None else None
        # DATEADD takes an int, and the milliseconds of 25 days are none.
        days, rest = divmod(after or 0, _DAY_MS)
        cut = f"DATEADD(millisecond, -{rest}, DATEADD(day, -{days}, SYSUTCDATETIME()))"
        return Terms(f"{row}.{self._c['expires']}", f"{row}.{self._c['enqueued_at']}", "SYSUTCDATETIME()", cut)

    def _within(self, value: dict[str, str], row: str = "q") -> str:
        parts = [f"{row}.{self._c[name]} = {value[name]}" for name in self._table.claim_by]
        return " AND ".join([*parts, f"{row}.{self._c['seq']} BETWEEN {value['low']} AND {value['high']}"])

    # -- looking --------------------------------------------------------------------------------------------------

    def peek(self, connection: Any, ahead: Sequence[SeqRange], behind: Sequence[SeqRange], limit: int) -> PeekResult:
        """See ``QueueSql.claims.peek``."""
        ahead, behind = ahead or [SeqRange(1, 0)], behind or [SeqRange(1, 0)]
        look, window = self._look(several=self._several(ahead)), self._window()
        # Index: as the claim. Safe: LOOKING; what an open transaction has deleted or leased is not available, what it
        # has only locked for a verdict (``lock``) still counts. One plan for any number of levels.
        sql = (
            "SELECT a.[n], b.[n], a.[first], b.[first], b.[reached] "
            f"FROM (SELECT COUNT(*) AS [n], MIN(x.[seq]) AS [first] FROM ({look}) AS x) AS a CROSS JOIN ({window}) AS b"
        )
        params = (*self._look_params(ahead, limit), _numbered(behind))
        n_ahead, n_behind, *firsts, reached = fetch(connection, sql, params)[0]
        first = min((first for first in firsts if first is not None), default=0)
        return PeekResult(n_ahead, min(n_behind or 0, limit), first, reached or 0)

    def look_through(self, connection: Any, low: int, high: int, before: int, limit: int) -> tuple[list[int], int, int]:
        """See ``QueueSql.claims.scan_order_keys``."""
        raise NotImplementedError

    def read_heads(self, connection: Any, only: SeqRange, limit: int, *, bodies: bool = False) -> list[Any]:
        """See ``QueueSql.claims.read_heads`` and ``read_heads_and_bodies``."""
        rest = f", q.{self._c['body']}" if bodies else ""
        # Index: as the claim. Safe: LOOKING.
        sql = (
            f"SELECT TOP (%s) {self._seq}, q.{self._c['headers']}{rest} FROM {self._q} AS q WITH ({self._index}{LOOKING}) "
            f"WHERE {self._within(_PARAMETERS)} AND {self.free()} ORDER BY {self._seq}"
        )
        level = (getattr(only, name) for name in self._table.claim_by)
        return [tuple(row) for row in fetch(connection, sql, (limit, *level, only.low, only.high))]

    def _several(self, ranges: Sequence[SeqRange]) -> bool:
        return bool(self._table.claim_by) or len(ranges) > 1

    def _look(self, *, several: bool) -> str:
        """SELECT of the seqs that are there to be taken, at most TOP."""
        table = f"FROM {self._q} AS q WITH ({self._index}{LOOKING})"
        where = f"{self.free()} ORDER BY {self._seq}"
        if not several:
            return f"SELECT TOP (%s) {self._seq} AS [seq] {table} WHERE {self._within(_PARAMETERS)} AND {where}"
        return (
            f"SELECT TOP (%s) m.[seq] FROM {_RANGES} CROSS APPLY (SELECT TOP (%s) {self._seq} AS [seq] {table} "
            f"WHERE {self._within(_OF_RANGES)} AND {where}) AS m"
        )

    def _window(self) -> str:
        """(free rows, the first of them, where the look ended before the end of the window or NULL) of a rescan window. It
        looks at so many rows of a level, free or not: a window over a million leased ones must not take long."""
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
        if not self._several(ranges):
            return limit, ranges[0].low, ranges[0].high
        return limit, _numbered(ranges), limit

    def _occupied(self, connection: Any, ranges: Sequence[SeqRange]) -> list[SeqRange]:
        """The ranges that hold something to take, so that empty levels cost one round trip and not one each."""
        # Index: the claim index, one seek a level. Safe: LOOKING; what is taken in between is merely not found.
        sql = (
            f"SELECT l.[n] FROM {_RANGES} WHERE EXISTS (SELECT 1 FROM {self._q} AS q WITH ({self._index}{LOOKING}) "
            f"WHERE {self._within(_OF_RANGES)} AND {self.free()}) ORDER BY l.[n]"
        )
        return [ranges[n] for (n,) in fetch(connection, sql, (_numbered(ranges),))]

    # -- taking ---------------------------------------------------------------------------------------------------

    def claim(self, verb: str, setting: str, source: str, returned: Returned) -> Claim:
        """The texts of a claim that updates or deletes what it takes."""
        output = f"OUTPUT {returned.of(source)}"
        if self._index:
            seq = self._c["seq"]
            # Index: the claim index, by hint, because equality on its first columns makes ORDER BY look free and the clustered
            # key look cheap; then the primary key, one seek a message (the loop joins, which keep that order). Safe: what is
            # leased or expired is passed by under LOOKING, so that no lock of it adds up to an escalation; TAKING, asking
            # again, locks one that was found at once and before the next is looked for, and TOP counts those it got.
            found = (
                f"SELECT TOP (%s) t.{seq} FROM {self._q} AS s WITH ({self._index}{LOOKING}) "
                f"INNER LOOP JOIN {self._q} AS t WITH ({TAKING}) ON t.{seq} = s.{seq} "
                f"WHERE {self._within(_PARAMETERS, 's')} AND {self.free('s')} AND {self.free('t')} ORDER BY s.{seq}"
            )
            in_range = (
                f"{verb} q{setting} {output} FROM ({found}) AS m "
                f"INNER LOOP JOIN {self._q} AS q WITH (ROWLOCK) ON q.{seq} = m.{seq}"
            )
            return Claim(in_range, returned, values_first=True)
        into = "DELETE FROM m" if verb == "DELETE" else f"{verb} m"
        columns = ", ".join(f"q.{column}" for column in self._c.values())
        # Index: the primary key. Safe: TAKING, which gives back at once what the scan itself finds not to be free; TOP
        # rows, no more.
        in_range = (
            f"WITH m AS (SELECT TOP (%s) {columns} FROM {self._q} AS q WITH ({TAKING}) "
            f"WHERE {self._within(_PARAMETERS)} AND {self.free()} ORDER BY {self._seq}) {into}{setting} {output}"
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
            taken.sort(key=self.order)  # OUTPUT has no order of its own
        return taken

    def _take_range(
        self, connection: Any, claim: Claim, values: tuple[Any, ...], only: SeqRange, limit: int
    ) -> list[Any]:
        level = (getattr(only, name) for name in self._table.claim_by)
        of_range = (limit, *level, only.low, only.high)
        params = (*values, *of_range) if claim.values_first else (*of_range, *values)
        return fetch(connection, claim.in_range, params)

    def lock(self, connection: Any, ranges: Sequence[SeqRange], limit: int, *, bodies: bool) -> list[Claimed]:
        """Lock the lowest free messages of the ranges until the transaction ends, in claim order; without headers and bodies
        where they are not asked for."""
        left_out = () if bodies else ("headers", "body")
        names = self._table.claimed
        returned = Returned(self._c, [name for name in names if name not in left_out])
        # Index and safety: as a claim, whose rows these are.
        sql = (
            f"SELECT TOP (%s) {returned.of('t')} FROM {self._q} AS s WITH ({self._index}{LOOKING}) "
            f"INNER LOOP JOIN {self._q} AS t WITH ({TAKING}) ON t.{self._c['seq']} = s.{self._c['seq']} "
            f"WHERE {self._within(_PARAMETERS, 's')} AND {self.free('s')} AND {self.free('t')} ORDER BY s.{self._c['seq']}"
        )
        found: list[Any] = []
        for only in ranges:
            left = min(limit, MAX_BATCH) - len(found)
            if left <= 0:
                break
            level = (getattr(only, name) for name in self._table.claim_by)
            found += fetch(connection, sql, (left, *level, only.low, only.high))
        rows = returned.tuples(found)
        if not bodies:
            place = names.index("headers")  # the body follows it
            rows = [(*row[:place], None, None, *row[place:]) for row in rows]
        return sorted(rows, key=self.order)

    # -- what no claim finds ------------------------------------------------------------------------------------------

    def clamp(self, connection: Any, recipients: Sequence[str], limit: int) -> dict[int, int]:
        """See ``QueueSql.maintenance.clamp_priorities``."""
        highest = self._table.levels - 1
        if highest < 0:
            return {}
        priority = self._c["priority"]
        addressed = "recipient" in self._table.claim_by
        wanted = recipients if addressed else [""]
        sides = [(name, *side) for side in ((highest + 1, 2**15 - 1, highest), (-(2**15), -1, 0)) for name in wanted]
        named = f"q.{self._c['recipient']} = %s AND " if addressed else ""
        # Index: the claim index, by hint, one seek a side: nothing lies there as a rule. Safe: LOOKING; it is only a hint.
        sql = (
            f"SELECT l.[n] FROM {_SIDES} WHERE EXISTS (SELECT 1 FROM {self._q} AS q WITH ({self._index}{LOOKING}) "
            f"WHERE {named.replace('%s', 'l.[recipient]')}q.{priority} BETWEEN l.[low] AND l.[high] AND {self.free()}) "
            "ORDER BY l.[n]"
        )
        told = json_of([(n, name, low, high) for n, (name, low, high, _) in enumerate(sides)])
        moved: dict[int, int] = {}
        left = min(limit, MAX_BATCH)
        for (n,) in fetch(connection, sql, (told,)):
            name, low, high, nearest = sides[n]
            if left <= 0:
                break
            side = f"{named}q.{priority} BETWEEN CAST(%s AS smallint) AND CAST(%s AS smallint) AND {self.free()}"
            of_side = (*([name] if addressed else []), low, high)
            # Index: the same. Safe: LOOKING, so that what is not free on the way is not locked.
            sql = (
                f"SELECT TOP (%s) {self._seq} FROM {self._q} AS q WITH ({self._index}{LOOKING}) "
                f"WHERE {side} ORDER BY q.{priority}, {self._seq}"
            )
            keys = [seq for (seq,) in fetch(connection, sql, (left, *of_side))]
            # Index: the primary key, one seek a key (KEYS). Safe: TAKING, asking again; what it takes was free and stays so,
            # in its old place.
            sql = (
                f"UPDATE q SET {priority} = CAST(%s AS smallint) OUTPUT deleted.{priority} "
                f"{KEYS} {self._q} AS q WITH ({TAKING}) ON {self._seq} = k.[key] WHERE {side}"
            )
            for (was,) in fetch(connection, sql, (nearest, json_of(keys), *of_side)) if keys else ():
                moved[was] = moved.get(was, 0) + 1
                left -= 1
        return moved
