"""Foreign producers and consumers on our tables, and our workers on foreign ones, without loss.

The foreign side uses the statements of NServiceBus' PostgreSQL transport to the letter: an INSERT of the columns of
their tables and no others, a DELETE of the lowest row that nobody has locked, a peek that locks.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from django.db import connection

from queueapp import Context, consumer
from queueapp.consuming.registry import registered
from queueapp.models import PoisonMessage
from tests.inprocess import Worker, eventually, real_commits
from tests.testapp.messages import Ping
from tests.testapp.models import Effect, ForeignPostgres, Leased, Transactional

pytestmark = [
    real_commits,
    pytest.mark.skipif(connection.vendor != "postgresql", reason="the foreign statements are PostgreSQL's"),
]

FOREIGN_TABLE = (
    "CREATE TABLE foreign_postgres (Id uuid PRIMARY KEY, Expires timestamp NULL, Headers text NOT NULL, "
    "Body bytea NULL, Seq serial NOT NULL UNIQUE)"
)


def foreign_connection() -> psycopg.Connection[Any]:
    parameters = connection.get_connection_params()
    wanted = {k: v for k, v in parameters.items() if k in ("dbname", "host", "port", "user", "password")}
    return psycopg.connect(**wanted, autocommit=True)


def foreign_send(raw: psycopg.Connection[Any], table: str, name: str, expires: timedelta | None = None) -> uuid.UUID:
    """As NServiceBus' PostgreSQL transport sends: four columns, the expiry by the database's clock as UTC wall time."""
    identity = uuid.uuid4()
    headers = {
        "NServiceBus.MessageId": str(identity),
        "NServiceBus.EnclosedMessageTypes": "tests.testapp.messages.Ping, Acme, Version=1.0.0.0; Acme.IPing, Acme",
        "NServiceBus.ContentType": "application/json",
        "NServiceBus.TimeSent": "2026-01-02 03:04:05:678901 Z",
        "NServiceBus.CorrelationId": "conversation-7",
        "NServiceBus.ReplyToAddress": "billing",
    }
    left = None if expires is None else int(expires.total_seconds() * 1000)
    raw.execute(
        f"INSERT INTO {table} (Id, Expires, Headers, Body) VALUES (%s, "
        "CASE WHEN %s::int IS NOT NULL THEN now() AT TIME ZONE 'UTC' + (%s::int * interval '1 ms') END, %s, %s)",
        (identity, left, left, json.dumps(headers), json.dumps({"name": name}).encode()),
    )
    return identity


def foreign_receive(raw: psycopg.Connection[Any], table: str) -> tuple[Any, ...] | None:
    """As it receives: the lowest unlocked row goes, in the transaction of the handler."""
    return raw.execute(
        f"DELETE FROM {table} rs WHERE rs.id = (SELECT id FROM {table} ORDER BY Seq LIMIT 1 FOR UPDATE SKIP LOCKED) "
        "RETURNING rs.id, CASE WHEN rs.Expires IS NULL THEN 0 WHEN rs.Expires > now() AT TIME ZONE 'UTC' THEN 0 ELSE 1 END, "
        "rs.Headers, rs.Body"
    ).fetchone()


def foreign_peek(raw: psycopg.Connection[Any], table: str) -> int:
    """As it peeks: the span between the lowest and the highest row that nobody has locked."""
    row = raw.execute(
        f"SELECT COALESCE((SELECT Seq FROM {table} ORDER BY Seq DESC LIMIT 1 FOR UPDATE SKIP LOCKED) - "
        f"(SELECT Seq FROM {table} ORDER BY Seq LIMIT 1 FOR UPDATE SKIP LOCKED) + 1, 0)"
    ).fetchone()
    assert row is not None
    return int(row[0])


@pytest.fixture
def foreign_table() -> Iterator[None]:
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE IF EXISTS foreign_postgres")
        cursor.execute(FOREIGN_TABLE)
    yield
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE foreign_postgres")


@pytest.mark.parametrize("queue", [Leased, Transactional])
def test_foreign_producers_and_consumers_share_our_table_with_our_own_without_loss(queue: Any) -> None:
    table = queue._meta.db_table
    received: list[str] = []
    stop = threading.Event()

    def consume() -> None:
        with foreign_connection() as raw:
            while not stop.is_set():
                foreign_peek(raw, table)
                row = foreign_receive(raw, table)
                if row is not None:
                    received.append(json.loads(bytes(row[3]))["name"])

    def produce(side: int) -> None:
        with foreign_connection() as raw:
            for n in range(100):
                foreign_send(raw, table, f"foreign {side} {n}")

    worker = Worker(queue, concurrency=2).start()
    threads = [threading.Thread(target=consume), *(threading.Thread(target=produce, args=(n,)) for n in range(2))]
    try:
        for thread in threads:
            thread.start()
        for n in range(200):
            queue.send(Ping(f"ours {n}"))
        expected = {f"ours {n}" for n in range(200)} | {f"foreign {side} {n}" for side in range(2) for n in range(100)}
        eventually(lambda: expected <= set(received) | set(Effect.objects.values_list("name", flat=True)))
        eventually(lambda: not queue.objects.exists())
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        worker.stop()
    handled = list(Effect.objects.values_list("name", flat=True))
    assert set(received) | set(handled) == expected
    # A foreign consumer knows row locks and not our leases: it may take what a worker has leased, which is then handled
    # twice. Queues that are shared with foreign consumers should be TRANSACTIONAL.
    if queue is Transactional:
        assert len(received) + len(handled) == len(expected)
    assert not queue.objects.exists()


def test_the_foreign_statements_of_spec_001_find_the_columns_they_name() -> None:
    with foreign_connection() as raw:
        raw.execute(
            f"INSERT INTO {Leased._meta.db_table} (Id, CorrelationId, ReplyToAddress, Recoverable, Expires, Headers, Body) "
            "VALUES (%s, 'c', 'r', true, NULL, '{}', NULL)",
            (uuid.uuid4(),),
        )
    row = Leased.objects.get()
    assert (row.correlation_id, row.reply_to_address, row.recoverable, row.priority, row.recipient) == (
        "c",
        "r",
        True,
        0,
        "",
    )
    assert row.deliveries == 0
    assert row.enqueued_at is not None


def test_a_foreign_message_is_read_by_its_own_header_names() -> None:
    with foreign_connection() as raw:
        identity = foreign_send(raw, Leased._meta.db_table, "theirs")
    with Leased.receive(1) as batch:
        (message,) = batch
        assert message.id == identity
        assert message.message_type == "tests.testapp.messages.Ping"
        assert (message.correlation_id, message.reply_to) == ("conversation-7", "billing")
        assert message.sent_at is not None
        assert message.sent_at.isoformat() == "2026-01-02T03:04:05.678901+00:00"
        assert message.decode(Ping) == Ping("theirs")
        message.ack()


def test_a_foreign_table_is_sent_to_in_its_own_wire_format(foreign_table: None) -> None:
    identity = ForeignPostgres.send(Ping("ours"), correlation_id="c1", reply_to="me", expires_in=timedelta(minutes=1))
    ForeignPostgres.send_many([Ping("bulk")], expires_in=timedelta(minutes=1))
    with foreign_connection() as raw:
        first, second = foreign_receive(raw, "foreign_postgres"), foreign_receive(raw, "foreign_postgres")
    assert first is not None
    assert second is not None
    assert (first[0], first[1], second[1]) == (identity, 0, 0)
    headers = json.loads(first[2])
    assert headers["NServiceBus.MessageId"] == str(identity)
    assert headers["NServiceBus.EnclosedMessageTypes"] == "tests.testapp.messages.Ping"
    assert headers["NServiceBus.ContentType"] == "application/json"
    assert (headers["NServiceBus.CorrelationId"], headers["NServiceBus.ReplyToAddress"]) == ("c1", "me")
    assert headers["NServiceBus.TimeSent"].endswith(" Z")
    assert json.loads(bytes(second[3]))["name"] == "bulk"


def test_an_expired_message_of_a_foreign_table_is_not_received(foreign_table: None) -> None:
    with foreign_connection() as raw:
        foreign_send(raw, "foreign_postgres", "late", expires=timedelta(milliseconds=-1))
        foreign_send(raw, "foreign_postgres", "in time", expires=timedelta(hours=1))
    with ForeignPostgres.receive(10) as batch:
        assert [message.decode(Ping).name for message in batch] == ["in time"]


def test_a_worker_receives_a_foreign_table_transactionally_and_counts_attempts_in_the_headers(
    foreign_table: None,
) -> None:
    attempts: list[int] = []

    def handler(message: Ping, context: Context) -> None:
        attempts.append(context.attempt)
        Effect.objects.create(name="undone" if message.fail else message.name)
        if message.fail:
            raise ValueError(message.name)

    for own in registered.of(ForeignPostgres):
        registered.remove(own.name)
    consumer(ForeignPostgres, name="wire", attempts=3, retry_delay=0)(handler)
    worker = Worker(ForeignPostgres, concurrency=1).start()
    try:
        with foreign_connection() as raw:
            foreign_send(raw, "foreign_postgres", "theirs")
        ForeignPostgres.send(Ping("bad", fail=1))
        eventually(lambda: PoisonMessage.objects.exists() and Effect.objects.exists())
    finally:
        worker.stop()
        registered.remove("wire")
    assert sorted(attempts) == [1, 1, 2, 3]
    assert [effect.name for effect in Effect.objects.all()] == ["theirs"]
    poison = PoisonMessage.objects.get()
    assert poison.attempts == 3
    assert "queueapp.Attempts" not in poison.headers
    assert not ForeignPostgres.objects.exists()


def test_a_foreign_table_has_no_place_for_leases_and_is_received_in_careful_times_all_the_same(
    foreign_table: None,
) -> None:
    for own in registered.of(ForeignPostgres):
        registered.remove(own.name)
    names: list[str] = []

    @consumer(ForeignPostgres, name="wire")
    def act(message: Ping) -> None:
        names.append(message.name)

    ForeignPostgres.send_many([Ping("one"), Ping("two")])
    worker = Worker(ForeignPostgres, concurrency=1)
    worker.pump.careful = True
    worker.start()
    try:
        eventually(lambda: worker.pump.stats.handled == 2)
    finally:
        worker.stop()
        registered.remove("wire")
    assert names == ["one", "two"]
    assert worker.pump.trouble() == ""
