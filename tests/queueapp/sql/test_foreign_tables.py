"""Foreign tables: none of our columns is named, and every verb that can work does."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from queueapp.models import DelayedMessage
from queueapp.sql import queue_sql
from queueapp.sql.claims import PeekResult, SeqRange
from queueapp.sql.tables import StoreTable
from tests.nservicebus import Endpoint
from tests.queueapp.sql.server import ALL, Server, outgoing, seqs_of, whole, within
from tests.testapp.models import ForeignPostgres, ForeignSqlServer

QUEUES = {"postgresql": ForeignPostgres, "microsoft": ForeignSqlServer}


@pytest.fixture
def foreign(server: Server) -> Iterator[Any]:
    """The queue in the foreign table of this database, as the transport's script makes it."""
    queue = QUEUES[server.vendor]
    endpoint = Endpoint(server.another(), queue._meta.db_table)
    endpoint.create()
    yield queue
    endpoint.drop()


def test_what_we_send_is_a_row_that_its_owner_understands(server: Server, foreign: Any) -> None:
    first, two = outgoing(b"1", '{"A": "ß"}'), outgoing(None, expires_ms=60_000)
    server.sql(foreign).inserts.insert(server.connection, first)
    assert server.sql(foreign).inserts.insert_many(server.connection, [two, outgoing(b"")]) == 2

    rows = server.run(f"SELECT Id, Headers, Body, Expires FROM {foreign._meta.db_table} ORDER BY 4, 2")

    assert {uuid.UUID(str(row[0])) for row in rows} > {first.id, two.id}
    bodies = {(row[1], None if row[2] is None else bytes(row[2])) for row in rows}
    assert bodies == {("{}", None), ("{}", b""), ('{"A": "ß"}', b"1")}
    expires = [row[3] for row in rows if row[3] is not None]
    now = server.backend.now(server.connection).replace(tzinfo=None)
    assert len(expires) == 1
    assert timedelta(seconds=50) < expires[0] - now <= timedelta(seconds=61), "UTC without a zone"


def test_what_its_owner_sends_is_received_whole(server: Server, foreign: Any) -> None:
    identity = uuid.uuid4()
    columns = "Id, Headers, Body" + (", Recoverable" if server.vendor == "microsoft" else "")
    values = "%s, %s, %s" + (", 1" if server.vendor == "microsoft" else "")
    server.run(
        f"INSERT INTO {foreign._meta.db_table} ({columns}) VALUES ({values})", str(identity), '{"a": "b"}', b"\0\1"
    )

    (claimed,) = server.sql(foreign).claims.claim_by_delete(server.connection, ALL, 5, whole=True)

    row = whole(foreign, claimed)
    assert (row.id, row.headers, row.body) == (identity, '{"a": "b"}', b"\0\1")
    assert (row.deliveries, row.cancels, row.failures, row.recipient, row.priority) == (0, 0, None, "", 0)
    assert (row.expires, row.correlation_id, row.reply_to_address) == (None, None, None)
    assert abs(row.enqueued_at - server.backend.now(server.connection)) < timedelta(seconds=30)
    assert server.run(f"SELECT COUNT(*) FROM {foreign._meta.db_table}")[0][0] == 0


def test_claims_and_peek_know_what_others_hold(server: Server, foreign: Any) -> None:
    seqs = server.put(foreign, 3)
    holder = server.another()

    with server.transaction(holder):
        assert seqs_of(queue_sql(foreign, holder).claims.claim_by_delete(holder, ALL, 1)) == seqs[:1]
        with within():
            assert server.sql(foreign).claims.peek(server.connection, ALL, (), 10) == PeekResult(2, 0, seqs[1])
            rows = server.sql(foreign).claims.claim_by_delete(
                server.connection, [SeqRange(1, seqs[1] - 1), SeqRange(seqs[2])], 5
            )
            assert seqs_of(rows) == seqs[2:]


def test_expired_messages_are_neither_received_nor_kept(server: Server, foreign: Any) -> None:
    server.sql(foreign).inserts.insert(server.connection, outgoing(expires_ms=1))
    (kept,) = server.put(foreign, 1)[-1:]
    sql = server.sql(foreign)
    (expired,) = [row for row in server.rows(foreign) if row.expires is not None]
    # datetime counts in 3 ms.
    server.passed(lambda: expired.expires + timedelta(milliseconds=10))

    assert sql.claims.peek(server.connection, ALL, (), 10).ahead == 1
    assert sql.maintenance.purge_expired(server.connection, 10) == [expired.id]
    assert server.seqs(foreign) == [kept]


def test_failure_is_written_into_the_headers(server: Server, foreign: Any) -> None:
    (seq,) = server.put(foreign)
    second_session = server.another()
    sql = queue_sql(foreign, second_session)

    with server.transaction(second_session):
        row = sql.failures.lock(second_session, seq, None, 1_000)
        assert row is not None
        assert (row.deliveries, row.failures) == (0, None)
        assert (
            sql.failures.requeue(
                second_session, seq, deliveries=1, cancels=0, failures="[]", headers='{"Retries": "1"}'
            )
            == 1
        )
        again = sql.failures.rollback_and_lock(second_session, seq, 1_000)
        assert again is not None
        assert (
            sql.failures.requeue(
                second_session, seq, deliveries=1, cancels=0, failures="[]", headers='{"Retries": "2"}'
            )
            == 1
        )

    assert server.row(foreign, seq).headers == '{"Retries": "2"}'
    assert sql.failures.remove(second_session, [seq]) == 1
    assert sql.maintenance.is_empty(second_session) is True


def test_delayed_message_moves_into_it(server: Server, foreign: Any) -> None:
    store = StoreTable.of(DelayedMessage, "due")
    sent = outgoing(b"late", expires_ms=3_600_000, priority=2, recipient="x")
    number = server.backend.delayed.store(server.connection, store, foreign._meta.label, sent, 0)

    assert server.sql(foreign).inserts.insert_from(server.connection, store, [number]) == 1

    (row,) = server.rows(foreign)
    delayed = DelayedMessage.objects.using(server.alias).get(number=number)
    assert (row.id, row.body) == (sent.id, b"late")
    assert abs(row.expires - delayed.expires) < timedelta(milliseconds=10)


def test_purge_leaves_nothing(server: Server, foreign: Any) -> None:
    server.put(foreign, 3)
    assert server.sql(foreign).maintenance.purge(server.connection, 10) == 3
    assert server.sql(foreign).maintenance.is_empty(server.connection) is True
