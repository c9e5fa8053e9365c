"""The pages of Celery: each supported feature has a test, which exists, and an unsupported one a reason."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
DOCS = HERE.parents[3] / "docs"


def _rows(page: str) -> list[list[str]]:
    """The rows of the table of features of a page."""
    text = (DOCS / page).read_text()
    lines = text[text.index("| Celery feature |") :].splitlines()[2:]
    table = lines[: next((index for index, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_supported_features_have_a_test_and_others_a_reason() -> None:
    tested = dict(map(tuple, _rows("explanation/celery-tests.md")))
    features = _rows("howto/celery.md")
    assert len(features) > 20
    for feature, state in features:
        if re.match("do(es)? not work", state):
            assert ":" in state, feature
        else:
            named = [tests for second, tests in tested.items() if feature.startswith(second)]
            assert named, feature


def test_every_test_that_is_named_exists() -> None:
    there = {
        name for file in HERE.glob("test_*.py") for name in re.findall(r"^def (test_\w+)\(", file.read_text(), re.M)
    }
    for _, tests in _rows("explanation/celery-tests.md"):
        named = re.findall(r"`(test_\w+)`", tests)
        assert named, tests
        assert set(named) - there == set()
