"""What others insert into a queue with expressions is held; what we insert, on any path, is not."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from queueapp.messages import new_id
from queueapp.models import DelayedMessage
from queueapp.sql.message_columns import Row
from queueapp.sql.tables import StoreTable
from tests.queueapp.sql.server import ALL, Server, outgoing
from tests.testapp.models import Filtered

TABLE = Filtered._meta.db_table


def insert(server: Server, *bodies: bytes) -> list[int]:
    """As a producer that knows nothing of us; returns the seqs."""
    with server.connection.cursor() as cursor:
        for body in bodies:
            sql = f"INSERT INTO {TABLE} (id, headers, body) VALUES (%s, %s, %s)"
            cursor.execute(sql, [str(uuid.uuid4()), "{}", body])
    return sorted(Filtered.objects.using(server.alias).values_list("pk", flat=True))


def test_a_foreign_row_is_held(server: Server) -> None:
    seqs, sql = insert(server, b"1", b"2", b"3"), server.sql(Filtered)

    assert sql.unevaluated.count(server.connection, 10) == 3
    assert sql.unevaluated.count(server.connection, 2) == 2
    assert sql.claims.claim_by_delete(server.connection, ALL, 10) == []
    assert sql.claims.claim_by_lease(server.connection, ALL, 10, new_id(), new_id(), 1000) == []
    assert sql.claims.peek(server.connection, ALL, [], 10).ahead == 0
    head = sql.figures.head(server.connection, 10)
    assert (head.rows, head.waiting, head.leased, head.lease_expired, head.expired) == (3, 0, 0, 0, 0)
    assert sql.figures.last_seq(server.connection) == seqs[-1]


def test_what_is_held_is_locked_whole_and_freed_once(server: Server) -> None:
    seqs, sql = insert(server, b"1", b"\x00\xff"), server.sql(Filtered)

    first, second = sql.unevaluated.lock(server.connection, 10)

    assert (first.seq, second.seq, second.headers, second.body) == (*seqs, "{}", b"\x00\xff")
    assert second.id == Filtered.objects.using(server.alias).get(pk=seqs[1]).id
    assert sql.unevaluated.release(server.connection, seqs, None, None) == 2
    assert sql.unevaluated.release(server.connection, seqs, None, None) == 0
    assert [row[0] for row in sql.claims.claim_by_delete(server.connection, ALL, 10)] == seqs


def test_what_is_freed_has_its_priority_and_is_a_barrier_or_not(server: Server) -> None:
    seqs, sql = insert(server, b"1", b"2"), server.sql(Filtered)

    assert sql.unevaluated.release(server.connection, seqs, [7, 0], [False, True]) == 2

    rows = Filtered.objects.using(server.alias).order_by("seq")
    assert [(row.priority, row.is_barrier, row.lease_expires) for row in rows] == [(7, False, None), (0, True, None)]


def test_a_lease_is_neither_held_nor_freed(server: Server) -> None:
    sql, token = server.sql(Filtered), new_id()
    sql.inserts.insert(server.connection, outgoing())
    (claimed,) = sql.claims.claim_by_lease(server.connection, ALL, 1, token, new_id(), 60_000)

    assert sql.unevaluated.lock(server.connection, 10) == []
    assert sql.unevaluated.release(server.connection, [claimed[0]], None, None) == 0
    assert sql.acks.ack(server.connection, [claimed[0]], token) == 1


def test_what_ends_leases_leaves_it_held_and_a_purge_takes_it(server: Server) -> None:
    insert(server, b"1", b"2")
    sql = server.sql(Filtered)

    assert sql.maintenance.release_owner(server.connection, uuid.uuid4(), 10) == 0
    assert sql.maintenance.purge_expired(server.connection, 10) == []
    assert sql.unevaluated.count(server.connection, 10) == 2
    assert sql.maintenance.purge(server.connection, 10) == 2


def _dispatch(sql: Any, server: Server) -> None:
    store = StoreTable.of(DelayedMessage, "due")
    key = server.backend.delayed.store(server.connection, store, "d", outgoing(), 0)
    sql.inserts.insert_from(server.connection, store, [key])


@pytest.mark.parametrize(
    "store",
    [
        lambda sql, server: sql.inserts.insert(server.connection, outgoing()),
        lambda sql, server: sql.inserts.insert(server.connection, outgoing(expires_ms=10**6, correlation_id="c")),
        lambda sql, server: sql.inserts.insert_many(server.connection, [outgoing(), outgoing(expires_ms=10**6)]),
        lambda sql, server: sql.inserts.insert_row(server.connection, Row(0, new_id(), "{}", None)),
        lambda sql, server: sql.inserts.insert_rows(server.connection, [Row(0, new_id(), "{}", b"1")] * 2),
        _dispatch,
    ],
    ids=["insert", "insert with more", "insert many", "insert row", "insert rows", "dispatch"],
)
def test_what_we_insert_is_not_held(server: Server, store: Any) -> None:
    sql = server.sql(Filtered)
    store(sql, server)
    assert sql.unevaluated.count(server.connection, 10) == 0
    assert sql.claims.claim_by_delete(server.connection, ALL, 10)


def test_what_is_held_is_found_by_its_index_behind_a_backlog(server: Server) -> None:
    if server.vendor != "postgresql":
        pytest.skip("reads the plans of PostgreSQL; a SQL Server's are looked at by tests of its own")
    sql = server.sql(Filtered)
    sql.inserts.insert_many(server.connection, (outgoing() for _ in range(5_000)))
    insert(server, b"1")
    with server.connection.cursor() as cursor:
        cursor.execute(
            "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = %s AND indexname LIKE '%%held'", [TABLE]
        )
        ((name, definition),) = cursor.fetchall()
        assert "lease_token IS NULL" in definition
        held = "(lease_expires = '9998-12-31T00:00:00+00:00'::timestamptz AND lease_token IS NULL)"
        cursor.execute(f"EXPLAIN SELECT seq FROM {TABLE} WHERE {held} ORDER BY seq LIMIT 500 FOR UPDATE SKIP LOCKED")
        assert name in "\n".join(line for (line,) in cursor.fetchall())
