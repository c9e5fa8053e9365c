"""A queue with ``target_queue_depth`` is worked off by the process tree, out of the journal, also when its processes
are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from queueapp import publish_many
from queueapp.models import JournalCopied
from tests.in_process_worker import eventually
from tests.testapp.models import Deep, Effect
from tests.workers.trees import Tree
from workers.processes.until_empty import remaining

Start = Callable[..., Tree]
TOPIC = "journaled.deep"


def put(count: int, first: int = 0) -> None:
    publish_many(TOPIC, [{"n": n} for n in range(first, first + count)])


def handled() -> list[str]:
    return sorted(Effect.objects.values_list("name", flat=True))


def children_of(pid: int) -> list[int]:
    """The process ids of a process' children."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in found.split()]


def test_a_tree_works_off_what_waits_in_the_journal(start_tree: Start) -> None:
    put(1500)
    tree = start_tree("testapp.Deep", "--until-empty")

    assert tree.wait() == 0
    assert handled() == sorted(f"deep {n}" for n in range(1500))
    assert JournalCopied.objects.count() == 1500


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds child processes in /proc")
def test_a_tree_whose_processes_are_killed_loses_and_doubles_nothing(start_tree: Start) -> None:
    put(1500)
    tree = start_tree("testapp.Deep", "--until-empty")
    eventually(lambda: Effect.objects.count() > 50)
    for child in children_of(tree.process.pid):
        os.kill(child, signal.SIGKILL)
    put(200, first=1500)

    assert tree.wait() == 0
    assert handled() == sorted(f"deep {n}" for n in range(1700)), "its effects are in the transaction that receives"
    assert not Deep.objects.exists()


@pytest.mark.django_db
def test_inactive_messages_are_left_and_unroutable_where_no_process_fills_the_queue() -> None:
    put(3)
    assert remaining([Deep], runs_maintenance=True)[:2] == ("testapp.Deep: 3 inactive in the journal", False)
    rest = remaining([Deep], runs_maintenance=False)
    assert rest[:2] == (
        "testapp.Deep: 3 inactive in the journal, no process of this tree fills queues from the journal",
        True,
    )
