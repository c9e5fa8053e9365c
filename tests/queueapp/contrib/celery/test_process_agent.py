"""The process agent: heartbeats, acks, renewals and queue expiry of a Celery process."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import Any

import kombu
import pytest
from django.db import DatabaseError

import queueapp.contrib.celery  # noqa: F401 - makes the URL known
from queueapp import consumer
from queueapp.contrib.celery import process_agent as agent_module
from queueapp.contrib.celery import topology
from queueapp.contrib.celery.models import BrokerQueue, DeclaredQueue
from queueapp.contrib.celery.process_agent import agent_of, stop_agents
from queueapp.models import QueueControl, Subscriber
from queueapp.services.maintenance import AlertEvaluator, Maintenance
from queueapp.services.subscriber_rows import ServiceHeartbeat
from tests.in_process_worker import DEADLINE, eventually
from tests.testapp.models import ForeignPostgres

from .consuming import Consume, drained, publish, rows


def test_a_consumer_has_a_subscriber_row_with_its_queues(conn: Any, alias: str, consume: Consume) -> None:
    consume("q", "r")

    row = eventually(Subscriber.objects.using(alias).filter(queue=BrokerQueue._meta.label).first)
    assert (row.process, row.table) == (os.getpid(), BrokerQueue._meta.db_table)
    assert row.id == agent_of(alias).leases.owner
    agent_of(alias).next_beat = 0.0
    agent_of(alias).wake()
    eventually(lambda: '["q", ""], ["r", ""]' in Subscriber.objects.using(alias).get(pk=row.pk).consumers)

    stop_agents()
    assert not Subscriber.objects.using(alias).filter(pk=row.pk).exists()


def test_services_can_be_disabled(alias: str) -> None:
    with kombu.Connection(f"queueapp://{alias}", transport_options={"services": False}) as conn:
        kombu.Consumer(conn.channel(), [kombu.Queue("q")], on_message=lambda _: None).consume()
        agent = agent_of(alias)
        now = time.monotonic()
        for later in (0, 5):
            agent.run_services(now + later)
        assert agent.consuming_since is not None
        assert not agent.services


def test_a_paused_queue_is_left_alone(conn: Any, alias: str, consume: Consume) -> None:
    QueueControl.objects.using(alias).create(queue=BrokerQueue._meta.label, paused=True)
    found = consume("q")
    eventually(lambda: agent_of(alias).paused)
    publish(conn, "x")
    drained(conn)
    assert found == []

    QueueControl.objects.using(alias).update(paused=False)

    def resumed() -> bool:
        agent_of(alias).next_beat = 0.0
        agent_of(alias).wake()
        return not agent_of(alias).paused

    eventually(resumed)
    eventually(lambda: drained(conn) or found)


def test_a_queue_in_use_is_declared_again_when_it_was_deleted(conn: Any, alias: str) -> None:
    exchange = kombu.Exchange("all", type="fanout")
    found: list[Any] = []
    queue = kombu.Queue("mine", exchange, expires=1.0)
    kombu.Consumer(conn.channel(), [queue], on_message=found.append).consume()
    # The process was stopped for longer than the queue's expiry, and another one deleted it.
    with kombu.Connection(f"queueapp://{alias}") as second_connection:
        queue(second_connection.default_channel).delete()

    eventually(lambda: DeclaredQueue.objects.using(alias).filter(pk="mine").exists())
    conn.Producer().publish("x", exchange=exchange)
    eventually(lambda: drained(conn) or found)


def test_a_queue_that_its_consumer_deletes_while_it_is_looked_at_stays_deleted(
    conn: Any, alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on a busy machine, of the queue of an answer: the agent of all leases ended, for a name it did not find."""
    channel = conn.channel()
    queue = kombu.Queue("answers", expires=1.0)
    consumer = kombu.Consumer(channel, [queue], on_message=lambda _: None)
    refresh = topology.extend
    looked: list[bool] = []

    def deleted_meanwhile(*given: Any) -> set[str]:
        if not looked:
            queue(channel).delete()
        gone = refresh(*given)
        looked.append("answers" in gone)
        return gone

    monkeypatch.setattr(topology, "extend", deleted_meanwhile)
    consumer.consume()
    keeps = agent_of(alias)._state

    eventually(lambda: looked)
    kombu.Consumer(channel, [kombu.Queue("others", expires=1.0)], on_message=lambda _: None).consume()
    eventually(lambda: len(looked) > 1)

    assert looked[0]
    assert agent_of(alias)._state is keeps
    assert agent_of(alias).is_alive()
    assert list(DeclaredQueue.objects.using(alias).values_list("pk", flat=True)) == ["others"]


def test_the_agent_continues_after_an_unexpected_error(
    conn: Any, alias: str, consume: Consume, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = []

    def fails(*given: Any) -> set[str]:
        failures.append(given)
        raise DatabaseError("away") if len(failures) == 1 else TypeError("unexpected")

    with monkeypatch.context() as patch:
        patch.setattr(topology, "extend", fails)
        agent = agent_of(alias)
        for _ in range(3):
            agent.refreshed_at = float("-inf")
            seen = len(failures)
            found = consume("q")
            agent.wake()
            eventually(lambda seen=seen: len(failures) > seen)  # type: ignore[misc]
    publish(conn, "x")
    eventually(lambda: drained(conn) or found)
    found[0].ack()

    eventually(lambda: not rows(alias).exists())
    assert agent.is_alive()
    logged = [record for record in caplog.records if record.exc_info and "the agent continues" in record.message]
    assert len(logged) == 1
    assert "unexpected" in caplog.text


def test_a_helper_of_the_agent_is_restarted(
    conn: Any, alias: str, consume: Consume, monkeypatch: pytest.MonkeyPatch
) -> None:
    consume("q")
    agent = agent_of(alias)
    eventually(lambda: all(helper.is_alive() for helper in agent.helpers))
    for helper in agent.helpers:
        assert helper.stop(DEADLINE)
    row = Subscriber.objects.using(alias).filter(pk=agent.leases.owner)
    eventually(row.exists)
    before = row.get().heartbeat_at

    def beats() -> None:
        agent.next_beat = 0.0
        agent.wake()

    with monkeypatch.context() as patch:
        for helper in agent.helpers:
            patch.setattr(helper, "start", lambda: (_ for _ in ()).throw(RuntimeError("can't start new thread")))
        beats()
        eventually(lambda: row.get().heartbeat_at > before)  # what cannot be started takes nothing else away
    beats()

    eventually(lambda: all(helper.is_alive() for helper in agent.helpers))


def test_the_end_of_a_process_waits_for_one_that_is_signing_off(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on a busy machine: a worker that took longer to end than its agent stays was gone while that deleted its
    row."""
    monkeypatch.setattr(agent_module, "LINGER", 0.0)
    agent = agent_of(alias)
    deregisters = threading.Event()

    def flush(connection: Any) -> int:
        deregisters.set()
        eventually(lambda: agent.stopping)
        return 0

    with kombu.Connection(f"queueapp://{alias}") as conn:
        kombu.Consumer(conn.channel(), [kombu.Queue("q")], on_message=lambda _: None).consume()
        row = Subscriber.objects.using(alias).filter(pk=agent.leases.owner)
        eventually(row.exists)
        monkeypatch.setattr(agent.leases, "flush", flush)
        conn.transport.agent = None  # it has nothing to write
    assert deregisters.wait(DEADLINE)

    stop_agents()

    assert not row.exists()
    assert not agent.is_alive()
    assert agent not in agent_module.stopping_agents


def test_a_stopping_agent_is_replaced(conn: Any, alias: str, consume: Consume) -> None:
    first = agent_of(alias)
    first.stop()

    found = consume("q")

    assert agent_of(alias) is not first
    publish(conn, "x")
    eventually(lambda: drained(conn) or found)


def test_a_connection_that_comes_when_all_others_have_closed_has_another_agent(
    conn: Any, alias: str, consume: Consume, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = agent_of(alias)
    register = first.register
    monkeypatch.setattr(first, "register", lambda transport: agent_module.deregister(first) and register(transport))

    found = consume("q")

    assert conn.transport.agent is agent_of(alias)
    assert agent_of(alias) is not first
    publish(conn, "x")
    eventually(lambda: drained(conn) or found)


def test_a_queue_that_stays_for_less_than_those_before_it_is_kept(
    conn: Any, alias: str, consume: Consume, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen: that of remote control of a worker with gevent, which comes after the others. It was deleted after ten
    seconds, and commands to that worker in the next twenty were lost."""
    kept, deleted = [], []
    refresh, reap = topology.extend, topology.delete_expired
    monkeypatch.setattr(topology, "extend", lambda *given: (kept.append(given), refresh(*given))[1])
    monkeypatch.setattr(topology, "delete_expired", lambda alias: (deleted.extend(gone := reap(alias)), gone)[1])
    consume("q")
    eventually(lambda: kept)  # none of them expires: the next check is half a minute later
    queue = kombu.Queue("late", expires=10.0)
    kombu.Consumer(conn.channel(), [queue], on_message=lambda _: None).consume()
    row = DeclaredQueue.objects.using(alias).filter(pk="late")
    ends = row.get().expires_at

    eventually(lambda: row.filter(expires_at__gt=ends).exists(), 2 * DEADLINE)

    assert deleted == []


def test_a_connection_outlives_its_agent(conn: Any, alias: str, consume: Consume) -> None:
    found = consume("q")
    drained(conn)
    stop_agents()
    publish(conn, "x")

    eventually(lambda: drained(conn) or found)
    found[0].ack()
    eventually(lambda: not rows(alias).exists())


def test_its_maintenance_has_foreign_queues_with_consumers(
    conn: Any, alias: str, consume: Consume, no_consumers: None
) -> None:
    """It is elected in place of a worker's, which has them."""
    consumer(ForeignPostgres, name="tests")(lambda message: None)
    consume("q")
    agent = agent_of(alias)
    for later in (0, 5):
        agent.run_services(time.monotonic() + later)

    (found,) = [service for service in agent.services if isinstance(service, Maintenance)]
    assert (ForeignPostgres in found.queues) == (alias == "default")


def test_its_maintenance_evaluates_alerts(conn: Any, alias: str, consume: Consume, settings: Any) -> None:
    """Those of a worker are silent while another process leads."""
    settings.QUEUEAPP = {"ALERTS": {"every": timedelta(seconds=30)}}
    consume("q")
    agent = agent_of(alias)
    for later in (0, 5):
        agent.run_services(time.monotonic() + later)

    (found,) = [service for service in agent.services if isinstance(service, AlertEvaluator)]
    assert found.breaker in [breaker for service in agent.services if isinstance(service, ServiceHeartbeat)
                             for _, breakers in service.breakers.values() for breaker in breakers]  # fmt: skip
