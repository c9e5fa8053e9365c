"""One queue per semantics and per table shape, and the ledger that crash tests compare with."""

from datetime import timedelta

from django.db import models

from queueapp import ForeignQueue, ForeignSqlServerQueue, Queue, Semantics


class Leased(Queue):
    """AT_LEAST_ONCE, plain first in first out."""

    class Delivery:
        semantics = Semantics.AT_LEAST_ONCE
        lease_period = timedelta(seconds=5)


class Transactional(Queue):
    class Delivery:
        semantics = Semantics.TRANSACTIONAL
        #: Of no account where it lies there itself, which is everywhere but in the tests with two databases.
        delayed_in = ("default",)


class AtMostOnce(Queue):
    class Delivery:
        semantics = Semantics.AT_MOST_ONCE


class Urgent(Queue):
    """Three priority levels."""

    class Delivery:
        priorities = 3
        lease_period = timedelta(seconds=5)


class Addressed(Queue):
    """A copy per consumer."""

    class Delivery:
        recipients = True
        lease_period = timedelta(seconds=5)


class AddressedUrgent(Queue):
    """Recipients and levels together."""

    class Delivery:
        recipients = True
        priorities = 3
        semantics = Semantics.TRANSACTIONAL


class Readable(Queue):
    """With the generated readable body, and a name that needs quoting."""

    class Meta:
        db_table = "odd 'name' [of a Tësch"  # a closing bracket is not quoted right by mssql-django

    class Delivery:
        body_string = True


class Short(Queue):
    """Messages expire by themselves."""

    class Delivery:
        expiration = timedelta(seconds=30)


class Interop(Queue):
    """A table of our own that endpoints of NServiceBus use as well."""

    wire_format = "nservicebus"

    class Delivery:
        semantics = Semantics.TRANSACTIONAL


class Effect(models.Model):
    """One row per effect of a handler: what a message did, written in the handler's transaction."""

    name = models.CharField(max_length=100, db_index=True)
    detail = models.CharField(max_length=200, default="")
    at = models.DateTimeField(auto_now_add=True)


class ForeignPostgres(ForeignQueue):
    """A table as NServiceBus' PostgreSQL transport makes it; tests create it by hand."""

    class Meta:
        db_table = "foreign_postgres"


class ForeignSqlServer(ForeignSqlServerQueue):
    """A table as NServiceBus' SQL Server transport makes it."""

    class Meta:
        db_table = "foreign_sqlserver"
