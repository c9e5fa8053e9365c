"""Two queues, and the tables that their consumers write.

``FlightDelays`` is TRANSACTIONAL: a message and the figure it raises commit together, so a worker can be killed at any
moment and the figures stay exact. ``Rebookings`` is AT_LEAST_ONCE with a handler that may safely run twice.
"""

from datetime import timedelta

from django.db import models

from queueapp import Queue, Semantics


class FlightDelays(Queue):
    """Flights that departed late or not at all."""

    class Meta:
        db_table = "flight_delays"
        verbose_name_plural = "flight delays"

    class Delivery:
        semantics = Semantics.TRANSACTIONAL


class Rebookings(Queue):
    """Passengers of long delays, to be rebooked a little later."""

    class Meta:
        db_table = "flight_rebookings"
        verbose_name_plural = "rebookings"

    class Delivery:
        semantics = Semantics.AT_LEAST_ONCE
        lease_period = timedelta(seconds=30)


class DelayFigure(models.Model):
    """Late and cancelled flights of one carrier, from one airport, in one scheduled hour of the day.

    One row per combination gives the figures per carrier, per airport and per hour by summing, while two handlers
    rarely want the same row: three tables of sums would make every handler wait for every other.
    """

    carrier = models.CharField(max_length=2)
    origin = models.CharField(max_length=3)
    hour = models.SmallIntegerField(help_text="Scheduled hour of departure, local time.")
    late = models.IntegerField(default=0)
    cancelled = models.IntegerField(default=0)
    minutes = models.BigIntegerField(default=0, help_text="Sum of the departure delays.")
    rebookings = models.IntegerField(default=0, help_text="Rebookings sent: delays of more than two hours.")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["carrier", "origin", "hour"], name="one_figure_each")]

    def __str__(self) -> str:
        return f"{self.carrier} {self.origin} {self.hour:02}"


class Rebooking(models.Model):
    """A flight whose passengers were rebooked. Keyed by the flight: handling a message twice changes nothing."""

    flight = models.CharField(max_length=40, unique=True, help_text="carrier, number, origin and date")
    minutes = models.IntegerField()
    rebooked_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.flight


class Import(models.Model):
    """One press of the import button: a business row that commits together with the message it sends."""

    note = models.CharField(max_length=200)
    message_id = models.UUIDField()
    requested_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.note
