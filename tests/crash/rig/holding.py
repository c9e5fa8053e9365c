"""Another session that holds rows of a queue, in a savepoint of its transaction: as a view does that receives under
ATOMIC_REQUESTS. The rows are there, and no worker can have them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import psycopg
from django.db import Error

#: What a statement of the harness raises: on its own PostgreSQL it speaks to the driver, on a SQL Server through
#: Django.
DATABASE_ERRORS = (psycopg.Error, Error)


class Words(NamedTuple):
    """What it says to each database."""

    #: A transaction, and a savepoint in it.
    begin: Sequence[str]
    #: Locks at most so many rows that are neither locked nor leased, and passes over the others.
    free: str
    #: Locks all rows that are not locked.
    all: str
    #: Lets the rows go: rolled back to the savepoint, and committed.
    back: str
    commit: str


WORDS = {
    "postgresql": Words(
        begin=("BEGIN", "SAVEPOINT held"),
        free="SELECT seq FROM {table} WHERE lease_token IS NULL ORDER BY seq LIMIT %s FOR UPDATE SKIP LOCKED",
        all="SELECT seq FROM {table} FOR UPDATE SKIP LOCKED",
        back="ROLLBACK TO SAVEPOINT held",
        commit="COMMIT",
    ),
    # Index: the primary key. Locks: U on rows, which claims pass by; looks see the rows all the same. What does not
    # match is released at once. READCOMMITTEDLOCK: whether or not the database keeps row versions. Back at the
    # savepoint, what was locked behind it is free, as long as it has not become a lock of the table.
    "microsoft": Words(
        begin=("BEGIN TRANSACTION", "SAVE TRANSACTION held"),
        free="SELECT TOP (%s) seq FROM {table} WITH (UPDLOCK, READPAST, ROWLOCK, READCOMMITTEDLOCK) "
        "WHERE lease_token IS NULL ORDER BY seq",
        all="SELECT seq FROM {table} WITH (UPDLOCK, READPAST, ROWLOCK, READCOMMITTEDLOCK)",
        back="ROLLBACK TRANSACTION held",
        commit="COMMIT TRANSACTION",
    ),
}


class Holder:
    """The session. It may be used by another thread than the one that made it."""

    def __init__(self, server: Any, database: str) -> None:
        self._words = WORDS[server.vendor]
        self._session = server.connect(database)
        for statement in self._words.begin:
            self._session.execute(statement)

    def hold_free(self, table: str, limit: int) -> int:
        """Lock at most so many of the rows that are free; returns how many."""
        return len(self._session.execute(self._words.free.format(table=table), (limit,)).fetchall())

    def hold_all(self, table: str) -> int:
        """Lock all rows of a table that are not locked; returns how many."""
        return len(self._session.execute(self._words.all.format(table=table)).fetchall())

    def release(self, *, committed: bool) -> None:
        """Commit, or go back to the savepoint, which lets the rows go and leaves the transaction open."""
        self._session.execute(self._words.commit if committed else self._words.back)

    def close(self) -> None:
        """End the session, and its transaction with it."""
        self._session.close()


@contextlib.contextmanager
def holding(server: Any, database: str) -> Iterator[Holder]:
    """A session that is ended at last."""
    holder = Holder(server, database)
    try:
        yield holder
    finally:
        holder.close()
