"""Intervals and numbers as AMPS writes them."""

from __future__ import annotations

from datetime import timedelta

import pytest

from queueapp.contrib.amps.elements import count, interval, text_literal, time_literal
from queueapp.contrib.amps.xml_reader import NotMapped


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("2000ns", timedelta(microseconds=2)),
        ("250us", timedelta(microseconds=250)),
        ("5ms", timedelta(milliseconds=5)),
        ("30s", timedelta(seconds=30)),
        ("15m", timedelta(minutes=15)),
        ("2h", timedelta(hours=2)),
        ("1d", timedelta(days=1)),
        ("3w", timedelta(weeks=3)),
        ("15M", timedelta(minutes=15)),
        ("2 H", timedelta(hours=2)),
        ("1.5h", timedelta(minutes=90)),
        ("0s", timedelta(0)),
    ],
)
def test_an_interval_is_a_number_with_a_unit_in_any_case(text: str, time: timedelta) -> None:
    assert interval(text) == time


@pytest.mark.parametrize("text", ["", "5", "s", "5x", "1h30m", "1e3s", "+5s", "1ns", "0.5us", "٣s", "9" * 19 + "s"])
def test_what_is_no_interval(text: str) -> None:
    with pytest.raises(NotMapped):
        interval(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("12500", 12_500), ("10k", 10_000), ("2M", 2_000_000), ("2m", 2_000_000), ("1.5K", 1500)],
)
def test_a_number_may_be_in_thousands_or_millions(text: str, number: int) -> None:
    assert count(text) == number


@pytest.mark.parametrize("text", ["", "k", "5s", "-5", "1.5", "0x10", "1_000", "5kb", "5MB", "5gb", "5tb"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(NotMapped):
        count(text)


@pytest.mark.parametrize(
    "time",
    [
        timedelta(0),
        timedelta(days=7),
        timedelta(hours=25),
        timedelta(seconds=90),
        timedelta(microseconds=1),
        timedelta.max,
    ],
)
def test_a_time_is_written_as_what_it_is(time: timedelta) -> None:
    assert eval(time_literal(time)) == time


@pytest.mark.parametrize(
    "text",
    ["", "'", '"', "\\", "\\'", "'\\\"", 'a\'b"c"d', '"""', "\n\r\t\0", "\u2028\udcff\x85\u202e", "ä", "{}", "\\N{X}"],
)
def test_a_text_is_written_as_what_it_is(text: str) -> None:
    literal = text_literal(text)
    assert eval(literal) == text
    assert literal.isprintable()
