"""Makes the database cluster, and starts and ends the server on it. The caller holds the lock that says it may."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from project.embedded_postgres.binaries import MAJOR_VERSION
from project.embedded_postgres.data_directory import DATABASE, SUPERUSER, Home
from project.embedded_postgres.errors import EmbeddedPostgresError
from project.embedded_postgres.memory import shared_buffers_mb
from project.embedded_postgres.os_account import Account, account_of, binaries_for

# Durable as any server; the rest suits a queue on a small machine. Given at each start, so that a change reaches
# clusters that exist.
SETTINGS = {
    "listen_addresses": "",  # the socket only: nothing on the network, no password
    "unix_socket_permissions": "0700",
    "max_connections": "200",
    "shared_buffers": f"{shared_buffers_mb()}MB",
    "max_wal_size": "2GB",
    "autovacuum_naptime": "5s",  # queue tables die and grow within seconds
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "track_io_timing": "off",
    "jit": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] ",
    "log_destination": "stderr",
    "logging_collector": "off",
}

_LOG_LIMIT_BYTES = 20_000_000


class Cluster:
    """One cluster and the account that runs it."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.account: Account = account_of(home)
        self.binaries: Path = binaries_for(self.account)
        self.log_offset = 0

    def start(self, server_lock: int) -> subprocess.Popen[bytes]:
        """Start the postmaster; it and its backends hold a copy of `server_lock` for as long as one of them lives."""
        self._initialize(server_lock)
        # No process of an earlier server is left (it would hold the lock), so its files are stale. PostgreSQL
        # would take a process that now has the old one's id for a running server.
        self.home.postmaster_file.unlink(missing_ok=True)
        sockets = self._socket_directory()
        if self.home.server_log.exists() and self.home.server_log.stat().st_size > _LOG_LIMIT_BYTES:
            self.home.server_log.replace(self.home.server_log.with_suffix(".log.1"))
        command = [str(self.binaries / "postgres"), "-D", str(self.home.data), "-k", str(sockets)]
        expendable = {"fsync": "off", "max_prepared_transactions": "16"} if self._is_expendable else {}
        for name, value in (SETTINGS | expendable).items():
            command += ["-c", f"{name}={value}"]
        with self.home.server_log.open("ab") as log:
            self.log_offset = log.tell()
            return self._popen(command, stdout=log, stderr=log, pass_fds=[server_lock], start_new_session=True)

    @property
    def _is_expendable(self) -> bool:
        """Whether what is stored is gone tomorrow anyway, as in tests: a server that is killed loses nothing, a machine
        that loses its power may. Named by its path: other servers that the same processes start are as durable as
        ever."""
        named = os.environ.get("EXPENDABLE_DATA_DIR")
        return named is not None and Path(named, "postgres").resolve() == self.home.path

    def _initialize(self, server_lock: int) -> None:
        version_file = self.home.data / "PG_VERSION"
        if version_file.exists():
            version = version_file.read_text().strip()
            if version != str(MAJOR_VERSION):
                raise EmbeddedPostgresError(
                    f"{self.home.data} was made by PostgreSQL {version}, and this is {MAJOR_VERSION} -- "
                    f"move {self.home.path} away to start with an empty database"
                )
            return
        # Made under another name and flushed to disk before it gets its own: a cluster is there as a whole or not.
        fresh = self.home.path / "data.new"
        shutil.rmtree(fresh, ignore_errors=True)
        # The builtin provider sorts alike on every system, and needs no locale that may not be installed.
        self._run(
            "initdb", f"--pgdata={fresh}", f"--username={SUPERUSER}", "--auth-local=trust", "--auth-host=reject",
            "--encoding=UTF8", "--no-locale", "--locale-provider=builtin", "--builtin-locale=C.UTF-8",
            "--no-sync", "--no-instructions",
            lock=server_lock,
        )  # fmt: skip
        self._run(
            "postgres", "--single", "-D", str(fresh), "-c", "fsync=off", "template1",
            lock=server_lock, statements=f"CREATE DATABASE {DATABASE}\n",
        )  # fmt: skip
        self._run("initdb", "--sync-only", f"--pgdata={fresh}", lock=server_lock)
        fresh.rename(self.home.data)
        _flush(self.home.path)

    def _socket_directory(self) -> Path:
        """A directory that only the account may enter, with a path short enough for a socket (107 bytes)."""
        with contextlib.suppress(FileNotFoundError):
            recorded = Path(self.home.socket_record.read_text().strip())
            status = recorded.lstat()
            # Any user may create a directory of that name in /tmp, but only this account can own it.
            if status.st_uid == self.account.uid and status.st_mode & 0o170777 == 0o040700:
                for leftover in recorded.iterdir():
                    leftover.unlink()
                return recorded
        # Not the user's TMPDIR, which may be long; what an attacker could prepare in /tmp, mkdtemp does not take.
        parent = "/tmp" if os.access("/tmp", os.W_OK | os.X_OK) else tempfile.gettempdir()  # noqa: S108
        directory = Path(tempfile.mkdtemp(prefix="queueapp-", dir=parent))
        if os.geteuid() != self.account.uid:
            os.chown(directory, self.account.uid, self.account.gid)
        fresh = self.home.socket_record.with_suffix(".new")
        fresh.write_text(f"{directory}\n")
        fresh.rename(self.home.socket_record)
        return directory

    def remove_socket_directory(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.home.socket_record.read_text().strip(), ignore_errors=True)
            self.home.socket_record.unlink()

    def signal_postmaster(self, number: int) -> None:
        postmaster = self.home.postmaster()
        if postmaster is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(postmaster[0], number)

    def kill_processes(self) -> None:
        """Kill what is left of the server: backends busy without their postmaster. A no-op where there is no /proc.

        The next start recovers, as it had to anyway: nothing is lost that was committed.
        """
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(process / "cwd") == str(self.home.data):
                    os.kill(int(process.name), signal.SIGKILL)

    def last_words(self) -> str:
        """What the server that was started last wrote in the end, as one line."""
        try:
            lines = self.home.server_log.read_bytes()[self.log_offset :].decode(errors="replace").splitlines()
        except FileNotFoundError:
            return ""
        reasons = [line for line in lines if "FATAL:" in line or "PANIC:" in line]
        return " / ".join(reasons[-1:] or lines[-3:])

    def _run(self, program: str, *arguments: str, lock: int, statements: str = "") -> None:
        # The program holds the lock as a server does: should the keeper be killed, the next one waits for its end.
        result = subprocess.run(
            [str(self.binaries / program), *arguments],
            input=statements,
            pass_fds=[lock],
            capture_output=True,
            text=True,
            check=False,
            **self._surroundings(),
        )
        if result.returncode != 0:
            raise EmbeddedPostgresError(
                f"{program} failed: {' '.join((result.stderr or result.stdout).split()) or result.returncode}"
            )

    def _popen(self, command: list[str], **arguments: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, **arguments, **self._surroundings())

    def _surroundings(self) -> dict[str, Any]:
        # A PGDATA, PGPORT or locale of the caller's must not reach the server.
        environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
        return {"cwd": self.home.path, "env": environment, "umask": 0o077, **self.account.switch()}


def _flush(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
