"""What a newcomer gets wrong is one line that says what to do, and an exit code."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import BaseCommand, CommandError, call_command, get_commands, load_command_class
from django.core.management.base import SystemCheckError
from django.db import connection

from queueapp import QueueNotFound, consumer
from queueapp.errors import NotMigrated, TableNotFound
from queueapp.models import Alert, DelayedMessage, JournalEntry, PoisonMessage, QueueControl, Subscriber
from tests.databases import only_on_postgresql
from tests.queueapp.management.processes import manage, only_line
from tests.testapp.models import ForeignPostgres, ForeignSqlServer, Leased

#: As ``tests.in_process_worker.real_commits``, with the app that has the commands of workers.
real_commits = pytest.mark.django_db(
    transaction=True, available_apps=["queueapp", "queueapp.contrib.amps", "workers", "tests.testapp"]
)

UNREACHABLE = "postgresql://ann:hunter2@127.0.0.1:1/shop"


@contextmanager
def without_table(model: Any) -> Iterator[None]:
    """As before `migrate`."""
    table = model._meta.db_table
    with connection.schema_editor() as editor:
        editor.alter_db_table(model, table, f"{table}_away")
    try:
        yield
    finally:
        with connection.schema_editor() as editor:
            editor.alter_db_table(model, f"{table}_away", table)


@contextmanager
def without_column(model: Any, name: str) -> Iterator[None]:
    """As with the code of the next version."""
    column = connection.ops.quote_name(name)
    table = connection.ops.quote_name(model._meta.db_table)
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} RENAME COLUMN {column} TO away")
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {table} RENAME COLUMN away TO {column}")


# -- before `migrate` ----------------------------------------------------------------------------------------------


@real_commits
def test_a_send_names_the_command_that_makes_the_table() -> None:
    with without_table(Leased):
        for send in (lambda: Leased.send({"n": 1}), lambda: Leased.send_many([{"n": 1}])):
            with pytest.raises(
                TableNotFound, match=r"'testapp_leased' does not exist .* run `manage.py migrate` first"
            ):
                send()
    assert issubclass(TableNotFound, QueueNotFound)
    with (
        without_table(DelayedMessage),
        pytest.raises(NotMigrated, match=r"queueapp_delayedmessage.*`manage\.py migrate`"),
    ):
        Leased.send({"n": 1}, delay=timedelta(seconds=1))


@real_commits
@pytest.mark.parametrize(
    ("model", "command"),
    [
        (PoisonMessage, ["listpoison"]),
        (PoisonMessage, ["requeuepoison", "--all"]),
        (QueueControl, ["pausequeue", "testapp.Leased"]),
        (QueueControl, ["resumequeue", "testapp.Leased"]),
        (Leased, ["purgequeue", "testapp.Leased", "--yes"]),
        (Leased, ["runqueueworker", "testapp.Leased"]),
        (DelayedMessage, ["runqueueworker", "testapp.Leased"]),
        (DelayedMessage, ["rundelayeddispatcher"]),
    ],
)
def test_a_command_without_its_table_ends_and_names_migrate(model: Any, command: list[str]) -> None:
    with without_table(model), pytest.raises(CommandError) as raised:
        call_command(*command)

    (line,) = str(raised.value).splitlines()
    assert model._meta.db_table in line
    assert "run `manage.py migrate` first" in line


@real_commits
def test_a_worker_whose_table_lacks_a_column_ends_and_names_migrate() -> None:
    if connection.vendor != "postgresql":
        pytest.skip("RENAME COLUMN is PostgreSQL's")
    with without_column(Leased, "cancels"), pytest.raises(CommandError) as raised:
        call_command("runqueueworker", "testapp.Leased")

    (line,) = str(raised.value).splitlines()
    assert "columns of testapp_leased" in line
    assert "cancels" in line
    assert "run `manage.py migrate` first" in line


@real_commits
def test_a_foreign_table_that_is_missing_is_not_ours_to_make(capsys: pytest.CaptureFixture[str]) -> None:
    foreign = {"postgresql": ForeignPostgres, "microsoft": ForeignSqlServer}[connection.vendor]
    label = foreign._meta.label
    for command in (["purgequeue", label, "--yes"], ["purgequeue", label, "--expired"]):
        with pytest.raises(CommandError, match="`migrate` does not create it; its owner does") as raised:
            call_command(*command)
        assert "run `manage.py migrate`" not in str(raised.value)
    with pytest.raises(TableNotFound, match="`migrate` does not create it"):
        foreign.send({"n": 1})
    with pytest.raises(CommandError, match=r"^Some values of 1 queue are unknown\.$"):
        call_command("queuestats", label)
    assert "migrate" not in capsys.readouterr().err


@real_commits
def test_options_that_cannot_be_read_are_not_shown_as_declared() -> None:
    with without_table(QueueControl), pytest.raises(CommandError, match=r"run `manage\.py migrate` first"):
        call_command("setqueue", "testapp.Leased")


@real_commits
@pytest.mark.parametrize(
    ("model", "command"),
    [
        (PoisonMessage, ["listpoison"]),
        (Alert, ["alerts"]),
        (JournalEntry, ["queuestats", "--journal"]),
        (JournalEntry, ["replay", "orders"]),
        (None, ["rebuildqueue", "testapp.Leased"]),
        (None, ["listpoison", "--limit", "0"]),
        (None, ["healthcheck", "--max-age", "-1"]),
        (None, ["importamps", "/nonexistent"]),
    ],
)
def test_a_script_that_reads_json_reads_the_error(
    model: Any, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with without_table(model) if model else nullcontext(), pytest.raises(CommandError) as raised:
        call_command(*command, "--json")

    assert json.loads(capsys.readouterr().out) == {"error": str(raised.value)}


QUEUEAPP_APPS = ("queueapp", "queueapp.contrib.amps", "queueapp.contrib.celery", "workers", "queueapp.workers")


def commands_with_json() -> dict[str, BaseCommand]:
    """Every command of ours that has --json."""
    product = {name: load_command_class(app, name) for name, app in get_commands().items() if app in QUEUEAPP_APPS}
    return {name: our for name, our in product.items() if "--json" in our.create_parser("", name).format_help()}


def test_unreadable_arguments_are_reported_as_json_with_the_json_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = commands_with_json()
    assert {"queuestats", "healthcheck", "listpoison", "alerts", "replay"} <= found.keys()
    for name, command in found.items():
        for more in ([], ["--json"]):
            with pytest.raises(SystemExit) as raised:
                command.run_from_argv(["manage.py", name, *more, "--nope"])
            out, err = capsys.readouterr()
            assert raised.value.code == 2
            assert err.startswith("usage: ")
            assert (json.loads(out) if more else {"error": out}).keys() == {"error"}
            assert bool(out) == bool(more)


@real_commits
def test_health_that_cannot_be_asked_for_before_migrate_names_it() -> None:
    with (
        without_table(Subscriber),
        pytest.raises(CommandError, match=r"cannot be read.*`manage\.py migrate` creates it") as raised,
    ):
        call_command("healthcheck")
    assert raised.value.returncode == 3


@real_commits
def test_figures_that_are_not_all_known_are_still_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    with without_table(QueueControl), pytest.raises(CommandError, match="Some values of 1 queue are unknown"):
        call_command("queuestats", "testapp.Leased", "--json")

    (figures,) = json.loads(capsys.readouterr().out)
    assert (figures["queue"], figures["waiting"], figures["paused"]) == ("testapp.Leased", 0, None)


# -- a database that cannot be reached -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ["listpoison"],
        ["requeuepoison", "--all"],
        ["pausequeue", "testapp.Leased"],
        ["resumequeue", "testapp.Leased"],
        ["purgequeue", "testapp.Leased", "--yes"],
        ["setconcurrency", "testapp.Leased", "3"],
        ["setqueue", "testapp.Leased"],
        ["runqueueworker", "testapp.Leased"],
        ["rundelayeddispatcher"],
    ],
)
def test_a_database_that_is_down_is_one_line(command: list[str]) -> None:
    line = only_line(manage(*command, DATABASE_URL=UNREACHABLE))

    assert "The database 'default' (shop on 127.0.0.1:1 as user ann) cannot be reached" in line
    assert "check that its server runs" in line
    assert "hunter2" not in line


#: What each command is called with that has something to ask the database.
ARGUMENTS: dict[str, list[str]] = {
    "alerts": [],
    "autoscale": ["testapp.Leased"],
    "erasesubject": ["ann", "--yes"],
    "healthcheck": [],
    "ledger": ["testapp.Ledgered"],
    "listconsumers": [],
    "listpoison": [],
    "movebroker": ["--from", "queueapp://", "--to", "redis://127.0.0.1:1/0"],
    "movedelayed": ["gone.Shop", "testapp.Leased"],
    "movemessages": ["testapp.Leased", "--type", "", "--poison"],
    "pausequeue": ["testapp.Leased"],
    "purgequeue": ["testapp.Leased", "--yes"],
    "queuestats": ["testapp.Leased"],
    "rebuildqueue": ["testapp.Wide"],
    "registerconsumers": [],
    "rehearse": ["1"],
    "removeconsumer": ["testapp.Addressed", "tests.gone"],
    "replay": ["orders"],
    "requeueafterdeploy": [],
    "requeuepoison": ["--all"],
    "resumequeue": ["testapp.Leased"],
    "rundelayeddispatcher": [],
    "runqueueworker": ["testapp.Leased"],
    "schedules": [],
    "setconcurrency": ["testapp.Leased", "3"],
    "setqueue": ["testapp.Leased"],
}
#: They read no queue before they have read files, or have started Spark.
WITHOUT_ARGUMENTS = {"importamps", "sparkjob"}


def test_every_command_is_among_those_that_are_called_without_a_database() -> None:
    product = {name for name, app in get_commands().items() if app in QUEUEAPP_APPS}
    assert ARGUMENTS.keys() | WITHOUT_ARGUMENTS == product


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No server listens where the database of this process should be."""
    connection.close()
    parameters = connection.get_connection_params
    monkeypatch.setattr(connection, "get_connection_params", lambda: parameters() | {"host": "127.0.0.1", "port": 1})
    yield
    connection.close()


@only_on_postgresql
@pytest.mark.django_db(
    transaction=True, available_apps=["queueapp", "queueapp.contrib.celery", "workers", "tests.testapp"]
)
@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("command", ARGUMENTS)
def test_a_database_that_is_down_is_a_line_and_no_success(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CommandError) as raised:
        call_command(command, *ARGUMENTS[command])

    assert raised.value.returncode != 0
    (line,) = str(raised.value).splitlines()
    out, err = capsys.readouterr()
    # What shows figures says it beside each, and in its last line that not all are known.
    said = out + err if command in ("autoscale", "listconsumers", "queuestats") else line
    assert "cannot be reached" in said
    assert "Traceback" not in out + err + line


def test_where_it_was_raised_is_shown_on_demand() -> None:
    done = manage("listpoison", "--traceback", DATABASE_URL=UNREACHABLE)

    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.mark.django_db
@pytest.mark.parametrize("command", ["listpoison", "rundelayeddispatcher"])
def test_an_unknown_database_is_reported_with_the_known_databases(command: str) -> None:
    with pytest.raises(CommandError, match=r"'nope' doesn't exist\. Databases of this project .*: default"):
        call_command(command, database="nope")


@pytest.mark.django_db
def test_an_error_of_the_code_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("queueapp.management.commands.listpoison.selected", broken)
    with pytest.raises(ZeroDivisionError):
        call_command("listpoison")


# -- what contradicts itself -----------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_a_worker_does_not_start_with_a_time_limit_beyond_a_lease_that_is_never_renewed(
    monkeypatch: pytest.MonkeyPatch, no_consumers: None
) -> None:
    @consumer(Leased, name="tests.slow", timeout=60)
    def slow(message: Any) -> None: ...

    monkeypatch.setattr(Leased.delivery, "renew_leases", False)
    with pytest.raises(SystemCheckError, match=r"(?s)testapp\.Leased.*queueapp\.E003.*tests\.slow"):
        call_command("runqueueworker", "testapp.Leased", skip_checks=False)


# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.django_db
@pytest.mark.parametrize(
    "command",
    [
        ["queuestats", "nope"],
        ["pausequeue", "nope"],
        ["resumequeue", "nope"],
        ["purgequeue", "nope", "--yes"],
        ["runqueueworker", "nope"],
        ["listpoison", "--queue", "nope"],
        ["requeuepoison", "--queue", "nope"],
        ["requeuepoison", "--all", "--to", "nope"],
    ],
)
def test_an_unknown_queue_is_reported_with_the_known_queues(command: list[str]) -> None:
    with pytest.raises(CommandError, match=r"There is no queue 'nope'.* Known queues: .*testapp\.Leased"):
        call_command(*command)


# -- no terminal to ask in -----------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_a_purge_without_a_terminal_states_which_option_means_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    Leased.send({"n": 1})
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)

    with pytest.raises(CommandError, match="no terminal for the confirmation: pass --yes"):
        call_command("purgequeue", "testapp.Leased")

    assert Leased.objects.count() == 1


@pytest.mark.django_db
@pytest.mark.parametrize("option", ["--yes", "--no-input", "--noinput"])
def test_a_purge_with_a_yes_option_does_not_ask(option: str) -> None:
    Leased.send({"n": 1})

    call_command("purgequeue", "testapp.Leased", option)

    assert not Leased.objects.exists()


@pytest.mark.django_db
@pytest.mark.parametrize(("answer", "remaining"), [("testapp.Leased", 0), ("yes", 1)])
def test_a_purge_at_a_terminal_takes_the_label_for_yes(
    monkeypatch: pytest.MonkeyPatch, answer: str, remaining: int
) -> None:
    Leased.send({"n": 1})
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: answer)
    if remaining:
        with pytest.raises(CommandError, match="Nothing was done"):
            call_command("purgequeue", "testapp.Leased")
    else:
        call_command("purgequeue", "testapp.Leased")

    assert Leased.objects.count() == remaining


# -- SQLite --------------------------------------------------------------------------------------------------------


def test_on_sqlite_our_tables_are_not_made_and_a_worker_gives_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "db.sqlite3"
    environment = {"DJANGO_SETTINGS_MODULE": "tests.queueapp.management.settings_on_sqlite", "SQLITE_FILE": str(file)}

    done = manage("migrate", **environment)
    assert done.returncode == 0, done
    with sqlite3.connect(file) as raw:
        tables = {name for (name,) in raw.execute("SELECT name FROM sqlite_master")}
    raw.close()
    assert "auth_user" in tables
    assert not any(name.startswith("queueapp_") for name in tables)

    line = only_line(manage("rundelayeddispatcher", **environment))
    assert "runs on PostgreSQL and SQL Server, but the database 'default' of DATABASES is SQLite" in line
