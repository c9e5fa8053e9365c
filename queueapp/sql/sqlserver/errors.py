"""Classifies errors of SQL Server: by number, else by SQLSTATE, else by the server's message.

pyodbc writes the number into the text: ``… (1205) (SQLExecDirectW)``. mssql-python (1.16) keeps neither the number nor
the SQLSTATE, only a phrase of its own per SQLSTATE and the server's message, and ODBC Driver 18 gives 42000 to a lock
timeout, a denied right and a snapshot conflict alike (seen on the wire). So for those, with that driver, the English
message decides; nothing that a message's fate hangs on does: a lock timeout is caught in T-SQL (``fetch_within``), and
a deadlock, a missing table and a lost connection have SQLSTATEs of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from django.db import OperationalError

from ..base import ErrorKind

LOCK_TIMEOUT = 1222

#: (numbers, what they mean, how the server's English message for them goes on mssql-python)
_ERRORS: tuple[tuple[tuple[int, ...], ErrorKind, str], ...] = (
    ((1205, 51205), ErrorKind.DEADLOCK, "deadlocked on .* and has been chosen as the deadlock victim"),
    ((3960, 3961), ErrorKind.DEADLOCK, "Snapshot isolation transaction (aborted|failed)"),
    ((LOCK_TIMEOUT,), ErrorKind.LOCKED, "Lock request time out period exceeded"),
    ((208, 4902), ErrorKind.MISSING, "Invalid object name|Cannot find the object"),
    ((207,), ErrorKind.MISSING, "Invalid column name"),
    ((229, 230, 262, 297, 300), ErrorKind.DENIED, "permission was denied|permission denied|does not have permission"),
    ((916, 4060, 18456), ErrorKind.CONNECTION, "is not able to access|Cannot open database|Login failed for user"),
    ((596, 6005, 17142), ErrorKind.CONNECTION, "session is in the kill state|SHUTDOWN is in progress|has been paused"),
    # Read-only or secondary: after a failover this server is a secondary; reconnect to find the primary.
    ((3906, 976, 978, 983), ErrorKind.CONNECTION, "the database is read-only|availability (group|database)"),
    # Azure SQL: throttled, moved or resumed. The session is gone or useless.
    ((40197, 40143, 40166, 40540), ErrorKind.CONNECTION, "has encountered an error processing your request"),
    ((40613,), ErrorKind.CONNECTION, "is not currently available"),
    ((40501, 49918, 49919, 49920), ErrorKind.CONNECTION, "The service is currently busy|Cannot process .*request"),
    ((10928, 10929), ErrorKind.CONNECTION, "limit for the database is .* has been reached|currently too busy"),
    # No memory, no locks, no room in a file, in the log or in what is paid for.
    ((701, 802, 8645), ErrorKind.EXHAUSTED, "insufficient (system )?memory|waiting for memory resources"),
    ((1204,), ErrorKind.EXHAUSTED, "cannot obtain a LOCK resource"),
    ((1101, 1105), ErrorKind.EXHAUSTED, "Could not allocate (a new page|space) "),
    ((9002,), ErrorKind.EXHAUSTED, "The transaction log for database .* is full"),
    ((40544,), ErrorKind.EXHAUSTED, "has reached its size quota"),
    # Sockets, as the operating system numbers them; the driver has 08S01 for them.
    ((64, 121, 10053, 10054, 10060), ErrorKind.CONNECTION, "transport-level error"),
)  # fmt: skip

_BY_NUMBER = {number: kind for numbers, kind, _ in _ERRORS for number in numbers}
_BY_TEXT = [(re.compile(text), kind) for _, kind, text in _ERRORS]

#: HYT00 stands for a login timeout and for a query timeout: after either, a new connection is the safe way on.
_BY_STATE = {
    "40001": ErrorKind.DEADLOCK,
    "42S02": ErrorKind.MISSING,
    "42S22": ErrorKind.MISSING,
    "28000": ErrorKind.CONNECTION,
    "HYT00": ErrorKind.CONNECTION,
    "HYT01": ErrorKind.CONNECTION,
    "40003": ErrorKind.CONNECTION,
    "01002": ErrorKind.CONNECTION,
    "08001": ErrorKind.CONNECTION,
    "08002": ErrorKind.CONNECTION,
    "08003": ErrorKind.CONNECTION,
    "08004": ErrorKind.CONNECTION,
    "08007": ErrorKind.CONNECTION,
    "08S01": ErrorKind.CONNECTION,
    "08S02": ErrorKind.CONNECTION,
}

#: What ``sp_getapplock`` returns: a timeout, and the victim of a deadlock.
_OF_LOCKS = {-1: ErrorKind.LOCKED, -3: ErrorKind.DEADLOCK}
#: The number and text that our batches throw for the second.
DEADLOCKED = 51205, "Transaction was deadlocked on a lock and has been chosen as the deadlock victim."

_NUMBER = re.compile(r"\((-?\d+)\) \(SQL")
_UNNAMED_STATE = re.compile(r"SQLSTATE code: (\w{5})")


class LockTimeout(OperationalError):
    """Another transaction held the row longer than the statement waits."""

    def __init__(self, wait_ms: int) -> None:
        self.number = LOCK_TIMEOUT
        super().__init__(f"Lock request time out period exceeded ({wait_ms} ms).")


class LockRefused(OperationalError):
    """``sp_getapplock`` did not grant a lock. It raises nothing by itself, not even for the victim of a deadlock
    (-3)."""

    def __init__(self, name: str, answer: int) -> None:
        self.answer = answer
        super().__init__(f"The lock {name!r} was refused: sp_getapplock said {answer}.")


def error_kind(error: BaseException, *, table_only: bool = False) -> ErrorKind:
    """Classify a database error. ``table_only``: a missing column is OTHER, so that MISSING means the table."""
    for cause in _chain(error):
        if isinstance(cause, LockTimeout):
            return ErrorKind.LOCKED
        if isinstance(cause, LockRefused):
            return _OF_LOCKS.get(cause.answer, ErrorKind.UNKNOWN)
        if type(cause).__module__.partition(".")[0] in ("mssql_python", "pyodbc"):
            return _kind(cause, table_only)
    return ErrorKind.UNKNOWN


def _kind(error: BaseException, table_only: bool) -> ErrorKind:
    text = str(error)
    numbers = _numbers(error, text)
    state = _state(error, text)
    if table_only and (207 in numbers or state == "42S22"):
        return ErrorKind.UNKNOWN
    for number in numbers:
        if number in _BY_NUMBER:
            return _BY_NUMBER[number]
    if state in _BY_STATE:
        return _BY_STATE[state]
    if not numbers:
        for pattern, kind in _BY_TEXT:
            if pattern.search(text):
                return kind
    # The drivers' InterfaceError is a closed connection or cursor.
    return ErrorKind.CONNECTION if type(error).__name__ == "InterfaceError" else ErrorKind.UNKNOWN


def _numbers(error: BaseException, text: str) -> list[int]:
    """The native numbers, if the driver exposes them: as an attribute (future drivers), or in pyodbc's text."""
    exposed = getattr(error, "native_error", None)
    return [exposed] if isinstance(exposed, int) else [int(number) for number in _NUMBER.findall(text)]


def _state(error: BaseException, text: str) -> str:
    exposed = getattr(error, "sqlstate", None)
    if isinstance(exposed, str):
        return exposed
    phrase = getattr(error, "driver_error", None)
    if phrase is None:  # pyodbc: the SQLSTATE comes first
        return str(error.args[0]) if error.args else ""
    unnamed = _UNNAMED_STATE.search(text)
    return unnamed[1] if unnamed else _phrases().get(phrase, "")


@lru_cache(maxsize=1)
def _phrases() -> dict[str, str]:
    """mssql-python's phrase for each SQLSTATE that decides something, asked of the driver itself."""
    from mssql_python import exceptions

    translate: Any = getattr(exceptions, "sqlstate_to_exception", None)
    if translate is None:
        return {}
    known = ((state, translate(state, "")) for state in _BY_STATE)
    return {example.driver_error: state for state, example in known if example is not None}


def _chain(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


# -- a missing driver ------------------------------------------------------------------------------------

_INSTALL = (
    'SQL Server needs the Python packages of the extra (pip install "queueapp[sqlserver]") and, on Debian and Ubuntu, '
    "the system packages libodbc2 libltdl7 libgssapi-krb5-2"
)


def missing_driver(error: BaseException) -> str | None:
    """One line on what to install, if ``error`` shows that the driver or one of its libraries is missing."""
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen)
        if isinstance(seen, ImportError) or "Error loading pyodbc" in text or "load the driver" in text:
            return f"{_INSTALL}: {' '.join(text.split())}"
        # pyodbc names the library that unixODBC could not open: IM002, 01000.
        if "Can't open lib" in text or "Data source name not found" in text:
            return f"{_INSTALL}, or Microsoft's ODBC driver for pyodbc: {' '.join(text.split())}"
        seen = seen.__cause__ or seen.__context__
    return None
