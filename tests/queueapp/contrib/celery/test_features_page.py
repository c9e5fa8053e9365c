"""The page of Celery names a test for each feature that works, and each of these tests exists."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = (HERE.parents[3] / "docs" / "howto" / "celery.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE[PAGE.index("| Celery feature |") : PAGE.index("## Options")].splitlines()[2:]
    if line.startswith("|")
]


def test_supported_features_name_a_test_and_others_a_reason() -> None:
    assert len(ROWS) > 20
    for feature, state, tests in ROWS:
        if state.startswith("does not"):
            assert ":" in state, feature
        else:
            assert re.search(r"`test_\w+`", tests), feature


def test_every_test_that_is_named_exists() -> None:
    there = {
        name for file in HERE.glob("test_*.py") for name in re.findall(r"^def (test_\w+)\(", file.read_text(), re.M)
    }
    named = set(re.findall(r"`(test_\w+)`", PAGE[PAGE.index("| Celery feature |") :]))
    assert named - there == set()
