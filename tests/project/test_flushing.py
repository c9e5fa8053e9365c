"""Tables are emptied in an order in which every foreign key holds, and a test database is found by child processes."""

from __future__ import annotations

import pytest
from django.apps import apps
from django.core.management.color import no_style

from project.database import database
from tests.databases import url_of
from tests.flushing import children_first, flush_children_first
from tests.queueapp.sql.tsql import Recorder, never_connected


def references() -> list[tuple[str, str]]:
    """(child, parent) for every foreign key of the checkout's models."""
    return [
        (model._meta.db_table, field.related_model._meta.db_table)
        for model in apps.get_models(include_auto_created=True)
        for field in model._meta.local_fields
        if field.is_relation and field.db_constraint
    ]


def test_every_table_comes_after_those_that_reference_it() -> None:
    tables = [model._meta.db_table for model in apps.get_models(include_auto_created=True)]
    found = references()
    assert ("auth_user_groups", "auth_user") in found

    ordered = children_first(tables, [*found, ("auth_user", "auth_user"), ("elsewhere", "auth_user")])

    assert sorted(ordered) == sorted(set(tables))
    assert all(ordered.index(child) < ordered.index(parent) for child, parent in found)


def test_a_flush_deletes_in_that_order_and_turns_no_constraint_off() -> None:
    recorder = Recorder(answers=[[("child", "parent")]])
    connection = never_connected(recorder)
    flush_children_first(connection)

    assert connection.ops.sql_flush(no_style(), ["parent", "child"]) == [
        "DELETE FROM [child];",
        "DELETE FROM [parent];",
    ]
    assert "sys.foreign_keys" in recorder.statements[0].sql
    assert connection.ops.sql_flush(no_style(), []) == []


@pytest.mark.parametrize(
    "url",
    [
        "mssql://sa:p%40ss%2Fw%3Frd@db.example:1433/queueapp?TrustServerCertificate=yes",
        "mssql://sa:secret@db/queueapp?driver=ODBC%20Driver%2018%20for%20SQL%20Server&TrustServerCertificate=yes&query_timeout=30",
        "mssql://sa:secret@db/queueapp",
    ],
)
def test_a_child_process_is_given_the_same_database_and_driver(url: str) -> None:
    entry = database(url)

    assert database(url_of(entry)) == entry
