"""How a statement reaches SQL Server: on Django's own cursor, in the caller's transaction, with declared types.

Without ``setinputsizes`` the driver declares a parameter by its value (``varchar(3)``, ``tinyint``), and the server
keeps a plan for every length of every header. With it there is one plan per statement. A parameter is never NULL: the
driver would ask the server for its type first, a round trip of its own; NULLs are written into the statements.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from ...errors import TableNotFound
from ...registry import queues
from ..base import ErrorKind
from .errors import LOCK_TIMEOUT, LockTimeout, error_kind

#: ODBC type, size and digits, as ``Cursor.setinputsizes`` of mssql-python and pyodbc takes them; size 0 means ``max``.
_BIGINT = (-5, 0, 0)
_GUID_TEXT = (-9, 36, 0)
_SHORT_TEXT = (-9, 4000, 0)
_LONG_TEXT = (-9, 0, 0)
_ASCII = (12, 0, 0)
_BINARY = (-3, 0, 0)
_DATETIME2 = (93, 26, 6)

_DAY_MS = 86_400_000
_LONGEST_WAIT_MS = 2**31 - 1
_MARK = "lock_timeout"


class Json(str):
    """A JSON document as a parameter: ``varchar(max)`` whatever its length, so it has to be ASCII."""

    __slots__ = ()


def json_of(values: Any) -> Json:
    """Lists of integers, strings and uuids as a JSON document."""
    return Json(json.dumps(values, default=str, separators=(",", ":")))


def in_json(value: Any) -> Any:
    """A value of a column as OPENJSON is given it."""
    match value:
        case datetime():
            # As the column holds it: UTC, without a zone.
            return (value.astimezone(UTC) if value.tzinfo else value).replace(tzinfo=None).isoformat()
        case bytes():
            return value.hex()
        case uuid.UUID():
            return str(value)
    return value


def quote(name: str) -> str:
    """An identifier in brackets, with ``%`` doubled because statements are also format strings."""
    return "[" + name.replace("]", "]]").replace("%", "%%") + "]"


def quote_table(name: str) -> str:
    """A table name. ``schema].[table``, with or without the outer brackets, is mssql-django's idiom for a
    schema-qualified one and is kept as it is."""
    if name.startswith("[") and name.endswith("]"):
        return name.replace("%", "%%")
    return f"[{name}]".replace("%", "%%") if "].[" in name else quote(name)


#: ``SYSUTCDATETIME()`` plus a duration. DATEADD takes an int, and the milliseconds of 25 days are none.
LATER = "DATEADD(millisecond, %s, DATEADD(day, %s, SYSUTCDATETIME()))"


def later_params(ms: int) -> tuple[int, int]:
    """The two parameters of ``LATER``."""
    days, rest = divmod(ms, _DAY_MS)
    return rest, days


def execute(connection: Any, sql: str, params: Sequence[Any]) -> int:
    """Run a statement without OUTPUT and return the number of rows. Errors are ``django.db.Error``s.

    ``rowcount`` is -1 wherever NOCOUNT is on, by a server's ``user options`` or an earlier statement, and every ack
    would look like a lost lease. @@ROWCOUNT is right in both cases, and it is the only result with NOCOUNT on. With
    parameters SET NOCOUNT ends with the batch; without any it would stay on for the session, whose other users read
    ``rowcount``, so there the counts before @@ROWCOUNT are skipped instead.
    """
    if params:
        return int(fetch(connection, f"SET NOCOUNT ON; {sql}; SELECT @@ROWCOUNT", params)[0][0])
    with connection.cursor() as cursor:
        cursor.execute(f"{sql}; SELECT @@ROWCOUNT")
        return counted_rows(cursor)


def counted_rows(cursor: Any) -> int:
    """The answer of ``SELECT @@ROWCOUNT`` at the end of a batch, with NOCOUNT on or off."""
    while cursor.description is None and cursor.nextset():
        pass
    count = int(cursor.fetchall()[0][0])
    while cursor.nextset():
        pass
    return count


def set_option(connection: Any, statement: str) -> None:
    """Run a SET statement, which holds for the session since its batch has no parameters. Beneath Django's cursor,
    which refuses every statement while a rollback is due: a setting has to be reset then, too."""
    connection.ensure_connection()
    with connection.wrap_database_errors:
        cursor = connection.create_cursor()
        try:
            cursor.execute(statement)
        finally:
            cursor.close()


def fetch(connection: Any, sql: str, params: Sequence[Any]) -> list[Any]:
    """Run a statement and return all its rows as tuples."""
    with connection.cursor() as cursor:
        _run(cursor, sql, params)
        rows: list[Any] = cursor.fetchall()
        # An error after the last row must not be left unread: the rows it took back would be handled all the same.
        while cursor.nextset():
            pass
        return rows


def names_of(connection: Any, sql: str, params: Sequence[Any]) -> list[str]:
    """The names of the columns of a SELECT that returns no row."""
    with connection.cursor() as cursor:
        _run(cursor, sql, params)
        return [str(one[0]) for one in cursor.description or ()]


def fetch_within(connection: Any, wait_ms: int, select: str, params: Sequence[Any], *, first: str = "") -> list[Any]:
    """Run a SELECT that waits for a lock at most ``wait_ms``; then it raises LockTimeout. ``first``: statements to run
    before it, in the same round trip.

    The timeout is caught in T-SQL, because mssql-python keeps neither the number of an error nor, for this one, a
    SQLSTATE of its own. SET ends with a parametrised batch; in a plain one every way out leads over a second SET.
    """
    sql = (
        f"{first}SET LOCK_TIMEOUT {min(int(wait_ms), _LONGEST_WAIT_MS)}; BEGIN TRY {select}; END TRY BEGIN CATCH SET "
        "LOCK_TIMEOUT -1; "
        f"IF ERROR_NUMBER() <> {LOCK_TIMEOUT} BEGIN; THROW; END; SELECT {LOCK_TIMEOUT} AS [{_MARK}]; END CATCH; "
        f"SET LOCK_TIMEOUT -1"
    )
    rows: list[Any] = []
    with connection.cursor() as cursor:
        _run(cursor, sql, params)
        while True:
            if cursor.description:
                if cursor.description[0][0] == _MARK:
                    raise LockTimeout(wait_ms)
                rows += cursor.fetchall()
            if not cursor.nextset():
                return rows


def _run(cursor: Any, sql: str, params: Sequence[Any]) -> None:
    bound = [_bind(value) for value in params]
    if bound:
        cursor.setinputsizes([size for _, size in bound])
    cursor.execute(sql, tuple(value for value, _ in bound))


def _bind(value: Any) -> tuple[Any, tuple[int, int, int]]:
    match value:
        case bool():
            raise TypeError("A bit is written into the statement: the driver would declare it by its value.")
        case int():
            return value, _BIGINT
        case Json():
            return str(value), _ASCII
        case str():
            # Lengths count UTF-16 code units, in which an emoji is two.
            fits = len(value) <= 2000 or len(value.encode("utf-16-le")) <= 8000
            return value, _SHORT_TEXT if fits else _LONG_TEXT
        case bytes():
            return value, _BINARY
        case uuid.UUID():
            return str(value), _GUID_TEXT
        case datetime():
            # An aware time sent to datetime2 as it is silently keeps its local clock: two hours off in Oslo.
            return (value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo else value), _DATETIME2
        case _:
            raise TypeError(f"{value!r} is no parameter of a statement; NULL is written into the text.")


@contextmanager
def translated(connection: Any, table: str) -> Iterator[None]:
    """Turn "invalid object name" into TableNotFound with the table's name."""
    try:
        yield
    except Exception as error:
        if error_kind(error, table_only=True) is ErrorKind.MISSING:
            raise TableNotFound(table, connection.alias, foreign=queues.is_foreign(table)) from error
        raise
