"""The SQL Server of QUEUEAPP_TEST_SQLSERVER_URL, for what can be done to it without stopping it: databases of its own
are made and dropped, sessions are killed, and a proxy stands in front of it. Processes are killed as elsewhere.

What a scene asks of a server is what `PrivateServer` has under the same name. The login has to be one that may make
databases, see all sessions and end them: `sa`, or another sysadmin.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any
from urllib.parse import SplitResult, urlencode, urlsplit

import psutil
from django.db import Error
from django.db.utils import ConnectionHandler

from project.database import database as database_entry

from .migrating import migrate

#: The sessions of a database that belong to other processes than this one, and these. A login tells the id of its
#: process.
SESSIONS = (
    "SELECT session_id, host_process_id FROM sys.dm_exec_sessions WHERE database_id = DB_ID() AND is_user_process = 1 "
    "AND session_id <> @@SPID AND host_process_id <> %s ORDER BY session_id"
)
HAS_SESSION = "SELECT 1 FROM sys.dm_exec_sessions WHERE session_id = %s AND database_id = DB_ID()"
WAITING = (
    "SELECT r.session_id FROM sys.dm_exec_requests AS r CROSS APPLY sys.dm_exec_sql_text(r.sql_handle) AS t "
    "WHERE r.database_id = DB_ID() AND r.session_id <> @@SPID AND r.wait_type LIKE %s AND t.[text] LIKE %s"
)
#: KILL takes no parameter. The numbers of sessions are given again, so it is asked once more whose this one is.
KILL = "IF EXISTS (SELECT 1 FROM sys.dm_exec_sessions WHERE session_id = {0} AND database_id = DB_ID()) KILL {0}"
NOW = "SELECT SYSUTCDATETIME()"
SNAPSHOT = "SET TRANSACTION ISOLATION LEVEL SNAPSHOT"
#: Row versions are kept, so that the harness sees several tables at one moment and waits for no locks. Who does
#: not ask for a snapshot reads as before.
MAKE = ("CREATE DATABASE [{0}]", "ALTER DATABASE [{0}] SET ALLOW_SNAPSHOT_ISOLATION ON")
DROP = ("ALTER DATABASE [{0}] SET SINGLE_USER WITH ROLLBACK IMMEDIATE", "DROP DATABASE [{0}]")
BEGIN, COMMIT = "BEGIN TRANSACTION", "COMMIT TRANSACTION"
#: A session goes back to the driver's pool, which ends no transaction that was begun in T-SQL, and belongs to another
#: user next.
LEAVE = "IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION; SET TRANSACTION ISOLATION LEVEL READ COMMITTED"
#: What can only be done to a server of one's own, and why it is left out here.
DESELECTED = {"server": "a SQL Server that is there already must not be stopped or crashed"}


class Session:
    """A session of the harness, in autocommit; what it has in common with psycopg's is what the oracle and the faults
    need.

    Any thread may use it, one at a time."""

    vendor = "microsoft"

    def __init__(self, url: str) -> None:
        self._connection = ConnectionHandler({"default": database_entry(url)}).create_connection("default")
        self._connection.inc_thread_sharing()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End it, with whatever is open in it."""
        if self._connection.connection is not None:
            with contextlib.suppress(Error):  # it is lost, and its transaction with it
                self.execute(LEAVE)
        self._connection.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """One transaction; left by an error, it is rolled back when the session ends."""
        self.execute(BEGIN)
        yield
        self.execute(COMMIT)

    def execute(self, sql: str, parameters: Sequence[object] | None = None) -> Rows:
        """Run one statement. Without parameters it is a batch of its own, of which a transaction may be left open."""
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
    left_out = DESELECTED

    def __init__(self, url: str) -> None:
        self._parts: SplitResult = urlsplit(url)
        self.host: str = self._parts.hostname or "127.0.0.1"
        self.port: int = self._parts.port or 1433
        #: As it is named there, so that no other database is ever dropped.
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

    def look(self, sql: str, *parameters: object, database: str) -> list[tuple[Any, ...]]:
        """The same for a question, which is answered by what was committed when it was asked and waits for no lock."""
        with self.connect(database) as session:
            session.execute(SNAPSHOT)
            return session.execute(sql, parameters or None)

    @staticmethod
    def connects_within(seconds: int) -> dict[str, object]:
        """The parameter of ``url`` that says how long a connection may take to be made."""
        return {"connection_timeout": seconds}

    @cached_property
    def _ahead(self) -> timedelta:
        """How far its clock is ahead of this machine's."""
        with Session(self._parts._replace(path="/master").geturl()) as session:
            session.execute(NOW)  # it is connected from here on
            before = datetime.now(UTC)
            ((now,),) = session.execute(NOW)
            after = datetime.now(UTC)
        ahead: timedelta = now.replace(tzinfo=UTC) - (before + (after - before) / 2)
        return ahead

    def reach(self) -> None:
        """Connect, and compare the clocks. Raises a ``django.db.Error``, without the password."""
        _ = self._ahead

    def on_this_clock(self, at: datetime) -> datetime:
        """A time by the server's clock, as a ``datetime2`` is read, by the clock of this machine."""
        return (at if at.tzinfo else at.replace(tzinfo=UTC)) - self._ahead

    def make(self, database: str) -> None:
        """Make a database with the tables of queues and ledger. Nothing copies one here, as a template does
        elsewhere."""
        try:
            self._administer(MAKE, database)
            migrate(self, database)
        except BaseException:
            self.drop(database)  # nothing else would
            raise

    def drop(self, database: str) -> None:
        """Drop it, with all its sessions."""
        with contextlib.suppress(Error):
            self._administer(DROP, database)

    def terminate_workers(self, database: str) -> int:
        """KILL each session that another process has in a database; returns how many."""
        return self.end_sessions(database, [session for session, _ in self._sessions_of_others(database)])

    def sessions(self, database: str) -> list[tuple[int, str]]:
        """The sessions of the programs of a run in a database, each with the name of its program."""
        named = [(session, name_of(process)) for session, process in self._sessions_of_others(database)]
        return [(session, name) for session, name in named if name]

    def end_sessions(self, database: str, sessions: Sequence[int]) -> int:
        """KILL these, in the order given; returns how many the server has not refused."""
        killed = 0
        with self.connect(database) as session:
            for victim in sessions:
                with contextlib.suppress(Error):  # it has ended by itself meanwhile
                    session.execute(KILL.format(int(victim)))
                    killed += 1
        return killed

    def has_session(self, database: str, session: int) -> bool:
        """Whether a session of a database has not ended yet."""
        return bool(self.execute(HAS_SESSION, session, database=database))

    def waiting(self, database: str, wait: str, statement: str) -> list[int]:
        """The sessions that wait for this, in a statement like this; both as LIKE takes them."""
        return [int(session) for (session,) in self.execute(WAITING, wait, statement, database=database)]

    def _sessions_of_others(self, database: str) -> list[tuple[int, int]]:
        rows = self.execute(SESSIONS, os.getpid(), database=database)
        return [(int(session), int(process)) for session, process in rows]

    def _administer(self, statements: Sequence[str], database: str) -> None:
        with Session(self._parts._replace(path="/master").geturl()) as session:
            for statement in statements:
                session.execute(statement.format(f"{self._prefix}{database}"))


def name_of(process: int) -> str:
    """What the environment of a process of a run calls it; empty for any other. The driver has no other name for a
    session."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(process).environ().get("CRASH_NAME", "")
    return ""
