"""A search through any number of tables of any size, in slices: one response looks at as much as a fraction of a second
and a few statements allow, and says where the next one goes on.

    tables --two statements--> those that have rows --one statement, a few rows of each--> complete, or begun
    table begun --one statement, as many rows as 0.1 s allow--> begun, until it is complete

A slice that the database does not finish in time is tried again with fewer rows, by the next response; a table of which
not even a few rows can be read is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, NamedTuple

from django.db import Error, connections

from ...operations.safe_reads import Reader
from ...sql import ErrorKind, backend_of
from ...sql.orm import Scan, rows_in, scan
from .content_search import ContentSearch, Looked, SearchedTable

#: Statements of one response, without those of the session, of the user and of the first transaction; those that
#: another transaction takes.
STATEMENTS, ENTERING = 7, 4
#: No statement begins later, and each is cancelled after this long (on SQL Server by the driver's query_timeout); the
#: duration that slices are made for. So a response ends within half a second.
BEGIN_SECONDS, STATEMENT_MS, TARGET_SECONDS = 0.25, 250, 0.1
#: Rows of the first statement, of any, and of the last attempt at a table.
FIRST_SIZE, MAX_SIZE, MIN_SIZE = 20_000, 500_000, 16
#: Tables of one statement, the rows of each at least, and for how many rows of a statement one table is looked up.
TABLES, FEW, PER_TABLE = 40, 100, 20
#: Rows that one statement fetches to be compared.
BATCH = 2_000
#: Milliseconds to wait for a lock.
WAIT_MS = 100
#: Matches of a table after which a response leaves it.
ENOUGH = 20


@dataclass(frozen=True)
class Position:
    """Where a search goes on. ``table``: its number; ``after``: the last key of it that was compared, None: it is not
    begun; ``size``: rows of the next statement; ``rows``: looked at in all; ``closed``: bodies of this table that were
    not searched."""

    table: int = 0
    after: int | None = None
    size: int = FIRST_SIZE
    rows: int = 0
    closed: int = 0


class Part(NamedTuple):
    """What one response found in a table. ``rows``: the first that match; ``more``: whether others may match, so that
    the search left the table; ``closed``: bodies of the whole table that were not searched; ``cause``: why it was not
    read (to its end)."""

    table: int
    rows: list[Any]
    more: bool = False
    closed: int = 0
    cause: str = ""


@dataclass
class Budget:
    """What is left for a response. ``has_advanced``: whether the search has come any further; before that no time
    ends it, so that it comes to an end on a machine of any speed."""

    ends_at: float
    statements: int
    has_advanced: bool = False

    def has(self, statements: int) -> bool:
        """Whether there is time and are so many statements."""
        return self.statements >= statements and (monotonic() < self.ends_at or not self.has_advanced)

    def take(self, statements: int = 1) -> None:
        """Use so many statements."""
        self.statements -= statements


@dataclass(frozen=True)
class Rows:
    """The rows of a model in one database, to be searched. ``rows``: their queryset; ``fetch``: what is shown of the
    rows with these keys, by one statement."""

    model: Any
    alias: str
    rows: Callable[[], Any]
    descending: bool
    fetch: Callable[[Sequence[int]], list[Any]]


@dataclass
class SlicedSearch:
    """One response. ``tables``: those of a database follow each other. ``position``: where it begins, then where the
    next one goes on."""

    search: ContentSearch
    tables: Sequence[Rows]
    position: Position
    parts: list[Part] = field(default_factory=list)
    #: Which tables have rows, as far as it was looked up; None: the catalog does not have the table.
    _has_rows: dict[int, bool | None] = field(default_factory=dict)
    _is_looking_up: bool = False
    _budget: Budget = field(init=False)

    def run(self) -> None:
        """Look at as much as the budget allows."""
        # The first transaction is not counted.
        self._budget = Budget(monotonic() + BEGIN_SECONDS, STATEMENTS + ENTERING)
        while not self.is_over and self._budget.has(1 + ENTERING):
            self._budget.take(ENTERING)
            self._run_in(self.tables[self.position.table].alias)

    @property
    def is_over(self) -> bool:
        """Whether all tables were looked at."""
        return self.position.table >= len(self.tables)

    def _run_in(self, alias: str) -> None:
        """Look at the tables of one database in one transaction, until an error ends it."""
        reader, connection = Reader(alias, WAIT_MS), connections[alias]
        kinds: list[ErrorKind] = []

        def read() -> bool:
            try:
                with backend_of(connection).sessions.statement_timeout(connection, STATEMENT_MS):
                    while not self.is_over and self.tables[self.position.table].alias == alias and self._budget.has(1):
                        self._step(connection)
            except Error as error:
                kinds.append(backend_of(connection).error_kind(error))
                raise
            return True

        done, cause = reader.read(read)
        if done is None:
            self._fail(alias, cause, is_lost=bool(reader.lost), is_slow=kinds == [ErrorKind.EXHAUSTED])

    def _step(self, connection: Any) -> None:
        """One statement that scans, and those that read what may match."""
        if self.position.after is None and self.position.size >= 2 * FEW and self.position.table not in self._has_rows:
            self._look_up(connection)
            if not self._budget.has(1):
                return
        if self._has_rows.get(self.position.table) is False:
            self._leave()
            return
        numbers = self._next_tables()
        tables = {number: self._table(number) for number in numbers if self._has_rows.get(number) is not False}
        scanned = {number: table for number, table in tables.items() if table.can_match}
        limit, began = max(1, self.position.size // max(1, len(scanned))), monotonic()
        parts: dict[int, Scan] = {}
        if scanned:
            self._budget.take()
            slices = [
                table.slice(self.position.after if number == self.position.table else None, limit)
                for number, table in scanned.items()
            ]
            parts = dict(zip(scanned, scan(connection, slices), strict=True))
            self._adapt(sum(part.rows for part in parts.values()), monotonic() - began)
        for number in numbers:
            if number in parts and not self._compare(number, tables[number], parts[number], limit):
                return
            self._leave()

    def _look_up(self, connection: Any) -> None:
        """Ask which of the next tables of the database have rows: most of many have none."""
        first = self.position.table
        alias, end = self.tables[first].alias, min(len(self.tables), first + self.position.size // PER_TABLE)
        numbers = [number for number in range(first, end) if self.tables[number].alias == alias]
        self._budget.take(2)
        self._is_looking_up = True
        names = [self.tables[number].model._meta.db_table for number in numbers]
        self._has_rows |= dict(zip(numbers, rows_in(connection, names), strict=True))
        self._is_looking_up = False

    def _next_tables(self) -> list[int]:
        """A table that is begun alone, or several that follow each other, of which a statement can read a few rows
        each. One that the catalog does not have is read alone, as it may fail."""
        first = self.position.table
        if self.position.after is not None or not self._has_rows.get(first):
            return [first]
        numbers, count = [], max(1, min(TABLES, self.position.size // FEW))
        while count and (has_rows := self._has_rows.get(first)) is not None:
            numbers.append(first)
            count -= has_rows
            first += 1
        return numbers

    def _table(self, number: int) -> SearchedTable:
        table = self.tables[number]
        return self.search.table(table.rows(), table.descending)

    def _compare(self, number: int, table: SearchedTable, part: Scan, limit: int) -> bool:
        """Read the candidates of a slice; returns whether the table is done with."""
        found = Looked(closed=self.position.closed)

        def may_continue() -> bool:
            if len(found.keys) > ENOUGH or not self._budget.has(2):  # the second one fetches what is shown
                return False
            self._budget.take()
            return True

        end = table.compare(part, found, max(1, min(BATCH, self.position.size)), may_continue)
        rows = self.tables[number].fetch(found.keys[:ENOUGH]) if found.keys else []
        if found.keys:
            self._budget.take()
        is_at_end, more = end == table.end_of(part), len(found.keys) > ENOUGH
        looked_at = part.rows if is_at_end else found.rows
        self.position = replace(self.position, rows=self.position.rows + looked_at, closed=found.closed)
        if rows:
            self.parts.append(Part(number, rows, more))
        if more or (is_at_end and part.rows < limit):
            return True
        if not is_at_end:  # most rows have to be fetched: a longer slice would only be scanned again
            self.position = replace(self.position, size=min(FIRST_SIZE, self.position.size))
        if end is not None:
            self.position = replace(self.position, after=end)
            self._budget.has_advanced = True
        return False

    def _leave(self, cause: str = "") -> None:
        """Go on with the next table."""
        position = self.position
        if position.closed or cause:
            self.parts.append(Part(position.table, [], closed=position.closed, cause=cause))
        self.position = replace(position, table=position.table + 1, after=None, closed=0)
        self._budget.has_advanced = True

    def _adapt(self, rows: int, seconds: float) -> None:
        """Choose the rows of the next statement by the time that this one took."""
        size = self.position.size
        if rows >= size // 2 or size < FIRST_SIZE or seconds > TARGET_SECONDS:
            factor = min(4.0, max(0.25, TARGET_SECONDS / max(seconds, 0.001)))
            self.position = replace(self.position, size=int(min(MAX_SIZE, max(MIN_SIZE, size * factor))))

    def _fail(self, alias: str, cause: str, *, is_lost: bool, is_slow: bool) -> None:
        """Go on with fewer rows, with one table, or without this table or its whole database."""
        position, several = self.position, self._is_looking_up or len(self._next_tables()) > 1
        self._is_looking_up = False
        if is_lost:
            while not self.is_over and self.tables[self.position.table].alias == alias:
                self._leave(cause)
        elif is_slow and (several or position.size // 8 >= MIN_SIZE):
            self.position = replace(position, size=max(MIN_SIZE, position.size // 8))
        elif several:
            self.position = replace(position, size=2 * FEW - 1)
        else:
            self._leave(cause)
            self.position = replace(self.position, size=FIRST_SIZE)
