"""A project's ``celery.py`` and its tasks, as small as they come."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

from celery import Celery
from celery.exceptions import Ignore, Reject

import queueapp.contrib.celery  # noqa: F401 - makes the URL known
from tests.statement_counter import count_statements

count_statements()
app = Celery("tests")
app.conf.update(
    broker_url=os.environ.get("TEST_BROKER_URL", "queueapp://"),
    result_backend=os.environ.get("TEST_RESULT_BACKEND"),
    broker_connection_retry_on_startup=True,
    task_ignore_result=True,
    worker_hijack_root_logger=False,
    worker_send_task_events=False,
    broker_transport_options={
        "visibility_timeout": float(os.environ.get("TEST_VISIBILITY_TIMEOUT", "30")),
        "max_deliveries": int(os.environ.get("TEST_MAX_DELIVERIES", "20")),
    },
    task_acks_late=bool(os.environ.get("TEST_ACKS_LATE")),
    task_reject_on_worker_lost=bool(os.environ.get("TEST_ACKS_LATE")),
    control_queue_expires=float(os.environ.get("TEST_CONTROL_EXPIRES", "3")),
)


if os.environ.get("TEST_BEAT"):
    app.conf.beat_schedule = {"record": {"task": f"{__name__}.record", "schedule": 1.0, "args": ["beaten"]}}


def _effect(name: str) -> None:
    from tests.testapp.models import Effect

    Effect.objects.create(name=name)


@app.task
def record(name: str) -> None:
    _effect(name)


@app.task(acks_late=True)
def record_late(name: str) -> None:
    _effect(name)


@app.task(acks_late=True, reject_on_worker_lost=True)
def wait_for(path: str, name: str) -> None:
    """Begin, and end when the file ``path`` is there."""
    from tests.in_process_worker import eventually

    Path(f"{path}.begun.{os.getpid()}").touch()
    _effect(f"{name} begun")
    eventually(Path(path).exists, 120)
    _effect(f"{name} done")


@app.task(acks_late=True)
def keep_lock(name: str, until: str) -> None:
    """Keep the interpreter lock, in C code, until the named pipe ``until`` is opened for writing: no thread of the
    process runs meanwhile."""
    _effect(f"{name} begun")
    assert ctypes.PyDLL(None).open(until.encode(), os.O_RDONLY) >= 0
    _effect(f"{name} done")


@app.task(acks_late=True, reject_on_worker_lost=True)
def die_once(path: str, name: str) -> None:
    """Kill the process that runs it, the first time."""
    first = Path(path)
    if not first.exists():
        first.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    _effect(name)


@app.task
def dies(path: str) -> None:
    """Kill the process that runs it, each time."""
    with Path(path).open("a") as times:
        times.write("x")
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(soft_time_limit=0.1, time_limit=60)
def overruns(name: str, seconds: float = 0.5) -> None:
    time.sleep(seconds)
    _effect(name)


@app.task(bind=True)
def redelivered(self: Any) -> None:
    _effect(f"redelivered {self.request.delivery_info.get('redelivered')}")


@app.task(bind=True, max_retries=2)
def retries(self: Any, name: str) -> None:
    _effect(f"{name} {self.request.retries}")
    if self.request.retries < 2:
        raise self.retry(countdown=0.2)


@app.task(bind=True, autoretry_for=(LookupError,), max_retries=2, default_retry_delay=0, retry_backoff=0)
def retries_at_once(self: Any, name: str) -> None:
    _effect(f"{name} {self.request.retries}")
    if self.request.retries < 2:
        raise LookupError(name)


@app.task
def chained(name: str) -> None:
    record.delay(f"{name} from within")


@app.task(bind=True, acks_late=True)
def rejects(self: Any, name: str, requeue: bool) -> None:
    _effect(name)
    if not self.request.delivery_info.get("redelivered"):
        raise Reject("as the test wants it", requeue=requeue)


@app.task
def ignores(name: str) -> None:
    _effect(name)
    raise Ignore


@app.task(rate_limit="2/s")
def limited(name: str) -> None:
    _effect(name)
