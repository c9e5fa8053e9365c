"""A project's app of Celery with our broker and our results, and tasks that fail or kill their process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from celery import Celery

import queueapp.contrib.celery  # noqa: F401 - makes the URL known

app = Celery("kept")
app.conf.update(
    broker_url="queueapp://",
    result_backend="queueapp://",
    broker_connection_retry_on_startup=True,
    worker_hijack_root_logger=False,
    broker_transport_options={"visibility_timeout": 3.0},
)
if "QUEUEAPP_TEST_SCHEDULE" in os.environ:
    app.conf.beat_schedule = {"configured": {"task": "shop.configured", "schedule": 1.0}}


def effect(name: str) -> None:
    """Leave a trace."""
    from tests.testapp.models import Effect

    Effect.objects.create(name=name)


@app.task
def traces(name: str) -> None:
    effect(name)


@app.task
def fails(path: str) -> str:
    """Fail until the file is there."""
    if not Path(path).exists():
        raise LookupError("no such file")
    effect("mended")
    return "mended"


@app.task(acks_late=True)
def fails_late(path: str) -> str:
    return str(fails(path))


@app.task(keep_failed=False)
def fails_unkept() -> None:
    raise LookupError("of no interest")


@app.task(bind=True, max_retries=1)
def retries(self: Any) -> None:
    effect(f"try {self.request.retries}")
    raise self.retry(exc=ValueError("never"), countdown=0.1)


@app.task(time_limit=1)
def takes_long() -> None:
    import time

    time.sleep(60)


@app.task
def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# -- chords ------------------------------------------------------------------------------------------------------------


@app.task(acks_late=True, reject_on_worker_lost=True)
def member(number: int, path: str = "", after: str = "") -> int:
    """The first time, kill the process at a statement of its own end: behind the one that is named ``after``."""
    if path and not Path(path).exists():
        Path(path).touch()
        _kill_behind(after)
    return number


@app.task(acks_late=True)
def body(values: list[int]) -> list[int]:
    effect(f"body {values}")
    return values


def _kill_behind(name: str) -> None:
    from queueapp.contrib.celery import result_rows
    from queueapp.contrib.celery.chords import Chords
    from queueapp.sql.postgresql.results import PostgresqlCeleryResults as Postgresql
    from queueapp.sql.sqlserver.results import SqlServerCeleryResults as SqlServer

    places: dict[str, list[tuple[Any, str]]] = {
        "result stored": [(Postgresql, "store_result"), (SqlServer, "store_result")],
        "part counted": [(Postgresql, "count_part"), (SqlServer, "count_part")],
        "chord over": [(result_rows, "end_chord")],
        "body sent": [(Chords, "_complete")],
        "committed": [(Chords, "_in_transaction")],
    }
    for owner, verb in places[name]:
        original = getattr(owner, verb)

        def killing(*given: Any, original: Any = original, **more: Any) -> Any:
            original(*given, **more)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, verb, killing)
