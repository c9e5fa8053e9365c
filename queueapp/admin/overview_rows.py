"""The rows of the overview: ``operations.statistics`` as text, and the options that operators have set.

A queue that cannot be read is a row with a note, not an error page: an operator may be looking for exactly that. An
unknown value is a dash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from typing import Any

from django.contrib.auth import get_user_model
from django.db import router

from .. import overrides, registry
from ..alerts.conditions import bound_of
from ..models import NO_QUEUES, QueueControl
from ..operations import snapshots, statistics
from ..operations.safe_reads import Reader
from ..operations.statistics import UNKNOWN, Database, QueueStats
from .formatting import display

#: The columns, in the order of the cells in ``queueapp/overview_cells.html``.
HEADINGS = ("Queue", "State", "Ready", "In flight", "Oldest", "Delayed", "Poison", "In / out per s", "Failures",
            "Handling", "Workers", "Last hour")  # fmt: skip
#: The age of the oldest message above which a queue is late, where ``ALERTS`` sets no bound.
LATE = timedelta(minutes=5)
#: The share of failed attempts in the last minute from which on a queue is failing.
FAILING = 0.2


@dataclass(frozen=True)
class OverviewRow:
    """One row. ``queue`` None: this project does not know the queue. ``control`` None: no option is set for it."""

    queue: Any
    stats: QueueStats
    control: QueueControl | None = None
    changed_by: str = ""
    #: The last hour.
    history: Sequence[snapshots.Point] = ()

    @property
    def label(self) -> str:
        return self.stats.queue

    @property
    def alias(self) -> str:
        return self.stats.database

    @property
    def semantics(self) -> str:
        return self.stats.semantics

    @property
    def paused(self) -> bool:
        return bool(self.stats.paused)

    @property
    def workers(self) -> int | None:
        return self.stats.workers

    @property
    def waiting(self) -> str:
        waiting = self.stats.waiting
        if waiting is None or self.stats.exact:
            return _count(waiting)
        return display.about(waiting) if waiting > statistics.LIMIT else _count(waiting, False)

    @property
    def leased(self) -> str:
        return _count(self.stats.leased, self.stats.exact)

    @property
    def lease_expired(self) -> str:
        return _count(self.stats.lease_expired, self.stats.exact) if self.stats.lease_expired else ""

    @property
    def expired(self) -> str:
        return _count(self.stats.expired, self.stats.exact) if self.stats.expired else ""

    @property
    def max_backlog(self) -> str:
        """How many messages may be leased at once; '' without a limit."""
        return "" if self.stats.amps.max_backlog is None else f"of {self.stats.amps.max_backlog:,}"

    @property
    def amps(self) -> list[tuple[str, str]]:
        """The statistics that AMPS names, as (name, text)."""
        found = []
        for field in fields(self.stats.amps):
            value = getattr(self.stats.amps, field.name)
            if field.name == "subscriptions":
                continue
            if field.name in ("age_of_oldest_lease", "seconds_behind"):
                value = None if value is None else display.of_seconds(value)
            text = UNKNOWN if value is None else f"{value:,}" if isinstance(value, int) else str(value)
            found.append((field.name, text))
        return found

    @property
    def oldest(self) -> timedelta | None:
        seconds = self.stats.oldest_seconds
        return None if seconds is None else timedelta(seconds=seconds)

    @property
    def delayed(self) -> str:
        return _count(self.stats.delayed, self.stats.delayed_exact)

    @property
    def poison(self) -> str:
        return _count(self.stats.poison, self.stats.poison_exact)

    @property
    def in_flight(self) -> str:
        """As the workers report it, and not less than what is leased."""
        return UNKNOWN if self.stats.in_flight is None else f"{self.stats.in_flight:,}"

    @property
    def state(self) -> tuple[display.Tone, str]:
        """The worst that is known, with the tone of its badge."""
        stats = self.stats
        if self.label in NO_QUEUES:
            return self._state_of_service
        if self.queue is None and not statistics.is_part(self.label):
            return "bad", "no such queue"
        if stats.waiting is None:
            return "bad", "not readable"
        if self.paused:
            return "warn", "paused"
        if stats.error:
            return "bad", "incomplete"
        if stats.breakers:
            return "bad", "open breakers"
        if not stats.workers:
            return "bad" if self.lacks_worker else "quiet", "no worker"
        if self.failed_share is not None and self.failed_share >= FAILING:
            return "bad", "failing"
        if self.is_late:
            return "warn", "late"
        if stats.longest_handler:
            return "warn", "long handler"
        if stats.consumers_without_worker or any(found.what == "recipient" for found in stats.unroutable):
            return "warn", "consumer without worker"
        return "good", "running"

    @property
    def _state_of_service(self) -> tuple[display.Tone, str]:
        if self.workers is None:
            return "bad", "not readable"
        if self.stats.breakers:
            return "bad", "open breakers"
        return ("good", "running") if self.workers else ("warn", "not running")

    @property
    def lacks_worker(self) -> bool:
        """Whether messages wait, or a service is needed, and no live process is there."""
        stats = self.stats
        needed = bool(stats.waiting) and not stats.paused and self.queue is not None
        return stats.workers == 0 and (needed or self.label in NO_QUEUES)

    @property
    def is_late(self) -> bool:
        """Whether the oldest message has waited longer than ``ALERTS["max_age"]`` allows; without that, than
        ``LATE``."""
        bound = bound_of("max_age", self.label) or LATE
        return self.oldest is not None and self.oldest > bound

    @property
    def new_poison(self) -> int:
        """How many messages have become poison within the hour that the history has; 0: none, or unknown."""
        before = [point.poison for point in self.history if point.poison is not None]
        return max(0, (self.stats.poison or 0) - before[0]) if before else 0

    @property
    def new_poison_text(self) -> str:
        return _count(self.new_poison)

    @property
    def rates(self) -> str:
        """Messages a second in and out, in the last minute of the history."""
        if not self.history:
            return ""
        point = self.history[-1]
        return f"{rate(point.arrived_rate)} / {rate(point.handled_rate)}"

    @property
    def failures(self) -> str:
        """The share of attempts that failed in the last minute of the history."""
        return "" if self.failed_share is None else f"{100 * self.failed_share:.0f} %"

    @property
    def failed_share(self) -> float | None:
        """``failures`` as a number from 0 to 1; None: there were no attempts."""
        failed, handled = (self.history[-1].failed_rate, self.history[-1].handled_rate) if self.history else (0.0, 0.0)
        return failed / (failed + handled) if failed + handled else None

    @property
    def waits(self) -> str:
        """Median and 95th percentile of the time that the message at the head had waited, over the last hour."""
        ages = sorted(point.oldest_seconds or 0.0 for point in self.history if point.ready is not None)
        if not ages or not self.workers:
            return ""
        median, high = ages[len(ages) // 2], ages[min(len(ages) - 1, len(ages) * 95 // 100)]
        return f"{short_seconds(median)} / {short_seconds(high)}"

    @property
    def handling(self) -> str:
        """Median and 95th percentile of the handlers' duration."""
        point = next((point for point in reversed(self.history) if point.handling_p50 is not None), None)
        if point is None or point.handling_p95 is None or not self.workers:
            return ""
        return f"{short_seconds(point.handling_p50)} / {short_seconds(point.handling_p95)}"

    @property
    def note(self) -> str:
        """The unknown values and their causes, or the note."""
        return self.stats.error or self.stats.note


def rate(value: float) -> str:
    """A rate with as many digits as matter."""
    return f"{value:,.0f}" if value >= 10 or not value else f"{value:.1f}" if value >= 0.1 else "<0.1"


def short_seconds(seconds: float | None) -> str:
    """A short duration: "3 ms", "1.2 s", "12 min"."""
    if seconds is None:
        return UNKNOWN
    if not seconds:
        return "0 s"
    if seconds < 0.001:
        return "<1 ms"
    if seconds < 100:
        return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"


def _count(count: int | None, exact: bool | None = True) -> str:
    return UNKNOWN if count is None else f"{count:,}{'' if exact else '+'}"


@dataclass(frozen=True)
class Overview:
    """All rows, the worst first. ``age``: of the oldest figures in seconds; None: all were read just now."""

    rows: list[OverviewRow]
    age: float | None


def overview() -> Overview:
    """A row for each queue of the project, and for unknown queues that messages are left for: the worst first, and the
    queues within a queue below it."""
    found = snapshots.latest(history=True)
    rows = _rows(found.queues, found.controls, found.history)
    labels = {row.label for row in rows}
    within = {row.label: row.stats.part_of for row in rows if row.stats.part_of in labels}
    ordered = []
    for row in sorted((row for row in rows if row.label not in within), key=_severity):
        parts = [part for part in rows if within.get(part.label) == row.label]
        ordered += [row, *sorted(parts, key=_severity)]
    return Overview(ordered, max(found.ages.values(), default=None))


def row_of(queue: Any) -> OverviewRow:
    """The row of one queue, read now."""
    return row_and(queue)[0]


def row_and(queue: Any, *reads: Callable[[], Any]) -> tuple[OverviewRow, list[tuple[Any, str]]]:
    """The row of one queue, read now, and what these functions read of its database in the same transaction: each
    value, or None, and why it cannot be read."""
    database = Database(router.db_for_read(queue) or "default")

    def read() -> tuple[Any, QueueStats, list[tuple[Any, str]]]:
        controls = database.reader.read(database.read_controls)[0]
        return controls, database.stats_of(queue), [database.reader.read(function) for function in reads]

    controls, stats, values = database.reader.read_together(read)
    known = {} if controls is None else {database.alias: {row.queue: row for row in controls}}
    return _rows([stats], known, {})[0], values


def _severity(row: OverviewRow) -> tuple[Any, ...]:
    """Open breakers and what cannot be read first, then queues without a worker, those whose oldest message is beyond
    its bound, those with most new poison; of equal ones those with most messages."""
    stats = row.stats
    return (
        not (stats.breakers or stats.error),
        not row.lacks_worker,
        not row.is_late,
        not row.stats.longest_handler,
        -row.new_poison,
        -(stats.waiting or 0) - (stats.in_flight or 0),
        row.label,
    )


def _rows(
    found: list[QueueStats],
    known: Mapping[str, Mapping[str, QueueControl]],
    history: Mapping[str, list[snapshots.Point]],
) -> list[OverviewRow]:
    queues = {queue._meta.label: queue for queue in registry.queues}
    controls: dict[str, Mapping[str, QueueControl]] = {}
    # Where even the pause states could not be read, the options cannot be read either.
    for alias in {stats.database for stats in found if stats.paused is not None}:
        if alias in known:
            controls[alias] = known[alias]
            continue
        unset = dict.fromkeys(("concurrency", *overrides.SETTABLE))
        changed = QueueControl.objects.using(alias).exclude(paused=False, **unset)
        rows, _ = Reader(alias).read(partial(list[QueueControl], changed))
        controls[alias] = {row.queue: row for row in rows or []}
    # No join and no lazy look-up: the site may keep its users in another database than the queue.
    keys = {row.changed_by_id for rows in controls.values() for row in rows.values() if row.changed_by_id}
    users = get_user_model()._base_manager.in_bulk(keys) if keys else {}
    shown = []
    for stats in found:
        control = controls.get(stats.database, {}).get(stats.queue)
        user = users.get(control.changed_by_id) if control else None
        by = user.get_username() if user is not None else ""
        shown.append(OverviewRow(queues.get(stats.queue), stats, control, by, history.get(stats.queue, [])))
    return shown
