"""Evaluates alerts and sends their notifications, beside the maintenance of a database and only while that is the
leader.

It has a thread of its own, because a webhook that hangs must not delay the release of leases.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from django.db import Error, connections

from .. import callbacks
from ..alerts import conditions, store
from ..circuit_breaker import CircuitBreaker
from ..conf import settings
from .connection_timeouts import deadline_per_statement, pause_deadline, resume_deadline, without_deadline
from .maintenance import Maintenance
from .service import Service

log = logging.getLogger("queueapp.workers")

#: Interval between two evaluations where ``QUEUEAPP["ALERTS"]`` does not set ``every``.
DEFAULT_INTERVAL = timedelta(seconds=30)


class AlertEvaluator(Service):
    """The alerts of one database."""

    def __init__(self, alias: str, queues: Sequence[Any], maintenance: Maintenance) -> None:
        super().__init__(f"alerts-{alias}")
        self.alias = alias
        self._queues = queues
        self._maintenance = maintenance
        self.breaker = CircuitBreaker(f"Alerts in {alias}", kind="alerts", subject=alias)

    def serve(self) -> None:
        callbacks.guard(without_deadline)
        while not self.stopping:
            wait = settings.ALERTS.get("every", DEFAULT_INTERVAL).total_seconds()
            try:
                if self._maintenance.is_leader:
                    self.evaluate()
                self.breaker.success()
            except Error as error:
                connections[self.alias].close()
                wait = max(wait, self.breaker.failure(error))
            except Exception:
                # A project's setting or signal receiver failed; that must not end the process.
                log.exception("Alerts in %r could not be evaluated.", self.alias)
            self.pause(wait)

    def evaluate(self) -> None:
        """Evaluate the conditions once and send what is due."""
        with deadline_per_statement(connections[self.alias]):
            labels = {queue._meta.label for queue in self._queues}
            store.reconcile(self.alias, conditions.evaluate(self.alias, self._queues), labels)
            paused = pause_deadline()  # mail servers and webhooks are not the database
            try:
                store.send_notifications(self.alias, labels)
            finally:
                resume_deadline(paused)
