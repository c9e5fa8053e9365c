"""A dj_queue worker as it is fastest: one process of threads, jobs in reserve, connections that stay, nothing kept."""

from __future__ import annotations

import threading
from itertools import count as counter
from time import monotonic
from typing import Any

import django
from django.conf import settings
from django.core.management import call_command
from django.tasks import default_task_backend, task

from tests.benchmarks.messages import BODY_BYTES

THREADS = 16
#: Jobs claimed ahead, as a multiple of the threads.
RESERVE = 32
_BLOCK = 1000
_done = threading.Event()
_handled = counter(1)
_last = 0


def nop(text: str) -> None:
    """A job."""
    if next(_handled) == _last:
        _done.set()


def _set_up(parameters: dict[str, Any]) -> None:
    own_value = {"dbname": "NAME", "sslmode": ""}
    database = {own_value.get(name, name.upper()): value for name, value in parameters.items()}
    settings.configure(
        USE_TZ=True,
        INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "dj_queue"],
        DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "CONN_MAX_AGE": None} | database},
        TASKS={
            "default": {
                "BACKEND": "dj_queue.backend.DjQueueBackend",
                "QUEUES": [],
                "OPTIONS": {
                    "mode": "async",
                    "preserve_finished_jobs": False,
                    "workers": [
                        {"queues": "*", "threads": THREADS, "prefetch_multiplier": RESERVE, "polling_interval": 0.01}
                    ],
                },
            }
        },
    )
    django.setup()


def install(parameters: dict[str, Any]) -> None:
    """Make its tables."""
    _set_up(parameters)
    call_command("migrate", verbosity=0)


def enqueue(parameters: dict[str, Any], count: int) -> float:
    """Enqueue so many jobs one by one, each with a commit of its own; returns the seconds."""
    global nop
    _set_up(parameters)
    from dj_queue.models import Job

    nop = task(nop)
    nop.enqueue("x" * BODY_BYTES)  # connects
    started = monotonic()
    for _ in range(count):
        nop.enqueue("x" * BODY_BYTES)
    seconds = monotonic() - started
    Job.objects.all().delete()
    return seconds


def drain(parameters: dict[str, Any], count: int) -> float:
    """Enqueue so many jobs and handle them; returns the seconds of the handling."""
    global _last, nop
    _set_up(parameters)
    from dj_queue.models import Job
    from dj_queue.runtime.supervisor import AsyncSupervisor

    _last = count
    nop = task(nop)
    for start in range(0, count, _BLOCK):
        calls = [(nop, ["x" * BODY_BYTES], {})] * min(_BLOCK, count - start)
        default_task_backend.enqueue_all(calls)
    supervisor = AsyncSupervisor.from_backend_config(cli_overrides={"only_work": True})

    ended = 0.0

    def stop() -> None:
        nonlocal ended
        _done.wait()
        ended = monotonic()
        supervisor.request_stop()

    threading.Thread(target=stop, daemon=True).start()
    started = monotonic()
    supervisor.run()
    remaining = Job.objects.count()
    assert remaining == 0, f"{remaining} jobs were not ended"
    return ended - started
