"""Whether workers are well, from what they say of themselves in the database: heartbeats, breakers, and the lag of their queues.

For a container's health check, a readiness probe and whoever deploys. It says what it found; what follows from that is
another's business. In particular a worker survives an outage of its database by itself.
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
    """What is still well. ``heartbeat``: the oldest that a worker may have; ``age`` and ``waiting``: of the oldest message, and how
    many wait, in each queue; None: not looked at."""

    heartbeat: timedelta | None = None
    age: timedelta | None = None
    waiting: int | None = None


@dataclass
class Health:
    """``workers``: live processes. ``unwell``: why not, a line each. ``unreachable``: a database was not there to ask."""

    workers: int = 0
    unwell: list[str] = field(default_factory=list)
    unreachable: bool = False
    queues: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        """Whether nothing was found."""
        return not self.unwell

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"healthy": self.healthy} | asdict(self)


def health(
    queues: Sequence[Any] | None = None,
    *,
    host: str | None = None,
    supervisor: uuid.UUID | None = None,
    bounds: Bounds = Bounds(),
) -> Health:
    """Look at the workers of these queues, on one host or of one process tree if it is given. ``queues`` None: those that they
    receive; then one that lives is enough."""
    found = Health()
    wanted = {queue._meta.label: queue for queue in queues or ()}
    where = {router.db_for_read(queue) or "default" for queue in (queues or registry.queues)}
    rows = [row for alias in sorted(where) for row in _rows(alias, found, host, supervisor)]
    if found.unreachable:
        return found
    limit = bounds.heartbeat or settings.DEAD_AFTER
    live: set[str] = set()
    processes: set[tuple[str, int]] = set()
    silent: dict[str, timedelta] = {}
    for queue, since, trouble, process in rows:
        if queues is not None and queue not in wanted and queue not in NO_QUEUES:
            continue
        if since > limit:
            silent[queue] = min(since, silent.get(queue, since))
            continue
        live.add(queue)
        if queue not in NO_QUEUES:
            processes.add(process)  # it has a row for each of its queues
        for one in parse_json_list(trouble):
            if one.get("state") == State.OPEN.value:
                found.unwell.append(f"{queue}: {one.get('name', '')} is open: {one.get('error', '')}")
    found.unwell = list(dict.fromkeys(found.unwell))
    found.workers = len(processes)
    for label in wanted:
        if label not in live:
            found.unwell.append(f"{label}: no worker has a heartbeat{_of(host, silent.get(label))}")
    if not wanted and not live:
        # Rows of an earlier life may lie there for a while: that nobody lives is what counts.
        found.unwell.append(f"no worker has a heartbeat{_of(host, min(silent.values(), default=None))}")
    _look_at_lag(found, list(wanted.values()) or _known(live), bounds)
    return found


def _of(host: str | None, last: timedelta | None) -> str:
    place = f" on {host}" if host is not None else ""
    return place + (f"; the last one was {statistics.span(last.total_seconds())} ago" if last is not None else "")


def _rows(
    alias: str, found: Health, host: str | None, supervisor: uuid.UUID | None
) -> list[tuple[str, timedelta, str, tuple[str, int]]]:
    """(queue, age of its heartbeat, its trouble, its host and process) of each subscriber of one database, by its clock.
    ``receive()`` beats once."""
    rows = Subscriber.objects.using(alias).filter(receives=True).annotate(now=Now(output_field=UtcField()))
    if host is not None:
        rows = rows.filter(host=host)
    if supervisor is not None:
        rows = rows.filter(supervisor=supervisor)
    read, cause = Reader(alias).read(
        lambda: [(queue, now - beat, told, (host, process)) for queue, now, beat, told, host, process in
                 rows.values_list("queue", "now", "heartbeat_at", "breakers", "host", "process")]
    )  # fmt: skip
    if read is None:
        found.unreachable = True
        found.unwell.append(f"the database {alias!r} cannot be asked: {cause}{hint(cause, alias)}")
    return read or []


def _known(live: set[str]) -> list[Any]:
    return [queue for queue in registry.queues if queue._meta.label in live]


def _look_at_lag(found: Health, queues: list[Any], bounds: Bounds) -> None:
    """The age and number of what waits, where somebody wants to know."""
    if bounds.age is None and bounds.waiting is None:
        return
    for one in statistics.figures(queues):
        found.queues[one.queue] = {"waiting": one.waiting, "oldest_seconds": one.oldest_seconds, "error": one.error}
        if one.waiting is None:
            found.unwell.append(f"{one.queue}: not known: {one.error}")
            continue
        if (
            bounds.age is not None
            and one.oldest_seconds is not None
            and one.oldest_seconds > bounds.age.total_seconds()
        ):
            found.unwell.append(
                f"{one.queue}: the oldest message waits for {statistics.span(one.oldest_seconds)}, "
                f"more than {statistics.span(bounds.age.total_seconds())}"
            )
        if bounds.waiting is not None and one.waiting > bounds.waiting:
            found.unwell.append(f"{one.queue}: {one.waiting} messages wait, more than {bounds.waiting}")
