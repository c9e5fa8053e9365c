"""The pulse of a process that dispatches delayed messages, keeps house, or both: a row for each among the subscribers says
that it is alive and which of its breakers are not disarmed. It holds no leases, so nobody has to bury it: a dead one is
forgotten."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence

from django.db import Error, connections

from ..circuit_breaker import Breaker, BreakerReport, CircuitBreaker
from ..conf import settings
from ..models import Subscriber
from .connection_timeouts import Answering
from .service import Service
from .subscriber_rows import alive, all_beat, row_of_process, told

log = logging.getLogger("queueapp.workers")


class Pulse(Service):
    """Beats for one database. ``breakers``: of each of ``NO_QUEUES`` that this process is."""

    def __init__(self, alias: str, breakers: Mapping[str, Sequence[Breaker]], supervisor: uuid.UUID) -> None:
        super().__init__(f"pulse-{alias}")
        self.alias = alias
        self._breakers = {name: (uuid.uuid4(), own) for name, own in breakers.items()}
        self._supervisor = supervisor
        self._breaker = CircuitBreaker(f"Pulse in {alias}")
        self._told: dict[str, str] | None = None

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
                Subscriber.objects.using(self.alias).filter(pk__in=[key for key, _ in self._breakers.values()]).delete()
        except Error as error:
            log.info("%s of %r could not sign off: %s", " and ".join(self._breakers), self.alias, error)

    def _beat(self) -> None:
        news = {name: told(_troubles(breakers)) for name, (_, breakers) in self._breakers.items()}
        keys = [key for key, _ in self._breakers.values()]
        # One statement for all that have nothing new to say.
        if self._told == news and all_beat(self.alias, keys):
            return
        rows = Subscriber.objects.using(self.alias)
        for name, trouble in news.items():
            key, _ = self._breakers[name]
            if not rows.filter(pk=key).update(**alive(), trouble=trouble):
                rows.create(
                    id=key, queue=name, supervisor=self._supervisor, **row_of_process(), **alive(), trouble=trouble
                )
        self._told = news


def _troubles(breakers: Sequence[Breaker]) -> list[BreakerReport]:
    return [trouble for one in breakers if (trouble := one.report()) is not None]
