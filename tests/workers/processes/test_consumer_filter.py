"""``runqueueworker --consumer``: a worker for some consumers, that leaves the messages of the others alone."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from django.core.management import CommandError, call_command

from queueapp.models import Subscriber
from tests.in_process_worker import Worker, eventually, real_commits
from tests.testapp.messages import Ping, Pong
from tests.testapp.models import Addressed, Effect, Leased
from tests.workers.trees import Tree
from workers.management.commands.runqueueworker import Command
from workers.receiving.handlers import HandlerTable

pytestmark = real_commits
Start = Callable[..., Tree]


def names() -> set[str]:
    return set(Effect.objects.values_list("name", flat=True))


def test_a_worker_of_one_consumer_leaves_the_messages_of_others_alone(start_tree: Start) -> None:
    for number in range(5):
        Leased.send(Ping(f"ping {number}"))
        Leased.send(Pong(f"pong {number}"))
    tree = start_tree("--consumer", "leased.pong")
    eventually(lambda: names() == {f"pong {number}" for number in range(5)}, 120)

    assert set(Subscriber.objects.filter(queue__contains=".").values_list("queue", flat=True)) == {"testapp.Leased"}
    consumers = Subscriber.objects.get(queue="testapp.Leased").consumers
    assert [name for name, *_ in json.loads(consumers)] == ["leased.pong"]
    assert tree.terminate() == 0
    assert Leased.objects.filter(deliveries=0).count() == 5
    assert names() == {f"pong {number}" for number in range(5)}


def test_copies_of_other_consumers_are_left_to_their_workers() -> None:
    Addressed.send(Ping("both"))
    assert HandlerTable(Addressed, ["addressed.second"]).recipients == ["", "addressed.second"]
    worker = Worker(Addressed, only_consumer=["addressed.second"]).start()
    try:
        eventually(lambda: Effect.objects.filter(detail__startswith="addressed.second").exists())
    finally:
        worker.stop()

    assert list(Addressed.objects.values_list("recipient", flat=True)) == ["addressed.first"]
    assert Effect.objects.count() == 1


def test_a_queue_with_none_of_them_is_received_whole() -> None:
    assert HandlerTable(Leased, ["addressed.second"]).registrations == HandlerTable(Leased).registrations


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--consumer", "no.such.consumer"], "--consumer 'no.such.consumer' is not accepted: the consumers of"),
        (["testapp.Leased", "--consumer", "addressed.first"], "queues are leased.act, leased.nop, leased.pong"),
        (["--consumer", "leased.act", "--until-empty"], "--until-empty cannot be combined with"),
    ],
)
def test_consumers_that_are_not_there_are_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(CommandError, match=words):
        call_command(Command(), *arguments)
