"""What happens to the messages of the demo: figures are raised exactly once, long delays are rebooked a little later.

``count_delay`` runs in the transaction that takes the message from its queue, so its figure and the rebooking it sends
are committed with that, or not at all. ``rebook`` may run twice for one message and books once.
"""

from __future__ import annotations

from datetime import timedelta

import msgspec
from django.db.models import F

from project.flights.messages import FlightDelayed
from project.flights.models import DelayFigure, FlightDelays, Rebooking, Rebookings
from queueapp import consumer

LONG_DELAY = timedelta(hours=2)
REBOOK_AFTER = timedelta(seconds=2)


class RebookFlight(msgspec.Struct):
    """A flight so late that its passengers need another one."""

    flight: str
    minutes: int


class BrokenRecord(Exception):
    """A flight that departed and whose record does not say how it went on. No number of attempts mends it."""

    def __init__(self, flight: FlightDelayed) -> None:
        self.flight = flight
        what = "arrival time" if flight.arrival is None else "time in the air"
        super().__init__(f"{flight.key} departed {flight.delay} minutes late and its record has no {what}")


# Without a wait: a broken record stays broken, and the demo is to end.
@consumer(FlightDelays, attempts=3, retry_delay=timedelta(0))
def count_delay(flight: FlightDelayed) -> None:
    """Count the flight in the figure of its carrier, airport and hour. Raises BrokenRecord."""
    if flight.is_broken:
        raise BrokenRecord(flight)
    minutes = flight.delay or 0
    raised = {"cancelled": 1} if flight.cancelled else {"late": 1, "minutes": minutes}
    if timedelta(minutes=minutes) > LONG_DELAY:
        Rebookings.send(RebookFlight(flight.key, minutes), delay=REBOOK_AFTER)
        raised["rebookings"] = 1
    # Last, because every other handler of this figure waits from here until the commit. It is the only lock that a
    # handler waits for, so there is no circle of waiting and no deadlock.
    place = (flight.carrier, flight.origin, flight.hour)
    if not _raise_figure(place, raised):
        # The first flight of its kind here. Of two handlers that come together one waits at the unique constraint for
        # the other's commit, and then finds the row.
        carrier, origin, hour = place
        figure, _ = DelayFigure.objects.get_or_create(carrier=carrier, origin=origin, hour=hour)
        _figures[place] = figure.pk
        _raise_figure(place, raised)


#: (carrier, airport, hour) -> key of its figure: a tenth less work than to look it up by the three. A hint: the row is
#: gone if the transaction that made it failed.
_figures: dict[tuple[str, str, int], int] = {}


def _raise_figure(place: tuple[str, str, int], by: dict[str, int]) -> int:
    if place not in _figures:
        return 0
    figure = DelayFigure.objects.filter(pk=_figures[place])
    return figure.update(**{column: F(column) + number for column, number in by.items()})


@consumer(Rebookings, attempts=5, retry_delay=timedelta(seconds=1))
def rebook(message: RebookFlight) -> None:
    """Book the passengers of a flight on another one, once, however often the message comes."""
    Rebooking.objects.get_or_create(flight=message.flight, defaults={"minutes": message.minutes})
