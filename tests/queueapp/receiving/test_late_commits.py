"""What was committed late lies behind its floor, perhaps among the seqs of a backlog of a lower level."""

from __future__ import annotations

from typing import Any

import kombu
import pytest
from django.db import transaction

# Registers the transport, and checks INSTALLED_APPS, which the tests restrict while they run.
import queueapp.contrib.celery.transport  # noqa: F401
from queueapp.contrib.celery.models import BrokerQueue
from queueapp.contrib.celery.process_agent import stop_agents
from queueapp.receiving import low_water_marks
from tests.databases import only_on_postgresql
from tests.in_process_worker import DEADLINE, real_commits
from tests.late_commits import committed_late, jump
from tests.testapp.models import Leased, Urgent

pytestmark = [real_commits, only_on_postgresql]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that was slow because the machine was busy makes no smaller windows: these tests count looks."""
    monkeypatch.setattr(low_water_marks, "WINDOW_TARGET", 60.0)


def receive_one(queue: Any) -> list[int]:
    """Its number, or nothing."""
    found = []
    with queue.receive(1) as batch:
        for message in batch:
            found.append(message.body["number"])
            message.ack()
    return found


def test_receive_finds_it_before_the_backlog() -> None:
    jump(Urgent, 1)
    Urgent.send_many([{"number": number} for number in range(50)], priority=0)
    jump(Urgent, 100_000)
    found: list[int] = []

    with committed_late(lambda: Urgent.send({"number": -1}, priority=2)) as commit:
        jump(Urgent, 1_000_000)
        Urgent.send({"number": -2}, priority=2)
        found += receive_one(Urgent)
        commit()
    for _ in range(10):
        found += receive_one(Urgent)

    assert found[0] == -2
    assert -1 in found[1:10]


def test_kombu_finds_it_before_the_backlog_of_another_queue() -> None:
    found: list[Any] = []

    def on_message(message: Any) -> None:
        found.append(message.payload)
        message.ack()

    def publish_late() -> None:
        with kombu.Connection("queueapp://default") as second_connection:
            second_connection.Producer().publish("late", routing_key="a")

    jump(BrokerQueue, 1)
    try:
        # A cycle of the rescan is five looks, of which every eighth claim is one; some may come before the commit.
        with kombu.Connection("queueapp://default", transport_options={"max_prefetch": 8}) as client:
            channel = client.channel()
            producer = client.Producer()
            for name in ("z", "a"):
                kombu.Queue(name)(channel).declare()
            with transaction.atomic():
                for number in range(1_000):
                    producer.publish(number, routing_key="z")
            jump(BrokerQueue, 100_000)
            queues = [kombu.Queue("a"), kombu.Queue("z")]
            with committed_late(publish_late) as commit:
                jump(BrokerQueue, 1_000_000)
                producer.publish("first", routing_key="a")
                kombu.Consumer(channel, queues, on_message=on_message, prefetch_count=1).consume()
                while "first" not in found:
                    client.drain_events(timeout=DEADLINE)
                commit()
            while len(found) < 900 and "late" not in found:
                client.drain_events(timeout=DEADLINE)
    finally:
        stop_agents()

    assert "late" in found


def test_of_two_that_were_committed_late_the_second_is_received_right_after_the_first() -> None:
    """A window in which something was found is looked at once more before the rescan goes on."""
    jump(Leased, 100_000)
    found: list[int] = []

    with committed_late(lambda: Leased.send_many([{"number": -1}, {"number": -2}])) as commit:
        jump(Leased, 1_000_000)
        Leased.send_many({"number": number} for number in range(50))
        found += receive_one(Leased)
        commit()
    for _ in range(20):
        found += receive_one(Leased)

    assert found.index(-2) == found.index(-1) + 1
