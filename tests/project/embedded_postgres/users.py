"""Users of an embedded server as processes of their own, and what can be seen of the server from outside."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from project.embedded_postgres.data_directory import Home
from project.embedded_postgres.os_account import remove_home
from project.paths import CHECKOUT

DEADLINE_SECONDS = 60.0

# Becomes a user of the server in the folder argv[1], says where it is, and stays until its input ends.
USER = """
import sys
from pathlib import Path
from project.embedded_postgres import EmbeddedPostgresError, ensure_running
try:
    print(ensure_running(Path(sys.argv[1])).url, flush=True)
except EmbeddedPostgresError as error:
    sys.exit(f"error: {error}")
for line in sys.stdin:
    print(ensure_running(Path(sys.argv[1])).url, flush=True)
"""


class User:
    """A process that uses the server in `data`."""

    def __init__(self, data: Path, program: str = USER, python: str = sys.executable, **arguments: Any) -> None:
        arguments.setdefault("env", os.environ | {"PYTHONPATH": str(CHECKOUT)})
        self.process = subprocess.Popen(
            [python, "-c", program, str(data)],
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **arguments,
        )

    def url(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line.startswith("postgresql://"), line or self.error()
        return line

    def ask_again(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.url()

    def error(self) -> str:
        return self.process.communicate(timeout=DEADLINE_SECONDS)[1]

    def leave(self) -> None:
        if self.process.returncode is None:
            self.process.communicate(timeout=DEADLINE_SECONDS)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def until(condition: Callable[[], Any], seconds: float = DEADLINE_SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
    return value


def home_of(data: Path) -> Home:
    return Home((data / "postgres").resolve())


def postmaster_of(data: Path) -> int:
    postmaster = home_of(data).postmaster()
    assert postmaster is not None
    return postmaster[0]


def keepers_of(data: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if "project.embedded_postgres.daemon" in command and str(home_of(data).path) in command:
                found.append(process)
    return found


def is_stopped(data: Path) -> bool:
    return home_of(data).is_free("server") and home_of(data).is_free("keeper")


def shut_down(data: Path) -> None:
    if not (data / "postgres").exists():
        return
    for keeper in keepers_of(data):
        keeper.terminate()
    until(lambda: is_stopped(data))
    remove_home(data)
