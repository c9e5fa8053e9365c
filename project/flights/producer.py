"""Publishing the flights without Spark: for a machine without Java, and to compare the Spark job with."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import date, datetime, timedelta

from project.flights import source
from project.flights.messages import FlightDelayed
from project.flights.models import FlightDelays
from project.flights.publication import Progress, Published

_ROWS_PER_REPORT = 5_000


def publish_flights_without_spark(progress: Progress | None = None, limit: int | None = None) -> Published:
    """Send every late or cancelled flight, of the whole file or its first ``limit`` rows, to ``flights.FlightDelays``,
    all or nothing. Raises FlightsMissing."""
    began = time.monotonic()
    read = 0

    def messages() -> Iterator[FlightDelayed]:
        nonlocal read
        for row in source.rows(limit):
            read += 1
            if progress is not None and read % _ROWS_PER_REPORT == 0:
                progress(read, 0)
            message = to_message(row)
            if message is not None:
                yield message

    published = FlightDelays.send_many(messages())
    if progress is not None:
        progress(read, published)
    return Published(read, published, 0.0, time.monotonic() - began)


def to_message(row: dict[str, str]) -> FlightDelayed | None:
    """The message about one flight of the file; None for a flight that was in time."""
    delay = _number(row["dep_delay"])
    if delay is not None and delay <= source.LATE_MINUTES:
        return None
    minute = timedelta(minutes=1)
    scheduled_departure = datetime.fromisoformat(row["time_hour"]) + int(row["minute"]) * minute
    return FlightDelayed(
        carrier=row["carrier"],
        flight=int(row["flight"]),
        origin=row["origin"],
        destination=row["dest"],
        day=date(int(row["year"]), int(row["month"]), int(row["day"])),
        hour=int(row["hour"]),
        scheduled_departure=scheduled_departure,
        departure=None if delay is None else scheduled_departure + delay * minute,
        scheduled_arrival=_minutes_after_midnight(int(row["sched_arr_time"])),
        arrival=None if (arrival := _number(row["arr_time"])) is None else _minutes_after_midnight(arrival),
        delay=delay,
        cancelled=delay is None,
        air_time=_number(row["air_time"]),
        tail_number=None if row["tailnum"] == source.NOT_KNOWN else row["tailnum"],
    )


def _number(text: str) -> int | None:
    return None if text == source.NOT_KNOWN else int(text)


def _minutes_after_midnight(clock: int) -> int:
    """517 is 5:17, so 317 minutes."""
    return clock // 100 * 60 + clock % 100
