"""The SQL Server of QUEUEAPP_TEST_SQLSERVER_URL, for what can be done to it without stopping it: databases of its own are made
and dropped, sessions are killed, and a proxy stands in front of it. Processes are killed as elsewhere.

What a scene asks of a server is what `PrivateServer` has under the same name.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import SplitResult, urlencode, urlsplit

from django.db import Error
from django.db.utils import ConnectionHandler

from project.database import database as database_entry

from .migrating import migrate

#: The sessions of a database that belong to other processes than this one. A login tells the id of its process.
SESSIONS = (
    "SELECT session_id FROM sys.dm_exec_sessions WHERE database_id = DB_ID() AND is_user_process = 1 "
    "AND session_id <> @@SPID AND host_process_id <> %s"
)
MAKE = ("CREATE DATABASE [{0}]",)
DROP = ("ALTER DATABASE [{0}] SET SINGLE_USER WITH ROLLBACK IMMEDIATE", "DROP DATABASE [{0}]")


class Session:
    """A session of the harness, in autocommit; what it has in common with psycopg's is what the oracle needs."""

    vendor = "microsoft"

    def __init__(self, url: str) -> None:
        self._connection = ConnectionHandler({"default": database_entry(url)}).create_connection("default")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self._connection.close()

    def transaction(self) -> contextlib.AbstractContextManager[object]:
        """There is no snapshot of several statements without a setting of the database: the oracle looks when all is still."""
        return contextlib.nullcontext()

    def execute(self, sql: str, parameters: Sequence[object] | None = None) -> Rows:
        """Run one statement."""
        with self._connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            return Rows(cursor.fetchall() if cursor.description else [])


class Rows(list[tuple[Any, ...]]):
    """What a statement has returned."""

    def fetchall(self) -> list[tuple[Any, ...]]:
        """All of it."""
        return self


class SqlServer:
    """One server that is there already. ``url(database)`` is where a database of it is."""

    vendor = "microsoft"

    def __init__(self, url: str) -> None:
        self._parts: SplitResult = urlsplit(url)
        self.host: str = self._parts.hostname or "127.0.0.1"
        self.port: int = self._parts.port or 1433
        #: As it is named there, so that nobody else's is ever dropped.
        self._prefix = f"crash_{os.getpid()}_"

    def url(self, database: str, *, port: int | None = None, **parameters: object) -> str:
        """DATABASE_URL of a database, by way of ``port`` on this host where it is given."""
        parts = self._parts._replace(path=f"/{self._prefix}{database}")
        if port is not None:
            login, at, _ = parts.netloc.rpartition("@")
            parts = parts._replace(netloc=f"{login}{at}127.0.0.1:{port}")
        if parameters:
            parts = parts._replace(query="&".join(filter(None, [parts.query, urlencode(parameters)])))
        return parts.geturl()

    def connect(self, database: str) -> Session:
        """A session of the harness itself."""
        return Session(self.url(database))

    def execute(self, sql: str, *parameters: object, database: str) -> list[tuple[Any, ...]]:
        """Run one statement and return its rows, if it has any."""
        with self.connect(database) as session:
            return session.execute(sql, parameters or None)

    def make(self, database: str) -> None:
        """Make a database with the tables of queues and ledger. Nothing copies one here, as a template does elsewhere."""
        self._administer(MAKE, database)
        migrate(self, database)

    def drop(self, database: str) -> None:
        """Drop it, whoever is in it."""
        with contextlib.suppress(Error):
            self._administer(DROP, database)

    def terminate_workers(self, database: str) -> int:
        """KILL each session that another process has in a database; returns how many."""
        killed = 0
        with self.connect(database) as session:
            for (found,) in session.execute(SESSIONS, (os.getpid(),)):
                with contextlib.suppress(Error):  # it has ended by itself meanwhile
                    session.execute(f"KILL {int(found)}")  # takes no parameter
                    killed += 1
        return killed

    def _administer(self, statements: Sequence[str], database: str) -> None:
        with Session(self._parts._replace(path="/master").geturl()) as session:
            for statement in statements:
                session.execute(statement.format(f"{self._prefix}{database}"))
