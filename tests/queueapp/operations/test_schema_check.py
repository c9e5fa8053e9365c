"""What is missing in a database: said of all tables at once, wherever it is asked, and of no table that is there."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from django.db import connection, transaction

from queueapp.operations import schema_check
from tests.databases import only_on_postgresql
from tests.in_process_worker import real_commits
from tests.queueapp.management.test_first_hour import without_column, without_table
from tests.testapp.models import Leased, Transactional

pytestmark = [only_on_postgresql, real_commits]


@pytest.fixture
def no_privileges() -> Iterator[None]:
    """This session is a role that may read no table."""
    name = f"stranger_{uuid.uuid4().hex}"
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE ROLE {name}; SET ROLE {name}")
        yield
        cursor.execute(f"RESET ROLE; DROP ROLE {name}")


def test_all_tables_that_lack_something_are_named_and_the_callers_transaction_goes_on() -> None:
    with without_column(Leased, "cancels"), without_column(Transactional, "body"), transaction.atomic():
        found = schema_check.missing("default", [Leased, Transactional])
        assert not Leased.objects.filter(pk=-1).only("seq").exists()

    assert [item.partition(" (")[0] for item in found] == [
        "columns of testapp_leased", "columns of testapp_transactional",
    ]  # fmt: skip


@pytest.mark.usefixtures("no_privileges")
def test_a_table_that_may_not_be_read_is_there() -> None:
    assert schema_check.missing("default", [Leased]) == []


def test_a_table_of_another_schema_is_looked_for_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leased._meta, "db_table", 'public"."testapp_leased')
    assert schema_check.missing("default", [Leased]) == []

    monkeypatch.setattr(Leased._meta, "db_table", 'public"."testapp_nothing')
    (found,) = schema_check.missing("default", [Leased])
    assert "testapp_nothing" in found


def test_a_locked_table_is_there_and_nothing_waits_for_it() -> None:
    second_connection = connection.copy()
    try:
        second_connection.set_autocommit(False)
        with second_connection.cursor() as changing:
            changing.execute("LOCK TABLE testapp_leased IN ACCESS EXCLUSIVE MODE")
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SET LOCAL lock_timeout = '50ms'")
            assert schema_check.missing("default", [Leased]) == []
    finally:
        second_connection.rollback()
        second_connection.close()


def test_tables_of_the_app_itself_are_looked_for_as_well() -> None:
    from_the_app = next(iter(schema_check.apps.get_app_config("queueapp").get_models()))
    with without_table(from_the_app):
        assert schema_check.missing("default", []) == [from_the_app._meta.db_table]
