"""How the planner is kept from sorting: only while it would, looked at now and then, and nothing of it stays in the session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection, transaction

from queueapp.sql import queue_sql
from queueapp.sql.claimed import Range
from queueapp.sql.postgresql import index_order
from queueapp.sql.postgresql.index_order import LOOK_EVERY, SLOW, IndexOrder, no_sort
from queueapp.sql.postgresql.packed import OpeningQuery
from tests.databases import only_on_postgresql
from tests.inprocess import real_commits
from tests.testapp.models import Effect, Transactional

pytestmark = [only_on_postgresql, real_commits]

SQL = f'SELECT seq FROM "{Transactional._meta.db_table}" ORDER BY seq LIMIT 1'


@pytest.fixture(autouse=True)
def own_session() -> Iterator[None]:
    connection.close()
    connection.ensure_connection()
    yield
    connection.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(index_order, "monotonic", lambda: now[0])
    return now


def enable_sort() -> str:
    with connection.cursor() as cursor:
        cursor.execute("SHOW enable_sort")
        return str(cursor.fetchone()[0])


def indexes(usable: bool) -> None:
    """With none the planner has to sort."""
    for kind in ("indexscan", "indexonlyscan", "bitmapscan"):
        connection.cursor().execute(f"SET enable_{kind} = {'on' if usable else 'off'}")


# -- the setting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["on", "off"])
def test_in_a_transaction_what_was_set_is_put_back_at_once(before: str) -> None:
    with transaction.atomic():
        connection.cursor().execute(f"SET LOCAL enable_sort = {before}")
        with no_sort(connection):
            assert enable_sort() == "off"
        assert enable_sort() == before


def test_also_in_a_transaction_of_the_drivers() -> None:
    with connection.connection.transaction():
        with no_sort(connection):
            assert enable_sort() == "off"
        assert enable_sort() == "on"


def test_outside_of_transactions_it_is_set_for_the_statement_and_for_nothing_after_it() -> None:
    with no_sort(connection):
        assert enable_sort() == "off"
    assert enable_sort() == "on"
    assert connection.get_autocommit()


def test_as_the_first_of_a_transaction_it_commits_nothing_of_it() -> None:
    with transaction.atomic():
        with no_sort(connection):
            Effect.objects.create(name="rolled back")
        transaction.set_rollback(True)

    assert not Effect.objects.exists()
    assert enable_sort() == "on"


# -- the looks ---------------------------------------------------------------------------------------------------------


def test_a_plan_is_looked_at_when_a_statement_was_slow_and_once_in_a_while(clock: list[float]) -> None:
    order = IndexOrder()
    indexes(usable=False)
    order.took(SLOW, connection, SQL, ())
    assert not order.sorts(SQL), "it was quick"
    order.took(2 * SLOW, connection, SQL, ())
    assert order.sorts(SQL)

    indexes(usable=True)
    clock[0] += LOOK_EVERY - 0.1
    order.took(2 * SLOW, connection, SQL, ())
    assert order.sorts(SQL), "it is too early for another look"
    clock[0] += 0.2
    order.took(2 * SLOW, connection, SQL, ())
    assert not order.sorts(SQL)


def test_while_it_would_sort_the_plan_is_looked_at_again(clock: list[float]) -> None:
    order = IndexOrder()
    indexes(usable=False)
    order.took(1, connection, SQL, ())
    indexes(usable=True)
    order.fetch(connection, SQL, ())
    assert order.sorts(SQL)
    clock[0] += LOOK_EVERY

    order.fetch(connection, SQL, ())

    assert not order.sorts(SQL)


# -- claims that open their transaction --------------------------------------------------------------------------------


@pytest.fixture
def sql(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The statements of a queue with three messages; each is as slow as one that may have sorted."""
    Transactional.send_many([1, 2, 3])
    monkeypatch.setattr(index_order, "SLOW", 0.0)
    found = queue_sql(Transactional, connection)
    monkeypatch.setattr(found, "_in_order", IndexOrder())
    return found


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each time that BEGIN went with the claim."""
    taken: list[None] = []
    fetch = OpeningQuery.fetch

    def counted(self: OpeningQuery, *arguments: Any) -> Any:
        taken.append(None)
        return fetch(self, *arguments)

    monkeypatch.setattr(OpeningQuery, "fetch", counted)
    return taken


def test_a_claim_that_opens_its_transaction_does_so_until_its_plan_sorts(sql: Any, opened: list[None]) -> None:
    indexes(usable=False)
    for number in range(3):
        with transaction.atomic():
            assert len(sql.claim_by_delete(connection, [Range()], 1)) == 1
            assert not sql.commits_with_claim(connection, [Range()])
        assert len(opened) == 1, number

    assert not Transactional.objects.exists()


def test_a_claim_that_follows_a_commit_is_looked_at_as_well(sql: Any, clock: list[float]) -> None:
    with transaction.atomic():
        sql.claim_by_delete(connection, [Range()], 1)
        assert sql.commits_with_claim(connection, [Range()])
        indexes(usable=False)
        clock[0] += LOOK_EVERY
        # The clock of the claims themselves goes on, so that each took some time.
        assert len(sql.commit_and_claim(connection, [Range()])) == 1
        assert not sql.commits_with_claim(connection, [Range()])
