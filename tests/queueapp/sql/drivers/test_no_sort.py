"""How the planner is kept from sorting: only while it would, looked at now and then, and nothing of it stays in the session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import DataError, connection, transaction
from psycopg import IsolationLevel
from psycopg.pq import TransactionStatus
from psycopg.pq.abc import PGconn

from queueapp.sql import queue_sql
from queueapp.sql.claimed import Range
from queueapp.sql.postgresql import index_order, opening, unsorted
from queueapp.sql.postgresql.index_order import (
    CALM,
    LOOK_AT_HARMLESS_EVERY,
    LOOK_AT_SORTING_EVERY,
    LOOK_EVERY,
    SLOW,
    IndexOrder,
)
from queueapp.sql.postgresql.packed import OpeningQuery
from queueapp.sql.postgresql.session import fetch
from queueapp.sql.postgresql.unsorted import execute_unsorted, fetch_unsorted
from tests.databases import only_on_postgresql
from tests.inprocess import real_commits
from tests.testapp.models import Effect, Transactional

pytestmark = [only_on_postgresql, real_commits]

EFFECTS = Effect._meta.db_table
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

SHOW = "SELECT current_setting('enable_sort')"


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
        patched.setattr(unsorted, "answers", cut_off)
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


# -- the looks ---------------------------------------------------------------------------------------------------------


def test_a_plan_is_looked_at_when_a_statement_was_slow_and_once_in_a_while(clock: list[float]) -> None:
    order = IndexOrder()
    indexes(usable=False)
    order.took(SLOW, connection, SQL, ())
    assert not order.sorts(SQL), "it was quick"
    order.took(2 * SLOW, connection, SQL, ())
    assert order.sorts(SQL)

    indexes(usable=True)
    clock[0] += LOOK_AT_SORTING_EVERY - 0.1
    order.took(2 * SLOW, connection, SQL, ())
    assert order.sorts(SQL), "it is too early for another look"
    clock[0] += 0.2
    order.took(2 * SLOW, connection, SQL, ())
    assert not order.sorts(SQL)


def test_what_is_as_slow_as_when_a_look_found_nothing_is_looked_at_seldom(clock: list[float]) -> None:
    order = IndexOrder()
    order.took(2 * SLOW, connection, SQL, ())
    indexes(usable=False)
    clock[0] += LOOK_EVERY + 0.1
    order.took(4 * SLOW, connection, SQL, ())
    assert not order.sorts(SQL), "a process that is idle has cold statements"
    clock[0] += LOOK_AT_HARMLESS_EVERY
    order.took(4 * SLOW, connection, SQL, ())
    assert order.sorts(SQL)


def test_what_is_slower_than_when_a_look_found_nothing_is_looked_at_soon(clock: list[float]) -> None:
    order = IndexOrder()
    order.took(2 * SLOW, connection, SQL, ())
    indexes(usable=False)
    order.took(20 * SLOW, connection, SQL, ())
    clock[0] += LOOK_EVERY + 0.1
    order.took(5 * SLOW, connection, SQL, ())
    assert order.sorts(SQL), "what was not looked at is no measure"


def test_while_it_would_sort_the_plan_is_looked_at_again(clock: list[float]) -> None:
    order = IndexOrder()
    indexes(usable=False)
    order.took(1, connection, SQL, ())
    indexes(usable=True)
    order.fetch(connection, SQL, ())
    assert order.sorts(SQL)
    clock[0] += LOOK_AT_SORTING_EVERY

    order.fetch(connection, SQL, ())

    assert not order.sorts(SQL)


@pytest.mark.parametrize("usable", [False, True], ids=["it sorts", "it has sorted"])
def test_what_is_kept_from_sorting_is_looked_at_seldom(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, usable: bool
) -> None:
    """Seen: an idle worker sent an EXPLAIN beside each of its peeks."""
    order, looks, explain = IndexOrder(), [], index_order._plan_has
    monkeypatch.setattr(index_order, "_plan_has", lambda *given: looks.append(clock[0]) or explain(*given))
    indexes(usable=False)
    order.took(1, connection, SQL, ())
    indexes(usable=usable)
    looks.clear()
    for _ in range(50):
        clock[0] += 1
        order.fetch(connection, SQL, ())
    assert len(looks) == 5


def test_what_has_sorted_is_kept_from_it_until_it_has_not_for_a_while(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[None] = []

    def counted(*arguments: Any) -> list[Any]:
        taken.append(None)
        return fetch_unsorted(*arguments)

    monkeypatch.setattr(index_order, "fetch_unsorted", counted)
    order = IndexOrder()
    indexes(usable=False)
    order.took(1, connection, SQL, ())
    indexes(usable=True)
    clock[0] += CALM - 1

    order.fetch(connection, SQL, ())
    assert not order.sorts(SQL), "it was looked at"
    assert len(taken) == 1, "and is kept from it all the same"
    clock[0] += 2
    order.fetch(connection, SQL, ())
    assert len(taken) == 1


def test_a_plan_that_is_kept_and_reads_the_whole_table_is_found_though_it_does_not_sort() -> None:
    """It was made while the table had few pages, and is kept whatever comes."""
    sql = f'SELECT seq FROM "{Transactional._meta.db_table}" WHERE seq >= %s LIMIT 1'
    Transactional.send_many(range(5_000))
    connection.cursor().execute(f'ANALYZE "{Transactional._meta.db_table}"')
    order = IndexOrder()
    order.took(1, connection, sql, (10**9,))
    assert not order.sorts(sql)
    indexes(usable=False)
    connection.cursor().execute("SET plan_cache_mode = force_generic_plan")
    fetch(connection, sql, (10**9,))
    indexes(usable=True)
    order = IndexOrder()

    order.took(1, connection, sql, (10**9,))

    assert order.sorts(sql)
    explained = fetch_unsorted(connection, f"EXPLAIN {sql}", (10**9,))
    assert not any("Seq Scan" in line for (line,) in explained)


@pytest.mark.parametrize("before", ["on", "off"])
def test_reading_whole_tables_is_put_back_as_well(before: str) -> None:
    question = "SELECT current_setting('enable_seqscan')"
    with transaction.atomic():
        connection.cursor().execute(f"SET LOCAL enable_seqscan = {before}")
        assert fetch_unsorted(connection, question, ()) == [("off",)]
        assert fetch(connection, question, ()) == [(before,)]
    assert fetch(connection, question, ()) == [("on",)]


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
        follow_when_it_would_sort(sql, clock)
        assert not sql.commits_with_claim(connection, [Range()])


def follow_when_it_would_sort(sql: Any, clock: list[float]) -> None:
    """Claim one, and the next with its commit, a while after the planner has begun to sort."""
    sql.claim_by_delete(connection, [Range()], 1)
    assert sql.commits_with_claim(connection, [Range()])
    indexes(usable=False)
    clock[0] += LOOK_AT_HARMLESS_EVERY + 1
    # The clock of the claims themselves goes on, so that each took some time.
    assert len(sql.commit_and_claim(connection, [Range()])) == 1


@pytest.fixture
def planned_once(sql: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The claims of one of a queue of which many messages were claimed one after another."""
    monkeypatch.setattr(opening, "DEEP", 0)
    monkeypatch.setattr(sql._of_one, "_count", 0)
    return sql._of_one


def test_of_a_claim_that_is_planned_once_its_own_plan_is_looked_at(
    sql: Any, planned_once: Any, opened: list[None]
) -> None:
    """And when that sorts, the claim that is planned each time opens its transaction until its plan does as well."""
    indexes(usable=False)
    for expected in (1, 2, 2):
        with transaction.atomic():
            assert len(sql.claim_by_delete(connection, [Range()], 1)) == 1
        assert len(opened) == expected
        assert sql._in_order.sorts(planned_once._once.sql)


def test_of_one_that_follows_a_commit_as_well(sql: Any, planned_once: Any, clock: list[float]) -> None:
    with transaction.atomic():
        follow_when_it_would_sort(sql, clock)

    assert sql._in_order.sorts(planned_once._once.sql)
    assert not sql._in_order.sorts(planned_once._each_time.sql)
