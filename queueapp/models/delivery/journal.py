"""Options of ``class Delivery`` of queues over journaled topics: where their messages begin, and how many of them are
active.

A recovery point says where reading the journal begins: ``epoch``, ``now`` (``creation`` is the same), a bookmark, or a
time.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from ...options import Option

EPOCH, NOW = "epoch", "now"
#: How points in the journal are written.
POINTS = (
    "'epoch', 'now', 'creation', a bookmark (a whole number), an aware datetime, or an ISO-8601 timestamp (UTC "
    "unless it has a zone)"
)
_WORDS = {EPOCH: EPOCH, NOW: NOW, "creation": NOW}

#: A point as it is meant: one of the two words, a bookmark, or an aware time.
Point = str | int | datetime


def point_of(value: Any) -> Point | None:
    """What a point means; None: it means nothing.

    >>> point_of("2026-11-22T10:00:00")
    datetime.datetime(2026, 11, 22, 10, 0, tzinfo=datetime.timezone.utc)
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if 0 <= value < 2**63 else None
    if isinstance(value, datetime):
        return None if value.tzinfo is None else _in_utc(value)
    if not isinstance(value, str):
        return None
    text = value.strip().lower()
    if text in _WORDS:
        return _WORDS[text]
    # A year is a number as well: eight digits and more are a time only with their T.
    if text.isascii() and text.isdigit():
        return point_of(int(text))
    try:
        time = datetime.fromisoformat(value.strip())
    except ValueError:
        return None
    return _in_utc(time) if time.tzinfo else time.replace(tzinfo=UTC)


def _in_utc(time: datetime) -> datetime | None:
    """A time as it is stored; None: it is in no year that there is."""
    try:
        return time.astimezone(UTC)
    except OverflowError:
        return None


def point_text(point: Point) -> str:
    """A point as it is kept, the same for all ways to write it."""
    return point.astimezone(UTC).isoformat() if isinstance(point, datetime) else str(point)


OPTIONS: tuple[Option, ...] = (
    Option(
        "recovery_point",
        object,
        EPOCH,
        "Where a queue over a journaled topic begins when it is first seen, or when this is changed (AMPS' "
        "RecoveryPoint). "
        "What entered it before does not come back.",
        accept=lambda value: point_of(value) is not None,
        words=POINTS,
    ),
    Option(
        "target_queue_depth",
        int,
        None,
        "Number of messages that are kept in the queue's table while the others wait in the journal (AMPS' "
        "TargetQueueDepth). "
        "Requires a journaled topic, no priority and no barrier. None: all are in the table.",
        low=1000,
        high=100_000_000,
        optional=True,
    ),
)  # fmt: skip


class JournalOptions:
    """The types of these options."""

    recovery_point: str | int | datetime
    target_queue_depth: int | None
