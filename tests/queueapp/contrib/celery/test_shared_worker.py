"""One real worker of Celery for all that asks nothing special of it: to start one takes seconds.

The database is not emptied between these tests, under the worker's feet; each has names of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import kombu
import kombu.pools
import pytest
from django.db import connection, transaction
from pytest_django import DjangoDbBlocker

import queueapp.contrib.celery.transport  # noqa: F401 - not later: it needs its app, which `available_apps` leaves out
from queueapp.contrib.celery.models import Binding, BrokerQueue, CeleryResult, DeclaredQueue, Exchange
from queueapp.contrib.celery.process_agent import stop_agents
from queueapp.failures import poison_operations
from queueapp.models import DelayedMessage, Leader, PoisonMessage, Subscriber
from tests.databases import url_of_database
from tests.in_process_worker import DEADLINE, eventually
from tests.testapp.models import Effect
from tests.workers.trees import Tree

from . import celeryapp
from .celery_worker import start_celery_worker, wait_until_ready
from .celeryapp import app
from .malformed_messages import assert_kept, send_malformed

#: What is emptied after each test are the tables of these apps: none that the worker uses.
pytestmark = [
    pytest.mark.django_db(transaction=True, available_apps=["django.contrib.sessions"]),
    pytest.mark.timeout(600),
]

LABEL = BrokerQueue._meta.label
WRITTEN = (
    BrokerQueue,
    DeclaredQueue,
    Exchange,
    Binding,
    DelayedMessage,
    PoisonMessage,
    Subscriber,
    Leader,
    Effect,
    CeleryResult,
)


@pytest.fixture(scope="module")
def environment(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[dict[str, str]]:
    """That of a child process on the test database, which is left as it was found."""
    with django_db_blocker.unblock():
        yield os.environ | {
            "DATABASE_URL": url_of_database(),
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "TEST_RESULT_BACKEND": "queueapp://",
        }
        stop_agents()
        kombu.pools.reset()
        app._pool = app.amqp._producer_pool = None
        for model in WRITTEN:
            model.objects.all().delete()
        connection.close()


@pytest.fixture(scope="module")
def shared(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    tree = start_celery_worker("threads", "w0", environment, tmp_path_factory.mktemp("worker") / "log", "--task-events")
    wait_until_ready(tree)
    yield tree
    tree.kill()


def effects(*names: str) -> list[str]:
    """Those of these tasks, in their order."""
    return list(Effect.objects.filter(name__in=names).order_by("pk").values_list("name", flat=True))


def waits() -> bool:
    """Whether a task is waiting, or has not been acked."""
    return BrokerQueue.objects.filter(recipient="celery").exists()


def test_a_queue_can_be_added_and_cancelled_at_run_time(shared: Tree) -> None:
    app.control.add_consumer("more", reply=True, timeout=30, limit=1)
    celeryapp.record.apply_async(["there"], queue="more")
    eventually(lambda: effects("there") == ["there"])

    app.control.cancel_consumer("more", reply=True, timeout=30, limit=1)
    celeryapp.record.apply_async(["not any more"], queue="more")
    celeryapp.record.delay("here")
    eventually(lambda: effects("there", "not any more", "here") == ["there", "here"])
    assert BrokerQueue.objects.filter(recipient="more", lease_token=None).count() == 1


def test_a_revoked_task_does_not_run(shared: Tree) -> None:
    tasks = [
        celeryapp.record.apply_async(["revoked"], countdown=3),
        celeryapp.record.apply_async(["kept"], countdown=3),
    ]

    (reply,) = app.control.revoke(tasks[0].id, reply=True, timeout=30, limit=1)
    assert tasks[0].id in reply["w0@tests"]["ok"]

    eventually(lambda: effects("kept") == ["kept"])
    eventually(lambda: not waits() and not DelayedMessage.objects.exists())
    assert effects("revoked", "kept") == ["kept"]


def test_events_reach_their_listeners(shared: Tree) -> None:
    found: list[str] = []
    wanted = {"worker-heartbeat", "task-received", "task-started", "task-succeeded"}
    with kombu.Connection("queueapp://") as conn:
        receiver = app.events.Receiver(conn, handlers={"*": lambda event: found.append(event["type"])})
        with receiver.consumer_context() as (own_value, _, _):

            def seen() -> bool:
                # A worker learns of who listens within a moment.
                celeryapp.record.delay("seen")
                with contextlib.suppress(TimeoutError):
                    own_value.drain_events(timeout=0.5)
                return wanted <= {*found}

            eventually(seen, 3 * DEADLINE)


def test_flower_sees_the_worker(shared: Tree, environment: dict[str, str], tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        "-m",
        "celery",
        "-A",
        "tests.queueapp.contrib.celery.celeryapp",
        "flower",
        f"--port={port}",
        "--address=127.0.0.1",
    ]
    flower = Tree(command, environment | {"FLOWER_UNAUTHENTICATED_API": "true"}, tmp_path / "flower")
    try:

        def asked(path: str) -> Any:
            with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{port}/api/{path}", timeout=10) as answer:
                return json.load(answer)
            return None

        eventually(lambda: "w0@tests" in (asked("workers?refresh=1") or {}), 2 * DEADLINE)

        def seen() -> bool:
            """It answers before it listens: of what was sent until then it never hears."""
            task = celeryapp.record.delay("seen by Flower")
            with contextlib.suppress(AssertionError):
                eventually(lambda: (asked("tasks") or {}).get(task.id, {}).get("state") == "SUCCESS", 3)
                return True
            return False

        eventually(seen, 2 * DEADLINE)
    finally:
        flower.kill()


def test_delayed_tasks_wait_in_the_database(shared: Tree) -> None:
    due = datetime.now(UTC) + timedelta(seconds=2)

    celeryapp.record.apply_async(["later"], eta=due)
    assert DelayedMessage.objects.get().destination == LABEL

    eventually(lambda: effects("later") == ["later"])
    assert Effect.objects.get(name="later").at >= due
    eventually(lambda: not waits())


def test_a_retry_with_a_countdown(shared: Tree) -> None:
    celeryapp.retries.delay("try")
    celeryapp.retries_at_once.delay("at once")  # neither a delay nor a back-off

    eventually(lambda: effects("try 0", "try 1", "try 2") == ["try 0", "try 1", "try 2"])
    eventually(lambda: effects("at once 0", "at once 1", "at once 2") == ["at once 0", "at once 1", "at once 2"])
    eventually(lambda: not waits())


def test_delay_in_a_transaction_goes_with_it(shared: Tree) -> None:
    with transaction.atomic():
        celeryapp.record.delay("rolled back")
        transaction.set_rollback(True)
    with transaction.atomic():
        celeryapp.record.delay("committed")
        assert effects("committed") == []

    eventually(lambda: effects("rolled back", "committed") == ["committed"])


def test_an_unknown_task_becomes_poison_and_can_be_requeued(shared: Tree) -> None:
    sent = app.send_task("tests.nowhere.gone", ["argument"])

    kept = PoisonMessage.objects.filter(queue=LABEL, message_type="tests.nowhere.gone")
    found = eventually(kept.first)
    assert found.message_type == "tests.nowhere.gone"
    assert "has no task 'tests.nowhere.gone'" in found.reason
    eventually(CeleryResult.objects.filter(task_id=sent.id, status="FAILURE").exists)
    assert shared.process.poll() is None
    assert poison_operations.requeue(kept.all()) == 1
    again = eventually(kept.exclude(pk=found.pk).first)
    assert bytes(again.body) == bytes(found.body)


def test_a_rejected_task_is_requeued_or_poison_and_an_ignored_one_is_acked(shared: Tree) -> None:
    celeryapp.rejects.delay("put back", True)
    celeryapp.rejects.delay("kept as poison", False)
    celeryapp.ignores.delay("ignored")

    eventually(lambda: effects("put back") == ["put back"] * 2)
    eventually(PoisonMessage.objects.filter(queue=LABEL, message_type=celeryapp.rejects.name).exists)
    eventually(lambda: effects("ignored") == ["ignored"] and not waits())
    assert PoisonMessage.objects.filter(message_type=celeryapp.rejects.name).count() == 1
    assert not PoisonMessage.objects.filter(message_type=celeryapp.ignores.name).exists()
    assert effects("kept as poison") == ["kept as poison"]


def test_threads_have_no_time_limits(shared: Tree) -> None:
    celeryapp.overruns.delay("overran")

    eventually(lambda: effects("overran") == ["overran"])
    assert not PoisonMessage.objects.filter(message_type=celeryapp.overruns.name).exists()


def test_a_rate_limit_is_kept(shared: Tree) -> None:
    for _ in range(6):
        celeryapp.limited.delay("limited")

    eventually(lambda: len(effects("limited")) == 6)
    first, *_, last = Effect.objects.filter(name="limited").order_by("pk").values_list("at", flat=True)
    assert last - first > timedelta(seconds=1), "two a second, though the first may be late"
    eventually(lambda: not waits())


def test_malformed_tasks_become_poison_and_end_no_worker(shared: Tree) -> None:
    send_malformed()
    celeryapp.record.delay("after the malformed")

    eventually(lambda: effects("after the malformed") and not waits(), 2 * DEADLINE)
    assert shared.process.poll() is None, shared.output
    assert_kept()
    assert effects("s") == []


def test_a_body_that_does_not_decode_is_kept(shared: Tree) -> None:
    with kombu.Connection("queueapp://") as conn:
        conn.Producer().publish(
            b"{no json", routing_key="celery", content_type="application/json", content_encoding="utf-8",
            headers={"task": celeryapp.record.name, "id": "1"},
        )  # fmt: skip

    found = eventually(PoisonMessage.objects.filter(queue=LABEL, reason__contains="DecodeError").first)
    assert found.reason.startswith("The body does not decode: ")
    assert bytes(found.body) == b"{no json"
