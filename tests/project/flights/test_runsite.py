"""``manage.py runsite``: everything from one command, and nothing left after it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from django.contrib.auth import authenticate, get_user_model
from django.core.management import CommandError, call_command

from project.development_user import ensure_development_user
from project.flights.models import DelayFigure, FlightDelays
from tests.in_process_worker import eventually

from .commands import PATIENCE, command, parent_of, wait_for_the_end, worker_processes
from .examples import flight

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(300)]


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def answers(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as response:
            return bool(response.status == 200)
    except (URLError, ConnectionError, TimeoutError):
        return False


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """What the command printed up to a line with this text."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"{text!r} was not printed: {seen}")


def test_site_admin_and_workers_run_until_they_are_stopped(
    port: int, child_environment: dict[str, str], tmp_path: Path
) -> None:
    with command("runsite", "--port", str(port), environment=child_environment, folder=tmp_path) as site:
        printed = read_until(site, "Ctrl-C stops everything")
        name, password = re.search(r"user (\S+), password (\S+)", printed).groups()
        assert authenticate(username=name, password=password).is_superuser
        eventually(lambda: answers(port), PATIENCE)
        FlightDelays.send(flight())
        eventually(lambda: DelayFigure.objects.filter(late=1).exists(), PATIENCE)
        workers = eventually(worker_processes, PATIENCE)
        supervisor = parent_of(workers[0])
        os.kill(site.pid, signal.SIGINT)
        out, err = site.communicate(timeout=PATIENCE)
    assert site.returncode == 0, err
    assert "Stopped." in out
    assert "Traceback" not in out + err
    wait_for_the_end(supervisor, *workers)
    assert not answers(port)


def test_killed_site_takes_its_processes_with_it(port: int, child_environment: dict[str, str], tmp_path: Path) -> None:
    with command("runsite", "--port", str(port), environment=child_environment, folder=tmp_path) as site:
        read_until(site, "Ctrl-C stops everything")
        workers = eventually(worker_processes, PATIENCE)
        supervisor = parent_of(workers[0])
        site.kill()
        wait_for_the_end(supervisor, *workers)
        eventually(lambda: not answers(port), PATIENCE)


def test_busy_port_is_an_error_that_states_what_to_do(port: int, settings: Any) -> None:
    settings.DEBUG = True
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(CommandError, match=f"Port {port} is in use.*--port {port + 1}"):
            call_command("runsite", port=port)


def test_runsite_is_refused_in_production(settings: Any) -> None:
    settings.DEBUG = False
    with pytest.raises(CommandError, match="for development"):
        call_command("runsite")


def test_development_user_keeps_its_password_and_a_changed_one_is_left_alone(tmp_path: Path) -> None:
    first = ensure_development_user(tmp_path)
    assert ensure_development_user(tmp_path) == first
    assert (tmp_path / "admin_password").stat().st_mode & 0o777 == 0o600
    user = get_user_model().objects.get(username=first.name)
    user.set_password("my own")
    user.save()
    assert ensure_development_user(tmp_path).password is None
    assert authenticate(username=first.name, password="my own") == user
