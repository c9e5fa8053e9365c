"""Copies for consumers: put in by a send that asks in passing who subscribes, and in the place of a message that named
no lock."""

from __future__ import annotations

import threading
import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction
from django.utils import timezone

from queueapp.models import Now, Subscription
from queueapp.sending.fanout import TABLE
from tests.in_process_worker import DEADLINE
from tests.queueapp.sql.server import Server, outgoing
from tests.testapp.models import Addressed, AddressedUrgent
from tests.testapp.ordering import Fenced

QUEUES = [Addressed, AddressedUrgent]


def subscribe(server: Server, queue: Any, *names: str, type_name: str = "") -> int:
    """Make rows for these; returns the sum of the marks."""
    rows = Subscription.objects.using(server.alias)
    for name in names:
        rows.create(queue=queue._meta.label, consumer=name, type_name=type_name)
    return sum(rows.filter(queue=queue._meta.label).values_list("mark", flat=True))


def recipients(server: Server, queue: Any) -> list[str]:
    return [row.recipient for row in server.rows(queue)]


@pytest.mark.parametrize("queue", QUEUES)
def test_a_send_stores_a_copy_for_each_where_the_rows_are_as_it_thinks(server: Server, queue: Any) -> None:
    mark = subscribe(server, queue, "one", "two")
    subscribe(server, QUEUES[queue is Addressed], "another queue's")
    message = outgoing(b"x", '{"a": "b"}', correlation_id="c", reply_to_address="r", is_barrier=True, expires_ms=60_000)

    stored = server.sql(queue).fanout.insert_copies(server.connection, message, ["two", "one"], TABLE, mark)

    assert stored == 2
    first, second = server.rows(queue)
    assert (first.recipient, second.recipient) == ("two", "one")
    for row in (first, second):
        assert (row.id, bytes(row.body), row.headers) == (message.id, b"x", '{"a": "b"}')
        assert (row.correlation_id, row.reply_to_address, row.is_barrier) == ("c", "r", True)
        assert row.expires is not None


def test_a_message_without_a_body_has_copies_without_one(server: Server) -> None:
    mark = subscribe(server, Addressed, "one")

    assert server.sql(Addressed).fanout.insert_copies(server.connection, outgoing(None), ["one"], TABLE, mark) == 1

    assert server.rows(Addressed)[0].body is None


@pytest.mark.parametrize("mark", [0, -1, 2**62])
def test_a_send_that_thinks_otherwise_stores_nothing(server: Server, mark: int) -> None:
    subscribe(server, Addressed, "one")

    assert server.sql(Addressed).fanout.insert_copies(server.connection, outgoing(), ["one"], TABLE, mark) == 0

    assert server.rows(Addressed) == []


def test_a_row_that_is_not_committed_does_not_count(server: Server) -> None:
    if server.vendor == "microsoft":
        pytest.skip("what is not committed is waited for on SQL Server")
    mark = subscribe(server, Addressed, "one")
    with server.rolled_back(second_session := server.another()):
        with second_session.cursor() as cursor:
            cursor.execute(
                f"INSERT INTO {TABLE} (queue, consumer, mark) VALUES (%s, %s, %s)", [Addressed._meta.label, "two", 5]
            )
        stored = server.sql(Addressed).fanout.insert_copies(server.connection, outgoing(), ["one"], TABLE, mark)

    assert stored == 1


@pytest.mark.parametrize("queue", QUEUES)
def test_a_message_is_replaced_by_copies_with_all_that_it_carries(server: Server, queue: Any) -> None:
    (seq,) = server.put(
        queue,
        body=b"x",
        headers='{"a": "b"}',
        correlation_id="c",
        reply_to_address="r",
        is_barrier=False,
        expires_ms=10**6,
    )
    before = timezone.now() - timedelta(days=3)
    queue.objects.using(server.alias).filter(seq=seq).update(
        enqueued_at=before, recoverable=False, cancels=4, deliveries=3, failures="[]"
    )
    original = server.row(queue, seq)

    with transaction.atomic(using=server.alias):
        replaced = server.sql(queue).fanout.replace_by_copies(server.connection, [seq], ["one", "two"])

    assert replaced == 1
    copies = server.rows(queue)
    assert [copy.recipient for copy in copies] == ["one", "two"]
    kept = [f.name for f in queue._meta.local_concrete_fields if f.name not in ("seq", "recipient", "failures")]
    for copy in copies:
        assert copy.seq > seq
        for name in kept:
            expected = 0 if name in ("cancels", "deliveries") else getattr(original, name)
            assert getattr(copy, name) == expected, name
        assert (copy.failures, copy.lease_token, copy.lease_owner, copy.lease_expires) == (None,) * 4


def test_copies_stand_in_the_order_of_their_originals(server: Server) -> None:
    seqs = server.put(Addressed, 4)
    ids = [row.id for row in server.rows(Addressed)]

    with transaction.atomic(using=server.alias):
        server.sql(Addressed).fanout.replace_by_copies(server.connection, seqs, ["one", "two"])

    assert [(row.id, row.recipient) for row in server.rows(Addressed)] == [(i, n) for i in ids for n in ("one", "two")]


def test_what_is_leased_is_replaced_under_its_token_alone(server: Server) -> None:
    seqs = server.put(Addressed, 3)
    token, leased = server.lease(Addressed, 2)
    sql = server.sql(Addressed)
    with transaction.atomic(using=server.alias):
        assert sql.fanout.replace_by_copies(server.connection, seqs, ["one", "two"], uuid.uuid4()) == 0
        assert sql.fanout.replace_by_copies(server.connection, seqs, ["one", "two"], token) == 2
        assert sql.fanout.replace_by_copies(server.connection, seqs, ["one", "two"], token) == 0

    assert recipients(server, Addressed) == ["", "one", "two", "one", "two"]
    assert all(seq not in server.seqs(Addressed) for seq in leased)


def test_leased_locked_and_expired_messages_stay(server: Server) -> None:
    free, leased, locked, expired, held_back, addressed = server.put(Addressed, 6)
    rows = Addressed.objects.using(server.alias)
    rows.filter(seq=leased).update(lease_token=uuid.uuid4(), lease_expires=Now() + timedelta(hours=1))
    rows.filter(seq=held_back).update(lease_expires=Now() + timedelta(hours=1))
    rows.filter(seq=expired).update(expires=Now() - timedelta(hours=1))
    rows.filter(seq=addressed).update(recipient="a.consumer")
    second_session = server.another()
    with server.rolled_back(second_session):
        assert server.sql(Addressed).failures.lock(second_session, locked, None, 1000) is not None
        with transaction.atomic(using=server.alias):
            replaced = server.sql(Addressed).fanout.replace_by_copies(
                server.connection, [free, leased, locked, expired, held_back, addressed], ["one", "two"]
            )

    assert replaced == 1
    assert recipients(server, Addressed) == ["", "", "", "", "a.consumer", "one", "two"]


def test_copies_of_a_consumer_are_another_ones_or_nobodys(server: Server) -> None:
    seqs = server.put(Addressed, 2, recipient="old") + server.put(Addressed)
    sql = server.sql(Addressed)
    with transaction.atomic(using=server.alias):
        assert sql.fanout.replace_by_copies(server.connection, seqs[:1], ["new"], recipient="old") == 1
        assert sql.fanout.replace_by_copies(server.connection, seqs, [], recipient="old") == 1

    assert recipients(server, Addressed) == ["", "new"]


def test_of_two_that_replace_at_once_one_does(server: Server) -> None:
    seqs = server.put(Addressed, 200)
    counts: list[int] = []
    start = threading.Barrier(4)

    def replace() -> None:
        connection = connections[server.alias]
        try:
            start.wait(DEADLINE)
            for first in range(0, 200, 20):
                with transaction.atomic(using=server.alias):
                    seq = seqs[first : first + 20]
                    counts.append(server.sql(Addressed).fanout.replace_by_copies(connection, seq, ["one", "two"]))
        finally:
            connection.close()

    threads = [threading.Thread(target=replace) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)

    assert sum(counts) == 200
    assert sorted(recipients(server, Addressed)) == ["one"] * 200 + ["two"] * 200


def test_a_queue_with_barriers_is_locked_for_its_copies(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sql = server.sql(Fenced)
    (seq,) = server.put(Fenced)
    mark = subscribe(server, Fenced, "one")
    with transaction.atomic(using=server.alias):
        assert sql.fanout.insert_copies(server.connection, outgoing(is_barrier=True), ["one", "two"], TABLE, mark) == 2
        assert sql.fanout.replace_by_copies(server.connection, [seq], ["one", "two"]) == 1

    assert [(row.recipient, row.is_barrier) for row in server.rows(Fenced)] == [
        ("one", True), ("two", True), ("one", False), ("two", False),
    ]  # fmt: skip
