"""The pulse of a process that dispatches delayed messages and keeps house: its row among the subscribers says that it is
alive and which of its breakers are not disarmed. It holds no leases, so nobody has to bury it: a dead one is forgotten."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Sequence

from django.db import Error, connections

from queueapp.conf import settings
from queueapp.models import DISPATCHER, Now, Subscriber

from ..connections.circuit_breaker import Breaker, CircuitBreaker
from ..connections.dead_peers import Answering
from .heartbeat import told, version
from .service import Service
from .strangers import host_name, life_of

log = logging.getLogger("workers")


class DispatcherPulse(Service):
    """Beats for the dispatcher and the housekeeping of one database; to be stopped after them."""

    def __init__(self, alias: str, breakers: Sequence[Breaker], supervisor: uuid.UUID) -> None:
        super().__init__(f"pulse-{alias}")
        self.alias = alias
        self.id = uuid.uuid4()
        self._breakers = breakers
        self._supervisor = supervisor
        self._breaker = CircuitBreaker(f"Pulse in {alias}")

    def serve(self) -> None:
        while not self.stopping:
            wait = settings.HEARTBEAT_INTERVAL.total_seconds()
            try:
                with Answering(connections[self.alias]):
                    self._beat()
                self._breaker.success()
            except Error as error:
                connections[self.alias].close()
                wait = self._breaker.failure(error)
            self.pause(wait)
        try:
            with Answering(connections[self.alias]):
                Subscriber.objects.using(self.alias).filter(pk=self.id).delete()
        except Error as error:
            log.info("The dispatcher of %r could not sign off: %s", self.alias, error)

    def _beat(self) -> None:
        rows = Subscriber.objects.using(self.alias)
        troubles = [trouble for one in self._breakers if (trouble := one.trouble()) is not None]
        news = {"heartbeat_at": Now(), "alive_until": Now() + settings.DEAD_AFTER, "trouble": told(troubles)}
        if not rows.filter(pk=self.id).update(**news):
            rows.create(
                id=self.id,
                queue=DISPATCHER,
                host=host_name(),
                process=os.getpid(),
                life=life_of(os.getpid()) or "",
                supervisor=self._supervisor,
                version=version(),
                **news,
            )
