"""Evaluates and tells alerts, on a thread of its own beside the housekeeping and only while that leads: a webhook that hangs is not
to keep anybody from giving leases back."""

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
from .connection_timeouts import answering_each, at_rest, go_on, rest
from .maintenance import Housekeeping
from .service import Service

log = logging.getLogger("queueapp.workers")

#: How often it looks, if the settings do not say.
EVERY = timedelta(seconds=30)


class Alerting(Service):
    """The alerts of one database."""

    def __init__(self, alias: str, queues: Sequence[Any], housekeeping: Housekeeping) -> None:
        super().__init__(f"alerts-{alias}")
        self.alias = alias
        self._queues = queues
        self._housekeeping = housekeeping
        self.breaker = CircuitBreaker(f"Alerts in {alias}")

    def serve(self) -> None:
        callbacks.guard(at_rest)
        while not self.stopping:
            wait = settings.ALERTS.get("every", EVERY).total_seconds()
            try:
                if self._housekeeping.leads:
                    self.look()
                self.breaker.success()
            except Error as error:
                connections[self.alias].close()
                wait = max(wait, self.breaker.failure(error))
            except Exception:
                # A project's settings, a receiver's trick: it is no reason to end the process.
                log.exception("Alerts in %r could not be evaluated.", self.alias)
            self.pause(wait)

    def look(self) -> None:
        """Evaluate once, and tell."""
        with answering_each(connections[self.alias]):
            mine = {queue._meta.label for queue in self._queues}
            store.reconcile(self.alias, conditions.look(self.alias, self._queues), mine)
            resting = rest()  # from here on it also waits for mail servers and webhooks
            try:
                store.tell(self.alias, mine)
            finally:
                go_on(resting)
