"""The pulse of a process that dispatches delayed messages, keeps house, or both: a row for each among the subscribers says
that it is alive and which of its breakers are not disarmed. It holds no leases, so nobody has to bury it: a dead one is
forgotten."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping, Sequence

from django.db import Error, connections

from queueapp.conf import settings
from queueapp.models import Now, Subscriber

from ..connections.circuit_breaker import Breaker, CircuitBreaker
from ..connections.dead_peers import Answering
from .heartbeat import told, version
from .service import Service
from .strangers import host_name, life_of

log = logging.getLogger("workers")


class Pulse(Service):
    """Beats for one database. ``breakers``: of each of ``NO_QUEUES`` that this process is."""

    def __init__(self, alias: str, breakers: Mapping[str, Sequence[Breaker]], supervisor: uuid.UUID) -> None:
        super().__init__(f"pulse-{alias}")
        self.alias = alias
        self._breakers = {name: (uuid.uuid4(), own) for name, own in breakers.items()}
        self._supervisor = supervisor
        self._breaker = CircuitBreaker(f"Pulse in {alias}")

    def serve(self) -> None:
        while not self.stopping:
            wait = settings.HEARTBEAT_INTERVAL.total_seconds()
            try:
                with Answering(connections[self.alias]):
                    for name in self._breakers:
                        self._beat(name)
                self._breaker.success()
            except Error as error:
                connections[self.alias].close()
                wait = self._breaker.failure(error)
            self.pause(wait)
        try:
            with Answering(connections[self.alias]):
                Subscriber.objects.using(self.alias).filter(pk__in=[key for key, _ in self._breakers.values()]).delete()
        except Error as error:
            log.info("%s of %r could not sign off: %s", " and ".join(self._breakers), self.alias, error)

    def _beat(self, name: str) -> None:
        key, breakers = self._breakers[name]
        rows = Subscriber.objects.using(self.alias)
        troubles = [trouble for one in breakers if (trouble := one.trouble()) is not None]
        news = {"heartbeat_at": Now(), "alive_until": Now() + settings.DEAD_AFTER, "trouble": told(troubles)}
        if not rows.filter(pk=key).update(**news):
            rows.create(
                id=key,
                queue=name,
                host=host_name(),
                process=os.getpid(),
                life=life_of(os.getpid()) or "",
                supervisor=self._supervisor,
                version=version(),
                **news,
            )
