"""The heartbeat of a process that runs the dispatcher, maintenance, or both.

A subscriber row for each says that it is alive and which of its breakers are not closed. It holds no leases: the row of
a dead one is simply deleted.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence

from django.db import Error, connections

from ..circuit_breaker import Breaker, BreakerReport, CircuitBreaker
from ..conf import settings
from ..models import Subscriber
from .connection_timeouts import ResponseDeadline
from .service import Service
from .subscriber_rows import breakers_json, heartbeat_unchanged, liveness_columns, process_columns

log = logging.getLogger("queueapp.workers")


class ServiceHeartbeat(Service):
    """Writes the rows of one database. ``breakers``: those of each of ``NO_QUEUES`` that this process runs."""

    def __init__(self, alias: str, breakers: Mapping[str, Sequence[Breaker]], supervisor: uuid.UUID) -> None:
        super().__init__(f"service-heartbeat-{alias}")
        self.alias = alias
        self._breakers = {name: (uuid.uuid4(), own) for name, own in breakers.items()}
        self._supervisor = supervisor
        self._breaker = CircuitBreaker(f"Heartbeat of services in {alias}", kind="service_heartbeat", subject=alias)
        self._written: dict[str, str] | None = None

    def serve(self) -> None:
        while not self.stopping:
            wait = settings.HEARTBEAT_INTERVAL.total_seconds()
            try:
                with ResponseDeadline(connections[self.alias]):
                    self._write()
                self._breaker.success()
            except Error as error:
                connections[self.alias].close()
                wait = self._breaker.failure(error)
            self.pause(wait)
        try:
            with ResponseDeadline(connections[self.alias]):
                Subscriber.objects.using(self.alias).filter(pk__in=[key for key, _ in self._breakers.values()]).delete()
        except Error as error:
            log.info(
                "%s could not deregister from %r; other processes see it as dead in %.0f s: %s",
                " and ".join(self._breakers), self.alias, settings.DEAD_AFTER.total_seconds(), error,
            )  # fmt: skip

    def _write(self) -> None:
        columns = {name: breakers_json(_reports(breakers)) for name, (_, breakers) in self._breakers.items()}
        keys = [key for key, _ in self._breakers.values()]
        # One statement for all rows that have not changed.
        if self._written == columns and heartbeat_unchanged(self.alias, keys):
            return
        rows = Subscriber.objects.using(self.alias)
        for name, breakers in columns.items():
            key, _ = self._breakers[name]
            if not rows.filter(pk=key).update(**liveness_columns(), breakers=breakers):
                rows.create(
                    id=key, queue=name, supervisor=self._supervisor, **process_columns(), **liveness_columns(),
                    breakers=breakers,
                )  # fmt: skip
        self._written = columns


def _reports(breakers: Sequence[Breaker]) -> list[BreakerReport]:
    return [report for breaker in breakers if (report := breaker.report()) is not None]
