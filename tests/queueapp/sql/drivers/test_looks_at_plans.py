"""When the planner is kept from sorting: only while it would, for which a statement's plan is looked at now and
then."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection, transaction

from queueapp.sql import queue_sql
from queueapp.sql.claims import SeqRange
from queueapp.sql.postgresql.raw import pipelined_claims, plan_guard
from queueapp.sql.postgresql.raw.cursor import fetch
from queueapp.sql.postgresql.raw.plan_guard import (
    CHECK_EVERY,
    CHECK_HARMLESS_EVERY,
    CHECK_SORTING_EVERY,
    RESTRAIN_S,
    SLOW,
    SMALL,
    PlanGuard,
    fetch_unsorted,
)
from tests.databases import only_on_postgresql
from tests.in_process_worker import real_commits
from tests.testapp.models import Transactional

pytestmark = [only_on_postgresql, real_commits, pytest.mark.usefixtures("own_session")]

SQL = f'SELECT seq FROM "{Transactional._meta.db_table}" ORDER BY seq LIMIT 1'


@pytest.fixture(autouse=True)
def no_table_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_guard, "SMALL", -1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(plan_guard, "monotonic", lambda: now[0])
    return now


def indexes(usable: bool) -> None:
    """With none the planner has to sort."""
    for kind in ("indexscan", "indexonlyscan", "bitmapscan"):
        connection.cursor().execute(f"SET enable_{kind} = {'on' if usable else 'off'}")


def test_a_plan_is_looked_at_when_a_statement_was_slow_and_once_in_a_while(clock: list[float]) -> None:
    order = PlanGuard()
    indexes(usable=False)
    order.record_time(SLOW, connection, SQL, ())
    assert not order.sorts(SQL), "it was quick"
    order.record_time(2 * SLOW, connection, SQL, ())
    assert order.sorts(SQL)

    indexes(usable=True)
    clock[0] += CHECK_SORTING_EVERY - 0.1
    order.record_time(2 * SLOW, connection, SQL, ())
    assert order.sorts(SQL), "it is too early for another look"
    clock[0] += 0.2
    order.record_time(2 * SLOW, connection, SQL, ())
    assert not order.sorts(SQL)


def test_what_is_as_slow_as_when_a_look_found_nothing_is_looked_at_seldom(clock: list[float]) -> None:
    order = PlanGuard()
    order.record_time(2 * SLOW, connection, SQL, ())
    indexes(usable=False)
    clock[0] += CHECK_EVERY + 0.1
    order.record_time(4 * SLOW, connection, SQL, ())
    assert not order.sorts(SQL), "a process that is idle has cold statements"
    clock[0] += CHECK_HARMLESS_EVERY
    order.record_time(4 * SLOW, connection, SQL, ())
    assert order.sorts(SQL)


def test_what_is_slower_than_when_a_look_found_nothing_is_looked_at_soon(clock: list[float]) -> None:
    order = PlanGuard()
    order.record_time(2 * SLOW, connection, SQL, ())
    indexes(usable=False)
    order.record_time(20 * SLOW, connection, SQL, ())
    clock[0] += CHECK_EVERY + 0.1
    order.record_time(5 * SLOW, connection, SQL, ())
    assert order.sorts(SQL), "what was not looked at is no measure"


def test_while_it_would_sort_the_plan_is_looked_at_again(clock: list[float]) -> None:
    order = PlanGuard()
    indexes(usable=False)
    order.record_time(1, connection, SQL, ())
    indexes(usable=True)
    order.fetch(connection, SQL, ())
    assert order.sorts(SQL)
    clock[0] += CHECK_SORTING_EVERY

    order.fetch(connection, SQL, ())

    assert not order.sorts(SQL)


def test_what_is_found_by_its_key_may_sort_what_it_found() -> None:
    sql = f'SELECT seq FROM "{Transactional._meta.db_table}" WHERE seq >= %s ORDER BY body'
    by_key, in_order = PlanGuard(), PlanGuard()

    by_key.record_time(1, connection, sql, (10**10,), by_key=True)
    in_order.record_time(1, connection, sql, (10**10,))

    assert not by_key.sorts(sql)
    assert in_order.sorts(sql)


@pytest.mark.parametrize("kept", [False, True], ids=["a new plan", "one that the session keeps"])
def test_of_a_small_table_any_plan_is_a_good_one_until_it_has_grown(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """Seen: each claim from a queue that was all but empty took a fifth longer, for a minute after one that was
    slow."""
    monkeypatch.setattr(plan_guard, "SMALL", SMALL)
    Transactional.send_many(range(3))
    order = PlanGuard()
    sql = SQL + " OFFSET %s"
    indexes(usable=False)
    if kept:
        connection.cursor().execute("SET plan_cache_mode = force_generic_plan")
        fetch(connection, sql, (0,))
        indexes(usable=True)
    order.record_time(2 * SLOW, connection, sql, (0,))
    assert not order.sorts(sql)

    Transactional.send_many(["x" * 100] * 4_000)
    clock[0] += CHECK_EVERY + 0.1
    order.record_time(5 * SLOW, connection, sql, (0,))

    assert order.sorts(sql)


@pytest.mark.parametrize("usable", [False, True], ids=["it sorts", "it has sorted"])
def test_what_is_kept_from_sorting_is_looked_at_seldom(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, usable: bool
) -> None:
    """Seen: an idle worker sent an EXPLAIN beside each of its peeks."""
    order, looks, explain = PlanGuard(), [], plan_guard._plan
    monkeypatch.setattr(plan_guard, "_plan", lambda *given: looks.append(clock[0]) or explain(*given))
    indexes(usable=False)
    order.record_time(1, connection, SQL, ())
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

    monkeypatch.setattr(plan_guard, "fetch_unsorted", counted)
    order = PlanGuard()
    indexes(usable=False)
    order.record_time(1, connection, SQL, ())
    indexes(usable=True)
    clock[0] += RESTRAIN_S - 1

    order.fetch(connection, SQL, ())
    assert not order.sorts(SQL), "it was looked at"
    assert len(taken) == 1, "and is kept from it all the same"
    clock[0] += 2
    order.fetch(connection, SQL, ())
    assert len(taken) == 1


@pytest.mark.parametrize("numbers", [(10**10,), (5, 10**5, 10**10)], ids=["one", "one for each size"])
def test_a_plan_that_is_kept_and_reads_the_whole_table_is_found_though_it_does_not_sort(
    numbers: tuple[int, ...],
) -> None:
    """It was made while the table had few pages, and is kept whatever comes. For smaller numbers the session keeps
    others."""
    sql = f'SELECT seq FROM "{Transactional._meta.db_table}" WHERE seq >= %s LIMIT 1'
    Transactional.send_many(range(5_000))
    connection.cursor().execute(f'ANALYZE "{Transactional._meta.db_table}"')
    order = PlanGuard()
    order.record_time(1, connection, sql, (10**10,))
    assert not order.sorts(sql)
    indexes(usable=False)
    connection.cursor().execute("SET plan_cache_mode = force_generic_plan")
    for number in numbers:
        fetch(connection, sql, (number,))
    indexes(usable=True)
    order = PlanGuard()

    order.record_time(1, connection, sql, (10**10,))

    assert order.sorts(sql)
    explained = fetch_unsorted(connection, f"EXPLAIN {sql}", (10**10,))
    assert not any("Seq Scan" in line for (line,) in explained)


# -- claims that open their transaction --------------------------------------------------------------------------------


@pytest.fixture
def sql(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The statements of a queue with three messages; each is as slow as one that may have sorted."""
    Transactional.send_many([1, 2, 3])
    monkeypatch.setattr(plan_guard, "SLOW", 0.0)
    found = queue_sql(Transactional, connection)
    found.guard.reset()
    return found


def test_a_claim_that_opens_its_transaction_does_so_until_its_plan_sorts(sql: Any, opened: list[None]) -> None:
    indexes(usable=False)
    for number in range(3):
        with transaction.atomic():
            assert len(sql.claims.claim_by_delete(connection, [SeqRange()], 1)) == 1
            assert not sql.claims.pipelined_claim(connection, [SeqRange()])
        assert len(opened) == 1, number

    assert not Transactional.objects.exists()


def test_a_claim_that_follows_a_commit_is_looked_at_as_well(sql: Any, clock: list[float]) -> None:
    with transaction.atomic():
        follow_when_it_would_sort(sql, clock)
        assert not sql.claims.pipelined_claim(connection, [SeqRange()])


def follow_when_it_would_sort(sql: Any, clock: list[float]) -> None:
    """Claim one, and the next with its commit, a while after the planner has begun to sort."""
    sql.claims.claim_by_delete(connection, [SeqRange()], 1)
    way = sql.claims.pipelined_claim(connection, [SeqRange()])
    assert way is not None
    indexes(usable=False)
    clock[0] += CHECK_HARMLESS_EVERY + 1
    # The clock of the claims themselves goes on, so that each took some time.
    assert len(sql.claims.commit_and_claim(connection, [SeqRange()], way)) == 1


@pytest.fixture
def planned_once(sql: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The claims of one of a queue of which many messages were claimed one after another."""
    monkeypatch.setattr(pipelined_claims, "PLAN_ONCE_AFTER", 0)
    monkeypatch.setattr(sql.claims.single_claims, "count", 0)
    return sql.claims.single_claims


def test_of_a_claim_that_is_planned_once_its_own_plan_is_looked_at(
    sql: Any, planned_once: Any, opened: list[None]
) -> None:
    """And when that sorts, the claim that is planned each time opens its transaction until its plan does as well."""
    indexes(usable=False)
    for expected in (1, 2, 2):
        with transaction.atomic():
            assert len(sql.claims.claim_by_delete(connection, [SeqRange()], 1)) == 1
        assert len(opened) == expected
        assert sql.guard.sorts(planned_once.once.sql)


def test_of_one_that_follows_a_commit_as_well(sql: Any, planned_once: Any, clock: list[float]) -> None:
    with transaction.atomic():
        follow_when_it_would_sort(sql, clock)

    assert sql.guard.sorts(planned_once.once.sql)
    assert not sql.guard.sorts(planned_once.each_time.sql)
