"""Reading figures from a database that may not answer: what cannot be read is unknown, with its cause, and never zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from django.db import Error, connections, transaction

from ..errors import UnsupportedServer
from ..sql import ErrorKind, backend_of

T = TypeVar("T")

MISSING = "the table does not exist, or lacks a column"
_CAUSES = {
    ErrorKind.MISSING: MISSING,
    ErrorKind.DENIED: "the database user may not read the table",
    ErrorKind.CONNECTION: "the database cannot be reached",
}


class Reader:
    """Reads from one database. Once it cannot be reached it is not tried again: each try may take the time of a connect."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        #: Why nothing can be read; '' as far as is known it can.
        self.lost = ""

    def read(self, function: Callable[[], T]) -> tuple[T | None, str]:
        """(what the function returns, ''), or (None, why it cannot be read)."""
        if self.lost:
            return None, self.lost
        connection = connections[self.alias]
        try:
            # A savepoint: an error must not break the transaction that the caller may be in.
            with transaction.atomic(using=self.alias):
                return function(), ""
        except UnsupportedServer as error:
            self.lost = str(error)
            return None, self.lost
        except Error as error:
            told = " ".join(str(error).split("\n", 1)[0].split())
            kind = backend_of(connection).error_kind(error)
            cause = f"{_CAUSES[kind]}: {told}" if kind in _CAUSES else told or type(error).__name__
            if kind is ErrorKind.CONNECTION:
                self.lost = cause
                if not connection.in_atomic_block:
                    connection.close()
            return None, cause
