"""What is received: leases, acks, what is given back, and what is kept as poison."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import kombu
import pytest
from django.db import DatabaseError, connections
from kombu.asynchronous import Hub

import queueapp.contrib.celery  # noqa: F401 - makes the URL known
from queueapp.contrib.celery import in_flight, topology
from queueapp.contrib.celery.models import BrokerQueue
from queueapp.contrib.celery.process_agent import agent_of
from queueapp.failures import poison_operations
from queueapp.messages import new_id
from queueapp.models import Now, PoisonMessage
from tests.in_process_worker import eventually
from tests.kill_session import kill_this

from .consuming import Consume, drained, publish, rows


@contextlib.contextmanager
def without_poison(alias: str) -> Iterator[None]:
    """While there is nowhere to keep what is rejected."""
    table = PoisonMessage._meta.db_table

    def rename(old: str, new: str) -> None:
        with connections[alias].schema_editor() as editor:
            editor.alter_db_table(PoisonMessage, old, new)

    rename(table, "elsewhere")
    try:
        yield
    finally:
        rename("elsewhere", table)


def test_one_claim_takes_from_many_queues_and_no_more_than_the_prefetch_count(
    conn: Any, alias: str, consume: Consume
) -> None:
    for queue in ("a", "b"):
        publish(conn, *range(5), queue=queue)
    found = consume("a", "b", prefetch=6)

    drained(conn)

    assert len(found) == 6
    assert rows(alias).exclude(lease_token=None).count() == 6
    assert {message.delivery_info["routing_key"] for message in found} == {"a", "b"}
    assert found[0].channel.qos.can_consume_max_estimate() == 0
    found[0].ack()
    assert found[0].channel.qos.can_consume_max_estimate() == 1
    drained(conn)
    assert len(found) == 7


def test_an_ack_deletes_in_batches(conn: Any, alias: str, consume: Consume, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "MAX_KEYS", 7)  # of one statement
    publish(conn, *range(50))
    found = consume("q")
    eventually(lambda: drained(conn, 0.05) or len(found) == 50)

    for message in found:
        message.ack()

    eventually(lambda: not rows(alias).exists())
    leases = agent_of(alias).leases
    eventually(lambda: (leases.outstanding, leases.acked, leases.lost) == (0, 50, 0))


def test_a_late_ack_does_not_end_the_lease_of_another_worker(
    conn: Any, alias: str, consume: Consume, caplog: pytest.LogCaptureFixture
) -> None:
    publish(conn, "x")
    found = consume("q")
    drained(conn)
    rows(alias).update(lease_token=new_id())  # it has expired, and another worker has it

    found[0].ack()

    eventually(lambda: "1 lease was lost before the ack" in caplog.text)
    assert (agent_of(alias).leases.acked, agent_of(alias).leases.lost) == (0, 1)
    assert rows(alias).count() == 1


def test_a_redelivery_is_marked(conn: Any, consume: Consume) -> None:
    publish(conn, "x")
    found = consume("q")
    drained(conn)
    assert found[0].delivery_info["redelivered"] is False

    found[0].requeue()
    drained(conn)

    assert found[1].delivery_info["redelivered"] is True
    assert (found[0]._raw["redelivered"], found[1]._raw["redelivered"]) == (False, True)
    assert (found[0].deliveries, found[1].deliveries) == (1, 2)
    assert found[1].delivery_tag != found[0].delivery_tag


def test_a_requeued_message_keeps_its_place(conn: Any, consume: Consume) -> None:
    publish(conn, 1, 2, 3)
    found = consume("q", prefetch=1)
    drained(conn)

    found[0].requeue()
    drained(conn)

    assert [message.payload for message in found] == [1, 1]


def test_a_failed_release_is_retried(conn: Any, alias: str, consume: Consume) -> None:
    publish(conn, "x")
    found = consume("q")
    drained(conn)
    kill_this(found[0].channel._transport._session._connection)

    found[0].requeue()

    eventually(lambda: rows(alias).get().lease_token is None)
    eventually(lambda: drained(conn) or len(found) == 2)
    assert found[1].delivery_info["redelivered"] is True


def test_a_loop_that_is_left_has_nothing_of_the_connection(alias: str) -> None:
    hub = Hub()
    found: list[Any] = []
    with kombu.Connection(f"queueapp://{alias}") as conn:
        conn.transport.register_with_event_loop(conn.connection, hub)
        conn.transport.register_with_event_loop(conn.connection, hub)  # as after another connection was lost
        kombu.Consumer(conn.channel(), [kombu.Queue("q")], on_message=found.append).consume()
        publish(conn, "x")
        loop = hub.create_loop()
        eventually(lambda: next(loop) or found)
        assert (len(hub.on_tick), len(hub.readers)) == (1, 1)
        timers = [timer.entry for timer in hub.timer.queue]
        assert sum(not timer.canceled for timer in timers) == 1

    assert not hub.on_tick
    assert not hub.readers
    assert all(timer.canceled for timer in timers)
    hub.close()


def test_closing_gives_back_at_once_and_doubles_nothing(conn: Any, alias: str, consume: Consume) -> None:
    publish(conn, 1, 2, 3)
    found = consume("q", prefetch=2)
    drained(conn)

    conn.close()

    assert len(found) == 2
    assert [(row.lease_token, row.deliveries) for row in rows(alias)] == [(None, 1), (None, 1), (None, 0)]


def test_a_rejected_message_is_kept_and_can_be_requeued(conn: Any, alias: str, consume: Consume) -> None:
    publish(conn, "x", priority=5, headers={"task": "a.b"})
    found = consume("q")
    drained(conn)

    found[0].reject()
    found[0].channel.basic_reject(found[0].delivery_tag, requeue=True)  # on another thread; the first one counts
    found[0].channel.basic_ack(found[0].delivery_tag)

    kept = PoisonMessage.objects.using(alias).get()
    assert (kept.queue, kept.recipient, kept.priority) == (BrokerQueue._meta.label, "q", 5)
    assert not rows(alias).exists()
    assert poison_operations.requeue(PoisonMessage.objects.using(alias)) == 1
    drained(conn)
    assert found[1].payload == "x"
    assert found[1].properties["priority"] == 5


def test_a_rejected_message_is_kept_though_the_session_has_died(conn: Any, alias: str, consume: Consume) -> None:
    publish(conn, "x")
    found = consume("q")
    drained(conn)
    kill_this(connections[alias])

    found[0].reject()

    assert PoisonMessage.objects.using(alias).count() == 1
    assert not rows(alias).exists()


def test_a_rejected_message_that_cannot_be_kept_comes_again(conn: Any, alias: str, consume: Consume) -> None:
    publish(conn, "x")
    found = consume("q")
    drained(conn)
    with without_poison(alias), pytest.raises(DatabaseError):
        found[0].reject()
    drained(conn)
    assert len(found) == 2
    assert found[1].delivery_info["redelivered"]
    found[1].reject()
    assert PoisonMessage.objects.using(alias).count() == 1


def test_a_body_that_does_not_decode_is_kept_when_it_is_acked(conn: Any, alias: str) -> None:
    publish(conn, b"{", content_type="application/json", content_encoding="utf-8")

    def on_decode_error(message: Any, error: Exception) -> None:
        message.ack()  # as Celery does

    consumer = kombu.Consumer(conn.channel(), [kombu.Queue("q")], callbacks=[lambda body, message: None])
    consumer.on_decode_error = on_decode_error
    consumer.consume()
    drained(conn)

    kept = PoisonMessage.objects.using(alias).get()
    assert kept.reason.startswith("The body does not decode: ")
    assert bytes(kept.body) == b"{"


@pytest.mark.parametrize(
    "headers",
    [
        "no json",
        '{"kombu": "no json"}',
        '{"kombu": "[]"}',
        '{"kombu": "{\\"properties\\": 1}"}',
        '{"kombu": "{\\"properties\\": {\\"body_encoding\\": \\"x\\"}}"}',
        '{"kombu": "{\\"headers\\": 5}"}',
    ],
)
def test_a_row_that_is_no_message_of_kombus_is_kept(conn: Any, alias: str, consume: Consume, headers: str) -> None:
    publish(conn, "before")
    rows(alias).update(headers=headers)
    publish(conn, "behind")
    found = consume("q")

    drained(conn)

    assert [message.payload for message in found] == ["behind"]
    assert PoisonMessage.objects.using(alias).get().headers == headers


def test_a_row_of_another_writer_is_delivered(conn: Any, alias: str, consume: Consume) -> None:
    BrokerQueue.send(
        b"plain", headers={"content-type": "text/plain"}, recipient="q", unknown_recipient=True, using=alias
    )
    found = consume("q")

    drained(conn)

    assert bytes(found[0].body) == b"plain"
    assert found[0].headers == {"content-type": "text/plain"}
    found[0].ack()


def test_max_deliveries_leads_to_poison(alias: str) -> None:
    with kombu.Connection(f"queueapp://{alias}", transport_options={"max_deliveries": 3}) as conn:
        publish(conn, "pill")
        rows(alias).update(deliveries=3)  # and never acked
        publish(conn, "often enough", "behind it")
        first = rows(alias).filter(deliveries=0).first()
        rows(alias).filter(pk=first.pk).update(deliveries=3, cancels=1)
        found: list[Any] = []
        kombu.Consumer(conn.channel(), [kombu.Queue("q")], on_message=found.append).consume()
        with without_poison(alias), pytest.raises(DatabaseError):
            drained(conn)
        free = rows(alias).filter(lease_token=None).values_list("deliveries", "cancels")
        assert [*free] == [(4, 1), (3, 1), (0, 0)], "who is innocent is given back, uncounted"
        drained(conn)

    assert [message.payload for message in found] == ["often enough", "behind it"]
    assert "delivered 4 times and never acked" in PoisonMessage.objects.using(alias).get().reason


def test_a_lease_is_renewed_while_the_consumer_works(alias: str) -> None:
    with kombu.Connection(f"queueapp://{alias}", transport_options={"visibility_timeout": 3.0}) as conn:
        publish(conn, "x")
        found: list[Any] = []
        kombu.Consumer(conn.channel(), [kombu.Queue("q")], on_message=found.append).consume()
        drained(conn)
        first = rows(alias).get().lease_expires
        eventually(lambda: rows(alias).get().lease_expires > first + timedelta(seconds=1))
        assert rows(alias).filter(lease_expires__gt=Now()).count() == 1


def test_renewal_can_be_turned_off(alias: str) -> None:
    options = {"visibility_timeout": 1.0, "use_lock_renewal": False}
    with kombu.Connection(f"queueapp://{alias}", transport_options=options) as conn:
        publish(conn, "x")
        found: list[Any] = []
        kombu.Consumer(conn.channel(), [kombu.Queue("q")], on_message=found.append).consume()
        eventually(lambda: drained(conn) or len(found) > 1)  # it expired, and was delivered again

    assert found[1].delivery_info["redelivered"] is True


def test_undelivered_read_ahead_is_released(conn: Any, alias: str, consume: Consume) -> None:
    publish(conn, *range(4))
    consume("q", prefetch=1)
    (transport,) = {channel._transport for channel in conn.transport.channels}
    transport.poller.read_ahead, transport.poller.read_at = 8, time.monotonic()  # as after a burst
    conn.drain_events(timeout=30)
    assert rows(alias).exclude(lease_token=None).count() > 1

    eventually(lambda: rows(alias).exclude(lease_token=None).count() == 1)

    assert sorted(row.deliveries for row in rows(alias)) == [0, 0, 0, 1]
    assert not any(channel.read_ahead for channel in transport.channels)


def test_a_queue_that_is_cancelled_is_left_to_others(conn: Any, alias: str) -> None:
    publish(conn, *range(4))
    found: list[Any] = []
    queues = [kombu.Queue("q"), kombu.Queue("r")]
    consumer = kombu.Consumer(conn.channel(), queues, on_message=found.append, prefetch_count=1)
    consumer.consume()
    poller = consumer.channel._transport.poller
    poller.read_ahead, poller.read_at = 8, time.monotonic()  # as after a burst
    conn.drain_events(timeout=30)

    consumer.cancel_by_queue("q")

    assert rows(alias).exclude(lease_token=None).count() == 1
    found[0].ack()
    publish(conn, "another", queue="r")
    drained(conn)
    assert [message.payload for message in found] == [0, "another"]


def test_an_idle_consumer_is_woken(conn: Any, alias: str, consume: Consume) -> None:
    found = consume("q")
    drained(conn)
    eventually(lambda: agent_of(alias).receives_notifications)
    conn.transport.poller.plans = {("q",): (False, float("inf"))}  # nothing but a wake-up lets it look

    def publish_later() -> None:
        with kombu.Connection(f"queueapp://{alias}") as second_connection:
            publish(second_connection, "x")
        connections[alias].close()

    thread = threading.Thread(target=publish_later)
    thread.start()
    eventually(lambda: drained(conn, 1) or found)
    thread.join()


def test_a_forked_child_touches_nothing_of_its_parents(conn: Any, alias: str, consume: Consume) -> None:
    publish(conn, 1, 2)
    found = consume("q", prefetch=1)
    drained(conn)

    child = os.fork()
    if child == 0:
        try:
            conn.close()
            found[0].ack()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

    assert rows(alias).exclude(lease_token=None).count() == 1  # neither acked nor given back
    found[0].ack()
    drained(conn)
    assert [message.payload for message in found] == [1, 2]


def test_no_ack_is_gone_when_it_is_delivered(conn: Any, alias: str, consume: Consume) -> None:
    publish(conn, 1, 2)
    found = consume("q", no_ack=True)

    drained(conn)

    assert [message.payload for message in found] == [1, 2]
    eventually(lambda: not rows(alias).exists())


class Elsewhere:
    """A router that places the broker's tables where no URL names them."""

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return "elsewhere" if model is BrokerQueue else None


def test_maintenance_runs_in_the_database_that_the_url_names(
    conn: Any, alias: str, consume: Consume, settings: Any
) -> None:
    settings.DATABASE_ROUTERS = [Elsewhere()]
    conn.Producer().publish("x", routing_key="unused", expiration=0.001)
    eventually(lambda: not topology.ready_messages(alias, "unused").exists())

    consume("q")

    eventually(lambda: not rows(alias).exists())
