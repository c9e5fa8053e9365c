"""Attributes of a message as columns of a statement: what is read, what is written, and what stands for a column that is
not there. The one place where times of a column without time zone are converted.

A foreign table lacks some columns, keeps ``expires`` as UTC without a zone, and anybody may have written
``infinity`` there or a year that Python does not know: that would fail every row fetched with it.
"""

from __future__ import annotations

from typing import Any

from ..message_columns import BY_NAME, FIRST_TIME, LAST_TIME, Kind, MessageColumn
from ..tables import QueueTable

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
    """A ``timestamptz`` as this column stores it. The session's time zone takes no part: assigned as it is, a time would
    become that zone's wall time in a column without one."""
    return f"({time} AT TIME ZONE 'UTC')" if name == "expires" and table.naive_expires else time


def read(table: QueueTable, columns: dict[str, str], name: str) -> str:
    """An attribute in a select list or RETURNING, whatever the table has of it."""
    one = BY_NAME.get(name)
    if name not in columns:
        return _ABSENT_COUNTS[name] if one is None else _absent(one)
    if one is None or one.kind is not Kind.TIME:
        return columns[name]
    column = to_utc(table, name, columns[name])  # the same conversion in both directions
    # infinity reads as never, which is what it means.
    return f"CASE WHEN {column} < {_FIRST} THEN {_FIRST} WHEN {column} > {_LAST} THEN {_absent(one)} ELSE {column} END"


def _absent(one: MessageColumn) -> str:
    if one.kind is Kind.TIME and not one.sent:
        return "clock_timestamp()"
    return f"{_literal(one.default)}::{TYPES[one.kind]}"


LITERALS: dict[bool | None, str] = {None: "NULL", True: "true", False: "false"}


def _literal(value: Any) -> str:
    """A default of the declaration: nothing of a user's."""
    if value is None or isinstance(value, bool):
        return LITERALS[value]
    return str(value) if isinstance(value, int) else "'" + str(value).replace("'", "''").replace("%", "%%") + "'"
