"""Taking messages on SQL Server: where to look, how to claim, and what is left alone.

A claim is an ordered ``TOP (n)`` in a CTE, updated or deleted with OUTPUT, one statement per range: T-SQL has no row
comparison, and one TOP over several ranges may be planned with a sort, which reads and locks all of them first.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from ..base import PRIORITY, WINDOW_ROWS, Claimed, Peek, QueueTable, Range
from .locking import KEYS, LOOKING, TAKING
from .rows import Returned
from .session import fetch, json_of, quote

_RANGES = (
    "OPENJSON(%s) WITH ([n] int '$[0]', [recipient] nvarchar(200) '$[1]', [priority] smallint '$[2]', "
    "[low] bigint '$[3]', [high] bigint '$[4]') AS l"
)
#: A bigint compared with the smallint column would be a range to the optimizer, no longer one level in order of seq.
_PARAMETERS = {"recipient": "%s", "priority": "CAST(%s AS smallint)", "low": "%s", "high": "%s"}
_OF_RANGES = {name: f"l.[{name}]" for name in _PARAMETERS}
#: How many more messages than asked for are looked up when some are to be left alone: others take some meanwhile.
_SPARE = 16

_BY_SEQ = itemgetter(0)


def _by_priority(row: Claimed) -> tuple[int, int]:
    return -row[PRIORITY], row[0]


def _numbered(ranges: Sequence[Range]) -> str:
    return json_of([(n, only.recipient, only.priority, only.low, only.high) for n, only in enumerate(ranges)])


class Claim(NamedTuple):
    """One way to take messages, of a range or by key, and what it returns. ``in_range`` takes the limit, the range and
    then the claim's own values; ``of_keys`` its own values and then the keys."""

    in_range: str
    of_keys: str
    returned: Returned


class Claims:
    """What can be taken from one table."""

    def __init__(self, table: QueueTable, quoted: str, columns: dict[str, str]) -> None:
        self._table, self._q, self._c = table, quoted, columns
        self._seq = f"q.{columns['seq']}"
        self._index = f"INDEX({quote(table.claim_index)}), " if table.claim_by and table.claim_index else ""
        self._order = _by_priority if "priority" in table.claim_by else _BY_SEQ

    # -- conditions -----------------------------------------------------------------------------------------------

    def unleased(self) -> str:
        """Nobody has a lease on it. Not indexed on purpose: the lease changes with every delivery."""
        if "lease_expires" not in self._c:
            return "1 = 1"
        return f"(q.{self._c['lease_expires']} IS NULL OR q.{self._c['lease_expires']} < SYSUTCDATETIME())"

    def _free(self) -> str:
        if "expires" not in self._c:
            return self.unleased()
        return f"{self.unleased()} AND (q.{self._c['expires']} IS NULL OR q.{self._c['expires']} > SYSUTCDATETIME())"

    def _within(self, value: dict[str, str]) -> str:
        parts = [f"q.{self._c[name]} = {value[name]}" for name in self._table.claim_by]
        return " AND ".join([*parts, f"{self._seq} BETWEEN {value['low']} AND {value['high']}"])

    # -- looking --------------------------------------------------------------------------------------------------

    def peek(
        self, connection: Any, ahead: Sequence[Range], behind: Sequence[Range], limit: int, skip: Sequence[int]
    ) -> Peek:
        """See ``QueueSql.peek``."""
        look, window = self._look(skip=bool(skip)), self._window(skip=bool(skip))
        # Index: as the claim. Safe: LOOKING; what an open transaction has deleted or leased is not available, what it
        # has only locked for a verdict (``lock``) still counts. One plan for any number of levels.
        sql = (
            "SELECT a.[n], b.[n], a.[first], b.[first], b.[reached] "
            f"FROM (SELECT COUNT(*) AS [n], MIN(x.[seq]) AS [first] FROM ({look}) AS x) AS a CROSS JOIN ({window}) AS b"
        )
        behind = behind or [Range(1, 0)]
        params = (*self._look_params(ahead, limit, skip), *self._window_params(behind, skip))
        n_ahead, n_behind, *firsts, reached = fetch(connection, sql, params)[0]
        first = min((first for first in firsts if first is not None), default=0)
        return Peek(n_ahead, min(n_behind or 0, limit), first, reached or 0)

    def _look(self, *, skip: bool, in_order: bool = False) -> str:
        """SELECT of the seqs that are there to be taken, at most TOP; all levels in claim order where asked for."""
        table = f"FROM {self._q} AS q WITH ({self._index}{LOOKING})"
        where = f"{self._free()} ORDER BY {self._seq}"
        if skip:
            where = f"{self._is_not_among('%s')} AND {where}"
        if not self._table.claim_by:
            return f"SELECT TOP (%s) {self._seq} AS [seq] {table} WHERE {self._within(_PARAMETERS)} AND {where}"
        return (
            f"SELECT TOP (%s) m.[seq] FROM {_RANGES} CROSS APPLY (SELECT TOP (%s) {self._seq} AS [seq] {table} "
            f"WHERE {self._within(_OF_RANGES)} AND {where}) AS m{' ORDER BY l.[n], m.[seq]' if in_order else ''}"
        )

    def _is_not_among(self, keys: str) -> str:
        """The condition that a message's seq is not in a JSON array of keys."""
        return f"NOT EXISTS (SELECT 1 FROM OPENJSON({keys}) WITH ([key] bigint '$') AS s WHERE s.[key] = {self._seq})"

    def _window(self, *, skip: bool) -> str:
        """(free rows, the first of them, where the look ended before the end of the window or NULL) of a rescan window. It
        looks at so many rows of a level, free or not: a window over a million leased ones must not take long."""
        where = self._within(_OF_RANGES)
        if skip:
            where += f" AND {self._is_not_among('c.[skip]')}"
        rows = (
            f"SELECT TOP ({WINDOW_ROWS}) {self._seq} AS [seq], CASE WHEN {self._free()} THEN {self._seq} END AS [free] "
            f"FROM {self._q} AS q WITH ({self._index}{LOOKING}) WHERE {where} ORDER BY {self._seq}"
        )
        skipped = "(SELECT %s AS [skip]) AS c CROSS JOIN " if skip else ""
        return (
            "SELECT SUM(m.[n]) AS [n], MIN(m.[first]) AS [first], MIN(m.[reached]) AS [reached] FROM "
            f"{skipped}{_RANGES} CROSS APPLY (SELECT COUNT(w.[free]) AS [n], MIN(w.[free]) AS [first], "
            f"CASE WHEN COUNT(*) = {WINDOW_ROWS} THEN MAX(w.[seq]) END AS [reached] FROM ({rows}) AS w) AS m"
        )

    def _window_params(self, ranges: Sequence[Range], skip: Sequence[int]) -> tuple[Any, ...]:
        return (json_of(list(skip)), _numbered(ranges)) if skip else (_numbered(ranges),)

    def _look_params(self, ranges: Sequence[Range], limit: int, skip: Sequence[int]) -> tuple[Any, ...]:
        skipped = (json_of(list(skip)),) if skip else ()
        if not self._table.claim_by:
            return limit, ranges[0].low, ranges[0].high, *skipped
        return limit, _numbered(ranges), limit, *skipped

    def _occupied(self, connection: Any, ranges: Sequence[Range]) -> list[Range]:
        """The ranges that hold something to take, so that empty levels cost one round trip and not one each."""
        # Index: the claim index, one seek a level. Safe: LOOKING; what is taken in between is merely not found.
        sql = (
            f"SELECT l.[n] FROM {_RANGES} WHERE EXISTS (SELECT 1 FROM {self._q} AS q WITH ({self._index}{LOOKING}) "
            f"WHERE {self._within(_OF_RANGES)} AND {self._free()}) ORDER BY l.[n]"
        )
        return [ranges[n] for (n,) in fetch(connection, sql, (_numbered(ranges),))]

    # -- taking ---------------------------------------------------------------------------------------------------

    def claim(self, verb: str, setting: str, source: str, returned: Returned) -> Claim:
        """The texts of a claim that updates or deletes what it takes."""
        output = f"OUTPUT {returned.of(source)}"
        into = "DELETE FROM m" if verb == "DELETE" else f"{verb} m"
        columns = ", ".join(f"q.{column}" for column in self._c.values())
        # Index: the primary key; on a queue with recipients or levels the claim index, by hint, because equality on its
        # first columns makes ORDER BY look free and the clustered key look cheap. Safe: TAKING; TOP rows, no more.
        in_range = (
            f"WITH m AS (SELECT TOP (%s) {columns} FROM {self._q} AS q WITH ({self._index}{TAKING}) "
            f"WHERE {self._within(_PARAMETERS)} AND {self._free()} ORDER BY {self._seq}) {into}{setting} {output}"
        )
        # Index: the primary key, one seek a key (KEYS). Safe: TAKING, and nothing but the rows named is locked.
        of_keys = (
            f"{verb} q{setting} {output} {KEYS} {self._q} AS q WITH ({TAKING}) ON {self._seq} = k.[key] "
            f"WHERE {self._free()}"
        )
        return Claim(in_range, of_keys, returned)

    def take(
        self,
        connection: Any,
        claim: Claim,
        values: tuple[Any, ...],
        ranges: Sequence[Range],
        limit: int,
        skip: Sequence[int],
    ) -> list[Claimed]:
        """Take at most ``limit`` messages of the ranges, in claim order."""
        rows: list[Any] = []
        if skip:
            # What must be left alone is not even locked: a TRANSACTIONAL claim would keep it from whoever does want it
            # for as long as its handler runs. So: look without locks, then take by key what is still there.
            look, params = self._look(skip=True, in_order=True), self._look_params(ranges, 2 * limit + _SPARE, skip)
            found = [seq for (seq,) in fetch(connection, look, params)]
            while found and len(rows) < limit:
                keys = found[: limit - len(rows)]
                del found[: len(keys)]
                rows += fetch(connection, claim.of_keys, (*values, json_of(keys)))
        else:
            first, *rest = ranges if self._table.claim_by else ranges[:1]
            rows += self._take_range(connection, claim, values, first, limit)
            if len(rows) < limit and len(rest) > 1:
                rest = self._occupied(connection, rest)
            for only in rest:
                if len(rows) == limit:
                    break
                rows += self._take_range(connection, claim, values, only, limit - len(rows))
        taken = claim.returned.tuples(rows)
        if len(taken) > 1:
            taken.sort(key=self._order)  # OUTPUT has no order of its own
        return taken

    def _take_range(self, connection: Any, claim: Claim, values: tuple[Any, ...], only: Range, limit: int) -> list[Any]:
        level = (getattr(only, name) for name in self._table.claim_by)
        return fetch(connection, claim.in_range, (limit, *level, only.low, only.high, *values))
