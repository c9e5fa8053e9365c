"""Maintenance: expired messages, purges, the leases of dead workers; small batches that skip locked rows."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from queueapp.sql import queue_sql
from tests.queueapp.sql.server import ALL, Server, levels, outgoing, within
from tests.testapp.models import AddressedUrgent, Leased, Transactional


def test_purge_of_expired_messages_takes_only_those(server: Server) -> None:
    kept = server.put(Leased, 2) + server.put(Leased, 2, expires_ms=3_600_000)
    gone = server.put(Leased, 5, expires_ms=1)
    ids = {server.row(Leased, seq).id for seq in gone}
    server.passed(lambda: server.row(Leased, gone[-1]).expires)
    sql = server.sql(Leased)

    first, second = (
        sql.maintenance.purge_expired(server.connection, 3),
        sql.maintenance.purge_expired(server.connection, 10),
    )
    assert (len(first), len(second)) == (3, 2)
    assert {*first, *second} == ids
    assert sql.maintenance.purge_expired(server.connection, 10) == []
    assert server.seqs(Leased) == kept


def test_expired_message_that_is_leased_may_still_be_acked(server: Server) -> None:
    (seq,) = server.put(Leased, expires_ms=300)
    token, leased = server.lease(Leased)
    server.passed(lambda: server.row(Leased, seq).expires)

    assert leased == [seq], "the machine was too slow: it expired before it was leased"
    assert server.sql(Leased).maintenance.purge_expired(server.connection, 10) == []
    assert server.sql(Leased).acks.ack(server.connection, leased, token) == 1


def test_expired_message_whose_lease_expired_is_purged(server: Server) -> None:
    (seq,) = server.put(Leased, expires_ms=300)
    server.lease(Leased, lease_ms=1)
    server.passed(lambda: server.row(Leased, seq).expires)

    assert len(server.sql(Leased).maintenance.purge_expired(server.connection, 10)) == 1


@pytest.mark.parametrize("purge", ["purge", "purge_expired"])
def test_purge_does_not_wait_for_a_message_that_is_held(server: Server, purge: str) -> None:
    seqs = server.put(Transactional, 3, expires_ms=1_000)
    holder = server.another()

    with server.transaction(holder):
        assert queue_sql(Transactional, holder).failures.lock(holder, seqs[1], None, 1_000) is not None
        server.passed(lambda: server.row(Transactional, seqs[2]).expires)
        with within():
            done = getattr(server.sql(Transactional).maintenance, purge)(server.connection, 10)
            assert (done if purge == "purge" else len(done)) == 2

    assert server.seqs(Transactional) == seqs[1:2]


def test_purge_empties_from_the_head_and_leaves_what_is_leased(server: Server) -> None:
    seqs = server.put(Leased, 5)
    _, leased = server.lease(Leased, 1)
    sql = server.sql(Leased)

    assert sql.maintenance.purge(server.connection, 2) == 2
    assert server.seqs(Leased) == leased + seqs[3:]
    assert sql.maintenance.purge(server.connection, 100) == 2
    assert server.seqs(Leased) == leased


def test_purge_of_more_than_one_batch(server: Server) -> None:
    server.sql(Leased).inserts.insert_many(server.connection, (outgoing(None) for _ in range(4_000)))

    assert server.sql(Leased).maintenance.purge(server.connection, 3_800) == 3_800
    assert len(server.seqs(Leased)) == 200


@pytest.mark.parametrize(("queue", "ranges"), [(Leased, ALL), (AddressedUrgent, levels(3))])
@pytest.mark.parametrize(("started", "deliveries"), [(True, 1), (False, 0)])
def test_leases_of_the_dead_are_released(
    server: Server, queue: Any, ranges: Any, started: bool, deliveries: int
) -> None:
    seqs = server.put(queue, 5)
    dead, alive = uuid.uuid4(), uuid.uuid4()
    stale, _ = server.lease(queue, 3, owner=dead, ranges=ranges)
    server.lease(queue, 1, owner=alive, ranges=ranges)
    sql = server.sql(queue)

    assert sql.maintenance.release_owner(server.connection, dead, 2, started=started) == 2
    assert sql.maintenance.release_owner(server.connection, dead, 10, started=started) == 1
    assert sql.maintenance.release_owner(server.connection, dead, 10, started=started) == 0

    assert [row.deliveries for row in server.rows(queue)] == [deliveries] * 3 + [1, 0]
    assert server.row(queue, seqs[3]).lease_owner == alive
    assert sql.acks.ack(server.connection, seqs, stale) == 0
    assert server.lease(queue, ranges=ranges)[1] == [*seqs[:3], seqs[4]]


def test_counts_are_right_when_the_session_counts_nothing(server: Server) -> None:
    # SQL Server: ``SET NOCOUNT ON``, or the server's default, turns every row count of the driver into -1.
    if server.vendor == "microsoft":
        server.run("SET NOCOUNT ON")
    seqs = server.put(Leased, 4)
    sql = server.sql(Leased)
    token, _ = server.lease(Leased, 2)

    assert sql.inserts.insert_many(server.connection, [outgoing()]) == 1
    assert sql.acks.ack(server.connection, seqs, token) == 2
    assert sql.maintenance.purge(server.connection, 2) == 2
    if server.vendor == "microsoft":
        server.run("SET NOCOUNT OFF")
    assert sql.maintenance.purge(server.connection, 2) == 1


def test_empty_means_no_message_at_all(server: Server) -> None:
    sql = server.sql(Leased)
    assert sql.maintenance.is_empty(server.connection) is True

    (seq,) = server.put(Leased, expires_ms=1)
    server.passed(lambda: server.row(Leased, seq).expires)
    assert sql.maintenance.is_empty(server.connection) is False, "expired is not gone"
    sql.maintenance.purge_expired(server.connection, 1)
    assert sql.maintenance.is_empty(server.connection) is True

    server.put(Leased)
    server.lease(Leased)
    assert sql.maintenance.is_empty(server.connection) is False, "leased is not gone"


@pytest.mark.parametrize("taken", [0, 1])
def test_queue_whose_message_is_being_handled_is_not_empty(server: Server, taken: int) -> None:
    seqs = server.put(Transactional, 1)
    holder = server.another()

    with server.transaction(holder):
        sql = queue_sql(Transactional, holder)
        if taken:
            assert len(sql.claims.claim_by_delete(holder, ALL, 1)) == 1
        else:
            assert sql.failures.lock(holder, seqs[0], None, 1_000) is not None
        with within():
            assert server.sql(Transactional).maintenance.is_empty(server.connection) is False

    assert server.sql(Transactional).maintenance.is_empty(server.connection) is bool(taken)
