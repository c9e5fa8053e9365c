"""Reading statistics from a database that may not answer: a value that cannot be read is unknown, with its cause, and
never zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from django.db import Error, connections, transaction

from ..errors import UnsupportedServer, migrate_command
from ..sql import ErrorKind, backend_of

T = TypeVar("T")

MISSING = "the table does not exist, or lacks a column"
_CAUSES = {
    ErrorKind.MISSING: MISSING,
    ErrorKind.DENIED: "the database user may not read the table",
    ErrorKind.CONNECTION: "the database cannot be reached",
    ErrorKind.LOCKED: "the table is locked",
}
#: Milliseconds to wait for a lock, usually of a whole table; and after one timeout, because more locks are likely.
WAIT_MS, NEXT_WAIT_MS = 1_000, 100


def hint(cause: str, alias: str) -> str:
    """The remedy for a cause, for tables of this package; '' if the cause names it."""
    return f"; `{migrate_command(alias)}` creates it" if cause.startswith(MISSING) else ""


class Reader:
    """Reads from one database. After a connection error it does not try again, because each try may take a connect
    timeout. It waits for a locked table, but not for long."""

    def __init__(self, alias: str, wait_ms: int = WAIT_MS) -> None:
        self.alias = alias
        #: Why nothing can be read; '' until a connection fails.
        self.lost = ""
        self._wait_ms = wait_ms
        self._together = False

    def read_together(self, function: Callable[[], T]) -> T:
        """Return what the function returns, which calls ``read`` for each value: in one transaction, with a third of
        the statements. If anything cannot be read, the function is called again and each value is read by itself."""
        self._together = True
        try:
            found, _ = self._read(function)
        finally:
            self._together = False
        return function() if found is None else found

    def read(self, function: Callable[[], T]) -> tuple[T | None, str]:
        """(what the function returns, ''), or (None, why it cannot be read)."""
        return (function(), "") if self._together else self._read(function)

    def _read(self, function: Callable[[], T]) -> tuple[T | None, str]:
        if self.lost:
            return None, self.lost
        connection = connections[self.alias]
        try:
            # A savepoint: an error must not break the transaction that the caller may be in.
            with (
                transaction.atomic(using=self.alias),
                backend_of(connection).sessions.lock_timeout(connection, self._wait_ms),
            ):
                return function(), ""
        except UnsupportedServer as error:
            self.lost = str(error)
            return None, self.lost
        except Error as error:
            text = " ".join(str(error).split("\n", 1)[0].split())
            kind = backend_of(connection).error_kind(error)
            cause = f"{_CAUSES[kind]}: {text}" if kind in _CAUSES else text or type(error).__name__
            if kind is ErrorKind.LOCKED:
                self._wait_ms = NEXT_WAIT_MS
            if kind is ErrorKind.CONNECTION:
                self.lost = cause
                if not connection.in_atomic_block:
                    connection.close()
            return None, cause
