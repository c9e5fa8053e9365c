"""Looking after leases beside a handler: nothing is shortened, no lock is waited for, and only what is ours is
touched."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import Error

from queueapp.sql import queue_sql
from tests.queueapp.sql.server import Server, levels, within
from tests.testapp.models import AddressedUrgent, Leased

WAIT_MS = 200
Verb = Callable[[Any, Any, list[int], uuid.UUID], list[int]]
#: Each verb on a connection of its own, in a transaction of its own.
VERBS: dict[str, Verb] = {
    "renew": lambda sql, c, seqs, token: sql.acks.renew(c, seqs, token, 60_000, WAIT_MS),
    "try_ack": lambda sql, c, seqs, token: sql.acks.try_ack(c, seqs, token, WAIT_MS),
    "try_give_back": lambda sql, c, seqs, token: sql.acks.try_release(c, seqs, token, WAIT_MS),
}
each_verb = pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)


def run(server: Server, verb: Verb, seqs: list[int], token: uuid.UUID, queue: Any = Leased) -> list[int]:
    session = server.another()
    with server.transaction(session):
        return verb(queue_sql(queue, session), session, seqs, token)


def remaining(server: Server, seq: int) -> timedelta:
    expires = server.row(Leased, seq).lease_expires
    assert expires is not None
    return expires - server.backend.now(server.connection)


@contextmanager
def holding(server: Server, seq: int, token: uuid.UUID) -> Iterator[None]:
    """Another session has this row locked in an open transaction."""
    holder = server.another()
    with server.rolled_back(holder):
        assert queue_sql(Leased, holder).acks.extend(holder, [seq], token, 60_000) == [seq]
        yield


def test_renewal_lengthens_and_never_shortens(server: Server) -> None:
    short, long = server.put(Leased, 2)
    token, leased = server.lease(Leased, lease_ms=1_000)
    server.sql(Leased).acks.extend(server.connection, [long], token, 600_000)

    assert run(server, VERBS["renew"], leased, token) == [short, long]

    assert timedelta(seconds=50) < remaining(server, short) <= timedelta(seconds=60)
    assert timedelta(minutes=9) < remaining(server, long) <= timedelta(minutes=10)


def test_renewal_of_an_expired_lease_counts_while_the_message_was_not_taken_over(server: Server) -> None:
    (seq,) = server.put(Leased)
    token, _ = server.lease(Leased, lease_ms=1)
    server.passed(lambda: server.row(Leased, seq).lease_expires)

    assert run(server, VERBS["renew"], [seq], token) == [seq]
    assert remaining(server, seq) > timedelta(seconds=50)


def test_early_ack_removes_and_early_give_back_takes_the_delivery_off(server: Server) -> None:
    seqs = server.put(Leased, 3)
    token, _ = server.lease(Leased)

    assert run(server, VERBS["try_ack"], seqs[:1], token) == seqs[:1]
    assert run(server, VERBS["try_give_back"], seqs[1:2], token) == seqs[1:2]

    assert [(row.seq, row.deliveries, row.cancels, row.lease_token) for row in server.rows(Leased)] == [
        (seqs[1], 0, 0, None),
        (seqs[2], 1, 0, token),
    ]
    row = server.row(Leased, seqs[1])
    assert (row.lease_owner, row.lease_expires) == (None, None)


@each_verb
def test_only_what_is_leased_under_the_token_is_touched(server: Server, verb: Verb) -> None:
    free, taken, first = server.put(AddressedUrgent, 3, priority=1)
    ranges = levels(3)
    stale, _ = server.lease(AddressedUrgent, 3, ranges=ranges, lease_ms=1)
    server.passed(lambda: server.row(AddressedUrgent, first).lease_expires)
    server.sql(AddressedUrgent).acks.release(server.connection, [free], stale, cancelled=False)
    fresh, _ = server.lease(AddressedUrgent, 1, ranges=[r._replace(low=taken, high=taken) for r in ranges])
    before = [(row.deliveries, row.lease_token, row.lease_expires) for row in server.rows(AddressedUrgent)[:2]]

    assert run(server, verb, [free, taken, first], stale, AddressedUrgent) == [first]

    after = [(row.deliveries, row.lease_token, row.lease_expires) for row in server.rows(AddressedUrgent)[:2]]
    assert after == before
    assert before[1][1] == fresh


@each_verb
def test_locked_rows_are_skipped_and_reached_later(server: Server, verb: Verb) -> None:
    first, held, last = server.put(Leased, 3)
    token, leased = server.lease(Leased)

    with holding(server, held, token), within():
        assert run(server, verb, leased, token) == [first, last]

    assert run(server, verb, [held], token) == [held]


@each_verb
def test_a_locked_table_is_waited_for_no_longer_than_allowed(server: Server, verb: Verb) -> None:
    server.put(Leased)
    token, leased = server.lease(Leased)
    migration = server.another()
    table = migration.ops.quote_name(Leased._meta.db_table)
    session = server.another()

    with server.rolled_back(migration):
        with migration.cursor() as cursor:
            # What an ALTER TABLE takes.
            if server.vendor == "postgresql":
                cursor.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
            else:
                cursor.execute(f"ALTER TABLE {table} ADD [soon gone] int NULL")
        with within(), pytest.raises(Error) as raised, server.transaction(session):
            verb(queue_sql(Leased, session), session, leased, token)

    assert server.kind_of(raised.value) == "locked"
    with server.transaction(session):
        assert verb(queue_sql(Leased, session), session, leased, token) == leased


@each_verb
def test_the_limit_on_waits_ends_with_the_transaction(server: Server, verb: Verb) -> None:
    server.put(Leased)
    token, leased = server.lease(Leased)
    session = server.another()
    statement = "SHOW lock_timeout" if server.vendor == "postgresql" else "SELECT @@LOCK_TIMEOUT"

    def limit() -> str:
        with session.cursor() as cursor:
            cursor.execute(statement)
            return str(cursor.fetchone()[0])

    before = limit()
    with server.transaction(session):
        verb(queue_sql(Leased, session), session, leased, token)

    assert limit() == before


@each_verb
def test_no_seqs_are_no_messages(server: Server, verb: Verb) -> None:
    server.put(Leased)
    token, _ = server.lease(Leased)

    assert run(server, verb, [], token) == []
