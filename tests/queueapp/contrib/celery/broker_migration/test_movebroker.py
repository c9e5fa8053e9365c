"""``manage.py movebroker``: under load with kills, beside live workers, and what it says."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kombu
import pytest
from django.core.management import call_command

from queueapp.contrib.celery.broker_migration import Broker, Migrator
from queueapp.contrib.celery.management.commands import movebroker
from queueapp.contrib.celery.models import BrokerQueue
from tests.in_process_worker import DEADLINE, eventually
from tests.testapp.models import Effect
from tests.workers.trees import CHECKOUT, Tree

from ..conftest import APPS
from .conftest import Shop
from .load import Load, Plan

#: ``make move TASKS=200000`` takes half an hour.
TASKS = int(os.environ.get("QUEUEAPP_MOVE_TASKS", "400"))
LONG = TASKS >= 5000
PLAN = Plan(
    tasks=TASKS,
    unacked=min(1000, TASKS // 20),
    kills=2 if LONG else 1,
    eta_seconds=min(60, TASKS / 100),
    term=15.0 if LONG else 3.0,
    pause=0.005 if LONG else 0.03,
)

# Ten programs are started one after the other, which takes a minute on a quiet machine and five where others want the
# cores.
pytestmark = [pytest.mark.django_db(transaction=True, available_apps=APPS), pytest.mark.timeout(900 + TASKS // 20)]


@pytest.fixture
def command(child_environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "manage.py", "movebroker", *arguments], cwd=CHECKOUT, env=child_environment, text=True,
            capture_output=True, timeout=120, check=False,
        )  # fmt: skip

    return run


def test_under_load_and_kills_nothing_is_lost_or_done_twice(
    child_environment: dict[str, str], redis_url: str, tmp_path: Path
) -> None:
    outcome = Load(redis_url, child_environment, tmp_path, PLAN).run()

    assert (outcome.lost, outcome.doubled) == (0, 0)
    assert outcome.kills == 2 * PLAN.kills
    assert outcome.longest_send_seconds < 5, "no producer has to wait"
    print(outcome)


def test_messages_in_flight_stay_with_their_live_worker(
    child_environment: dict[str, str],
    redis_url: str,
    shop: Callable[[str], Shop],
    at: Callable[..., Broker],
    tmp_path: Path,
) -> None:
    environment = child_environment | {"TEST_BROKER_URL": redis_url}
    command = [
        "-m",
        "celery",
        "-A",
        "tests.queueapp.contrib.celery.celeryapp",
        "worker",
        "--pool",
        "threads",
        "--loglevel",
        "INFO",
    ]
    tree = Tree(command, environment, tmp_path / "worker.log")
    try:
        eventually(lambda: " ready." in tree.output or tree.process.poll() is not None, 3 * DEADLINE)
        send(redis_url, "wait_for", str(tmp_path / "go"), "slow")
        eventually(lambda: Effect.objects.filter(name="slow begun").exists())
        migrator = Migrator(at(redis_url), at("queueapp://"))
        with migrator.exclusive(30):
            eventually(lambda: migrator.move("celery", lambda: None) == 0 and migrator.notes["celery"])
            assert "are in flight" in migrator.notes["celery"]
            assert migrator.moved == 0

            tree.kill()
            eventually(lambda: migrator.move("celery", lambda: None) == 1)
    finally:
        tree.kill()
    (message,) = shop("queueapp://").received("celery")
    assert message.headers["task"].endswith("wait_for")


def send(url: str, task: str, *arguments: str) -> None:
    from celery import Celery

    app = Celery("tests", broker=url, set_as_current=False)
    app.send_task(f"tests.queueapp.contrib.celery.celeryapp.{task}", arguments)
    app.close()


def test_movebroker_reports_its_result(command: Any, redis_url: str) -> None:
    for number in range(3):
        send(redis_url, "record", str(number))

    done = command("--from", redis_url, "--to", "queueapp://", "--json")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"moved": 3, "unreadable": 0}
    assert command("--from", redis_url, "--to", "queueapp://").stdout == "0 messages moved.\n"
    assert command("--from", redis_url, "--to", "queueapp://", "--put-back").stdout == "0 messages returned.\n"


def test_progress_is_written_where_there_is_no_terminal(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movebroker, "PROGRESS_EVERY", 0.0)
    for number in range(3):
        send(redis_url, "record", str(number))
    stderr = io.StringIO()

    call_command("movebroker", "--from", redis_url, "--to", "queueapp://", stdout=io.StringIO(), stderr=stderr)

    assert "3 messages moved; remaining: none" in stderr.getvalue()


def test_movebroker_moves_the_named_queues(command: Any, redis_url: str, shop: Callable[[str], Shop]) -> None:
    there = shop(redis_url)
    there.connection = kombu.Connection(redis_url, transport_options={"global_keyprefix": "shop:"})
    there.channel = there.connection.default_channel
    there.publish("mail", 1, priority=6)
    there.publish("pdf", 2)
    options = ["--queue", "mail", "--keep-priorities", "--from-options", '{"global_keyprefix": "shop:"}']

    done = command("--from", redis_url, "--to", "queueapp://", *options)

    assert done.stdout == "1 message moved.\n", done.stderr
    row = BrokerQueue.objects.get()
    assert (row.recipient, row.priority) == ("mail", 6)
    assert there.numbers("pdf") == [2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--from", "redis://:secret@127.0.0.1:1/0", "--to", "queueapp://"],
            "--from redis://:**@127.0.0.1:1/0 cannot be used",
        ),
        (["--from", "queueapp://", "--to", "queueapp://nowhere"], "it has default"),
        (["--from", "nonsense://", "--to", "queueapp://"], "No such transport"),
        (["--from", "queueapp://", "--to", "queueapp://"], "Both URLs name the broker"),
        (["--from", "memory://", "--to", "memory://"], "One of the two brokers must be queueapp://"),
        (["--from", "memory://", "--to", "queueapp://"], "name them with --queue"),
        (["--from", "memory://", "--to", "queueapp://", "--from-options", "[]"], "--from-options '[]' is not accepted"),
        (
            ["--from", "memory://", "--to", "queueapp://", "--term", "16"],
            "--term '16' is not accepted: 2 to 15",
        ),
    ],
)
def test_a_refused_move_is_a_one_line_error(command: Any, arguments: list[str], said: str) -> None:
    done = command(*arguments)

    assert done.returncode == 1
    assert said in done.stderr
    assert "secret" not in done.stderr
    assert "Traceback" not in done.stderr
