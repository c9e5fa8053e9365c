"""The times of a schedule: a cron expression in a time zone, an interval, or a single time.

All of them are points in time (UTC). An interval counts from ``start``, without one from 1970-01-01 00:00 UTC, so that
its times depend neither on when a process was started nor on what was sent before.

When the clocks change, a cron expression with fixed minutes and hours runs once, as Debian's cron does: a time that is
skipped in spring runs at the first minute after the gap, one that comes twice in autumn at its first occurrence. An
expression whose minute or hour field begins with ``*``, or one with seconds, runs at every matching moment.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from typing import Any
from zoneinfo import ZoneInfo

from django.conf import settings
from django.utils import timezone as django_timezone

from ..errors import InvalidOption
from ..options import Option

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SHORTEST, LONGEST = timedelta(seconds=1), timedelta(days=3660)

#: The durations and numbers of a schedule.
OPTIONS = (
    Option("every", timedelta, None, "An interval.", SHORTEST, LONGEST, True, True),
    Option("jitter", timedelta, None, "Each run is up to so much later, evenly spread.",
           timedelta(0), timedelta(days=1), True, True),
    Option("misfire_limit", int, 100, "So many missed runs are made up, the newest.", 1, 10_000),
    Option("misfire_grace", timedelta, timedelta(minutes=1), "A run that is later than this is missed.",
           timedelta(seconds=1), timedelta(days=366), False, True),
)  # fmt: skip


@dataclass(frozen=True)
class Timing:
    """When a schedule runs. Exactly one of ``cron``, ``every`` and ``at`` is given; raises InvalidOption otherwise, and
    for an expression, a zone or a duration that is not accepted."""

    cron: str = ""
    every: timedelta | None = None
    at: datetime | None = None
    timezone: str = ""
    start: datetime | None = None
    end: datetime | None = None

    def __post_init__(self) -> None:
        if sum(bool(item) for item in (self.cron, self.every is not None, self.at is not None)) != 1:
            given = {"cron": self.cron or None, "every": self.every, "at": self.at}
            raise InvalidOption("times of a schedule", given, "one of cron, every and at")
        for name in ("at", "start", "end"):
            moment = getattr(self, name)
            if moment is not None and (not isinstance(moment, datetime) or django_timezone.is_naive(moment)):
                raise InvalidOption(f"{name} of a schedule", moment, "an aware datetime")
        if self.start is not None and self.end is not None and self.end < self.start:
            raise InvalidOption("end of a schedule", self.end, f"not before its start, {self.start}")
        if self.timezone and not self.cron:
            raise InvalidOption("timezone of a schedule", self.timezone, "absent: only cron has a time zone")
        if self.cron:
            parsed(self.cron, zone_of(self.timezone), EPOCH)
        if self.every is not None:
            OPTIONS[0].read(self.every, "schedule: ")

    def after(self, moment: datetime) -> datetime | None:
        """The first time after a moment; None: there is none."""
        return next(self.times(moment), None)

    def times(self, after: datetime) -> Iterator[datetime]:
        """The times after a moment, in order."""
        found = self._all_after(after if self.start is None else max(after, self.start - timedelta(microseconds=1)))
        return found if self.end is None else takewhile(lambda item: self.end is None or item <= self.end, found)

    def latest(self, first: datetime, until: datetime, limit: int) -> list[datetime]:
        """The newest ``limit`` times from ``first``, which is one of them, to ``until``, in order.

        The search begins shortly before ``until`` and looks back four times as far until it has found enough: a
        schedule of seconds that stood still for a year has no more work than others.
        """
        span = timedelta(minutes=1) if self.every is None else self.every * limit
        before_first = first - timedelta(microseconds=1)
        while True:
            begin = max(before_first, until - span)
            found = deque(takewhile(lambda item: item <= until, self.times(begin)), maxlen=limit)
            if len(found) == limit or begin == before_first:
                return list(found)
            span *= 4

    def _all_after(self, moment: datetime) -> Iterator[datetime]:
        if self.at is not None:
            if self.at > moment:
                yield self.at.astimezone(UTC)
        elif self.every is not None:
            origin = (self.start or EPOCH).astimezone(UTC)
            number = max(0, (moment - origin) // self.every + 1)
            while True:
                yield origin + number * self.every
                number += 1
        else:
            zone = zone_of(self.timezone)
            last = moment
            for found in parsed(self.cron, zone, moment):
                # Of what comes twice in autumn the second one has the local time of the first; times that a gap in
                # spring has moved coincide.
                if (utc := found.astimezone(UTC)) > last:
                    yield (last := utc)


def parsed(cron: str, zone: ZoneInfo | Any, moment: datetime) -> Iterator[datetime]:
    """The times of a cron expression after a moment, by ``cronsim``. Raises InvalidOption."""
    try:
        from cronsim import CronSim, CronSimError
    except ImportError:
        accepted = "absent without cronsim: install the extra queueapp[cron]"
        raise InvalidOption("cron of a schedule", cron, accepted) from None
    try:
        return iter(CronSim(cron, moment.astimezone(zone)))
    except (CronSimError, AttributeError, TypeError) as error:
        accepted = f"five fields (minute hour day month weekday), or six with seconds first; {error}"
        raise InvalidOption("cron of a schedule", cron, accepted) from None


def zone_of(name: str) -> Any:
    """The time zone of this name; '': TIME_ZONE of the settings. Raises InvalidOption."""
    name = name or settings.TIME_ZONE or "UTC"
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError, TypeError):  # ZoneInfoNotFoundError is a KeyError
        raise InvalidOption("timezone of a schedule", name, 'the name of a time zone, "Europe/Oslo" for one') from None


def delay_of(name: str, moment: datetime, jitter: timedelta | None) -> timedelta:
    """The jitter of one run: derived from the name and the time, so that each process computes the same."""
    if not jitter:
        return timedelta(0)
    return jitter * (zlib.crc32(f"{name} {moment.timestamp()}".encode()) / 2**32)


def next_times(timing: Timing, after: datetime, count: int = 10) -> list[datetime]:
    """The next times of a schedule."""
    return list(islice(timing.times(after), count))
