"""A handler that kills its tree when its supervisor is dead already: its parent is a process that has other
children."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from .rig.processes import environment
from .rig.waiting import wait_until

#: Adopts orphans, starts a process that is no business of theirs, and a supervisor that ends at once and leaves a
#: worker.
ADOPTS = """
import ctypes, subprocess, sys
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
environ = eval(sys.argv[1])
subprocess.run([sys.executable, "-c", sys.argv[2], sys.argv[3]], env=environ, check=True)
print(bystander.pid, flush=True)
input()
"""
SUPERVISES = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
"""
DIES = """
import os, sys, time
import django
django.setup()
from tests.crash.workload.consumers import Act, _die
deadline = time.monotonic() + 120
while os.getppid() == int(sys.argv[1]) and time.monotonic() < deadline:
    time.sleep(0.01)
_die(Act("orphan", die="tree"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="who adopts orphans is said in Linux' words")
def test_an_orphan_that_kills_its_tree_kills_itself_alone(tmp_path: Path) -> None:
    environ = environment(
        os.environ.get("DATABASE_URL", "postgresql://none@localhost/none"), "orphan", tmp_path / "starts"
    )
    adopter = subprocess.Popen(
        [sys.executable, "-c", ADOPTS, repr(environ), SUPERVISES, DIES],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert adopter.stdout is not None
        bystander = psutil.Process(int(adopter.stdout.readline()))
        parent = psutil.Process(adopter.pid)
        # It is never reaped, so it stays a zombie.
        wait_until(
            lambda: (
                adopter.poll() is not None
                or [c for c in parent.children() if c != bystander and c.status() == psutil.STATUS_ZOMBIE]
            ),
            "the orphan is dead",
        )

        assert adopter.poll() is None
        assert bystander.status() != psutil.STATUS_ZOMBIE
    finally:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(adopter.pid).children():
                child.kill()
        adopter.kill()
        adopter.wait()
