"""The words of this project are those of the field: what was renamed does not come back.

Read are docs, docstrings, comments, strings (help texts, labels, log messages, errors) and names of the packages and of
the tests, and templates. A word is forbidden for a meaning that has a standard term; docs/reference/glossary.md has the
terms. A name is a noun or a verb, never a bare pronoun.
"""

from __future__ import annotations

import ast
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
    r"in hand": "in flight",
    r"lets? go|let_go|letting go": "delete, release",
    r"come to rest|at_rest|go_on": "pause, resume",
    r"(?<!OOM )killer": "the message that ends its process",
    r"a lane|lanes?": "consumer filter",
    r"the desk|desk|the crew|crew|the bell": "queue state, receiver pool, waker",
    r"struck|strikes|striking": "interrupt",
    r"is told of|tells who|was told|were told|being told|are told|is told": "is notified, is reported",
    r"code of the user's|the user's that is no handler": "callback",
    r"told|telling": "notify, report, log; distinguish",
    r"disarmed|disarms?": "closed (circuit breaker)",
    r"feels? its way|feel one's way": "probe",
}
PACKAGES = ("queueapp", "workers", "project", "tests")
#: Terms of the source systems, in the pages and modules that map them.
EXEMPT = {
    "docs/lineage.md", "docs/reference/glossary.md", "docs/reference/celery-terms.md",
    "queueapp/conf/asyncmonolith_names.py",
    "docs/explanation/fault-tests.md",  # names of faults and options of the chaos runs
    "tests/docs/test_terminology.py",
    "tests/project/embedded_postgres/test_accounts.py",  # `nobody` is an account of the operating system
}  # fmt: skip
#: Pronouns and the like, as names of variables, parameters, attributes, functions or classes.
PRONOUNS = {
    "one", "ones", "some", "mine", "ours", "theirs", "most", "told", "other", "others", "also", "own", "each", "whom",
    "those",
}  # fmt: skip
FORBIDDEN = re.compile(
    "|".join(rf"(?P<w{number}>\b(?:{words})\b)" for number, words in enumerate(WORDS)), re.IGNORECASE
)


def files() -> list[Path]:
    found = [CHECKOUT / "README.md", CHECKOUT / "CONTRIBUTING.md", CHECKOUT / "CHANGELOG.md"]
    found += (CHECKOUT / "docs").rglob("*.md")
    for package in PACKAGES:
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


@pytest.mark.parametrize("folder", sorted({path.relative_to(CHECKOUT).parts[0] for path in files()}))
def test_words_that_have_a_standard_term_are_not_used(folder: str) -> None:
    used = []
    for path in files():
        place = path.relative_to(CHECKOUT)
        if place.parts[0] != folder:
            continue
        for number, line in [(0, place.as_posix().replace("_", " ")), *prose_of(path)]:
            for match in FORBIDDEN.finditer(line):
                instead = list(WORDS.values())[int(match.lastgroup[1:])]
                used.append(f"{place}:{number}: {match[0]!r} -> {instead}")
    assert used == []


def names_of(path: Path) -> list[tuple[int, str]]:
    """Each name that a module binds: variables, parameters, attributes, functions, classes."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.arg):
            found.append((node.lineno, node.arg))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.append((node.lineno, node.id))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.append((node.lineno, node.attr))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.append((node.lineno, node.name))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_names_are_no_pronouns(package: str) -> None:
    """``__eq__(self, other)`` is Python's own signature."""
    used = []
    for path in sorted((CHECKOUT / package).rglob("*.py")):
        for number, name in names_of(path):
            if name.strip("_").lower() in PRONOUNS and not is_operand(path, number):
                used.append(f"{path.relative_to(CHECKOUT)}:{number}: {name}")
    assert used == []


def is_operand(path: Path, number: int) -> bool:
    return re.search(r"def __\w+__\(self, other\b", path.read_text().splitlines()[number - 1]) is not None
