"""The messages of the demo. Times are UTC instants; what is only a local clock time is in minutes after midnight.

The data source gives arrivals as the clock of the destination, without a date, so they are kept as that: turning them
into instants would need every airport's time zone and a guess about the day.
"""

from __future__ import annotations

from datetime import date, datetime

import msgspec


class FlightDelayed(msgspec.Struct):
    """A flight that departed more than 15 minutes late, or was cancelled."""

    carrier: str
    flight: int
    origin: str
    destination: str
    #: The local day and hour for which the departure was scheduled; ``hour`` is what the figures are kept by.
    day: date
    hour: int
    scheduled_departure: datetime
    #: None: cancelled.
    departure: datetime | None
    #: Minutes after midnight on the clock of the destination.
    scheduled_arrival: int
    #: None: cancelled, diverted, or a broken record.
    arrival: int | None
    #: Departure delay in minutes; None: cancelled.
    delay: int | None
    cancelled: bool
    #: Minutes in the air; None: cancelled, diverted, or a broken record.
    air_time: int | None
    tail_number: str | None

    @property
    def is_broken(self) -> bool:
        """Departed, but the record lacks the arrival time or the time in the air."""
        return not self.cancelled and (self.arrival is None or self.air_time is None)

    @property
    def key(self) -> str:
        """Names this flight: carrier, number, origin and day occur once together."""
        return f"{self.carrier}{self.flight} {self.origin} {self.day:%Y-%m-%d}"
