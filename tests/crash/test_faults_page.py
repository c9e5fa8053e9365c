"""The page of faults names a test for each of them, and each of these tests exists."""

from __future__ import annotations

import re
from pathlib import Path

from .rig.processes import CHECKOUT

ROOM = Path(__file__).parent


def test_every_fault_of_the_page_names_a_test_that_exists() -> None:
    page = (CHECKOUT / "docs" / "faults.md").read_text()
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", page)
    assert len(named) > 30
    missing = [f"{file}::{test}" for file, test in named if f"def {test}(" not in (ROOM / file).read_text()]
    assert not missing


def test_every_crash_test_is_on_the_page() -> None:
    page = (CHECKOUT / "docs" / "faults.md").read_text()
    files = [file for file in ROOM.glob("test_*.py") if file.name not in ("test_chaos.py", Path(__file__).name)]
    tests = [name for file in files for name in re.findall(r"^def (test_\w+)\(", file.read_text(), re.MULTILINE)]
    assert [name for name in tests if f"::{name}`" not in page] == []
