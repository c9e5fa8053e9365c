"""The words of this project are those of the field: what was renamed does not come back.

Read are docs, docstrings, comments and strings (help texts, labels, log messages, errors) of the packages, and
templates. A word is forbidden for a meaning that has a standard term; docs/reference/glossary.md has the terms.
"""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

from .pages import CHECKOUT

#: Pattern -> what to write instead.
WORDS = {
    r"nobody|somebody|whoever|anybody": "say who: a worker, a consumer, another process, an operator",
    r"whatever befalls|is the matter|goes by itself|go by themselves": "say what happens",
    r"keeps? house|kept house|keeping house|housekeeping|housekeeper": "maintenance",
    r"goodbye|good-bye|sign(?:s|ed)? off|sign(?:s|ed)? on": "deregister, register",
    r"lapsed?|lapses|lapsing": "the lease expires, expired",
    r"strangers?": "unclaimed types, previous runs, skipped messages",
    r"suspects?": "quarantined message",
    r"careful_until|careful_period|carefully|careful": "crash tracking",
    r"wedged|wedged_after": "stuck",
    r"stranded": "unroutable",
    r"lets? go|let_go|letting go": "delete, release",
    r"come to rest|at_rest|go_on": "pause, resume",
    r"(?<!OOM )killer": "the message that ends its process",
    r"a lane|lanes?": "consumer filter",
    r"the desk|desk|the crew|crew|the bell": "queue state, receiver pool, waker",
    r"struck|strikes|striking": "interrupt",
    r"is told of|tells who|was told|were told|being told|are told|is told": "is notified, is reported",
    r"code of the user's|the user's that is no handler": "callback",
    r"disarmed|disarms?": "closed (circuit breaker)",
    r"feels? its way|feel one's way": "probe",
}
#: Terms of the source systems, in the pages and modules that map them.
EXEMPT = {
    "docs/lineage.md", "docs/reference/glossary.md", "docs/reference/celery-terms.md",
    "queueapp/conf/asyncmonolith_names.py",
    "docs/explanation/fault-tests.md",  # names of faults and options of the chaos runs
}  # fmt: skip
FORBIDDEN = re.compile(
    "|".join(rf"(?P<w{number}>\b(?:{words})\b)" for number, words in enumerate(WORDS)), re.IGNORECASE
)


def files() -> list[Path]:
    found = [CHECKOUT / "README.md", CHECKOUT / "CONTRIBUTING.md", CHECKOUT / "CHANGELOG.md"]
    found += (CHECKOUT / "docs").rglob("*.md")
    for package in ("queueapp", "workers", "project"):
        found += (path for path in (CHECKOUT / package).rglob("*") if path.suffix in (".py", ".html", ".js"))
    return sorted(path for path in found if path.relative_to(CHECKOUT).as_posix() not in EXEMPT)


def prose_of(path: Path) -> list[tuple[int, str]]:
    """Numbered lines of prose. Of Python: comments and strings, and names as words."""
    if path.suffix != ".py":
        return list(enumerate(path.read_text().splitlines(), 1))
    found = []
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING, tokenize.NAME) or tokenize.tok_name[token.type].startswith(
            "FSTRING"
        ):
            text = token.string.replace("_", " ") if token.type == tokenize.NAME else token.string
            found += ((token.start[0] + index, line) for index, line in enumerate(text.splitlines()))
    return found


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(CHECKOUT).as_posix())
def test_words_that_have_a_standard_term_are_not_used(path: Path) -> None:
    used = []
    for number, line in prose_of(path):
        for match in FORBIDDEN.finditer(line):
            instead = list(WORDS.values())[int(match.lastgroup[1:])]
            used.append(f"{path.name}:{number}: {match[0]!r} -> {instead}")
    assert used == []
