"""The commit of one message and the claim of the next in one trip, whatever goes wrong on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import monotonic

import pytest
from django.contrib.admin.models import CHANGE, LogEntry
from django.db import IntegrityError, OperationalError, connection, connections, transaction
from psycopg import IsolationLevel
from psycopg.pq import TransactionStatus
from psycopg.pq.abc import PGconn

from queueapp.sql import queue_sql
from queueapp.sql.claims import BODY, Claimed, SeqRange
from queueapp.sql.postgresql.raw import pipelined_claims, plan_guard
from queueapp.sql.postgresql.raw.raw_statement import OpeningQuery
from tests.in_process_worker import real_commits
from tests.testapp.models import AddressedUrgent, Effect, Transactional

pytestmark = real_commits

ALL = [SeqRange()]


@pytest.fixture(autouse=True, params=[pipelined_claims.PLAN_ONCE_AFTER, 0], ids=["planned each time", "planned once"])
def three_messages(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    monkeypatch.setattr(pipelined_claims, "PLAN_ONCE_AFTER", request.param)
    monkeypatch.setattr(queue_sql(Transactional, connection).claims.single_claims, "count", 0)
    # Whether an earlier test, or a busy machine, has seen a plan that sorts is no matter here.
    for queue in (Transactional, AddressedUrgent):
        queue_sql(queue, connection).guard.reset()
    monkeypatch.setattr(plan_guard, "SLOW", 10.0)
    Transactional.send_many([1, 2, 3])
    connection.close()
    connection.ensure_connection()
    yield
    connection.close()


def claim() -> Claimed:
    (claimed,) = queue_sql(Transactional, connection).claims.claim_by_delete(connection, ALL, 1)
    return claimed


def follow() -> list[Claimed] | None:
    return follow_in(ALL)


def follow_in(ranges: Sequence[SeqRange]) -> list[Claimed] | None:
    sql = queue_sql(Transactional, connection)
    way = sql.claims.pipelined_claim(connection, ranges)
    assert way is not None
    return sql.claims.commit_and_claim(connection, ranges, way)


def remaining() -> list[bytes]:
    """What another session sees in the queue."""
    second_connection = connections["default"].copy()
    try:
        with second_connection.cursor() as cursor:
            cursor.execute(f'SELECT body FROM "{Transactional._meta.db_table}" ORDER BY seq')
            return [bytes(body) for (body,) in cursor.fetchall()]
    finally:
        second_connection.close()


def status() -> TransactionStatus:
    return TransactionStatus(connection.connection.pgconn.transaction_status)


def test_what_came_before_is_committed_and_the_next_message_is_held() -> None:
    with transaction.atomic():
        claim()
        Effect.objects.create(name="1")
        rows = follow()
        assert rows is not None
        assert [row[BODY] for row in rows] == [b"2"]
        assert remaining() == [b"2", b"3"]
        Effect.objects.create(name="2")
        transaction.set_rollback(True)

    assert remaining() == [b"2", b"3"]
    assert [effect.name for effect in Effect.objects.all()] == ["1"]
    assert status() == TransactionStatus.IDLE


def test_only_what_lies_in_the_range_is_claimed() -> None:
    first, second, third = Transactional.objects.order_by("seq").values_list("seq", flat=True)
    sql = queue_sql(Transactional, connection)
    with transaction.atomic():
        assert [row[BODY] for row in sql.claims.claim_by_delete(connection, [SeqRange(second)], 1)] == [b"2"]
        assert [row[BODY] for row in follow_in([SeqRange(third)]) or ()] == [b"3"]
    with transaction.atomic():
        assert sql.claims.claim_by_delete(connection, [SeqRange(0, first - 1)], 1) == []

    assert remaining() == [b"1"]


def test_at_the_end_of_the_queue_the_last_one_is_committed() -> None:
    with transaction.atomic():
        claim()
        assert [len(follow() or ()) for _ in range(3)] == [1, 1, 0]

    assert remaining() == []


def test_a_commit_that_fails_claims_nothing() -> None:
    with pytest.raises(IntegrityError), transaction.atomic():  # noqa: PT012 - the block is what is rolled back
        claim()
        LogEntry.objects.create(user_id=-1, action_flag=CHANGE, object_repr="", change_message="")
        follow()

    assert remaining() == [b"1", b"2", b"3"]
    with transaction.atomic():
        assert claim()[BODY] == b"1"


def test_a_claim_that_fails_leaves_what_was_committed() -> None:
    with transaction.atomic():
        claim()
        connection.cursor().execute("SET search_path = nowhere")
        assert follow() is None
        assert status() == TransactionStatus.IDLE

    assert remaining() == [b"2", b"3"]
    connection.cursor().execute("RESET search_path")
    with transaction.atomic():
        assert claim()[BODY] == b"2"


@pytest.mark.usefixtures("trusting")
def test_where_the_session_has_forgotten_the_statement_what_came_before_is_committed() -> None:
    with transaction.atomic():
        claim()
        connection.connection.pgconn.exec_(b"DEALLOCATE ALL")
        assert follow() is None

    assert remaining() == [b"2", b"3"]
    with transaction.atomic():
        assert claim()[BODY] == b"2"


def test_a_connection_that_was_killed_is_an_ordinary_error_and_nothing_is_committed() -> None:
    kill_session = connections["default"].copy()
    with pytest.raises(OperationalError), transaction.atomic():  # noqa: PT012 - the block is what is rolled back
        claim()
        with kill_session.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [connection.connection.info.backend_pid])
        kill_session.close()
        follow()

    assert remaining() == [b"1", b"2", b"3"]


def in_a_failed_transaction() -> None:
    connection.connection.pgconn.exec_(b"SELECT 1/0")


def serializable() -> None:
    connection.connection._isolation_level = IsolationLevel.SERIALIZABLE


def forgetting() -> None:
    connection.connection._prepared._to_flush.append(None)


def evicted() -> None:
    """By the many statements that a handler has had prepared."""
    connection.connection._prepared._names.clear()


@pytest.mark.parametrize("differ", [in_a_failed_transaction, serializable, forgetting, evicted])
def test_it_is_not_done_where_the_transaction_is_not_the_usual_one(differ: Callable[[], None]) -> None:
    sql = queue_sql(Transactional, connection)
    with transaction.atomic():
        claim()
        assert sql.claims.pipelined_claim(connection, ALL)
        differ()
        assert not sql.claims.pipelined_claim(connection, ALL)
        transaction.set_rollback(True)


def in_a_pipeline() -> AbstractContextManager[object]:
    return connection.connection.pipeline()  # type: ignore[no-any-return]


def in_a_block_of_the_drivers() -> AbstractContextManager[object]:
    return connection.connection.transaction()  # type: ignore[no-any-return]


@contextmanager
def in_a_transaction_of_two_phases() -> Iterator[None]:
    connection.connection._tpc = (None, False)
    yield
    connection.connection._tpc = None


@pytest.mark.parametrize("within", [in_a_pipeline, in_a_block_of_the_drivers, in_a_transaction_of_two_phases])
def test_it_is_not_done_in_the_middle_of_something(within: Callable[[], AbstractContextManager[object]]) -> None:
    sql = queue_sql(Transactional, connection)
    with transaction.atomic():
        claim()
        with within():
            assert not sql.claims.pipelined_claim(connection, ALL)
        assert sql.claims.pipelined_claim(connection, ALL)
        transaction.set_rollback(True)


def test_who_is_cut_off_in_the_middle_leaves_a_closed_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is unknown how much of it the server has seen; what it has not committed it rolls back."""

    def cut_off(self: OpeningQuery, pgconn: PGconn, *arguments: object) -> Iterator[object]:
        pgconn.enter_pipeline_mode()
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt), transaction.atomic():  # noqa: PT012 - the block is what is rolled back
        claim()
        raw = connection.connection
        monkeypatch.setattr(OpeningQuery, "_conversation", cut_off)
        follow()

    assert raw.closed
    assert remaining() == [b"1", b"2", b"3"]


def test_it_is_not_done_in_several_ranges_or_on_a_queue_with_levels() -> None:
    with transaction.atomic():
        claim()
        assert not queue_sql(Transactional, connection).claims.pipelined_claim(
            connection, [SeqRange(0, 5), SeqRange(7, 9)]
        )
        assert not queue_sql(Transactional, connection).claims.pipelined_claim(connection, [])
        assert not queue_sql(AddressedUrgent, connection).claims.pipelined_claim(connection, ALL)


# -- planned once --------------------------------------------------------------------------------------------------


def executed() -> dict[str, tuple[int, int]]:
    """(by a plan kept for any parameters, planned anew) of each claim of one that this session knows, by its limit."""
    query = "SELECT statement, generic_plans, custom_plans FROM pg_prepared_statements WHERE statement LIKE %s"
    with connection.cursor() as cursor:
        cursor.execute(query, [f'DELETE FROM "{Transactional._meta.db_table}"%'])
        return {("1" if "LIMIT 1 " in sql else "$2"): (kept, anew) for sql, kept, anew in cursor.fetchall()}


def take_all() -> list[Claimed]:
    found = []
    with transaction.atomic():
        rows: list[Claimed] | None = [claim()]
        while rows:
            found += rows
            rows = follow()
    return found


def test_where_many_were_claimed_one_after_another_a_session_plans_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelined_claims, "PLAN_ONCE_AFTER", 100)
    Transactional.send_many(range(4, 301))
    with connection.cursor() as cursor:
        cursor.execute(f'ANALYZE "{Transactional._meta.db_table}"')
    bodies = []
    for _ in range(2):
        with transaction.atomic():
            rows: list[Claimed] | None = [claim()]
            while rows and len(bodies) % 150 < 149:
                bodies += [row[BODY] for row in rows]
                rows = follow()
            bodies += [row[BODY] for row in rows or ()]

    assert bodies == [b"%d" % number for number in range(1, 301)]
    ways = executed()
    assert sum(ways["$2"]) == 150, "the first streak goes on as it began: its session knows no other way"
    assert ways["1"] == (145, 5), "and the second one only until the server sees that it needs not"


def test_claims_that_follow_no_commit_count_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers that leave Django something to do end each streak with its first message."""
    monkeypatch.setattr(pipelined_claims, "PLAN_ONCE_AFTER", 2)
    for known in (["$2"], ["$2"], ["$2", "1"]):
        with transaction.atomic():
            claim()
        assert sorted(executed()) == known


def test_a_claim_in_vain_begins_the_count_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelined_claims, "PLAN_ONCE_AFTER", 3)
    assert len(take_all()) == 3
    Transactional.send_many([4, 5])

    assert len(take_all()) == 2

    assert list(executed()) == ["$2"]


def test_a_streak_goes_on_though_another_threads_claim_was_in_vain() -> None:
    sql = queue_sql(Transactional, connection)
    with transaction.atomic():
        claim()
        way = sql.claims.pipelined_claim(connection, ALL)
        assert way is not None
        sql.claims.single_claims.count = -1
        assert [row[BODY] for row in sql.claims.commit_and_claim(connection, ALL, way)] == [b"2"]
        sql.claims.single_claims.count = pipelined_claims.PLAN_ONCE_AFTER
        assert [row[BODY] for row in follow() or ()] == [b"3"]


def test_a_plan_kept_that_sorts_is_not_used_again_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made while the queue was nearly empty, whatever came since."""
    monkeypatch.setattr(pipelined_claims, "PLAN_ONCE_AFTER", 0)
    sql = queue_sql(Transactional, connection)
    once, order = sql.claims.single_claims.once.sql, sql.guard
    order.sorting.add(once)
    order.restrained_until[once] = monotonic() + plan_guard.RESTRAIN_S

    assert len(take_all()) == 3

    assert list(executed()) == ["$2"]
    order.restrained_until[once] = monotonic()
    monkeypatch.setattr(sql.claims.single_claims, "count", 0)
    Transactional.send_many([4, 5])
    assert len(take_all()) == 2
    assert sorted(executed()) == ["$2", "1"], "a plan that is not used is not checked: it is tried again"
