"""The processes of a run: worker trees as an init system keeps them, other programs, and how to kill each part.

Every process is a real one (``manage.py ...``) with the environment of the run; what it writes goes to a file of its
own. The init system here is a thread that starts a tree again when its supervisor is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from .server import dying_with_parent
from .waiting import wait_until

CHECKOUT = Path(__file__).resolve().parents[3]


def environment(url: str, name: str, starts: Path, **settings: object) -> dict[str, str]:
    """The environment of a process of the run: its database, its name there, overrides of QUEUEAPP in lower case."""
    # No project here has two databases: the second one of the tests would be a database of the project.
    inherited = {key: value for key, value in os.environ.items() if key != "QUEUEAPP_TEST_SQLSERVER_URL"}
    return inherited | {
        "DATABASE_URL": url,
        "DJANGO_SETTINGS_MODULE": "tests.crash.workload.settings",
        "CRASH_NAME": name,
        "CRASH_STARTS": str(starts),
        "CRASH_QUEUEAPP": json.dumps({option.upper(): value for option, value in settings.items()}),
        "PYTHONPATH": str(CHECKOUT),
        "PYTHONUNBUFFERED": "1",
    }


class Program:
    """One command, its log and its end."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.command = list(command)
        self.environment = dict(environment)
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self.restarts = 0
        #: Whether it is to be started again; changed under the lock, so that it is not started after its last end.
        self._wanted = False
        self._lock = threading.Lock()
        self._init: threading.Thread | None = None

    def start(self) -> None:
        """Start it, in a session of its own: a Ctrl-C in the terminal is for the harness."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*dying_with_parent(signal.SIGKILL), sys.executable, *self.command],
                cwd=CHECKOUT, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    @property
    def name(self) -> str:
        """What its connections are called."""
        return self.environment["CRASH_NAME"]

    @property
    def pid(self) -> int:
        """Its process id; it has to have been started."""
        assert self.process is not None
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether it runs."""
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> bool:
        """Send it a signal; False when it has ended."""
        if not self.running:
            return False
        assert self.process is not None
        self.process.send_signal(number)
        return True

    def wait(self, seconds: float = 60.0) -> int:
        """Wait for its end and return the exit code; it is killed when it takes longer."""
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def keep_running(self) -> None:
        """Start it, and again whenever it ends, until ``stop`` or ``kill``: what an init system does."""
        self._wanted = True
        self._init = threading.Thread(target=self._restart, name=f"init-{self.log.name}", daemon=True)
        self._init.start()

    def _restart(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    break
                if not self.running:
                    self.restarts += self.process is not None
                    self.start()
            assert self.process is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)
        if self.running:
            # The process is bound to this thread's life (see dying_with_parent): stay with it.
            assert self.process is not None
            self.process.wait()

    def stop(self, seconds: float = 60.0) -> int:
        """SIGTERM, as a deploy does; waits for the end and returns the exit code."""
        self._do_not_restart()
        self.signal(signal.SIGTERM)
        return self.wait(seconds)

    def kill(self) -> None:
        """SIGKILL, and do not start it again."""
        self._do_not_restart()
        self.signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    def _do_not_restart(self) -> None:
        with self._lock:
            self._wanted = False

    def log_text(self) -> str:
        """What it and its children have written, over all restarts."""
        with contextlib.suppress(FileNotFoundError):
            return self.log.read_text(errors="replace")
        return ""


class Tree(Program):
    """``manage.py runqueueworker`` with its children."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        super().__init__(["manage.py", "runqueueworker", *arguments], environment, log)
        #: Every process that was ever seen in this tree, so that orphans of a killed supervisor are found.
        self._seen: dict[int, psutil.Process] = {}

    # -- its parts ------------------------------------------------------------------------------------------------

    def children(self, role: str = "") -> list[psutil.Process]:
        """The living children of the present supervisor, oldest first; ``role``: "worker" or "dispatcher"."""
        found = []
        for child in _children_of(self.process.pid if self.process is not None else 0):
            with contextlib.suppress(psutil.Error):
                line = child.cmdline()
                if self._plays(line, role):
                    self._seen[child.pid] = child
                    found.append(child)
        return sorted(found, key=lambda child: child.pid)

    @staticmethod
    def _plays(line: Sequence[str], role: str) -> bool:
        return "workers.processes.child" in line and (not role or bool(json.loads(line[-1])["role"] == role))

    def worker(self) -> psutil.Process:
        """The first worker process, waited for."""
        return wait_until(lambda: self.children("worker"), f"a worker process of {self.name}")[0]

    def kill_tree(self) -> list[int]:
        """Kill everything at once, as a container's end or the OOM killer does; returns the ids."""
        victims = [*self.children(), *([psutil.Process(self.pid)] if self.running else [])]
        # Stopped first, so that none of them sees another one's death.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for victim in reversed(victims):
                with contextlib.suppress(psutil.Error):
                    victim.send_signal(number)
        return [victim.pid for victim in victims]

    def orphans(self) -> list[int]:
        """Children of earlier supervisors that still run."""
        present = {child.pid for child in self.children()}
        return [pid for pid, process in self._seen.items() if pid not in present and process.is_running()
                and process.status() != psutil.STATUS_ZOMBIE]  # fmt: skip

    def kill(self) -> None:
        """End all of it at once, orphans included, and do not start it again."""
        self._do_not_restart()
        self.children()
        with contextlib.suppress(psutil.Error):
            self.kill_tree()
        for process in self._seen.values():
            with contextlib.suppress(psutil.Error):
                process.kill()
        super().kill()


class CeleryTree(Tree):
    """``celery worker`` with the children of its prefork pool; its main process is what a supervisor is elsewhere."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        super().__init__(arguments, environment, log)
        self.command = [
            "-m", "celery", "-A", "tests.crash.workload.celeryapp", "worker", "--loglevel", "INFO", "--pool", "prefork",
            "--hostname", f"{self.name}@crash", *arguments,
        ]  # fmt: skip

    @staticmethod
    def _plays(line: Sequence[str], role: str) -> bool:
        return role in ("", "worker")


def _children_of(pid: int) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        yield from psutil.Process(pid).children()
