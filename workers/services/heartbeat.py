"""The heartbeat of a worker process: writes that it is alive and how far its handlers are, reads which others are
alive, and applies what operators have set, the cancellation of single handlers as well.

One thread and one connection per process and database. A heartbeat that comes too late finds no row: this process was
declared dead and its leases were released. It writes its rows anew, and its late acks change nothing.

``Cancellation``: requests are read with the controls of the queues and progress is written with the heartbeat, so
neither costs a statement of its own. A request applies to the attempt that runs when it is made: an attempt that began
later is of a message that was delivered again.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from time import monotonic
from typing import Any

from django.db import Error, connections, transaction
from django.db.models import Q

from queueapp import notifier, overrides
from queueapp.circuit_breaker import CircuitBreaker
from queueapp.conf import settings
from queueapp.consuming.context import Context
from queueapp.errors import MessageCancelled
from queueapp.models import DISPATCHER, MAINTENANCE, Now, QueueControl, Subscriber, UtcField
from queueapp.models.subscribers import parse_json_list
from queueapp.operations import subscriptions
from queueapp.operations.statistics import NO_PROCESS
from queueapp.receiving import barriers
from queueapp.services.connection_timeouts import ResponseDeadline
from queueapp.services.service import Service
from queueapp.services.subscriber_rows import (
    PreviousRuns,
    breakers_json,
    heartbeat,
    heartbeat_unchanged,
    resident_bytes,
)
from queueapp.sql import ErrorKind, backend_of

from ..receiving.pump import QueuePump
from ..receiving.receivers import ActiveHandler, Receiver
from ..receiving.receivers.base import cancel

log = logging.getLogger("queueapp.workers")

#: Unknown types that a row names, and characters of each.
MAX_TYPES, MAX_TYPE_LENGTH = 50, 255
#: Rows that one statement of the deregistration changes.
BATCH = 3_000
#: Messages of whose progress a row reports.
MAX_PROGRESS = 300
#: A handler that runs for so many seconds is named in the row, and how many are.
RUNNING_AFTER, MAX_RUNNING = 1.0, 50
#: Seconds until the log reports again that a service is missing.
REPORT_AGAIN = 600.0

_START = {
    DISPATCHER: "start “manage.py rundelayeddispatcher”, or a worker without --no-dispatcher",
    MAINTENANCE: "start “manage.py rundelayeddispatcher”, or a worker, without --no-maintenance",
}


class Heartbeat(Service):
    """The heartbeat of all pumps of one database in this process."""

    def __init__(
        self,
        alias: str,
        pumps: Sequence[QueuePump],
        supervisor: uuid.UUID,
        lacking: Sequence[str] = (),
        *,
        restarts: int = 0,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """``lacking``: those of ``NO_QUEUES`` that its own tree does not run; the log reports when no other process
        runs them. ``restarts``: how often this process was started again. ``on_stop`` is called once if an operator
        asks the tree to stop."""
        super().__init__(f"heartbeat-{alias}")
        self.alias = alias
        self._pumps = pumps
        self._supervisor = supervisor
        self._breaker = CircuitBreaker(f"Heartbeat in {alias}", kind="heartbeat", subject=alias)
        #: Set after the first heartbeat: by then every pump knows whether to track crashes.
        self.begun = threading.Event()
        self._written: dict[QueuePump, dict[str, Any]] = {}
        self._cancellation = Cancellation()
        self._lacking = tuple(lacking)
        self._restarts, self._on_stop = restarts, on_stop
        self._stop_requested = False
        self.prepare()

    def prepare(self) -> None:
        self.begun.clear()
        self.previous_runs = PreviousRuns(self.alias, self._supervisor)
        self._written = {}
        self._unattended = [Unattended(name, self.alias) for name in self._lacking]
        for pump in self._pumps:
            pump.crash_tracking = True  # until the first heartbeat shows that there is no reason
        self._subscribed = False

    def serve(self) -> None:
        tick = min(1.0, *(pump.peek_delay for pump in self._pumps))
        next_heartbeat = 0.0
        while not self.stopping:
            wait = tick
            try:
                with ResponseDeadline(connections[self.alias]):
                    if not self._subscribed:
                        self._subscribe()
                    if monotonic() >= next_heartbeat:
                        self.write_rows()
                        next_heartbeat = monotonic() + settings.HEARTBEAT_INTERVAL.total_seconds()
                    self.read_controls()
                self.begun.set()
                self._breaker.success()
            except Error as error:
                connections[self.alias].close()
                wait = self._breaker.failure(error)
            self.pause(wait)

    def deregister(self) -> None:
        """Delete this process' rows. Called when the pumps have stopped."""
        rows = Subscriber.objects.using(self.alias).filter(pk__in=[pump.subscriber for pump in self._pumps])
        try:
            with ResponseDeadline(connections[self.alias]):
                for pump in self._pumps:
                    self._release(pump)
                rows.delete()
                for pump in self._pumps:
                    if pump.state.barriers is not None:
                        barriers.forget_subscriber(self.alias, pump.subscriber)
        except Error as error:
            log.warning(
                "This process could not deregister from %r; others see it as dead in %.0f s: %s",
                self.alias, settings.DEAD_AFTER.total_seconds(), error, extra={"database": self.alias},
            )  # fmt: skip
        finally:
            connections[self.alias].close()

    def _release(self, pump: QueuePump) -> None:
        """Release what a worker was assigned and has not handled, and delete what was sent to it and could not be
        acked: no other process would, once its row is gone."""
        delivery = pump.queue.delivery
        if not (delivery.dispatches or delivery.keeps_in_flight):
            return
        connection, sql = connections[self.alias], pump.state.sql
        if delivery.dispatches:
            with transaction.atomic(using=self.alias):
                sql.limits.lock(connection)  # wait for a process that assigns to it now; after this none does
                Subscriber.objects.using(self.alias).filter(pk=pump.subscriber).update(receives=False)
        while delivery.keeps_in_flight and sql.limits.delete_in_flight(connection, pump.subscriber, BATCH):
            pass
        while sql.maintenance.release_owner(connection, pump.subscriber, BATCH, started=True) > 0:
            notifier.sent(pump.queue, connection)

    def _subscribe(self) -> None:
        """Subscribe the consumers of this code: each gets a copy from now on, whichever process sends. A database user
        that may not write them can work: what its own process sends is copied to all, and ``migrate`` has written the
        rows for the others."""
        connection = connections[self.alias]
        try:
            subscriptions.register(self.alias, [pump.queue for pump in self._pumps])
        except Error as error:
            if backend_of(connection).error_kind(error) is not ErrorKind.DENIED:
                raise
            log.warning("The subscriptions of consumers in %r cannot be written: %s", self.alias, error)
        self._subscribed = True

    def write_rows(self) -> None:
        """Write that this process is alive, and read which others are."""
        rows = Subscriber.objects.using(self.alias)
        memory = resident_bytes()
        changed = {pump: _columns(pump) | {"memory": memory} for pump in self._pumps}
        unchanged = [pump for pump in self._pumps if self._written.get(pump) == changed[pump]]
        # One statement for all rows that have not changed. Each of the others has its own, and all where a row is
        # missing.
        if unchanged and heartbeat_unchanged(self.alias, [pump.subscriber for pump in unchanged]):
            for pump in unchanged:
                del changed[pump]
        for pump, columns in changed.items():
            heartbeat(
                self.alias,
                pump.subscriber,
                pump.queue,
                self._supervisor,
                columns,
                partial(_first_columns, pump, self._restarts),
            )
            self._written[pump] = columns
        # One query for all queues: the rank of each subscriber among the live ones of its queue.
        live: defaultdict[str, list[uuid.UUID]] = defaultdict(list)
        names = [*(pump.queue._meta.label for pump in self._pumps), *self._lacking]
        stops: set[uuid.UUID] = set()
        alive = rows.filter(queue__in=names, alive_until__gt=Now()).order_by("id")
        for queue, key, stop in alive.values_list("queue", "id", "stop_requested"):
            live[queue].append(key)
            if stop:
                stops.add(key)
        for pump in self._pumps:
            keys = live[pump.queue._meta.label]
            if pump.subscriber in keys:
                pump.rank, pump.workers = keys.index(pump.subscriber), len(keys)
            if pump.subscriber in stops and not self._stop_requested:
                self._stop_requested = True
                log.warning("An operator has asked this worker's tree to stop.", extra={"database": self.alias})
                self._on_stop()
        for service in self._unattended:
            service.check(is_alive=bool(live[service.name]))

    def read_controls(self) -> None:
        """Apply what operators have set."""
        began = monotonic()
        controls = QueueControl.objects.using(self.alias).annotate(
            tracks_crashes=Q(crash_tracking_until__gt=Now()), now=Now(output_field=UtcField())
        )
        cancellations: dict[str, tuple[str, datetime]] = {}
        paused, tracked = set(), set()
        concurrency: dict[str, int | None] = {}
        found: dict[str, overrides.Overrides] = {}
        for queue, is_paused, is_tracked, receivers, cancelling, now, *values in controls.values_list(
            "queue", "paused", "tracks_crashes", "concurrency", "cancelling", "now", *overrides.SETTABLE
        ):
            if cancelling:
                cancellations[queue] = cancelling, now
            concurrency[queue] = receivers
            found[queue] = overrides.from_columns(values)
            if is_paused:
                paused.add(queue)
            if is_tracked:
                tracked.add(queue)
        overrides.load(self.alias, found, began)
        tracked |= self.previous_runs.queues()
        for pump in self._pumps:
            label = pump.queue._meta.label
            if label in cancellations:
                self._cancellation.poll(pump, *cancellations[label])
            self._set_crash_tracking(pump, label in tracked)
            wanted = min(concurrency.get(label) or pump.pool.declared, pump.pool.max_concurrency)
            if wanted != pump.pool.concurrency:
                pump.set_concurrency(wanted)
                log.info("%s: the concurrency of this process is now %d.", label, wanted,
                         extra={"queue": label, "concurrency": wanted})  # fmt: skip
            if (label in paused) != pump.paused:
                pump.paused = label in paused
                log.info("%s is %s.", label, "paused" if pump.paused else "resumed", extra={"queue": label})
                if not pump.paused:
                    pump.wake()

        self._cancellation.escalate()

    def _set_crash_tracking(self, pump: QueuePump, tracking: bool) -> None:
        if tracking == pump.crash_tracking:
            return
        # First the row, then the pump: the process that releases the leases of this one must know whether it tracked
        # crashes.
        Subscriber.objects.using(self.alias).filter(pk=pump.subscriber).update(crash_tracking=tracking)
        pump.crash_tracking = tracking
        if self.begun.is_set():
            label = pump.queue._meta.label
            what = (
                "is received with crash tracking: a worker died" if tracking else "is received without crash tracking"
            )
            log.warning("%s %s.", label, what, extra={"queue": label})


class Unattended:
    """Reports in the log that no live process runs the dispatcher, or maintenance.

    The first worker of a tree that was started without (``--no-dispatcher``, ``--no-maintenance``) checks it: another
    process has to run it then. A tree with its own reports itself when that dies.
    """

    def __init__(self, name: str, alias: str) -> None:
        self.name, self.alias = name, alias
        #: A service that is started at the same time has written its row by then, and a dead one is known to be dead.
        self._report_at = monotonic() + settings.DEAD_AFTER.total_seconds()
        self._reported = False

    def check(self, *, is_alive: bool) -> None:
        """Take note of whether one is alive."""
        facts = {"database": self.alias, "service": self.name}
        if is_alive:
            if self._reported:
                log.info("%s in %r: one is running again.", self.name, self.alias, extra=facts)
            self._reported, self._report_at = False, monotonic() + settings.DEAD_AFTER.total_seconds()
        elif monotonic() >= self._report_at:
            self._reported, self._report_at = True, monotonic() + REPORT_AGAIN
            log.warning("%s in %r: %s. Next step: %s.", self.name, self.alias, NO_PROCESS[self.name], _START[self.name],
                        extra=facts)  # fmt: skip


def _first_columns(pump: QueuePump, restarts: int) -> dict[str, Any]:
    """The columns of a new row that do not change."""
    return {
        "restarts": restarts,
        "concurrency": pump.pool.concurrency,
        "filter": pump.state.filter.text if pump.state.filter is not None else "",
        "at_most_once": pump.queue.delivery.keeps_in_flight,
        "consumers": json.dumps([name for consumer in pump.handlers.registrations for name in consumer.advertised()]),
    }


def _columns(pump: QueuePump) -> dict[str, Any]:
    # A copy: receivers add to it meanwhile.
    types = sorted(pump.state.skipped.types.copy())[:MAX_TYPES]
    return {
        "received": pump.stats.received,
        "handled": pump.stats.handled,
        "failed": pump.stats.failed,
        "outstanding": sum(_outstanding(receiver) for receiver in pump.receivers),
        "backlog": pump.backlog.granted(),
        "leases_lost": pump.stats.lost,
        "crash_tracking": pump.crash_tracking,
        "breakers": breakers_json(pump.health.degraded()),
        "progress": _progress(pump),
        "running": _running(pump),
        "unknown_types": json.dumps([name[:MAX_TYPE_LENGTH] for name in types]) if types else "",
        **_handling(pump),
    }


def _handling(pump: QueuePump) -> dict[str, float | None]:
    """The median and the 95th percentile of the last handler calls, in seconds."""
    durations = sorted(pump.health.durations.copy())
    count = len(durations)
    return {
        "handling_p50": round(durations[count // 2], 6) if durations else None,
        "handling_p95": round(durations[min(count - 1, count * 95 // 100)], 6) if durations else None,
    }


def _running(pump: QueuePump) -> str:
    """The handlers that run for some time, the longest first; '' without any. A fast one is not worth a changed row."""
    handlers = [handler for receiver in pump.receivers if (handler := receiver.active_handler) is not None]
    found = [
        (handler.seq, handler.consumer.registration.name, round(seconds, 1))
        for handler in sorted(handlers, key=lambda handler: handler.started)
        if (seconds := monotonic() - handler.started) >= RUNNING_AFTER
    ]
    return json.dumps(found[:MAX_RUNNING]) if found else ""


def _progress(pump: QueuePump) -> str:
    """The progress of the handlers that report some; '' where none does."""
    found = [
        entry
        for receiver in pump.receivers
        if (handler := receiver.active_handler) is not None
        for entry in progress_of(handler)
    ]
    return json.dumps(found[:MAX_PROGRESS]) if found else ""


def _outstanding(receiver: object) -> int:
    batch = getattr(receiver, "batch", None)
    if batch is not None:
        return len(batch.in_flight) + len(batch.waiting)
    return max(getattr(receiver, "reserved", 0), 1 if getattr(receiver, "active_handler", None) is not None else 0)


#: Seconds that a request may take to arrive, and by which two clocks may differ in measuring that.
_TOLERANCE = 0.2


class Cancellation:
    """One per heartbeat, used by its thread only."""

    def __init__(self) -> None:
        #: Handlers that were asked to stop, and since when.
        self._requested: list[tuple[Receiver, ActiveHandler, float]] = []

    @property
    def is_pending(self) -> bool:
        """Whether a handler was asked to stop and has not ended."""
        return bool(self._requested)

    def poll(self, pump: QueuePump, text: str, now: datetime) -> None:
        """Ask the handlers of this process that the requests name to stop. ``text``: the requests as their column holds
        them."""
        requests = {
            request["id"]: request for request in parse_json_list(text) if isinstance(request, dict) and "id" in request
        }
        for receiver in pump.receivers:
            handler = receiver.active_handler
            context = handler.context if handler is not None else None
            if handler is None or not isinstance(context, Context) or context._asked is not None:
                continue
            request = requests.get(str(context.message_id))
            if request is not None and monotonic() - handler.started + _TOLERANCE >= _age(request, now):
                reason = str(request.get("reason", ""))
                label = pump.state.label
                log.warning(
                    "%s: the handler of message %d is asked to stop: %s", label, handler.seq, reason,
                    extra={"queue": label, "seq": handler.seq},
                )  # fmt: skip
                context._asked = MessageCancelled(reason, discard=bool(request.get("discard")))
                self._requested.append((receiver, handler, monotonic()))

    def escalate(self) -> None:
        """Stop the handlers that were asked: async ones at once, others when ``CANCEL_GRACE`` is over."""
        if self._requested:
            self._requested = [
                (receiver, handler, since)
                for receiver, handler, since in self._requested
                if receiver.active_handler is handler and not _stopped(receiver, handler, since)
            ]


def _stopped(receiver: Receiver, handler: ActiveHandler, since: float) -> bool:
    awaited = handler.context._cancel is not None or handler.consumer.registration.is_async
    if not awaited and monotonic() - since < settings.CANCEL_GRACE.total_seconds():
        return False
    return cancel(receiver, handler)


def _age(request: dict[str, Any], now: datetime) -> float:
    try:
        return max(0.0, (now - datetime.fromisoformat(str(request["at"]))).total_seconds())
    except (KeyError, ValueError, TypeError):
        return float("inf")  # written by another version


def progress_of(handler: ActiveHandler) -> list[dict[str, Any]]:
    """The progress of a handler as its worker's row holds it: one entry per message of which it reports progress."""
    return [
        {
            "id": str(context.message_id),
            "seq": context.seq,
            "consumer": handler.consumer.registration.name,
            "attempt": context.attempt,
            "seconds": round(monotonic() - handler.started, 1),
            "done": done,
            "total": total,
            "note": note,
        }
        for context in handler.context._with_progress
        for done, total, note in [context._progress or (0, None, "")]
    ]
