"""Messages that no worker will receive: of a type that no live worker handles, for a recipient that none of them has,
or of a priority that their queue has no level for. Reported by name, count and age.

Workers report the unknown types that they met (``live_workers``); the claim index has the recipients, at one seek each.
Counts are those of the first rows of the table, or of the level, as in all statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import messages
from ..errors import UndecodableMessage
from ..sql import queue_sql
from ..sql.figures import Level
from .live_workers import Live

#: Levels that are read.
MAX_LEVELS = 200


@dataclass
class Unroutable:
    """Unroutable messages of one kind. ``what``: type, recipient, priority or poison. ``count`` None: a worker met
    some, but none is among the rows that were read."""

    what: str
    name: str
    count: int | None
    exact: bool
    oldest_seconds: float | None

    def __str__(self) -> str:
        many = "some" if self.count is None else f"{self.count}{'' if self.exact else '+'}"
        messages = f"{many} message{'' if many == '1' else 's'}"
        if self.what == "poison":
            return f"{many} poison message{'' if many == '1' else 's'}, no such queue in this project"
        if self.what == "priority":
            return f"{messages} of priority {self.name}, above the queue's levels: maintenance gives them the nearest"
        if self.what == "type" and not self.name:
            return f"{messages} without a type, no consumer in a live worker"
        return f"{messages} for {self.what} {self.name!r}, no consumer in a live worker"


def find_unroutable(queue: Any, connection: Any, live: Live, limit: int) -> list[Unroutable]:
    """The unroutable messages of a queue; reads about ``limit`` rows. Of a queue without live workers only those that
    no worker could receive: the others just wait. Call it in a transaction, and only if ``can_have_unroutable``."""
    sql = queue_sql(queue, connection)
    by = sql.table.claim_by
    known = live.recipients if live.count else None
    levels = _levels(sql, connection) if by else [()]
    totals: dict[tuple[str, str], Unroutable] = {}
    for level in levels:
        recipient, priority = _recipient(by, level), _priority_out_of_range(queue, by, level)
        if priority:
            key = "priority", priority
        elif recipient and known is not None and recipient not in known:
            key = "recipient", recipient
        else:
            continue
        head = sql.figures.head(connection, limit + 1, level)
        if head.waiting:
            total = totals.setdefault(key, Unroutable(*key, 0, True, None))
            age = None if head.oldest_ms is None else head.oldest_ms / 1000
            total.count = (total.count or 0) + min(head.waiting, limit)
            total.exact = total.exact and head.rows <= limit
            total.oldest_seconds = max((it for it in (total.oldest_seconds, age) if it is not None), default=None)
    found = list(totals.values())
    if known is not None and live.unknown_types:
        addressed = [level for level in levels if not _recipient(by, level)]
        found += _types(sql, connection, live, addressed, limit)
    return found


def can_have_unroutable(queue: Any, connection: Any, live: Live) -> bool:
    """Whether a queue can have unroutable messages, as far as is known without reading its table: it has levels, its
    workers have named consumers, or they met a type that they do not handle."""
    by = queue_sql(queue, connection).table.claim_by
    return "priority" in by or bool(live.count and ("recipient" in by or live.unknown_types))


def _recipient(by: tuple[str, ...], level: Level) -> str:
    return str(dict(zip(by, level, strict=True)).get("recipient", ""))


def _priority_out_of_range(queue: Any, by: tuple[str, ...], level: Level) -> str:
    """The priority of a level that no claim reads; '' for the others."""
    priority = dict(zip(by, level, strict=True)).get("priority")
    return "" if priority is None or 0 <= priority < queue.delivery.priorities else str(priority)


def _levels(sql: Any, connection: Any) -> list[Level]:
    found: list[Level] = []
    level = sql.figures.next_level(connection, None)
    while level is not None and len(found) < MAX_LEVELS:
        found.append(level)
        level = sql.figures.next_level(connection, level)
    return found


def _types(sql: Any, connection: Any, live: Live, levels: list[Level], limit: int) -> list[Unroutable]:
    counts: dict[str, tuple[int, int | None]] = dict.fromkeys(live.unknown_types, (0, None))
    complete = True
    for level in levels:
        complete = complete and sql.figures.head(connection, limit + 1, level).rows <= limit
        for headers, age in sql.figures.head_types(connection, limit, level):
            kind = messages.type_label(headers)[:255]
            if kind in counts and not _has_base_consumer(live, headers):
                count, oldest = counts[kind]
                counts[kind] = count + 1, max((it for it in (oldest, age) if it is not None), default=None)
    return [
        Unroutable("type", kind, count or None, complete, None if oldest is None else oldest / 1000)
        for kind, (count, oldest) in sorted(counts.items())
        if count or not complete  # 0 of a table that was read to its end: the messages are gone
    ]


def _has_base_consumer(live: Live, headers: str) -> bool:
    """Whether a live worker has a consumer for a base of this type."""
    try:
        kind = messages.read_kind(headers)
    except UndecodableMessage:
        return False
    return any(name in (live.types or ()) for name in kind.names[1:])
