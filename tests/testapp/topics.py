"""Queues that collect topics: by name, several the same one, by regular expression, with copies for each consumer."""

from __future__ import annotations

from datetime import timedelta

from queueapp import Queue, Semantics


class Bookings(Queue):
    """Named otherwise than its class, and than its topic."""

    class Delivery:
        name = "bookings"
        underlying_topic = "FLIGHTS"
        semantics = Semantics.TRANSACTIONAL


class FlightAudit(Queue):
    """The same topic, by regular expression, and one of its own."""

    class Delivery:
        underlying_topic = "^FLIGHTS$|^AUDIT_DIRECT$"
        default_publish_target = "AUDIT_DIRECT"
        lease_period = timedelta(seconds=5)


class FlightMail(Queue):
    """A copy per consumer of what is published to the same topic."""

    class Delivery:
        underlying_topic = "FLIGHTS"
        recipients = True
        lease_period = timedelta(seconds=5)


class LateFlights(Queue):
    """Collects what its filter matches."""

    class Delivery:
        underlying_topic = "DEPARTURES"
        filter = "/minutes > 15"
        lease_period = timedelta(seconds=5)
        peek_delay = timedelta(milliseconds=100)


class LateFlightsOnce(Queue):
    """The same TRANSACTIONAL."""

    class Delivery:
        underlying_topic = "DEPARTURES"
        filter = "/minutes > 15 AND TOPIC_NAME() = 'DEPARTURES'"
        semantics = Semantics.TRANSACTIONAL
        peek_delay = timedelta(milliseconds=100)


class Filtered(Queue):
    """Of the notes of a conformance test, those with a small number."""

    class Delivery:
        filter = "/number < 100"
        lease_period = timedelta(seconds=5)


class Packed(Queue):
    """Bodies in MessagePack."""

    class Delivery:
        message_type = "msgpack"
        filter = "/n < 10"
        lease_period = timedelta(seconds=5)


__all__ = ["Bookings", "Filtered", "FlightAudit", "FlightMail", "LateFlights", "LateFlightsOnce", "Packed"]
