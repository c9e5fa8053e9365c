"""Attributes of a message as columns of a statement, and the rows that come back as those attributes.

A foreign table (NServiceBus') lacks some columns: no statement names them, and a constant stands for them here. The
drivers give a uniqueidentifier as upper-case text and a datetime2 as a naive time.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from ..claims import Claimed
from ..message_columns import BY_NAME, Kind, MessageColumn, kind_of

_ABSENT: dict[str, Any] = {"deliveries": 0, "cancels": 0} | {name: one.default for name, one in BY_NAME.items()}
_CLOCKS = tuple(name for name, one in BY_NAME.items() if one.kind is Kind.TIME and not one.sent)

LITERALS: dict[bool | None, str] = {None: "NULL", True: "1", False: "0"}

_TYPES = {Kind.INT16: "smallint", Kind.INT64: "bigint", Kind.BOOL: "bit", Kind.TIME: "datetime2"}


def type_of(one: MessageColumn, *, priority64: bool = False) -> str:
    """The type of a column."""
    return _TYPES.get(kind_of(one, priority64=priority64)) or f"nvarchar({one.max_length})"


def guid(value: Any) -> bytes:
    """A uniqueidentifier as its 16 bytes; with ``native_uuid`` a driver gives a UUID."""
    return value.bytes if isinstance(value, uuid.UUID) else bytes.fromhex(value.replace("-", ""))


def aware(value: datetime | None) -> datetime | None:
    """A datetime2 as an aware time: what the tables hold is UTC."""
    return value.replace(tzinfo=UTC) if value is not None and value.tzinfo is None else value


_CONVERT: dict[str, Callable[[Any], Any]] = {"id": guid}
_CONVERT |= {name: aware for name, one in BY_NAME.items() if one.kind is Kind.TIME}


class Returned:
    """What a statement returns: these attributes, in this order, of a table with these columns."""

    def __init__(self, columns: dict[str, str], names: Sequence[str]) -> None:
        self._columns = [columns[name] for name in dict.fromkeys(names) if name in columns]
        at = {name: n for n, name in enumerate(name for name in dict.fromkeys(names) if name in columns)}
        # A table that keeps no time of arrival: now, by the database's clock.
        clocks = [name for name in _CLOCKS if name in names and name not in columns]
        self._clocks = ["SYSUTCDATETIME()"] * len(clocks)
        at |= {name: len(at) + n for n, name in enumerate(clocks)}
        self._plan = [(at.get(name), _CONVERT.get(name), _ABSENT.get(name)) for name in names]

    def of(self, source: str) -> str:
        """The list of columns of an OUTPUT (``inserted``, ``deleted``) or a SELECT (an alias)."""
        return ", ".join([*(f"{source}.{column}" for column in self._columns), *self._clocks])

    def tuples(self, rows: list[Any]) -> list[Claimed]:
        """The rows of such a statement as tuples of the attributes."""
        plan = self._plan
        return [
            tuple([absent if n is None else convert(row[n]) if convert else row[n] for n, convert, absent in plan])
            for row in rows
        ]
