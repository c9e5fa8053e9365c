"""The verbs of who wants figures: they read at most so many rows of a table, however many it has, and wait for nobody.

What an open transaction has taken is not waiting, as for a peek. Rows are read from the low end of the primary key, or of
one level of the claim index, so that a count that stops has seen what comes first. To be called in a transaction.
"""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

#: A level of the claim order: recipient and priority, or the one of them that the queue has.
Level = tuple[Any, ...]


class Head(NamedTuple):
    """What the first rows of a table, or of a level, are. ``rows``: how many were looked at. ``waiting``: neither leased nor
    expired; ``lapsed`` is part of it. ``oldest_ms``: the age of the oldest waiting one; None: there is none, or the table
    keeps no time of arrival. ``first``: the lowest seq."""

    rows: int
    waiting: int
    leased: int
    lapsed: int
    expired: int
    oldest_ms: int | None
    first: int


class Counting(abc.ABC):
    """Part of ``QueueSql``."""

    @abc.abstractmethod
    def head(self, connection: Any, limit: int, level: Level = ()) -> Head:
        """What the first ``limit`` rows are; with ``level`` those of it."""

    @abc.abstractmethod
    def head_types(self, connection: Any, limit: int, level: Level = ()) -> list[tuple[str, int | None]]:
        """(headers, age in ms or None) of what is waiting among the first ``limit`` rows, ascending."""

    @abc.abstractmethod
    def last(self, connection: Any) -> int:
        """The highest seq; 0 for an empty table."""

    @abc.abstractmethod
    def next_level(self, connection: Any, after: Level | None) -> Level | None:
        """The first level of the claim order behind this one that has a row; None: there is none. One seek (two on SQL
        Server), however many rows a level has. Only for a table with ``claim_by``."""
