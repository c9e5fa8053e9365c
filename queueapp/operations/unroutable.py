"""Messages that nobody will ever take: of a type that no live worker knows, for a recipient that none of them has, of a priority
that their queue has no level for. By name, count and age.

Workers say which types they met and do not know (``live``); the claim index says which recipients there are,
one seek each. Counts are of the head of the table, or of the level, as all figures are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import messages
from ..errors import UndecodableMessage
from ..sql import queue_sql
from ..sql.figures import Level
from .live_workers import Live

#: Levels that are looked at.
MOST_LEVELS = 200


@dataclass
class Stranded:
    """Messages of one kind that nobody takes. ``what``: type, recipient or priority. ``count`` None: a worker has met some,
    and they are not among the rows that were looked at."""

    what: str
    name: str
    count: int | None
    exact: bool
    oldest_seconds: float | None

    def __str__(self) -> str:
        many = "some" if self.count is None else f"{self.count}{'' if self.exact else '+'}"
        if self.what == "poison":
            return f"{many} poison messages, and no queue here has that name"
        if self.what == "priority":
            return f"{many} of priority {self.name}, for which the queue has no level: whoever keeps house gives them the nearest"
        if self.what == "type" and not self.name:
            return f"{many} without a type, for which no live worker has a consumer"
        return f"{many} for {self.what} {self.name!r}, which no live worker has"


def stranded(queue: Any, connection: Any, live: Live, limit: int) -> list[Stranded]:
    """What nobody takes of a queue, reading about ``limit`` rows. Of one that has no live workers only what no worker of it
    could: the rest is simply not received. In a transaction, and in vain unless it ``may_strand`` any."""
    sql = queue_sql(queue, connection)
    by = sql.table.claim_by
    known = live.recipients if live.count else None
    levels = _levels(sql, connection) if by else [()]
    totals: dict[tuple[str, str], Stranded] = {}
    for level in levels:
        recipient, priority = _recipient(by, level), _beyond(queue, by, level)
        if priority:
            key = "priority", priority
        elif recipient and known is not None and recipient not in known:
            key = "recipient", recipient
        else:
            continue
        head = sql.figures.head(connection, limit + 1, level)
        if head.waiting:
            one = totals.setdefault(key, Stranded(*key, 0, True, None))
            age = None if head.oldest_ms is None else head.oldest_ms / 1000
            one.count = (one.count or 0) + min(head.waiting, limit)
            one.exact = one.exact and head.rows <= limit
            one.oldest_seconds = max((it for it in (one.oldest_seconds, age) if it is not None), default=None)
    found = list(totals.values())
    if known is not None and live.unknown_types:
        addressed = [level for level in levels if not _recipient(by, level)]
        found += _types(sql, connection, live, addressed, limit)
    return found


def may_strand(queue: Any, connection: Any, live: Live) -> bool:
    """Whether a queue can have any, by what is known without a look at its table: it has levels, or its workers have consumers
    by name, or have met a type that they do not know."""
    by = queue_sql(queue, connection).table.claim_by
    return "priority" in by or bool(live.count and ("recipient" in by or live.unknown_types))


def _recipient(by: tuple[str, ...], level: Level) -> str:
    return str(dict(zip(by, level, strict=True)).get("recipient", ""))


def _beyond(queue: Any, by: tuple[str, ...], level: Level) -> str:
    """The priority of a level that no claim looks at; '' for the others."""
    priority = dict(zip(by, level, strict=True)).get("priority")
    return "" if priority is None or 0 <= priority < queue.delivery.priorities else str(priority)


def _levels(sql: Any, connection: Any) -> list[Level]:
    found: list[Level] = []
    level = sql.figures.next_level(connection, None)
    while level is not None and len(found) < MOST_LEVELS:
        found.append(level)
        level = sql.figures.next_level(connection, level)
    return found


def _types(sql: Any, connection: Any, live: Live, levels: list[Level], limit: int) -> list[Stranded]:
    counts: dict[str, tuple[int, int | None]] = dict.fromkeys(live.unknown_types, (0, None))
    complete = True
    for level in levels:
        complete = complete and sql.figures.head(connection, limit + 1, level).rows <= limit
        for headers, age in sql.figures.head_types(connection, limit, level):
            kind = messages.told_type(headers)[:255]
            if kind in counts and not _takes_a_base(live, headers):
                count, oldest = counts[kind]
                counts[kind] = count + 1, max((one for one in (oldest, age) if one is not None), default=None)
    return [
        Stranded("type", kind, count or None, complete, None if oldest is None else oldest / 1000)
        for kind, (count, oldest) in sorted(counts.items())
        if count or not complete  # of a table that was read to its end: they are gone
    ]


def _takes_a_base(live: Live, headers: str) -> bool:
    """Whether one of them has a consumer of a base of this type."""
    try:
        kind = messages.read_kind(headers)
    except UndecodableMessage:
        return False
    return any(name in (live.types or ()) for name in kind.names[1:])
