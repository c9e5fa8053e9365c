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
    without = [(each["python"], each["django"]) for each in matrix["exclude"]]
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


def test_actionlint_finds_nothing() -> None:
    beside = Path(sys.executable).with_name("actionlint")
    program = str(beside) if beside.exists() else shutil.which("actionlint")
    if program is None:
        pytest.skip("actionlint is not installed: its package fetches it from GitHub")
    done = subprocess.run([program, *map(str, WORKFLOWS.glob("*.yml"))], cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
