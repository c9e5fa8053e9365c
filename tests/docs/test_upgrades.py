"""A rolling deploy: the code before the newest migration on the tables after it, and the reverse, as installed wheels."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from pytest_django import DjangoDbBlocker

from tests.packaging.test_wheel import ENVIRONMENT, OFFLINE, UV, installed, own_database, run, wheel  # noqa: F401

from .pages import CHECKOUT

FACTORY = CHECKOUT / "tests" / "packaging" / "factory"
#: What an application does of everything that touches the tables. One of its messages cannot be decoded: poison, at once.
SEND = """
from datetime import timedelta
for hours in range(1, 6): Timesheets.send({"hours": hours})
Timesheets.send({"hours": 6}, delay=timedelta(milliseconds=1))
Timesheets.send_many([{"hours": 7}, {"hours": 8}])
torn = Timesheets.send({"hours": 9})
Timesheets.objects.filter(id=torn).update(body=b"{")
answer = Timesheets.objects.count()
"""
LOOK = """
from queueapp.models import PoisonMessage
from queueapp.operations.statistics import queue_stats
answer = [Timesheets.objects.count(), sorted(Payment.objects.values_list("amount", flat=True)),
          PoisonMessage.objects.filter(status="unresolved").count(), "".join(one.error for one in queue_stats())]
"""
PAID = [20 * hours for hours in range(1, 9)]


class Release:
    """One version of the code, installed beside the factory's project."""

    def __init__(self, name: str, wheel: Path, place: Path) -> None:  # noqa: F811
        self.name = name
        self._home, environment = place / name / "project", place / name / "environment"
        shutil.copytree(FACTORY, self._home, ignore=shutil.ignore_patterns("__pycache__"))
        self._python = installed(wheel, environment, cwd=place)

    def manage(self, database: dict[str, Any], *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {"DJANGO_SETTINGS_MODULE": "factory.settings", "FACTORY_DATABASE": json.dumps(database)}
        return subprocess.run(
            [str(self._python), "manage.py", *arguments], cwd=self._home, env=ENVIRONMENT | environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
        )  # fmt: skip

    def does(self, database: dict[str, Any], *arguments: str) -> str:
        done = self.manage(database, *arguments)
        assert done.returncode == 0, f"{self.name}: {arguments}\n{done.stdout}"
        return done.stdout

    def shell(self, database: dict[str, Any], code: str) -> Any:
        code = f"import json\nfrom workers.shifts.models import *\n{code}\nprint(json.dumps(answer))"
        return json.loads(self.does(database, "shell", "-c", code).splitlines()[-1])

    def migrates(self, database: dict[str, Any]) -> None:
        self.does(database, "makemigrations", "shifts")
        self.does(database, "migrate")


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=CHECKOUT, capture_output=True, check=True, timeout=60).stdout


def _before_the_newest_migration() -> str:
    """The last commit without it whose own migrations are in one line, and whose wheel has all of its packages: on the way to
    a merge neither need be so. Raises LookupError."""
    folder = "queueapp/migrations/"
    newest = max(path.name for path in (CHECKOUT / folder).glob("0*.py"))
    for commit in _git("rev-list", "--first-parent", "--max-count=500", "HEAD").decode().split():
        names = [path.removeprefix(folder) for path in _git("ls-tree", "--name-only", commit, folder).decode().split()]
        numbers = [name[:4] for name in names if name[0].isdigit()]
        if newest not in names and len(numbers) == len(set(numbers)) and _lists_its_packages(commit):
            return commit
    raise LookupError(newest)


def _lists_its_packages(commit: str) -> bool:
    listed = set(tomllib.loads(_git("show", f"{commit}:pyproject.toml").decode())["tool"]["setuptools"]["packages"])
    files = _git("ls-tree", "-r", "--name-only", commit, "queueapp/").decode().split()
    return listed.issuperset(
        file.removesuffix("/__init__.py").replace("/", ".") for file in files if file.endswith("/__init__.py")
    )


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the commit before the newest migration."""
    try:
        archive = _git(
            "archive", _before_the_newest_migration(), "pyproject.toml", "README.md", "LICENSE", "queueapp", "workers"
        )
    except (OSError, LookupError, subprocess.CalledProcessError):
        pytest.skip("the code before the newest migration is in the history of this checkout, and that is not here")
    copy, built = tmp_path_factory.mktemp("previous"), tmp_path_factory.mktemp("built")
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(copy, filter="data")
    run(
        *UV,
        "build",
        *OFFLINE,
        "--no-build-isolation",
        "--wheel",
        "--python",
        sys.executable,
        "--out-dir",
        built,
        copy,
        cwd=copy,
    )
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def releases(
    previous: Path,
    wheel: Path,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Release, Release]:
    place = tmp_path_factory.mktemp("releases")
    for name in ("old", "new"):
        (place / name).mkdir()
    return Release("old", previous, place), Release("new", wheel, place)


@pytest.fixture
def database(django_db_blocker: DjangoDbBlocker) -> Iterator[dict[str, Any]]:
    if connection.vendor != "postgresql":
        pytest.skip("the installed project is pointed at PostgreSQL only")
    with django_db_blocker.unblock(), own_database() as made:
        yield made


def test_the_old_code_works_on_the_new_tables(releases: tuple[Release, Release], database: dict[str, Any]) -> None:
    old, new = releases
    new.migrates(database)

    assert old.shell(database, SEND) == 8
    old.does(database, "runqueueworker", "--until-empty")
    assert old.shell(database, LOOK) == [0, PAID, 1, ""]
    old.does(database, "requeuepoison", "--queue", "shifts.Timesheets")
    old.does(database, "runqueueworker", "--until-empty")
    assert old.shell(database, LOOK) == [0, PAID, 1, ""]


def test_workers_of_both_share_the_new_tables(releases: tuple[Release, Release], database: dict[str, Any]) -> None:
    old, new = releases
    new.migrates(database)
    old.shell(database, SEND)
    assert new.shell(database, SEND) == 16
    with ThreadPoolExecutor(2) as both:
        list(both.map(lambda release: release.does(database, "runqueueworker", "--until-empty"), releases))
    assert old.shell(database, LOOK) == new.shell(database, LOOK) == [0, sorted(PAID * 2), 2, ""]


def test_the_new_code_sends_into_the_old_tables_and_its_workers_wait_for_migrate(
    releases: tuple[Release, Release], database: dict[str, Any]
) -> None:
    old, new = releases
    old.migrates(database)

    assert new.shell(database, SEND) == 8
    refused = new.manage(database, "runqueueworker", "--until-empty")
    assert refused.returncode != 0
    assert "manage.py migrate" in refused.stdout
    assert "Traceback" not in refused.stdout
    old.does(database, "runqueueworker", "--until-empty")  # those that still run go on
    assert old.shell(database, LOOK) == [0, PAID, 1, ""]

    new.migrates(database)
    assert new.shell(database, SEND) == 8
    new.does(database, "runqueueworker", "--until-empty")
    assert new.shell(database, LOOK) == [0, sorted(PAID * 2), 2, ""]
