"""A worker of django-tasks-db as it is fastest: one process that never waits between tasks, on a connection that
stays."""

from __future__ import annotations

from importlib.util import find_spec
from time import monotonic
from typing import Any

import django
from django.conf import settings
from django.core.management import call_command

from tests.benchmarks.messages import BODY_BYTES


def _set_up(parameters: dict[str, Any]) -> None:
    own_value = {"dbname": "NAME", "sslmode": ""}
    database = {own_value.get(name, name.upper()): value for name, value in parameters.items()}
    settings.configure(
        USE_TZ=True,
        INSTALLED_APPS=[
            *([] if find_spec("django.tasks") else ["django_tasks"]),
            "django_tasks_db",
        ],
        DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "CONN_MAX_AGE": None} | database},
        TASKS={"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}},
    )
    django.setup()


def install(parameters: dict[str, Any]) -> None:
    """Make its tables."""
    _set_up(parameters)
    call_command("migrate", verbosity=0)


def enqueue(parameters: dict[str, Any], count: int) -> float:
    """Enqueue so many tasks one by one, each with a commit of its own; returns the seconds."""
    _set_up(parameters)
    from django_tasks_db.models import DBTaskResult

    from tests.benchmarks.tasks import nop_task

    nop_task.enqueue("x" * BODY_BYTES)  # connects
    started = monotonic()
    for _ in range(count):
        nop_task.enqueue("x" * BODY_BYTES)
    seconds = monotonic() - started
    DBTaskResult.objects.all().delete()
    return seconds


def drain(parameters: dict[str, Any], count: int) -> float:
    """Enqueue so many tasks and run them; returns the seconds of the running."""
    _set_up(parameters)
    from django.db import transaction
    from django_tasks_db.management.commands.db_worker import Worker
    from django_tasks_db.models import DBTaskResult

    from tests.benchmarks.tasks import nop_task

    with transaction.atomic():
        for _ in range(count):
            nop_task.enqueue("x" * BODY_BYTES)
    worker = Worker(
        queue_names=["*"],
        interval=0,
        batch=True,
        backend_name="default",
        startup_delay=False,
        max_tasks=None,
        worker_id="bench",
        excluded_queue_names=[],
    )
    started = monotonic()
    worker.run()
    seconds = monotonic() - started
    ended = DBTaskResult.objects.successful().count()
    assert ended == count, f"{count - ended} tasks were not run"
    DBTaskResult.objects.all().delete()
    return seconds
