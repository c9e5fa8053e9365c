"""Putting messages in, one by one and in bulk: what is sent is what is stored, in order, in the caller's
transaction."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from queueapp.errors import QueueNotFound
from queueapp.models import DelayedMessage
from queueapp.sql import queue_sql
from queueapp.sql.message_columns import Outgoing
from queueapp.sql.tables import StoreTable
from tests.queueapp.sql.server import ALL, Server, levels, outgoing, whole
from tests.testapp.models import AddressedUrgent, Leased

BODIES = {
    "none": None,
    "empty": b"",
    "json": '{"text": "Grüße, 🚀 and \\"quotes\\""}'.encode(),
    "every byte": bytes(range(256)),
    "zeros": b"\0" * 50,
    "1 MB": bytes(range(256)) * 4096,
}
HEADERS = {
    "plain": "{}",
    "emoji": json.dumps({"Subject": "🚀 'ß' \\ %s %% ? [x]"}, ensure_ascii=False),
    "100 kB": json.dumps({"Trace": "x" * 100_000}),
}

single = pytest.param(lambda sql, connection, message: sql.inserts.insert(connection, message), id="insert")
bulk = pytest.param(lambda sql, connection, message: sql.inserts.insert_many(connection, [message]), id="insert_many")
both_ways = pytest.mark.parametrize("store", [single, bulk])


@both_ways
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_body_comes_back_byte_for_byte(server: Server, store: Any, body: bytes | None) -> None:
    store(server.sql(Leased), server.connection, outgoing(body))

    (claimed,) = server.sql(Leased).claims.claim_by_delete(server.connection, ALL, 1)

    assert claimed[3] == body
    assert body is None or type(claimed[3]) is bytes


@both_ways
@pytest.mark.parametrize("headers", HEADERS.values(), ids=HEADERS)
def test_headers_come_back_as_they_were(server: Server, store: Any, headers: str) -> None:
    store(server.sql(Leased), server.connection, outgoing(headers=headers))

    (claimed,) = server.sql(Leased).claims.claim_by_delete(server.connection, ALL, 1)

    assert claimed[2] == headers


@both_ways
def test_every_column_is_stored(server: Server, store: Any) -> None:
    sent = outgoing(
        b"body", '{"a": "b"}', expires_ms=60_000, recipient="Zoë's 🚀", priority=2, correlation_id="c-1 ß",
        reply_to_address="r@1", is_barrier=True,
    )  # fmt: skip

    store(server.sql(AddressedUrgent), server.connection, sent)

    (stored,) = server.rows(AddressedUrgent)
    now = server.backend.now(server.connection)
    assert (stored.id, stored.headers, stored.body) == (sent.id, '{"a": "b"}', b"body")
    assert (stored.recipient, stored.priority, stored.is_barrier) == ("Zoë's 🚀", 2, True)
    assert (stored.correlation_id, stored.reply_to_address, stored.recoverable) == ("c-1 ß", "r@1", True)
    assert timedelta(seconds=50) < stored.expires - now <= timedelta(seconds=60)


@both_ways
def test_what_is_not_given_has_its_default(server: Server, store: Any) -> None:
    store(server.sql(Leased), server.connection, outgoing())

    (stored,) = server.rows(Leased)
    assert (stored.recipient, stored.priority, stored.is_barrier, stored.recoverable) == ("", 0, False, True)
    assert (stored.deliveries, stored.cancels, stored.failures) == (0, 0, None)
    assert (stored.correlation_id, stored.reply_to_address, stored.expires) == (None, None, None)
    assert (stored.lease_token, stored.lease_owner, stored.lease_expires) == (None, None, None)
    age = server.backend.now(server.connection) - stored.enqueued_at
    assert timedelta(0) <= age < timedelta(seconds=30)


@both_ways
def test_expiry_may_be_a_century_away(server: Server, store: Any) -> None:
    # DATEADD on SQL Server counts milliseconds in an int, which is 25 days.
    century = timedelta(days=36_500)

    store(server.sql(Leased), server.connection, outgoing(expires_ms=int(century / timedelta(milliseconds=1))))

    (stored,) = server.rows(Leased)
    remaining = stored.expires - server.backend.now(server.connection)
    assert century - timedelta(minutes=1) < remaining <= century


def test_many_keep_the_order_in_which_they_were_sent(server: Server) -> None:
    sent = [outgoing(str(n).encode()) for n in range(2_500)]

    assert server.sql(Leased).inserts.insert_many(server.connection, iter(sent)) == 2_500

    assert [row.body for row in server.rows(Leased)] == [message.body for message in sent]
    assert [row.id for row in server.rows(Leased)] == [message.id for message in sent]


def test_many_may_differ_in_every_column(server: Server) -> None:
    sent = [
        outgoing(None, recipient="a"),
        outgoing(b"", priority=1),
        outgoing(b"x", expires_ms=3_600_000, correlation_id="c"),
        outgoing(b"y", '{"é": "ü"}', reply_to_address="r", is_barrier=True),
    ]

    assert server.sql(AddressedUrgent).inserts.insert_many(server.connection, sent) == 4

    stored = server.rows(AddressedUrgent)
    assert [row.body for row in stored] == [None, b"", b"x", b"y"]
    assert [row.recipient for row in stored] == ["a", "", "", ""]
    assert [row.priority for row in stored] == [0, 1, 0, 0]
    assert [row.expires is None for row in stored] == [True, True, False, True]
    assert [row.correlation_id for row in stored] == [None, None, "c", None]
    assert [row.reply_to_address for row in stored] == [None, None, None, "r"]
    assert [row.is_barrier for row in stored] == [False, False, False, True]
    assert stored[3].headers == '{"é": "ü"}'


def test_bodies_larger_than_a_statement_go_in_several(server: Server) -> None:
    body = bytes(range(256)) * 4_000
    assert server.sql(Leased).inserts.insert_many(server.connection, (outgoing(body) for _ in range(7))) == 7

    rows = server.sql(Leased).claims.claim_by_delete(server.connection, ALL, 10)
    assert [row[3] == body for row in rows] == [True] * 7


def test_nothing_to_send_is_no_statement(server: Server) -> None:
    assert server.sql(Leased).inserts.insert_many(server.connection, []) == 0
    assert server.rows(Leased) == []


@both_ways
def test_rollback_of_the_caller_takes_them_back(server: Server, store: Any) -> None:
    second_session = server.another()
    sql = queue_sql(Leased, second_session)

    with server.rolled_back(second_session):
        store(sql, second_session, outgoing())
        assert sql.claims.peek(second_session, ALL, (), 10).ahead == 1

    assert server.rows(Leased) == []


def test_many_may_be_read_from_the_same_connection(server: Server) -> None:
    def messages() -> Iterator[Outgoing]:
        for n in range(1_500):
            if n % 500 == 0:
                assert server.backend.now(server.connection)
            yield outgoing(str(n).encode())

    assert server.sql(Leased).inserts.insert_many(server.connection, messages()) == 1_500


def test_many_that_fail_half_way_leave_nothing(server: Server) -> None:
    def messages() -> Iterator[Outgoing]:
        for _ in range(1_200):
            yield outgoing()
        raise ZeroDivisionError

    second_session = server.another()
    with pytest.raises(ZeroDivisionError), server.transaction(second_session):
        queue_sql(Leased, second_session).inserts.insert_many(second_session, messages())

    assert server.rows(Leased) == []


def test_same_id_twice_is_two_messages(server: Server) -> None:
    identity = uuid.uuid4()
    server.put(Leased, 2, id=identity)
    assert [row.id for row in server.rows(Leased)] == [identity] * 2


def test_missing_table_is_a_queue_that_is_not_found(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leased._meta, "db_table", "no_such_table")
    sql = queue_sql(Leased, server.connection)

    with pytest.raises(QueueNotFound, match="no_such_table"):
        sql.inserts.insert(server.connection, outgoing())
    with pytest.raises(QueueNotFound, match="no_such_table"):
        sql.inserts.insert_many(server.connection, [outgoing()])
    with pytest.raises(QueueNotFound, match="no_such_table"):
        sql.inserts.insert_from(server.connection, StoreTable.of(DelayedMessage, "due"), [1])


def test_message_that_is_claimed_whole_can_be_put_back_as_it_was(server: Server) -> None:
    sent = outgoing(b"body", '{"a": "b"}', expires_ms=60_000, recipient="me", priority=1, correlation_id="c",
                    reply_to_address="r")  # fmt: skip
    server.sql(AddressedUrgent).inserts.insert(server.connection, sent)
    (stored,) = server.rows(AddressedUrgent)

    (claimed,) = server.sql(AddressedUrgent).claims.claim_by_delete(
        server.connection, levels(3, ("me",)), 5, whole=True
    )

    row = whole(AddressedUrgent, claimed)
    assert (row.seq, row.id, row.headers, row.body) == (stored.seq, sent.id, sent.headers, sent.body)
    assert (row.deliveries, row.cancels, row.failures) == (0, 0, None)
    assert (row.expires, row.enqueued_at) == (stored.expires, stored.enqueued_at)
    assert row.expires is not None
    assert row.expires.tzinfo is not None
    assert row.enqueued_at.tzinfo is not None
    assert (row.recipient, row.priority, row.correlation_id, row.reply_to_address) == ("me", 1, "c", "r")
