"""Queues of the options of ``models.delivery`` about leases that are part of a table, or of its statements."""

from __future__ import annotations

from datetime import timedelta

from queueapp import ExpirationModel, Leasing, Queue


class Forever(Queue):
    """A lease never expires."""

    class Delivery:
        lease_period = None


class Aging(Queue):
    """Messages expire by how long they have been there, unless they say otherwise."""

    class Delivery:
        expiration = timedelta(hours=1)
        lease_period = timedelta(seconds=5)


class AgingAddressed(Queue):
    """The same by levels and recipients."""

    class Delivery:
        expiration = timedelta(hours=1)
        priorities = 2
        recipients = True


class AgingByQueue(Queue):
    class Delivery:
        expiration = timedelta(hours=1)
        expiration_model = ExpirationModel.QUEUE


class AgingByLatest(Queue):
    class Delivery:
        expiration = timedelta(hours=1)
        expiration_model = ExpirationModel.LATEST


class AgingByEarliest(Queue):
    class Delivery:
        expiration = timedelta(hours=1)
        expiration_model = ExpirationModel.EARLIEST


class Evicting(Queue):
    """A message expires in the hands of its holder."""

    class Delivery:
        expire_leased = True
        lease_period = timedelta(seconds=5)


class Deferring(Queue):
    """An ack may come before its message."""

    class Delivery:
        deferred_ack_expiration = timedelta(hours=1)
        leasing = Leasing.SUBLET
        lease_period = timedelta(seconds=5)
