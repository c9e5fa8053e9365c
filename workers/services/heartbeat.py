"""The pulse of a worker process: says that it is alive, learns who else is, and sees what operators paused.

One thread and one connection per process and database. A beat that comes too late is told by a missing row: somebody
declared this process dead and released its leases; it writes its rows again, and its late acks touch nothing.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from time import monotonic
from typing import Any

from django.db import Error, connections, transaction
from django.db.models import Q

from queueapp import notifier, overrides
from queueapp.circuit_breaker import CircuitBreaker
from queueapp.conf import settings
from queueapp.models import Now, QueueControl, Subscriber, UtcField
from queueapp.operations import subscriptions
from queueapp.receiving import barriers
from queueapp.services.connection_timeouts import ResponseDeadline
from queueapp.services.service import Service
from queueapp.services.subscriber_rows import breakers_json, heartbeat, heartbeat_unchanged
from queueapp.services.unclean_shutdowns import PreviousRuns
from queueapp.sql import ErrorKind, backend_of

from ..receiving.pump import QueuePump
from .cancellation import Stopping, in_hand
from .unattended import Missing

log = logging.getLogger("queueapp.workers")

#: Unknown types that a row names, and characters of each.
MOST_TYPES, LONGEST_TYPE = 50, 255


#: Rows that a statement of the goodbye ends at once.
BATCH = 3_000


#: Messages of which a row tells how far they are.
MOST_TOLD = 300


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
        self._stopping = Stopping()
        self._lacking = tuple(lacking)
        self.prepare()

    def prepare(self) -> None:
        self.begun.clear()
        self.previous_runs = PreviousRuns(self.alias, self._supervisor)
        self._told = {}
        self.missing = [Missing(name, self.alias) for name in self._lacking]
        for pump in self._pumps:
            pump.crash_tracking = True  # until the first beat says that there is no reason
        self._subscribed = False

    def serve(self) -> None:
        tick = min(1.0, *(pump.peek_delay for pump in self._pumps))
        next_beat = 0.0
        while not self.stopping:
            wait = tick
            try:
                with ResponseDeadline(connections[self.alias]):
                    if not self._subscribed:
                        self._subscribe()
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
        """Delete this process' rows: it ended well. Called when the pumps have stopped."""
        rows = Subscriber.objects.using(self.alias).filter(pk__in=[pump.subscriber for pump in self._pumps])
        try:
            with ResponseDeadline(connections[self.alias]):
                for pump in self._pumps:
                    self._hand_in(pump)
                rows.delete()
                for pump in self._pumps:
                    if pump.state.barriers is not None:
                        barriers.forget(self.alias, pump.subscriber)
        except Error as error:
            log.warning("Could not sign off from %r: %s", self.alias, error)
        finally:
            connections[self.alias].close()

    def _hand_in(self, pump: QueuePump) -> None:
        """What a worker still has: what was shared out to it is for others, and what was sent to it and could not be acked
        nobody would delete once its row is gone."""
        delivery = pump.queue.delivery
        if not (delivery.dispatches or delivery.keeps_sent):
            return
        connection, sql = connections[self.alias], pump.state.sql
        if delivery.dispatches:
            with transaction.atomic(using=self.alias):
                sql.limits.lock(connection)  # behind whoever shares out to it now; from here on nobody does
                Subscriber.objects.using(self.alias).filter(pk=pump.subscriber).update(receives=False)
        while delivery.keeps_sent and sql.limits.delete_sent(connection, pump.subscriber, BATCH):
            pass
        while sql.maintenance.release_owner(connection, pump.subscriber, BATCH, started=True) > 0:
            notifier.sent(pump.queue, connection)

    def _subscribe(self) -> None:
        """The consumers of this code get a copy each from now on, whoever sends. A role that may not write them can work: what its
        own process copies is complete, and ``migrate`` has written them for the others."""
        connection = connections[self.alias]
        try:
            subscriptions.register(self.alias, [pump.queue for pump in self._pumps])
        except Error as error:
            if backend_of(connection).error_kind(error) is not ErrorKind.DENIED:
                raise
            log.warning("The subscriptions of consumers in %r cannot be written: %s", self.alias, error)
        self._subscribed = True

    def _beat(self) -> None:
        rows = Subscriber.objects.using(self.alias)
        news = {pump: _counts(pump) for pump in self._pumps}
        quiet = [pump for pump in self._pumps if self._told.get(pump) == news[pump]]
        # One statement for all that have nothing new to say; each of the others, and all if a row is missing, its own.
        if quiet and heartbeat_unchanged(self.alias, [pump.subscriber for pump in quiet]):
            for pump in quiet:
                del news[pump]
        for pump, counts in news.items():
            heartbeat(self.alias, pump.subscriber, pump.queue, self._supervisor, counts, partial(_first, pump))
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
        began = monotonic()
        controls = QueueControl.objects.using(self.alias).annotate(
            tracks_crashes=Q(crash_tracking_until__gt=Now()), now=Now(output_field=UtcField())
        )
        asked: dict[str, tuple[str, datetime]] = {}
        paused, crash_tracking = set(), set()
        concurrency: dict[str, int | None] = {}
        found: dict[str, overrides.Overrides] = {}
        for queue, is_paused, tracks, tasks, cancelling, now, *values in controls.values_list(
            "queue", "paused", "tracks_crashes", "concurrency", "cancelling", "now", *overrides.SETTABLE
        ):
            if cancelling:
                asked[queue] = cancelling, now
            concurrency[queue] = tasks
            found[queue] = overrides.from_columns(values)
            if is_paused:
                paused.add(queue)
            if tracks:
                crash_tracking.add(queue)
        overrides.load(self.alias, found, began)
        crash_tracking |= self.previous_runs.queues()
        for pump in self._pumps:
            label = pump.queue._meta.label
            if label in asked:
                self._stopping.heed(pump, *asked[label])
            self._set_crash_tracking(pump, label in crash_tracking)
            wanted = min(concurrency.get(label) or pump.pool.declared, pump.pool.max_concurrency)
            if wanted != pump.pool.concurrency:
                pump.set_concurrency(wanted)
                log.info("%s is received by up to %d tasks of this process.", label, wanted)
            if (label in paused) != pump.paused:
                pump.paused = label in paused
                log.info("%s is %s.", label, "paused" if pump.paused else "resumed")
                if not pump.paused:
                    pump.wake()

        self._stopping.press()

    def _set_crash_tracking(self, pump: QueuePump, crash_tracking: bool) -> None:
        if crash_tracking == pump.crash_tracking:
            return
        # First the row, then the pump: whoever buries this process must know whether what it leased was in hand.
        Subscriber.objects.using(self.alias).filter(pk=pump.subscriber).update(crash_tracking=crash_tracking)
        pump.crash_tracking = crash_tracking
        if self.begun.is_set():
            log.warning(
                "%s is received %s.",
                pump.queue._meta.label,
                "with crash tracking: a worker died" if crash_tracking else "normally",
            )


def _first(pump: QueuePump) -> dict[str, Any]:
    """What its row says from the beginning."""
    return {
        "concurrency": pump.pool.concurrency,
        "filter": pump.state.filter.text if pump.state.filter is not None else "",
        "sent": pump.queue.delivery.keeps_sent,
        "consumers": json.dumps([told for one in pump.handlers.registrations for told in one.told()]),
    }


def _counts(pump: QueuePump) -> dict[str, Any]:
    # A copy: the tasks add to it meanwhile.
    types = sorted(pump.state.skipped.types.copy())[:MOST_TYPES]
    return {
        "received": pump.stats.received,
        "handled": pump.stats.handled,
        "failed": pump.stats.failed,
        "outstanding": sum(_outstanding(task) for task in pump.receivers),
        "backlog": pump.backlog.granted(),
        "leases_lost": pump.stats.lost,
        "crash_tracking": pump.crash_tracking,
        "breakers": breakers_json(pump.state.degraded()),
        "progress": _progress(pump),
        "unknown_types": json.dumps([kind[:LONGEST_TYPE] for kind in types]) if types else "",
    }


def _progress(pump: QueuePump) -> str:
    """How far the handlers are that say so; '' where none does."""
    found = [one for task in pump.receivers if (running := task.active_handler) is not None for one in in_hand(running)]
    return json.dumps(found[:MOST_TOLD]) if found else ""


def _outstanding(task: object) -> int:
    batch = getattr(task, "batch", None)
    if batch is not None:
        return len(batch.in_flight) + len(batch.waiting)
    return max(getattr(task, "reserved", 0), 1 if getattr(task, "active_handler", None) is not None else 0)
