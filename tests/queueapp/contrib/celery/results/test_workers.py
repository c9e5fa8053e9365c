"""Real workers of Celery, with our broker and our results: chords whose workers are killed, and tasks that fail for
good."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kombu.pools
import pytest
from celery import chord

from queueapp.contrib.celery.models import BrokerQueue, CeleryChordPart, CeleryGroup, CeleryResult
from queueapp.contrib.celery.process_agent import stop_agents
from queueapp.failures.poison_operations import requeue
from queueapp.models import PoisonMessage
from tests.in_process_worker import DEADLINE, eventually
from tests.queueapp.contrib.celery.conftest import APPS
from tests.testapp.models import Effect
from tests.workers.trees import Tree

from . import celeryapp
from .celeryapp import app

pytestmark = [pytest.mark.django_db(transaction=True, available_apps=APPS), pytest.mark.timeout(600)]


@pytest.fixture
def start(child_environment: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Tree]]:
    """Starts ``celery worker``, and waits until it is ready."""
    trees: list[Tree] = []

    def start(pool: str = "prefork", *arguments: str) -> Tree:
        command = [
            "-m",
            "celery",
            "-A",
            "tests.queueapp.contrib.celery.results.celeryapp",
            "worker",
            "--loglevel",
            "INFO",
        ]
        command += ["--pool", pool, "--concurrency", "2", "--hostname", f"w{len(trees)}@tests", *arguments]
        tree = Tree(command, child_environment, tmp_path / f"log {len(trees)}")
        trees.append(tree)
        eventually(lambda: " ready." in tree.output or tree.process.poll() is not None, 3 * DEADLINE)
        assert tree.process.poll() is None, tree.output
        return tree

    yield start
    for tree in trees:
        tree.kill()


@pytest.fixture(autouse=True)
def of_this_database() -> Iterator[None]:
    yield
    stop_agents()
    kombu.pools.reset()
    app._pool = app.amqp._producer_pool = None
    app._local.__dict__.pop("backend", None)


def effects() -> list[str]:
    return list(Effect.objects.order_by("pk").values_list("name", flat=True))


POINTS = ("result stored", "part counted", "chord over", "body sent", "committed")


def test_a_worker_that_is_killed_at_any_statement_loses_no_chord_and_doubles_none(start: Any, tmp_path: Path) -> None:
    start("prefork")
    bodies = {}
    for number, point in enumerate(POINTS):
        # The one that is killed is alone: it is the last member, whichever way it comes.
        path = str(tmp_path / f"killed {number}")
        bodies[point] = chord([celeryapp.member.s(number, path, point)], app=app)(celeryapp.body.s())

    assert {point: body.get(timeout=2 * DEADLINE) for point, body in bodies.items()} == {
        point: [number] for number, point in enumerate(POINTS)
    }
    eventually(lambda: not BrokerQueue.objects.exists())
    assert sorted(effects()) == [f"body [{number}]" for number in range(len(POINTS))]
    assert all((tmp_path / f"killed {number}").exists() for number in range(len(POINTS)))
    assert not CeleryChordPart.objects.exists()
    assert all(CeleryGroup.objects.values_list("is_over", flat=True))


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_task_that_failed_is_poison_with_its_traceback_and_runs_again_when_it_is_requeued(
    start: Any, tmp_path: Path, pool: str
) -> None:
    start(pool)
    path = tmp_path / "there"
    results = [celeryapp.fails.delay(str(path)), celeryapp.fails_late.delay(str(path))]
    celeryapp.fails_unkept.delay()

    eventually(lambda: PoisonMessage.objects.count() == 2)
    eventually(lambda: not BrokerQueue.objects.exists())
    for row in PoisonMessage.objects.all():
        assert row.queue == BrokerQueue._meta.label
        assert (row.consumer, row.attempts) == ("celery", 1)
        assert row.exception_type == "LookupError"
        assert 'raise LookupError("no such file")' in row.traceback
        assert "has failed: LookupError: no such file" in row.reason
    assert {str(row.message_id) for row in PoisonMessage.objects.all()} == {result.id for result in results}
    path.touch()
    assert requeue(PoisonMessage.objects.all()) == 2
    eventually(lambda: effects() == ["mended", "mended"])
    eventually(lambda: CeleryResult.objects.filter(status="SUCCESS").count() == 2)
    assert not PoisonMessage.objects.exists()


def test_a_task_out_of_retries_over_its_time_or_whose_process_died_is_poison(start: Any) -> None:
    start("prefork")
    for task in (celeryapp.retries, celeryapp.takes_long, celeryapp.dies):
        task.delay()

    eventually(lambda: PoisonMessage.objects.count() == 3, 2 * DEADLINE)
    found = {row.message_type.rpartition(".")[2]: row for row in PoisonMessage.objects.all()}
    assert effects() == ["try 0", "try 1"]
    assert (found["retries"].attempts, found["retries"].exception_message) == (2, "never")
    assert "TimeLimitExceeded" in found["takes_long"].exception_type
    assert "WorkerLostError" in found["dies"].exception_type


def test_a_task_that_was_sent_twice_runs_twice_and_leaves_nothing(start: Any) -> None:
    for name in ("once", "again"):
        celeryapp.traces.apply_async(
            (name,), task_id="0b5b7f5e-1e52-4f6c-9b0c-5a3a3f3e2d11"
        )  # both are claimed together
    start("threads")

    eventually(lambda: sorted(effects()) == ["again", "once"])
    eventually(lambda: not BrokerQueue.objects.exists())
