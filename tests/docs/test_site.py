"""Every page is reachable, every link leads somewhere, and the site is built without a warning."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from .pages import CHECKOUT, DOCS, PAGES, anchors, links, prose

OUTSIDE = [CHECKOUT / "README.md", CHECKOUT / "CONTRIBUTING.md"]


def test_every_page_is_in_the_navigation_once() -> None:
    _, _, nav = (CHECKOUT / "mkdocs.yml").read_text().partition("\nnav:\n")
    named = Counter(re.findall(r"\S+\.md$", nav, re.MULTILINE))
    assert named == Counter(page.relative_to(DOCS).as_posix() for page in PAGES)


def test_the_site_has_four_parts() -> None:
    _, _, nav = (CHECKOUT / "mkdocs.yml").read_text().partition("\nnav:\n")
    assert re.findall(r"^  - (.+?):?$", nav, re.MULTILINE) == [
        "index.md",
        "Tutorial",
        "How-to",
        "Explanation",
        "Reference",
    ]


def test_each_of_the_others_has_what_it_does_better() -> None:
    """A column in the table, and when to take it instead."""
    text = (DOCS / "explanation" / "comparison.md").read_text()
    _, _, *rest = [cell.strip() for cell in text[text.index("\n| ") :].splitlines()[1].strip("|").split("|")]
    assert rest == ["Celery", "django-tasks-db", "procrastinate", "pgqueuer", "Oban"]
    instead = re.findall(r"^- \*\*(.+?)\*\*, when (.+)", text, re.MULTILINE)
    assert [name for name, _ in instead] == rest


def test_nothing_is_called_missing() -> None:
    text = (DOCS / "explanation" / "comparison.md").read_text()
    missing = re.findall(r"^\| \*\*(.+?)\*\* \| \*\*not yet\*\*", text, re.MULTILINE)
    assert missing == []


@pytest.mark.parametrize("page", [*PAGES, *OUTSIDE], ids=lambda page: page.relative_to(CHECKOUT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for target in links(page):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(target)
        elif page not in OUTSIDE and there not in PAGES and there.suffix not in (".json", ".png"):
            broken.append(f"{target}, which the site does not have")
    assert broken == []


@pytest.mark.parametrize("page", [*PAGES, *OUTSIDE], ids=lambda page: page.relative_to(CHECKOUT).as_posix())
def test_every_row_of_a_table_has_the_cells_of_its_head(page: Path) -> None:
    wrong, cells = [], 0
    for number, line in enumerate(prose(page, keep_code=True).splitlines(), 1):
        if not line.startswith("|"):
            cells = 0
            continue
        found = len(re.findall(r"(?<!\\)\|", line))
        cells = cells or found
        if found != cells:
            wrong.append(f"{number}: {line[:60]}")
    assert wrong == []


class Paragraphs(HTMLParser):
    """Collects the text of paragraphs and list items, where Markdown that was not understood ends up."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._open = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in ("p", "li"):
            self._open += 1
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._open -= tag in ("p", "li")

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[-1] += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("MkDocs is not installed: `make docs` does that")
    built = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(built)],
        cwd=CHECKOUT, env=os.environ | {"NO_MKDOCS_2_WARNING": "true"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return built


def test_the_site_is_built_without_a_warning_and_has_every_page(site: Path) -> None:
    built = {page.relative_to(site).with_suffix(".md").as_posix() for page in site.rglob("*.html")} - {"404.md"}
    assert built == {page.relative_to(DOCS).as_posix() for page in PAGES}


def test_no_list_and_no_table_is_taken_for_a_paragraph(site: Path) -> None:
    """GitHub begins a list in the middle of a paragraph, the site needs an empty line before it."""
    swallowed = []
    for page in site.rglob("*.html"):
        reader = Paragraphs()
        reader.feed(page.read_text().partition("<article")[2].partition("</article>")[0])
        marked = re.compile(r"\n\s*([-*|]|\d+\.) ")
        swallowed += [f"{page.name}: {text[:80]!r}" for text in reader.texts if marked.search(text)]
    assert swallowed == []


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(?:https?:)?//[^ >]*", page.read_text()) == []
