"""The rows of the overview: ``operations.statistics`` as text, and the options that operators have set.

A queue that cannot be read is a row with a note, not an error page: an operator may be looking for exactly that. An
unknown value is a dash.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from typing import Any

from django.contrib.auth import get_user_model

from .. import overrides, registry
from ..models import QueueControl
from ..operations import statistics
from ..operations.safe_reads import Reader
from ..operations.statistics import UNKNOWN, QueueStats
from .formatting import display


@dataclass(frozen=True)
class OverviewRow:
    """One row. ``queue`` None: this project does not know the queue. ``control`` None: no option is set for it."""

    queue: Any
    stats: QueueStats
    control: QueueControl | None = None
    changed_by: str = ""

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
    def note(self) -> str:
        """The unknown values and their causes, or the note."""
        return self.stats.error or self.stats.note


def _count(count: int | None, exact: bool | None = True) -> str:
    return UNKNOWN if count is None else f"{count:,}{'' if exact else '+'}"


def rows_of_all_queues() -> list[OverviewRow]:
    """A row for each queue of the project, by label, then for unknown queues that messages are left for."""
    return _rows(statistics.queue_stats())


def row_of(queue: Any) -> OverviewRow:
    """The row of one queue."""
    return _rows(statistics.queue_stats([queue]))[0]


def _rows(found: list[QueueStats]) -> list[OverviewRow]:
    queues = {queue._meta.label: queue for queue in registry.queues}
    controls: dict[str, dict[str, QueueControl]] = {}
    users: dict[Any, str] = {}
    # Where even the pause states could not be read, the options cannot be read either.
    for alias in {stats.database for stats in found if stats.paused is not None}:
        unset = dict.fromkeys(("concurrency", *overrides.SETTABLE))
        changed = QueueControl.objects.using(alias).exclude(paused=False, **unset)
        rows, _ = Reader(alias).read(partial(list[QueueControl], changed))
        controls[alias] = {row.queue: row for row in rows or []}
        # No join and no lazy look-up: the site may keep its users in another database than the queue.
        keys = {row.changed_by_id for row in rows or [] if row.changed_by_id}
        users |= {key: user.get_username() for key, user in get_user_model()._base_manager.in_bulk(keys).items()}
    overview = []
    for stats in found:
        control = controls.get(stats.database, {}).get(stats.queue)
        by = users.get(control.changed_by_id, "") if control else ""
        overview.append(OverviewRow(queues.get(stats.queue), stats, control, by))
    return overview
