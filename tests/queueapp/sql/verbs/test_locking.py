"""After a failure: one message is locked, read whole, and its verdict written, whatever else wants it."""

from __future__ import annotations

import threading
import uuid
from time import monotonic
from typing import Any

import pytest
from django.db import Error, transaction

from queueapp.sql import queue_sql
from queueapp.sql.message_columns import Row
from tests.queueapp.sql.server import ALL, Server, levels, seqs_of, within
from tests.testapp.models import AddressedUrgent, Leased, Transactional


def lock(
    server: Server, connection: Any, seq: int, token: uuid.UUID | None = None, wait_ms: int = 10_000
) -> Row | None:
    return queue_sql(Transactional, connection).failures.lock(connection, seq, token, wait_ms)


def wait_setting(server: Server, connection: Any) -> str:
    """How long this session waits for locks, as the server says it."""
    statement = "SHOW lock_timeout" if server.vendor == "postgresql" else "SELECT @@LOCK_TIMEOUT"
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return str(cursor.fetchone()[0])


def test_a_limited_wait_leaves_the_limit_of_the_session(server: Server) -> None:
    """The handler of a rehearsal runs under such a limit, and a limit within it must not end that."""
    connection, sessions = server.connection, server.backend.sessions
    sql = server.sql(Leased)
    with transaction.atomic(using=server.alias), sessions.lock_timeout(connection, 1234):
        limit = wait_setting(server, connection)
        sql.maintenance.is_empty(connection)
        assert wait_setting(server, connection) == limit
        with transaction.atomic(using=server.alias), sessions.lock_timeout(connection, 5):
            assert wait_setting(server, connection) != limit
        assert wait_setting(server, connection) == limit


def test_lock_reads_the_whole_message(server: Server) -> None:
    (seq,) = server.put(
        AddressedUrgent, headers='{"a": "ß🚀"}', body=b"\0\xff", recipient="me", priority=2, correlation_id="c",
        reply_to_address="r", expires_ms=3_600_000,
    )  # fmt: skip
    token, _ = server.lease(AddressedUrgent, ranges=levels(3, ("me",)))
    stored = server.row(AddressedUrgent, seq)
    second_session = server.another()

    with server.transaction(second_session):
        row = queue_sql(AddressedUrgent, second_session).failures.lock(second_session, seq, token, 1_000)

    assert row == Row(
        seq, stored.id, '{"a": "ß🚀"}', b"\0\xff", deliveries=1, expires=stored.expires, recipient="me", priority=2,
        correlation_id="c", reply_to_address="r", enqueued_at=stored.enqueued_at,
    )  # fmt: skip


def test_lock_of_a_message_that_is_gone_or_not_ours_is_none(server: Server) -> None:
    (seq,) = server.put(Leased)
    token, _ = server.lease(Leased)
    second_session = server.another()
    sql = queue_sql(Leased, second_session)

    with server.transaction(second_session):
        assert sql.failures.lock(second_session, seq + 1, None, 1_000) is None
        assert sql.failures.lock(second_session, seq, uuid.uuid4(), 1_000) is None
        assert sql.failures.lock(second_session, seq, token, 1_000) is not None


def test_lock_gives_up_after_its_time(server: Server) -> None:
    (seq,) = server.put(Transactional)
    holder, waiter = server.another(), server.another()

    with server.transaction(holder):
        assert lock(server, holder, seq) is not None
        started = monotonic()
        with pytest.raises(Error) as raised, server.transaction(waiter):
            lock(server, waiter, seq, wait_ms=300)
        waited = monotonic() - started

    assert server.kind_of(raised.value) == "locked"
    assert 0.25 < waited < 10
    with server.transaction(waiter):
        assert lock(server, waiter, seq) is not None


def test_lock_waits_for_the_holder_and_then_sees_what_it_did(server: Server) -> None:
    kept, removed = server.put(Transactional, 2)
    holder, found = server.another(), dict[int, Row | None]()
    waiting = threading.Barrier(3)

    def wait_for(seq: int) -> None:
        session = server.another()
        with server.transaction(session):
            waiting.wait()
            found[seq] = lock(server, session, seq)

    threads = [threading.Thread(target=wait_for, args=(seq,)) for seq in (kept, removed)]
    with server.transaction(holder):
        assert lock(server, holder, kept) is not None
        sql = queue_sql(Transactional, holder)
        assert sql.failures.requeue(holder, kept, deliveries=3, cancels=0, failures="[]") == 1
        assert sql.failures.remove(holder, [removed]) == 1
        for thread in threads:
            thread.start()
        waiting.wait()
    for thread in threads:
        thread.join()

    row = found[kept]
    assert row is not None
    assert (row.deliveries, row.failures) == (3, "[]")
    assert found[removed] is None


def test_claim_and_peek_do_not_wait_for_a_locked_message(server: Server) -> None:
    seqs = server.put(Transactional, 2)
    holder = server.another()

    with server.transaction(holder):
        assert lock(server, holder, seqs[0]) is not None
        with within():
            sql = server.sql(Transactional)
            assert sql.claims.peek(server.connection, ALL, (), 10).ahead >= 1
            assert seqs_of(sql.claims.claim_by_delete(server.connection, ALL, 5)) == seqs[1:]


def test_lock_leaves_the_session_as_it_was(server: Server) -> None:
    (seq,) = server.put(Transactional)
    holder, waiter = server.another(), server.another()
    before = wait_setting(server, waiter)

    with server.transaction(waiter):
        lock(server, waiter, seq)
        assert wait_setting(server, waiter) == before
    with server.transaction(holder):
        lock(server, holder, seq)
        with pytest.raises(Error), server.transaction(waiter):
            lock(server, waiter, seq, wait_ms=10)
    assert wait_setting(server, waiter) == before


def test_put_back_writes_the_counts_and_ends_the_lease(server: Server) -> None:
    (seq,) = server.put(Leased)
    token, _ = server.lease(Leased)
    sql = server.sql(Leased)

    assert (
        sql.failures.requeue(server.connection, seq, deliveries=7, cancels=2, failures='["ß"]', token=uuid.uuid4()) == 0
    )
    assert sql.failures.requeue(server.connection, seq, deliveries=7, cancels=2, failures='["ß"]', token=token) == 1

    row = server.row(Leased, seq)
    assert (row.deliveries, row.cancels, row.failures) == (7, 2, '["ß"]')
    assert (row.lease_token, row.lease_owner, row.lease_expires) == (None, None, None)
    assert sql.failures.requeue(server.connection, seq, deliveries=0, cancels=0, failures=None) == 1
    assert server.row(Leased, seq).failures is None


def test_put_back_may_write_new_headers(server: Server) -> None:
    (seq,) = server.put(Leased)
    sql = server.sql(Leased)

    assert (
        sql.failures.requeue(server.connection, seq, deliveries=1, cancels=0, failures=None, headers='{"é": "1"}') == 1
    )
    assert server.row(Leased, seq).headers == '{"é": "1"}'


def test_remove_takes_messages_whatever_their_lease(server: Server) -> None:
    seqs = server.put(Leased, 3)
    server.lease(Leased, 1)

    assert server.sql(Leased).failures.remove(server.connection, seqs[:2]) == 2
    assert server.sql(Leased).failures.remove(server.connection, seqs) == 1
    assert server.seqs(Leased) == []


# -- deciding in the place of a handler that failed ------------------------------------------------------------------


def test_lock_again_undoes_the_transaction_and_keeps_the_message(server: Server) -> None:
    seq, written = server.put(Transactional, 2)
    session, second_session = server.another(), server.another()
    sql = queue_sql(Transactional, session)

    with server.transaction(session):
        assert seqs_of(sql.claims.claim_by_delete(session, ALL, 1)) == [seq]
        assert sql.failures.remove(session, [written]) == 1
        row = sql.failures.rollback_and_lock(session, seq, 1_000)
        assert row is not None
        assert row.seq == seq
        with within():
            assert seqs_of(queue_sql(Transactional, second_session).claims.claim_by_delete(second_session, ALL, 5)) == [
                written
            ]
        assert sql.failures.requeue(session, seq, deliveries=1, cancels=0, failures="[1]") == 1

    assert [(row.seq, row.deliveries, row.failures) for row in server.rows(Transactional)] == [(seq, 1, "[1]")]


def test_lock_again_can_be_rolled_back_like_any_transaction(server: Server) -> None:
    (seq,) = server.put(Transactional)
    session = server.another()
    sql = queue_sql(Transactional, session)

    with server.rolled_back(session):
        sql.claims.claim_by_delete(session, ALL, 1)
        sql.failures.rollback_and_lock(session, seq, 1_000)
        sql.failures.requeue(session, seq, deliveries=9, cancels=0, failures=None)

    assert server.row(Transactional, seq).deliveries == 0
    with within():
        assert len(server.sql(Transactional).claims.claim_by_delete(server.connection, ALL, 1)) == 1


def test_lock_again_works_in_a_transaction_that_failed(server: Server) -> None:
    (seq,) = server.put(Transactional)
    session = server.another()
    sql = queue_sql(Transactional, session)

    with server.transaction(session):
        sql.claims.claim_by_delete(session, ALL, 1)
        with pytest.raises(Error), session.cursor() as cursor:
            cursor.execute("SELECT * FROM no_such_table_at_all")
        session.needs_rollback = True  # what an inner atomic block says when it failed
        row = sql.failures.rollback_and_lock(session, seq, 1_000)
        session.needs_rollback = False
        assert row is not None
        assert sql.failures.remove(session, [seq]) == 1

    assert server.seqs(Transactional) == []


def test_lock_again_of_a_message_that_was_taken_is_none(server: Server) -> None:
    (seq,) = server.put(Transactional)
    session = server.another()

    with server.transaction(session):
        assert queue_sql(Transactional, session).failures.rollback_and_lock(session, seq + 1, 1_000) is None


def test_lock_again_gives_up_after_its_time(server: Server) -> None:
    (seq,) = server.put(Transactional)
    holder, session = server.another(), server.another()
    before = wait_setting(server, session)

    with server.transaction(holder):
        lock(server, holder, seq)
        with pytest.raises(Error) as raised, server.transaction(session):
            queue_sql(Transactional, session).failures.rollback_and_lock(session, seq, 200)

    assert server.kind_of(raised.value) == "locked"
    assert wait_setting(server, session) == before
