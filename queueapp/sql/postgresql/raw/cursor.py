"""A preparing, binary psycopg cursor on Django's own connection, beneath Django's cursor wrapper.

Django's cursor binds on the client and never prepares; planning is most of the cost of a single-row statement. One
``psycopg.Cursor`` is kept per raw connection, so that statements run in Django's transaction and raise Django's errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg.adapt import Transformer
from psycopg.pq import Format
from psycopg.types.string import ByteaBinaryLoader

from ....conf import settings
from .raw_statement import NAME_CONFLICTS, IntegerArrayDumper, disable_names, use_stable_names

_HOT = "_queueapp_hot_cursor"
_UUID_OID = 2950


def hot_cursor(connection: Any) -> psycopg.Cursor[Any]:
    """The binary, preparing cursor of this Django connection's present raw connection."""
    if connection.health_check_enabled and not connection.health_check_done:
        # as Django's own cursor() does: a send may be the first statement of a request
        connection.close_if_health_check_failed()
    raw = connection.connection
    if raw is None:
        connection.ensure_connection()
        raw = connection.connection
    held = connection.__dict__.get(_HOT)
    if held is not None and held[0] is raw:
        return held[1]  # type: ignore[no-any-return]
    cursor: psycopg.Cursor[Any] = psycopg.Cursor(raw)
    cursor.format = Format.BINARY
    # A uuid stays 16 bytes: making ``uuid.UUID`` costs 0.8 µs a message, and most handlers do not need it.
    cursor.adapters.register_loader(_UUID_OID, ByteaBinaryLoader)
    cursor.adapters.register_dumper(list, IntegerArrayDumper)
    if settings.PREPARED_STATEMENTS:
        name_statements(connection)
    connection.__dict__[_HOT] = (raw, cursor)
    return cursor


def name_statements(connection: Any) -> None:
    """Use names by content for all prepared statements of the present raw connection; see ``StatementNames``."""
    raw = connection.connection
    with connection.wrap_database_errors, raw.lock:
        use_stable_names(raw)


def execute(connection: Any, sql: str, params: Sequence[Any]) -> int:
    """Run a statement and return the number of rows. Errors are ``django.db.Error``s."""
    connection.validate_no_broken_transaction()
    cursor = hot_cursor(connection)
    with connection.wrap_database_errors:
        try:
            cursor.execute(sql, params, prepare=settings.PREPARED_STATEMENTS)
        except NAME_CONFLICTS as error:
            _repeat(cursor, sql, params, error)
        return cursor.rowcount


def fetch(connection: Any, sql: str, params: Sequence[Any]) -> list[Any]:
    """Run a statement and return all its rows as tuples."""
    connection.validate_no_broken_transaction()
    cursor = hot_cursor(connection)
    with connection.wrap_database_errors:
        try:
            cursor.execute(sql, params, prepare=settings.PREPARED_STATEMENTS)
        except NAME_CONFLICTS as error:
            _repeat(cursor, sql, params, error)
        return cursor.fetchall()


def _repeat(cursor: psycopg.Cursor[Any], sql: str, params: Sequence[Any], error: psycopg.Error) -> None:
    """Run a statement again after one of ``NAME_CONFLICTS``: nothing was executed, as in ``raw_statement``."""
    if not disable_names(cursor.connection, error):
        raise error
    cursor.execute(sql, params, prepare=False)


def load(connection: Any, result: Any) -> list[Any]:
    """The rows of a binary result of a raw statement, as ``fetch`` returns them."""
    transformer = Transformer(hot_cursor(connection))
    transformer.set_pgresult(result, set_loaders=True, format=Format.BINARY)
    return transformer.load_rows(0, result.ntuples, tuple)
