"""How a statement reaches PostgreSQL: prepared and binary, on Django's own connection, beneath Django's cursor.

Django's cursor binds on the client and never prepares; planning is most of the cost of a single-row statement. One
``psycopg.Cursor`` is kept per raw connection, so the statement is in Django's transaction and its errors are Django's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.adapt import Transformer
from psycopg.pq import Format
from psycopg.types.string import ByteaBinaryLoader

from ...conf import settings
from ...errors import TableNotFound
from ...registry import queues
from .arrays import ListOfIntegersDumper
from .naming import SIGNS, distrust, take_over

_HOT = "_queueapp_hot_cursor"
_UUID_OID = 2950


def quote(name: str) -> str:
    """An identifier, quoted for PostgreSQL, with ``%`` doubled because statements are also format strings."""
    return '"' + name.replace('"', '""').replace("%", "%%") + '"'


def quote_table(name: str) -> str:
    """A table name. ``schema"."table`` is Django's idiom for a schema-qualified one and is kept as it is."""
    return f'"{name}"'.replace("%", "%%") if '"."' in name else quote(name)


def hot_cursor(connection: Any) -> psycopg.Cursor[Any]:
    """The binary, preparing cursor of this Django connection's present raw connection."""
    if connection.health_check_enabled and not connection.health_check_done:
        connection.close_if_health_check_failed()  # as Django's own cursor() does: a request may begin with a send
    raw = connection.connection
    if raw is None:
        connection.ensure_connection()
        raw = connection.connection
    held = connection.__dict__.get(_HOT)
    if held is not None and held[0] is raw:
        return held[1]  # type: ignore[no-any-return]
    cursor: psycopg.Cursor[Any] = psycopg.Cursor(raw)
    cursor.format = Format.BINARY
    # A uuid stays its 16 bytes: making ``uuid.UUID`` costs 0.8 µs a message, and most handlers never look.
    cursor.adapters.register_loader(_UUID_OID, ByteaBinaryLoader)
    cursor.adapters.register_dumper(list, ListOfIntegersDumper)
    if settings.PREPARED_STATEMENTS:
        name_statements(connection)
    connection.__dict__[_HOT] = (raw, cursor)
    return cursor


def name_statements(connection: Any) -> None:
    """Give what is prepared on the present raw connection, by whomever, names by content; see ``naming``."""
    raw = connection.connection
    with connection.wrap_database_errors, raw.lock:
        take_over(raw)


def execute(connection: Any, sql: str, params: Sequence[Any]) -> int:
    """Run a statement and return how many rows it touched. Errors are ``django.db.Error``s."""
    connection.validate_no_broken_transaction()
    cursor = hot_cursor(connection)
    with connection.wrap_database_errors:
        try:
            cursor.execute(sql, params, prepare=settings.PREPARED_STATEMENTS)
        except SIGNS as error:
            _repeat(cursor, sql, params, error)
        return cursor.rowcount


def fetch(connection: Any, sql: str, params: Sequence[Any]) -> list[Any]:
    """Run a statement and return all its rows as tuples."""
    connection.validate_no_broken_transaction()
    cursor = hot_cursor(connection)
    with connection.wrap_database_errors:
        try:
            cursor.execute(sql, params, prepare=settings.PREPARED_STATEMENTS)
        except SIGNS as error:
            _repeat(cursor, sql, params, error)
        return cursor.fetchall()


def _repeat(cursor: psycopg.Cursor[Any], sql: str, params: Sequence[Any], error: psycopg.Error) -> None:
    """The session did not know the statement's name, or knew it already: as in ``packed``, nothing was done."""
    if not distrust(cursor.connection, error):
        raise error
    cursor.execute(sql, params, prepare=False)


def load(connection: Any, result: Any) -> list[Any]:
    """The rows of a binary result that came another way than by ``fetch``, as that would return them."""
    transformer = Transformer(hot_cursor(connection))
    transformer.set_pgresult(result, set_loaders=True, format=Format.BINARY)
    return transformer.load_rows(0, result.ntuples, tuple)


@contextmanager
def translated(connection: Any, table: str) -> Iterator[None]:
    """Turn "relation does not exist" into TableNotFound with the table's name."""
    try:
        yield
    except Exception as error:
        if isinstance(error.__cause__, psycopg.errors.UndefinedTable):
            raise TableNotFound(table, connection.alias, foreign=queues.is_foreign(table)) from error
        raise
