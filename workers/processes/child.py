"""One worker process: the pumps of its queues, and the threads that look after them. Started by the supervisor.

Stopping goes in stages: SIGTERM (or the supervisor's death, seen as the end of a pipe) -> no more claims, what was not
started is given back uncounted -> running handlers get ``SHUTDOWN_GRACE`` -> they are interrupted -> the process ends.
A second SIGTERM goes straight to the interruption. A service or a pump that ends unasked stops the process in the same
stages, and its exit code says so: the supervisor starts another one. A SIGTERM before there is anything to stop, while
the process is still imported and set up, ends it at once.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import math
import os
import signal
import sys
import threading
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any

from queueapp.services.service import FunctionService, Service, stop_all

from .signals import Signals

log = logging.getLogger("queueapp.workers")

#: How long an interrupted handler may take to notice before the process ends all the same.
INTERRUPT_GRACE = 3.0
#: The main thread awakes this often, in seconds, whatever it waits for.
SLICE = 1.0


@dataclass
class ChildOptions:
    """What the supervisor tells a child, as JSON on its command line."""

    #: "worker"; "dispatcher", which may keep house as well; "housekeeper", which does not dispatch.
    role: str
    queues: list[str]
    supervisor: str
    concurrency: int | None = None
    slots: int = 0
    slots_fd: int = -1
    life_fd: int = -1
    floors_fd: int = -1
    holder: str = ""
    aliases: list[str] = field(default_factory=list)
    keeps_house: bool = True
    #: Those of ``NO_QUEUES`` that its tree does not have: it says when nobody else is either.
    lacking: list[str] = field(default_factory=list)
    #: What each queue is subscribed to with, by label.
    backlogs: dict[str, int] = field(default_factory=dict)
    filters: dict[str, str] = field(default_factory=dict)
    #: The consumers that the process is for; none: all.
    lane: list[str] = field(default_factory=list)
    #: Where it gives signs of life, and whether it counts for Prometheus; with an HTTP server only.
    signs_fd: int = -1
    sign: int = 0
    measured: bool = False
    #: Names of the databases by alias, where the settings may say others: ``same_databases``.
    databases: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Stages:
    """The stages of stopping, advanced by ``signals`` and by the supervisor's death: the end of the pipe ``life_fd``."""

    def __init__(self, life_fd: int = -1, signals: Sequence[int] = ()) -> None:
        self._numbers = signals
        self.stopping = threading.Event()
        self.hurry = threading.Event()
        #: A service ended unasked: the process has to be replaced.
        self.failed = False
        self._signals = Signals(life_fd)
        threading.Thread(target=self._follow, name="stages", daemon=True).start()

    def begin(self) -> None:
        """From now on there is something to stop in stages. Until then a signal does what it does by default: nothing is claimed
        yet, and imports and ``AppConfig.ready()`` take as long as they take, on a busy machine longer than who stops it waits."""
        for number in self._numbers:
            signal.signal(number, self.advance)

    def advance(self, *_: Any) -> None:
        """First call: stop. Second: do not wait for handlers. A signal handler, so it only leaves a note."""
        self._signals.note()

    def wait(self, seconds: float = math.inf) -> bool:
        """Wait on the main thread until it is to stop, at most so long; returns whether it is.

        In slices: CPython runs a handler when the main thread awakes, and a signal that was sent while the process stood still
        (SIGSTOP, a debugger) goes to whichever thread is the first to run again, which wakes nobody else.
        """
        until = monotonic() + seconds
        while not self.stopping.wait(max(0.0, min(SLICE, until - monotonic()))):
            if monotonic() >= until:
                return False
        return True

    def fail(self, service: Service) -> None:
        """A service ended unasked: stop, and let the supervisor start a process that has all of them."""
        log.critical("This process stops without %s and is replaced.", service.name)
        self.failed = True
        self.stopping.set()

    def _follow(self) -> None:
        """Do what the signals say, on a thread that may take locks."""
        try:
            orphaned = False
            while True:
                self._signals.wait()
                if self._signals.parted and not orphaned:
                    orphaned = True
                    if not self.stopping.is_set():
                        log.warning("The supervisor is gone; stopping.")
                if self._signals.asked + orphaned > 1:
                    self.hurry.set()
                if self._signals.asked + orphaned > 0:
                    self.stopping.set()
        finally:
            self.stopping.set()  # a process that hears no signals any more has to end


def main(text: str) -> int:
    """Run one child process until told to stop; returns its exit code."""
    options = ChildOptions(**json.loads(text))
    faulthandler.enable()
    stages = Stages(options.life_fd, (signal.SIGTERM, signal.SIGINT))

    import django

    django.setup()
    _keep_no_query_log()
    from queueapp.services.connection_timeouts import prepare_connections

    from .child_databases import use_databases

    use_databases(options.databases)
    prepare_connections()
    from queueapp import inline

    with inline.disabled_in_worker():
        if options.role == "worker":
            return run_worker(options, stages)
        return run_dispatcher(options, stages)


def _keep_no_query_log() -> None:
    """With DEBUG, Django keeps every query for a page to show; a worker has no pages, and it costs 15 % (measured)."""
    from django.db.backends.base.base import BaseDatabaseWrapper

    BaseDatabaseWrapper.queries_logged = property(lambda self: self.force_debug_cursor)  # type: ignore[method-assign,assignment]


def _signing(options: ChildOptions, *, pumps: Any = (), breakers: Any = (), movers: Any = ()) -> list[Service]:
    """The service that tells an HTTP server of its supervisor that this process lives, and what it has counted."""
    if options.signs_fd < 0:
        return []
    from .liveness import Signing, Signs

    also = None
    if options.measured:
        from .measuring import Measuring

        also = Measuring(pumps, breakers, movers).tell
    return [Signing(Signs(options.sign + 1, options.signs_fd), options.sign, also)]


def run_worker(options: ChildOptions, stages: Stages) -> int:
    """Receive the queues until stopping."""
    from django.db import router

    from queueapp import registry
    from queueapp.conf import settings
    from queueapp.models.delivery import Semantics
    from queueapp.services.connection_timeouts import ConnectionWatchdog
    from queueapp.services.listener import Listener

    from ..receiving.pump import QueuePump
    from ..receiving.quarantine import Quarantine
    from ..services.heartbeat import Heartbeat
    from ..services.lease_renewer import LeaseRenewer
    from .crash_recovery import FAILED, WEDGED
    from .in_flight_slots import Slots, slots_of
    from .shared_low_water_marks import SharedLowWaterMarks
    from .stats_log import EVERY, Report
    from .watchdog import Watchdog, interrupt_all

    if options.measured:
        from .measuring import Measuring

        Measuring.install()
    slots = Slots(options.slots, options.slots_fd) if options.slots else None
    floors = SharedLowWaterMarks(len(options.queues), options.floors_fd) if options.floors_fd >= 0 else None
    quarantine = Quarantine()
    pumps: list[QueuePump] = []
    used = 0
    for index, label in enumerate(options.queues):
        queue = registry.queues.find(label)
        alias = router.db_for_write(queue)
        concurrency, most = slots_of(queue, options.concurrency)
        own = None
        if slots is not None:
            own = [slots.slot(used + i) for i in range(most)]
            used += most
        pump = QueuePump(
            queue, alias, stopping=stages.stopping, slots=own, concurrency=concurrency, quarantine=quarantine,
            backlog=options.backlogs.get(label), filter=options.filters.get(label, ""), only_consumers=options.lane,
        )  # fmt: skip
        if floors is not None:
            floors.share(index, pump.marks)
        for slot in own or ():
            slot.describe(index, pump.subscriber)
        pumps.append(pump)

    by_alias: defaultdict[str, list[QueuePump]] = defaultdict(list)
    for pump in pumps:
        by_alias[pump.alias].append(pump)
    supervisor = uuid.UUID(options.supervisor)
    heartbeats = [Heartbeat(alias, own_pumps, supervisor, options.lacking) for alias, own_pumps in by_alias.items()]
    by_label = {pump.queue._meta.label: pump for pump in pumps}

    def on_wake(payload: str) -> None:
        pump = by_label.get(payload)
        if pump is not None:
            pump.wake()

    # A wedged handler ends the process as a stop does; its exit code tells the supervisor to count it.
    services: list[Service] = [Watchdog(pumps, stages.stopping.set), ConnectionWatchdog(), *heartbeats]
    services += _signing(options, pumps=pumps)
    for alias, own_pumps in by_alias.items():
        # A TRANSACTIONAL queue is leased while it is received carefully.
        leased = [pump for pump in own_pumps if pump.queue.delivery.semantics is not Semantics.AT_MOST_ONCE]
        if leased:
            services.append(LeaseRenewer(alias, leased))
    if settings.NOTIFY:
        services += [Listener(alias, on_wake) for alias in by_alias]
    receiving = [FunctionService(f"the pump of {pump.queue._meta.label}", pump.run, stages.stopping) for pump in pumps]
    stages.begin()
    for service in services:
        service.start(stages.fail)
    for heartbeat in heartbeats:
        # Whether to be careful has to be known before the first message; without a database there is none.
        while not heartbeat.begun.wait(0.2) and not stages.stopping.is_set():
            pass
    for job in receiving:
        job.start(stages.fail)
    log.info("Worker %d receives %s.", os.getpid(), ", ".join(options.queues))

    report = Report(pumps)
    while not stages.wait(EVERY):
        report.tell()
    for pump in pumps:
        pump.wake()
    clean = _wait_for_pumps(pumps, receiving, stages, settings.SHUTDOWN_GRACE.total_seconds())
    if not clean:
        count = interrupt_all(pumps)
        log.warning("%d handlers were still running and are interrupted.", count)
        clean = _wait_for_pumps(pumps, receiving, stages, INTERRUPT_GRACE, patient=True)
    stop_all(heartbeats, INTERRUPT_GRACE)  # or a last beat would write the rows again that the goodbye deletes
    if clean:
        for heartbeat in heartbeats:
            heartbeat.deregister()
    stop_all(services, INTERRUPT_GRACE)
    report.tell_all()
    if not clean:
        return WEDGED
    return FAILED if stages.failed else 0


def _wait_for_pumps(
    pumps: Any, jobs: Sequence[FunctionService], stages: Stages, seconds: float, patient: bool = False
) -> bool:
    deadline = monotonic() + seconds
    while monotonic() < deadline and not (stages.hurry.is_set() and not patient):
        if not any(job.is_alive() for job in jobs) and all(pump.pool.join(0) for pump in pumps):
            return True
        for job in jobs:
            job.join(0.02)
    return not any(job.is_alive() for job in jobs) and all(pump.pool.join(0) for pump in pumps)


def run_dispatcher(options: ChildOptions, stages: Stages) -> int:
    """Dispatch delayed messages, keep house, or both, until stopping."""
    from django.db import router

    from queueapp import delayed, notifier, registry
    from queueapp.circuit_breaker import Breaker
    from queueapp.conf import settings
    from queueapp.models import DISPATCHER, MAINTENANCE
    from queueapp.models.queue import holds
    from queueapp.services.alert_evaluator import AlertEvaluator
    from queueapp.services.connection_timeouts import ConnectionWatchdog
    from queueapp.services.delayed_dispatcher import DelayedDispatcher
    from queueapp.services.expression_evaluator import ExpressionEvaluator
    from queueapp.services.forwarder import Forwarder
    from queueapp.services.journal_service import JournalService, has_work
    from queueapp.services.leader_election import Elector, role_name
    from queueapp.services.listener import Listener
    from queueapp.services.maintenance import Maintenance
    from queueapp.services.service_heartbeat import ServiceHeartbeat

    from .crash_recovery import FAILED

    services: list[Service] = [ConnectionWatchdog()]
    all_movers: list[DelayedDispatcher] = []
    all_breakers: list[Breaker] = []
    for alias in options.aliases:
        holder = uuid.uuid5(uuid.UUID(options.holder or options.supervisor), alias)
        breakers: dict[str, list[Breaker]] = {}
        movers: list[DelayedDispatcher] = []
        if options.role == "dispatcher":
            forwarders = [Forwarder(alias, target, holder) for target in sorted(delayed.addresses(alias))]
            movers = [DelayedDispatcher(alias, holder), *forwarders]
            services += movers
            breakers[DISPATCHER] = [breaker for mover in movers for breaker in mover.breakers]
        if options.keeps_house:
            queues = [queue for queue in registry.queues if queue._meta.managed and router.db_for_write(queue) == alias]
            housekeeping = Maintenance(alias, queues, Elector(alias, role_name("maintenance"), holder))
            services.append(housekeeping)
            breakers[MAINTENANCE] = [housekeeping.breaker]
            if settings.ALERTS:
                alerting = AlertEvaluator(alias, queues, housekeeping)
                services.append(alerting)
                breakers[MAINTENANCE].append(alerting.breaker)
            if holding := [queue for queue in queues if holds(queue)]:
                evaluation = ExpressionEvaluator(alias, holding)
                services.append(evaluation)
                breakers[MAINTENANCE].append(evaluation.breaker)
        keepers: list[Service] = []
        if options.keeps_house and has_work(queues):
            journal = JournalService(alias, queues, Elector(alias, role_name("journal"), holder))
            keepers = [journal]
            services.append(journal)
            breakers[MAINTENANCE].append(journal.breaker)
        services.append(ServiceHeartbeat(alias, breakers, uuid.UUID(options.supervisor)))
        all_movers += movers
        all_breakers += [breaker for own in breakers.values() for breaker in own]
        if settings.NOTIFY and (movers or keepers):
            woken: dict[str, Sequence[Service]] = {notifier.DELAYED: movers, notifier.JOURNAL: keepers}

            def on_wake(payload: str, woken: dict[str, Sequence[Service]] = woken) -> None:
                for service in woken.get(payload, ()):
                    service.wake()

            services.append(Listener(alias, on_wake))
    services += _signing(options, breakers=all_breakers, movers=all_movers)
    stages.begin()
    for service in services:
        service.start(stages.fail)
    stages.wait()
    stop_all(services, INTERRUPT_GRACE)
    return FAILED if stages.failed else 0


if __name__ == "__main__":
    code = main(sys.argv[1])
    from queueapp.telemetry import tracing

    tracing.flush()
    logging.shutdown()
    # Threads that ignore everything (a handler in an endless C call) must not keep the process.
    os._exit(code)
