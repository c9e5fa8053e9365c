"""A table that was just filled, and that is not analyzed yet: the first claim does not read all of it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection

from queueapp.sql import queue_sql
from queueapp.sql.claims import MAX_SEQ, SeqRange
from tests.in_process_worker import real_commits
from tests.queueapp.sql.drivers.test_index_order import FEW, MESSAGES, rows_read
from tests.testapp.models import AtMostOnce, Leased, Transactional

pytestmark = [
    real_commits,
    pytest.mark.skipif(connection.vendor != "postgresql", reason="SQL Server has a hint for the index"),
]


def lease(sql: Any, ranges: list[SeqRange]) -> list[Any]:
    return list(sql.claims.claim_by_lease(connection, ranges, FEW, uuid.uuid4(), uuid.uuid4(), 1000))


VERBS: dict[str, tuple[Any, Callable[[Any, list[SeqRange]], Any]]] = {
    "peek": (Leased, lambda sql, ranges: sql.claims.peek(connection, ranges, [], FEW)),
    "claim by lease": (Leased, lease),
    "claim by delete": (Transactional, lambda sql, ranges: sql.claims.claim_by_delete(connection, ranges, FEW)),
    "claim of whole messages": (
        AtMostOnce,
        lambda sql, ranges: sql.claims.claim_by_delete(connection, ranges, FEW, True),
    ),
}


@pytest.fixture(params=VERBS)
def run(request: pytest.FixtureRequest) -> Callable[[list[SeqRange]], Any]:
    """A verb of a queue that was filled by one statement since it was made."""
    queue, verb = VERBS[request.param]
    sql = fill(queue)
    return lambda ranges: verb(sql, ranges)


def fill(queue: Any, messages: int = MESSAGES) -> Any:
    table = connection.ops.quote_name(queue._meta.db_table)
    with connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE {table}")
        cursor.execute("DELETE FROM pg_statistic WHERE starelid = %s::regclass", [table])
    queue.send_many(range(messages))
    with connection.cursor() as cursor:
        # As it is until autovacuum comes by, which it may have done this very moment.
        cursor.execute("DELETE FROM pg_statistic WHERE starelid = %s::regclass", [table])
        cursor.execute("UPDATE pg_class SET reltuples = -1, relpages = 0 WHERE oid = %s::regclass", [table])
    sql = queue_sql(queue, connection)
    sql.guard.sorting.clear()
    return sql


def test_the_first_claim_after_a_bulk_load_reads_what_it_takes(run: Callable[[list[SeqRange]], Any]) -> None:
    for low in (0, 1, MESSAGES // 2):
        assert rows_read(lambda low=low: run([SeqRange(low)])) <= 10 * FEW  # type: ignore[misc]


def test_a_range_with_an_end_ends_there(run: Callable[[list[SeqRange]], Any]) -> None:
    queues: tuple[Any, ...] = (Leased, Transactional, AtMostOnce)  # one of which was filled
    (low,) = (seq for queue in queues for seq in queue.objects.order_by("seq").values_list("seq", flat=True)[:1])
    got = run([SeqRange(low, low + 2)])
    assert (got.ahead if hasattr(got, "ahead") else len(got)) == 3
    got = run([SeqRange(low + 3, MAX_SEQ)])
    assert (got.ahead if hasattr(got, "ahead") else len(got)) == FEW


def test_scan_past_unroutable_messages_reads_only_what_it_returns() -> None:
    # So many that a sort of all of them costs more than a walk over what is asked for, whatever is believed of the
    # order.
    sql, many = fill(Leased, 15 * MESSAGES), 150 * FEW
    seqs = list(Leased.objects.order_by("seq").values_list("seq", flat=True)[:6])

    read = rows_read(lambda: sql.claims.read_heads(connection, SeqRange(seqs[3]), many))
    heads = sql.claims.read_heads(connection, SeqRange(seqs[3], seqs[5]), many)

    assert read <= 2 * many
    assert [seq for seq, _ in heads] == seqs[3:6]
