"""The user's side: a process joins the users of the server, and sees to it that there is a keeper."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from project.embedded_postgres.data_directory import EmbeddedServer, Home
from project.embedded_postgres.errors import KILLED, EmbeddedPostgresError
from project.embedded_postgres.os_account import prepare_home
from project.paths import CHECKOUT, data_directory

START_TIMEOUT_SECONDS = 120.0  # recovery after a crash may have to replay max_wal_size
POLL_SECONDS = 0.02

# A background process outlives its parent: it gets what Python needs to start, and none of the parent's secrets.
_KEEPER_ENVIRONMENT = (
    "PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "EXPENDABLE_DATA_DIR",
)  # fmt: skip

_lock = threading.Lock()
_memberships: dict[Home, int] = {}


def ensure_running(data: Path | None = None) -> EmbeddedServer:
    """Make this process a user of the embedded server, start it where it does not run, and return its address.

    `data` is the folder that holds it (default: that of the checkout). The process stays a user until it ends, however
    it ends. Cheap when the server runs already (under a millisecond), so it may be called before every connection.
    Raises `EmbeddedPostgresError` when the server cannot be started.
    """
    with _lock:
        home = prepare_home(data or data_directory())
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        _join(home, deadline)
        while True:
            _ensure_keeper(home)
            server = home.ready_server()
            if server is not None:
                return server
            if time.monotonic() > deadline:
                raise EmbeddedPostgresError(
                    f"the embedded PostgreSQL is not ready after {START_TIMEOUT_SECONDS:.0f} s -- see {home.server_log}"
                )
            time.sleep(POLL_SECONDS)


def _join(home: Home, deadline: float) -> None:
    held = _memberships.get(home)
    if held is not None:
        if _is_file_at(held, home.lock_path("users")):
            return
        os.close(_memberships.pop(home))  # the folder was removed and made anew
    while True:
        # Taken only while the keeper stops the server: then wait for the end of that, and have it started again.
        descriptor = home.try_lock("users", shared=True)
        if descriptor is not None:
            _memberships[home] = descriptor
            return
        if time.monotonic() > deadline:
            raise EmbeddedPostgresError(f"the embedded PostgreSQL does not finish stopping -- see {home.server_log}")
        time.sleep(POLL_SECONDS)


def _is_file_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _ensure_keeper(home: Home) -> None:
    keeper_lock = home.try_lock("keeper")
    if keeper_lock is None:
        return
    try:
        _start_keeper(home, keeper_lock)
    finally:
        os.close(keeper_lock)


def _start_keeper(home: Home, keeper_lock: int) -> None:
    """Start the keeper, which takes over `keeper_lock`; return when the server is ready or the keeper was killed."""
    environment = {name: value for name, value in os.environ.items() if name in _KEEPER_ENVIRONMENT}
    environment["PYTHONPATH"] = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        [sys.executable, "-m", "project.embedded_postgres.daemon", str(home.path), str(keeper_lock)],
        cwd=CHECKOUT,
        env=environment,
        pass_fds=[keeper_lock],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode > 0 and result.returncode != KILLED:
        reason = " ".join((result.stderr or result.stdout).split()) or f"exit code {result.returncode}"
        raise EmbeddedPostgresError(reason)


def _forget_memberships() -> None:
    """In a forked child: the locks belong to the parent; this process joins for itself when it connects."""
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it
    for descriptor in _memberships.values():
        # Closing a copy of the descriptor leaves the parent's lock as it is; LOCK_UN would drop it.
        os.close(descriptor)
    _memberships.clear()


os.register_at_fork(after_in_child=_forget_memberships)


def stop(data: Path | None = None) -> bool:
    """Have an unused server stopped, and wait for its end and its keeper's; False when other processes use it."""
    home = prepare_home(data or data_directory())
    home.keep_running.unlink(missing_ok=True)
    with _lock:
        held = _memberships.pop(home, None)
        if held is not None:
            os.close(held)
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    seen_in_use = 0
    # The keeper removes the socket's directory after the server's end: what deletes the home must not meet it.
    while not (home.is_free("server") and home.is_free("keeper")):
        if home.is_unused():
            _ensure_keeper(home)
            seen_in_use = 0
        elif home.is_free("users"):
            # Once may have been the keeper's own look at the lock.
            seen_in_use += 1
            if seen_in_use == 3:
                return False
        if time.monotonic() > deadline:
            raise EmbeddedPostgresError(f"the embedded PostgreSQL does not stop -- see {home.server_log}")
        time.sleep(POLL_SECONDS)
    return True
