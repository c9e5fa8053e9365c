"""The process tree: it starts, replaces what dies, ends when it is told to or when there is nothing left to do.

What becomes of the messages of a process that dies is the business of tests/crash.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.core.management import CommandError, call_command

from queueapp.models import Subscriber
from tests.inprocess import eventually
from tests.testapp.messages import Ping
from tests.testapp.models import AtMostOnce, Effect, Leased, Transactional
from tests.workers.trees import Tree, children_of

Start = Callable[..., Tree]


def test_a_worker_that_dies_is_replaced(start_tree: Start) -> None:
    tree = start_tree("testapp.Leased", "testapp.Transactional")
    (worker,) = tree.wait_for_workers()

    os.kill(worker, signal.SIGKILL)
    (other,) = eventually(lambda: [one for one in tree.workers if one != worker])
    for queue in (Leased, Transactional):
        queue.send(Ping(queue.__name__))
    eventually(lambda: Effect.objects.count() == 2)

    assert tree.terminate() == 0
    assert "was killed by SIGKILL" in tree.output
    assert other != worker
    assert not Subscriber.objects.exists(), "the dead one was signed off by its supervisor, the other by itself"


def test_a_tree_works_until_the_queues_and_their_delayed_messages_are_gone(start_tree: Start) -> None:
    AtMostOnce.send(Ping("now"))
    AtMostOnce.send(Ping("later"), delay=timedelta(seconds=1))
    tree = start_tree("testapp.AtMostOnce", "--until-empty")

    assert tree.wait() == 0
    assert sorted(Effect.objects.values_list("name", flat=True)) == ["later", "now"]


def test_the_children_end_when_their_supervisor_is_killed(start_tree: Start) -> None:
    tree = start_tree("testapp.Leased")
    (worker,) = tree.wait_for_workers()
    children = children_of(tree.process.pid)
    assert worker in children
    assert len(children) == 2, "a worker and a dispatcher"

    tree.process.kill()

    eventually(lambda: not any(os.path.exists(f"/proc/{child}/cmdline") and _runs(child) for child in children))


def _runs(process: int) -> bool:
    try:
        with open(f"/proc/{process}/cmdline", "rb") as file:
            return b"workers.processes.child" in file.read()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.Nothing"], "There is no queue 'nowhere.Nothing'"),
        (["testapp.Readable"], "testapp.Readable has no consumer"),
        (["--processes", "0"], "--processes 0 is not accepted: it must be from 1 to 256"),
        (["--concurrency", "1000"], "--concurrency 1000 is not accepted: it must be from 1 to 256"),
    ],
)
def test_a_tree_that_cannot_work_says_why(arguments: list[str], said: str, transactional_db: None) -> None:
    with pytest.raises(CommandError, match=said):
        call_command("runqueueworker", *arguments)
