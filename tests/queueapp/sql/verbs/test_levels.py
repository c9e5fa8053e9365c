"""Priorities that no claim looks for: moved to the nearest level, bounded, without waiting, and without a scan."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from django.db import connections, transaction

from queueapp.messages import new_id
from queueapp.models import DelayedMessage, PoisonMessage
from queueapp.sql import queue_sql
from queueapp.sql.message_columns import Row
from queueapp.sql.tables import StoreTable
from tests.queueapp.sql.server import Server, levels, outgoing, within
from tests.testapp.models import Addressed, AddressedUrgent, Leased, Urgent

LEVELED = [Urgent, AddressedUrgent]


def priorities(server: Server, queue: Any) -> list[int]:
    return [row.priority for row in server.rows(queue)]


@pytest.mark.parametrize("queue", LEVELED)
def test_priorities_beyond_either_end_get_the_nearest_level(server: Server, queue: Any) -> None:
    for priority in (-(2**15), -1, 0, 1, 2, 3, 2**15 - 1):
        server.put(queue, priority=priority)
    sql = server.sql(queue)

    moved = sql.maintenance.clamp_priorities(server.connection, [""], 100)

    assert moved == {-(2**15): 1, -1: 1, 3: 1, 2**15 - 1: 1}
    assert priorities(server, queue) == [0, 0, 0, 1, 2, 2, 2]
    assert sql.maintenance.clamp_priorities(server.connection, [""], 100) == {}


@pytest.mark.parametrize("queue", LEVELED)
def test_no_more_are_moved_than_asked_for_and_they_keep_their_places(server: Server, queue: Any) -> None:
    seqs = server.put(queue, 3, priority=9) + server.put(queue, 3, priority=-2)
    sql = server.sql(queue)

    assert sql.maintenance.clamp_priorities(server.connection, [""], 2) == {9: 2}
    assert sql.maintenance.clamp_priorities(server.connection, [""], 2) == {9: 1, -2: 1}
    assert sql.maintenance.clamp_priorities(server.connection, [""], 2) == {-2: 2}

    assert server.seqs(queue) == seqs
    assert server.lease(queue, ranges=levels(3))[1] == seqs


def test_only_messages_of_the_recipients_named_are_moved(server: Server) -> None:
    for name in ("", "one", "two"):
        server.put(AddressedUrgent, recipient=name, priority=7)
    sql = server.sql(AddressedUrgent)

    assert sql.maintenance.clamp_priorities(server.connection, ["", "two"], 100) == {7: 2}
    assert priorities(server, AddressedUrgent) == [2, 7, 2]


@pytest.mark.parametrize("queue", [Leased, Addressed])
def test_a_queue_without_levels_is_left_as_it_is(server: Server, queue: Any) -> None:
    server.put(queue, priority=9)

    assert server.sql(queue).maintenance.clamp_priorities(server.connection, [""], 100) == {}
    assert priorities(server, queue) == [9]


@pytest.mark.parametrize("queue", LEVELED)
def test_what_is_leased_or_locked_or_expired_is_passed_over(server: Server, queue: Any) -> None:
    leased, locked, over, _free = server.put(queue, 4)
    server.sql(queue).claims.claim_by_lease(server.connection, levels(3), 1, uuid.uuid4(), uuid.uuid4(), 60_000)
    rows = queue.objects.using(server.alias)
    rows.update(priority=9)
    rows.filter(seq=over).update(expires="2020-01-01T00:00:00Z")
    holder = server.another()

    with server.transaction(holder), within():
        assert queue_sql(queue, holder).failures.lock(holder, locked, None, 1_000) is not None
        assert server.sql(queue).maintenance.clamp_priorities(server.connection, [""], 100) == {9: 1}

    assert priorities(server, queue) == [9, 9, 9, 2]
    assert server.row(queue, leased).lease_token is not None


def test_a_rollback_takes_it_back(server: Server) -> None:
    server.put(Urgent, priority=9)

    with transaction.atomic(using=server.alias):
        assert server.sql(Urgent).maintenance.clamp_priorities(connections[server.alias], [""], 100) == {9: 1}
        transaction.set_rollback(True, using=server.alias)

    assert priorities(server, Urgent) == [9]


@pytest.mark.parametrize("queue", LEVELED)
def test_however_many_wait_in_the_levels_none_of_them_is_looked_at(server: Server, queue: Any) -> None:
    if server.vendor != "postgresql":
        pytest.skip("reads PostgreSQL's statistics")
    server.sql(queue).inserts.insert_many(server.connection, (outgoing(priority=n % 3) for n in range(6_000)))
    server.put(queue, priority=9)
    server.run(f"ANALYZE {queue._meta.db_table}")

    def read() -> tuple[int, int]:
        """(rows that sequential scans have read, rows that index scans have found) of this session, lately."""
        ((by_scan, by_index),) = server.run(
            "SELECT seq_tup_read, idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = %s", queue._meta.db_table
        )
        return by_scan, by_index

    with transaction.atomic(using=server.alias):  # in which nothing of it is reported and set back
        before = read()
        assert server.sql(queue).maintenance.clamp_priorities(server.connection, ["", "a", "b"], 100) == {9: 1}
        after = read()

    assert after[0] == before[0]
    assert after[1] - before[1] < 10


@pytest.mark.parametrize("queue", LEVELED)
@pytest.mark.parametrize(("given", "stored"), [(-300, 0), (1, 1), (9, 2)])
def test_a_message_from_elsewhere_gets_the_nearest_level(server: Server, queue: Any, given: int, stored: int) -> None:
    sql = server.sql(queue)
    sql.inserts.insert_row(server.connection, Row(0, new_id(), "{}", None, priority=given))
    delayed = StoreTable.of(DelayedMessage, "due")
    number = server.backend.delayed.store(server.connection, delayed, queue._meta.label, outgoing(priority=given), 0)
    sql.inserts.insert_from(server.connection, delayed, [number])
    poison = StoreTable.of(PoisonMessage, "number")
    row = PoisonMessage.objects.using(server.alias).create(
        queue=queue._meta.label, reason="r", message_id=uuid.uuid4(), headers="{}", priority=given
    )
    sql.inserts.insert_from(server.connection, poison, [row.number], reset_counts=True)

    assert priorities(server, queue) == [stored] * 3


def test_a_queue_without_levels_keeps_the_priority_of_a_message_from_elsewhere(server: Server) -> None:
    server.sql(Leased).inserts.insert_row(server.connection, Row(0, new_id(), "{}", None, priority=9))

    assert priorities(server, Leased) == [9]
