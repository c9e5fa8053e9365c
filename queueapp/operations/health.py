"""Whether workers are healthy, by what they report in the database: heartbeats, open breakers, and the lag of their
queues.

For a container's health check, a readiness probe, and deploys. The result is a report; acting on it is left to the
caller: a worker survives an outage of its database without a restart.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from django.db import router

from .. import registry
from ..circuit_breaker import State
from ..conf import settings
from ..models import NO_QUEUES, Now, Subscriber, UtcField
from ..models.subscribers import parse_json_list
from . import statistics
from .safe_reads import Reader, hint


@dataclass(frozen=True)
class Bounds:
    """The limits of what is healthy: the age of a heartbeat, the age of the oldest message of a queue, and the number
    of waiting messages. None: not checked."""

    heartbeat: timedelta | None = None
    age: timedelta | None = None
    waiting: int | None = None


@dataclass
class Health:
    """The report. ``workers``: live processes. ``problems``: one line each. ``unreachable``: a database did not
    answer."""

    workers: int = 0
    problems: list[str] = field(default_factory=list)
    unreachable: bool = False
    queues: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"ok": self.ok} | asdict(self)


def health(
    queues: Sequence[Any] | None = None,
    *,
    host: str | None = None,
    supervisor: uuid.UUID | None = None,
    bounds: Bounds = Bounds(),
) -> Health:
    """Check the workers of these queues, on one host or of one process tree if given. ``queues`` None: the queues that
    they receive, of which one live worker is enough."""
    found = Health()
    wanted = {queue._meta.label: queue for queue in queues or ()}
    aliases = {router.db_for_read(queue) or "default" for queue in (queues or registry.queues)}
    rows = [row for alias in sorted(aliases) for row in _rows(alias, found, host, supervisor)]
    if found.unreachable:
        return found
    limit = bounds.heartbeat or settings.DEAD_AFTER
    live: set[str] = set()
    processes: set[tuple[str, int]] = set()
    silent: dict[str, timedelta] = {}
    for queue, since, breakers, process in rows:
        if queues is not None and queue not in wanted and queue not in NO_QUEUES:
            continue
        if since > limit:
            silent[queue] = min(since, silent.get(queue, since))
            continue
        live.add(queue)
        if queue not in NO_QUEUES:
            processes.add(process)  # a process has a row for each of its queues
        for breaker in parse_json_list(breakers):
            if breaker.get("state") == State.OPEN.value:
                found.problems.append(f"{queue}: {breaker.get('name', '')} is open: {breaker.get('error', '')}")
    found.problems = list(dict.fromkeys(found.problems))
    found.workers = len(processes)
    for label in wanted:
        if label not in live:
            found.problems.append(f"{label}: no worker has a heartbeat{_where_and_when(host, silent.get(label))}")
    if not wanted and not live:
        # Rows of earlier processes may still be there; only a live one counts.
        last = min(silent.values(), default=None)
        found.problems.append(f"no worker has a heartbeat{_where_and_when(host, last)}")
    _check_lag(found, list(wanted.values()) or _received(live), bounds)
    return found


def _where_and_when(host: str | None, last: timedelta | None) -> str:
    place = f" on {host}" if host is not None else ""
    return place + (f"; the last one was {statistics.span(last.total_seconds())} ago" if last is not None else "")


def _rows(
    alias: str, found: Health, host: str | None, supervisor: uuid.UUID | None
) -> list[tuple[str, timedelta, str, tuple[str, int]]]:
    """(queue, age of the heartbeat, breakers, (host, process)) of each subscriber of one database, by its clock.
    Without those of ``receive()``, which have one heartbeat only."""
    rows = Subscriber.objects.using(alias).filter(receives=True).annotate(now=Now(output_field=UtcField()))
    if host is not None:
        rows = rows.filter(host=host)
    if supervisor is not None:
        rows = rows.filter(supervisor=supervisor)
    read, cause = Reader(alias).read(
        lambda: [(queue, now - beat, breakers, (host, process)) for queue, now, beat, breakers, host, process in
                 rows.values_list("queue", "now", "heartbeat_at", "breakers", "host", "process")]
    )  # fmt: skip
    if read is None:
        found.unreachable = True
        found.problems.append(f"database {alias!r} cannot be read: {cause}{hint(cause, alias)}")
    return read or []


def _received(live: set[str]) -> list[Any]:
    return [queue for queue in registry.queues if queue._meta.label in live]


def _check_lag(found: Health, queues: list[Any], bounds: Bounds) -> None:
    """Compare age and number of the waiting messages with their bounds, where there are any."""
    if bounds.age is None and bounds.waiting is None:
        return
    for stats in statistics.queue_stats(queues):
        seconds = stats.oldest_seconds
        found.queues[stats.queue] = {"waiting": stats.waiting, "oldest_seconds": seconds, "error": stats.error}
        if stats.waiting is None:
            found.problems.append(f"{stats.queue}: unknown: {stats.error}")
            continue
        if bounds.age is not None and seconds is not None and seconds > bounds.age.total_seconds():
            age, limit = statistics.span(seconds), statistics.span(bounds.age.total_seconds())
            found.problems.append(f"{stats.queue}: the oldest message has waited for {age}, more than {limit}")
        if bounds.waiting is not None and stats.waiting > bounds.waiting:
            messages = "1 message waits" if stats.waiting == 1 else f"{stats.waiting} messages wait"
            found.problems.append(f"{stats.queue}: {messages}, more than {bounds.waiting}")
