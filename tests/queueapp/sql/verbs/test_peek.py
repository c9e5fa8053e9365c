"""Peek: how much there is to take, without taking, locking or waiting, and without counting what others have."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from queueapp.sql import queue_sql
from queueapp.sql.claims import PeekResult, SeqRange
from queueapp.sql.postgresql import claims as postgresql_claims
from queueapp.sql.sqlserver import claims as sqlserver_claims
from tests.queueapp.sql.server import ALL, Server, levels, outgoing, within
from tests.testapp.models import Addressed, AddressedUrgent, Leased, Urgent

EVERYWHERE = {Leased: ALL, Urgent: levels(3), Addressed: levels(1), AddressedUrgent: levels(3)}
every_shape = pytest.mark.parametrize("queue", EVERYWHERE)


def peek(server: Server, queue: Any, limit: int = 100, connection: Any = None, **options: Any) -> PeekResult:
    connection = connection or server.connection
    ahead = options.pop("ahead", EVERYWHERE[queue])
    return queue_sql(queue, connection).claims.peek(connection, ahead, options.pop("behind", ()), limit, **options)


@every_shape
def test_empty_queue(server: Server, queue: Any) -> None:
    assert peek(server, queue) == PeekResult(0, 0, 0)


@every_shape
def test_counts_what_is_there_up_to_the_limit(server: Server, queue: Any) -> None:
    seqs = server.put(queue, 5)

    assert peek(server, queue) == PeekResult(5, 0, seqs[0])
    assert peek(server, queue, limit=3).ahead == 3


@every_shape
def test_gaps_are_not_messages(server: Server, queue: Any) -> None:
    seqs = server.put(queue, 30)
    server.sql(queue).failures.remove(server.connection, seqs[1:-1])

    assert peek(server, queue) == PeekResult(2, 0, seqs[0])


@every_shape
def test_rescan_window_ends_after_so_many_rows_that_cannot_be_taken(
    server: Server, queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (postgresql_claims, sqlserver_claims):
        monkeypatch.setattr(module, "WINDOW_ROWS", 3)
    seqs = server.put(queue, 7)
    with within():
        server.sql(queue).claims.claim_by_lease(server.connection, EVERYWHERE[queue], 4, uuid4(), uuid4(), 60_000)
    above = [r._replace(low=seqs[-1] + 1) for r in EVERYWHERE[queue]]

    def look(low: int) -> PeekResult:
        return peek(server, queue, ahead=above, behind=[r._replace(low=low) for r in EVERYWHERE[queue]])

    assert look(seqs[0]) == PeekResult(0, 0, 0, reached=seqs[2])
    assert look(seqs[2]) == PeekResult(0, 1, seqs[4], reached=seqs[4])
    assert look(seqs[5]) == PeekResult(0, 2, seqs[5], reached=0)


@every_shape
def test_ahead_and_behind_are_counted_apart(server: Server, queue: Any) -> None:
    seqs = server.put(queue, 6)

    seen = peek(
        server,
        queue,
        ahead=[r._replace(low=seqs[4]) for r in EVERYWHERE[queue]],
        behind=[r._replace(high=seqs[2]) for r in EVERYWHERE[queue]],
    )

    assert seen == PeekResult(2, 3, seqs[0])
    assert peek(server, queue, ahead=[r._replace(low=seqs[4]) for r in EVERYWHERE[queue]]) == PeekResult(2, 0, seqs[4])


@every_shape
@pytest.mark.parametrize(("count", "in_flight"), [(2, 0), (3, 1), (3, 2), (1, 0)])
@pytest.mark.parametrize("by_lease", [False, True], ids=["deleted", "leased"])
def test_what_an_open_transaction_has_taken_does_not_count(
    server: Server, queue: Any, count: int, in_flight: int, by_lease: bool
) -> None:
    # NServiceBus #1412: an estimate that counts messages in flight keeps every idle worker busy.
    seqs = server.put(queue, count)
    holder = server.another()
    only = [r._replace(low=seqs[in_flight], high=seqs[in_flight]) for r in EVERYWHERE[queue]]

    with server.transaction(holder):
        sql = queue_sql(queue, holder)
        if by_lease:
            taken = sql.claims.claim_by_lease(holder, only, 1, sql_id := outgoing().id, sql_id, 60_000)
        else:
            taken = sql.claims.claim_by_delete(holder, only, 1)
        assert len(taken) == 1
        with within():
            seen = peek(server, queue)
            rescan = peek(server, queue, ahead=[], behind=EVERYWHERE[queue])

    rest = [seq for n, seq in enumerate(seqs) if n != in_flight]
    assert seen == PeekResult(count - 1, 0, rest[0] if rest else 0)
    assert rescan == PeekResult(0, count - 1, rest[0] if rest else 0)


@every_shape
def test_message_of_a_claim_that_rolled_back_counts_again(server: Server, queue: Any) -> None:
    server.put(queue, 2)
    holder = server.another()

    with server.rolled_back(holder):
        queue_sql(queue, holder).claims.claim_by_delete(holder, EVERYWHERE[queue], 1)

    assert peek(server, queue).ahead == 2


@every_shape
def test_message_that_is_not_committed_does_not_count(server: Server, queue: Any) -> None:
    sender = server.another()

    with server.transaction(sender):
        queue_sql(queue, sender).inserts.insert(sender, outgoing())
        with within():
            assert peek(server, queue).ahead == 0

    assert peek(server, queue).ahead == 1


@every_shape
def test_leased_and_expired_messages_do_not_count(server: Server, queue: Any) -> None:
    (gone,) = server.put(queue, expires_ms=1)
    (leased,) = server.put(queue, 1)
    remaining = server.put(queue, 2)
    server.passed(lambda: server.row(queue, gone).expires)
    assert server.lease(queue, 1, ranges=EVERYWHERE[queue])[1] == [leased]

    assert peek(server, queue) == PeekResult(2, 0, remaining[0])


@every_shape
def test_what_lies_between_the_ranges_does_not_count(server: Server, queue: Any) -> None:
    seqs = server.put(queue, 6)
    bounds = [(1, seqs[0]), (seqs[3], seqs[4])]
    ranges = [only._replace(low=low, high=high) for only in EVERYWHERE[queue] for low, high in bounds]

    assert peek(server, queue, ahead=ranges) == PeekResult(3, 0, seqs[0])
    assert peek(server, queue, ahead=[], behind=ranges) == PeekResult(0, 3, seqs[0])
    assert peek(server, queue, ahead=ranges[-1:], behind=ranges) == PeekResult(2, 3, seqs[0])
    assert peek(server, queue, ahead=[]) == PeekResult(0, 0, 0)


@every_shape
def test_peek_locks_nothing_not_even_in_a_transaction(server: Server, queue: Any) -> None:
    seqs = server.put(queue, 3)
    looker, taker = server.another(), server.another()

    with server.transaction(looker):
        assert peek(server, queue, connection=looker).ahead == 3
        with within():
            rows = queue_sql(queue, taker).claims.claim_by_delete(taker, EVERYWHERE[queue], 5)

    assert [row[0] for row in rows] == seqs


def test_limit_holds_over_all_levels_together(server: Server) -> None:
    for level in range(3):
        server.put(Urgent, 3, priority=level)

    assert peek(server, Urgent, limit=5).ahead == 5
    assert peek(server, Urgent, limit=50).ahead == 9


def test_levels_and_recipients_that_are_not_asked_for_do_not_count(server: Server) -> None:
    server.put(AddressedUrgent, 2, recipient="you", priority=1)
    first = server.put(AddressedUrgent, 1, recipient="me", priority=1)

    assert peek(server, AddressedUrgent, ahead=[SeqRange(recipient="me", priority=1)]) == PeekResult(1, 0, first[0])
    assert peek(server, AddressedUrgent, ahead=[SeqRange(recipient="me", priority=2)]) == PeekResult(0, 0, 0)


def test_a_thousand_levels_are_one_peek(server: Server) -> None:
    seqs = server.put(AddressedUrgent, 1, recipient="r99", priority=1)
    many = levels(10, tuple(f"r{n}" for n in range(100)))

    assert peek(server, AddressedUrgent, ahead=many, behind=many) == PeekResult(1, 1, seqs[0])
    with within():
        assert len(server.sql(AddressedUrgent).claims.claim_by_delete(server.connection, many, 5)) == 1
