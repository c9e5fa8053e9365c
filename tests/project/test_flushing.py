"""Tables are emptied in an order in which every foreign key holds, and a test database is found by child processes."""

from __future__ import annotations

import pytest
from django.apps import apps
from django.core.management import call_command
from django.core.management.color import no_style
from django.db import connection

from project.database import database
from tests.autovacuum import without_autovacuum
from tests.databases import url_of
from tests.in_process_worker import real_commits
from tests.queueapp.sql.tsql import Recorder, never_connected
from tests.testapp.models import Deep, Leased
from tests.truncate import children_first, flush_children_first, flush_what_was_written_to


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
    unconnected = never_connected(recorder)
    flush_children_first(unconnected)

    assert unconnected.ops.sql_flush(no_style(), ["parent", "child"]) == [
        "DELETE FROM [child];",
        "DELETE FROM [parent];",
    ]
    assert "sys.foreign_keys" in recorder.statements[0].sql
    assert unconnected.ops.sql_flush(no_style(), []) == []


@real_commits
@pytest.mark.parametrize(("messages", "is_new"), [(3, False), (300, True)])
def test_a_table_of_one_page_loses_its_rows_and_a_larger_one_its_file(
    messages: int, is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("another database's flush empties each table alike")
    file = "SELECT pg_relation_filenode(%s::regclass)"
    state = "SELECT reltuples < 0, pg_relation_size(oid) / 8192 FROM pg_class WHERE oid = %s::regclass"
    # Whatever tests before this one did to the connection; and as it was for those after it.
    monkeypatch.setattr(connection.ops, "sql_flush", connection.ops.sql_flush)
    monkeypatch.setattr(connection.introspection, "django_table_names", connection.introspection.django_table_names)
    flush_what_was_written_to(connection)
    # Autovacuum counts what was written to it before: it may find the table empty at any moment, and then a flush
    # truncates it.
    with without_autovacuum(Leased), connection.cursor() as cursor:
        found: tuple[bool, int] = (False, 0)
        for _ in range(20):
            cursor.execute(f"TRUNCATE {Leased._meta.db_table}")
            cursor.execute(file, [Leased._meta.db_table])
            before = cursor.fetchone()
            Leased.send_many([{}] * messages)
            cursor.execute(state, [Leased._meta.db_table])
            found = cursor.fetchone()
            if found[0] and (found[1] > 1) == is_new:
                break
        Deep.send({})

        call_command("flush", verbosity=0, interactive=False, reset_sequences=False, allow_cascade=True)

        assert not Leased.objects.exists()
        assert not Deep.objects.exists()
        cursor.execute(file, [Leased._meta.db_table])
        assert (cursor.fetchone() != before) == is_new, found


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
