"""Ending a lease: only under its token, only its own messages, and exactly as many as it says."""

from __future__ import annotations

import uuid
from datetime import timedelta

from queueapp.sql import queue_sql
from tests.queueapp.sql.server import Server, levels, outgoing
from tests.testapp.models import AddressedUrgent, Leased


def test_ack_removes_what_is_leased_under_the_token(server: Server) -> None:
    seqs = server.put(Leased, 4)
    token, leased = server.lease(Leased, 3)

    assert server.sql(Leased).acks.ack(server.connection, leased[:2], token) == 2

    assert server.seqs(Leased) == seqs[2:]
    assert server.sql(Leased).acks.ack(server.connection, leased, token) == 1


def test_ack_with_another_token_removes_nothing(server: Server) -> None:
    seqs = server.put(Leased, 2)
    server.lease(Leased)

    assert server.sql(Leased).acks.ack(server.connection, seqs, uuid.uuid4()) == 0
    assert server.seqs(Leased) == seqs


def test_ack_of_a_message_that_is_not_leased_removes_nothing(server: Server) -> None:
    seqs = server.put(Leased, 2)
    token, leased = server.lease(Leased, 1)

    assert server.sql(Leased).acks.ack(server.connection, seqs, token) == 1
    assert server.seqs(Leased) == [seq for seq in seqs if seq not in leased]


def test_ack_after_the_lease_expired_counts_while_the_message_was_not_taken_over(server: Server) -> None:
    (seq,) = server.put(Leased)
    token, _ = server.lease(Leased, lease_ms=1)
    server.passed(lambda: server.row(Leased, seq).lease_expires)

    assert server.sql(Leased).acks.ack(server.connection, [seq], token) == 1


def test_ack_of_a_lease_that_another_owner_has_now_is_refused(server: Server) -> None:
    (seq,) = server.put(Leased)
    stale, _ = server.lease(Leased, lease_ms=1)
    server.passed(lambda: server.row(Leased, seq).lease_expires)
    fresh, again = server.lease(Leased)

    assert again == [seq]
    assert server.sql(Leased).acks.ack(server.connection, [seq], stale) == 0
    assert server.sql(Leased).acks.extend(server.connection, [seq], stale, 1_000) == []
    assert server.sql(Leased).acks.release(server.connection, [seq], stale, cancelled=True) == 0
    assert server.row(Leased, seq).lease_token == fresh
    assert server.sql(Leased).acks.ack(server.connection, [seq], fresh) == 1


def test_largest_batch_is_one_ack(server: Server) -> None:
    server.sql(Leased).inserts.insert_many(server.connection, (outgoing(None) for _ in range(3_500)))
    token, leased = server.lease(Leased, 3_500)

    assert len(leased) == 3_500
    assert server.sql(Leased).acks.ack(server.connection, leased, token) == 3_500
    assert server.seqs(Leased) == []


def test_no_seqs_are_no_messages(server: Server) -> None:
    server.put(Leased)
    token, _ = server.lease(Leased)

    assert server.sql(Leased).acks.ack(server.connection, [], token) == 0
    assert server.sql(Leased).acks.release(server.connection, [], token, cancelled=False) == 0
    assert server.sql(Leased).acks.extend(server.connection, [], token, 1_000) == []
    assert server.sql(Leased).failures.remove(server.connection, []) == 0


def test_what_was_handled_and_given_back_counts_as_a_cancel(server: Server) -> None:
    (seq,) = server.put(Leased)
    token, _ = server.lease(Leased)

    assert server.sql(Leased).acks.release(server.connection, [seq], token, cancelled=True) == 1

    row = server.row(Leased, seq)
    assert (row.deliveries, row.cancels) == (1, 1)
    assert (row.lease_token, row.lease_owner, row.lease_expires) == (None, None, None)
    assert server.lease(Leased)[1] == [seq]


def test_what_was_never_started_and_given_back_was_not_delivered(server: Server) -> None:
    seqs = server.put(AddressedUrgent, 3, priority=1)
    token, leased = server.lease(AddressedUrgent, 2, ranges=levels(3))

    assert server.sql(AddressedUrgent).acks.release(server.connection, leased, token, cancelled=False) == 2

    assert [(row.deliveries, row.cancels) for row in server.rows(AddressedUrgent)] == [(0, 0)] * 3
    assert server.lease(AddressedUrgent, ranges=levels(3))[1] == seqs


def test_message_that_was_given_back_keeps_its_place(server: Server) -> None:
    seqs = server.put(Leased, 3)
    token, leased = server.lease(Leased, 1)
    server.sql(Leased).acks.release(server.connection, leased, token, cancelled=True)

    assert server.lease(Leased, 1)[1] == seqs[:1]


def test_extend_lengthens_what_is_still_ours_and_states_which(server: Server) -> None:
    seqs = server.put(Leased, 4)
    token, leased = server.lease(Leased, 3, lease_ms=60_000)
    server.sql(Leased).acks.ack(server.connection, leased[:1], token)

    assert server.sql(Leased).acks.extend(server.connection, seqs, token, 3_600_000) == leased[1:]

    remaining = server.row(Leased, leased[1]).lease_expires - server.backend.now(server.connection)
    assert timedelta(minutes=59) < remaining <= timedelta(hours=1)
    assert server.row(Leased, seqs[3]).lease_expires is None


def test_extend_may_shorten(server: Server) -> None:
    (seq,) = server.put(Leased)
    token, _ = server.lease(Leased, lease_ms=3_600_000)

    assert server.sql(Leased).acks.extend(server.connection, [seq], token, 1) == [seq]
    server.passed(lambda: server.row(Leased, seq).lease_expires)
    assert server.lease(Leased)[1] == [seq]


def test_two_tokens_end_their_own_at_the_same_time(server: Server) -> None:
    seqs = server.put(Leased, 4)
    first, item = server.lease(Leased, 2)
    second, two = server.lease(Leased, 2)
    a, b = server.another(), server.another()

    with server.transaction(a), server.transaction(b):
        assert queue_sql(Leased, a).acks.ack(a, item, first) == 2
        assert queue_sql(Leased, b).acks.ack(b, two, second) == 2

    assert item + two == seqs
    assert server.seqs(Leased) == []
