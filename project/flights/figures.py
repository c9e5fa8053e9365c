"""The live result: what the page shows and the demo checks, read from the database and nowhere else.

Sums of ``DelayFigure`` per carrier, airport and hour, and how many messages wait, are delayed, or are poison. Nothing
here asks a worker: what a killed worker would have said is not what was committed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.db.models import QuerySet, Sum

from project.flights.models import DelayFigure, FlightDelays, Rebooking, Rebookings
from queueapp.models import DelayedMessage, Now, PoisonMessage, Subscriber
from queueapp.sql import nonblocking

#: A count stops here: the page is read every two seconds by each open browser, for any backlog.
COUNT_LIMIT = 100_000

QUEUES = (FlightDelays, Rebookings)
LABELS = [queue._meta.label for queue in QUEUES]
#: What the flights are published to: the topic of ``FlightDelays``, which is journaled.
TOPIC = FlightDelays.__name__

CARRIERS = {
    "9E": "Endeavor Air",
    "AA": "American Airlines",
    "AS": "Alaska Airlines",
    "B6": "JetBlue Airways",
    "DL": "Delta Air Lines",
    "EV": "ExpressJet Airlines",
    "F9": "Frontier Airlines",
    "FL": "AirTran Airways",
    "HA": "Hawaiian Airlines",
    "MQ": "Envoy Air",
    "OO": "SkyWest Airlines",
    "UA": "United Air Lines",
    "US": "US Airways",
    "VX": "Virgin America",
    "WN": "Southwest Airlines",
    "YV": "Mesa Airlines",
}
AIRPORTS = {"EWR": "Newark Liberty", "JFK": "John F. Kennedy", "LGA": "LaGuardia"}


@dataclass(frozen=True, slots=True)
class Figure:
    """Late and cancelled flights of one carrier, airport or hour."""

    key: str
    name: str
    late: int = 0
    cancelled: int = 0
    minutes: int = 0

    @property
    def total(self) -> int:
        return self.late + self.cancelled

    @property
    def late_text(self) -> str:
        return f"{self.late:,}"

    @property
    def cancelled_text(self) -> str:
        return f"{self.cancelled:,}"

    @property
    def total_text(self) -> str:
        return f"{self.total:,}"

    @property
    def average_minutes(self) -> int:
        """Average delay of the late ones, in whole minutes."""
        return round(self.minutes / self.late) if self.late else 0


@dataclass(frozen=True, slots=True)
class Backlog:
    """Messages that are somewhere on their way. A count of COUNT_LIMIT means that many or more."""

    waiting: int
    rebookings_waiting: int
    delayed: int
    poison: int
    workers: int


def per_carrier() -> list[Figure]:
    """One figure per carrier that has any, most flights first."""
    return sorted(_summed("carrier", CARRIERS), key=lambda figure: (-figure.total, figure.key))


def per_airport() -> list[Figure]:
    """One figure per airport of New York."""
    found = {figure.key: figure for figure in _summed("origin", AIRPORTS)}
    return [found.pop(key, Figure(key, name)) for key, name in AIRPORTS.items()] + list(found.values())


def per_hour() -> list[Figure]:
    """24 figures, one per scheduled hour of departure."""
    found = {figure.key: figure for figure in _summed("hour", {})}
    return [Figure(f"{hour:02}", f"{hour:02}:00 to {hour:02}:59", *_counts(found.get(str(hour)))) for hour in range(24)]


def handled_flights() -> int:
    """Messages of FlightDelays whose effect is committed: each raises exactly one figure by one."""
    sums = DelayFigure.objects.aggregate(late=Sum("late"), cancelled=Sum("cancelled"))
    return (sums["late"] or 0) + (sums["cancelled"] or 0)


def rebooked_flights() -> int:
    """Flights whose passengers were rebooked."""
    return Rebooking.objects.count()


def backlog() -> Backlog:
    """Where messages are now, each count stopping at COUNT_LIMIT."""
    return Backlog(
        waiting=_capped(nonblocking(FlightDelays.objects.all())),
        rebookings_waiting=_capped(nonblocking(Rebookings.objects.all())),
        delayed=_capped(nonblocking(DelayedMessage.objects.filter(destination__in=LABELS))),
        poison=_capped(poison_messages()),
        workers=_capped(Subscriber.objects.filter(queue=FlightDelays._meta.label, alive_until__gt=Now())),
    )


def poison_messages() -> QuerySet[PoisonMessage]:
    """Unresolved poison messages of this app's queues."""
    return nonblocking(PoisonMessage.objects.filter(queue__in=LABELS, status=PoisonMessage.Status.UNRESOLVED))


def _summed(column: str, names: dict[str, str]) -> list[Figure]:
    rows = (
        DelayFigure.objects.order_by(column)
        .values_list(column)
        .annotate(late=Sum("late"), cancelled=Sum("cancelled"), minutes=Sum("minutes"))
    )
    return [Figure(str(key), names.get(str(key), str(key)), *sums) for key, *sums in rows]


def _counts(figure: Figure | None) -> tuple[int, int, int]:
    return (figure.late, figure.cancelled, figure.minutes) if figure else (0, 0, 0)


def _capped(rows: QuerySet[Any]) -> int:
    # Ordering would make the limit sort the whole table first.
    return rows.order_by()[:COUNT_LIMIT].count()
