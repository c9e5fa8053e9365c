"""The verb of messages that are made from rows of the same database: no row is seen by who sends them."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

from .outgoing import Outgoing


class Source(NamedTuple):
    """A SELECT, its parameters, and the names that its columns have in the body of a message."""

    sql: str
    params: Sequence[Any]
    #: None: those of its own columns.
    names: Sequence[str] | None = None


class Selecting(abc.ABC):
    """Part of ``QueueSql``."""

    @abc.abstractmethod
    def ordered(self, select: str) -> str:
        """A SELECT that ends with its ORDER BY, such that another one may select from it."""

    @abc.abstractmethod
    def columns_of(self, connection: Any, source: Source) -> list[tuple[str, int]]:
        """(name, the driver's number of its type or 0) of each column of a SELECT, which returns no row for it."""

    @abc.abstractmethod
    def insert_select(self, connection: Any, like: Outgoing, source: Source, columns: Sequence[tuple[str, int]]) -> int:
        """Store a message for each row of a SELECT, in its order: the row as a JSON object is the body, all else is as in ``like``.
        The ids count up from that of ``like``, as those of a bulk send do. Where messages are evaluated when they enter, these
        are held until they are. In the caller's transaction; returns how many. Raises QueueNotFound."""
