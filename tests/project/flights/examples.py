"""A flight that was late, to be varied: ``flight(delay=150)``."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Any

from project.flights.messages import FlightDelayed


def flight(**changes: Any) -> FlightDelayed:
    """UA 1545 from Newark, 30 minutes late, unless ``changes`` say otherwise."""
    values: dict[str, Any] = {
        "carrier": "UA",
        "flight": 1545,
        "origin": "EWR",
        "destination": "IAH",
        "day": date(2013, 1, 1),
        "hour": 5,
        "scheduled_departure": datetime(2013, 1, 1, 10, 15, tzinfo=UTC),
        "departure": datetime(2013, 1, 1, 10, 45, tzinfo=UTC),
        "scheduled_arrival": 499,
        "arrival": 530,
        "delay": 30,
        "cancelled": False,
        "air_time": 227,
        "tail_number": "N14228",
    }
    return FlightDelayed(**values | changes)


def cancelled_flight(**changes: Any) -> FlightDelayed:
    """The same flight, which did not take place."""
    never = {"departure": None, "arrival": None, "delay": None, "air_time": None, "cancelled": True}
    return flight(**never | changes)
