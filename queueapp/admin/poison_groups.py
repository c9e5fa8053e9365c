"""The groups of the unresolved poison messages: the same exception at the same place, so that one fix resolves them.

Counted among the newest ``READ`` messages; the page says when there are more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db.models import QuerySet
from django.utils.html import format_html
from django.utils.safestring import SafeString

from ..models import PoisonNote
from ..sql import nonblocking
from .formatting import charts, display, untrusted
from .large_tables.lists import Start

#: Messages that are read, groups that are shown, and names of each kind in a group.
READ, SHOWN, NAMES = 10_000, 25, 5
#: Characters of a traceback that are read to find its last frame.
MAX_TRACEBACK = 64 * 1024
TREND = timedelta(days=1)
#: Notes of a group that are shown, and characters of the newest one in the list of groups.
NOTES, BRIEF = 10, 200
_ATTEMPTS = re.compile(r"failed \d+ of \d+ attempts: ")
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+), in (\S+)')


def failure_of(reason: str, exception: str) -> tuple[str, str]:
    """The exception and the reason, each thing once: most reasons name the exception, some after the attempts, which
    lists have beside it."""
    reason = _ATTEMPTS.sub("", reason, count=1)
    return "" if reason.startswith(exception.rpartition(".")[2]) else exception, reason


@dataclass
class Group:
    """Messages of one group. ``newest``: the number of its newest one. ``queues``, ``versions``, ``hosts``: the first
    ``NAMES`` names that occur."""

    key: str
    newest: int
    exception: str
    reason: str
    last: datetime
    first: datetime
    #: The database's clock.
    now: datetime
    count: int = 0
    queues: set[str] = field(default_factory=set)
    versions: set[str] = field(default_factory=set)
    hosts: set[str] = field(default_factory=set)
    hours: list[int] = field(default_factory=lambda: [0] * 24)
    frame: str = ""
    #: Its newest note.
    note: Any = ""

    @property
    def title(self) -> Any:
        """What has failed."""
        return untrusted.inline(": ".join(filter(None, failure_of(self.reason, self.exception))), 160)

    @property
    def trend(self) -> Any:
        """The failures of the last 24 hours."""
        series = [(self.now - timedelta(hours=23 - hour), float(count)) for hour, count in enumerate(self.hours)]
        return charts.sparkline(series, self.now, TREND, "failures an hour in the last day")

    @property
    def age(self) -> Any:
        return f"{display.duration(self.now - self.last)} ago"

    @property
    def since(self) -> Any:
        return display.moment(self.first)

    @property
    def where(self) -> Any:
        return untrusted.inline(self.frame, 120) if self.frame else ""

    @property
    def from_queues(self) -> Any:
        return _names(self.queues)

    @property
    def on_versions(self) -> Any:
        return _names(self.versions)

    @property
    def on_hosts(self) -> Any:
        return _names(self.hosts)


def _names(found: Iterable[str]) -> Any:
    return untrusted.inline(", ".join(sorted(found)) or "\u2013", 80)


@dataclass(frozen=True)
class Groups:
    """The largest groups. ``complete``: whether all unresolved messages were read."""

    groups: list[Group]
    complete: bool
    more: int


def groups_of(rows: QuerySet[Any], now: datetime) -> Groups:
    """The groups of these messages; three statements."""
    columns = ("number", "group_key", "queue", "exception_type", "reason", "failed_at", "first_failed_at", "host",
               "worker_version")  # fmt: skip
    found: dict[str, Group] = {}
    newest = list(nonblocking(rows).order_by("-number").values_list(*columns)[: READ + 1])
    for number, key, queue, exception, reason, at, first, host, version in newest[:READ]:
        # Messages without a group are alike if their reasons are.
        name = key or f"\0{reason}"
        if name not in found:
            found[name] = Group(key, number, exception, reason, at, first or at, now)
        group = found[name]
        group.count += 1
        group.last, group.first = max(group.last, at), min(group.first, first or at)
        for names, value in ((group.queues, queue), (group.versions, version), (group.hosts, host)):
            if value and len(names) < NAMES:
                names.add(value)
        hour = int((now - at) / timedelta(hours=1))
        if 0 <= hour < 24:
            group.hours[23 - hour] += 1
    shown = sorted(found.values(), key=lambda group: (-group.count, -group.newest))[:SHOWN]
    last_frames(rows, shown)
    notes = newest_notes(str(rows.db), [group.key for group in shown if group.key])
    for group in shown:
        group.note = notes.get(group.key, "")
    return Groups(shown, len(newest) <= READ, len(found) - len(shown))


def last_frames(rows: QuerySet[Any], groups: list[Group]) -> None:
    """Set the frame in which the newest message of each group failed."""
    wanted = {group.newest: group for group in groups}
    tracebacks = rows.model.objects.using(rows.db).filter(number__in=wanted)
    for number, text in tracebacks.annotate(text=Start("traceback", MAX_TRACEBACK)).values_list("number", "text"):
        if frames := _FRAME.findall(text or ""):
            path, line, function = frames[-1]
            wanted[number].frame = f"{'/'.join(path.split('/')[-2:])}:{line} {function}"


# -- notes ----------------------------------------------------------------------------------------------------------


def notes_of(alias: str, group: str) -> list[SafeString]:
    """The newest notes on a group."""
    rows = PoisonNote.objects.using(alias).filter(group_key=group).order_by("-number")[:NOTES]
    return [_line(row, 1000) for row in rows]


def newest_notes(alias: str, groups: Iterable[str]) -> dict[str, SafeString]:
    """The newest note of each of these groups that has any, shortened."""
    rows = PoisonNote.objects.using(alias).filter(group_key__in=list(groups)).order_by("-number")[:1000]
    return {row.group_key: _line(row, BRIEF) for row in reversed(rows)}


def _line(note: PoisonNote, longest: int) -> SafeString:
    by = untrusted.inline(note.username or "a canary", 60)
    return format_html("{}, {}: {}", display.moment(note.written_at), by, untrusted.inline(note.text, longest))
