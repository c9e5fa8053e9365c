"""``manage.py demo`` in small, with real worker processes, and what happens when they are killed or it is stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction

from project.flights import figures, source
from project.flights.demo import reset
from project.flights.demo.results import Results
from project.flights.demo.workers import Handling
from project.flights.models import DelayFigure, FlightDelays, Rebooking, Rebookings
from project.flights.publication import Published
from queueapp.models import DelayedMessage, PoisonMessage
from tests.in_process_worker import eventually
from tests.testapp.models import Transactional

from .commands import PATIENCE, command, kill_hard, parent_of, wait_for_the_end, worker_processes
from .examples import flight

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(600)]

#: Enough rows for a kill in the middle, few enough for a test: 930 messages of them.
ROWS = 5_000


def answer_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The JSON object of a demo that ended well."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    answer: dict[str, Any] = json.loads(out)
    return answer


@contextlib.contextmanager
def held_up() -> Iterator[None]:
    """One message is not receivable meanwhile, so the demo cannot come to its end, however slow this process is."""
    with transaction.atomic():
        eventually(lambda: FlightDelays.objects.select_for_update(skip_locked=True).first(), PATIENCE)
        yield


def assert_holds(answer: dict[str, Any]) -> None:
    expected = source.expected(ROWS)
    assert [check for check in answer["checks"] if not check["holds"]] == []
    assert answer["holds"] is True
    found = {name: answer[name] for name in ("rows_read", "published", "handled", "delayed", "poisoned", "rebooked")}
    assert found == {
        "rows_read": ROWS,
        "published": expected.published,
        "handled": expected.handled,
        "delayed": expected.rebooked,
        "poisoned": expected.poisoned,
        "rebooked": expected.rebooked,
    }


def test_demo_starts_clean_ends_by_itself_and_its_check_holds(
    child_environment: dict[str, str], tmp_path: Path
) -> None:
    # What an earlier demo left behind when it was killed, and what is none of the demo's business.
    FlightDelays.send_many([flight()] * 20)
    DelayFigure.objects.create(carrier="UA", origin="EWR", hour=5, late=999)
    Rebooking.objects.create(flight="old", minutes=200)
    PoisonMessage.objects.create(message_id=FlightDelays.send(flight()), queue="flights.FlightDelays", reason="old")
    second_poison_message = PoisonMessage.objects.create(
        message_id=Transactional.send({}), queue="testapp.Transactional", reason="x"
    )
    with command("demo", "--json", "--limit", str(ROWS), environment=child_environment, folder=tmp_path) as demo:
        answer = answer_of(demo)
    assert_holds(answer)
    assert answer["handling"]["supervisor_restarts"] == 0
    assert worker_processes() == []
    assert (FlightDelays.objects.count(), Rebookings.objects.count(), DelayedMessage.objects.count()) == (0, 0, 0)
    assert (Transactional.objects.count(), PoisonMessage.objects.filter(pk=second_poison_message.pk).count()) == (1, 1)
    assert PoisonMessage.objects.exclude(pk=second_poison_message.pk).count() == answer["poisoned"]


@pytest.mark.parametrize("victim", ["worker", "supervisor"])
def test_demo_whose_processes_are_killed_midway_still_holds(
    victim: str, child_environment: dict[str, str], tmp_path: Path
) -> None:
    arguments = ("demo", "--json", "--limit", str(ROWS), "--processes", "2")
    with command(*arguments, environment=child_environment, folder=tmp_path) as demo:
        with held_up():
            eventually(lambda: figures.handled_flights() >= 50, PATIENCE)
            workers = worker_processes()
            killed = workers[0] if victim == "worker" else parent_of(workers[0])
            kill_hard(killed)
        answer = answer_of(demo)
    assert_holds(answer)
    assert answer["handling"]["supervisor_restarts"] == (1 if victim == "supervisor" else 0)
    wait_for_the_end(killed, *workers)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_demo_leaves_no_process_behind(number: int, child_environment: dict[str, str], tmp_path: Path) -> None:
    with command("demo", "--limit", str(ROWS), environment=child_environment, folder=tmp_path) as demo:
        with held_up():
            eventually(lambda: figures.handled_flights() >= 10, PATIENCE)
            workers = worker_processes()
            supervisor = parent_of(workers[0])
            os.kill(demo.pid, number)
        out, err = demo.communicate(timeout=PATIENCE)
    assert demo.returncode == 130
    assert "Stopped; the next demo starts from a clean state." in err
    assert "Traceback" not in out + err
    wait_for_the_end(supervisor, *workers)


def test_killed_demo_takes_its_workers_with_it(child_environment: dict[str, str], tmp_path: Path) -> None:
    with command("demo", "--limit", str(ROWS), environment=child_environment, folder=tmp_path) as demo, held_up():
        eventually(lambda: figures.handled_flights() >= 10, PATIENCE)
        workers = worker_processes()
        supervisor = parent_of(workers[0])
        kill_hard(demo.pid)
    wait_for_the_end(supervisor, *workers)


def test_second_demo_on_the_same_database_is_refused(child_environment: dict[str, str], tmp_path: Path) -> None:
    with (
        reset.only_demo(tmp_path),
        command("demo", environment=child_environment, folder=tmp_path) as second,
    ):
        _, err = second.communicate(timeout=PATIENCE)
    assert second.returncode == 1
    assert "Another demo runs on this database" in err


def results(expected: source.Expected, *, published: int) -> Results:
    return Results.read(Published(expected.read, published, 0.0, 1.0), False, Handling(1.0, 1.0, 0), expected, False)


def test_check_fails_for_one_flight_too_many_too_few_or_in_the_wrong_figure() -> None:
    expected = source.Expected(read=10, late=2, cancelled=1, figures={("UA", "EWR", 5): source.Figure(2, 1, 60)})
    row = DelayFigure.objects.create(carrier="UA", origin="EWR", hour=5, late=2, cancelled=1, minutes=60)
    assert results(expected, published=3).hold
    for wrong in ({"late": 3}, {"late": 1}, {"minutes": 61}, {"hour": 6}, {"late": 1, "cancelled": 2}):
        DelayFigure.objects.filter(pk=row.pk).update(**wrong)
        assert not results(expected, published=3).hold, wrong
        DelayFigure.objects.filter(pk=row.pk).update(late=2, cancelled=1, minutes=60, hour=5)
    assert not results(expected, published=4).hold
    FlightDelays.send(flight())
    assert [c.name for c in results(expected, published=3).checks() if not c.holds] == ["messages left over"]


def test_failed_check_is_in_the_report() -> None:
    expected = source.Expected(read=10, late=1, figures={("UA", "EWR", 5): source.Figure(1, 0, 30)})
    text = results(expected, published=1).as_text()
    assert "WRONG  figures that differ from the file's: 1, expected 0" in text
    assert "The check FAILS" in text
