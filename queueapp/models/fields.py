"""Column types that PostgreSQL and SQL Server store differently, and the database's clock.

``uniqueidentifier``, ``datetime2`` and ``varbinary`` are what a wire-compatible queue table has on SQL Server;
Django's own fields would make ``char(32)`` and ``datetimeoffset`` of them.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

from django.db import models
from django.db.models import QuerySet, functions

from ..messages import ORDERING_KEY
from ..sql.orm import HeaderKey, HeaderText


class GuidField(models.UUIDField):
    """A uuid: ``uuid`` on PostgreSQL, ``uniqueidentifier`` on SQL Server."""

    def db_type(self, connection: Any) -> str | None:
        return "uniqueidentifier" if connection.vendor == "microsoft" else super().db_type(connection)

    def rel_db_type(self, connection: Any) -> str | None:
        return "uniqueidentifier" if connection.vendor == "microsoft" else super().rel_db_type(connection)

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        if connection.vendor == "microsoft" and value is not None:
            return str(self.to_python(value))
        return super().get_db_prep_value(value, connection, prepared)

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> uuid.UUID | None:
        return uuid.UUID(value) if isinstance(value, str) else value


class UtcField(models.DateTimeField):
    """A point in time: ``timestamptz`` on PostgreSQL, ``datetime2`` holding UTC on SQL Server; always aware here, also
    where ``USE_TZ`` is False."""

    #: Whether the column itself is without a zone.
    naive_utc = False

    def db_type(self, connection: Any) -> str | None:
        return "datetime2" if connection.vendor == "microsoft" else super().db_type(connection)

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        if connection.vendor == "microsoft" and isinstance(value, datetime):
            # An aware non-UTC time sent to datetime2 silently keeps its local clock: two hours off in Oslo.
            return value.astimezone(UTC).replace(tzinfo=None)
        return super().get_db_prep_value(value, connection, prepared)

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> datetime | None:
        if not isinstance(value, datetime) or value.tzinfo is not None:
            return value
        if connection.vendor == "microsoft" or self.naive_utc:
            return value.replace(tzinfo=UTC)
        # Without USE_TZ Django sets the session to TIME_ZONE and cuts the zone off. The fold tells the two hours of
        # autumn apart.
        return value.replace(tzinfo=ZoneInfo(connection.timezone_name)).astimezone(UTC)


class NaiveUtcField(UtcField):
    """UTC in a ``timestamp`` column without a time zone, as tables of NServiceBus' PostgreSQL transport have it."""

    naive_utc = True

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        if connection.vendor == "postgresql" and isinstance(value, datetime) and value.tzinfo is not None:
            # An aware time would be stored as the wall time of the session's time zone.
            return value.astimezone(UTC).replace(tzinfo=None)
        return super().get_db_prep_value(value, connection, prepared)

    def db_type(self, connection: Any) -> str | None:
        return "timestamp" if connection.vendor == "postgresql" else super().db_type(connection)


class BytesField(models.BinaryField):
    """Bytes: ``bytea`` or ``varbinary(max)``; always ``bytes`` here, where psycopg's text mode gives a memoryview."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Once loaded, mssql-django gives every new BinaryField max_length "max": models and migrations made before and
        # after would differ, and makemigrations would find a change in each body.
        if self.max_length == "max":  # type: ignore[comparison-overlap]
            self.max_length = None

    def db_type(self, connection: Any) -> str | None:
        # mssql-django makes ``varbinary(None)`` of a field without max_length.
        return "varbinary(max)" if connection.vendor == "microsoft" else super().db_type(connection)

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> bytes | None:
        return None if value is None else bytes(value)


class RangesField(models.Field):  # type: ignore[type-arg]
    """Ranges of numbers: ``int8multirange``, or JSON of pairs. Read and written by statements of ``sql`` only."""

    def db_type(self, connection: Any) -> str | None:
        return "nvarchar(max)" if connection.vendor == "microsoft" else "int8multirange"


class Now(functions.Now):
    """The database's clock in UTC. Django's ``Now`` is local time on SQL Server, and naive where ``USE_TZ`` is
    False."""

    output_field = UtcField()

    def as_microsoft(self, compiler: Any, connection: Any, **context: Any) -> Any:
        return self.as_sql(compiler, connection, template="SYSUTCDATETIME()", **context)


def distinct_values(rows: QuerySet[Any], column: str) -> Iterator[Any]:
    """The values of a column that an index begins with, ascending: one step to the next one in that index each time,
    however many rows there are of one. Each step is a statement of its own."""
    rows = rows.order_by(column)
    value = rows.values_list(column, flat=True).first()
    while value is not None:
        yield value
        value = rows.filter(**{f"{column}__gt": value}).values_list(column, flat=True).first()


class OrderingKeyField(models.GeneratedField):
    """The ordering key of a message, a generated column of its headers: it stays with a message wherever that goes."""

    def __init__(self, **kwargs: Any) -> None:
        output = models.CharField(max_length=200, null=True)
        options = {"expression": HeaderText(ORDERING_KEY, 200), "output_field": output}
        super().__init__(**{**kwargs, **options, "db_persist": True})

    def deconstruct(self) -> Any:
        name, _, args, _ = super().deconstruct()
        return name, "queueapp.models.OrderingKeyField", args, {}


class FairKeyField(models.GeneratedField):
    """The key by which messages take turns, a generated column of one header; '' where a message lacks it."""

    def __init__(self, header: str, **kwargs: Any) -> None:
        self.header = header
        options = {"expression": HeaderKey(header, 200), "output_field": models.CharField(max_length=200)}
        super().__init__(**{**kwargs, **options, "db_persist": True})

    def deconstruct(self) -> Any:
        name = super().deconstruct()[0]
        return name, "queueapp.models.FairKeyField", [self.header], {}
