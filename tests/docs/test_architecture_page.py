"""docs/explanation/architecture.md has the layers of the import contracts, and names files that exist."""

from __future__ import annotations

import ast
import os
import re
import tomllib

from .pages import CHECKOUT, DOCS

PAGE = DOCS / "explanation" / "architecture.md"


def summary(package: str, name: str) -> str:
    """The first sentence of a package's or module's docstring."""
    folder = CHECKOUT / package / name
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = re.split(r"(?<=\.)\s|\n\n", " ".join(text.split("\n\n")[0].split()))[0]
    return first.replace("``", "`").replace("|", "\\|")


def table(package: str) -> str:
    contracts = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(
        contract for contract in contracts if contract["type"] == "layers" and contract.get("containers") == [package]
    )["layers"]
    rows = ["| layer | package | what |", "| --- | --- | --- |"]
    for number, layer in enumerate(layers, 1):
        for name in layer.split(" | "):
            folder = (CHECKOUT / package / name).is_dir()
            rows.append(f"| {number} | `{name}{'/' if folder else '.py'}` | {summary(package, name)} |")
    return "\n".join(rows)


def made() -> str:
    text = PAGE.read_text()
    for package in ("queueapp", "workers"):
        begin, end = f"<!-- layers of {package} -->", "<!-- end -->"
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n\n{table(package)}\n\n{end}{rest.partition(end)[2]}"
    return text


def test_the_page_has_the_layers_of_the_import_contracts() -> None:
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(made())
    assert PAGE.read_text() == made(), "run UPDATE_DOCS=1 python -m pytest tests/docs/test_architecture_page.py"


def test_each_package_states_what_it_is_for() -> None:
    rows = re.findall(r"^\| \d+ \| `([\w/.]+)` \| (.*) \|$", made(), re.MULTILINE)
    assert [name for name, what in rows if not what and name != "management/"] == []


def test_the_files_that_the_page_names_exist() -> None:
    named = re.findall(
        r"`((?:queueapp/|workers/|sql/|receiving/|failures/|services/|sending/)[\w/]*\.py)`", PAGE.read_text()
    )
    assert named
    missing = [name for name in named if not (CHECKOUT / name).exists() and not (CHECKOUT / "queueapp" / name).exists()]
    assert missing == []
