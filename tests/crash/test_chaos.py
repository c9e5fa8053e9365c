"""The seeded run, short: the same program that `make chaos` runs for half an hour."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .rig.processes import CHECKOUT
from .rig.schedule import FAULTS, KILLS, schedule


@pytest.mark.timeout(400)
def test_a_short_chaos_run_keeps_every_promise(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.crash.chaos",
        "--duration",
        "16",
        "--seed",
        "3454",  # one that kills a child and the main process of Celery's worker, among others
        "--keep-logs",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=380)

    assert done.stdout, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["kept"], (report, done.stderr)
    assert done.returncode == 0
    assert report["lost"] == report["ghosts"] == report["in_two_places"] == report["waiting"] == 0
    assert report["duplicates"]["transactional"] == report["duplicates"]["at_most_once"] == 0
    assert report["unexplained_duplicates"] == 0
    assert report["kills"]["total"] >= 1
    assert report["sent"] > 100
    assert report["effects"] > 100
    assert report["celery"]["effects"] > 50
    assert report["kills"]["celery"] >= 2


def test_a_seed_makes_the_same_schedule_again_and_half_an_hour_has_more_than_two_hundred_kills() -> None:
    once, again = schedule(7, 1800), schedule(7, 1800)
    assert once == again
    assert once != schedule(8, 1800)
    assert {fault.kind for fault in once} == set(FAULTS)
    assert sum(fault.kind in KILLS for fault in once) > 250
