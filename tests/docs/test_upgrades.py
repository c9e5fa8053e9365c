"""A rolling deploy, with the installed wheel: this code on the tables of the release before it and of the one after it.

Neither exists beside a first release, so their tables are made here, by the rules of docs/howto/upgrades.md: the next
release adds columns with defaults in the database, the last one has a column less.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import connection
from pytest_django import DjangoDbBlocker

from tests.packaging.test_wheel import ENVIRONMENT, Factory, installed, own_database, wheel  # noqa: F401

from .pages import CHECKOUT

#: What an application does that touches the tables. One of its messages cannot be decoded: poison, at once.
SEND = """
from datetime import timedelta
for hours in range(1, 6): Timesheets.send({"hours": hours})
Timesheets.send({"hours": 6}, delay=timedelta(milliseconds=1))
Timesheets.send_many([{"hours": 7}, {"hours": 8}])
torn = Timesheets.send({"hours": 9})
Timesheets.objects.filter(id=torn).update(body=b"{")
answer = Timesheets.objects.count()
"""
INSPECT = """
from queueapp.models import PoisonMessage
answer = [Timesheets.objects.count(), sorted(Payment.objects.values_list("amount", flat=True)),
          PoisonMessage.objects.filter(status="unresolved").count()]
"""
PAID = [20 * hours for hours in range(1, 9)]


def manage(factory: Factory, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As ``Factory.manage``, for a command that may fail."""
    environment = {"DJANGO_SETTINGS_MODULE": "factory.settings", "FACTORY_DATABASE": json.dumps(factory.database)}
    return subprocess.run(
        [str(factory.python), "manage.py", *arguments], cwd=factory.home, env=ENVIRONMENT | environment,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
    )  # fmt: skip


def execute(factory: Factory, *statements: str) -> None:
    entry = factory.database
    with psycopg.connect(
        host=entry["HOST"],
        port=entry["PORT"] or None,
        user=entry["USER"],
        password=entry["PASSWORD"] or None,
        dbname=entry["NAME"],
    ) as session:
        for statement in statements:
            session.execute(statement)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def project(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:  # noqa: F811
    if connection.vendor != "postgresql":
        pytest.skip("the installed project is pointed at PostgreSQL only")
    place = tmp_path_factory.mktemp("upgrades")
    home = place / "project"
    shutil.copytree(CHECKOUT / "tests/packaging/factory", home, ignore=shutil.ignore_patterns("__pycache__"))
    return home, installed(wheel, place / "environment", cwd=place)


@pytest.fixture
def factory(project: tuple[Path, Path], django_db_blocker: DjangoDbBlocker) -> Iterator[Factory]:
    with django_db_blocker.unblock(), own_database() as database:
        made = Factory(*project, database)
        made.manage("makemigrations", "shifts")
        yield made


def test_containers_that_migrate_at_once_all_succeed_and_the_database_passes_its_check(factory: Factory) -> None:
    with ThreadPoolExecutor(4) as containers:
        done = list(containers.map(lambda _: manage(factory, "migrate"), range(4)))

    assert [message.returncode for message in done] == [0] * 4, "".join(message.stdout for message in done)
    assert sum("Applying queueapp.0001_initial" in message.stdout for message in done) == 1
    checked = manage(factory, "check", "--database", "default")
    assert (checked.returncode, "queueapp.W" in checked.stdout) == (0, False), checked.stdout


def test_this_code_works_on_the_tables_of_the_next_release(factory: Factory) -> None:
    factory.manage("migrate")
    execute(
        factory,
        "DO $$ DECLARE t text; BEGIN FOR t IN SELECT c.oid::regclass FROM pg_class c JOIN pg_namespace n ON n.oid = "
        "c.relnamespace "
        "WHERE n.nspname = 'public' AND c.relkind IN ('r', 'p') AND NOT c.relispartition "
        "AND (c.relname LIKE 'queueapp%' OR c.relname LIKE 'shifts_timesheets%') "
        "LOOP EXECUTE format('ALTER TABLE %s ADD COLUMN of_the_next_release text NOT NULL DEFAULT %L', t, 'x'); END "
        "LOOP; END $$",
    )

    assert factory.shell(SEND) == 8
    factory.manage("runqueueworker", "--until-empty")
    assert factory.shell(INSPECT) == [0, PAID, 1]
    factory.manage("requeuepoison", "--queue", "shifts.Timesheets")
    factory.manage("runqueueworker", "--until-empty")
    assert factory.shell(INSPECT) == [0, PAID, 1]


def test_this_code_sends_into_the_tables_of_the_last_release_and_its_workers_wait_for_migrate(factory: Factory) -> None:
    factory.manage("migrate")
    execute(factory, "ALTER TABLE queueapp_subscriber RENAME COLUMN progress TO not_yet")

    assert factory.shell(SEND) == 8
    refused = manage(factory, "runqueueworker", "--until-empty")
    assert refused.returncode != 0
    assert "manage.py migrate" in refused.stdout
    assert "Traceback" not in refused.stdout

    execute(factory, "ALTER TABLE queueapp_subscriber RENAME COLUMN not_yet TO progress")
    factory.manage("runqueueworker", "--until-empty")
    answer: Any = factory.shell(INSPECT)
    assert answer == [0, PAID, 1]
