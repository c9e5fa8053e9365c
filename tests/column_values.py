"""A value of each column that a message carries, which none of them has by default: made from its declaration."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from queueapp.sql.message_columns import COUNTS, MESSAGE_COLUMNS, SENT, Kind, MessageColumn, Outgoing

#: To the microsecond, and never over.
TIME = datetime(2090, 7, 1, 12, 30, 15, 123457, tzinfo=UTC)
LIFETIME_MS = 86_400_000

_VALUES = {Kind.TEXT: "ß {}", Kind.INT16: 2, Kind.BOOL: True, Kind.TIME: TIME}


def value_of(column: MessageColumn) -> Any:
    """What is stored."""
    if column.kind is Kind.BOOL:
        return not column.default
    if column.kind is Kind.TIME and not column.sent:
        return datetime(2026, 1, 2, 3, 4, 5, 67891, tzinfo=UTC)
    value = _VALUES[column.kind]
    return value.format(column.name) if isinstance(value, str) else value


def said_of(column: MessageColumn) -> Any:
    """What an ``Outgoing`` says of it."""
    return LIFETIME_MS if column.kind is Kind.TIME else value_of(column)


def columns() -> dict[str, Any]:
    """All of them, as they are stored."""
    return {column.name: value_of(column) for column in MESSAGE_COLUMNS}


def counts() -> dict[str, Any]:
    return dict(zip(COUNTS, (3, 1, '[{"at":"2026-01-02T03:04:05+00:00"}]'), strict=True))


def outgoing(identity: Any, headers: str, body: bytes | None) -> Outgoing:
    """A message that says something of everything."""
    return Outgoing(identity, headers, body, **{column.outgoing: said_of(column) for column in SENT})


def arrived(column: MessageColumn, stored: Any, sent_at: datetime) -> bool:
    """Whether a column holds what was said of it at a time by the database's clock."""
    if column.kind is Kind.TIME:
        return abs(stored - sent_at - timedelta(milliseconds=LIFETIME_MS)) < timedelta(minutes=1)
    return bool(stored == value_of(column))
