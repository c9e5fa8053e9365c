"""A demo starts from its own clean state, and alone: other apps' messages and tables are not touched."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from django.db import connection

from project.flights.figures import LABELS, TOPIC
from project.flights.models import DelayFigure, FlightDelays, Import, Rebooking, Rebookings
from queueapp.models import DelayedMessage, JournalEntry, PoisonMessage


class AnotherDemoRuns(RuntimeError):
    """Two demos on one database would count each other's flights."""


@contextmanager
def only_demo(folder: Path) -> Iterator[None]:
    """Hold the lock of this database's demo; the kernel drops it with the process. Raises AnotherDemoRuns."""
    settings = connection.settings_dict
    name = hashlib.sha256(f"{settings['HOST']}:{settings['PORT']}/{settings['NAME']}".encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"demo-{name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AnotherDemoRuns("Another demo runs on this database: wait for its end, or stop it.") from None
        yield


def remove_results() -> None:
    """Remove the messages, figures and poison of earlier demos and imports.

    In the order in which messages travel: a message that a worker of ``runsite`` is handling holds its row, so each
    delete waits until what it did has been committed, and the next one finds it.
    """
    FlightDelays.objects.all().delete()
    DelayedMessage.objects.filter(destination__in=LABELS).delete()
    Rebookings.objects.all().delete()
    PoisonMessage.objects.filter(queue__in=LABELS).delete()
    DelayFigure.objects.all().delete()
    Rebooking.objects.all().delete()
    Import.objects.all().delete()
    JournalEntry.objects.filter(topic=TOPIC).delete()
