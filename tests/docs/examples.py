"""The Python blocks of a page of the documentation, as code that runs."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[2] / "docs"


def run_blocks(page: str, name: str) -> ModuleType:
    """A module made of every Python block of a page, in order; its lines are those of the page."""
    path = DOCS / page
    text = path.read_text()
    module = ModuleType(name)
    for block in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
        code = "\n" * (text[: block.start()].count("\n") + 1) + block[1]
        exec(compile(code, str(path), "exec"), module.__dict__)
    return module
