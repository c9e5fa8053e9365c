"""The tutorial, as a newcomer follows it: each file is written, each command run, and what it prints compared.

In an environment that begins empty, into which pip installs the wheel and from the registry what it needs; or, on
machines without one, beside the packages of this environment. Only what belongs to this machine is done otherwise, and
said in ``STAND_INS``: where the database and the wheel are, and that there is no browser. In what a command
prints, ``…`` stands for anything.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.db import connection
from pytest_django import DjangoDbBlocker

from tests.packaging.test_wheel import ENVIRONMENT, OFFLINE, UV, installed, own_database, run, wheel  # noqa: F401

from .pages import DOCS, blocks

PAGE = DOCS / "tutorial.md"
#: What a newcomer does in the browser: looks at the overview and at the poison message, and requeues it.
IN_THE_BROWSER = """
from django.test import Client
from queueapp.models import PoisonMessage
browser = Client(SERVER_NAME="localhost", raise_request_exception=True)
assert browser.login(username="ada", password="secret")
pages = "/admin/queueapp/"
assert "shop.Shipping" in browser.get(pages + "queuecontrol/").content.decode()
assert browser.get("/admin/shop/shipping/").status_code == 200
poison = PoisonMessage.objects.get()
page = browser.get(f"{pages}poisonmessage/{poison.pk}/change/").content.decode()
assert "no box is long enough" in page and "Traceback" in page
form = {"action": "requeue", "_selected_action": poison.pk}
assert "Requeue" in browser.post(pages + "poisonmessage/", form).content.decode()
done = browser.post(pages + "poisonmessage/", form | {"confirmed": "yes", "counts": "reset"}, follow=True)
assert not PoisonMessage.objects.exists(), done.content.decode()
"""


class Newcomer:
    """A reader with an empty folder, a database server and this page. ``prepared``: an environment that has the
    wheel."""

    def __init__(self, home: Path, built: Path, prepared: Path | None, environment: dict[str, str]) -> None:
        self.home, self.wheel, self.prepared = home, built, prepared
        self.environment = environment
        if prepared is not None:
            self.activates(prepared)
        #: To be done once the handler is mended.
        self.in_the_browser = False
        self.done: list[str] = []

    def writes(self, title: str, code: str) -> None:
        name, _, where = title.partition(", ")
        file = self.home / name
        before = file.read_text() if where == "at the end" else ""
        file.write_text(before + code)

    def types(self, command: str) -> str:
        """Run it in a shell; what it prints, errors included."""
        self.done.append(command)
        for known, stand_in in STAND_INS.items():
            if re.match(known, command):
                return stand_in(self) or ""
        ended = self.runs(command)
        assert ended.returncode == 0, f"{command}\n{ended.stdout}"
        return ended.stdout

    def runs(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, shell=True, cwd=self.home, env=self.environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240,
        )  # fmt: skip

    def activates(self, venv: Path) -> None:
        """What `activate` does to a shell; each command has one of its own here."""
        assert (venv / "bin" / "python").exists()
        self.environment |= {"VIRTUAL_ENV": str(venv), "PATH": f"{venv / 'bin'}:{self.environment['PATH']}"}

    def looks_at_the_admin(self) -> None:
        self.types(f"python manage.py shell -c {shlex.quote(IN_THE_BROWSER)}")


def _later(newcomer: Newcomer) -> None:
    newcomer.in_the_browser = True


def _nothing(_: Newcomer) -> None:
    """Done by the fixture."""


def _venv(newcomer: Newcomer) -> None:
    if newcomer.prepared is None:
        ended = newcomer.runs(f"{shlex.quote(sys.executable)} -m venv venv")
        assert ended.returncode == 0, ended.stdout
        assert not list((newcomer.home / "venv").glob("lib/*/site-packages/django")), "it is empty"


def _activate(newcomer: Newcomer) -> None:
    if newcomer.prepared is None:
        newcomer.activates(newcomer.home / "venv")


def _pip(newcomer: Newcomer) -> None:
    if newcomer.prepared is None:
        ended = newcomer.runs(f"pip install {shlex.quote(str(newcomer.wheel))}")
        if "Could not find a version" in ended.stdout or "No matching distribution" in ended.stdout:
            pytest.skip("needs a package registry: pip finds none")
        assert ended.returncode == 0, ended.stdout


STAND_INS: dict[str, Callable[[Newcomer], str | None]] = {
    r"createdb ": _nothing,
    r"python3 -m venv venv$": _venv,
    r"\. venv/bin/activate$": _activate,
    r"pip install path/to/queueapp$": _pip,
    r"python manage\.py runserver": _later,
}


#: Who came to the end of it in this process.
_followed: list[Newcomer] = []


@pytest.fixture(params=["an empty environment", "the packages of this one"])
def newcomer(
    request: pytest.FixtureRequest,
    wheel: Path,  # noqa: F811
    tmp_path: Path,
    django_db_blocker: DjangoDbBlocker,
) -> Iterator[Newcomer]:
    if connection.vendor != "postgresql":
        pytest.skip("the tutorial is about PostgreSQL")
    home, prepared = tmp_path / "mysite", None
    if request.param == "the packages of this one":
        if _followed:
            pytest.skip("the tutorial was followed in an empty environment already")
        prepared = tmp_path / "venv"
        installed(wheel, prepared, cwd=tmp_path)
    home.mkdir()
    with django_db_blocker.unblock(), own_database() as database:
        names = {"HOST": "PGHOST", "PORT": "PGPORT", "USER": "PGUSER", "PASSWORD": "PGPASSWORD", "NAME": "PGDATABASE"}
        reached = {variable: str(database[name]) for name, variable in names.items() if database.get(name)}
        yield Newcomer(home, wheel, prepared, ENVIRONMENT | reached | {"NO_COLOR": "1"})
    shutil.rmtree(home)


def shown(expected: str, printed: str) -> bool:
    """Whether all of these lines were printed, in this order; spaces count as one."""
    lines = [re.sub(r"\s+", " ", line.strip()) for line in expected.splitlines()]
    pattern = ".*".join(r"^ ?" + ".*?".join(map(re.escape, line.split("…"))) for line in lines if line != "…")
    return re.search(pattern, re.sub(r"[ \t]+", " ", printed), re.DOTALL | re.MULTILINE) is not None


@pytest.mark.timeout(600)
def test_the_tutorial_works_as_it_is_written(newcomer: Newcomer) -> None:
    for block in blocks(PAGE, "python", "console"):
        if block.language == "python":
            assert block.title, f"line {block.line}: which file is this?"
            newcomer.writes(block.title, block.code)
            if newcomer.in_the_browser:
                newcomer.in_the_browser = False
                newcomer.looks_at_the_admin()
            continue
        for step in re.split(r"^\$ ", block.code, flags=re.MULTILINE)[1:]:
            command, _, expected = step.partition("\n")
            printed = newcomer.types(command)
            assert shown(expected, printed), f"line {block.line}: {command}\nexpected:\n{expected}\nprinted:\n{printed}"
            assert expected or "listpoison" not in command or not printed
    assert not newcomer.in_the_browser
    assert sum("runqueueworker" in command for command in newcomer.done) == 3
    _followed.append(newcomer)
