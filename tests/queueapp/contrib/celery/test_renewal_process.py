"""The renewal process: what it does while its worker is silent, and what neither ends nor blocks it. Tests of whole
workers with it are in ``test_workers.py``."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import kombu
import pytest
from celery.concurrency import prefork, solo
from django.db import connections

from queueapp.contrib.celery import renewal_process
from queueapp.contrib.celery.in_flight import Leases
from queueapp.contrib.celery.process_agent import agent_of, stop_agents
from queueapp.contrib.celery.renewal_process import RenewalProcess
from queueapp.messages import new_id
from queueapp.models import Subscriber
from tests.databases import url_of_database
from tests.in_process_worker import DEADLINE, eventually

from .conftest import APPS
from .consuming import drained, publish, rows

pytestmark = pytest.mark.django_db(transaction=True, available_apps=APPS)


@pytest.fixture
def renewals(alias: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes one of leases, in the process of a worker with the pool solo."""
    monkeypatch.setenv("DATABASE_URL", url_of_database())
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "tests.settings")
    monkeypatch.setattr(renewal_process, "worker", SimpleNamespace(pool_cls=solo.TaskPool))
    made: list[RenewalProcess] = []

    def make(leases: Leases) -> RenewalProcess:
        made.append(RenewalProcess(alias, connections[alias].settings_dict["NAME"], uuid.uuid4(), leases))
        return made[-1]

    yield make
    for renewal in made:
        renewal.stop()


def leases_of(*seqs: int, period: float = 60.0) -> Leases:
    leases = Leases(lambda: None)
    leases.add(new_id(), seqs, monotonic(), period, True)
    return leases


def ignores(process: int, number: int) -> bool:
    (mask,) = [
        line.split()[1]
        for line in Path(f"/proc/{process}/status").read_text().splitlines()
        if line.startswith("SigIgn:")
    ]
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_it_starts_with_the_first_lease_where_tasks_run_in_the_process(
    renewals: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle, busy = renewals(Leases(lambda: None)), renewals(leases_of(1))
    for worker in (None, SimpleNamespace(pool_cls=prefork.TaskPool)):
        with monkeypatch.context() as patch:
            patch.setattr(renewal_process, "worker", worker)
            assert not busy.report()
    assert not idle.report()
    assert (idle.process, busy.process) == (None, None)

    assert busy.report()

    assert busy.process.poll() is None
    busy.stop()
    assert busy.process.returncode == 0


def test_signals_do_not_end_it_and_if_killed_it_is_started_again(
    renewals: Any, caplog: pytest.LogCaptureFixture
) -> None:
    renewal = renewals(leases_of(1))
    renewal.report()
    first = renewal.process
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)
    eventually(lambda: all(ignores(first.pid, number) for number in numbers))  # nohup lets it ignore one from the start
    for number in numbers:
        os.kill(first.pid, number)
    assert os.getsid(first.pid) != os.getsid(0)
    renewal.restart_if_ended()
    assert renewal.process is first

    first.kill()

    eventually(lambda: renewal.restart_if_ended() or renewal.process is not first)
    assert "exit code -9" in caplog.text
    assert renewal.report()


def test_it_renews_while_no_report_comes_also_what_did_not_fit_into_the_pipe(alias: str, renewals: Any) -> None:
    options = {"visibility_timeout": 12}
    found: list[Any] = []
    with kombu.Connection(f"queueapp://{alias}", transport_options=options) as conn:
        kombu.Consumer(conn.channel(), [kombu.Queue("q")], on_message=found.append).consume()
        publish(conn, "x")
        eventually(lambda: drained(conn) or found)
        leases = agent_of(alias).leases
        stop_agents()  # from here on no other code renews
        expires = rows(alias).get().lease_expires
        renewal = renewals(leases)
        renewal.report()
        os.kill(renewal.process.pid, signal.SIGSTOP)
        leases.add(new_id(), range(10**18, 10**18 + 10_000), monotonic(), 600.0, True)
        assert not renewal.report(), "the pipe is full, and no write waits"
        os.kill(renewal.process.pid, signal.SIGCONT)
        eventually(renewal.report)

        eventually(lambda: rows(alias).get().lease_expires > expires, 2 * DEADLINE)
        row = eventually(Subscriber.objects.using(alias).filter(pk=leases.owner).first, 2 * DEADLINE)
        assert row.process == os.getpid(), "the row was deleted, and is that of the worker"
