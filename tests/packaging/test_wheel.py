"""The wheel as a project has it: installed beside a Django project with a package `workers` of its own.

The project is ``factory/``, copied out of the checkout. Its environment has the packages that this one has, but not the
checkout itself: a ``.pth`` names our site-packages, and a ``.pth`` found there (the checkout's) is not followed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from pytest_django import DjangoDbBlocker

CHECKOUT = Path(__file__).parents[2]
UV = (sys.executable, "-m", "uv")
OFFLINE = ("--offline", "--no-cache", "--quiet")
#: Nothing of what this process was started with may lead the factory's processes back to the checkout.
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("PYTHON", "DJANGO", "UV_", "VIRTUAL_ENV", "DATABASE_URL", "QUEUEAPP"))
}


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """What the command prints; its output is in the error when it fails."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=ENVIRONMENT | environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, and that from a copy of the checkout: what an earlier build has left there would be in
    both."""
    copy, built = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("built")
    for name in ("pyproject.toml", "README.md", "LICENSE", "manage.py"):
        shutil.copy(CHECKOUT / name, copy)
    for name in ("queueapp", "workers", "project", "tests"):
        shutil.copytree(CHECKOUT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    run(*UV, "build", *OFFLINE, "--no-build-isolation", "--python", sys.executable, "--out-dir", built, copy, cwd=copy)
    (found,) = built.glob("*.whl")
    return found


def installed(wheel: Path, environment: Path, *, cwd: Path) -> Path:
    """Make an environment with the wheel in it, and return its Python. Its dependencies are those of this environment;
    a ``.pth`` found there is not followed, so the checkout is not seen."""
    run(*UV, "venv", *OFFLINE, "--python", sys.executable, environment, cwd=cwd)
    python = environment / "bin" / "python"
    run(*UV, "pip", "install", *OFFLINE, "--no-deps", "--python", python, wheel, cwd=cwd)
    package = Path(run(python, "-c", "import queueapp; print(queueapp.__file__)", cwd=cwd).strip()).parent
    product = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (package.parent / "packages.pth").write_text("\n".join(product) + "\n")
    return python


@dataclass
class Factory:
    """The project, its environment with the wheel, and its database."""

    home: Path
    python: Path
    database: dict[str, Any]

    def manage(self, *arguments: str, settings: str = "factory.settings") -> str:
        return run(
            self.python, "manage.py", *arguments, cwd=self.home, DJANGO_SETTINGS_MODULE=settings,
            FACTORY_DATABASE=json.dumps(self.database),
        )  # fmt: skip

    def shell(self, code: str, settings: str = "factory.settings") -> Any:
        """Run the code in `manage.py shell` with the models at hand; what it has put into ``answer``."""
        code = f"import json\nfrom workers.shifts.models import *\n{code}\nprint(json.dumps(answer))"
        return json.loads(self.manage("shell", "-c", code, settings=settings).splitlines()[-1])


@pytest.fixture(scope="module")
def factory(
    wheel: Path, tmp_path_factory: pytest.TempPathFactory, django_db_blocker: DjangoDbBlocker
) -> Iterator[Factory]:
    if connection.vendor != "postgresql":
        pytest.skip("the installed project is pointed at PostgreSQL only")
    place = tmp_path_factory.mktemp("factory")
    home, environment = place / "project", place / "environment"
    shutil.copytree(Path(__file__).parent / "factory", home, ignore=shutil.ignore_patterns("__pycache__"))
    python = installed(wheel, environment, cwd=place)
    with django_db_blocker.unblock(), own_database() as database:
        made = Factory(home, python, database)
        made.manage("makemigrations", "shifts")
        made.manage("migrate")
        yield made


@contextmanager
def own_database() -> Iterator[dict[str, Any]]:
    """The entry of DATABASES for a new, empty database on the server of the tests."""
    name = f"test_queueapp_{os.getpid()}_wheel"
    connection.get_connection_params()  # the embedded server is started, and its address filled in
    settings = connection.settings_dict
    address = {key: settings[key] for key in ("HOST", "PORT", "USER", "PASSWORD")}
    options = {key: value for key, value in settings["OPTIONS"].items() if isinstance(value, str | int | bool)}
    with connection._nodb_cursor() as cursor:
        quoted = connection.ops.quote_name(name)
        cursor.execute(f"CREATE DATABASE {quoted}")
        try:
            yield {"ENGINE": "django.db.backends.postgresql", "NAME": name, "OPTIONS": options, **address}
        finally:
            cursor.execute(f"DROP DATABASE IF EXISTS {quoted} WITH (FORCE)")


def test_the_wheel_has_every_file_of_both_packages_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    product = {
        path.relative_to(CHECKOUT).as_posix()
        for package in ("queueapp", "workers")
        for path in (CHECKOUT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }
    assert names == {f"queueapp/{name}" if name.startswith("workers/") else name for name in product}
    assert {
        "queueapp/py.typed",
        "queueapp/static/queueapp/admin.css",
        "queueapp/templates/admin/queueapp/overview.html",
        "queueapp/workers/py.typed",
        "queueapp/workers/processes/child.py",
        "queueapp/workers/management/commands/rundelayeddispatcher.py",
        "queueapp/workers/management/commands/runqueueworker.py",
    } <= names


def test_the_metadata_offers_only_extras_that_have_code(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    assert {line.split(": ")[1] for line in lines if line.startswith("Provides-Extra")} == {
        "celery",
        "cron",
        "expressions",
        "opentelemetry",
        "prometheus",
        "encryption",
        "spark",
        "sqlserver",
        "tasks",
        "zstd",
    }


def test_the_project_has_its_own_workers_and_ours_installed(factory: Factory) -> None:
    code = "import queueapp, workers, queueapp.workers as ours, sys\n"
    code += "from importlib.util import find_spec\n"
    code += (
        "answer = [queueapp.__file__, workers.__file__, ours.__file__, dir(queueapp), sys.path, find_spec('project')]"
    )
    installed, own_value, product, names, path, project = factory.shell(code)
    home = Path(installed).parent
    assert home.is_relative_to(factory.python.parents[1])
    assert Path(product) == home / "workers" / "__init__.py"
    assert Path(own_value) == factory.home / "workers" / "__init__.py"
    assert {"Queue", "consumer", "Message"} <= set(names)
    assert CHECKOUT not in {Path(item).resolve() for item in path}
    assert project is None


@pytest.mark.parametrize(
    "settings",
    ["factory.settings", "factory.settings_with_app"],
    ids=["beside a package workers", "beside an app workers"],
)
def test_the_project_sends_and_drains_its_queue(factory: Factory, settings: str) -> None:
    sent = factory.shell(
        "from datetime import timedelta\n"
        "from django.apps import apps\n"
        "Payment.objects.all().delete()\n"
        "for hours in range(1, 10): Timesheets.send({'hours': hours})\n"
        "Timesheets.send({'hours': 10}, delay=timedelta(milliseconds=1))\n"
        "answer = [apps.get_app_config('queueapp_workers').name, Timesheets.objects.count()]",
        settings,
    )
    assert sent == ["queueapp.workers", 9]

    assert "shifts.Timesheets" in factory.manage("runqueueworker", "--until-empty", settings=settings)

    remaining, amounts, paid_by, files = factory.shell(
        "distinct = lambda name: list(Payment.objects.values_list(name, flat=True).distinct())\n"
        "answer = [Timesheets.objects.count(), sorted(Payment.objects.values_list('amount', flat=True)),"
        " distinct('paid_by'), distinct('queueapp_file')]",
        settings,
    )
    assert remaining == 0
    assert amounts == [20 * hours for hours in range(1, 11)]
    assert paid_by == ["queueapp.workers.processes.child"]
    assert [Path(file).is_relative_to(factory.python.parents[1]) for file in files] == [True]


def test_pytest_has_the_fixture_of_what_is_installed(factory: Factory) -> None:
    """By the entry point alone: nothing names the plugin."""
    (factory.home / "test_timesheets.py").write_text(
        "import queueapp\n"
        "from workers.shifts.models import Payment, Timesheets\n\n"
        "def test_hours_are_paid(queue_kit):\n"
        "    Timesheets.send({'hours': 2})\n"
        "    queue_kit.drain()\n"
        "    assert Payment.objects.get().amount == 40\n"
        "    print(queueapp.__file__)\n"
    )
    reported = run(
        factory.python, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "test_timesheets.py", cwd=factory.home,
        DJANGO_SETTINGS_MODULE="factory.settings", FACTORY_DATABASE=json.dumps(factory.database),
    )  # fmt: skip
    assert "1 passed" in reported
    assert str(factory.python.parents[1]) in reported, "it is the installed one that was tested"


def test_nothing_is_left_to_migrate_in_the_installed_project(factory: Factory) -> None:
    factory.manage("makemigrations", "--check", "--dry-run")
    factory.manage("check", settings="factory.settings_with_app")
