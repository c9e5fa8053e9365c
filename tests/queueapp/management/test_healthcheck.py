"""``healthcheck`` ends with 0 where workers are well, and says in a line why not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import uuid
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from queueapp.models import DISPATCHER, Now, Subscriber
from tests.testapp.models import Leased

pytestmark = pytest.mark.django_db
HERE = socket.gethostname()[:255]


def alive(
    queue: str = "testapp.Leased", *, host: str = HERE, seconds: float = 1, breakers: Any = (), **rest: Any
) -> None:
    Subscriber.objects.create(
        id=uuid.uuid4(), queue=queue, host=host, process=1, supervisor=uuid.uuid4(),
        heartbeat_at=Now() - timedelta(seconds=seconds), alive_until=Now() + timedelta(seconds=20 - seconds),
        breakers=json.dumps(list(breakers)) if breakers else "", **rest,
    )  # fmt: skip


def check(*arguments: str) -> tuple[int, str]:
    """(exit code, what it said)."""
    out = StringIO()
    try:
        call_command("healthcheck", *arguments, stdout=out)
    except CommandError as error:
        return error.returncode, str(error)
    return 0, out.getvalue()


def test_a_host_with_a_live_worker_is_well() -> None:
    alive()
    assert check() == (0, "OK: 1 worker.\n")
    assert check("testapp.Leased", "--max-heartbeat", "5") == (0, "OK: 1 worker.\n")


def test_a_process_that_receives_several_queues_is_one_worker() -> None:
    alive()
    alive("testapp.Transactional")
    assert check("testapp.Leased", "testapp.Transactional") == (0, "OK: 1 worker.\n")
    alive(host="elsewhere")
    assert check("--anywhere") == (0, "OK: 2 workers.\n")


def test_trouble_with_other_queues_is_none_of_those_that_are_named() -> None:
    alive()
    alive("testapp.Transactional", breakers=[{"name": "Peek", "state": "open", "error": "no table"}])
    assert check("testapp.Leased") == (0, "OK: 1 worker.\n")
    assert check()[0] == 1


def test_a_host_whose_workers_are_silent_is_not() -> None:
    alive(host="elsewhere")
    assert check() == (1, f"Not healthy: no worker has a heartbeat on {HERE}")
    assert check("--anywhere")[0] == check("--host", "elsewhere")[0] == 0
    alive(seconds=90)
    code, said = check()
    assert code == 1
    assert said.startswith(f"Not healthy: no worker has a heartbeat on {HERE}; the last one was 1m 3")


def test_a_bound_on_heartbeats_may_be_narrower_than_death() -> None:
    alive(seconds=10)
    assert check()[0] == 0
    assert check("--max-heartbeat", "5")[0] == 1


def test_each_queue_that_is_named_needs_a_worker() -> None:
    alive()
    code, said = check("testapp.Leased", "testapp.Transactional")
    assert (code, said) == (1, f"Not healthy: testapp.Transactional: no worker has a heartbeat on {HERE}")


def test_who_only_dispatches_is_well_too() -> None:
    alive(DISPATCHER)
    assert check()[0] == 0


def test_a_script_that_receives_once_is_no_worker() -> None:
    alive(receives=False)
    assert check()[0] == 1


def test_an_open_breaker_is_a_problem_and_a_failing_one_is_not() -> None:
    alive(breakers=[{"name": "Peek", "state": "failing", "error": "once"}])
    assert check()[0] == 0
    alive(DISPATCHER, breakers=[{"name": "Fetch", "state": "open", "error": "no\x1b[2J table"}])
    code, said = check("testapp.Leased")
    assert (code, said) == (1, "Not healthy: (dispatcher): Fetch is open: no⟨U+001B⟩[2J table")


def test_lag_is_held_against_a_bound() -> None:
    alive()
    Leased.send_many(range(3))
    Leased.objects.update(enqueued_at=Now() - timedelta(minutes=10))
    assert check("--max-age", "3600", "--max-waiting", "3")[0] == 0
    code, said = check("--max-age", "60", "--max-waiting", "2")
    assert code == 1
    assert said.startswith("Not healthy: testapp.Leased: the oldest message has waited for 10m")
    assert said.endswith(", more than 1m; testapp.Leased: 3 messages wait, more than 2")


def test_it_can_be_read_by_a_machine(capsys: pytest.CaptureFixture[str]) -> None:
    alive()
    Leased.send({})
    found = json.loads(check("--json", "--max-age", "60")[1])
    assert found["ok"] is True
    assert found["workers"] == 1
    assert found["queues"]["testapp.Leased"]["waiting"] == 1


@pytest.mark.parametrize("arguments", [("--max-age", "-1"), ("--max-waiting", "-1"), ("--max-heartbeat", "nan")])
def test_a_bound_out_of_its_bounds_is_a_line(arguments: tuple[str, str]) -> None:
    code, said = check(*arguments)
    assert code == 2
    assert f"{arguments[0]} {float(arguments[1]):g} is not accepted" in said.replace("-1.0", "-1")


def test_a_database_that_that_does_not_answer_is_a_problem_in_one_line() -> None:
    environment = os.environ | {
        "DATABASE_URL": "postgresql://none@127.0.0.1:1/none",
        "DJANGO_SETTINGS_MODULE": "tests.settings",
    }
    done = subprocess.run(
        [sys.executable, "manage.py", "healthcheck"],
        cwd=Path(__file__).parents[3], env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("CommandError: Not healthy: database 'default' cannot be read")
