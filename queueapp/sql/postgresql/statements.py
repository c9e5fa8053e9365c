"""What the statements of all subjects share: quoted names, and the columns and conditions of a queue's table as SQL
text (what is read, what is written, and the substitute for a column that the table lacks). The one place where times of
a column without time zone are converted.

A foreign table lacks some columns, keeps ``expires`` as UTC without a zone, and may hold ``infinity`` or a year that
Python cannot represent, which would fail every row fetched with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import psycopg

from ...errors import TableNotFound
from ...messages.ids import as_uuid
from ...registry import queues
from ..claims import FOREVER, PRIORITY, Claimed
from ..message_columns import BY_NAME, FIRST_TIME, LAST_TIME, Kind, MessageColumn, Row
from ..tables import QueueTable, Terms
from .raw.plan_guard import PlanGuard

_FIRST, _LAST = f"'{FIRST_TIME.isoformat()}'::timestamptz", f"'{LAST_TIME.isoformat()}'::timestamptz"
_ABSENT_COUNTS = {"deliveries": "0", "cancels": "0", "failures": "NULL::text"}
#: As types of casts and of staging tables.
TYPES = {
    Kind.TEXT: "text",
    Kind.INT16: "smallint",
    Kind.INT64: "bigint",
    Kind.BOOL: "boolean",
    Kind.TIME: "timestamptz",
}


def to_utc(table: QueueTable, name: str, time: str) -> str:
    """A ``timestamptz`` as this column stores it, independent of the session's time zone: assigned directly, a time
    would become that zone's wall time in a column without one."""
    return f"({time} AT TIME ZONE 'UTC')" if name == "expires" and table.naive_expires else time


def read(table: QueueTable, columns: dict[str, str], name: str) -> str:
    """An attribute in a select list or RETURNING, or a substitute where the table lacks it."""
    definition = BY_NAME.get(name)
    if name not in columns:
        return _ABSENT_COUNTS[name] if definition is None else _absent(definition)
    if definition is None or definition.kind is not Kind.TIME:
        return columns[name]
    column = to_utc(table, name, columns[name])  # the same conversion in both directions
    # infinity reads as never.
    absent = _absent(definition)
    return f"CASE WHEN {column} < {_FIRST} THEN {_FIRST} WHEN {column} > {_LAST} THEN {absent} ELSE {column} END"


def _absent(column: MessageColumn) -> str:
    if column.kind is Kind.TIME and not column.sent:
        return "clock_timestamp()"
    return f"{literal(column.default)}::{TYPES[column.kind]}"


LITERALS: dict[bool | None, str] = {None: "NULL", True: "true", False: "false"}


def literal(value: Any) -> str:
    """A value of a declaration in the text of a statement; never user input."""
    if value is None or isinstance(value, bool):
        return LITERALS[value]
    return str(value) if isinstance(value, int) else "'" + str(value).replace("'", "''").replace("%", "%%") + "'"


def unevaluated(columns: dict[str, str]) -> str:
    """The condition of a message that is pending evaluation: literally that of the partial index, or the planner would
    not match them."""
    return f"({columns['lease_expires']} = '{FOREVER.isoformat()}'::timestamptz AND {columns['lease_token']} IS NULL)"


def mostly(condition: str) -> str:
    """A condition that the planner estimates to be true for nearly every row."""
    return f"(CASE WHEN {condition} THEN 1 END) IS NOT NULL"


_BY_SEQ = itemgetter(0)


def _by_priority(row: Claimed) -> tuple[int, int]:
    return -row[PRIORITY], row[0]


class TableText:
    """The names and conditions of one queue's table, written once and shared by the objects of all subjects."""

    def __init__(self, table: QueueTable) -> None:
        self.table = table
        self.name = quote_table(table.db_table)
        self.columns = {name: quote(column) for name, column in table.columns.items()}
        #: Statements take their order from an index; see ``plan_guard``.
        self.guard = PlanGuard()
        # The clock is converted to the column's UTC wall time, never the stored time to a zone.
        self.clock = to_utc(table, "expires", "clock_timestamp()")
        self.free = self._build_free()
        #: The claim order of rows.
        self.order = _by_priority if table.priority64 or "priority" in table.claim_by else _BY_SEQ
        #: The token fences: a condition with one parameter, of a row that is found by its key.
        self.fenced = f"{self.columns['lease_token']} = %s" if table.has("lease_token") else ""
        if table.lease_index is not None or table.is_ordered or table.max_per_key:
            # "= token" alone implies "is not null", which is the predicate of the index on leased rows: the planner
            # would scan all leases and compare each with each key of the array, where one seek a key suffices.
            self.fenced = f"({self.fenced}) IS TRUE"
        #: A further condition of a lease that is extended: where leases are counted, the slot of an expired one may be
        #: reassigned.
        self.alive = f" AND {self.columns['lease_expires']} >= clock_timestamp()" if table.counts_in_flight else ""
        self.filled = {name: LITERALS[value] for name, value in table.filled.items()}

    def _build_free(self) -> str:
        """Neither leased nor expired. Not indexed on purpose: an unindexed lease keeps the updates HOT."""
        # The time of the statement, not of each row: a claim does not wait, and reading the clock per row is a tenth of
        # a scan over a million rows that are not available.
        now = "statement_timestamp()"
        parts = []
        if self.table.has("lease_expires"):
            parts.append("({0} IS NULL OR {0} < {1})".format(self.columns["lease_expires"], now))
        if self.table.expiry is not None:
            parts += filter(None, [self.table.expiry.alive(self.expiry_terms(now))])
        elif self.table.has("expires"):
            parts.append(
                "({0} IS NULL OR {0} > {1})".format(self.columns["expires"], to_utc(self.table, "expires", now))
            )
        return mostly(" AND ".join(parts)) if parts else "true"

    def expiry_terms(self, now: str) -> Terms:
        after = self.table.expiry.after_ms if self.table.expiry is not None else None
        return Terms(
            self.columns["expires"], self.columns["enqueued_at"], now, f"{now} - {after or 0} * interval '1 ms'"
        )


class Statements:
    """Base of one subject's statements of one queue."""

    def __init__(self, text: TableText) -> None:
        self.table = text.table
        self._q, self._c = text.name, text.columns
        self._clock, self._free, self._fenced, self._alive = text.clock, text.free, text.fenced, text.alive
        self._filled, self._order, self._guard = text.filled, text.order, text.guard
        self._expiry_terms = text.expiry_terms

    def _read(self, names: Sequence[str]) -> str:
        """These attributes as the list of a SELECT or RETURNING."""
        return ", ".join(read(self.table, self._c, name) for name in names)

    def _rows_of(self, found: Iterable[Any]) -> list[Row]:
        """Rows read as ``Row._fields``, in queue order."""
        return sorted((Row(*row)._replace(id=as_uuid(row[1])) for row in found), key=_BY_SEQ)

    def _unleased(self) -> str:
        """The assignments that end a lease."""
        c = self._c
        return f"{c['lease_token']} = NULL, {c['lease_owner']} = NULL, {c['lease_expires']} = NULL"


def quote(name: str) -> str:
    """An identifier, quoted for PostgreSQL, with ``%`` doubled because statements are also format strings."""
    return '"' + name.replace('"', '""').replace("%", "%%") + '"'


def quote_table(name: str) -> str:
    """A table name. ``schema"."table`` is Django's idiom for a schema-qualified one and is kept as it is."""
    return f'"{name}"'.replace("%", "%%") if '"."' in name else quote(name)


@contextmanager
def translated(connection: Any, table: str) -> Iterator[None]:
    """Turn "relation does not exist" into TableNotFound with the table's name."""
    try:
        yield
    except Exception as error:
        if isinstance(error.__cause__, psycopg.errors.UndefinedTable):
            raise TableNotFound(table, connection.alias, foreign=queues.is_foreign(table)) from error
        raise
