"""Keeping autovacuum away from a table: whether it comes within a measurement, or between two statements of a test, is
chance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connection

from tests.in_process_worker import eventually

#: An autovacuum asks whether a table is to be left alone before it locks it.
_AUTOVACUUMS = """
SELECT pid, backend_start FROM pg_stat_activity
WHERE backend_type = 'autovacuum worker' AND datname = current_database()
"""


@contextmanager
def without_autovacuum(queue: Any) -> Iterator[None]:
    """No vacuum and no analyze of this queue's table (PostgreSQL) but those that are asked for."""
    table = connection.ops.quote_name(queue._meta.db_table)
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = false)")
        cursor.execute(_AUTOVACUUMS)
        # These may have asked before the answer was no.
        asked = set(cursor.fetchall())

        def ended() -> bool:
            cursor.execute(_AUTOVACUUMS)
            return asked.isdisjoint(cursor.fetchall())

        eventually(ended)
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {table} RESET (autovacuum_enabled)")
