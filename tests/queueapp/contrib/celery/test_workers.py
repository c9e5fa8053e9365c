"""Real workers of Celery on this transport, in each pool."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import kombu
import kombu.pools
import psutil
import pytest
from django.db import transaction

from queueapp.contrib.celery.models import Binding, BrokerQueue, DeclaredQueue
from queueapp.models import DelayedMessage, PoisonMessage, Subscriber
from tests.in_process_worker import DEADLINE, eventually
from tests.statement_counter import VARIABLE
from tests.testapp.models import Effect
from tests.workers.processes.test_supervisor import set_up
from tests.workers.trees import Tree

from . import celeryapp
from .celery_worker import start_celery_worker, wait_until_ready
from .celeryapp import app
from .conftest import APPS
from .malformed_messages import assert_kept, send_malformed

pytestmark = [pytest.mark.django_db(transaction=True, available_apps=APPS), pytest.mark.timeout(600)]

POOLS = ["solo", "threads", "prefork", "gevent"]
#: A project that has no other queues, and Celery's own time for the queues of remote control.
CELERY_ONLY = {
    "DJANGO_SETTINGS_MODULE": "tests.queueapp.contrib.celery.celery_only_settings",
    "TEST_CONTROL_EXPIRES": "10",
}
LABEL = BrokerQueue._meta.label


@pytest.fixture
def start(child_environment: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Tree]]:
    """Starts ``celery worker``, and waits until it is ready."""
    trees: list[Tree] = []

    def start(pool: str, *arguments: str, **environment: str) -> Tree:
        tree = start_celery_worker(
            pool, f"w{len(trees)}", child_environment | environment, tmp_path / f"log {len(trees)}", *arguments
        )
        trees.append(tree)
        wait_until_ready(tree)
        return tree

    yield start
    for tree in trees:
        tree.kill()


@pytest.fixture(autouse=True)
def of_this_database() -> Iterator[None]:
    yield
    kombu.pools.reset()
    app._pool = app.amqp._producer_pool = None


def effects() -> list[str]:
    return list(Effect.objects.order_by("pk").values_list("name", flat=True))


def renewal_processes(worker: Tree) -> list[psutil.Process]:
    children = psutil.Process(worker.process.pid).children()
    return [child for child in children if any("renewal_process" in argument for argument in child.cmdline())]


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def _send_nested(task: Any, pool: str) -> None:
    """Tasks whose arguments cannot be pickled for the processes of a pool: more of them than there are processes."""
    if pool == "prefork":
        nested: Any = []
        for _ in range(900):
            nested = [nested]
        for _ in range(3):
            task.delay(nested)
        celeryapp.limited.delay(nested)
        task.apply_async([nested], countdown=0.5)


@pytest.mark.parametrize("pool", POOLS)
def test_in_each_pool_tasks_run_and_remote_control_is_answered(start: Any, pool: str) -> None:
    worker = start(pool)

    send_malformed()
    _send_nested(celeryapp.record, pool)
    for number in range(50):
        celeryapp.record.delay(f"task {number}")
        celeryapp.record_late.delay(f"late {number}")

    eventually(lambda: Effect.objects.count() == 100)
    eventually(lambda: not BrokerQueue.objects.filter(recipient="celery").exists())
    assert len(set(effects())) == 100
    assert_kept()
    if pool == "prefork":
        too_deep = PoisonMessage.objects.filter(reason__contains="RecursionError")
        eventually(lambda: too_deep.count() == 5)
        assert worker.process.poll() is None

    # With gevent it says that it is ready before it listens; and a late answer to one question is what the next one
    # gets.
    def answers(question: str) -> Any:
        return (getattr(app.control.inspect(timeout=5, limit=1), question)() or {}).get("w0@tests", ())

    eventually(lambda: answers("ping") == {"ok": "pong"}, 2 * DEADLINE)
    eventually(lambda: "tests.queueapp.contrib.celery.celeryapp.record" in answers("registered"), 2 * DEADLINE)
    eventually(lambda: [answer["name"] for answer in answers("active_queues")] == ["celery"], 2 * DEADLINE)

    renews = renewal_processes(worker)
    assert len(renews) == (0 if pool == "prefork" else 1)
    app.control.shutdown()
    assert worker.wait() == 0, worker.output
    eventually(lambda: all(map(has_ended, renews)))
    assert not Subscriber.objects.filter(queue=LABEL, process=worker.process.pid).exists(), worker.output


def test_beat_sends_on_this_transport(start: Any, child_environment: dict[str, str], tmp_path: Path) -> None:
    start("threads")
    command = [
        "-m",
        "celery",
        "-A",
        "tests.queueapp.contrib.celery.celeryapp",
        "beat",
        "--schedule",
        str(tmp_path / "schedule"),
    ]
    beat = Tree([*command, "--pidfile", ""], child_environment | {"TEST_BEAT": "1"}, tmp_path / "beat")
    try:
        eventually(lambda: effects().count("beaten") >= 2, 2 * DEADLINE)
    finally:
        beat.kill()


@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_killed_worker_loses_no_task_that_acks_late(start: Any, tmp_path: Path, pool: str) -> None:
    first = start(pool, TEST_VISIBILITY_TIMEOUT="6")
    celeryapp.wait_for.delay(str(tmp_path / "go"), "long")
    eventually(lambda: effects() == ["long begun"])

    first.kill()
    (tmp_path / "go").touch()
    start(pool)

    eventually(lambda: "long done" in effects() and not BrokerQueue.objects.exists(), 2 * DEADLINE)
    assert effects().count("long begun") >= 2, "once more after the kill, at least"


def test_prefork_redelivers_after_a_crash_and_enforces_time_limits(start: Any, tmp_path: Path) -> None:
    # Of a task that says nothing of it, by the settings of all tasks.
    start("prefork", TEST_ACKS_LATE="1", TEST_MAX_DELIVERIES="3")

    celeryapp.die_once.delay(str(tmp_path / "died"), "survived")
    celeryapp.dies.delay(str(tmp_path / "dies"))
    celeryapp.overruns.delay("overran", 30)

    eventually(lambda: effects() == ["survived"])
    eventually(lambda: not BrokerQueue.objects.exists(), 2 * DEADLINE)
    assert (tmp_path / "dies").read_text() == "xxx", "it does not come again for ever"
    kept = PoisonMessage.objects.get(message_type=celeryapp.dies.name)
    assert kept.deliveries == 3
    assert kept.reason == "max_deliveries: its process died, after 3 deliveries."
    assert "SoftTimeLimitExceeded" in PoisonMessage.objects.get(message_type=celeryapp.overruns.name).reason


def test_a_long_task_keeps_its_lease(start: Any, tmp_path: Path) -> None:
    start("solo", TEST_VISIBILITY_TIMEOUT="6")
    start("solo", TEST_VISIBILITY_TIMEOUT="6")

    celeryapp.wait_for.delay(str(tmp_path / "go"), "long")
    eventually(lambda: effects() == ["long begun"])
    expires = BrokerQueue.objects.filter(recipient="celery").values_list("lease_expires", flat=True).get
    first = expires()
    eventually(lambda: expires() > first + timedelta(seconds=7))  # it would have been over before
    assert effects() == ["long begun"]

    (tmp_path / "go").touch()
    eventually(lambda: effects() == ["long begun", "long done"])
    eventually(lambda: not BrokerQueue.objects.exists())


#: Seconds of a lease, and without a heartbeat after which a process is dead: many times what the renewal process needs
#: to import Django on a busy machine.
PERIOD = 20
SETTINGS = """
from tests.settings import *

QUEUEAPP = {**QUEUEAPP, "DEAD_AFTER": %d, "HEARTBEAT_INTERVAL": 2}
"""


def test_a_task_that_keeps_the_interpreter_lock_beyond_its_lease_runs_once(
    start: Any, child_environment: dict[str, str], tmp_path: Path
) -> None:
    set_up(child_environment, tmp_path, "dead_after_a_lease", SETTINGS % PERIOD)
    go = tmp_path / "go"
    os.mkfifo(go)
    pools = ["solo", "threads", "gevent"]
    workers = [start(pool, "-Q", pool, TEST_VISIBILITY_TIMEOUT=str(PERIOD)) for pool in pools]
    start("threads", "-Q", "idle", TEST_VISIBILITY_TIMEOUT=str(PERIOD))

    for pool in pools:
        with transaction.atomic():  # one claim takes them all
            celeryapp.keep_lock.apply_async([pool, str(go)], queue=pool)
            for number in range(3):
                celeryapp.record_late.apply_async([f"{pool} {number}"], queue=pool)
    begun = [f"{pool} begun" for pool in pools]
    eventually(lambda: {*begun} <= {*effects()}, 2 * DEADLINE)
    leases = BrokerQueue.objects.filter(recipient__in=pools).values_list("recipient", "lease_expires")
    first = dict(leases)
    for pool in pools:
        app.control.add_consumer(pool, destination=["w3@tests"])

    def renewed() -> bool:
        """Whether each lease was renewed when the first one had expired."""
        return all(expires > first[pool] + timedelta(seconds=PERIOD) for pool, expires in leases.all())

    eventually(renewed, 3 * DEADLINE)
    with go.open("wb"):
        eventually(lambda: {f"{pool} done" for pool in pools} <= {*effects()})
    eventually(lambda: not BrokerQueue.objects.filter(recipient__in=pools).exists(), 2 * DEADLINE)
    done = [f"{pool} {what}" for pool in pools for what in ("begun", "done", 0, 1, 2)]
    assert sorted(effects()) == sorted(done), "\n".join(worker.output for worker in workers)
    for worker in workers:
        assert "are renewed meanwhile" in worker.output
        assert "declared dead" not in worker.output
        assert "lost before the ack" not in worker.output
        eventually(lambda worker=worker: "reports again after" in worker.output)  # type: ignore[misc]


def test_the_renewal_process_of_a_killed_worker_ends_and_its_messages_are_delivered_again(
    start: Any, child_environment: dict[str, str], tmp_path: Path
) -> None:
    set_up(child_environment, tmp_path, "soon_dead", SETTINGS % 8)
    never = tmp_path / "never"
    os.mkfifo(never)
    worker = start("solo", TEST_VISIBILITY_TIMEOUT="600")
    celeryapp.keep_lock.delay("kept", str(never))  # maybe before its first heartbeat
    eventually(lambda: "are renewed meanwhile" in worker.output, 2 * DEADLINE)
    (renews,) = renewal_processes(worker)

    worker.process.kill()
    eventually(lambda: has_ended(renews))
    start("threads")

    eventually(lambda: effects() == ["kept begun"] * 2, 3 * DEADLINE)


def test_a_killed_worker_leaks_no_queue(start: Any) -> None:
    worker = start("threads")
    assert DeclaredQueue.objects.filter(name="w0@tests.celery.pidbox").exists()

    worker.kill()
    start("threads")  # a living process deletes it

    eventually(lambda: not DeclaredQueue.objects.filter(name="w0@tests.celery.pidbox").exists(), 2 * DEADLINE)
    assert not Binding.objects.filter(queue="w0@tests.celery.pidbox").exists()
    assert not BrokerQueue.objects.filter(recipient="w0@tests.celery.pidbox").exists()
    assert DeclaredQueue.objects.filter(name="w1@tests.celery.pidbox", expires_at__isnull=False).exists()


def test_the_urgent_come_first(start: Any) -> None:
    for number, priority in enumerate((0, 3, 9, 0, 255)):
        celeryapp.record.apply_async([f"{priority} {number}"], priority=priority)

    start("solo")

    eventually(lambda: len(effects()) == 5)
    assert effects() == ["9 2", "255 4", "3 1", "0 0", "0 3"]


def test_purge_empties_a_queue() -> None:
    for number in range(3):
        celeryapp.record.delay(str(number))
    celeryapp.record.apply_async(["later"], countdown=60)

    assert app.control.purge() == 4

    assert not BrokerQueue.objects.exists()
    assert not DelayedMessage.objects.exists()


def test_commands_without_a_worker_find_the_broker(child_environment: dict[str, str], tmp_path: Path) -> None:
    celeryapp.record.delay("waits")
    command = ["-m", "celery", "-A", "tests.queueapp.contrib.celery.celeryapp", "purge", "--force"]

    purge = Tree(command, child_environment, tmp_path / "log")

    assert purge.wait() == 0, purge.output
    assert "Purged 1 message" in purge.output
    assert not BrokerQueue.objects.exists()


def test_an_idle_worker_hardly_asks(start: Any, tmp_path: Path) -> None:
    tally = tmp_path / "statements"
    start("threads", **CELERY_ONLY, **{VARIABLE: str(tally)})
    eventually(lambda: Subscriber.objects.filter(queue="(maintenance)").exists(), 2 * DEADLINE)

    def asks_a_second() -> float:
        began, before = time.monotonic(), tally.stat().st_size
        eventually(lambda: time.monotonic() - began > 10)
        return (tally.stat().st_size - before) / (time.monotonic() - began)

    # What it does once, at its start, is no part of it. Half of the statements are those of the snapshot of statistics
    # that its maintenance takes every ten seconds.
    eventually(lambda: asks_a_second() <= 7.0, 3 * DEADLINE)


def test_eventlet_is_refused(child_environment: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("eventlet", exc_type=ImportError)
    command = ["-m", "celery", "-A", "tests.queueapp.contrib.celery.celeryapp", "worker", "--pool", "eventlet"]
    worker = Tree(command, child_environment, tmp_path / "log")

    assert worker.wait() == 1
    assert "does not work under eventlet" in worker.output
    assert "prefork, threads, solo, gevent" in worker.output


def test_a_child_of_a_pool_publishes(start: Any) -> None:
    start("prefork")

    celeryapp.chained.delay("task")

    eventually(lambda: effects() == ["task from within"])
