"""Real processes: ``manage.py runqueueworker`` with its workers and its dispatcher, or many workers alone."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
from django.db.models import Max, Min, QuerySet

from queueapp.models import NO_QUEUES, Subscriber
from tests.in_process_worker import DEADLINE, eventually

CHECKOUT = Path(__file__).parents[2]


class Tree:
    """One process that has started others, from when this is made."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        #: Every process below it that was seen: a killed one leaves orphans without a parent.
        self._family: set[psutil.Process] = set()
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=CHECKOUT,
                env=environment | {"LOG_LEVEL": "INFO"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def wait_for_workers(self, count: int = 1) -> list[int]:
        """Until so many workers have said that they are alive; their process ids."""
        alive: list[int] = []

        def are_there() -> bool:
            alive[:] = self.workers
            return self.process.poll() is not None or len(alive) >= count

        eventually(are_there, 4 * DEADLINE)
        assert self.process.poll() is None, self.output
        self._family |= _family_of(self.process.pid)
        return alive

    def wait_until_workers_know_each_other(self) -> None:
        """Until each has had a heartbeat after the last one began: they share a small backlog by their number, and are
        without crash tracking, because the others are alive."""
        seen = _workers().aggregate
        eventually(lambda: seen(last=Max("started_at"))["last"] < seen(first=Min("heartbeat_at"))["first"])
        eventually(lambda: not Subscriber.objects.filter(crash_tracking=True).exists())

    @property
    def workers(self) -> list[int]:
        """Process ids of the workers that are alive by their own account."""
        return sorted(set(_workers().values_list("process", flat=True)))

    @property
    def output(self) -> str:
        """What all processes have printed and logged so far."""
        return self._log.read_text()

    def numbers(self, what: str) -> list[int]:
        """What the workers said of themselves when they ended, for example "empty receives"."""
        return [int(number) for number in re.findall(rf"{what} (\d+)", self.output)]

    def terminate(self) -> int:
        """SIGTERM to the first process; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        return self.process.wait(4 * DEADLINE)

    def kill(self) -> None:
        """End what is left of it, its children too: one whose supervisor is gone ends by itself, but only when it has
        handled what it holds, and what it wrote until then would be in the tables of the next test."""
        self._family |= _family_of(self.process.pid)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(DEADLINE)
        for item in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                item.kill()
        _, remaining = psutil.wait_procs(self._family, DEADLINE)
        assert not remaining


def _workers() -> QuerySet[Subscriber]:
    return Subscriber.objects.exclude(queue__in=NO_QUEUES)


def _family_of(process: int) -> set[psutil.Process]:
    try:
        return set(psutil.Process(process).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def children_of(process: int) -> list[int]:
    """Process ids of the children that this process still has."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            status = Path("/proc", entry, "stat").read_text() if entry.isdecimal() else ""
        except OSError:
            continue
        fields = status.rpartition(")")[2].split()
        if len(fields) > 1 and int(fields[1]) == process and fields[0] != "Z":
            found.append(int(entry))
    return found
