"""Every statement of NServiceBus' transports runs on tables that our migrations made, and means there what it means on
theirs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from queueapp.operations import schema_check
from queueapp.sql import queue_sql
from queueapp.sql.claims import SEQ, SeqRange
from tests.nservicebus import Endpoint
from tests.queueapp.sql.server import ALL, Server, levels, outgoing, seqs_of, whole, within
from tests.testapp.models import AddressedUrgent, Interop, Leased, Readable, Short, Transactional, Urgent

EndpointAt = Callable[[Any], Endpoint]
#: One of each shape.
QUEUES = [Leased, Transactional, Urgent, AddressedUrgent, Short, Interop]

each_queue = pytest.mark.parametrize("queue", QUEUES, ids=lambda queue: queue.__name__)


def ranges_of(queue: Any) -> list[SeqRange]:
    """Where a claim of ours finds what an endpoint has sent: no recipient, priority 0."""
    return list(ALL) if queue.delivery.priorities == 1 else levels(queue.delivery.priorities)


def hold_first(server: Server, connection: Any, queue: Any) -> int:
    """Take the first message by a claim of ours, in a transaction that stays open."""
    (row,) = queue_sql(queue, connection).claims.claim_by_delete(connection, ranges_of(queue), 1)
    return int(row[SEQ])


@each_queue
def test_what_they_send_is_received_whole(server: Server, endpoint_at: EndpointAt, queue: Any) -> None:
    identity = endpoint_at(queue).send(b'{"name": "theirs"}', {"NServiceBus.ContentType": "ß 🚀"})

    (claimed,) = server.sql(queue).claims.claim_by_delete(server.connection, ranges_of(queue), 5, whole=True)

    row = whole(queue, claimed)
    assert (row.id, row.headers, row.body) == (
        identity, '{"NServiceBus.ContentType": "\\u00df \\ud83d\\ude80"}', b'{"name": "theirs"}'
    )  # fmt: skip
    assert (row.deliveries, row.cancels, row.failures, row.recipient, row.priority) == (0, 0, None, "", 0)
    assert row.expires is None


def test_the_columns_that_older_senders_fill_are_ours_too(server: Server, endpoint_at: EndpointAt) -> None:
    endpoint, values = endpoint_at(Leased), ("c", "r", None, None, "{}", None)
    if server.vendor == "microsoft":
        statement = endpoint.text("send, as it was")
        server.run(statement, "8a3f1c2e-0000-4000-8000-000000000001", *values)
    else:
        server.run(
            "INSERT INTO testapp_leased (Id, CorrelationId, ReplyToAddress, Recoverable, Expires, Headers, Body) "
            "VALUES ('8a3f1c2e-0000-4000-8000-000000000001', 'c', 'r', true, NULL, '{}', NULL)"
        )

    (row,) = server.rows(Leased)

    assert (row.correlation_id, row.reply_to_address, row.recoverable, row.body) == ("c", "r", True, None)


@each_queue
def test_they_receive_in_order_what_we_send(server: Server, endpoint_at: EndpointAt, queue: Any) -> None:
    sent = [outgoing(bytes([n]), '{"n": "1"}') for n in range(3)] + [outgoing(None)]
    server.sql(queue).inserts.insert_many(server.connection, sent)
    endpoint = endpoint_at(queue)

    received = [endpoint.receive() for _ in range(5)]

    assert [message and (message.id, message.expired, message.body) for message in received] == [
        *((message.id, False, message.body) for message in sent),
        None,
    ]


@each_queue
def test_neither_takes_what_the_other_is_handling(server: Server, endpoint_at: EndpointAt, queue: Any) -> None:
    first, second, third = server.put(queue, 3)
    ids = {row.seq: row.id for row in server.rows(queue)}
    holder, endpoint, another = server.another(), endpoint_at(queue), endpoint_at(queue)

    with server.rolled_back(holder):
        assert hold_first(server, holder, queue) == first
        with within(), endpoint.handling() as second_row:
            assert second_row is not None
            assert second_row.id == ids[second]
            delete = server.sql(queue).claims.claim_by_delete(server.connection, ranges_of(queue), 5)
            assert seqs_of(delete) == [third]
            assert another.receive() is None
            assert another.peek() == 0

    assert server.seqs(queue) == [first], "theirs and ours were committed, and one was rolled back"


@each_queue
def test_what_they_fail_on_is_back(server: Server, endpoint_at: EndpointAt, queue: Any) -> None:
    seqs = server.put(queue)
    endpoint = endpoint_at(queue)

    with pytest.raises(ValueError, match="no"), endpoint.handling():
        raise ValueError("no")

    assert server.seqs(queue) == seqs


def test_their_peek_is_the_span_of_unlocked_rows(server: Server, endpoint_at: EndpointAt) -> None:
    seqs = server.put(Transactional, 4)
    endpoint, holder = endpoint_at(Transactional), server.another()

    assert endpoint.peek() == seqs[3] - seqs[0] + 1
    with server.rolled_back(holder):
        hold_first(server, holder, Transactional)
        assert endpoint.peek() == seqs[3] - seqs[1] + 1
    endpoint.purge()
    assert endpoint.peek() == 0
    assert server.seqs(Transactional) == []


@each_queue
def test_expiry_is_by_one_clock(server: Server, endpoint_at: EndpointAt, queue: Any) -> None:
    endpoint = endpoint_at(queue)
    endpoint.send(b"theirs, late", expires=timedelta(milliseconds=1))
    endpoint.send(b"theirs", expires=timedelta(hours=1))
    server.sql(queue).inserts.insert_many(
        server.connection, [outgoing(b"late", expires_ms=1), outgoing(b"o", expires_ms=10**7)]
    )
    late = max(row.expires for row in server.rows(queue) if row.body.endswith(b"late"))
    # datetime counts in 3 ms.
    server.passed(lambda: late + timedelta(milliseconds=10))

    if server.vendor == "microsoft":
        endpoint.purge_expired()
    else:
        assert len(server.sql(queue).maintenance.purge_expired(server.connection, 10)) == 2

    assert [bytes(row.body) for row in server.rows(queue)] == [b"theirs", b"o"]
    assert [batch.expired for batch in (endpoint.receive(), endpoint.receive()) if batch] == [False, False]


def test_they_see_that_a_message_of_ours_has_expired(server: Server, endpoint_at: EndpointAt) -> None:
    server.sql(Leased).inserts.insert(server.connection, outgoing(b"late", expires_ms=1))
    (row,) = server.rows(Leased)
    server.passed(lambda: row.expires + timedelta(milliseconds=10))

    received = endpoint_at(Leased).receive()

    assert received is not None
    assert received.expired is True


@each_queue
def test_their_delayed_messages_are_moved_into_it(
    server: Server, endpoint_at: EndpointAt, queue: Any, delayed_table: None
) -> None:
    endpoint = endpoint_at(queue)
    endpoint.store_delayed(b"due", timedelta(milliseconds=1), {"a": "b"})
    endpoint.store_delayed(b"later", timedelta(days=26, hours=2, minutes=3, seconds=4, milliseconds=5))
    first = endpoint.next_due()
    assert first is not None
    due = server.backend.now(server.connection) + first
    server.passed(lambda: due + timedelta(milliseconds=10))

    endpoint.move_due()

    (row,) = server.rows(queue)
    assert (row.headers, bytes(row.body), row.expires, row.recipient, row.priority, row.deliveries) == (
        '{"a": "b"}', b"due", None, "", 0, 0
    )  # fmt: skip
    remaining = endpoint.next_due()
    assert remaining is not None
    assert timedelta(days=26, hours=2) < remaining < timedelta(days=26, hours=3)
    assert seqs_of(server.sql(queue).claims.claim_by_delete(server.connection, ranges_of(queue), 5)) == [row.seq]


def test_their_script_leaves_a_table_of_ours_alone(server: Server, endpoint_at: EndpointAt) -> None:
    (seq,) = server.put(Interop)
    endpoint = endpoint_at(Interop)

    endpoint.create()

    assert server.seqs(Interop) == [seq]
    assert schema_check.inspect([Interop], server.alias) == []
    endpoint.drop(endpoint.delayed)


# -- what an endpoint looks at when it starts: SQL Server only --------------------------------------------------------


def needs_inspection(server: Server) -> None:
    if server.vendor != "microsoft":
        pytest.skip("endpoints inspect tables on SQL Server only")


def test_an_endpoint_that_starts_is_content_with_a_queue_in_its_wire_format(
    server: Server, endpoint_at: EndpointAt
) -> None:
    needs_inspection(server)
    endpoint = endpoint_at(Interop)

    for name in (
        "has an index on Expires",
        "has a nonclustered index on RowVersion",
        "has Index_RowVersion",
        "has Recoverable",
    ):
        assert endpoint.finds(name) == 1, name
    assert endpoint.finds("has Unicode headers") == "nvarchar"


def test_an_endpoint_that_starts_misses_one_index_on_any_other_queue(server: Server, endpoint_at: EndpointAt) -> None:
    needs_inspection(server)
    for queue in (Leased, AddressedUrgent):
        endpoint = endpoint_at(queue)
        assert endpoint.finds("has an index on Expires") == 1
        assert endpoint.finds("has a nonclustered index on RowVersion") == 0


def test_the_index_that_it_looks_for_is_missed_with_the_statement_that_makes_it(server: Server) -> None:
    if server.vendor != "microsoft":
        assert schema_check.inspect([Interop], server.alias) == []
        return
    server.run(f"DROP INDEX Index_RowVersion ON {Interop._meta.db_table}")

    (found,) = schema_check.inspect([Interop], server.alias)

    assert "NServiceBus looks for" in found.problem
    server.run(found.remedy)
    assert schema_check.inspect([Interop], server.alias) == []


def test_a_table_with_a_readable_body_and_an_odd_name_is_received_as_well(
    server: Server, endpoint_at: EndpointAt
) -> None:
    endpoint = endpoint_at(Readable)
    endpoint.queue = server.connection.ops.quote_name(Readable._meta.db_table)
    identity = endpoint.send(b"readable")

    received = endpoint.receive()

    assert received is not None
    assert received.id == identity
