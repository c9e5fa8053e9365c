"""The column type that only tables made by NServiceBus' PostgreSQL transport have."""

from __future__ import annotations

from typing import Any

from .fields import UtcField


class NaiveUtcField(UtcField):
    """UTC in a column without a time zone, as NServiceBus' PostgreSQL tables have it: ``timestamp``, not ``timestamptz``."""

    naive_utc = True

    def db_type(self, connection: Any) -> str | None:
        return "timestamp" if connection.vendor == "postgresql" else super().db_type(connection)
