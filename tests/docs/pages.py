"""The pages of the documentation as the tests read them: code blocks, headings, links."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).parents[2]
DOCS = CHECKOUT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
_FENCED = re.compile(r"^```(\w*)(?: title=\"([^\"]*)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """One fenced block. ``line`` is the page's line of its first line."""

    language: str
    title: str
    code: str
    line: int


def blocks(page: Path, *languages: str) -> list[Block]:
    """The blocks of these languages, in order."""
    text = page.read_text()
    found = [Block(m[1], m[2] or "", m[3], text[: m.start()].count("\n") + 2) for m in _FENCED.finditer(text)]
    return [block for block in found if block.language in languages]


def prose(page: Path, *, keep_code: bool = False) -> str:
    """The page without its blocks, and without the code in its lines."""
    text = _FENCED.sub("", page.read_text())
    return text if keep_code else re.sub(r"`[^`\n]+`", "", text)


def links(page: Path) -> list[str]:
    """The targets of its links."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


def anchors(page: Path) -> set[str]:
    """The anchors of its headings, where GitHub and the site agree on them."""
    headings = re.findall(r"^#+ (.+)$", _FENCED.sub("", page.read_text()), re.MULTILINE)
    return {_on_the_site(heading) for heading in headings} & {_on_github(heading) for heading in headings}


def _on_the_site(heading: str) -> str:
    """As Python-Markdown's ``toc`` does it."""
    plain = unicodedata.normalize("NFKD", heading.replace("`", "")).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def _on_github(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
