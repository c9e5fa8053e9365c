"""The numbers of the overview as it shows them: those of ``operating.statistics``, in words, and who set what.

A queue that cannot be read is a queue with a note, not an error page: whoever looks here may be looking for just that.
What is not known is a dash.
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
from ..operations.statistics import UNKNOWN, QueueFigures
from .formatting import display


@dataclass(frozen=True)
class Figures:
    """One line of the overview. ``queue`` is None where nobody here knows it, ``control`` where nothing is set for it."""

    queue: Any
    of: QueueFigures
    control: QueueControl | None = None
    changed_by: str = ""

    @property
    def label(self) -> str:
        return self.of.queue

    @property
    def alias(self) -> str:
        return self.of.database

    @property
    def semantics(self) -> str:
        return self.of.semantics

    @property
    def paused(self) -> bool:
        return bool(self.of.paused)

    @property
    def subscribers(self) -> int | None:
        return self.of.subscribers

    @property
    def waiting(self) -> str:
        if self.of.waiting is None or self.of.exact:
            return _count(self.of.waiting)
        return display.about(self.of.waiting) if self.of.waiting > statistics.LIMIT else _count(self.of.waiting, False)

    @property
    def leased(self) -> str:
        return _count(self.of.leased, self.of.exact)

    @property
    def lapsed(self) -> str:
        return _count(self.of.lapsed, self.of.exact) if self.of.lapsed else ""

    @property
    def expired(self) -> str:
        return _count(self.of.expired, self.of.exact) if self.of.expired else ""

    @property
    def most(self) -> str:
        """How many messages may be out; '' without a limit."""
        return "" if self.of.flow.max_backlog is None else f"of {self.of.flow.max_backlog:,}"

    @property
    def named(self) -> list[tuple[str, str]]:
        """The statistics of AMPS that are known, in words."""
        found = []
        for one in fields(self.of.flow):
            told = getattr(self.of.flow, one.name)
            if one.name == "subscriptions":
                continue
            if one.name in ("age_of_oldest_lease", "seconds_behind"):
                told = None if told is None else display.of_seconds(told)
            found.append((one.name, UNKNOWN if told is None else f"{told:,}" if isinstance(told, int) else str(told)))
        return found

    @property
    def oldest(self) -> timedelta | None:
        seconds = self.of.oldest_seconds
        return None if seconds is None else timedelta(seconds=seconds)

    @property
    def delayed(self) -> str:
        return _count(self.of.delayed, self.of.delayed_exact)

    @property
    def poison(self) -> str:
        return _count(self.of.poison, self.of.poison_exact)

    @property
    def note(self) -> str:
        """What is not known, and what else is to be said."""
        return self.of.error or self.of.note


def _count(count: int | None, exact: bool | None = True) -> str:
    return UNKNOWN if count is None else f"{count:,}{'' if exact else '+'}"


def of_all_queues() -> list[Figures]:
    """One line per queue of this process, by label, and those of queues that are no more and for which there is something."""
    return _lines(statistics.figures())


def of_queue(queue: Any) -> Figures:
    """The line of one queue."""
    return _lines(statistics.figures([queue]))[0]


def _lines(found: list[QueueFigures]) -> list[Figures]:
    queues = {queue._meta.label: queue for queue in registry.queues}
    controls: dict[str, dict[str, QueueControl]] = {}
    users: dict[Any, str] = {}
    # Where even the pauses could not be read there is nothing more to learn.
    for alias in {one.database for one in found if one.paused is not None}:
        nothing = dict.fromkeys(("concurrency", *overrides.SETTABLE))
        told = QueueControl.objects.using(alias).exclude(paused=False, **nothing)
        rows, _ = Reader(alias).read(partial(list[QueueControl], told))
        controls[alias] = {row.queue: row for row in rows or []}
        # Users are where the site keeps them, which need not be where this queue is: no join, no lazy look-up.
        keys = {row.changed_by_id for row in rows or [] if row.changed_by_id}
        users |= {key: user.get_username() for key, user in get_user_model()._base_manager.in_bulk(keys).items()}
    lines = []
    for one in found:
        control = controls.get(one.database, {}).get(one.queue)
        by = users.get(control.changed_by_id, "") if control else ""
        lines.append(Figures(queues.get(one.queue), one, control, by))
    return lines
