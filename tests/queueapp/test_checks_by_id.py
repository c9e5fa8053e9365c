"""Checks that a newcomer meets, and the page that lists all of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.checks import Error, Info, Warning
from django.core.management import call_command
from django.db import connection, connections, router

from queueapp import Consumer, checks, delayed
from queueapp.consuming.registry import registered
from queueapp.errors import UnsupportedServer
from queueapp.models import PoisonMessage
from queueapp.operations import connection_limits, schema_check
from queueapp.sql import backend_of
from queueapp.sql.database import ConnectionLimit, SettingAdvice, Unavailable
from tests.databases import known_as
from tests.in_process_worker import real_commits
from tests.queueapp.management.processes import manage
from tests.queueapp.management.test_first_hour import UNREACHABLE, without_column, without_table
from tests.testapp.models import Leased, Transactional

CHECKOUT = Path(__file__).parents[2]


class NoStore:
    """Not a delayed store."""


class Router:
    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return "nowhere" if model is Leased else None


@pytest.fixture
def sqlite() -> Iterator[None]:
    """The default database is another one."""
    here = connections["default"]
    second_connection = connections.create_connection("default")
    second_connection.vendor, second_connection.display_name = "sqlite", "SQLite"
    connections["default"] = second_connection
    try:
        yield
    finally:
        connections["default"] = here


# -- without a database --------------------------------------------------------------------------------------------


def test_a_bound_of_an_alert_for_a_queue_that_is_not_there_is_a_warning(settings: Any) -> None:
    day = timedelta(days=1)
    settings.QUEUEAPP = {"ALERTS": {"max_age": {"testapp.Leased": day, "*": day}, "max_waiting": 5}}
    assert checks.check_settings() == []
    settings.QUEUEAPP = {"ALERTS": {"max_age": {"testapp.leased": day}, "max_waiting": {"Leased": 5}}}
    found = checks.check_settings()
    assert {row.id for row in found} == {"queueapp.W009"}
    assert [record.msg.split(",")[0] for record in found] == [
        "QUEUEAPP.ALERTS: max_age has a bound for 'testapp.leased'",
        "QUEUEAPP.ALERTS: max_waiting has a bound for 'Leased'",
    ]


@pytest.mark.parametrize("path", ["nowhere.Store", "Store", "tests.queueapp.test_checks_by_id.NoStore"])
def test_a_delayed_store_that_is_none_is_an_error(settings: Any, path: str) -> None:
    settings.QUEUEAPP = {"DELAYED_STORE": path}

    (found,) = checks.check_settings()

    assert isinstance(found, Error)
    assert found.id == "queueapp.E004"
    assert f"QUEUEAPP.DELAYED_STORE = {path!r} is not accepted" in found.msg


def test_traces_that_are_asked_for_without_the_extra_are_an_error(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "queueapp.telemetry.spans", raising=False)
    settings.QUEUEAPP = {"OPENTELEMETRY": True}

    (found,) = checks.check_settings()

    assert found.id == "queueapp.E010"
    assert "pip install 'queueapp[opentelemetry]'" in found.msg


class Elsewhere:
    """Leased lies in another database, under some alias of the same one; the router allows no tables in
    "foreign"."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return self.alias if model is Transactional else None

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return False if db == "foreign" else None


@pytest.mark.parametrize(
    ("delayed_in", "found"),
    [
        ((), []),
        (("default",), []),
        (("default", "nowhere"), ["queueapp.E007"]),
        (("foreign",), ["queueapp.E007"]),
        (("away",), []),
    ],
)
def test_a_database_that_cannot_keep_delayed_messages_for_a_queue_is_an_error(
    settings: Any, monkeypatch: pytest.MonkeyPatch, delayed_in: tuple[str, ...], found: list[str]
) -> None:
    settings.DATABASE_ROUTERS = [Elsewhere("away")]
    monkeypatch.setattr(Transactional.delivery, "delayed_in", delayed_in)

    with known_as("foreign"):
        errors = checks.check_forwarding()

    assert [item.id for item in errors] == found
    for error in errors:
        assert f"testapp.Transactional.Delivery.delayed_in names {delayed_in[-1]!r}, but " in error.msg
        assert not error.msg.endswith("..")


def test_a_queue_whose_database_cannot_report_what_has_arrived_is_warned_of(settings: Any) -> None:
    settings.DATABASE_ROUTERS = [Elsewhere("foreign")]

    (found,) = checks.check_forwarding()

    assert isinstance(found, Warning)
    assert found.id == "queueapp.W008"
    assert "may be there twice after a crash" in found.msg


def test_a_queue_without_forwarding_has_no_finding(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.DATABASE_ROUTERS = [Elsewhere("foreign")]
    monkeypatch.setattr(Transactional.delivery, "delayed_in", ())

    assert checks.check_forwarding() == []


def test_a_destination_that_is_too_long_for_its_table_is_an_error(settings: Any) -> None:
    settings.DATABASE_ROUTERS = [Elsewhere("a" * 190)]

    (found,) = checks.check_forwarding()

    assert found.id == "queueapp.E007"
    assert "too long for its table" in found.msg


def test_a_destination_that_just_fits_is_none(settings: Any) -> None:
    settings.DATABASE_ROUTERS = [Elsewhere("a" * (200 - len("testapp.Transactional@")))]

    assert [record.id for record in checks.check_forwarding() if "too long" in record.msg] == []


def test_a_database_that_only_keeps_delayed_messages_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[tuple[str, list[Any]]] = []
    monkeypatch.setattr(Transactional.delivery, "delayed_in", ("keeper",))
    monkeypatch.setattr(checks.queues, "check_tables_in", lambda alias, queues: looked.append((alias, queues)) or [])

    checks.check_tables(databases=["keeper", "unassigned"])

    assert looked == [("keeper", [])]


def test_the_delayed_store_that_is_configured_is_the_one_that_is_used() -> None:
    assert type(delayed.store_of("default")) is delayed.store_class()


def test_a_database_of_another_kind_is_an_error(sqlite: None) -> None:
    (found,) = checks.check_databases()

    assert isinstance(found, Error)
    assert found.id == "queueapp.E005"
    assert "the database 'default' of DATABASES is SQLite" in found.msg
    assert checks.check_tables(databases=["default"]) == [], "said once"


def test_a_queue_in_a_database_that_is_not_there_is_an_error(settings: Any) -> None:
    settings.DATABASE_ROUTERS = ["tests.queueapp.test_checks_by_id.Router"]

    assert [finding.id for finding in checks.check_databases()] == ["queueapp.E005"]


def test_a_class_consumer_without_a_queue_is_warned_about() -> None:
    class Base(Consumer[dict]):
        def handle(self, message: dict, context: Any) -> None: ...

    (found,) = checks.check_consumers()
    assert isinstance(found, Warning)
    assert found.id == "queueapp.W005"
    assert "Base has no queue" in found.msg

    class Below(Base):
        queue = None

    assert ["Below has no queue" in finding.msg for finding in checks.check_consumers()] == [True], (
        "the other is a base"
    )
    del Base, Below


def test_the_checks_of_a_project_on_sqlite_fail_without_connecting(tmp_path: Path) -> None:
    file = tmp_path / "db.sqlite3"
    done = manage(
        "check", DJANGO_SETTINGS_MODULE="tests.queueapp.management.settings_on_sqlite_checked", SQLITE_FILE=str(file)
    )

    assert done.returncode == 1
    assert "(queueapp.E005)" in done.stderr
    assert not file.exists()


def test_a_pool_smaller_than_a_worker_process_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    received = [queue for queue in registered.queues() if router.db_for_write(queue) == "default"]
    needed = connection_limits.of_worker(received).total
    options = connection.settings_dict.get("OPTIONS", {})
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", {**options, "pool": {"max_size": 4}})

    (found,) = checks.check_pools()

    assert isinstance(found, Warning)
    assert found.id == "queueapp.W011"
    assert f"has at most 4 connections (OPTIONS['pool']), and a worker process needs {needed}" in found.msg
    assert f"set its max_size to {needed} or more" in found.hint
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", {**options, "pool": {"max_size": needed}})
    assert checks.check_pools() == []


# -- with one ------------------------------------------------------------------------------------------------------


@real_commits
def test_a_missing_table_is_a_warning_that_names_migrate(few_receivers: None) -> None:
    with without_table(PoisonMessage):
        (found,) = checks.check_tables(databases=["default"])

    assert isinstance(found, Warning), "an error would keep migrate from making it"
    assert found.id == "queueapp.W006"
    assert "lacks queueapp_poisonmessage" in found.msg
    assert found.hint == "Run `manage.py migrate`."


@real_commits
def test_a_missing_column_is_a_warning_too() -> None:
    if connection.vendor != "postgresql":
        pytest.skip("RENAME COLUMN is PostgreSQL's")
    with without_column(Leased, "cancels"):
        found = [finding for finding in checks.check_tables(databases=["default"]) if finding.id == "queueapp.W006"]

    assert ["cancels" in record.msg for record in found] == [True]


@pytest.mark.django_db(transaction=True)
def test_migrate_is_not_in_its_own_way(capsys: pytest.CaptureFixture[str]) -> None:
    with without_table(PoisonMessage):
        call_command("migrate", plan=True, skip_checks=False, verbosity=0)
        assert "W006" not in capsys.readouterr().err

        call_command("check", databases=["default"])
        assert "W006" in capsys.readouterr().err


@pytest.mark.django_db
def test_an_old_server_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old(connection: Any) -> None:
        raise UnsupportedServer("PostgreSQL 9.6 is too old.")

    monkeypatch.setattr(backend_of(connection), "check_server", too_old)

    (found,) = checks.check_tables(databases=["default"])
    assert (found.id, found.msg) == ("queueapp.E006", "PostgreSQL 9.6 is too old.")


def test_a_database_that_does_not_answer_is_a_warning_of_the_check() -> None:
    done = manage("check", "--database", "default", DATABASE_URL=UNREACHABLE)

    assert done.returncode == 0
    assert "(queueapp.W007) The database 'default' could not be looked at" in done.stderr
    assert "Traceback" not in done.stderr


def test_migrate_states_itself_that_a_database_does_not_answer() -> None:
    done = manage("migrate", DATABASE_URL=UNREACHABLE)

    assert done.returncode == 1
    assert "W007" not in done.stderr


@real_commits
def test_check_reports_a_setting_that_there_is_advice_for(few_receivers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    said = [SettingAdvice("X is on", ""), SettingAdvice("Y is off", "Turn it on.")]
    monkeypatch.setattr(schema_check, "remarks", lambda alias: said)

    (found,) = checks.check_tables(databases=["default"])

    assert isinstance(found, Info), "both settings are supported: no deploy stops at it"
    assert (found.id, found.msg, found.hint) == ("queueapp.I001", "The database 'default': Y is off.", "Turn it on.")


@real_commits
def test_fewer_connections_than_a_worker_tree_needs_are_a_warning(
    few_receivers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [finding for finding in checks.check_tables(databases=["default"]) if finding.id == "queueapp.W012"] == []
    limit = ConnectionLimit("the user app may have", 5, 0, "CONNECTION LIMIT", "ALTER ROLE app CONNECTION LIMIT -1")
    monkeypatch.setattr(type(backend_of(connection).schema), "connection_limits", lambda self, connection: [limit])

    (found,) = [finding for finding in checks.check_tables(databases=["default"]) if finding.id == "queueapp.W012"]

    assert isinstance(found, Warning)
    assert "the user app may have 5 connections (CONNECTION LIMIT), and this process tree needs up to " in found.msg
    assert "Remedy: ALTER ROLE app CONNECTION LIMIT -1, or " in found.hint


# -- the page ------------------------------------------------------------------------------------------------------


def test_every_id_is_on_the_page_and_in_a_test_and_the_reverse() -> None:
    pattern = re.compile(r"queueapp\.[EWI]\d{3}")
    files = [*(CHECKOUT / "queueapp/checks").glob("*.py"), *CHECKOUT.glob("queueapp/contrib/*/*.py")]
    code = {found for file in files for found in pattern.findall(file.read_text())}
    rows = re.findall(r"^\| `(queueapp\.[EWI]\d{3})`", (CHECKOUT / "docs/checks.md").read_text(), re.M)
    page = set(rows)
    assert len(rows) == len(page), "an id says one thing"
    tests = Path(__file__).parent.glob("test_checks*.py")
    tested = {item for file in tests for item in pattern.findall(file.read_text())}

    assert code == page == tested


@real_commits
def test_wake_ups_that_could_be_had_are_a_warning_with_what_fixes_it(
    monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    assert [finding for finding in checks.check_tables(databases=["default"]) if finding.id == "queueapp.W010"] == []
    lack = Unavailable("Service Broker is turned off in this database", "ALTER DATABASE CURRENT SET ENABLE_BROKER")
    monkeypatch.setattr(type(backend_of(connection).notifications), "unavailable", lambda self, connection: lack)

    (found,) = [finding for finding in checks.check_tables(databases=["default"]) if finding.id == "queueapp.W010"]

    assert isinstance(found, Warning)
    assert found.msg == "The database 'default': Service Broker is turned off in this database."
    assert found.hint == "ALTER DATABASE CURRENT SET ENABLE_BROKER."
    settings.QUEUEAPP = {"NOTIFY": False}
    assert [finding for finding in checks.check_tables(databases=["default"]) if finding.id == "queueapp.W010"] == []
