"""Indexes that statements name: what is said of one that is missing, has another name or is out of use, and how to mend
it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from typing import Any

import pytest
from django.core.management.base import BaseCommand
from django.db import connections
from sqlglot import exp

from queueapp.models import DelayedMessage
from queueapp.operations import schema_check
from queueapp.sql import backend_of
from queueapp.sql.database import IndexInfo, SettingAdvice
from queueapp.sql.sqlserver.statements import quote_table
from queueapp.sql.tables import QueueTable
from tests.in_process_worker import real_commits
from tests.queueapp.sql.server import Server, levels
from tests.queueapp.sql.tsql import Recorder, never_connected, parsed
from tests.testapp.models import AddressedUrgent, ForeignSqlServer, Leased
from workers.management.startup import report_database

CLAIM = str(QueueTable.of(AddressedUrgent).claim_index)
Rows = list[tuple[Any, ...]]


def index(name: str, *columns: str, disabled: int = 0, filtered: int = 0) -> Rows:
    """An index as the catalog of a SQL Server has it."""
    return [(name, column, disabled, filtered, 0, 0, None) for column in columns]


def primary_key(name: str, column: str) -> Rows:
    return [(name, column, 0, 0, 1, 0, 1)]


def rest(model: Any) -> Rows:
    """The other indexes of a queue."""
    own_value = [index for index in model._meta.indexes if not index.name.endswith("_claim")]
    return primary_key("PK__orders", "seq") + [
        row for item in own_value for row in index(item.name, *item.fields, filtered=1)
    ]


@pytest.fixture
def inspected() -> Iterator[Any]:
    def inspect(model: Any, *there: Rows) -> list[schema_check.Finding]:
        name = quote_table(model._meta.db_table)
        columns = [(name, column) for column in ("seq", "RowVersion") if there]
        indexes = [(name, *row) for rows in there for row in rows]
        connections["recorded"] = never_connected(Recorder(answers=[columns, indexes]))
        return schema_check.inspect([model], "recorded")

    yield inspect
    with suppress(AttributeError):  # where the driver cannot be loaded there is none
        del connections["recorded"]


# -- SQL Server, without one -------------------------------------------------------------------------------------------

AS_IT_IS = ("recipient", "priority", "seq")


@pytest.mark.parametrize("claim", [index(CLAIM, *AS_IT_IS), index(CLAIM, "Recipient", "PRIORITY", "Seq", "is_barrier")],
                         ids=["as migrated", "with more columns"])  # fmt: skip
def test_index_that_serves_is_not_reported(inspected: Any, claim: Rows) -> None:
    assert inspected(AddressedUrgent, rest(AddressedUrgent), claim) == []


def test_renamed_index_gets_its_name_back(inspected: Any) -> None:
    (found,) = inspected(AddressedUrgent, rest(AddressedUrgent), index("O'Brien's", *AS_IT_IS))

    assert f"index {CLAIM} on (recipient, priority, seq) is called O'Brien's: every statement" in found.problem
    assert found.remedy == f"EXEC sp_rename N'[{AddressedUrgent._meta.db_table}].[O''Brien''s]', N'{CLAIM}', N'INDEX'"
    assert [type(statement) for statement in parsed(found.remedy)] == [exp.Execute]


def test_missing_index_is_made(inspected: Any) -> None:
    (found,) = inspected(AddressedUrgent, rest(AddressedUrgent), index("other", "recipient", "seq"))

    assert found.problem.endswith("is missing: every statement that names it fails (308, 8622)")
    assert found.remedy.startswith(f"CREATE INDEX [{CLAIM}] ON")


@pytest.mark.parametrize(
    "claim",
    [index(CLAIM, *AS_IT_IS, disabled=1), index(CLAIM, *AS_IT_IS, filtered=1), index(CLAIM, "priority", "seq")],
    ids=["disabled", "filtered", "of other columns"],
)
def test_index_that_is_not_what_its_name_states_is_made_anew(inspected: Any, claim: Rows) -> None:
    (found,) = inspected(AddressedUrgent, rest(AddressedUrgent), claim)

    assert "is another index or disabled: every statement" in found.problem
    drop, create = found.remedy.split("; ")
    assert drop.startswith(f"DROP INDEX [{CLAIM}] ON")
    assert create.startswith(f"CREATE INDEX [{CLAIM}] ON")


def test_index_that_no_statement_names_may_have_any_name(inspected: Any) -> None:
    by_hand = index("by hand", "expires"), primary_key("PK", "seq")
    assert inspected(AddressedUrgent, *by_hand, index(CLAIM, *AS_IT_IS)) == []


def test_index_of_the_delayed_messages_is_named_too(inspected: Any) -> None:
    first = next(index for index in DelayedMessage._meta.indexes if index.fields[:2] == ["destination", "due"])
    there = [index(item.name, *item.fields) for item in DelayedMessage._meta.indexes if item is not first]

    assert inspected(DelayedMessage, *there, index(first.name, *first.fields)) == []
    (found,) = inspected(DelayedMessage, *there, index("renamed", *first.fields))
    assert found.remedy.startswith("EXEC sp_rename")


def test_missing_and_foreign_tables_are_not_reported(inspected: Any) -> None:
    assert inspected(AddressedUrgent) == []
    assert inspected(ForeignSqlServer, primary_key("PK", "RowVersion")) == []


# -- settings of the database ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "advised"), [(0, True), (1, False)])
def test_setting_of_the_database_is_reported_either_way(setting: int, advised: bool) -> None:
    connection = never_connected(Recorder(answers=[[(setting,)]]))

    (remark,) = backend_of(connection).schema.remarks(connection)

    assert remark.text.startswith(f"READ_COMMITTED_SNAPSHOT is {'on' if setting else 'off'}")
    assert bool(remark.advice) is advised
    assert not advised or "SET READ_COMMITTED_SNAPSHOT ON" in remark.advice


@real_commits
def test_worker_reports_all_settings_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        schema_check, "remarks", lambda alias: [SettingAdvice("X is on", ""), SettingAdvice("Y is off", "Turn it on.")]
    )
    command = BaseCommand(stdout=StringIO(), stderr=StringIO())
    with without_claim_index(Server("default")):
        report_database(command, "default", [AddressedUrgent, DelayedMessage])

    assert command.stdout.getvalue() == "Database default: X is on.\nDatabase default: Y is off. Turn it on.\n"
    assert f"Warning: index {CLAIM} on (recipient, priority, seq) is missing" in command.stderr.getvalue()
    assert f'Remedy: CREATE INDEX "{CLAIM}"' in command.stderr.getvalue()


# -- on the databases there are ----------------------------------------------------------------------------------------


def indexes_of(server: Server, model: Any) -> dict[str, IndexInfo]:
    return server.backend.schema.tables(server.connection, [model._meta.db_table])[model._meta.db_table].indexes


@contextmanager
def without_claim_index(server: Server) -> Iterator[None]:
    (claim,) = (index for index in AddressedUrgent._meta.indexes if index.name == CLAIM)
    with server.connection.schema_editor() as editor:
        editor.remove_index(AddressedUrgent, claim)
    try:
        yield
    finally:
        if CLAIM not in indexes_of(server, AddressedUrgent):
            with server.connection.schema_editor() as editor:
                editor.add_index(AddressedUrgent, claim)


def taken(server: Server) -> int:
    return len(server.sql(AddressedUrgent).claims.claim_by_delete(server.connection, levels(3), 10))


def test_tables_that_were_migrated_lack_nothing(server: Server) -> None:
    for model in (AddressedUrgent, Leased, DelayedMessage):
        assert schema_check.inspect([model], server.alias) == []
        there = indexes_of(server, model)
        assert {index.name for index in model._meta.indexes} <= there.keys()


def test_missing_index_is_fixed_by_what_is_reported(server: Server) -> None:
    server.put(AddressedUrgent, 2)
    with without_claim_index(server):
        (found,) = schema_check.inspect([AddressedUrgent], server.alias)
        server.run(found.remedy)

        assert schema_check.inspect([AddressedUrgent], server.alias) == []
        assert taken(server) == 2


def test_renamed_index_matters_where_statements_name_it(server: Server) -> None:
    server.put(AddressedUrgent, 2)
    connection, table = server.connection, AddressedUrgent._meta.db_table
    server.run(server.backend.schema.rename_index(connection, table, CLAIM, "by_another_name"))
    try:
        found = schema_check.inspect([AddressedUrgent], server.alias)
        assert len(found) == server.backend.schema.names_indexes
        server.run(
            found[0].remedy
            if found
            else server.backend.schema.rename_index(connection, table, "by_another_name", CLAIM)
        )
    finally:
        if "by_another_name" in indexes_of(server, AddressedUrgent):
            server.run(server.backend.schema.rename_index(connection, table, "by_another_name", CLAIM))

    assert schema_check.inspect([AddressedUrgent], server.alias) == []
    assert taken(server) == 2
