"""Many rows that are like one, made by the server: with as many objects of Django's it takes minutes on a busy
machine."""

from __future__ import annotations

from django.db import connection
from django.db.models import AutoField, Model, UUIDField


def fill_up(row: Model, count: int) -> None:
    """Save a row, and so many of its kind that there are ``count``; ids and ``key`` are new ones. On PostgreSQL."""
    row.save(force_insert=True)
    meta = row._meta
    values: dict[str, str] = {}
    for field in meta.concrete_fields:
        if isinstance(field, AutoField):
            continue
        values[f'"{field.column}"'] = (
            "gen_random_uuid()"
            if isinstance(field, UUIDField)
            else "gen_random_uuid()::text"
            if field.column == "key"
            else f'"{field.column}"'
        )
    with connection.cursor() as cursor:
        cursor.execute(
            f'INSERT INTO "{meta.db_table}" ({", ".join(values)}) SELECT {", ".join(values.values())} '
            f'FROM "{meta.db_table}", generate_series(2, %s) WHERE "{meta.pk.column}" = %s',
            [count, row.pk],
        )
