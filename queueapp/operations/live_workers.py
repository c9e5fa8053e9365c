"""What the live workers of a database report in their rows (open breakers, consumers, and types that they do not
handle), and the messages that none of them will receive.

The rows are read tolerantly: a worker of another version may report less, or in another form.

A message is *unroutable* if no live worker handles its type, none has its recipient, or its queue has no level for its
priority. It is reported by name, count and age. Workers report the unknown types that they met; the claim index has the
recipients, at one seek each. Counts are those of the first rows of the table, or of the level, as in all statistics.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db.models import Q

from .. import messages
from ..errors import UndecodableMessage
from ..models import NO_QUEUES, Now, Subscriber, UtcField
from ..models.subscribers import parse_json_list
from ..sql import queue_sql
from ..sql.figures import Level

#: A handler that runs for longer is named on the overview.
LONG_RUNNING = timedelta(minutes=1)


class Live:
    """The live workers of one queue, or the live dispatchers or maintenance processes of a database."""

    def __init__(self) -> None:
        self.count = 0
        #: The age of the last heartbeat of dead processes whose row is still there; only for ``NO_QUEUES``.
        self.last_heartbeat: timedelta | None = None
        #: The oldest heartbeat of the live ones.
        self.heartbeat: timedelta | None = None
        self.breakers: list[dict[str, str]] = []
        #: The handler that has run longest, beyond ``LONG_RUNNING``: its seconds, where, and the seq of its message;
        #: None: there is none.
        self.longest: tuple[float, str, int] | None = None
        #: Messages in flight in these workers, as of their last heartbeats.
        self.in_flight = 0
        #: Names and message types of their consumers. None: a worker does not report them, so unroutable messages are
        #: unknown.
        self.recipients: set[str] | None = set()
        self.types: set[str] | None = set()
        self._unknown: set[str] = set()

    @property
    def unknown_types(self) -> set[str]:
        """Types that a worker met in the queue and no worker handles."""
        return set() if self.types is None else self._unknown - self.types

    def add(self, breakers: str, consumers: str, unknown_types: str) -> None:
        """Add the columns of one worker's row."""
        self.count += 1
        for breaker in breakers_of(breakers):
            if breaker not in self.breakers:
                self.breakers.append(breaker)
        reported = consumers_of(consumers)
        if not reported:
            self.recipients = self.types = None
        if self.recipients is not None and self.types is not None:
            self.recipients |= {name for name, _ in reported}
            self.types |= {kind for _, kind in reported}
        self._unknown |= {str(kind) for kind in parse_json_list(unknown_types)}

    def add_running(self, running: str, since: float, worker: str) -> None:
        """Add the running handlers of one worker's row; ``since``: the seconds since its heartbeat."""
        for seq, consumer, seconds in running_of(running)[:1]:
            elapsed = seconds + since
            if elapsed > LONG_RUNNING.total_seconds() and (self.longest is None or elapsed > self.longest[0]):
                self.longest = elapsed, f"message {seq} in {consumer} on {worker}", seq


def running_of(text: str) -> list[tuple[int, str, float]]:
    """The handlers of one worker that had run for more than a second at its last heartbeat, the longest first: the seq
    of the message, the consumer, and the seconds."""
    found = []
    for item in parse_json_list(text):
        with suppress(TypeError, ValueError):
            seq, consumer, seconds = item
            found.append((int(seq), str(consumer), float(seconds)))
    return found


def breakers_of(text: str) -> list[dict[str, str]]:
    """The circuit breakers of one worker that are not closed: breaker (its kind), name, state and error of each."""
    found = [item if isinstance(item, dict) else {"error": item} for item in parse_json_list(text)]
    found = found or ([{"error": text}] if text else [])
    shown = [{key: str(item.get(key, "")) for key in ("breaker", "name", "state", "error")} for item in found]
    return [item | {"breaker": item["breaker"] or item["name"]} for item in shown]


def consumers_of(text: str) -> list[tuple[str, str]]:
    """The consumers of one worker: name and message type of each."""
    return [(str(item[0]), str(item[1])) for item in parse_json_list(text) if isinstance(item, list) and len(item) > 1]


def live_on(alias: str, queues: Iterable[str] | None = None) -> defaultdict[str, Live]:
    """The live workers of a database by queue; the entry of a queue without workers is empty."""
    rows = Subscriber.objects.using(alias).filter(Q(alive_until__gt=Now()) | Q(queue__in=NO_QUEUES))
    rows = rows.annotate(now=Now(output_field=UtcField())).order_by("queue", "id")
    if queues is not None:
        rows = rows.filter(queue__in=list(queues))
    live: defaultdict[str, Live] = defaultdict(Live)
    for queue, now, beat, until, outstanding, running, host, process, *columns in rows.values_list(
        "queue", "now", "heartbeat_at", "alive_until", "outstanding", "running", "host", "process", "breakers",
        "consumers", "unknown_types",
    ):  # fmt: skip
        workers = live[queue]
        if until > now:
            workers.add(*columns)
            workers.in_flight += outstanding
            workers.add_running(running, (now - beat).total_seconds(), f"{host}:{process}")
            workers.heartbeat = max(workers.heartbeat or now - beat, now - beat)
        elif workers.last_heartbeat is None or now - beat < workers.last_heartbeat:
            workers.last_heartbeat = now - beat
    return live


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
