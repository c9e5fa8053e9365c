"""The guide's Python blocks run, in order, on a real database; and every public name is on that page."""

from __future__ import annotations

import re

import pytest

import queueapp
from queueapp.consuming.registry import registered

from .pages import DOCS, blocks
from .running import run_blocks

GUIDE = DOCS / "guide.md"


@pytest.mark.django_db(transaction=True)
def test_the_blocks_of_the_guide_run() -> None:
    with run_blocks(GUIDE) as module:
        assert {c.name.rsplit(".", 1)[-1] for c in registered.of(module.Orders)} == {"ship", "Refund"}


def test_every_public_name_is_in_an_example() -> None:
    pages = [GUIDE, *(GUIDE.parent / "reference").glob("*.md"), *(GUIDE.parent / "howto").glob("*.md")]
    code = "\n".join(block.code for page in pages for block in blocks(page, "python"))
    missing = [name for name in queueapp.__all__ if not re.search(rf"\b{name}\b", code)]
    assert missing == []
