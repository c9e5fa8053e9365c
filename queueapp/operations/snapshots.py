"""Snapshots of the statistics of all queues: taken by maintenance, read by the overview, the charts and the metrics.

Reading statistics costs some statements for each queue, so what is looked at often reads the last snapshot: one
statement for all queues of a database, and one for what their workers report. A queue without a fresh snapshot (no
maintenance is running, or the queue is new) is read from its table.

    statistics --every ``INTERVAL``--> newest (period 0)
               --each minute--> 60 s --combined--> 300 s --combined--> 3600 s --retention--> gone
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from time import monotonic
from typing import Any
from uuid import UUID

from django.db import Error, connections, router, transaction
from django.db.models import Avg, Max, Q, Sum

from .. import registry
from ..conf import settings
from ..models import NO_QUEUES, Now, QueueControl, QueueSnapshot, Subscriber, UtcField
from ..sql import backend_of, nonblocking
from .amps_statistics import AmpsStatistics, SubscriptionStats
from .live_workers import Unroutable
from .statistics import Database, QueueStats
from .subscriptions import ConsumerStats

#: Seconds between two snapshots, and their highest share of the time: of many queues they are taken less often.
INTERVAL, MAX_INTERVAL, DUTY_CYCLE = 10.0, 60.0, 0.02
#: A snapshot that is older is not shown: its maintenance has ended.
FRESH = timedelta(minutes=3)
#: The periods of the history in seconds, and how long each is kept; the last by ``STATISTICS_RETENTION``.
PERIODS: dict[int, timedelta | None] = {60: timedelta(hours=2), 300: timedelta(days=2), 3600: None}
#: Figures that add up over time, and those of a moment.
COUNTS, GAUGES = ("seconds", "arrived", "received", "handled", "failed"), ("ready", "in_flight", "delayed", "poison")
#: Old rows that one statement deletes.
BATCH = 1_000


# -- taking ----------------------------------------------------------------------------------------------------------


class SnapshotRecorder:
    """Takes the snapshots of one database. Used by one thread; what it counts by is in its memory, so that the first
    snapshot of a new leader has no counts."""

    def __init__(self, alias: str, queues: Sequence[Any]) -> None:
        self.alias = alias
        self._queues = queues
        #: Seconds until the next one.
        self.wait = INTERVAL
        self._counted: dict[UUID, tuple[int, int, int]] | None = None
        self._sizes: dict[str, int] = {}
        self._since_minute: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.minute: datetime | None = None
        self._minute_began = monotonic()

    def record(self, may_continue: Callable[[], bool] = lambda: True) -> None:
        """Take one snapshot, and once a minute a row of the history. ``may_continue`` is asked between two queues."""
        began = monotonic()
        now = backend_of(connections[self.alias]).now(connections[self.alias])
        database = Database(self.alias)
        taken = database.stats_of_all(self._queues, may_continue)
        taken += database.reader.read_together(database.of_others)
        if not may_continue():
            return
        rows = {stats.queue: _row(stats, now) for stats in taken}
        self._count(taken, rows)
        self._save_newest(rows, now)
        minute = _floor(now, 60)
        if self.minute is None:
            self.minute, self._minute_began = minute, monotonic()
        elif minute != self.minute:
            self._save_minute(rows, self.minute)
            finer = 60
            for period in (300, 3600):
                if (end := _floor(minute, period)) != _floor(self.minute, period):
                    combine(self.alias, finer, period, end)
                finer = period
            self.minute, self._minute_began = minute, monotonic()
        self.wait = min(MAX_INTERVAL, max(INTERVAL, (monotonic() - began) / DUTY_CYCLE))

    def _count(self, taken: list[QueueStats], rows: dict[str, QueueSnapshot]) -> None:
        """Add what the workers have counted since the last snapshot, and what the queues have grown by."""
        before, self._counted = self._counted, {}
        handling: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        workers = Subscriber.objects.using(self.alias).filter(alive_until__gt=Now()).exclude(queue__in=NO_QUEUES)
        names = ("received", "handled", "failed")
        for key, queue, p50, p95, *counts in workers.values_list("id", "queue", "handling_p50", "handling_p95", *names):
            self._counted[key] = tuple(counts)  # type: ignore[assignment]
            if before is not None:
                last = before.get(key, (0, 0, 0))
                for name, value, previous in zip(names, counts, last, strict=True):
                    self._since_minute[queue][name] += max(0, value - previous)
            if p50 is not None and p95 is not None:
                handling[queue].append((p50, p95))
        for stats in taken:
            queue = stats.queue
            if found := handling[queue]:
                rows[queue].handling_p50 = sum(p50 for p50, _ in found) / len(found)
                rows[queue].handling_p95 = max(p95 for _, p95 in found)
            size = _size(stats)
            if size is None:
                continue
            if queue in self._sizes:
                self._since_minute[queue]["growth"] += size - self._sizes[queue]
            self._sizes[queue] = size

    def _save_newest(self, rows: dict[str, QueueSnapshot], now: datetime) -> None:
        table = QueueSnapshot.objects.using(self.alias)
        with transaction.atomic(using=self.alias):
            table.filter(Q(queue__in=list(rows)) | Q(at__lt=now - FRESH), period=0).delete()
            table.bulk_create(rows.values(), batch_size=100)

    def _save_minute(self, rows: dict[str, QueueSnapshot], minute: datetime) -> None:
        seconds = monotonic() - self._minute_began
        counts, self._since_minute = self._since_minute, defaultdict(Counter)
        history = []
        for queue, row in rows.items():
            counted = counts[queue]
            history.append(
                QueueSnapshot(
                    queue=queue, period=60, at=minute, oldest_ms=row.oldest_ms, seconds=seconds,
                    handling_p50=row.handling_p50, handling_p95=row.handling_p95,
                    arrived=max(0, counted["growth"] + counted["handled"]),
                    **{name: getattr(row, name) for name in GAUGES},
                    **{name: counted[name] for name in ("received", "handled", "failed")},
                )
            )  # fmt: skip
        QueueSnapshot.objects.using(self.alias).bulk_create(history, batch_size=100)


def combine(alias: str, finer: int, period: int, end: datetime) -> None:
    """Combine the rows of the period that ends then, one for each queue: means of the figures, sums of the counts.
    Repeated, it changes nothing."""
    begin = end - timedelta(seconds=period)
    table = QueueSnapshot.objects.using(alias)
    done = set(table.filter(period=period, at=begin).values_list("queue", flat=True))
    rows = table.filter(period=finer, at__gte=begin, at__lt=end).order_by("queue").values("queue")
    rows = rows.annotate(
        **{f"{name}_of": Avg(name) for name in (*GAUGES, "handling_p50")},
        **{f"{name}_of": Sum(name) for name in COUNTS},
        **{f"{name}_of": Max(name) for name in ("oldest_ms", "handling_p95")},
    )
    combined = []
    for row in rows:
        values: dict[str, Any] = {name.removesuffix("_of"): value for name, value in row.items()}
        for name in GAUGES:
            values[name] = None if values[name] is None else round(values[name])
        if values["queue"] not in done:
            combined.append(QueueSnapshot(period=period, at=begin, **values))
    table.bulk_create(combined, batch_size=100)


def drop_old(alias: str, may_continue: Callable[[], bool]) -> int:
    """Delete the history whose retention is over, in batches; returns how many rows. For maintenance."""
    table = nonblocking(QueueSnapshot.objects.using(alias))
    now, total = backend_of(connections[alias]).now(connections[alias]), 0
    for period, kept in PERIODS.items():
        kept = kept or settings.STATISTICS_RETENTION
        while kept is not None and may_continue():
            old = table.filter(period=period, at__lt=now - kept).order_by("at").values_list("pk", flat=True)
            count = QueueSnapshot.objects.using(alias).filter(pk__in=list(old[:BATCH])).delete()[0]
            total += count
            if count < BATCH:
                break
    return total


def _row(stats: QueueStats, now: datetime) -> QueueSnapshot:
    return QueueSnapshot(
        queue=stats.queue[:200], period=0, at=now, ready=stats.waiting, in_flight=stats.in_flight,
        delayed=stats.delayed, poison=stats.poison, stats=json.dumps(asdict(stats)),
        oldest_ms=None if stats.oldest_seconds is None else int(stats.oldest_seconds * 1000),
    )  # fmt: skip


def _size(stats: QueueStats) -> int | None:
    """The messages of a queue in all tables; None: unknown."""
    if stats.waiting is None:
        return None
    in_flight = max(stats.leased or 0, stats.in_flight or 0)
    return stats.waiting + in_flight + (stats.delayed or 0) + (stats.poison or 0)


def _floor(at: datetime, seconds: int) -> datetime:
    return datetime.fromtimestamp(at.timestamp() // seconds * seconds, UTC)


# -- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A queue in one period of its history. Rates are messages a second."""

    at: datetime
    ready: int | None
    in_flight: int | None
    delayed: int | None
    poison: int | None
    oldest_seconds: float | None
    arrived_rate: float
    handled_rate: float
    failed_rate: float
    handling_p50: float | None
    handling_p95: float | None


@dataclass
class Snapshot:
    """What is known of all queues. ``ages``: of those that were not read just now, the age of their figures in
    seconds."""

    queues: list[QueueStats] = field(default_factory=list)
    ages: dict[str, float] = field(default_factory=dict)
    #: The last hour of each queue.
    history: dict[str, list[Point]] = field(default_factory=dict)
    #: What operators have set, by database and queue.
    controls: dict[str, dict[str, QueueControl]] = field(default_factory=dict)


def latest_stats() -> list[QueueStats]:
    """``statistics.queue_stats()`` from the last snapshots: a constant number of statements for each database."""
    return latest().queues


def latest(*, history: bool = False) -> Snapshot:
    """The statistics of all queues from the last snapshots; pauses and workers are read now. ``history``: also of the
    last hour."""
    found = Snapshot()
    by_alias: defaultdict[str, list[Any]] = defaultdict(list)
    for queue in registry.queues:
        by_alias[router.db_for_read(queue) or "default"].append(queue)
    undeclared = []
    for alias, queues in sorted(by_alias.items()):
        database = Database(alias)
        # In one transaction. Where something cannot be read, each figure is read by itself, with the cause.
        stored = database.reader.read(partial(_read, database, found, len(queues) if history else 0))[0]
        known = dict(stored or {})
        for queue in queues:
            stats, age = known.pop(queue._meta.label, (None, 0.0))
            if stats is None:
                stats = database.stats_of(queue)
            else:
                found.ages[stats.queue] = age
                _set_present(stats, database)
            found.queues.append(stats)
        undeclared += database.of_no_queues()
        # Those with a table are queues of another project.
        undeclared += [stats for stats, _ in known.values() if not stats.table] if stored else database.of_others()
    found.queues.sort(key=lambda stats: stats.queue)
    found.queues += undeclared
    return found


def _read(database: Database, found: Snapshot, of_queues: int) -> dict[str, tuple[QueueStats, float]]:
    """The newest snapshots with their ages. With ``of_queues`` the last hour as well, in longer periods for many."""
    found.controls[database.alias] = {row.queue: row for row in database.read_controls()}
    if of_queues:
        found.history |= points(database.alias, 60 if of_queues <= 100 else 300, timedelta(hours=1))
    return _newest(database.alias)


def points(alias: str, period: int, span: timedelta, queue: str | None = None) -> dict[str, list[Point]]:
    """The history of the queues of a database, or of one, in rows of this period; one statement."""
    rows = QueueSnapshot.objects.using(alias).filter(period=period, at__gte=Now() - span)
    rows = rows if queue is None else rows.filter(queue=queue)
    found: defaultdict[str, list[Point]] = defaultdict(list)
    for row in rows.order_by("queue", "at").defer("stats"):
        age, seconds = None if row.oldest_ms is None else row.oldest_ms / 1000, row.seconds or 60.0
        rates = row.arrived / seconds, row.handled / seconds, row.failed / seconds
        depths = row.ready, row.in_flight, row.delayed, row.poison
        found[row.queue].append(Point(row.at, *depths, age, *rates, row.handling_p50, row.handling_p95))
    return dict(found)


def forget(queue: Any) -> None:
    """Delete the newest snapshot of a queue that an operator has just changed: it is read from its table until the
    next."""
    alias = router.db_for_write(queue)
    # A user who may not delete it sees the change when the next one is taken.
    with suppress(Error), transaction.atomic(using=alias):
        QueueSnapshot.objects.using(alias).filter(queue=queue._meta.label, period=0).delete()


def _newest(alias: str) -> dict[str, tuple[QueueStats, float]]:
    rows = QueueSnapshot.objects.using(alias).filter(period=0, at__gte=Now() - FRESH).order_by("at", "pk")
    found: dict[str, tuple[QueueStats, float]] = {}
    for text, at, now in rows.annotate(now=Now(output_field=UtcField())).values_list("stats", "at", "now"):
        stats = _stats_of(text)
        # Another project on the same database does not know the table of this queue.
        if stats is not None and (stats.table or stats.queue not in found or not found[stats.queue][0].table):
            found[stats.queue] = stats, max(0.0, (now - at).total_seconds())
    return found


def _set_present(stats: QueueStats, database: Database) -> None:
    """What is read for all queues at once: whether they are paused, and their workers."""
    paused, _ = database.paused
    stats.paused = None if paused is None else stats.queue in paused
    if database.live is not None:
        stats.set_workers(database.live[stats.queue])


def _stats_of(text: str) -> QueueStats | None:
    """Stored statistics; None: of another version."""
    try:
        stored = json.loads(text)
        amps = stored.pop("amps")
        subscriptions = [SubscriptionStats(**fields) for fields in amps.pop("subscriptions")]
        unroutable = [Unroutable(**fields) for fields in stored.pop("unroutable")]
        consumers = [ConsumerStats(**fields) for fields in stored.pop("consumers")]
        return QueueStats(
            **stored, amps=AmpsStatistics(**amps, subscriptions=subscriptions), unroutable=unroutable,
            consumers=consumers,
        )  # fmt: skip
    except (ValueError, TypeError, KeyError):
        return None
