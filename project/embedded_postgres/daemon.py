"""The keeper: the background process that starts the server, restarts it, and stops it after its last user.

    python -m project.embedded_postgres.daemon HOME DESCRIPTOR

DESCRIPTOR is the inherited keeper.lock. The process that was started returns when the server is ready (exit code 0),
when its child was killed meanwhile (KILLED), or prints why there will be no server (1); the child is the keeper. It
runs until users.lock has been free for LINGER_SECONDS or it gets SIGTERM; in both cases it stops the
server. Killed in any other way, it leaves a server that the next keeper takes over.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from project.embedded_postgres.cluster import Cluster
from project.embedded_postgres.data_directory import Home, is_running
from project.embedded_postgres.errors import KILLED, EmbeddedPostgresError

LINGER_SECONDS = 2.0  # so that one command after the other does not start and stop a server each
LOOK_SECONDS = 0.25
POLL_SECONDS = 0.02
READY_TIMEOUT_SECONDS = 110.0
MAXIMUM_STARTS = 5  # of a server that is killed each time before it is ready
ORPHAN_SECONDS = 2.0  # backends notice the end of their postmaster at once, unless they are busy
FAST_STOP_SECONDS = 60.0  # disconnects everybody and writes a checkpoint
IMMEDIATE_STOP_SECONDS = 10.0


class Keeper:
    """Looks after the server of one home, from its start to its end."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.cluster = Cluster(home)
        self.postmaster: subprocess.Popen[bytes] | None = None
        self.exit_code: int | None = None  # of the last postmaster; negative: the signal that killed it
        self.stop_requested = False

    def bring_up(self) -> None:
        """Start the server, or take over the one that runs; return when it takes connections."""
        deadline = time.monotonic() + READY_TIMEOUT_SECONDS
        orphaned_since: float | None = None
        starts = 0
        while not self.stop_requested:
            self._reap()
            server_lock = self.home.try_lock("server")
            if server_lock is not None:
                try:
                    if self.postmaster is None:  # otherwise it has ended this instant
                        killed = self.exit_code is not None and self.exit_code < 0
                        if starts == MAXIMUM_STARTS or (starts > 0 and not killed):
                            raise EmbeddedPostgresError(f"PostgreSQL does not start: {self.cluster.last_words()}")
                        self.postmaster = self.cluster.start(server_lock)
                        starts += 1
                finally:
                    os.close(server_lock)
            elif self.home.ready_server() is not None:
                return
            elif self._has_no_postmaster():
                orphaned_since = orphaned_since or time.monotonic()
                if time.monotonic() - orphaned_since > ORPHAN_SECONDS:
                    self.cluster.kill_processes()
            if time.monotonic() > deadline:
                words = self.cluster.last_words()
                raise EmbeddedPostgresError(
                    f"the embedded PostgreSQL is not ready after {READY_TIMEOUT_SECONDS:.0f} s: {words}"
                )
            time.sleep(POLL_SECONDS)

    def _has_no_postmaster(self) -> bool:
        postmaster = self.home.postmaster()
        return postmaster is not None and not is_running(postmaster[0])

    def _reap(self) -> None:
        if self.postmaster is not None:
            self.exit_code = self.postmaster.poll()
            if self.exit_code is not None:
                self.postmaster = None

    def watch(self) -> None:
        """Keep the server up while any process uses it, then stop it."""
        unused_since: float | None = None
        while not self.stop_requested:
            self._reap()
            if self.home.ready_server() is None:
                self.bring_up()
            if self.home.keep_running.exists() or not self.home.is_unused():
                unused_since = None
            else:
                unused_since = unused_since or time.monotonic()
                if time.monotonic() - unused_since >= LINGER_SECONDS and self._stop_unused():
                    return
            time.sleep(LOOK_SECONDS)
        self.stop()

    def _stop_unused(self) -> bool:
        # Held to the end of the process: a new user waits, and then starts a new daemon.
        if self.home.try_lock("users") is None:
            return False
        self.stop()
        return True

    def stop(self) -> None:
        """Stop the server: politely to its clients' data, in the end by force."""
        for number, patience in ((signal.SIGINT, FAST_STOP_SECONDS), (signal.SIGQUIT, IMMEDIATE_STOP_SECONDS)):
            self.cluster.signal_postmaster(number)
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline and not self._has_no_postmaster():
                self._reap()
                if self.home.is_free("server"):
                    self.cluster.remove_socket_directory()
                    return
                time.sleep(POLL_SECONDS)
        self.cluster.kill_processes()


def main(home_path: str) -> int:
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        with os.fdopen(reader) as pipe:
            answer = pipe.read()
        if answer == "ready":
            return 0
        print(answer, file=sys.stderr)
        return 1 if answer else KILLED
    os.close(reader)
    home = Home(Path(home_path))
    with os.fdopen(writer, "w") as answer_pipe:
        try:
            _detach(home)
            keeper = Keeper(home)
            signal.signal(signal.SIGTERM, lambda *_: setattr(keeper, "stop_requested", True))
            keeper.bring_up()
        except (EmbeddedPostgresError, OSError, subprocess.SubprocessError) as error:
            answer_pipe.write(f"{error} (log: {home.server_log})")
            return 1
        except BaseException:
            answer_pipe.write(f"the keeper of the embedded PostgreSQL failed: see {home.keeper_log}")
            traceback.print_exc()
            return 1
        answer_pipe.write("ready")
    try:
        keeper.watch()
    except EmbeddedPostgresError as error:
        # Users find the daemon gone at their next connection, start another one, and get its error.
        print(error, file=sys.stderr)
        return 1
    return 0


def _detach(home: Home) -> None:
    """Leave the terminal and the streams of the process that happened to come first."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = os.open(home.keeper_log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    with contextlib.closing(open(os.devnull, "rb")) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
