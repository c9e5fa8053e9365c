"""TargetQueueDepth: so many messages are active in the queue's table, the others wait in the journal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest
from django.db import connections

from queueapp import InvalidOption, publish
from queueapp.models import JournalCopied, JournalCursor
from queueapp.models.delivery import Delivery
from queueapp.operations.journal import inactive_messages
from queueapp.services.journal_service import JournalService
from queueapp.services.leader_election import Elector
from queueapp.topics.backfill import QueueFeeder
from tests.in_process_worker import DEADLINE, eventually, real_commits
from tests.queueapp.journal.filling import filled, numbers, put, take
from tests.queueapp.sql.server import Server, outgoing
from tests.testapp.models import Deep

pytestmark = real_commits
TOPIC = "journaled.deep"
DEPTH = 1000


@pytest.fixture
def service(server: Server) -> Iterator[JournalService]:
    """What tops up the queue, on its thread."""
    journal_service = JournalService(server.alias, [Deep], Elector(server.alias, "journal of a test", uuid.uuid4()))
    yield journal_service
    assert journal_service.stop(DEADLINE)


def active(server: Server) -> int:
    return int(Deep.objects.using(server.alias).count())


def test_target_queue_depth_keeps_so_many_active_and_the_others_in_the_journal(server: Server) -> None:
    put(server, TOPIC, *range(2500))
    assert active(server) == 0

    assert filled(server, Deep) == DEPTH
    assert numbers(server, Deep) == list(range(DEPTH))
    assert inactive_messages(Deep, server.alias) == (1500, True)


def test_target_queue_depth_is_topped_up_in_the_order_of_publishing(server: Server) -> None:
    put(server, TOPIC, *range(1200))
    filled(server, Deep)
    take(server, Deep, 600)

    assert filled(server, Deep) == 200
    assert numbers(server, Deep) == list(range(600, 1200))
    assert inactive_messages(Deep, server.alias) == (0, True)


def test_acked_messages_of_a_queue_with_target_queue_depth_do_not_come_back(server: Server) -> None:
    put(server, TOPIC, *range(5))
    filled(server, Deep)
    take(server, Deep, 5)
    QueueFeeder(Deep, server.alias).rebuild()

    assert filled(server, Deep) == 0


def test_message_published_before_the_queue_was_attached_is_not_lost_with_recovery_point_now(
    server: Server, delivery: Any
) -> None:
    delivery(Deep, recovery_point="now")
    put(server, TOPIC, 1, 2)

    assert filled(server, Deep) == 2, "the publisher knew the queue and left it to the journal"


def test_sent_message_is_active_at_once_and_counted(server: Server) -> None:
    put(server, TOPIC, *range(1100))
    Deep.send({"n": 5000}, using=server.alias)

    assert filled(server, Deep) == DEPTH - 1
    assert numbers(server, Deep)[0] == 5000


@pytest.mark.parametrize("value", [999, 0, "1000", 1000.0, True])
def test_target_queue_depth_below_1000_is_refused(value: Any) -> None:
    with pytest.raises(
        InvalidOption, match=r"target_queue_depth = .* is not accepted: it must be a whole number from 1000"
    ):
        Delivery({"target_queue_depth": value}, "")


def test_option_that_is_taken_on_and_off_loses_and_doubles_nothing(server: Server, delivery: Any) -> None:
    put(server, TOPIC, 1)
    filled(server, Deep)
    delivery(Deep, target_queue_depth=None)
    put(server, TOPIC, 2)
    filled(server, Deep)
    delivery(Deep, target_queue_depth=DEPTH)
    put(server, TOPIC, 3)
    filled(server, Deep)

    assert numbers(server, Deep) == [1, 2, 3]


# -- the service ---------------------------------------------------------------------------------------------------


def test_service_tops_up_what_is_published_and_after_acks(server: Server, service: JournalService) -> None:
    put(server, TOPIC, *range(3000))
    service.start()
    eventually(lambda: active(server) == DEPTH)

    for number in (2000, 1000):
        take(server, Deep, DEPTH)
        eventually(lambda: active(server) == DEPTH)
        assert eventually(lambda remaining=number: inactive_messages(Deep, server.alias) == (remaining - DEPTH, True))
    take(server, Deep, DEPTH)
    publish(TOPIC, {"n": 3000}, using=server.alias)
    service.wake()
    eventually(lambda: numbers(server, Deep) == [3000])


def test_service_waits_until_the_queue_is_half_empty(server: Server, service: JournalService) -> None:
    """Topping up one by one would cost a transaction each."""
    put(server, TOPIC, *range(2000))
    service.start()
    eventually(lambda: active(server) == DEPTH)
    take(server, Deep, DEPTH // 2 - 1)
    looked = service.queues[0].due
    eventually(lambda: service.queues[0].due > looked + 0.2)
    assert active(server) == DEPTH // 2 + 1

    take(server, Deep, 1)
    eventually(lambda: active(server) == DEPTH)


def test_service_waits_for_a_transaction_that_published_before(server: Server, service: JournalService) -> None:
    from queueapp.journal.append import journal_of

    late = server.another()
    service.start()
    eventually(lambda: JournalCursor.objects.using(server.alias).exists())
    with server.transaction(late):
        journal_of(late).append(late, TOPIC, [outgoing(b'{"n":1}')], ["|+testapp.Deep|"])
        put(server, TOPIC, 2)
        looked = service.queues[0].due
        eventually(lambda: service.queues[0].due > looked)
        assert active(server) == 0
    eventually(lambda: numbers(server, Deep) == [1, 2])


_TOP_UP = """
import django; django.setup()
from queueapp.topics.backfill import QueueFeeder
from tests.testapp.models import Deep
feeder = QueueFeeder(Deep, "default")
feeder.attach()
print("ready", flush=True)
while True:
    feeder.fill(37)
"""


@pytest.mark.skipif(connections["default"].vendor != "postgresql", reason="the child works on the default database")
def test_process_that_tops_up_and_is_killed_loses_and_doubles_nothing(
    server: Server, child_environment: dict[str, str]
) -> None:
    """SIGKILL at any moment, again and again, while others receive and publish."""
    if server.alias != "default":
        pytest.skip("the child works on the default database")
    total, seen, published = 1600, [], 0
    environment = child_environment | {"DJANGO_SETTINGS_MODULE": "tests.queueapp.journal.settings_journaled"}
    deadline = monotonic() + 120
    while len(seen) < total and monotonic() < deadline:
        child = subprocess.Popen([sys.executable, "-c", _TOP_UP], env=environment, stdout=subprocess.PIPE)
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            if published < total:
                put(server, TOPIC, *range(published, published + 400))
                published += 400
            before = len(seen)
            while len(seen) < min(before + 350, published) and monotonic() < deadline:
                with Deep.receive(max_backlog=100) as batch:
                    for message in batch:
                        seen.append(message.body["n"])
                        message.ack()
        finally:
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
            child.stdout.close()
    assert sorted(seen) == list(range(total))
    assert JournalCopied.objects.count() == total
    assert not Deep.objects.exists()
