"""The demo's maintenance, as the site has it every hour: a task of Celery's, on no other broker than the database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from celery.exceptions import TimeoutError

from project.child_process import ChildProcess
from project.flights.tasks import trim

STOP_SECONDS, PATIENCE = 20.0, 90.0


class NotDone(RuntimeError):
    """Celery's worker has not done it. The text says what is known about the reason."""


@contextmanager
def by_celery(folder: Path) -> Iterator[Callable[[], int]]:
    """Send the task and start a worker, which ends with the block; what is yielded waits and returns how many rows
    went."""
    log = folder / "demo-celery.log"
    log.unlink(missing_ok=True)
    worker = ChildProcess("runcelery", "worker", log=log)
    result = trim.delay()

    def wait() -> int:
        try:
            return int(result.get(timeout=PATIENCE))
        except TimeoutError:
            raise NotDone(f"Celery's worker has trimmed nothing in {PATIENCE:.0f} s: {worker.last_words()}") from None

    worker.start()
    try:
        yield wait
    finally:
        worker.stop(STOP_SECONDS)
