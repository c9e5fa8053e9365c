"""Celery's beat, and django-celery-beat, send on our transport and need nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.db import connection

from queueapp.contrib.celery.models import BrokerQueue
from tests.in_process_worker import DEADLINE, eventually, patience
from tests.queueapp.contrib.celery.conftest import APPS
from tests.workers.trees import Tree

pytestmark = [pytest.mark.django_db(transaction=True, available_apps=APPS), pytest.mark.timeout(600)]

_SCHEDULE = """
import django; django.setup()
from django_celery_beat.models import IntervalSchedule, PeriodicTask
often, _ = IntervalSchedule.objects.get_or_create(every=1, period=IntervalSchedule.SECONDS)
PeriodicTask.objects.create(interval=often, name="often", task="shop.often", args="[7]")
"""


@pytest.fixture
def beat(child_environment: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Tree]]:
    """Starts ``celery beat``."""
    trees: list[Tree] = []

    def start(*arguments: str, **environment: str) -> Tree:
        command = [
            "-m",
            "celery",
            "-A",
            "tests.queueapp.contrib.celery.results.celeryapp",
            "beat",
            "--loglevel",
            "INFO",
        ]
        command += ["--pidfile", "", "--max-interval", "1", *arguments]
        trees.append(Tree(command, child_environment | environment, tmp_path / "log"))
        return trees[-1]

    yield start
    for tree in trees:
        tree.kill()


def _came(tree: Tree, name: str) -> None:
    def came() -> bool:
        assert tree.process.poll() is None, tree.output
        return BrokerQueue.objects.filter(recipient="celery", headers__contains=name).count() >= 2

    eventually(came, 2 * DEADLINE)


def test_beat_sends_by_its_schedule(beat: Callable[..., Tree], tmp_path: Path) -> None:
    tree = beat("--schedule", str(tmp_path / "schedule"), QUEUEAPP_TEST_SCHEDULE="1")

    _came(tree, "shop.configured")


def test_django_celery_beat_sends_by_its_table(beat: Callable[..., Tree], child_environment: dict[str, str]) -> None:
    pytest.importorskip("django_celery_beat")
    settings = {"DJANGO_SETTINGS_MODULE": "tests.queueapp.contrib.celery.results.beat_settings"}
    for command in (["-m", "django", "migrate", "django_celery_beat"], ["-c", _SCHEDULE]):
        subprocess.run(
            [sys.executable, *command],
            env=child_environment | settings,
            check=True,
            capture_output=True,
            timeout=patience(60),
        )
    try:
        tree = beat("--scheduler", "django_celery_beat.schedulers:DatabaseScheduler", **settings)
        _came(tree, "shop.often")
        tree.kill()
    finally:
        command = ["-m", "django", "migrate", "django_celery_beat", "zero"]
        subprocess.run(
            [sys.executable, *command],
            env=child_environment | settings,
            check=True,
            capture_output=True,
            timeout=patience(60),
        )
    assert "django_celery_beat_periodictask" not in connection.introspection.table_names()
