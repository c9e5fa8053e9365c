"""The demo's consumers on the real database: figures exact, broken records poison, long delays rebooked once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import transaction
from django.db.models import F

from project.flights.consumers import REBOOK_AFTER, BrokenRecord, RebookFlight, count_delay, rebook
from project.flights.messages import FlightDelayed
from project.flights.models import DelayFigure, FlightDelays, Rebooking, Rebookings
from queueapp import delayed
from queueapp.models import DelayedMessage, Now, PoisonMessage
from tests.in_process_worker import Worker, eventually

from .examples import cancelled_flight, flight


@contextmanager
def working(queue: type, workers: int = 1) -> Iterator[None]:
    """Workers of this process on a queue, stopped at the end."""
    started = [Worker(queue).start() for _ in range(workers)]
    try:
        yield
    finally:
        for worker in started:
            worker.stop()


def figures() -> dict[tuple[str, str, int], tuple[int, int, int, int]]:
    return {
        (row.carrier, row.origin, row.hour): (row.late, row.cancelled, row.minutes, row.rebookings)
        for row in DelayFigure.objects.all()
    }


@pytest.mark.django_db
def test_flights_are_counted_by_carrier_airport_and_hour() -> None:
    for message in (flight(), flight(delay=20), flight(hour=6), cancelled_flight(), cancelled_flight(origin="JFK")):
        count_delay(message)
    assert figures() == {
        ("UA", "EWR", 5): (2, 1, 50, 0),
        ("UA", "EWR", 6): (1, 0, 30, 0),
        ("UA", "JFK", 5): (0, 1, 0, 0),
    }


@pytest.mark.django_db
@pytest.mark.parametrize(("minutes", "sent"), [(120, 0), (121, 1)])
def test_delay_over_two_hours_sends_a_delayed_rebooking(minutes: int, sent: int) -> None:
    count_delay(flight(delay=minutes))
    stored = DelayedMessage.objects.annotate(wait=F("due") - F("stored_at"))
    assert [(m.destination, bytes(m.body)) for m in stored] == [
        ("flights.Rebookings", b'{"flight":"UA1545 EWR 2013-01-01","minutes":121}')
    ] * sent
    assert all(abs(m.wait - REBOOK_AFTER) < timedelta(seconds=1) for m in stored)
    assert figures()["UA", "EWR", 5] == (1, 0, minutes, sent)


@pytest.mark.django_db(transaction=True)
def test_figure_and_rebooking_are_undone_together_with_the_receive() -> None:
    FlightDelays.send(flight(delay=200))

    def handle_and_fail() -> None:
        with FlightDelays.receive() as batch:
            for message in batch:
                count_delay(message.decode(FlightDelayed))
                message.ack()
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        handle_and_fail()
    assert (FlightDelays.objects.count(), figures(), DelayedMessage.objects.count()) == (1, {}, 0)


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (flight(arrival=None, air_time=None), "no arrival time"),
        (flight(air_time=None, delay=300), "no time in the air"),
    ],
)
def test_broken_record_is_refused_with_the_reason_and_without_an_effect(broken: object, reason: str) -> None:
    with pytest.raises(BrokenRecord, match=f"UA1545 EWR 2013-01-01 departed .* {reason}"):
        count_delay(broken)
    assert (figures(), DelayedMessage.objects.count()) == ({}, 0)


@pytest.mark.django_db(transaction=True)
def test_broken_record_is_poison_after_three_attempts_and_its_neighbours_are_counted() -> None:
    FlightDelays.send_many([flight(), flight(arrival=None), flight(flight=1)])
    with working(FlightDelays):
        eventually(lambda: not FlightDelays.objects.exists() and PoisonMessage.objects.exists())
    poison = PoisonMessage.objects.get()
    assert (poison.queue, poison.attempts) == ("flights.FlightDelays", 3)
    assert poison.exception_type == "project.flights.consumers.BrokenRecord"
    assert poison.reason.startswith("failed 3 of 3 attempts: BrokenRecord: UA1545 EWR 2013-01-01 departed 30 minutes")
    assert figures() == {("UA", "EWR", 5): (2, 0, 60, 0)}


@pytest.mark.django_db(transaction=True)
def test_figures_that_many_threads_create_and_raise_at_once_are_exact() -> None:
    # Few figures, none of them there yet, and eight threads: every handler meets others at the same row.
    kinds = [("UA", 5), ("AA", 5), ("UA", 6)]
    FlightDelays.send_many(
        flight(carrier=carrier, hour=hour, flight=n, delay=16) for n in range(150) for carrier, hour in kinds
    )
    with working(FlightDelays, workers=2):
        eventually(lambda: not FlightDelays.objects.exists())
    assert figures() == {(carrier, "EWR", hour): (150, 0, 150 * 16, 0) for carrier, hour in kinds}
    assert not PoisonMessage.objects.exists()


@pytest.mark.django_db
def test_flight_is_rebooked_once_however_often_its_message_comes() -> None:
    for _ in range(3):
        rebook(RebookFlight("UA1545 EWR 2013-01-01", 150))
    assert list(Rebooking.objects.values_list("flight", "minutes")) == [("UA1545 EWR 2013-01-01", 150)]


@pytest.mark.django_db(transaction=True)
def test_long_delay_is_rebooked_through_the_delayed_store() -> None:
    with transaction.atomic():
        count_delay(flight(delay=150))
    DelayedMessage.objects.update(due=Now())
    assert delayed.dispatch_due("default", 10).moved == 1
    with working(Rebookings):
        eventually(lambda: not Rebookings.objects.exists())
    assert Rebooking.objects.get().flight == "UA1545 EWR 2013-01-01"
