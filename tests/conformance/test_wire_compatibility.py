"""Endpoints of NServiceBus on our tables, and our workers on theirs, without loss: whole messages, sent and handled by
both.

The foreign side uses the statements of its transports (``tests/nservicebus.py``). Statement by statement, on each
database: ``tests/queueapp/sql/nservicebus/``.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.db import connection

from queueapp import Context, consumer, message_type
from queueapp.consuming.registry import registered
from queueapp.failures import apply_verdict, poison_operations
from queueapp.failures.history import ProcessDied
from queueapp.models import PoisonMessage
from tests.in_process_worker import Worker, eventually, real_commits
from tests.nservicebus import Endpoint, headers_of
from tests.testapp.messages import Ping
from tests.testapp.models import Effect, ForeignPostgres, ForeignSqlServer, Interop, Leased, Transactional
from tests.workers.receiving.single_receiver import SingleReceiver

pytestmark = real_commits

#: A queue in a table of theirs, on the database of this run.
FOREIGN: Any = ForeignPostgres if connection.vendor == "postgresql" else ForeignSqlServer


@message_type("Acme.Sales.OrderPlaced")
class OrderPlaced(msgspec.Struct):
    """A message that both sides have a class for."""

    order: int


def ping(name: str) -> bytes:
    return json.dumps({"name": name}).encode()


@pytest.fixture
def endpoints() -> Iterator[Any]:
    """Endpoints on the tables of queues."""
    made: list[Endpoint] = []

    def make(queue: Any) -> Endpoint:
        made.append(Endpoint.at("default", queue._meta.db_table))
        return made[-1]

    yield make
    for item in made:
        item.close()


@pytest.fixture
def foreign_table(endpoints: Any) -> Iterator[Endpoint]:
    """A table that their script has made, with an endpoint on it."""
    endpoint: Endpoint = endpoints(FOREIGN)
    endpoint.drop()
    endpoint.create()
    yield endpoint
    endpoint.drop()


@pytest.fixture
def only(no_consumers: None) -> Any:
    """Register a consumer for a queue that has no other, until the end of the test."""

    def register(queue: Any, handler: Any, **options: Any) -> None:
        for registration in registered.of(queue):
            registered.remove(registration.name)
        consumer(queue, name="wire", **options)(handler)

    return register


@pytest.mark.parametrize("queue", [Leased, Transactional])
def test_foreign_producers_and_consumers_share_our_table_with_our_own_without_loss(queue: Any, endpoints: Any) -> None:
    received: list[str] = []
    stop = threading.Event()

    def consume() -> None:
        endpoint = endpoints(queue)
        while not stop.is_set():
            endpoint.peek()
            found = endpoint.receive()
            if found is not None:
                assert found.body is not None
                received.append(json.loads(found.body)["name"])

    def produce(side: int) -> None:
        endpoint = endpoints(queue)
        for n in range(100):
            endpoint.send(ping(f"foreign {side} {n}"))

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


def test_a_foreign_message_is_read_by_its_own_header_names(endpoints: Any) -> None:
    identity = endpoints(Leased).send(ping("theirs"))
    with Leased.receive(1) as batch:
        (message,) = batch
        assert message.id == identity
        assert message.message_type == "tests.testapp.messages.Ping"
        assert (message.correlation_id, message.reply_to) == ("conversation-7", "billing")
        assert message.sent_at is not None
        assert message.sent_at.isoformat() == "2026-01-02T03:04:05.678901+00:00"
        assert message.decode(Ping) == Ping("theirs")
        message.ack()


# -- a table of our own in their wire format ---------------------------------------------------------------------------


def test_what_is_sent_in_their_wire_format_is_whole_to_an_endpoint(endpoints: Any) -> None:
    identity = Interop.send(OrderPlaced(1), correlation_id="c1", reply_to="me", headers={"tenant": "north"})
    Interop.send_many([OrderPlaced(2)])
    Interop.send({"untyped": True})
    endpoint = endpoints(Interop)

    first, second, third = (endpoint.receive() for _ in range(3))

    assert first.id == identity
    assert {name: value for name, value in first.headers.items() if name != "NServiceBus.TimeSent"} == {
        "NServiceBus.MessageId": str(identity),
        "NServiceBus.EnclosedMessageTypes": "Acme.Sales.OrderPlaced",
        "NServiceBus.ContentType": "application/json",
        "NServiceBus.CorrelationId": "c1",
        "NServiceBus.ReplyToAddress": "me",
        "tenant": "north",
    }
    assert first.headers["NServiceBus.TimeSent"].endswith(" Z")
    assert json.loads(first.body) == {"order": 1}
    assert (second.headers["NServiceBus.MessageId"], json.loads(second.body)) == (str(second.id), {"order": 2})
    assert second.headers["NServiceBus.CorrelationId"] == str(second.id), "as a message that begins a conversation"
    assert "NServiceBus.EnclosedMessageTypes" not in third.headers


def test_what_an_endpoint_sends_is_handled_in_the_transaction_of_its_handler(endpoints: Any, only: Any) -> None:
    seen: list[tuple[int, str | None, str | None]] = []

    def handle(message: OrderPlaced, context: Context) -> None:
        seen.append((message.order, context.correlation_id, context.reply_to))
        Effect.objects.create(name=str(message.order))

    only(Interop, handle)
    identity = uuid.uuid4()
    headers = headers_of(identity, EnclosedMessageTypes="Acme.Sales.OrderPlaced, Acme.Messages")
    endpoints(Interop).send(b'{"order": 7}', headers)
    worker = Worker(Interop, concurrency=1).start()
    try:
        eventually(lambda: not Interop.objects.exists())
    finally:
        worker.stop()

    assert seen == [(7, "conversation-7", "billing")]
    assert [effect.name for effect in Effect.objects.all()] == ["7"]


def test_what_was_delayed_retried_and_requeued_is_still_in_their_wire_format(endpoints: Any, only: Any) -> None:
    def refuse(message: OrderPlaced, context: Context) -> None:
        raise ValueError(message.order)

    only(Interop, refuse, attempts=2, retry_delay=0)
    identity = Interop.send(OrderPlaced(3), delay=timedelta(milliseconds=1))
    worker = Worker(Interop, concurrency=1, dispatcher=True).start()
    try:
        eventually(PoisonMessage.objects.exists)
    finally:
        worker.stop()
    poison_operations.requeue(poison_operations.find())

    received = endpoints(Interop).receive()

    assert received.id == identity
    assert received.headers["NServiceBus.MessageId"] == str(identity)
    assert received.headers["NServiceBus.EnclosedMessageTypes"] == "Acme.Sales.OrderPlaced"
    assert json.loads(received.body) == {"order": 3}


# -- their table -------------------------------------------------------------------------------------------------------


def test_a_foreign_table_is_sent_to_in_its_own_wire_format(foreign_table: Endpoint) -> None:
    identity = FOREIGN.send(Ping("ours"), correlation_id="c1", reply_to="me", expires_in=timedelta(minutes=1))
    FOREIGN.send_many([Ping("bulk")], expires_in=timedelta(minutes=1))
    first, second = foreign_table.receive(), foreign_table.receive()
    assert first is not None
    assert second is not None
    assert (first.id, first.expired, second.expired) == (identity, False, False)
    assert first.headers["NServiceBus.MessageId"] == str(identity)
    assert first.headers["NServiceBus.EnclosedMessageTypes"] == "tests.testapp.messages.Ping"
    assert first.headers["NServiceBus.ContentType"] == "application/json"
    assert (first.headers["NServiceBus.CorrelationId"], first.headers["NServiceBus.ReplyToAddress"]) == ("c1", "me")
    assert first.headers["NServiceBus.TimeSent"].endswith(" Z")
    assert second.body is not None
    assert json.loads(second.body)["name"] == "bulk"


def test_an_expired_message_of_a_foreign_table_is_not_received(foreign_table: Endpoint) -> None:
    foreign_table.send(ping("late"), expires=timedelta(milliseconds=-1))
    foreign_table.send(ping("in time"), expires=timedelta(hours=1))
    with FOREIGN.receive(10) as batch:
        assert [message.decode(Ping).name for message in batch] == ["in time"]


def test_a_worker_receives_a_foreign_table_transactionally_and_counts_attempts_in_the_headers(
    foreign_table: Endpoint, only: Any
) -> None:
    attempts: list[int] = []

    def handler(message: Ping, context: Context) -> None:
        attempts.append(context.attempt)
        Effect.objects.create(name="undone" if message.fail else message.name)
        if message.fail:
            raise ValueError(message.name)

    only(FOREIGN, handler, attempts=3, retry_delay=0)
    worker = Worker(FOREIGN, concurrency=1).start()
    try:
        foreign_table.send(ping("theirs"))
        FOREIGN.send(Ping("bad", fail=1))
        eventually(lambda: PoisonMessage.objects.exists() and Effect.objects.exists())
    finally:
        worker.stop()
    assert sorted(attempts) == [1, 1, 2, 3]
    assert [effect.name for effect in Effect.objects.all()] == ["theirs"]
    found = PoisonMessage.objects.get()
    assert found.attempts == 3
    assert "queueapp.Attempts" not in found.headers
    assert "queueapp.Died" not in found.headers
    assert not FOREIGN.objects.exists()


def test_the_headers_of_a_foreign_table_show_the_crash_of_its_process(foreign_table: Endpoint, only: Any) -> None:
    """A message that did is handled alone in its process until it is done."""
    seen: list[tuple[int, bool]] = []

    def act(message: Ping, context: Context) -> None:
        seen.append((context.attempt, bool(single_receiver.pump.state.quarantine.wanted)))
        if len(seen) < 3:
            raise ValueError

    only(FOREIGN, act, attempts=4, retry_delay=0)
    FOREIGN.send(Ping("dies"))
    single_receiver = SingleReceiver(FOREIGN)
    single_receiver.receive(1)
    seq = FOREIGN.objects.get().seq
    (registration,) = registered.of(FOREIGN)
    apply_verdict.fail(FOREIGN, "default", seq, ProcessDied("was killed"), consumer=registration, token=None)
    single_receiver.receive(1)
    assert {"queueapp.Attempts": "3", "queueapp.Died": "1"}.items() <= json.loads(FOREIGN.objects.get().headers).items()
    single_receiver.receive(1)

    assert seen == [(1, False), (3, True), (4, True)]
    assert not FOREIGN.objects.exists()


def test_a_foreign_table_without_lease_columns_is_received_during_crash_tracking(
    foreign_table: Endpoint, only: Any
) -> None:
    names: list[str] = []

    def act(message: Ping) -> None:
        names.append(message.name)

    only(FOREIGN, act)
    FOREIGN.send_many([Ping("one"), Ping("two")])
    worker = Worker(FOREIGN, concurrency=1)
    worker.pump.crash_tracking = True
    worker.start()
    try:
        eventually(lambda: worker.pump.stats.handled == 2)
    finally:
        worker.stop()
    assert names == ["one", "two"]
    assert worker.pump.health.degraded_text() == ""
