"""Figures of one queue's table for the admin, metrics, health and autoscaling.

Each verb reads a bounded number of rows and waits for no lock. What an open transaction has claimed is not waiting, as
for a peek. Rows are read from the low end of the primary key, or of one level of the claim index, so that a count that
stops at its limit has seen the first ones. Called in a transaction.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

#: A level of the claim order: recipient and priority, or the one of them that the queue has.
Level = tuple[Any, ...]


class Head(NamedTuple):
    """The first rows of a table or level. ``rows``: how many were read. ``waiting``: neither leased nor expired;
    includes ``lease_expired``. ``oldest_ms``: the age of the oldest waiting one; None: there is none, or the table has
    no time of arrival. ``first``: the lowest seq."""

    rows: int
    waiting: int
    leased: int
    lease_expired: int
    expired: int
    oldest_ms: int | None
    first: int


class HeadQuery(NamedTuple):
    """What ``heads`` reads of one table or level: the text behind SELECT, and its parameters."""

    text: str
    params: tuple[Any, ...]


#: Heads that one statement reads: far below the 2,100 parameters of SQL Server.
MAX_HEADS = 100


class WorkersWanted(NamedTuple):
    """The terms of autoscaling. ``per_worker``: messages for one worker; ``late_ms``: the age above which more workers
    are wanted than are running; None: age does not count. ``subscribers``: the table of workers, ``label``: the queue
    in it."""

    per_worker: int
    late_ms: int | None
    min_workers: int
    max_workers: int
    subscribers: str
    label: str

    @property
    def rows(self) -> int:
        """The number of rows that decide: more of them change nothing."""
        return self.per_worker * self.max_workers

    @property
    def quoted_label(self) -> str:
        """The label as the content of an SQL literal."""
        return self.label.replace("'", "''")


class Figures(abc.ABC):
    """Bounded estimates of one queue."""

    @abc.abstractmethod
    def head_query(self, limit: int, level: Level = ()) -> HeadQuery:
        """For ``heads``: the states of the first ``limit`` rows; with ``level`` of that level."""

    @staticmethod
    @abc.abstractmethod
    def heads(connection: Any, queries: Sequence[HeadQuery]) -> list[Head]:
        """The heads of any tables and levels of this database, in the given order: one statement for ``MAX_HEADS``."""

    def head(self, connection: Any, limit: int, level: Level = ()) -> Head:
        """The states of the first ``limit`` rows; with ``level`` of that level."""
        return self.heads(connection, [self.head_query(limit, level)])[0]

    @abc.abstractmethod
    def head_types(self, connection: Any, limit: int, level: Level = ()) -> list[tuple[str, int | None]]:
        """(headers, age in ms or None) of the waiting messages among the first ``limit`` rows, ascending."""

    @abc.abstractmethod
    def last_seq(self, connection: Any) -> int:
        """The highest seq; 0 for an empty table."""

    @abc.abstractmethod
    def next_level(self, connection: Any, after: Level | None) -> Level | None:
        """The first level of the claim order behind this one that has a row; None: there is none. One seek (two on SQL
        Server), regardless of how many rows a level has. Only for a table with ``claim_by``."""

    @abc.abstractmethod
    def workers_wanted(self, wanted: WorkersWanted) -> str:
        """The text of a SELECT without parameters that returns one row with one integer, for clients without this
        project (KEDA). It reads at most ``wanted.rows`` of the table's rows."""


def union_of_heads(queries: Sequence[HeadQuery]) -> tuple[str, list[Any]]:
    """One statement for these heads, and its parameters; each row begins with the number of its query."""
    selects = [f"SELECT {number}, {query.text}" for number, query in enumerate(queries)]
    return " UNION ALL ".join(selects), [value for query in queries for value in query.params]
