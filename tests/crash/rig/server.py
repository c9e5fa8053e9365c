"""A private PostgreSQL: its own data directory, socket and port, from the binaries of the embedded one.

Stopped, killed, restarted and misconfigured at will; no other server or database is touched. It dies with the
process that started it, where the system can promise that (Linux: ``setpriv --pdeathsig``).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import psycopg

from project.embedded_postgres.os_account import Account, account_of, binaries_for, prepare_home, remove_home
from tests import servers_in_memory

from .waiting import wait_until

#: The migrated database that others are copied from.
TEMPLATE = "crash_template"
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_permissions": "0700",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "autovacuum_naptime": "5s",
    # What was committed must survive `-m immediate`: everything stays as durable as in production.
    "fsync": "on",
    "synchronous_commit": "on",
    "deadlock_timeout": "200ms",
    "jit": "off",
    "timezone": "UTC",
    "log_line_prefix": "%m [%p] %a ",
}


def dying_with_parent(number: signal.Signals) -> list[str]:
    """The start of a command line whose process gets this signal when the thread that started it ends."""
    return ["setpriv", "--pdeathsig", number.name.removeprefix("SIG"), "--"] if shutil.which("setpriv") else []


class PrivateServer:
    """One server. ``url(database)`` is where it is, as long as it lives; it keeps its port over restarts."""

    vendor = "postgresql"
    host = "127.0.0.1"
    #: Faults that are impossible here, and why (see ``sqlserver``).
    left_out: ClassVar[dict[str, str]] = {}

    def __init__(self) -> None:
        self._place = Path(tempfile.mkdtemp(prefix="queueapp-crash-", dir=os.environ.get(servers_in_memory.VARIABLE)))
        self._place.chmod(0o755)
        self._home = prepare_home(self._place)
        self._account: Account = account_of(self._home)
        self._binaries = binaries_for(self._account)
        self._sockets = self._make_owned("sockets")
        self._log = self._home.server_log
        self._password = secrets.token_urlsafe(16)
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._initialize()

    def __enter__(self) -> PrivateServer:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop("immediate")
        remove_home(self._place)
        shutil.rmtree(self._place, ignore_errors=True)

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self, **settings: object) -> None:
        """Start it and wait until it takes connections; ``settings`` hold for this start."""
        command = [str(self._binaries / "postgres"), "-D", str(self._home.data), "-k", str(self._sockets)]
        command += ["-p", str(self.port)]
        for name, value in (SETTINGS | settings).items():
            command += ["-c", f"{name}={value}"]
        with self._log.open("ab") as log:
            self._process = self._popen([*dying_with_parent(signal.SIGQUIT), *command], stdout=log, stderr=log)
        wait_until(self._is_ready, "the private server takes connections", pause=0.02)

    def stop(self, mode: str = "fast") -> None:
        """Stop it and wait: "fast" disconnects everybody and writes a checkpoint, "immediate" is a crash."""
        process = self._process
        if process is None:
            return
        process.send_signal({"fast": signal.SIGINT, "immediate": signal.SIGQUIT}[mode])
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._process = None

    def crash_and_restart(self) -> None:
        """What a power cut looks like to everybody who is connected."""
        self.stop("immediate")
        self.start()

    def _is_ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"the private server ended:\n{self.log_text()[-2000:]}")
        try:
            self.connect().close()
        except psycopg.OperationalError:
            return False
        return True

    # -- use ------------------------------------------------------------------------------------------------------

    def url(self, database: str = "postgres", *, port: int | None = None, **parameters: object) -> str:
        """DATABASE_URL by its socket, or by TCP through ``port`` (its own, or a proxy's)."""
        if port is None:
            address = f"postgresql://postgres@/{database}"
            parameters = {"host": self._sockets, "port": self.port} | parameters
        else:
            address = f"postgresql://postgres:{self._password}@127.0.0.1:{port}/{database}"
        query = "&".join(f"{name}={quote(str(value), safe='')}" for name, value in parameters.items())
        return f"{address}?{query}" if query else address

    def connect(self, database: str = "postgres") -> psycopg.Connection[Any]:
        """A connection of the harness itself, in autocommit; its backend is named "harness"."""
        return psycopg.connect(
            host=str(self._sockets), port=self.port, user="postgres", dbname=database, autocommit=True,
            application_name="harness", connect_timeout=10,
        )  # fmt: skip

    def execute(self, sql: str, *parameters: object, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run one statement and return its rows, if it has any."""
        with self.connect(database) as connection:
            cursor = connection.execute(sql, parameters or None)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def look(self, sql: str, *parameters: object, database: str) -> list[tuple[Any, ...]]:
        """The same for a question, which waits for no locks here in any case."""
        return self.execute(sql, *parameters, database=database)

    @staticmethod
    def connects_within(seconds: int) -> dict[str, object]:
        """The parameter of ``url`` that says how long a connection may take to be made."""
        return {"connect_timeout": seconds}

    @staticmethod
    def on_this_clock(at: datetime) -> datetime:
        """A time by the server's clock by that of this machine, which is the same."""
        return at

    def sessions(self, database: str) -> list[tuple[int, str]]:
        """The sessions of the programs of a run in a database, each with the name of its program."""
        return self.execute(
            "SELECT pid, application_name FROM pg_stat_activity WHERE datname = current_database() "
            "AND backend_type = 'client backend' AND application_name <> 'harness'",
            database=database,
        )  # type: ignore[return-value]

    def end_sessions(self, database: str, sessions: Sequence[int]) -> int:
        """``pg_terminate_backend`` for these; returns how many there still were."""
        sql = "SELECT pg_terminate_backend(pid) FROM unnest(%s::int[]) pid"
        return sum(bool(row[0]) for row in self.execute(sql, list(sessions), database=database))

    def has_session(self, database: str, session: int) -> bool:
        """Whether a session has not ended yet."""
        return bool(self.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", session, database=database))

    def terminate(self, where: str, *parameters: object) -> int:
        """``pg_terminate_backend`` for the client backends that match a condition on ``pg_stat_activity``."""
        sql = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            f"WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() AND ({where})"
        )
        return sum(bool(row[0]) for row in self.execute(sql, *parameters))

    def terminate_workers(self, database: str) -> int:
        """End every session that a worker tree has in a database; returns how many."""
        return self.terminate("datname = %s AND application_name LIKE 'tree%%'", database)

    def make(self, database: str) -> None:
        """Make a database like the template."""
        self.execute(f"CREATE DATABASE {database} TEMPLATE {TEMPLATE}")

    def drop(self, database: str) -> None:
        """Drop it, with all its sessions."""
        with contextlib.suppress(psycopg.Error):
            self.execute(f"DROP DATABASE IF EXISTS {database} WITH (FORCE)")

    def log_text(self) -> str:
        """What the server has written so far."""
        with contextlib.suppress(FileNotFoundError):
            return self._log.read_text(errors="replace")
        return ""

    def make_directory(self, name: str) -> Path:
        """A directory that the server may write to, say for a tablespace."""
        return self._make_owned(name)

    # -- inside ---------------------------------------------------------------------------------------------------

    @property
    def sockets(self) -> Path:
        """The directory of its socket, which root and its own account may enter."""
        return self._sockets

    @property
    def account(self) -> Account:
        """Who runs the server; poolers in front of it run as the same."""
        return self._account

    def _initialize(self) -> None:
        secret = self._place / "password"
        secret.write_text(self._password)
        os.chown(secret, self._account.uid, self._account.gid)
        done = self._popen(
            [str(self._binaries / "initdb"), f"--pgdata={self._home.data}", "--username=postgres", "--auth-local=trust",
             "--auth-host=scram-sha-256", f"--pwfile={secret}", "--encoding=UTF8", "--no-locale", "--no-sync",
             "--no-instructions"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        output = done.communicate()[0]
        secret.unlink()
        if done.returncode != 0:
            raise RuntimeError(f"initdb failed: {output.decode(errors='replace')}")

    def _make_owned(self, name: str) -> Path:
        directory = self._place / name
        directory.mkdir(mode=0o700)
        os.chown(directory, self._account.uid, self._account.gid)
        return directory

    def _popen(self, command: list[str], **arguments: Any) -> subprocess.Popen[bytes]:
        environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
        # Its own session: a Ctrl-C in the terminal is for the harness.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, cwd="/", env=environment, umask=0o077, start_new_session=True,
            **arguments, **self._account.switch(),
        )  # fmt: skip
