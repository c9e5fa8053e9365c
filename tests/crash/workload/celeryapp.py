"""The tasks of the seeded run, on our broker: `celery -A tests.crash.workload.celeryapp worker`.

Each leaves its effect under its key, as the handlers of ``consumers`` do. ``late`` acks when it has ended, and is put
back when its process dies; ``late_kept`` acks when it has ended, and is kept as poison then; ``early`` acks before it
begins.
"""

from __future__ import annotations

import time
from typing import Any

from celery import Celery

import queueapp.contrib.celery  # noqa: F401 - makes the URL known

from . import ledger, starts

app = Celery("crash")
app.conf.update(
    broker_url="queueapp://",
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    broker_transport_options={"visibility_timeout": 5, "polling_interval": 1},
    control_queue_expires=10,
    task_default_queue=ledger.CELERY_QUEUE,
    task_ignore_result=True,
    worker_hijack_root_logger=False,
    worker_send_task_events=False,
    worker_proc_alive_timeout=60,
    CELERY_DB_REUSE_MAX=100,  # or each task opens a connection, and does little else
)


class Failed(Exception):
    """What a task raises on request."""


def _act(task: Any, key: str, label: str, sleep_ms: int, fail: bool, retry: bool) -> None:
    starts.note(key, label, task.request.retries + 1)
    if sleep_ms:
        time.sleep(sleep_ms / 1000)
    if fail:
        raise Failed("on request")
    if retry and not task.request.retries:
        raise task.retry(countdown=0.3)
    ledger.effect("default", key, label, task.request.retries + 1)


@app.task(bind=True, acks_late=True, reject_on_worker_lost=True)
def late(self: Any, key: str, *, sleep_ms: int = 0, fail: bool = False, retry: bool = False) -> None:
    _act(self, key, ledger.LATE, sleep_ms, fail, retry)


@app.task(bind=True, acks_late=True)
def late_kept(self: Any, key: str, *, sleep_ms: int = 0, fail: bool = False, retry: bool = False) -> None:
    _act(self, key, ledger.LATE, sleep_ms, fail, retry)


@app.task(bind=True)
def early(self: Any, key: str, *, sleep_ms: int = 0, fail: bool = False, retry: bool = False) -> None:
    _act(self, key, ledger.EARLY, sleep_ms, fail, retry)
