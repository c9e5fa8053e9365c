"""The distinct values of an indexed column, without reading the rows in between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.db.models import QuerySet


def distinct_values(rows: QuerySet[Any], column: str) -> Iterator[Any]:
    """The values of a column that an index begins with, ascending: one step to the next one in that index each time, however
    many rows there are of one. Each step is a statement of its own."""
    rows = rows.order_by(column)
    value = rows.values_list(column, flat=True).first()
    while value is not None:
        yield value
        value = rows.filter(**{f"{column}__gt": value}).values_list(column, flat=True).first()
