"""Every test that the list of the console's abilities names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
PAGE = (CHECKOUT / "docs" / "reference" / "console.md").read_text()
LINES = [line for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line and "has it" not in line]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split("|")[1].strip()[:40])
def test_each_line_has_a_test_or_a_reason(line: str) -> None:
    _, what, has_it, rest, _ = (cell.strip() for cell in line.split("|"))
    named = re.fullmatch(r"`([\w/]+\.py)::(test_\w+)`", rest)
    assert what
    if has_it == "✓":
        assert named is not None, rest
        file = CHECKOUT / "tests" / named[1]
        assert f"def {named[2]}(" in file.read_text(), rest
    else:
        assert has_it == "\u2013"
        assert named is None
        assert len(rest) > 20, "a reason"
