"""Every fault of the user's page has a test on docs/explanation/fault-tests.md, and each of these tests exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from .rig.processes import CHECKOUT
from .rig.schedule import FAULTS
from .rig.sqlserver import DESELECTED
from .workload.rudeness import RUDENESSES, SAID, left_out

HERE = Path(__file__).parent
PAGE = CHECKOUT / "docs" / "explanation" / "fault-tests.md"
#: Tests of the suite itself, which stand for no fault.
OF_THE_RIG = (
    "test_chaos.py",
    "test_oracle.py",
    "test_orphans_of_the_rig.py",
    "test_tsql_of_the_rig.py",
    Path(__file__).name,
)


def test_every_fault_of_the_page_names_a_test_that_exists() -> None:
    page = PAGE.read_text()
    # Tests of other packages are named with their folder.
    named = re.findall(r"`((?:[\w/]+/)?test_\w+\.py)::(test_\w+)`", page)
    assert len(named) > 30
    paths = [(HERE.parent / file if "/" in file else HERE / file, test) for file, test in named]
    missing = [f"{path}::{test}" for path, test in paths if f"def {test}(" not in path.read_text()]
    assert not missing


def faults_of(page: Path) -> list[str]:
    """The first cell of each row under the headings of faults, without the targets of its links."""
    named = []
    for heading in ("## Processes", "## Deploys", "## Connections", "## The server"):
        part = page.read_text().partition(f"\n{heading}\n")[2].partition("\n## ")[0].partition("\n### ")[0]
        named += [heading, *re.findall(r"^\| (?!fault|---)(.+?) \| ", part, re.MULTILINE)]
    return [re.sub(r"\]\(.*?\)", "", item) for item in named]


def test_both_pages_have_the_same_faults() -> None:
    assert faults_of(CHECKOUT / "docs" / "faults.md") == faults_of(PAGE)


def test_every_crash_test_is_on_the_page() -> None:
    page = PAGE.read_text()
    files = [file for file in HERE.glob("test_*.py") if file.name not in OF_THE_RIG]
    tests = [name for file in files for name in re.findall(r"^def (test_\w+)\(", file.read_text(), re.MULTILINE)]
    assert [name for name in tests if f"::{name}`" not in page] == []


def only_on_postgresql(file: Path) -> set[str]:
    """The tests of a file that no SQL Server is given, by their marks and their skips."""
    tree = ast.parse(file.read_text())
    of_all = " ".join(ast.unparse(item) for item in tree.body if isinstance(item, ast.Assign))
    found = set()
    for test in tree.body:
        if isinstance(test, ast.FunctionDef) and test.name.startswith("test_"):
            marks = " ".join([of_all if "pytestmark" in of_all else "", *map(ast.unparse, test.decorator_list)])
            skips = re.search(r"vendor != 'postgresql':\n\s+pytest\.skip", ast.unparse(test))
            if not re.search("on_both|only_on_sqlserver", marks) or skips:
                found.add(f"{file.name}::{test.name}")
    return found


def test_the_page_lists_what_runs_on_no_sqlserver() -> None:
    page = PAGE.read_text()
    section = page[page.index("These tests run on PostgreSQL only:") :]
    listed = set(re.findall(r"`(test_\w+\.py::test_\w+)`", section))
    files = [file for file in HERE.glob("test_*.py") if file.name not in OF_THE_RIG]
    assert set().union(*map(only_on_postgresql, files)) == listed


def test_the_page_states_what_of_a_run_is_left_out_on_sqlserver_and_why() -> None:
    page = PAGE.read_text()
    section = page[page.index("## On a SQL Server") :]
    assert [kind for kind in FAULTS if f"`{kind}`" not in section] == []
    for name in (*DESELECTED, *left_out("microsoft")):
        assert f"`{name}`" in section
    assert re.findall(r"^\| `(\w+)` .* left out: ", section, re.MULTILINE) == [*DESELECTED]
    ends_otherwise = [name for name, rudeness in RUDENESSES.items() if rudeness.transactional_on_sqlserver is not None]
    assert [name for name in (*ends_otherwise, *SAID) if f"`{name}`" not in section] == []


def test_every_rudeness_and_every_strike_is_on_the_page() -> None:
    page = PAGE.read_text()
    assert [name for name in RUDENESSES if f"`{name}`" not in page] == []
    chaos = page[page.index("## All of it at once") :]
    words = {
        "child": "worker processes",
        "backend": "pg_terminate_backend",
        "deploy": "SIGTERM",
        "poison_pill": "kill their",
    }
    assert [kind for kind in FAULTS if words.get(kind, kind) not in chaos] == []
