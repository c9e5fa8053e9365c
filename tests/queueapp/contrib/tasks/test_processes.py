"""Tasks and real processes: ``manage.py runqueueworker`` that is asked to stop, and is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from queueapp.contrib.tasks.compat import TaskResultStatus, task_backends
from queueapp.contrib.tasks.models import Result, TaskQueue
from queueapp.models import Now, PoisonMessage
from tests.in_process_worker import DEADLINE, eventually
from tests.testapp.models import Effect
from tests.workers.trees import Tree

from . import declared
from .conftest import APPS

pytestmark = [
    pytest.mark.django_db(transaction=True, available_apps=APPS),
    pytest.mark.timeout(600),
]


@pytest.fixture
def start(child_environment: dict[str, str], configure: Any, tmp_path: Path) -> Iterator[Callable[..., Tree]]:
    """Starts a worker's process tree on the tasks."""
    configure()
    trees: list[Tree] = []

    def start(*arguments: str) -> Tree:
        command = ["manage.py", "runqueueworker", *arguments, TaskQueue._meta.label]
        trees.append(Tree(command, child_environment, tmp_path / f"log {len(trees)}"))
        return trees[-1]

    yield start
    for tree in trees:
        tree.kill()


def status_of(result: Any) -> Any:
    return task_backends["default"].get_result(result.id).status


def test_until_empty_runs_everything_and_ends(start: Any) -> None:
    results = [declared.add.enqueue(n, 1) for n in range(20)]

    assert start("--until-empty").wait() == 0

    assert [task_backends["default"].get_result(result.id).return_value for result in results] == list(range(1, 21))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_is_asked_to_stop_ends_its_task_first(start: Any, tmp_path: Path, number: int) -> None:
    result = declared.wait_for.enqueue(str(tmp_path / "go"))
    tree = start()
    tree.wait_for_workers()
    eventually((tmp_path / "go.begun").exists, 2 * DEADLINE)
    assert status_of(result) == TaskResultStatus.RUNNING

    tree.process.send_signal(number)
    (tmp_path / "go").touch()

    assert tree.wait() == 0, tree.output
    assert status_of(result) == TaskResultStatus.SUCCESSFUL


def test_workers_that_are_killed_lose_nothing(start: Any) -> None:
    names = [f"task {number}" for number in range(300)]
    for name in names:
        declared.write_slowly.enqueue(name)
    tree = start("--processes", "2")
    tree.wait_for_workers(2)
    killed = 0
    for done in (20, 80, 150):
        eventually(lambda done=done: Effect.objects.values("name").distinct().count() >= done, 2 * DEADLINE)
        # Both may be new and not there yet: tasks are done in bursts, and two kills come close together on a busy
        # machine.
        victim = tree.wait_for_workers()[0]
        os.kill(victim, signal.SIGKILL)
        killed += 1
        eventually(lambda victim=victim: victim not in tree.workers, 2 * DEADLINE)

    eventually(lambda: not TaskQueue.objects.exists(), 4 * DEADLINE)

    # Messages in flight have had their one attempt: they are poison, FAILED, with the cause, and can be requeued.
    poison = list(PoisonMessage.objects.all())
    successful = Result.objects.filter(status="SUCCESSFUL").count()
    assert successful + len(poison) == len(names)
    assert len(poison) <= 4 * killed
    for message in poison:
        result = task_backends["default"].get_result(str(message.message_id))
        assert result.status == TaskResultStatus.FAILED
        assert result.errors[0].exception_class_path == "queueapp.failures.history.ProcessDied"
        assert "SIGKILL" in result.errors[0].traceback


def test_a_task_that_kills_its_worker_has_failed_and_does_not_block_the_others(start: Any) -> None:
    deadly, harmless = declared.die.enqueue(), declared.add.enqueue(1, 2)

    # One task per process runs: other leased messages are released uncounted, and each running one has had its attempt.
    start("--until-empty", "--concurrency", "1").wait()

    assert status_of(deadly) == TaskResultStatus.FAILED
    assert task_backends["default"].get_result(harmless.id).return_value == 3


def test_the_death_of_a_whole_tree_leaves_no_task_running(start: Any, tmp_path: Path) -> None:
    result = declared.wait_for.enqueue(str(tmp_path / "go"))
    tree = start()
    workers = tree.wait_for_workers()
    eventually((tmp_path / "go.begun").exists, 2 * DEADLINE)

    for process in (tree.process.pid, *workers):
        os.kill(process, signal.SIGKILL)
    tree.process.wait()

    TaskQueue.objects.update(lease_expires=Now() - timedelta(seconds=1))  # half a minute later
    eventually(lambda: status_of(result) == TaskResultStatus.READY, 4 * DEADLINE)
    (tmp_path / "go").touch()
    start()
    eventually(lambda: status_of(result) not in (TaskResultStatus.READY, TaskResultStatus.RUNNING), 4 * DEADLINE)
