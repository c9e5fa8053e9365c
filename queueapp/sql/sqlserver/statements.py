"""What the statements of all subjects share: columns, lock hints and conditions of a queue's table as SQL text, the
rows that come back, and how a statement reaches the server.

A foreign table (NServiceBus') lacks some columns: no statement names them, and a constant stands for them here. The
drivers return a uniqueidentifier as upper-case text and a datetime2 as a naive time.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

from ...errors import TableNotFound
from ...registry import queues
from ..base import ErrorKind
from ..claims import FOREVER, PRIORITY, Claimed
from ..message_columns import BY_NAME, Kind, MessageColumn, Row, kind_of
from ..tables import QueueTable, Terms
from .errors import LOCK_TIMEOUT, LockTimeout, error_kind

#: Below lock escalation: the server tries to lock the whole table when one statement holds 5,000 locks on it.
MAX_BATCH = 3_500
#: Takes rows: U locks, never waiting for another session, under any READ_COMMITTED_SNAPSHOT setting. ROWLOCK and
#: MAX_BATCH prevent page and table locks, which READPAST skips whole or cannot skip.
TAKING = "UPDLOCK, READPAST, ROWLOCK, READCOMMITTEDLOCK"
#: Reads rows: S locks, each released at once; rows that an open transaction has changed are skipped. Without
#: READCOMMITTEDLOCK row versions would show rows in flight (NServiceBus #863, #1293).
LOOKING = "READPAST, ROWLOCK, READCOMMITTEDLOCK"
#: The keys of a statement as rows, in the given order. The loop join starts here and seeks every key; an IN list may be
#: planned as a scan while statistics say that the table is small, and a scan waits for each locked row.
KEYS = "FROM OPENJSON(%s) WITH ([key] bigint '$') AS k INNER LOOP JOIN"

_ABSENT: dict[str, Any] = {"deliveries": 0, "cancels": 0} | {name: column.default for name, column in BY_NAME.items()}
_CLOCKS = tuple(name for name, column in BY_NAME.items() if column.kind is Kind.TIME and not column.sent)

LITERALS: dict[bool | None, str] = {None: "NULL", True: "1", False: "0"}

_TYPES = {Kind.INT16: "smallint", Kind.INT64: "bigint", Kind.BOOL: "bit", Kind.TIME: "datetime2"}


def type_of(column: MessageColumn, *, priority64: bool = False) -> str:
    """The type of a column."""
    return _TYPES.get(kind_of(column, priority64=priority64)) or f"nvarchar({column.max_length})"


def guid(value: Any) -> bytes:
    """A uniqueidentifier as its 16 bytes; with ``native_uuid`` a driver gives a UUID."""
    return value.bytes if isinstance(value, uuid.UUID) else bytes.fromhex(value.replace("-", ""))


def aware(value: datetime | None) -> datetime | None:
    """A datetime2 as an aware time: the tables hold UTC."""
    return value.replace(tzinfo=UTC) if value is not None and value.tzinfo is None else value


_CONVERT: dict[str, Callable[[Any], Any]] = {"id": guid}
_CONVERT |= {name: aware for name, column in BY_NAME.items() if column.kind is Kind.TIME}


class Returned:
    """What a statement returns: these attributes, in this order, of a table with these columns."""

    def __init__(self, columns: dict[str, str], names: Sequence[str]) -> None:
        self._columns = [columns[name] for name in dict.fromkeys(names) if name in columns]
        at = {name: n for n, name in enumerate(name for name in dict.fromkeys(names) if name in columns)}
        # A table without a time of arrival: now, by the database's clock.
        clocks = [name for name in _CLOCKS if name in names and name not in columns]
        self._clocks = ["SYSUTCDATETIME()"] * len(clocks)
        at |= {name: len(at) + n for n, name in enumerate(clocks)}
        self._plan = [(at.get(name), _CONVERT.get(name), _ABSENT.get(name)) for name in names]

    def of(self, source: str) -> str:
        """The list of columns of an OUTPUT (``inserted``, ``deleted``) or a SELECT (an alias)."""
        return ", ".join([*(f"{source}.{column}" for column in self._columns), *self._clocks])

    def tuples(self, rows: list[Any]) -> list[Claimed]:
        """The rows of such a statement as tuples of the attributes."""
        plan = self._plan
        return [
            tuple([absent if n is None else convert(row[n]) if convert else row[n] for n, convert, absent in plan])
            for row in rows
        ]


#: As written in the filter of the index.
_FOREVER = f"'{FOREVER:%Y-%m-%d %H:%M:%S}'"


def unevaluated(columns: dict[str, str], row: str = "q") -> str:
    """The condition of a message that is pending evaluation: that of the filtered index."""
    return f"({row}.{columns['lease_expires']} = {_FOREVER} AND {row}.{columns['lease_token']} IS NULL)"


_BY_SEQ = itemgetter(0)
_DAY_MS = 86_400_000


def _by_priority(row: Claimed) -> tuple[int, int]:
    return -row[PRIORITY], row[0]


class TableText:
    """The names of one queue's table, written once and shared by the objects of all subjects."""

    def __init__(self, table: QueueTable) -> None:
        self.table = table
        self.name = quote_table(table.db_table)
        self.columns = {name: quote(column) for name, column in table.columns.items()}
        self.row = Returned(self.columns, Row._fields)
        # Columns without a default (``Recoverable``, always 1 in NServiceBus' tables), or with one for foreign writers.
        self.filled = [(self.columns[name], LITERALS[value]) for name, value in table.filled.items()]
        #: The hint for the claim index.
        indexed = table.claim_by or table.priority64
        self.index = f"INDEX({quote(table.claim_index)}), " if indexed and table.claim_index else ""
        #: The claim order of rows.
        self.order = _by_priority if table.priority64 or "priority" in table.claim_by else _BY_SEQ


class Statements:
    """Base of one subject's statements of one queue."""

    def __init__(self, text: TableText) -> None:
        self.table = text.table
        self._q, self._c, self._row = text.name, text.columns, text.row
        self._filled, self._index, self._order = text.filled, text.index, text.order
        self._seq = f"q.{text.columns['seq']}"

    def unleased(self, row: str = "q") -> str:
        """The condition of an unleased row. Not indexed on purpose: the lease changes with every delivery."""
        if "lease_expires" not in self._c:
            return "1 = 1"
        lease = f"{row}.{self._c['lease_expires']}"
        return f"({lease} IS NULL OR {lease} < SYSUTCDATETIME())"

    def free(self, row: str = "q") -> str:
        """The condition of an available row: neither leased nor expired."""
        if self.table.expiry is not None:
            alive = self.table.expiry.alive(self.expiry_terms(row))
            return " AND ".join(filter(None, (self.unleased(row), alive)))
        if "expires" not in self._c:
            return self.unleased(row)
        expires = f"{row}.{self._c['expires']}"
        return f"{self.unleased(row)} AND ({expires} IS NULL OR {expires} > SYSUTCDATETIME())"

    def expiry_terms(self, row: str = "q") -> Terms:
        """The parts of the condition under which a message expires by its age."""
        after = self.table.expiry.after_ms if self.table.expiry is not None else None
        # DATEADD takes an int, which the milliseconds of 25 days exceed.
        days, rest = divmod(after or 0, _DAY_MS)
        cut = f"DATEADD(millisecond, -{rest}, DATEADD(day, -{days}, SYSUTCDATETIME()))"
        return Terms(f"{row}.{self._c['expires']}", f"{row}.{self._c['enqueued_at']}", "SYSUTCDATETIME()", cut)

    def _alive(self) -> str:
        """A further condition of a lease that is extended: where leases are counted, the slot of an expired one may be
        reassigned."""
        return "" if not self.table.counts_in_flight else f" AND q.{self._c['lease_expires']} >= SYSUTCDATETIME()"

    def _unlease(self) -> str:
        """The assignments that end a lease."""
        c = self._c
        return f"SET {c['lease_token']} = NULL, {c['lease_owner']} = NULL, {c['lease_expires']} = NULL"

    def _as_row(self, rows: list[Any]) -> Row | None:
        found = self._row.tuples(rows)
        return Row(*found[0])._replace(id=uuid.UUID(bytes=found[0][1])) if found else None

    def _rows_of(self, found: list[Any]) -> list[Row]:
        """Rows read as ``_row``, in queue order."""
        rows = (Row(*row)._replace(id=uuid.UUID(bytes=row[1])) for row in self._row.tuples(found))
        return sorted(rows, key=_BY_SEQ)


# -- running a statement -----------------------------------------------------------------------------------------------
# How a statement reaches SQL Server: on Django's own cursor, in the caller's transaction, with declared types.
#
# Without ``setinputsizes`` the driver declares a parameter by its value (``varchar(3)``, ``tinyint``), and the server
# keeps a plan for every length of every header. With it there is one plan per statement. A parameter is never NULL: the
# driver would ask the server for its type first, a round trip of its own; NULLs are written into the statements.


#: ODBC type, size and digits, as ``Cursor.setinputsizes`` of mssql-python and pyodbc takes them; size 0 means ``max``.
_BIGINT = (-5, 0, 0)
_GUID_TEXT = (-9, 36, 0)
_SHORT_TEXT = (-9, 4000, 0)
_LONG_TEXT = (-9, 0, 0)
_ASCII = (12, 0, 0)
_BINARY = (-3, 0, 0)
_DATETIME2 = (93, 26, 6)

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


def literal(text: str) -> str:
    """A text of a declaration in a statement; never user input."""
    return "N'" + text.replace("'", "''").replace("%", "%%") + "'"


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
    return int(_all_rows(cursor)[0][0])


def _all_rows(cursor: Any) -> list[Any]:
    """The rows of a batch. What comes before them is skipped: a count, and a message of the server, which the drivers
    give as a result without columns."""
    while cursor.description is None and cursor.nextset():
        pass
    rows: list[Any] = cursor.fetchall()
    # An error after the last row must not be left unread: the rows it took back would be handled all the same.
    while cursor.nextset():
        pass
    return rows


def set_lock_timeout(connection: Any, ms: int) -> int:
    """Let the session wait this long for a lock; -1 is for ever. Returns what was set before.

    SET holds for the session since its batch has no parameters. Beneath Django's cursor, which refuses every statement
    while a rollback is due: a setting has to be reset then, too.
    """
    connection.ensure_connection()
    with connection.wrap_database_errors:
        cursor = connection.create_cursor()
        try:
            # No table is read.
            cursor.execute(f"DECLARE @before int = @@LOCK_TIMEOUT; SET LOCK_TIMEOUT {int(ms)}; SELECT @before")
            return int(cursor.fetchall()[0][0])
        finally:
            cursor.close()


def fetch(connection: Any, sql: str, params: Sequence[Any]) -> list[Any]:
    """Run a statement and return all its rows as tuples."""
    with connection.cursor() as cursor:
        _run(cursor, sql, params)
        return _all_rows(cursor)


def names_of(connection: Any, sql: str, params: Sequence[Any]) -> list[str]:
    """The names of the columns of a SELECT that returns no row."""
    with connection.cursor() as cursor:
        _run(cursor, sql, params)
        return [str(column[0]) for column in cursor.description or ()]


def fetch_within(connection: Any, wait_ms: int, select: str, params: Sequence[Any], *, first: str = "") -> list[Any]:
    """Run a SELECT that waits for a lock at most ``wait_ms``; then it raises LockTimeout. ``first``: statements to run
    before it, in the same round trip.

    The timeout is caught in T-SQL, because mssql-python keeps neither the number of an error nor, for this one, a
    SQLSTATE of its own. SET ends with a parametrised batch, so that the session has the timeout that it had before; in
    a plain one (``first``) every way out leads over a second SET.
    """
    if not (params or first):
        first, params = "DECLARE @scope bigint = %s; ", (0,)
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
