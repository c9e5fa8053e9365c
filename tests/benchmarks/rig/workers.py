"""Real worker processes: ``manage.py runqueueworker`` as a user starts it, and what /proc says about them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from django.conf import settings
from django.db import connection
from django.db.models import QuerySet

from queueapp.models import NO_QUEUES, Subscriber
from tests.benchmarks.messages import Nop
from tests.benchmarks.rig.database import append, drain, wait_until

#: A worker that has not registered after this long never will.
START_PATIENCE = 60.0
#: The environment of workers whose warnings are part of what is measured.
QUIET = {"LOG_LEVEL": "ERROR"}
_TICKS = os.sysconf("SC_CLK_TCK")


class Workers:
    """The process tree of one ``runqueueworker``, ready when entered: every worker process has registered.

    ``QUEUEAPP`` settings may be given; without any, all is as a user gets it. ``beside``: there are other trees.
    """

    def __init__(
        self,
        *queues: Any,
        processes: int = 1,
        dispatcher: bool = False,
        beside: bool = False,
        environment: dict[str, str] | None = None,
        arguments: Sequence[str] = (),
        **queueapp: Any,
    ) -> None:
        self.queues = queues
        self._processes = processes
        self._beside = beside
        self._command = [sys.executable, "manage.py", "runqueueworker", "--processes", str(processes)]
        self._command += ["--no-dispatcher", "--no-maintenance"] * (not dispatcher)
        self._command += [*arguments, *(queue._meta.label for queue in queues)]
        self._environment = os.environ | {"BENCH_QUEUEAPP": json.dumps(queueapp)} | (environment or {})
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Workers:
        if not self._beside:
            Subscriber.objects.all().delete()
        # A process group of its own: a Ctrl-C in the terminal is for the benchmark, which then stops its workers.
        self._process = subprocess.Popen(
            self._command,
            cwd=settings.BASE_DIR,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            process_group=0,
        )
        try:
            wait_until(self._all_registered, f"{self._processes} worker processes to start", START_PATIENCE)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._process is not None:
            self.stop()

    def stop(self, patience: float = 30.0) -> int:
        """SIGTERM, and wait for the end: the exit code; -SIGKILL when it took longer than that."""
        process, self._process = self._process, None
        assert process is not None
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()  # its children see the end of their pipe and follow
            return process.wait()

    def kill(self) -> None:
        """SIGKILL for every process of the tree, as a container's end or the OOM killer does it."""
        victims, process = self.tree_ids, self._process
        assert process is not None
        # Stopped first, so that none of them sees another one's death.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for victim in victims:
                with suppress(ProcessLookupError):
                    os.kill(victim, number)
        process.wait()
        self._process = None

    def _all_registered(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"runqueueworker ended with {self._process.returncode}; LOG_LEVEL=INFO tells more.")
        return self.subscribers.count() == self._processes * len(self.queues)

    @property
    def subscribers(self) -> QuerySet[Subscriber]:
        """The rows of this tree's worker processes, one per queue."""
        return Subscriber.objects.filter(process__in=self.tree_ids).exclude(queue__in=NO_QUEUES)

    def warm_up(self, messages: int = 2000) -> None:
        """Handle a few messages unmeasured: connections are made, statements prepared, modules loaded."""
        for queue in self.queues:
            append(queue, Nop, messages)
            drain(queue)

    @property
    def worker_ids(self) -> list[int]:
        """Process ids of the worker processes."""
        return sorted(set(self.subscribers.values_list("process", flat=True)))

    @property
    def tree_ids(self) -> list[int]:
        """Process ids of the whole tree, the supervisor first."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return [self._process.pid, *map(int, children)]


def cpu_seconds(process_id: int) -> float:
    """CPU time that a process has used, with all threads it ever had."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def resident_bytes(process_id: int) -> int:
    """Resident memory of a process."""
    for line in Path(f"/proc/{process_id}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def server_cpu_seconds() -> dict[int, float]:
    """CPU time by process id of the server's backends for this database, our own connection excepted.

    In the scheduler's nanoseconds: a share of 20,000 messages is a few clock ticks only.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend' "
            "AND pid <> pg_backend_pid()"
        )
        found = {}
        for (process_id,) in cursor.fetchall():
            with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                found[process_id] = int(Path(f"/proc/{process_id}/schedstat").read_text().split()[0]) / 1e9
    return found
