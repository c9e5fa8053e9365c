"""A statement that may not sort: what its session was set to is as before after it, in and outside of transactions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import DataError, connection, transaction
from psycopg import IsolationLevel
from psycopg.pq import TransactionStatus
from psycopg.pq.abc import PGconn

from queueapp.sql.postgresql.raw import plan_guard
from queueapp.sql.postgresql.raw.cursor import fetch
from queueapp.sql.postgresql.raw.plan_guard import execute_unsorted, fetch_unsorted
from tests.databases import only_on_postgresql
from tests.in_process_worker import real_commits
from tests.testapp.models import Effect

pytestmark = [only_on_postgresql, real_commits, pytest.mark.usefixtures("own_session")]

EFFECTS = Effect._meta.db_table
SHOW = "SELECT current_setting('enable_sort')"


def enable_sort() -> str:
    with connection.cursor() as cursor:
        cursor.execute("SHOW enable_sort")
        return str(cursor.fetchone()[0])


@pytest.mark.parametrize("before", ["on", "off"])
@pytest.mark.parametrize("prepared", [True, False])
def test_in_a_transaction_what_was_set_is_put_back_at_once(before: str, prepared: bool, settings: Any) -> None:
    settings.QUEUEAPP = {"PREPARED_STATEMENTS": prepared}
    with transaction.atomic():
        connection.cursor().execute(f"SET LOCAL enable_sort = {before}")
        for _ in range(3):
            assert fetch_unsorted(connection, SHOW, ()) == [("off",)]
            assert enable_sort() == before


def test_what_the_session_was_set_to_is_put_back_as_well() -> None:
    connection.cursor().execute("SET enable_sort = off")
    with transaction.atomic():
        fetch_unsorted(connection, SHOW, ())
        assert enable_sort() == "off"


def test_also_in_a_transaction_of_the_drivers() -> None:
    with connection.connection.transaction():
        assert fetch_unsorted(connection, SHOW, ()) == [("off",)]
        assert enable_sort() == "on"


@pytest.mark.parametrize("prepared", [True, False])
def test_outside_of_transactions_it_is_set_for_the_statement_and_for_nothing_after_it(
    prepared: bool, settings: Any
) -> None:
    settings.QUEUEAPP = {"PREPARED_STATEMENTS": prepared}
    for _ in range(3):
        assert fetch_unsorted(connection, SHOW, ()) == [("off",)]
        assert enable_sort() == "on"
        assert connection.connection.info.transaction_status == TransactionStatus.IDLE


def test_outside_of_transactions_what_it_does_is_committed() -> None:
    Effect.objects.create(name="before")

    assert execute_unsorted(connection, f'UPDATE "{EFFECTS}" SET name = %s', ("after",)) == 1

    connection.close()
    assert Effect.objects.get().name == "after"


@pytest.mark.parametrize("level", [None, IsolationLevel.SERIALIZABLE])
def test_as_the_first_of_a_transaction_it_opens_it_as_the_driver_would(level: IsolationLevel | None) -> None:
    Effect.objects.create(name="before")
    connection.connection.isolation_level = level
    try:
        with transaction.atomic():
            assert fetch_unsorted(connection, "SELECT current_setting('transaction_isolation')", ()) == [
                ("serializable" if level else "read committed",)
            ]
            execute_unsorted(connection, f'UPDATE "{EFFECTS}" SET name = %s', ("after",))
            assert enable_sort() == "on"
            transaction.set_rollback(True)
    finally:
        connection.connection.isolation_level = None

    assert Effect.objects.get().name == "before"
    assert enable_sort() == "on"


def test_one_that_fails_leaves_nothing_behind_outside_of_a_transaction() -> None:
    with pytest.raises(DataError):
        fetch_unsorted(connection, "SELECT 1 / %s", (0,))

    assert connection.connection.info.transaction_status == TransactionStatus.IDLE
    assert enable_sort() == "on"
    assert fetch_unsorted(connection, "SELECT 1 / %s", (1,)) == [(1,)]


def test_one_that_fails_fails_its_transaction_which_puts_back_what_was_set() -> None:
    with transaction.atomic():
        with pytest.raises(DataError), transaction.atomic():
            fetch_unsorted(connection, "SELECT 1 / %s", (0,))
        assert enable_sort() == "on"


def test_a_session_that_has_forgotten_its_names_runs_it_all_the_same() -> None:
    fetch_unsorted(connection, SHOW, ())
    connection.cursor().execute("DEALLOCATE ALL")
    try:
        assert fetch_unsorted(connection, SHOW, ()) == [("off",)]
    finally:
        connection.connection._prepared.route.prepares = True


def test_in_a_pipeline_of_the_users_it_is_run_as_it_is() -> None:
    with connection.connection.pipeline():
        assert fetch_unsorted(connection, SHOW, ()) == [("on",)]


def test_a_trip_that_is_cut_short_takes_its_session_along(monkeypatch: pytest.MonkeyPatch) -> None:
    Effect.objects.create(name="before")

    def cut_off(pgconn: PGconn) -> Iterator[object]:
        pgconn.pipeline_sync()
        raise KeyboardInterrupt
        yield

    with transaction.atomic():
        pass
    with monkeypatch.context() as patched:
        patched.setattr(plan_guard, "answers", cut_off)
        with pytest.raises(KeyboardInterrupt), transaction.atomic():
            execute_unsorted(connection, f'UPDATE "{EFFECTS}" SET name = %s', ("after",))

    assert Effect.objects.get().name == "before"


def test_it_takes_one_trip_and_so_it_does_with_the_begin_of_its_transaction(trips: list[None]) -> None:
    fetch_unsorted(connection, SHOW, ())  # gives names to what it sends
    trips.clear()
    fetch_unsorted(connection, SHOW, ())
    assert len(trips) == 1

    with transaction.atomic():
        fetch_unsorted(connection, SHOW, ())
    with transaction.atomic():
        for _ in range(2):
            trips.clear()
            fetch_unsorted(connection, SHOW, ())
            assert len(trips) == 1


@pytest.mark.parametrize("before", ["on", "off"])
def test_reading_whole_tables_is_put_back_as_well(before: str) -> None:
    question = "SELECT current_setting('enable_seqscan')"
    with transaction.atomic():
        connection.cursor().execute(f"SET LOCAL enable_seqscan = {before}")
        assert fetch_unsorted(connection, question, ()) == [("off",)]
        assert fetch(connection, question, ()) == [(before,)]
    assert fetch(connection, question, ()) == [("on",)]


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each time that the server is waited for."""
    taken: list[None] = []
    connection.ensure_connection()
    raw = connection.connection
    wait = raw.wait

    def counted(*arguments: Any, **options: Any) -> Any:
        taken.append(None)
        return wait(*arguments, **options)

    monkeypatch.setattr(raw, "wait", counted)
    return taken
