"""Runs the demo's commands as a user does, in processes of their own on the test database, and finds their children."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from project.paths import CHECKOUT
from queueapp.contrib.celery.models import BrokerQueue
from queueapp.models import NO_QUEUES, Subscriber
from tests.in_process_worker import eventually

#: Starting a tree of processes takes seconds on a busy machine.
PATIENCE = 90.0


@contextlib.contextmanager
def command(*arguments: str, environment: dict[str, str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """``manage.py`` with these arguments; killed at the end if it still runs. ``folder`` takes its locks and logs."""
    process = subprocess.Popen(
        [sys.executable, "manage.py", *arguments],
        cwd=CHECKOUT,
        env=environment | {"DATA_DIR": str(folder), "SECRET_KEY": "test"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def worker_processes() -> list[int]:
    """Process ids of the workers that are alive by what they say in the database."""
    # Celery's process is none of them.
    rest = [*NO_QUEUES, BrokerQueue._meta.label]
    return [
        process
        for process in Subscriber.objects.exclude(queue__in=rest).values_list("process", flat=True).distinct()
        if runs(process)
    ]


def parent_of(process: int) -> int:
    """The process id of a process's parent."""
    return int(subprocess.check_output(["ps", "-o", "ppid=", "-p", str(process)], text=True))


def runs(process: int) -> bool:
    """Whether a process is there and more than an entry that waits for its parent."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True, check=False)
    return found.returncode == 0 and not found.stdout.startswith("Z")


def wait_for_the_end(*processes: int) -> None:
    """Fail when one of these processes still runs after a while."""
    for process in processes:
        eventually(lambda process=process: not runs(process), PATIENCE)


def kill_hard(process: int) -> None:
    """``kill -9``."""
    try:
        os.kill(process, 9)
    except ProcessLookupError:
        pytest.fail(f"process {process} ended before it could be killed: the demo was too short for this test")
