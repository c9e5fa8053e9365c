"""The pulse of a worker process: says that it is alive, learns who else is, and sees what operators paused.

One thread and one connection per process and database. A beat that comes too late is told by a missing row: somebody
declared this process dead and released its leases; it writes its rows again, and its late acks touch nothing.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Any

from django.db import Error, connections
from django.db.models import Q

from queueapp import __version__
from queueapp.conf import settings
from queueapp.consuming.registry import registered
from queueapp.models import Now, QueueControl, Subscriber

from ..connections.circuit_breaker import CircuitBreaker, Trouble
from ..connections.dead_peers import Answering
from ..receiving.pump import QueuePump
from .missing import Missing
from .service import Service
from .strangers import Strangers, host_name, life_of

log = logging.getLogger("workers")

#: Unknown types that a row names, and characters of each; characters of an error.
MOST_TYPES, LONGEST_TYPE, LONGEST_ERROR = 50, 255, 500


class Heartbeat(Service):
    """Beats for all pumps of one database in this process."""

    def __init__(
        self, alias: str, pumps: Sequence[QueuePump], supervisor: uuid.UUID, lacking: Sequence[str] = ()
    ) -> None:
        """``lacking``: those of ``NO_QUEUES`` that its own tree does not have; the log says so when nobody else is either."""
        super().__init__(f"heartbeat-{alias}")
        self.alias = alias
        self._pumps = pumps
        self._supervisor = supervisor
        self._breaker = CircuitBreaker(f"Heartbeat in {alias}")
        #: Set after the first beat: by then every pump knows whether it has to be careful.
        self.begun = threading.Event()
        self._told: dict[QueuePump, dict[str, Any]] = {}
        self._lacking = tuple(lacking)
        self.prepare()

    def prepare(self) -> None:
        self.begun.clear()
        self.strangers = Strangers(self.alias, self._supervisor)
        self._told = {}
        self.missing = [Missing(name, self.alias) for name in self._lacking]
        for pump in self._pumps:
            pump.careful = True  # until the first beat says that there is no reason

    def serve(self) -> None:
        tick = min(1.0, *(pump.peek_delay for pump in self._pumps))
        next_beat = 0.0
        while not self.stopping:
            wait = tick
            try:
                with Answering(connections[self.alias]):
                    if monotonic() >= next_beat:
                        self._beat()
                        next_beat = monotonic() + settings.HEARTBEAT_INTERVAL.total_seconds()
                    self._read_controls()
                self.begun.set()
                self._breaker.success()
            except Error as error:
                connections[self.alias].close()
                wait = self._breaker.failure(error)
            self.pause(wait)

    def goodbye(self) -> None:
        """Delete this process' rows: it ended well and holds nothing. Called when the pumps have stopped."""
        rows = Subscriber.objects.using(self.alias).filter(pk__in=[pump.subscriber for pump in self._pumps])
        try:
            with Answering(connections[self.alias]):
                rows.delete()
        except Error as error:
            log.warning("Could not sign off from %r: %s", self.alias, error)
        finally:
            connections[self.alias].close()

    def _beat(self) -> None:
        rows = Subscriber.objects.using(self.alias)
        alive = {"heartbeat_at": Now(), "alive_until": Now() + settings.DEAD_AFTER}
        news = {pump: _counts(pump) for pump in self._pumps}
        quiet = [pump for pump in self._pumps if self._told.get(pump) == news[pump]]
        # One statement for all that have nothing new to say; each of the others, and all if a row is missing, its own.
        if quiet and rows.filter(pk__in=[pump.subscriber for pump in quiet]).update(**alive) == len(quiet):
            for pump in quiet:
                del news[pump]
        for pump, counts in news.items():
            if not rows.filter(pk=pump.subscriber).update(**alive, **counts):
                rows.create(
                    id=pump.subscriber,
                    queue=pump.queue._meta.label,
                    table=pump.queue._meta.db_table,
                    host=host_name(),
                    process=os.getpid(),
                    life=life_of(os.getpid()) or "",
                    supervisor=self._supervisor,
                    version=version(),
                    concurrency=pump.crew.concurrency,
                    consumers=json.dumps([(one.name, one.type_name) for one in registered.of(pump.queue)]),
                    **alive,
                    **counts,
                )
            self._told[pump] = counts
        # One read for all queues: everybody's place among the live subscribers of each.
        live: defaultdict[str, list[uuid.UUID]] = defaultdict(list)
        names = [*(pump.queue._meta.label for pump in self._pumps), *self._lacking]
        for queue, key in rows.filter(queue__in=names, alive_until__gt=Now()).order_by("id").values_list("queue", "id"):
            live[queue].append(key)
        for pump in self._pumps:
            keys = live[pump.queue._meta.label]
            if pump.subscriber in keys:
                pump.rank, pump.workers = keys.index(pump.subscriber), len(keys)

        for one in self.missing:
            one.looked(bool(live[one.name]))

    def _read_controls(self) -> None:
        controls = QueueControl.objects.using(self.alias).annotate(now_careful=Q(careful_until__gt=Now()))
        paused, careful = set(), set()
        concurrency: dict[str, int | None] = {}
        for queue, is_paused, is_careful, tasks in controls.values_list(
            "queue", "paused", "now_careful", "concurrency"
        ):
            concurrency[queue] = tasks
            if is_paused:
                paused.add(queue)
            if is_careful:
                careful.add(queue)
        careful |= self.strangers.queues()
        for pump in self._pumps:
            label = pump.queue._meta.label
            self._set_careful(pump, label in careful)
            wanted = min(concurrency.get(label) or pump.crew.declared, pump.crew.most)
            if wanted != pump.crew.concurrency:
                pump.set_concurrency(wanted)
                log.info("%s is received by up to %d tasks of this process.", label, wanted)
            if (label in paused) != pump.paused:
                pump.paused = label in paused
                log.info("%s is %s.", label, "paused" if pump.paused else "resumed")
                if not pump.paused:
                    pump.wake()

    def _set_careful(self, pump: QueuePump, careful: bool) -> None:
        if careful == pump.careful:
            return
        # First the row, then the pump: whoever buries this process must know whether what it leased was in hand.
        Subscriber.objects.using(self.alias).filter(pk=pump.subscriber).update(careful=careful)
        pump.careful = careful
        if self.begun.is_set():
            log.warning(
                "%s is received %s.", pump.queue._meta.label, "carefully: a worker died" if careful else "normally"
            )


def version() -> str:
    """What runs here, as the rows of subscribers name it."""
    return os.environ.get("QUEUEAPP_WORKER_VERSION", __version__)[:64]


def told(troubles: Iterable[Trouble]) -> str:
    """Troubles as the column ``trouble`` holds them; '' when all is well."""
    found = [one | {"error": one["error"][:LONGEST_ERROR]} for one in troubles]
    return json.dumps(found) if found else ""


def _counts(pump: QueuePump) -> dict[str, Any]:
    # A copy: the tasks add to it meanwhile.
    types = sorted(pump.desk.unknown_types.copy())[:MOST_TYPES]
    return {
        "received": pump.stats.received,
        "handled": pump.stats.handled,
        "failed": pump.stats.failed,
        "outstanding": sum(_outstanding(task) for task in pump.tasks),
        "careful": pump.careful,
        "trouble": told(pump.desk.troubles()),
        "unknown_types": json.dumps([kind[:LONGEST_TYPE] for kind in types]) if types else "",
    }


def _outstanding(task: object) -> int:
    batch = getattr(task, "batch", None)
    if batch is not None:
        return len(batch.held) + len(batch.waiting)
    return 1 if getattr(task, "running", None) is not None else 0
