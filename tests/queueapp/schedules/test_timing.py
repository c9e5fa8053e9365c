"""The times of a schedule: cron in a time zone, intervals, single times, and what they are when the clocks change."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queueapp import InvalidOption
from queueapp.schedules.timing import Timing, delay_of, next_times


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def times(timing: Timing, after: str, count: int) -> list[str]:
    return [f"{next_time:%m-%d %H:%M:%S}" for next_time in next_times(timing, utc(after), count)]


@pytest.mark.parametrize(
    ("cron", "after", "expected"),
    [
        # Spring: 02:30 does not exist on 29 March, and runs at the first minute after the gap, 03:00.
        ("30 2 * * *", "2026-03-28 00:00", ["03-28 01:30:00", "03-29 01:00:00", "03-30 00:30:00"]),
        # What the gap moves to the same moment is one run.
        ("0,30 2-3 * * *", "2026-03-29 00:00", ["03-29 01:00:00", "03-29 01:30:00", "03-30 00:00:00"]),
        # Autumn: 02:30 exists twice on 25 October, and runs at the first.
        ("30 2 * * *", "2026-10-24 00:00", ["10-24 00:30:00", "10-25 00:30:00", "10-26 01:30:00"]),
        ("30 2 * * *", "2026-10-25 01:00", ["10-26 01:30:00", "10-27 01:30:00"]),
        # An interval in the form of cron runs through both.
        ("*/30 * * * *", "2026-10-24 23:50", [f"10-25 {h:02}:{m:02}:00" for h in range(3) for m in (0, 30)]),
        ("*/30 * * * *", "2026-03-29 00:20", ["03-29 00:30:00", "03-29 01:00:00", "03-29 01:30:00"]),
        ("0 0 9 * * mon-fri", "2026-01-02 08:00", ["01-05 08:00:00", "01-06 08:00:00"]),
        ("*/20 * * * * *", "2026-01-01 00:00", ["01-01 00:00:20", "01-01 00:00:40", "01-01 00:01:00"]),
        ("0 0 29 2 *", "2026-01-01 00:00", ["02-28 23:00:00"]),
        ("0 12 L * *", "2026-02-01 00:00", ["02-28 11:00:00", "03-31 10:00:00"]),
    ],
)
def test_cron_in_a_time_zone(cron: str, after: str, expected: list[str]) -> None:
    assert times(Timing(cron=cron, timezone="Europe/Oslo"), after, len(expected)) == expected


def test_an_interval_counts_from_its_start_or_from_1970() -> None:
    every = timedelta(minutes=25)

    assert times(Timing(every=timedelta(hours=6)), "2026-01-01 07:00", 2) == ["01-01 12:00:00", "01-01 18:00:00"]
    started = Timing(every=every, start=utc("2026-01-01 00:07"))
    assert times(started, "2025-12-31 00:00", 2) == ["01-01 00:07:00", "01-01 00:32:00"]
    assert times(started, "2026-01-01 00:32", 1) == ["01-01 00:57:00"]


def test_nothing_runs_before_start_and_after_end() -> None:
    timing = Timing(cron="0 * * * *", timezone="UTC", start=utc("2026-01-01 05:00"), end=utc("2026-01-01 07:00"))

    assert times(timing, "2026-01-01 00:00", 9) == ["01-01 05:00:00", "01-01 06:00:00", "01-01 07:00:00"]
    assert timing.after(utc("2026-01-01 07:00")) is None


def test_a_single_time_comes_once() -> None:
    timing = Timing(at=utc("2026-01-01 05:00"))

    assert times(timing, "2026-01-01 04:59", 9) == ["01-01 05:00:00"]
    assert timing.after(utc("2026-01-01 05:00")) is None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cron": "* * * * *", "every": timedelta(hours=1)},
        {"cron": "* * * *"},
        {"cron": "61 * * * *"},
        {"cron": "0 0 31 2 *"},
        {"cron": 5},
        {"cron": "* * * * *", "timezone": "Europe/Atlantis"},
        {"cron": "* * * * *", "timezone": "../../etc/passwd"},
        {"every": timedelta(0)},
        {"every": timedelta(days=9999)},
        {"every": timedelta(hours=1), "timezone": "Europe/Oslo"},
        {"at": datetime(2026, 1, 1)},
        {"every": timedelta(hours=1), "start": datetime(2026, 1, 1)},
    ],
)
def test_what_is_no_time_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        Timing(**options)


@given(
    st.sampled_from(["* * * * *", "*/7 * * * *", "30 2 * * *", "0,45 1-3 * * *", "15 */2 * * sun", "5 4 1 * *"]),
    st.sampled_from(["Europe/Oslo", "America/New_York", "Australia/Lord_Howe", "America/Santiago", "UTC"]),
    st.datetimes(datetime(2026, 1, 1), datetime(2027, 12, 31)),
    st.integers(1, 30),
)
def test_times_ascend_and_do_not_depend_on_where_the_search_begins(
    cron: str, zone: str, after: datetime, count: int
) -> None:
    timing = Timing(cron=cron, timezone=zone)

    found = next_times(timing, after.replace(tzinfo=UTC), count)

    assert found == sorted(set(found))
    walked, moment = [], after.replace(tzinfo=UTC)
    for _ in range(count):
        moment = timing.after(moment)
        walked.append(moment)
    assert walked == found
    assert timing.latest(found[0], found[-1], 5) == found[-5:]


def test_the_newest_times_of_a_year_of_seconds_are_found_at_once() -> None:
    timing = Timing(cron="* * * * * *", timezone="Europe/Oslo")

    found = timing.latest(utc("2025-01-01 00:00"), utc("2026-01-01 00:00"), 3)

    assert [f"{item:%H:%M:%S}" for item in found] == ["23:59:58", "23:59:59", "00:00:00"]


def test_jitter_is_the_same_in_each_process_and_below_its_bound() -> None:
    moments = [utc("2026-01-01 00:00") + timedelta(hours=n) for n in range(200)]
    delays = [delay_of("a name", moment, timedelta(minutes=10)) for moment in moments]

    assert delays == [delay_of("a name", moment, timedelta(minutes=10)) for moment in moments]
    assert all(timedelta(0) <= delay < timedelta(minutes=10) for delay in delays)
    assert max(delays) - min(delays) > timedelta(minutes=8)
    assert delay_of("a name", moments[0], None) == timedelta(0)
