"""One Celery app for each broker that is measured: the same tasks, the same options."""

from __future__ import annotations

import os

from celery import Celery

import queueapp.contrib.celery  # noqa: F401 - makes the URL known
from tests.statement_counter import count_statements

count_statements()

#: Names how libpq reaches the database of kombu's transport on pgmq.
PGMQ_DSN = "BENCH_PGMQ_DSN"


def app_for(url: str) -> Celery:
    """An app on this broker; everything else as Celery has it."""
    found = Celery("bench", broker=url, set_as_current=False)
    found.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=True, worker_hijack_root_logger=False)
    if url.startswith("pgmq:"):
        found.conf.broker_transport_options = {"conn_string": os.environ[PGMQ_DSN], "init_extension": False}
    found.task(_tick, name="bench.tick")
    return found


def _tick(text: str) -> None:
    """A byte in a file that all processes share says that it ran."""
    os.write(_tally(), b".")


_tally_at: list[int] = []


def _tally() -> int:
    if not _tally_at:
        _tally_at.append(os.open(os.environ["BENCH_TALLY"], os.O_WRONLY | os.O_APPEND))
    return _tally_at[0]


app = app_for(os.environ.get("BENCH_BROKER", "queueapp://"))
