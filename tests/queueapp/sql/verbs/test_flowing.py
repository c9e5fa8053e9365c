"""Claims within a limit, permits, and messages that are shared out: the statements."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest
from django.db import connections, transaction

from queueapp.messages import new_id
from queueapp.sql import queue_sql
from queueapp.sql.acks import FENCED, NO_LIMITS, STRICT, SUBLET, LeaseHolder
from queueapp.sql.claims import FOREVER, SEQ, SeqRange
from tests.queueapp.sql.server import Server
from tests.testapp.models import Capped, CappedOnce, CappedTransactional, CappedUrgent, InTurns, InTurnsOnce

ALL = [SeqRange()]


def fill(queue: Any, count: int, alias: str) -> None:
    queue.send_many(({"n": n} for n in range(count)), using=alias)


@pytest.mark.parametrize("queue", [Capped, CappedUrgent])
def test_max_backlog_is_never_exceeded_by_16_claimers(server: Server, queue: Any) -> None:
    """Sixteen connections claim and ack as fast as they can; what is out is looked at in between, in one snapshot
    each."""
    fill(queue, 400, server.alias)
    cap, seen, handled, lock = 7, [0], [0], threading.Lock()
    done = threading.Event()
    ranges = [SeqRange(priority=p) for p in (2, 1, 0)] if queue is CappedUrgent else ALL

    def claimer(number: int) -> None:
        connection, owner = connections[server.alias], new_id()
        sql = queue_sql(queue, connection)
        try:
            while not done.is_set():
                token = new_id()
                got = sql.limits.claim_within(connection, ranges, 1 + number % 5, token, owner, 60_000, cap)
                out = sum(lease.messages for lease in sql.limits.leases(connection))
                with lock:
                    seen[0] = max(seen[0], out)
                if got.rows and sql.acks.ack(connection, [row[SEQ] for row in got.rows], token) != len(got.rows):
                    raise AssertionError("a lease was lost")
                with lock:
                    handled[0] += len(got.rows)
                    if handled[0] >= 400:
                        done.set()
        except BaseException:
            done.set()
            raise
        finally:
            connection.close()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(claimer, range(16)))

    assert handled[0] == 400
    assert 1 < seen[0] <= cap


def test_max_backlog_limits_a_claim_and_states_that_it_did(server: Server) -> None:
    fill(Capped, 10, server.alias)
    connection = connections[server.alias]
    sql = queue_sql(Capped, connection)
    token, owner = new_id(), new_id()

    first = sql.limits.claim_within(connection, ALL, 3, token, owner, 60_000, 5)
    second = sql.limits.claim_within(connection, ALL, 3, token, owner, 60_000, 5)
    third = sql.limits.claim_within(connection, ALL, 3, token, owner, 60_000, 5)

    assert [(len(item.rows), item.at_limit) for item in (first, second)] == [(3, False), (2, True)]
    assert third.rows == []
    assert sql.limits.leases(connection) == [(owner, token, 5)]


def test_max_backlog_does_not_count_an_expired_lease_and_does_not_revive_it(server: Server) -> None:
    fill(Capped, 2, server.alias)
    connection = connections[server.alias]
    sql = queue_sql(Capped, connection)
    token = new_id()
    (row,) = sql.limits.claim_within(connection, ALL, 1, token, new_id(), 1, 1).rows

    while not sql.limits.claim_within(connection, [SeqRange(row[SEQ] + 1)], 1, new_id(), new_id(), 60_000, 1).rows:
        pass

    assert sql.acks.extend(connection, [row[SEQ]], token, 60_000) == []
    with transaction.atomic(using=server.alias):
        assert sql.acks.renew(connection, [row[SEQ]], token, 60_000, 1000) == []
    assert sum(lease.messages for lease in sql.limits.leases(connection)) == 1


def test_max_backlog_in_the_callers_transaction_locks_the_queue_until_its_end(server: Server) -> None:
    fill(Capped, 4, server.alias)
    sql = queue_sql(Capped, connections[server.alias])
    got: list[int] = []

    def later_claimer() -> None:
        connection = connections[server.alias]
        got.append(len(sql.limits.claim_within(connection, ALL, 4, new_id(), new_id(), 60_000, 3).rows))
        connection.close()

    thread = threading.Thread(target=later_claimer)
    with transaction.atomic(using=server.alias):
        assert len(sql.limits.claim_within(connections[server.alias], ALL, 2, new_id(), new_id(), 60_000, 3).rows) == 2
        thread.start()
        thread.join(0.3)
        assert got == []
    thread.join(30)
    assert got == [1]


def test_what_is_shared_out_is_counted_by_the_index_on_a_table_that_was_never_analyzed(server: Server) -> None:
    if server.alias != "default" or connections["default"].vendor != "postgresql":
        pytest.skip("EXPLAIN of PostgreSQL")
    fill(InTurns, 20_000, server.alias)
    connection = connections[server.alias]
    sql: Any = queue_sql(InTurns, connection)
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN SELECT count(*) FROM {sql.limits._q} WHERE {sql.limits._out()}")
        plan = "\n".join(line for (line,) in cursor.fetchall())
    assert "_leased" in plan
    assert "Seq Scan" not in plan


def test_acks_where_messages_are_shared_out_seek_their_own_messages_and_do_not_walk_over_all_that_is_out(
    server: Server,
) -> None:
    if server.alias != "default" or connections["default"].vendor != "postgresql":
        pytest.skip("statistics of PostgreSQL")
    fill(InTurns, 3_000, server.alias)
    connection, token = connections[server.alias], new_id()
    sql: Any = queue_sql(InTurns, connection)
    with connection.cursor() as cursor:
        cursor.execute(
            f"ANALYZE {sql.limits._q}"
        )  # while nothing is leased, so that the index on leases is empty to the planner
    sql.limits.claim_within(connection, ALL, 2_000, new_id(), new_id(), 60_000, 10_000)
    seqs = [row[SEQ] for row in sql.limits.claim_within(connection, ALL, 500, token, new_id(), 60_000, 10_000).rows]

    def read_of_leases() -> int:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_stat_force_next_flush()")
            cursor.execute(
                "SELECT pg_stat_get_xact_tuples_returned(%s::regclass) + pg_stat_get_tuples_returned(%s::regclass)",
                2 * (sql.table.lease_index,),
            )
            return int(cursor.fetchone()[0])

    before = read_of_leases()
    assert len(sql.acks.extend(connection, seqs[:200], token, 60_000)) == 200
    assert sql.acks.release(connection, seqs[:200], token, cancelled=False) == 200
    assert sql.acks.ack(connection, seqs[200:], token) == 300
    assert read_of_leases() - before == 0


def test_at_most_once_is_sent_for_ever(server: Server) -> None:
    fill(CappedOnce, 1, server.alias)
    connection = connections[server.alias]
    sql = queue_sql(CappedOnce, connection)

    sql.limits.claim_within(connection, ALL, 1, new_id(), new_id(), None, 3)

    until = CappedOnce.objects.using(server.alias).get().lease_expires
    assert until is not None
    assert datetime(9000, 1, 1, tzinfo=UTC) < until <= FOREVER


def test_at_most_once_of_a_dead_subscriber_is_deleted_and_not_given_back(server: Server) -> None:
    fill(InTurnsOnce, 5, server.alias)
    connection = connections[server.alias]
    sql = queue_sql(InTurnsOnce, connection)
    dead = new_id()
    sql.limits.claim_within(connection, ALL, 3, new_id(), dead, None, 3)
    with transaction.atomic(using=server.alias):
        heads = sql.limits.lock_heads(connection, ALL, 1, bodies=False)
        sql.limits.share_out(connection, [heads[0][SEQ]], [dead], 60_000)

    assert sql.limits.delete_in_flight(connection, dead, 100) == 3
    assert sql.maintenance.release_owner(connection, dead, 100, started=False) == 1

    assert [row.deliveries for row in InTurnsOnce.objects.using(server.alias).order_by("seq")] == [0, 0]


def test_permits_are_places_of_the_queue_that_a_transaction_frees(server: Server) -> None:
    sql = queue_sql(CappedTransactional, connections[server.alias])
    free, taken, release = [0], threading.Event(), threading.Event()

    def later_claimer() -> None:
        connection = connections[server.alias]
        with transaction.atomic(using=server.alias):
            free[0] = sql.limits.take_permits(connection, 3, 2)
            taken.set()
            release.wait(30)
        connection.close()

    thread = threading.Thread(target=later_claimer)
    thread.start()
    assert taken.wait(30)
    with transaction.atomic(using=server.alias):
        assert sql.limits.take_permits(connections[server.alias], 3, 5) == 1
        assert sql.limits.take_permits(connections[server.alias], 3, 1, more=True) == 0
    release.set()
    thread.join(30)
    with transaction.atomic(using=server.alias):
        assert (free[0], sql.limits.take_permits(connections[server.alias], 3, 5)) == (2, 3)


def test_what_is_shared_out_is_taken_up_by_its_subscriber_once(server: Server) -> None:
    fill(InTurns, 4, server.alias)
    connection = connections[server.alias]
    sql = queue_sql(InTurns, connection)
    first, second = new_id(), new_id()
    with transaction.atomic(using=server.alias):
        sql.limits.lock(connection)
        heads = sql.limits.lock_heads(connection, ALL, 10, bodies=True)
        sql.limits.share_out(connection, [row[SEQ] for row in heads], [first, second, first, second], 60_000)
    seqs = [row[SEQ] for row in heads]

    assert sql.limits.count_shared_out(connection, first) == 2
    token = uuid.uuid4()
    taken = sql.limits.take_up(connection, first, 1, token, 60_000) + sql.limits.take_up(
        connection, first, 5, token, 60_000
    )

    assert [row[SEQ] for row in taken] == [seqs[0], seqs[2]]
    assert [row[4] for row in taken] == [1, 1]  # counted as deliveries now
    assert sql.limits.take_up(connection, first, 5, token, 60_000) == []
    assert sql.acks.ack(connection, [seqs[0], seqs[2]], token) == 2


@pytest.mark.parametrize("leasing", [SUBLET, STRICT, FENCED])
def test_what_is_shared_out_and_not_taken_up_is_not_given_back_by_name(server: Server, leasing: str) -> None:
    """It has no owner: there is no delivery to cancel, and no cancel to count."""
    fill(InTurns, 2, server.alias)
    connection, item = connections[server.alias], new_id()
    sql = queue_sql(InTurns, connection)
    with transaction.atomic(using=server.alias):
        seqs = [row[SEQ] for row in sql.limits.lock_heads(connection, ALL, 2, bodies=False)]
        sql.limits.share_out(connection, seqs, [item, item], 60_000)
    holder = LeaseHolder(leasing, item)
    assert sql.ack_by_seq.cancel(connection, seqs, holder, NO_LIMITS) == []
    assert sql.ack_by_seq.extend(connection, seqs, holder, 1_000) == []
    token = new_id()
    (taken,) = sql.limits.take_up(connection, item, 1, token, 60_000)
    assert sql.ack_by_seq.cancel(connection, seqs, LeaseHolder(leasing, token), NO_LIMITS) == [taken[SEQ]]
    assert list(InTurns.objects.using(server.alias).order_by("seq").values_list("cancels", flat=True)) == [1, 0]
