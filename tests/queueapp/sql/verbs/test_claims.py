"""Claims: the lowest available messages in claim order, never those of another owner, and never by waiting for a
lock."""

from __future__ import annotations

import threading
import uuid
from datetime import timedelta
from typing import Any

import pytest

from queueapp.sql import queue_sql
from queueapp.sql.claims import DELIVERIES, EXPIRES, ID, MAX_SEQ, PRIORITY, RECIPIENT, SeqRange
from tests.queueapp.sql.server import ALL, Server, levels, outgoing, seqs_of, within
from tests.testapp.models import Addressed, AddressedUrgent, Leased, Transactional, Urgent

QUEUES = [Leased, Urgent, Addressed, AddressedUrgent]
#: Every level that the tests use, in claim order, for each queue.
EVERYWHERE = {Leased: ALL, Urgent: levels(3), Addressed: levels(1), AddressedUrgent: levels(3)}


def take(server: Server, connection: Any, queue: Any, limit: int, **options: Any) -> list[int]:
    """Claim by delete on a connection; the seqs in claim order."""
    ranges = options.pop("ranges", EVERYWHERE.get(queue, ALL))
    return seqs_of(queue_sql(queue, connection).claims.claim_by_delete(connection, ranges, limit, **options))


@pytest.mark.parametrize("queue", QUEUES)
def test_lease_takes_the_lowest_and_counts_the_delivery(server: Server, queue: Any) -> None:
    seqs = server.put(queue, 5)
    token, owner = uuid.uuid4(), uuid.uuid4()
    before = server.backend.now(server.connection)

    rows = server.sql(queue).claims.claim_by_lease(server.connection, EVERYWHERE[queue], 3, token, owner, 60_000)

    assert seqs_of(rows) == seqs[:3]
    assert [row[DELIVERIES] for row in rows] == [1, 1, 1]
    stored = server.row(queue, seqs[0])
    assert (stored.lease_token, stored.lease_owner, stored.deliveries) == (token, owner, 1)
    assert rows[0][ID] == stored.id.bytes
    assert before + timedelta(seconds=59) < stored.lease_expires < before + timedelta(seconds=90)
    assert server.row(queue, seqs[3]).lease_token is None


@pytest.mark.parametrize("queue", QUEUES)
def test_leased_message_has_one_owner(server: Server, queue: Any) -> None:
    seqs = server.put(queue, 3)
    server.lease(queue, 2, ranges=EVERYWHERE[queue])

    assert server.lease(queue, 5, ranges=EVERYWHERE[queue])[1] == seqs[2:]
    assert take(server, server.connection, queue, 5) == []


@pytest.mark.parametrize("queue", QUEUES)
def test_message_of_an_expired_lease_is_claimed_again_in_its_old_position(server: Server, queue: Any) -> None:
    seqs = server.put(queue, 2)
    first, _ = server.lease(queue, 1, ranges=EVERYWHERE[queue], lease_ms=1)
    server.passed(lambda: server.row(queue, seqs[0]).lease_expires)

    rows = server.sql(queue).claims.claim_by_lease(
        server.connection, EVERYWHERE[queue], 2, uuid.uuid4(), uuid.uuid4(), 60_000
    )

    assert seqs_of(rows) == seqs
    assert [row[DELIVERIES] for row in rows] == [2, 1]
    assert server.sql(queue).acks.ack(server.connection, seqs, first) == 0


def test_lease_may_last_longer_than_an_int_of_milliseconds(server: Server) -> None:
    (seq,) = server.put(Leased)
    server.lease(Leased, lease_ms=int(timedelta(days=40) / timedelta(milliseconds=1)))

    remaining = server.row(Leased, seq).lease_expires - server.backend.now(server.connection)
    assert timedelta(days=39) < remaining <= timedelta(days=40)


@pytest.mark.parametrize("queue", QUEUES)
def test_delete_returns_the_messages_and_they_are_gone(server: Server, queue: Any) -> None:
    seqs = server.put(queue, 4)

    rows = server.sql(queue).claims.claim_by_delete(server.connection, EVERYWHERE[queue], 3)

    assert seqs_of(rows) == seqs[:3]
    assert [row[DELIVERIES] for row in rows] == [0, 0, 0]
    assert server.seqs(queue) == seqs[3:]


@pytest.mark.parametrize("queue", QUEUES)
def test_claim_passes_over_what_is_locked_and_never_waits(server: Server, queue: Any) -> None:
    seqs = server.put(queue, 4)
    holder, second_session = server.another(), server.another()

    with server.transaction(holder):
        assert take(server, holder, queue, 2) == seqs[:2]
        with within():
            assert take(server, second_session, queue, 1) == seqs[2:3]
            sql = queue_sql(queue, second_session)
            rows = sql.claims.claim_by_lease(second_session, EVERYWHERE[queue], 5, uuid.uuid4(), uuid.uuid4(), 1_000)
            assert seqs_of(rows) == seqs[3:]
            assert take(server, second_session, queue, 5) == []


def test_message_of_a_rolled_back_claim_is_there_again(server: Server) -> None:
    seqs = server.put(Transactional, 2)
    holder = server.another()

    with server.rolled_back(holder):
        assert take(server, holder, Transactional, 1) == seqs[:1]

    assert take(server, server.connection, Transactional, 2) == seqs


def test_message_of_an_open_transaction_is_not_there_yet_and_not_waited_for(server: Server) -> None:
    sender, second_session = server.another(), server.another()
    (seen,) = server.put(Leased)

    with server.transaction(sender):
        queue_sql(Leased, sender).inserts.insert(sender, outgoing())
        with within():
            assert take(server, second_session, Leased, 5) == [seen]

    assert len(take(server, second_session, Leased, 5)) == 1


@pytest.mark.parametrize("queue", QUEUES)
def test_expired_message_is_not_claimed(server: Server, queue: Any) -> None:
    gone, kept = server.put(queue, expires_ms=1) + server.put(queue, expires_ms=3_600_000)
    server.passed(lambda: server.row(queue, gone).expires)

    assert server.lease(queue, ranges=EVERYWHERE[queue])[1] == [kept]
    assert server.row(queue, gone).deliveries == 0


def test_range_includes_both_its_ends(server: Server) -> None:
    seqs = server.put(Leased, 6)

    assert take(server, server.connection, Leased, 9, ranges=[SeqRange(seqs[2], seqs[4])]) == seqs[2:5]
    assert take(server, server.connection, Leased, 9, ranges=[SeqRange(seqs[5])]) == seqs[5:]
    assert take(server, server.connection, Leased, 9, ranges=[SeqRange(0, seqs[0])]) == seqs[:1]
    assert take(server, server.connection, Leased, 9, ranges=[SeqRange(1, 0)]) == []


def test_highest_priority_comes_first(server: Server) -> None:
    low, urgent, normal, urgent_too = (
        seq for level in (0, 2, 1, 2) for seq in server.put(Urgent, priority=level)
    )  # fmt: skip

    rows = server.sql(Urgent).claims.claim_by_delete(server.connection, levels(3), 3)

    assert seqs_of(rows) == [urgent, urgent_too, normal]
    assert [row[PRIORITY] for row in rows] == [2, 2, 1]
    assert server.seqs(Urgent) == [low]


def test_lower_levels_fill_the_batch_and_not_more(server: Server) -> None:
    zeros = server.put(Urgent, 5)
    twos = server.put(Urgent, 3, priority=2)

    _, seqs = server.lease(Urgent, 6, ranges=levels(3))

    assert seqs == twos + zeros[:3]
    leased = [row.seq for row in server.rows(Urgent) if row.lease_token]
    assert sorted(leased) == sorted(seqs)


def test_each_level_has_its_own_floor(server: Server) -> None:
    low_old, high_old, low_new, high_new = (
        seq for level in (0, 2, 0, 2) for seq in server.put(Urgent, priority=level)
    )  # fmt: skip
    ranges = [SeqRange(high_new, priority=2), SeqRange(0, priority=1), SeqRange(low_old, low_old, priority=0)]

    assert take(server, server.connection, Urgent, 9, ranges=ranges) == [high_new, low_old]
    assert server.seqs(Urgent) == [high_old, low_new]


@pytest.mark.parametrize("queue", [Addressed, AddressedUrgent])
def test_recipient_gets_what_is_addressed_to_it(server: Server, queue: Any) -> None:
    first, _, also_mine, _ = (
        seq for who in ("me", "you", "me", "") for seq in server.put(queue, recipient=who, expires_ms=3_600_000)
    )
    many = levels(3 if queue is AddressedUrgent else 1, ("unknown", "me", "no one"))

    rows = server.sql(queue).claims.claim_by_delete(server.connection, many, 9)

    assert seqs_of(rows) == [first, also_mine]
    assert {row[RECIPIENT] for row in rows} == {"me"}
    assert all(row[EXPIRES] > server.backend.now(server.connection) for row in rows)
    assert len(server.seqs(queue)) == 2


def test_levels_of_many_recipients_come_in_claim_order(server: Server) -> None:
    sent = {
        (who, level): server.put(AddressedUrgent, 2, recipient=who, priority=level)
        for who in ("a", "b", "c")
        for level in (0, 2)
    }

    rows = server.sql(AddressedUrgent).claims.claim_by_delete(server.connection, levels(3, ("b", "x", "a")), 7)

    assert [row[PRIORITY] for row in rows] == [2, 2, 2, 2, 0, 0, 0]
    assert sorted(seqs_of(rows)[:4]) == sorted(sent["a", 2] + sent["b", 2])
    assert set(seqs_of(rows)[4:]) < {*sent["a", 0], *sent["b", 0]}
    assert {row[RECIPIENT] for row in rows} == {"a", "b"}


def pieces(queue: Any, *bounds: tuple[int, int]) -> list[SeqRange]:
    """These stretches of every level of a queue, in claim order."""
    return [only._replace(low=low, high=high) for only in EVERYWHERE[queue] for low, high in bounds]


@pytest.mark.parametrize("queue", QUEUES)
def test_what_lies_between_the_ranges_is_left_alone(server: Server, queue: Any) -> None:
    seqs = server.put(queue, 6)
    ranges = pieces(queue, (seqs[1], seqs[1]), (seqs[4], MAX_SEQ))

    _, leased = server.lease(queue, 2, ranges=ranges)

    assert leased == [seqs[1], seqs[4]]
    assert take(server, server.connection, queue, 9, ranges=ranges) == [seqs[5]]
    assert take(server, server.connection, queue, 9, ranges=[]) == []
    assert server.lease(queue, ranges=[])[1] == []
    assert server.seqs(queue) == [*seqs[:5]]


@pytest.mark.parametrize("queue", QUEUES)
def test_what_lies_between_the_ranges_is_not_locked_either(server: Server, queue: Any) -> None:
    seqs = server.put(queue, 3)
    holder, second_session = server.another(), server.another()

    with server.transaction(holder):
        ranges = pieces(queue, (1, seqs[0] - 1), (seqs[1], MAX_SEQ))
        assert take(server, holder, queue, 1, ranges=ranges) == seqs[1:2]
        with within():
            assert take(server, second_session, queue, 1) == seqs[:1]


def test_of_several_ranges_no_more_than_the_limit_is_taken_and_later_ones_are_not_touched(server: Server) -> None:
    seqs = server.put(Leased, 40)
    holder = server.another()
    ranges = pieces(Leased, (seqs[0], seqs[9]), (seqs[20], MAX_SEQ))

    with server.transaction(holder):
        assert take(server, holder, Leased, 8, ranges=ranges) == seqs[:8]
        with within():
            assert take(server, server.connection, Leased, 10, ranges=ranges) == [*seqs[8:10], *seqs[20:28]]


@pytest.mark.parametrize("queue", QUEUES)
def test_heads_are_read_in_order_and_nothing_is_taken(server: Server, queue: Any) -> None:
    seqs = server.put(queue, 4)
    only = EVERYWHERE[queue][-1]
    (held,) = server.lease(queue, 1, ranges=pieces(queue, (seqs[1], seqs[1])))[1]

    heads = server.sql(queue).claims.read_heads(server.connection, only._replace(low=seqs[0]), 2)

    assert [seq for seq, _ in heads] == [seqs[0], seqs[2]], "what is leased is not there"
    assert {headers for _, headers in heads} == {server.row(queue, seqs[0]).headers}
    assert held == seqs[1]
    assert server.sql(queue).claims.read_heads(server.connection, only._replace(low=seqs[3] + 1), 2) == []
    assert len(take(server, server.connection, queue, 9)) == 3


@pytest.mark.parametrize("by_lease", [True, False], ids=["lease", "delete"])
@pytest.mark.parametrize("queue", [Leased, Urgent])
def test_concurrent_claims_take_every_message_once(server: Server, queue: Any, by_lease: bool) -> None:
    sent = server.sql(queue).inserts.insert_many(
        server.connection, (outgoing(priority=n % 3 * (queue is Urgent)) for n in range(900))
    )
    taken: list[list[int]] = [[], [], [], []]
    failed: list[BaseException] = []

    def work(first: list[int], connection: Any) -> None:
        sql = queue_sql(queue, connection)
        try:
            while len(first) < 900:
                if by_lease:
                    token = uuid.uuid4()
                    rows = sql.claims.claim_by_lease(connection, EVERYWHERE[queue], 20, token, token, 60_000)
                else:
                    rows = sql.claims.claim_by_delete(connection, EVERYWHERE[queue], 20)
                first += seqs_of(rows)
                if not rows and sql.claims.peek(connection, EVERYWHERE[queue], (), 1).ahead == 0:
                    break
        except BaseException as error:
            failed.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=work, args=(message, server.another())) for message in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failed == []
    together = [seq for message in taken for seq in message]
    assert len(together) == len(set(together)) == sent == 900
    if not by_lease:
        assert server.seqs(queue) == []
    else:
        assert [row.deliveries for row in server.rows(queue)] == [1] * 900
