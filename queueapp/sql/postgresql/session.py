"""How the statements reach PostgreSQL: quoted names, the prepared cursor (``raw.cursor``), and missing tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from ...errors import TableNotFound
from ...registry import queues
from .raw.cursor import execute, fetch, hot_cursor, load, name_statements


def quote(name: str) -> str:
    """An identifier, quoted for PostgreSQL, with ``%`` doubled because statements are also format strings."""
    return '"' + name.replace('"', '""').replace("%", "%%") + '"'


def quote_table(name: str) -> str:
    """A table name. ``schema"."table`` is Django's idiom for a schema-qualified one and is kept as it is."""
    return f'"{name}"'.replace("%", "%%") if '"."' in name else quote(name)


@contextmanager
def translated(connection: Any, table: str) -> Iterator[None]:
    """Turn "relation does not exist" into TableNotFound with the table's name."""
    try:
        yield
    except Exception as error:
        if isinstance(error.__cause__, psycopg.errors.UndefinedTable):
            raise TableNotFound(table, connection.alias, foreign=queues.is_foreign(table)) from error
        raise


__all__ = ["execute", "fetch", "hot_cursor", "load", "name_statements", "quote", "quote_table", "translated"]
