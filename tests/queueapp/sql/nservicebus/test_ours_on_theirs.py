"""Our verbs on tables that NServiceBus' scripts made, with an endpoint that uses them meanwhile. The verbs one by one:
``tests/queueapp/sql/test_foreign_tables.py``."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from queueapp.sql import queue_sql
from tests.nservicebus import Endpoint
from tests.queueapp.sql.server import ALL, Server, outgoing, seqs_of, whole, within

EndpointAt = Callable[[Any], Endpoint]


def test_what_we_send_they_receive(server: Server, endpoint_at: EndpointAt, their_queue: Any) -> None:
    item = outgoing(b"1", '{"A": "ß"}')
    many = [outgoing(None), outgoing(b"", expires_ms=3_600_000)]
    server.sql(their_queue).inserts.insert(server.connection, item)
    assert server.sql(their_queue).inserts.insert_many(server.connection, many) == 2
    endpoint = endpoint_at(their_queue)
    assert endpoint.peek() == 3

    received = [endpoint.receive() for _ in range(3)]

    assert [found and (found.id, found.expired, found.body) for found in received] == [
        (message.id, False, message.body) for message in (item, *many)
    ]
    assert received[0] is not None
    assert received[0].headers == {"A": "ß"}
    assert endpoint.receive() is None


def test_what_they_send_and_delay_we_receive(server: Server, endpoint_at: EndpointAt, their_queue: Any) -> None:
    endpoint = endpoint_at(their_queue)
    identity = endpoint.send(b"sent", {"a": "b"})
    endpoint.store_delayed(b"delayed", timedelta(milliseconds=1), {"c": "d"})
    first = endpoint.next_due()
    assert first is not None
    due = server.backend.now(server.connection) + first
    server.passed(lambda: due + timedelta(milliseconds=10))
    endpoint.move_due()

    claimed = server.sql(their_queue).claims.claim_by_delete(server.connection, ALL, 5, whole=True)

    sent, moved = (whole(their_queue, message) for message in claimed)
    assert (sent.id, sent.headers, sent.body) == (identity, '{"a": "b"}', b"sent")
    assert (moved.headers, moved.body) == ('{"c": "d"}', b"delayed")
    assert endpoint.next_due() is None


def test_neither_takes_what_the_other_is_handling(server: Server, endpoint_at: EndpointAt, their_queue: Any) -> None:
    seqs = server.put(their_queue, 3)
    holder, endpoint = server.another(), endpoint_at(their_queue)

    with server.rolled_back(holder):
        assert seqs_of(queue_sql(their_queue, holder).claims.claim_by_delete(holder, ALL, 1)) == seqs[:1]
        with within(), endpoint.handling() as second:
            assert second is not None
            delete = server.sql(their_queue).claims.claim_by_delete(server.connection, ALL, 5)
            assert seqs_of(delete) == seqs[2:]

    assert server.seqs(their_queue) == seqs[:1]


def test_a_message_that_failed_with_us_they_receive_with_the_count_in_its_headers(
    server: Server, endpoint_at: EndpointAt, their_queue: Any
) -> None:
    (seq,) = server.put(their_queue)
    second_session = server.another()
    with server.transaction(second_session):
        sql = queue_sql(their_queue, second_session)
        sql.failures.lock(second_session, seq, None, 1_000)
        sql.failures.requeue(
            second_session, seq, deliveries=1, cancels=0, failures="[]", headers='{"queueapp.Attempts": "1"}'
        )

    received = endpoint_at(their_queue).receive()

    assert received is not None
    assert received.headers == {"queueapp.Attempts": "1"}


def test_their_script_runs_twice(server: Server, endpoint_at: EndpointAt, their_queue: Any) -> None:
    seqs = server.put(their_queue)

    endpoint_at(their_queue).create()

    assert server.seqs(their_queue) == seqs


def test_an_endpoint_that_starts_finds_its_own_table_right(
    server: Server, endpoint_at: EndpointAt, their_queue: Any
) -> None:
    if server.vendor != "microsoft":
        return  # it inspects tables on SQL Server only
    endpoint = endpoint_at(their_queue)
    for name in ("has an index on Expires", "has a nonclustered index on RowVersion", "has Recoverable"):
        assert endpoint.finds(name) == 1, name
