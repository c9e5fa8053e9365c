"""The column type that only tables made by NServiceBus' PostgreSQL transport have."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from .fields import UtcField


class NaiveUtcField(UtcField):
    """UTC in a column without a time zone, as NServiceBus' PostgreSQL tables have it: ``timestamp``, not ``timestamptz``."""

    naive_utc = True

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        if connection.vendor == "postgresql" and isinstance(value, datetime) and value.tzinfo is not None:
            # An aware time would be stored as the wall time of the session's time zone.
            return value.astimezone(UTC).replace(tzinfo=None)
        return super().get_db_prep_value(value, connection, prepared)

    def db_type(self, connection: Any) -> str | None:
        return "timestamp" if connection.vendor == "postgresql" else super().db_type(connection)
