"""Queues in tables that somebody else made: NServiceBus' transports have none of our own columns (spec/000, 001).

Such a table is declared as an unmanaged queue. It can be sent to, and received from TRANSACTIONAL or AT_MOST_ONCE: there
are no columns for a lease. Headers are written under the names of that wire format.
"""

from __future__ import annotations

from typing import Any

from django.db import models

from .delivery import Semantics
from .fields import UtcField
from .queue import Queue


class NaiveUtcField(UtcField):
    """UTC in a column without a time zone, as NServiceBus' PostgreSQL tables have it: ``timestamp``, not ``timestamptz``."""

    naive_utc = True

    def db_type(self, connection: Any) -> str | None:
        return "timestamp" if connection.vendor == "postgresql" else super().db_type(connection)


class ForeignQueue(Queue):
    """A queue table of NServiceBus' PostgreSQL transport (spec/000): id, expires, headers, body and seq, nothing else.

    >>> class Billing(ForeignQueue):
    ...     class Meta:
    ...         db_table = "billing"
    """

    correlation_id = None  # type: ignore[assignment]
    reply_to_address = None  # type: ignore[assignment]
    recoverable = None  # type: ignore[assignment]
    expires = NaiveUtcField(null=True, blank=True)
    headers = models.TextField()
    recipient = None  # type: ignore[assignment]
    priority = None  # type: ignore[assignment]
    is_barrier = None  # type: ignore[assignment]
    enqueued_at = None  # type: ignore[assignment]
    lease_token = None  # type: ignore[assignment]
    lease_owner = None  # type: ignore[assignment]
    lease_expires = None  # type: ignore[assignment]
    deliveries = None  # type: ignore[assignment]
    cancels = None  # type: ignore[assignment]
    failures = None  # type: ignore[assignment]

    #: Headers are written under NServiceBus' names.
    wire_format = "nservicebus"

    class Meta:
        abstract = True
        managed = False

    class Delivery:
        semantics = Semantics.TRANSACTIONAL


class ForeignSqlServerQueue(ForeignQueue):
    """A queue table of NServiceBus' SQL Server transport (spec/001), whose order column is ``RowVersion``."""

    seq = models.BigAutoField(primary_key=True, db_column="RowVersion")
    correlation_id = models.CharField(max_length=255, null=True, blank=True, db_column="CorrelationId")  # type: ignore[assignment]
    reply_to_address = models.CharField(max_length=255, null=True, blank=True, db_column="ReplyToAddress")  # type: ignore[assignment]
    recoverable = models.BooleanField(default=True)  # type: ignore[assignment]

    class Meta:
        abstract = True
        managed = False
