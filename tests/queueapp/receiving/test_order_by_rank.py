"""A queue with a priority of 64 bits: the highest first, and of one priority the oldest first."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from django.db import connections, transaction
from hypothesis import HealthCheck, given, settings

from queueapp import messages
from queueapp.errors import InvalidMessage
from queueapp.failures.poison_operations import requeue
from queueapp.failures.poison_store import insert_poison
from queueapp.models import PoisonMessage
from queueapp.receiving import low_water_marks
from queueapp.receiving.low_water_marks import Priority64Marks, marks_for
from queueapp.sql import queue_sql
from queueapp.sql.claims import MAX_ORDER_KEY, PRIORITY, SEQ, WINDOW_ROWS, SeqRange, order_key, split_order_key
from queueapp.sql.message_columns import Outgoing
from queueapp.sql.postgresql.claims import Where
from tests.databases import DATABASES, marks_of, only_on_postgresql
from tests.in_process_worker import real_commits
from tests.testapp.models import Addressed, Leased, Urgent
from tests.testapp.ordering import Ranked, RankedAtMostOnce, RankedTransactional

HIGHEST, LOWEST = 2**63 - 1, -(2**63)

each_database = pytest.mark.parametrize(
    "alias", [pytest.param(alias, id=name, marks=marks_of(alias)) for name, alias in DATABASES.items()]
)
each_semantics = pytest.mark.parametrize("queue", [Ranked, RankedTransactional, RankedAtMostOnce])


def put(queue: Any, alias: str, *priorities: int, many: bool = False) -> None:
    """Messages whose bodies are their priorities, as the evaluation of the expression leaves them."""
    connection = connections[alias]
    sql = queue_sql(queue, connection)
    rows = [
        Outgoing(messages.new_id(), "{}", str(priority).encode())._replace(priority=priority) for priority in priorities
    ]
    if many:
        sql.inserts.insert_many(connection, rows)
    else:
        for row in rows:
            sql.inserts.insert(connection, row)


def take(queue: Any, alias: str, count: int) -> list[int]:
    with queue.receive(count, using=alias) as batch:
        got = []
        for message in batch:
            got.append(int(message.raw_body))
            message.ack()
    return got


def test_a_place_is_one_number_in_the_order_of_the_claims() -> None:
    ordered = [(HIGHEST, 0), (HIGHEST, 7), (5, 1), (5, 2**63 - 1), (0, 3), (-1, 1), (LOWEST, 0), (LOWEST, 2**63 - 1)]

    places = [order_key(*item) for item in ordered]

    assert places == sorted(places)
    assert [(~rank, seq) for rank, seq in map(split_order_key, places)] == ordered


@each_database
@each_semantics
@pytest.mark.parametrize("many", [False, True])
def test_priority_of_64_bits_highest_first_and_within_one_oldest_first(queue: Any, alias: str, many: bool) -> None:
    put(queue, alias, 0, HIGHEST, LOWEST, 2**40, 7, HIGHEST - 1, many=many)

    assert take(queue, alias, 10) == [HIGHEST, HIGHEST - 1, 2**40, 7, 0, LOWEST]


@each_database
@each_semantics
def test_priority_newcomer_of_the_highest_is_the_next_one(queue: Any, alias: str) -> None:
    put(queue, alias, *range(100, 120))
    assert take(queue, alias, 3) == [119, 118, 117]

    put(queue, alias, 500)
    put(queue, alias, 110, 400)

    assert take(queue, alias, 3) == [500, 400, 116]
    assert take(queue, alias, 30) == [115, 114, 113, 112, 111, 110, 110, *range(109, 99, -1)]


@each_database
def test_priority_what_is_given_back_is_next_in_its_old_place(alias: str) -> None:
    put(Ranked, alias, 3, 9, 9, 5)
    with Ranked.receive(2, using=alias) as batch:
        first, second = batch
        second.ack()
        first.cancel()

    assert take(Ranked, alias, 9) == [9, 5, 3]


@each_database
def test_priority_a_send_may_not_name_one_where_the_expression_decides(alias: str) -> None:
    with pytest.raises(InvalidMessage, match=r"priority = 3 is not accepted by testapp.Ranked: its expression decides"):
        Ranked.send({}, priority=3, using=alias)


@each_database
def test_priority_of_64_bits_passes_through_the_stores(alias: str) -> None:
    put(Ranked, alias, 2**62)
    connection = connections[alias]
    sql = queue_sql(Ranked, connection)
    seq = Ranked.objects.using(alias).get().seq
    with transaction.atomic(using=alias):
        row = sql.failures.lock(connection, seq, None, 1000)
        assert row is not None
        insert_poison(alias, "testapp.Ranked", row, "for the test", attempts=1)
        assert sql.failures.remove(connection, [seq]) == 1
    poison = PoisonMessage.objects.using(alias).get()
    assert poison.priority == 2**62

    requeue(PoisonMessage.objects.using(alias).filter(pk=poison.pk))

    assert Ranked.objects.using(alias).get().priority == 2**62


@each_database
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(
                st.just("send"), st.lists(st.integers(LOWEST, HIGHEST) | st.integers(0, 5), min_size=1, max_size=8)
            ),
            st.tuples(st.just("take"), st.integers(1, 6)),
            st.tuples(st.just("return"), st.integers(1, 6)),
        ),
        max_size=25,
    )
)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_priority_order_is_that_of_a_sorted_list(alias: str, steps: list[tuple[str, Any]]) -> None:
    """Whatever is sent, taken and given back in between."""
    Ranked.objects.using(alias).all().delete()
    low_water_marks.forget()
    expected: list[tuple[int, int]] = []
    for verb, of_it in [*steps, ("take", 300)]:
        if verb == "send":
            put(Ranked, alias, *of_it, many=True)
            known = {seq for _, seq in expected}
            rows = Ranked.objects.using(alias).exclude(seq__in=known).values_list("priority", "seq")
            expected = sorted([*expected, *rows], key=lambda item: (-item[0], item[1]))
            continue
        with Ranked.receive(of_it, using=alias) as batch:
            got = [(int(message.raw_body), message) for message in batch]
            assert [(priority, message.seq) for priority, message in got] == expected[:of_it]
            for place, (_, message) in enumerate(got):
                if verb == "take" or place % 2:
                    message.ack()
                    expected.remove((int(message.raw_body), message.seq))
                else:
                    message.cancel()


@each_database
@each_semantics
def test_priority_is_what_the_expression_gives_and_no_number_is_the_lowest(queue: Any, alias: str) -> None:
    for price in (5, 2**40, None, 7.9, "much", 0):
        queue.send({"price": price}, using=alias)
    queue.send_many([{"price": 6}, {"price": 2**63 - 1}], using=alias)

    with queue.receive(10, using=alias) as batch:
        prices = [message.body["price"] for message in batch]
    assert prices[:4] == [2**63 - 1, 2**40, 7.9, 6]
    assert prices[4:] == [5, 0, None, "much"]


@each_database
def test_priority_a_late_commit_is_found_behind_the_floor(alias: str) -> None:
    """A message committed after others above it were claimed: the next look by the last seqs finds it."""
    put(Ranked, alias, *range(50))
    connection = connections[alias]
    sql = queue_sql(Ranked, connection)
    ranked = marks_for(Ranked, alias, (("", 0),), False)
    assert isinstance(ranked, Priority64Marks)
    assert take(Ranked, alias, 5) == [49, 48, 47, 46, 45]
    put(Ranked, alias, 1000)
    ranked.read_to = sql.figures.last_seq(connection)  # as if its seq had been passed while it was not committed

    assert take(Ranked, alias, 2) == [1000, 44]


@each_database
def test_priority_messages_in_flight_are_not_searched_below_the_low_water_mark(alias: str) -> None:
    """What an open transaction has taken is no newcomer to be had; given back, it is found by the next look."""
    put(Ranked, alias, *range(50))
    assert take(Ranked, alias, 5) == [49, 48, 47, 46, 45]
    connection, second_connection = connections[alias], connections[alias].copy()
    sql = queue_sql(Ranked, connection)
    ranked = marks_for(Ranked, alias, (("", 0),), False)
    assert isinstance(ranked, Priority64Marks)
    put(Ranked, alias, 1000, 2000)
    of = dict(Ranked.objects.using(alias).filter(priority__gte=1000).values_list("priority", "seq"))
    try:
        with second_connection.cursor():
            second_connection.set_autocommit(False)
            in_flight = SeqRange(order_key(2000, of[2000]), order_key(2000, of[2000]))
            assert len(sql.claims.claim_by_delete(second_connection, [in_flight], 1)) == 1
        ranked.read_new(sql, connection)
        assert ranked.begin_claim(10).pending == [order_key(1000, of[1000])]
        ranked.rescan(sql, connection)
        assert ranked.begin_claim(10).pending == [order_key(1000, of[1000])]
    finally:
        second_connection.rollback()
        second_connection.close()

    ranked.rescan(sql, connection)
    assert ranked.begin_claim(10).pending == [order_key(2000, of[2000]), order_key(1000, of[1000])]
    assert take(Ranked, alias, 3) == [2000, 1000, 44]


@each_database
def test_priority_a_backlog_of_newcomers_brings_the_floor_down(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("queueapp.receiving.low_water_marks.MAX_PENDING", 20)
    put(Ranked, alias, *range(100), many=True)
    assert take(Ranked, alias, 50) == list(range(99, 49, -1))

    put(Ranked, alias, *range(60, 120), many=True)

    assert take(Ranked, alias, 70) == [*range(119, 59, -1), *range(49, 39, -1)]


@only_on_postgresql
@real_commits
def test_priority_dead_rows_of_an_old_snapshot_are_not_walked_over() -> None:
    """Not from the floor on, and not for a newcomer before it."""
    connection = connections["default"]
    sql = queue_sql(Ranked, connection)
    put(Ranked, "default", *range(0, 20_000 * 7, 7), many=True)
    old = connections.create_connection("default")
    old.ensure_connection()
    try:
        with old.cursor() as cursor:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("SELECT count(*) FROM testapp_ranked WHERE seq < 0")
        ranked = marks_for(Ranked, "default", (("", 0),), False)
        assert isinstance(ranked, Priority64Marks)
        ranked.read_new(sql, connection)
        for _ in range(20):
            taken = ranked.begin_claim(500)
            got = sql.claims.claim_by_delete(connection, taken.ranges, 500)
            ranked.end_claim(taken, got, full=True)
        put(Ranked, "default", 2**60)
        ranked.read_new(sql, connection)
        taken = ranked.begin_claim(10)

        assert [order_key(2**60, Ranked.objects.get(priority=2**60).seq)] == taken.pending
        assert pages_read(sql, connection, taken.ranges) * 5 < pages_read(sql, connection, [SeqRange(0, MAX_ORDER_KEY)])
    finally:
        old.close()


@only_on_postgresql
@real_commits
@pytest.mark.parametrize("rows", [0, 5])
def test_a_claim_by_priority_reads_what_it_takes_where_the_table_is_believed_empty(rows: int) -> None:
    """A vacuum that finds all rows dead and keeps them for an old snapshot has PostgreSQL believe so."""
    connection = connections["default"]
    sql = queue_sql(Ranked, connection)
    put(Ranked, "default", *range(20_000), many=True)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE pg_class SET reltuples = %s, relpages = 480 WHERE relname = 'testapp_ranked'", [rows])
    try:
        assert pages_read(sql, connection, [SeqRange(0, MAX_ORDER_KEY)]) < 60
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE testapp_ranked")


def pages_read(sql: Any, connection: Any, ranges: list[SeqRange]) -> int:
    """Pages that a claim of ten reads, kept from sorting as one is that was slow. It is rolled back."""
    statement = sql.claims.statements[Where.RANGES][1]
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_sort = off; SET LOCAL enable_seqscan = off")
        cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", sql.claims.range_params(ranges, 10))
        found = cursor.fetchone()[0]
        plan = (json.loads(found) if isinstance(found, str) else found)[0]["Plan"]
        transaction.set_rollback(True)
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def test_queues_without_it_claim_by_the_same_statements() -> None:
    """Nothing of a rank or of a barrier is in what plain queues, levels and recipients send, nor among their
    indexes."""
    for queue in (Leased, Urgent, Addressed):
        sql = queue_sql(queue, connections["default"])
        texts = (
            f"{sql.claims.statements} {sql.claims.peeks} {sql.claims.heads}"
            if connections["default"].vendor == "postgresql"
            else ""
        )
        assert not sql.table.priority64
        assert not sql.table.barriers
        assert "is_barrier)" not in texts
        assert "min(b." not in texts
        assert "advisory" not in texts
        assert "# -1" not in texts
        assert not [index.name for index in queue._meta.indexes if index.name.endswith(("_rank", "_barrier"))]


def test_windows_of_the_rescan_grow_behind_a_distant_server_too() -> None:
    ranked = Priority64Marks()
    for _ in range(20):
        ranked.window.advance(1_000_000, ranked.server_time(0.12))

    assert ranked.window.span >= 1_000_000

    for _ in range(20):  # or on a busy machine
        ranked.window.advance(1_000_000, ranked.server_time(1.0))

    assert ranked.window.span == 1_000_000 // 16


def test_windows_of_the_rescan_follow_each_other_up_to_what_was_looked_at() -> None:
    ranked, looked, answers = Priority64Marks(), [], {1: (50_499, WINDOW_ROWS)}
    ranked.read_to, ranked.round_trip = 200_499, 0.0
    ranked.window.position, ranked.window.span = 500, 50_000

    class Statements:
        @property
        def claims(self) -> Any:
            return self

        def scan_order_keys(
            self, connection: Any, low: int, high: int, before: int, limit: int
        ) -> tuple[list[int], int, int]:
            if limit != WINDOW_ROWS:
                return [], 0, 0
            looked.append((low, high))
            return [], *answers.get(len(looked) - 1, (low + 7, WINDOW_ROWS - 1))

    for _ in range(5):
        ranked.rescan_at = 0.0
        ranked.rescan(Statements(), None)
        ranked.window.span = 50_000

    assert looked == [(500, 50_499), (50_500, 100_499), (50_500, 100_499), (100_500, 150_499), (150_500, 200_499)]
    assert not ranked.rescanning

    ranked.read_to = 200_500
    for _ in range(2):
        ranked.rescan_at, ranked.window.span = 0.0, 200_500
        ranked.rescan(Statements(), None)
    assert looked[5:] == [(0, 200_499), (200_500, 200_500)]


def test_a_window_that_two_looked_at_is_passed_once() -> None:
    """A task looks as well, in the same moment."""
    ranked, looked = Priority64Marks(), []
    ranked.read_to = 3_000_000

    class Statements:
        @property
        def claims(self) -> Any:
            return self

        def scan_order_keys(
            self, connection: Any, low: int, high: int, before: int, limit: int
        ) -> tuple[list[int], int, int]:
            if limit == WINDOW_ROWS:
                looked.append((low, high))
                if len(looked) % 2:
                    ranked.rescan(self, None)
            return [], 0, 0

    while not looked or ranked.rescanning:
        ranked.rescan_at = 0.0
        ranked.rescan(Statements(), None)

    windows = looked[::2]
    assert windows == looked[1::2]
    assert [low for low, _ in windows[1:]] == [high + 1 for _, high in windows[:-1]]
    assert windows[-1][1] == 3_000_000


@pytest.mark.django_db
def test_priority_what_arrives_while_the_floor_rises_over_it_is_held() -> None:
    """A claim that began before it was sent ends while it is looked for."""
    connection = connections["default"]
    sql = queue_sql(Ranked, connection)
    ranked = Priority64Marks()
    ranked.read_new(sql, connection)
    ranked.mark = order_key(5, 0)
    put(Ranked, "default", 3)
    scan_order_keys = sql.claims.scan_order_keys

    class RisesMeanwhile:
        @property
        def claims(self) -> Any:
            return self

        def scan_order_keys(self, *arguments: Any) -> Any:
            seen = scan_order_keys(*arguments)
            ranked.mark = max(ranked.mark, order_key(1, 0))
            return seen

    ranked.read_new(RisesMeanwhile(), connection)

    (place,) = ranked.begin_claim(10).pending
    assert split_order_key(place)[0] == split_order_key(order_key(3, 0))[0]


@pytest.mark.django_db
def test_priority_what_a_failed_claim_had_taken_is_next_though_another_one_has_passed_it() -> None:
    connection = connections["default"]
    ranked = Priority64Marks()
    put(Ranked, "default", 9, 5, 4, 3)
    ranked.read_new(queue_sql(Ranked, connection), connection)
    ranked.mark = order_key(10, 0)
    failed, second_claim = ranked.begin_claim(1), ranked.begin_claim(1)
    began = ranked.returns
    passed = order_key(5, 2**62)
    ranked.skip(None, lambda low: passed)

    ranked.end_claim(failed, None, False, failed=True)
    ranked.end_claim(second_claim, [], False)

    assert ranked.mark == order_key(10, 0)
    assert ranked.returns == began + 1, "other processes have passed it as well"
    assert ranked.begin_claim(1).retreats == second_claim.retreats + 1


def test_priority_a_claim_that_began_before_the_mark_retreated_does_not_advance_it() -> None:
    ranked = Priority64Marks()
    ranked.mark = order_key(10, 0)
    before = ranked.begin_claim(1)
    ranked.reset()
    after = ranked.begin_claim(1)
    claimed: list[Any] = [None] * (PRIORITY + 1)
    claimed[SEQ], claimed[PRIORITY] = 1, 5
    rows = [tuple(claimed)]

    ranked.end_claim(before, rows, True)
    assert ranked.mark == 0, "what was returned may lie below what this claim has taken"

    ranked.end_claim(after, rows, True)
    assert ranked.mark == order_key(5, 1) + 1
