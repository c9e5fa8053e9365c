"""The rows that say that a process is alive: the columns that every kind of process writes."""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from django.db import Error, connections

from ..circuit_breaker import Breaker, BreakerReport, CircuitBreaker
from ..conf import settings
from ..models import Now, Subscriber
from ..version import VERSION
from .connection_timeouts import ResponseDeadline
from .service import Service
from .unclean_shutdowns import host_name, process_start_id

#: Characters of an error in a row.
MAX_ERROR_LENGTH = 500


def liveness_columns() -> dict[str, Any]:
    """The columns of every heartbeat."""
    return {"heartbeat_at": Now(), "alive_until": Now() + settings.DEAD_AFTER}


def process_columns() -> dict[str, Any]:
    """The columns that identify this process."""
    return {
        "host": host_name(),
        "process": os.getpid(),
        "process_start": process_start_id(os.getpid()) or "",
        "version": version(),
    }


def heartbeat(
    alias: str,
    subscriber: uuid.UUID,
    queue: Any,
    supervisor: uuid.UUID,
    changes: Mapping[str, Any],
    first_columns: Callable[[], Mapping[str, Any]],
) -> bool:
    """Write a subscriber's heartbeat and what has changed.

    False: its row did not exist, because this is the first heartbeat, or because the process was declared dead and its
    leases were released. The row is then written anew, with ``first_columns``.
    """
    rows = Subscriber.objects.using(alias)
    if rows.filter(pk=subscriber).update(**liveness_columns(), **changes):
        return True
    rows.create(
        id=subscriber,
        queue=queue._meta.label,
        table=queue._meta.db_table,
        supervisor=supervisor,
        **process_columns(),
        **first_columns(),
        **liveness_columns(),
        **changes,
    )
    return False


def heartbeat_unchanged(alias: str, subscribers: Sequence[uuid.UUID]) -> bool:
    """Write the heartbeats of subscribers whose other columns have not changed. False: at least one has no row."""
    rows = Subscriber.objects.using(alias).filter(pk__in=subscribers)
    return rows.update(**liveness_columns()) == len(subscribers)


def resident_bytes() -> int | None:
    """The memory of this process, rounded to 8 MiB so that a row does not change all the time; None: unknown."""
    try:
        with open("/proc/self/statm", "rb") as file:
            pages = int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    step = 8 * 1024 * 1024
    return -(-pages * os.sysconf("SC_PAGE_SIZE") // step) * step


def version() -> str:
    """The version of this process, as its rows name it."""
    return os.environ.get("QUEUEAPP_WORKER_VERSION", VERSION)[:64]


def breakers_json(reports: Iterable[BreakerReport]) -> str:
    """Reports of breakers as their column holds them; '' where all are closed."""
    found = [report | {"error": report["error"][:MAX_ERROR_LENGTH]} for report in reports]
    return json.dumps(found) if found else ""


# -- the heartbeat of a process that runs the dispatcher, maintenance, or both
# -------------------------------------------
#
# A subscriber row for each says that it is alive and which of its breakers are not closed. It holds no leases: the row
# of a dead one is simply deleted.


log = logging.getLogger("queueapp.workers")


class ServiceHeartbeat(Service):
    """Writes the rows of one database. ``breakers``: those of each of ``NO_QUEUES`` that this process runs."""

    def __init__(self, alias: str, breakers: Mapping[str, Sequence[Breaker]], supervisor: uuid.UUID) -> None:
        super().__init__(f"service-heartbeat-{alias}")
        self.alias = alias
        self.breakers = {name: (uuid.uuid4(), process_breakers) for name, process_breakers in breakers.items()}
        self._supervisor = supervisor
        self.breaker = CircuitBreaker(f"Heartbeat of services in {alias}", kind="service_heartbeat", subject=alias)
        self._written: dict[str, str] | None = None

    def serve(self) -> None:
        while not self.stopping:
            wait = settings.HEARTBEAT_INTERVAL.total_seconds()
            try:
                with ResponseDeadline(connections[self.alias]):
                    self._write()
                self.breaker.success()
            except Error as error:
                connections[self.alias].close()
                wait = self.breaker.failure(error)
            self.pause(wait)
        try:
            with ResponseDeadline(connections[self.alias]):
                Subscriber.objects.using(self.alias).filter(pk__in=[key for key, _ in self.breakers.values()]).delete()
        except Error as error:
            log.info(
                "%s could not deregister from %r; other processes see it as dead in %.0f s: %s",
                " and ".join(self.breakers), self.alias, settings.DEAD_AFTER.total_seconds(), error,
            )  # fmt: skip

    def _write(self) -> None:
        columns = {name: breakers_json(_reports(breakers)) for name, (_, breakers) in self.breakers.items()}
        keys = [key for key, _ in self.breakers.values()]
        # One statement for all rows that have not changed.
        if self._written == columns and heartbeat_unchanged(self.alias, keys):
            return
        rows = Subscriber.objects.using(self.alias)
        for name, breakers in columns.items():
            key, _ = self.breakers[name]
            if not rows.filter(pk=key).update(**liveness_columns(), breakers=breakers):
                rows.create(
                    id=key, queue=name, supervisor=self._supervisor, **process_columns(), **liveness_columns(),
                    breakers=breakers,
                )  # fmt: skip
        self._written = columns


def _reports(breakers: Sequence[Breaker]) -> list[BreakerReport]:
    return [report for breaker in breakers if (report := breaker.report()) is not None]
