"""The page of faults names a test for each of them, and each of these tests exists."""

from __future__ import annotations

import re
from pathlib import Path

from .rig.processes import CHECKOUT
from .rig.schedule import FAULTS
from .workload.rudeness import RUDENESSES

ROOM = Path(__file__).parent


def test_every_fault_of_the_page_names_a_test_that_exists() -> None:
    page = (CHECKOUT / "docs" / "faults.md").read_text()
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", page)
    assert len(named) > 30
    missing = [f"{file}::{test}" for file, test in named if f"def {test}(" not in (ROOM / file).read_text()]
    assert not missing


def test_every_crash_test_is_on_the_page() -> None:
    page = (CHECKOUT / "docs" / "faults.md").read_text()
    others = ("test_chaos.py", "test_oracle.py", "test_tsql_of_the_rig.py", Path(__file__).name)
    files = [file for file in ROOM.glob("test_*.py") if file.name not in others]
    tests = [name for file in files for name in re.findall(r"^def (test_\w+)\(", file.read_text(), re.MULTILINE)]
    assert [name for name in tests if f"::{name}`" not in page] == []


def test_every_rudeness_and_every_strike_is_on_the_page() -> None:
    page = (CHECKOUT / "docs" / "faults.md").read_text()
    assert [name for name in RUDENESSES if f"`{name}`" not in page] == []
    chaos = page[page.index("## All of it at once") :]
    words = {
        "child": "worker processes",
        "backend": "pg_terminate_backend",
        "deploy": "SIGTERM",
        "killer": "kill their",
    }
    assert [kind for kind in FAULTS if words.get(kind, kind) not in chaos] == []
