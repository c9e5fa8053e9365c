"""The files of one embedded server: where they are, which lock is held, and what the server says about itself.

data/              the database cluster
users.lock, keeper.lock, server.lock   see the package
socket_directory   the path of the directory with the server's socket, while it runs
keep_running       exists while `python -m project.embedded_postgres start` keeps an unused server up
server.log, keeper.log
"""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

DATABASE = "queueapp"
SUPERUSER = "postgres"


@dataclass(frozen=True)
class EmbeddedServer:
    """The address of a running embedded server."""

    socket_directory: Path
    user: str = SUPERUSER

    @property
    def url(self) -> str:
        """The URL of the site's database, as DATABASE_URL, libpq, psql and ADBC take it."""
        return self.url_of(DATABASE)

    def url_of(self, database: str) -> str:
        """The URL of the database named `database`, e.g. the one that the tests have made."""
        return f"postgresql://{self.user}@/{quote(database, safe='')}?host={quote(str(self.socket_directory))}"


@dataclass(frozen=True)
class Home:
    """The directory of one embedded server; `path` is resolved, so that two spellings of it are equal."""

    path: Path

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def keep_running(self) -> Path:
        return self.path / "keep_running"

    @property
    def server_log(self) -> Path:
        return self.path / "server.log"

    @property
    def keeper_log(self) -> Path:
        return self.path / "keeper.log"

    @property
    def socket_record(self) -> Path:
        return self.path / "socket_directory"

    @property
    def postmaster_file(self) -> Path:
        return self.data / "postmaster.pid"

    def lock_path(self, name: str) -> Path:
        """`name` is users, keeper or server."""
        return self.path / f"{name}.lock"

    def try_lock(self, name: str, *, shared: bool = False) -> int | None:
        """The open descriptor that holds the lock `name`, or None when another process holds it."""
        # Read-only suffices for flock, so that root and the server's account can use each other's files.
        descriptor = os.open(self.lock_path(name), os.O_RDONLY | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def is_free(self, name: str) -> bool:
        """Whether no process holds the lock `name` (keeper or server) exclusively."""
        # A shared attempt, so that two processes that ask at once do not see each other.
        return self._released(self.try_lock(name, shared=True))

    def is_unused(self) -> bool:
        """Whether no process is a user of the server; also False in the instant in which another process asks."""
        return self._released(self.try_lock("users"))

    @staticmethod
    def _released(descriptor: int | None) -> bool:
        if descriptor is None:
            return False
        os.close(descriptor)
        return True

    def postmaster(self) -> tuple[int, str] | None:
        """(process id, status) as the server last wrote them; None where there is no such file, or half of one."""
        try:
            lines = self.postmaster_file.read_text().splitlines()
            return int(lines[0]), lines[7].strip() if len(lines) > 7 else "starting"
        except (FileNotFoundError, NotADirectoryError, IndexError, ValueError):
            return None

    def ready_server(self) -> EmbeddedServer | None:
        """The server, if it runs and takes connections."""
        postmaster = self.postmaster()
        if postmaster is None or postmaster[1] != "ready" or self.is_free("server") or not is_running(postmaster[0]):
            return None
        try:
            return EmbeddedServer(Path(self.socket_record.read_text().strip()))
        except FileNotFoundError:
            return None


def is_running(process_id: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")
