"""One worker process: the pumps of its queues, and the services beside them. Started by the supervisor.

A shutdown has stages: SIGTERM (or the supervisor's death, seen as the end of a pipe) -> no more claims, and messages
that were not started are released uncounted -> running handlers get ``SHUTDOWN_GRACE`` -> they are interrupted -> the
process ends. A second SIGTERM skips the grace. A service or a pump that ends unasked shuts the process down in the same
stages, and its exit code says so: the supervisor starts another one. A handler that ignores its time limit (in C code)
cannot be ended without the process: the process asks for its replacement, goes on until that runs, finishes its other
handlers and ends. A SIGTERM that arrives before there is anything to stop, during imports and set-up, ends the process
at once.

A child uses the databases of its parent, whatever the settings that it imports say. A test run renames its databases
after the settings were read; a child process reads the settings anew and would open the real ones. So the names are
part of the child's options and are set before it connects.
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from django.conf import settings as django_settings
from django.core.management.base import CommandError
from django.db import connections

from queueapp.services.service import FunctionService, Service, stop_all

from .signals import Signals

if TYPE_CHECKING:
    # At run time nothing that imports models may be imported up here: `main` sets Django up after it.
    from ..receiving.pump import QueuePump

log = logging.getLogger("queueapp.workers")

#: Seconds that an interrupted handler has to end before the process does.
INTERRUPT_GRACE = 3.0
#: Seconds after which a waiting main thread awakes at the latest.
SLICE = 1.0
#: Seconds between two lines of the statistics.
STATS_INTERVAL = 60.0


@dataclass
class ChildOptions:
    """The options of a child, as JSON on its command line."""

    #: "worker"; "dispatcher", which may run maintenance as well; "maintenance", which does not dispatch.
    role: str
    queues: list[str]
    supervisor: str
    concurrency: int | None = None
    slots: int = 0
    slots_fd: int = -1
    #: The reading end of a pipe that closes when the supervisor dies.
    parent_fd: int = -1
    marks_fd: int = -1
    holder: str = ""
    aliases: list[str] = field(default_factory=list)
    runs_maintenance: bool = True
    #: Those of ``NO_QUEUES`` that its tree does not run: it reports when no other process runs them.
    lacking: list[str] = field(default_factory=list)
    #: Limits and filters of its subscriptions, by the label of a queue.
    backlogs: dict[str, int] = field(default_factory=dict)
    filters: dict[str, str] = field(default_factory=dict)
    #: The consumers that it runs; none: all.
    only_consumers: list[str] = field(default_factory=list)
    #: Its entry of the liveness board, and whether it counts for Prometheus, which is so with an HTTP server.
    liveness_fd: int = -1
    liveness_entry: int = 0
    has_metrics: bool = False
    #: How often its supervisor has started it again.
    restarts: int = 0
    #: Names of the databases by alias, which may differ from the settings: ``database_names``.
    databases: dict[str, str] = field(default_factory=dict)
    #: Whether it is started in place of one that ended.
    replaces: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class ShutdownStages:
    """The stages of a shutdown, advanced by ``signals`` and by the supervisor's death: the end of the pipe
    ``parent_fd``."""

    def __init__(self, parent_fd: int = -1, signals: Sequence[int] = ()) -> None:
        self._numbers = signals
        self.stopping = threading.Event()
        self.hard_stop = threading.Event()
        #: SIGTERM has arrived, or the supervisor has died.
        self.stop_requested = threading.Event()
        #: A handler is stuck and the replacement of this process runs: it finishes its other handlers, without a time
        #: limit, and ends.
        self.retiring = threading.Event()
        #: A service ended unasked: the process has to be replaced.
        self.failed = False
        self.signals = Signals(parent_fd)
        threading.Thread(target=self._follow, name="shutdown-stages", daemon=True).start()

    def begin(self) -> None:
        """From now on there is something to stop in stages. Until then a signal has its default effect: nothing is
        claimed yet, and imports and ``AppConfig.ready()`` may take longer than the supervisor waits, on a busy machine.
        """
        for number in self._numbers:
            signal.signal(number, self.advance)
        if self._numbers:
            signal.signal(signal.SIGUSR1, self.signals.retire)

    def advance(self, *_: Any) -> None:
        """First call: stop. Second: do not wait for handlers. A signal handler, so it only sets a mark."""
        self.signals.stop()

    def wait(self, seconds: float = math.inf) -> bool:
        """Wait on the main thread until the process is to stop, at most so long; returns whether it is.

        In slices: CPython runs a handler when the main thread awakes, and a signal that was sent while the process
        stood still (SIGSTOP, a debugger) goes to the first thread that runs again, which wakes no other.
        """
        until = monotonic() + seconds
        while not self.stopping.wait(max(0.0, min(SLICE, until - monotonic()))):
            if monotonic() >= until:
                return False
        return True

    def fail(self, service: Service) -> None:
        """A service ended unasked: stop, and let the supervisor start a process that has all of them."""
        log.critical("This process stops because %s ended; the supervisor replaces it.", service.name)
        self.failed = True
        self.stopping.set()

    def _follow(self) -> None:
        """Act on the signals, on a thread that may take locks."""
        try:
            orphaned = False
            while True:
                self.signals.wait()
                if self.signals.is_orphaned and not orphaned:
                    orphaned = True
                    if not self.stopping.is_set():
                        log.warning("The supervisor has ended; this process stops.")
                if self.signals.stop_count + orphaned > 1:
                    self.hard_stop.set()
                if self.signals.is_retired:
                    self.retiring.set()
                    self.stopping.set()
                if self.signals.stop_count + orphaned > 0:
                    self.stop_requested.set()
                    self.stopping.set()
        finally:
            self.stopping.set()  # a process that receives no signals any more has to end


def main(text: str) -> int:
    """Run one child process until it is stopped; returns its exit code."""
    options = ChildOptions(**json.loads(text))
    faulthandler.enable()
    stages = ShutdownStages(options.parent_fd, (signal.SIGTERM, signal.SIGINT))

    import django

    django.setup()
    _keep_no_query_log()
    from queueapp.services.connection_timeouts import prepare_connections

    use_databases(options.databases)
    prepare_connections()
    from queueapp import inline

    with inline.disabled_in_worker():
        if options.role == "worker":
            return run_worker(options, stages)
        return run_dispatcher(options, stages)


def _keep_no_query_log() -> None:
    """With DEBUG, Django keeps every query for an error page. A worker has no pages, and it costs 15 % (measured)."""
    from django.db.backends.base.base import BaseDatabaseWrapper

    BaseDatabaseWrapper.queries_logged = property(lambda self: self.force_debug_cursor)  # type: ignore[method-assign,assignment]


def _liveness_service(
    options: ChildOptions, *, pumps: Any = (), breakers: Any = (), dispatchers: Any = ()
) -> list[Service]:
    """The service that gives signs of life to the supervisor, and updates the metrics."""
    if options.liveness_fd < 0:
        return []
    from .shared_memory import LivenessBoard, LivenessReporter

    details = None
    if options.has_metrics:
        from .metrics import MetricsRecorder

        details = MetricsRecorder(pumps, breakers, dispatchers).update
    board = LivenessBoard(options.liveness_entry + 1, options.liveness_fd)
    return [LivenessReporter(board, options.liveness_entry, details)]


def run_worker(options: ChildOptions, stages: ShutdownStages) -> int:
    """Receive the queues until stopping."""
    from queueapp.conf import settings
    from queueapp.models.delivery import Semantics
    from queueapp.services.connection_timeouts import ConnectionWatchdog
    from queueapp.services.listener import Listener

    from ..services.heartbeat import Heartbeat
    from ..services.lease_renewer import LeaseRenewer
    from .crash_recovery import FAILED, STUCK
    from .shared_memory import LivenessBoard
    from .watchdog import Watchdog

    if options.has_metrics:
        from .metrics import MetricsRecorder

        MetricsRecorder.install()
    pumps = _make_pumps(options, stages)
    by_alias: defaultdict[str, list[QueuePump]] = defaultdict(list)
    for pump in pumps:
        by_alias[pump.alias].append(pump)
    supervisor = uuid.UUID(options.supervisor)
    parent = os.getppid()

    def on_stop() -> None:
        if options.parent_fd < 0:
            stages.advance()
        elif os.getppid() == parent:
            os.kill(parent, signal.SIGTERM)  # the supervisor stops all of its processes in stages

    heartbeats = [
        Heartbeat(alias, on_alias, supervisor, options.lacking, restarts=options.restarts, on_stop=on_stop)
        for alias, on_alias in by_alias.items()
    ]
    by_label = {pump.queue._meta.label: pump for pump in pumps}

    def on_notify(payload: str) -> None:
        pump = by_label.get(payload)
        if pump is not None:
            pump.wake()

    def on_stuck() -> None:
        if options.parent_fd < 0 or options.liveness_fd < 0:
            stages.stopping.set()
            return
        # The supervisor starts the replacement first. The exit code of this process says that a crash is to be counted.
        LivenessBoard(options.liveness_entry + 1, options.liveness_fd).request_replacement(options.liveness_entry)

    services: list[Service] = [Watchdog(pumps, on_stuck), ConnectionWatchdog(), *heartbeats]
    services += _liveness_service(options, pumps=pumps)
    for alias, on_alias in by_alias.items():
        # A TRANSACTIONAL queue is leased while crashes are tracked.
        leased = [pump for pump in on_alias if pump.queue.delivery.semantics is not Semantics.AT_MOST_ONCE]
        if leased:
            services.append(LeaseRenewer(alias, leased))
    if settings.NOTIFY:
        services += [Listener(alias, on_notify) for alias in by_alias]
    pump_services = [
        FunctionService(f"the pump of {pump.queue._meta.label}", pump.run, stages.stopping) for pump in pumps
    ]
    stages.begin()
    for service in services:
        service.start(stages.fail)
    for heartbeat in heartbeats:
        # Whether to track crashes has to be known before the first message; without a database there is none.
        while not heartbeat.begun.wait(0.2) and not stages.stopping.is_set():
            pass
    for service in pump_services:
        service.start(stages.fail)
    # The command has written what its tree receives.
    level = logging.INFO if options.replaces else logging.DEBUG
    log.log(level, "Worker %d receives %s.", os.getpid(), ", ".join(options.queues))

    stats = StatsLog(pumps)
    while not stages.wait(STATS_INTERVAL):
        stats.log_interval()
    clean = _end_pumps(pumps, pump_services, stages)
    stop_all(heartbeats, INTERRUPT_GRACE)  # or a last heartbeat would write the rows anew that are deleted next
    if clean:
        for heartbeat in heartbeats:
            heartbeat.deregister()
    stop_all(services, INTERRUPT_GRACE)
    stats.log_totals()
    if not clean:
        return STUCK
    return FAILED if stages.failed else 0


def _make_pumps(options: ChildOptions, stages: ShutdownStages) -> list[QueuePump]:
    """A pump per queue, over the memory that this process shares with its supervisor and its siblings."""
    from django.db import router

    from queueapp import registry

    from ..receiving.pump import QueuePump
    from ..receiving.quarantine import Quarantine
    from .shared_memory import InFlightSlots, SharedLowWaterMarks, receivers_and_slots

    slots = InFlightSlots(options.slots, options.slots_fd) if options.slots else None
    marks = SharedLowWaterMarks(len(options.queues), options.marks_fd) if options.marks_fd >= 0 else None
    quarantine = Quarantine()
    pumps: list[QueuePump] = []
    used = 0
    for index, label in enumerate(options.queues):
        queue = registry.queues.find(label)
        alias = router.db_for_write(queue)
        concurrency, slot_count = receivers_and_slots(queue, options.concurrency)
        child_slots = None
        if slots is not None:
            child_slots = [slots.slot(used + i) for i in range(slot_count)]
            used += slot_count
        pump = QueuePump(
            queue,
            alias,
            stopping=stages.stopping,
            slots=child_slots,
            concurrency=concurrency,
            quarantine=quarantine,
            backlog=options.backlogs.get(label),
            filter=options.filters.get(label, ""),
            only_consumers=options.only_consumers,
        )
        if marks is not None:
            marks.share(index, pump.marks)
        for slot in child_slots or ():
            slot.describe(index, pump.subscriber)
        pumps.append(pump)
    return pumps


def _end_pumps(pumps: list[QueuePump], services: Sequence[FunctionService], stages: ShutdownStages) -> bool:
    """Wait for the handlers that run, and interrupt them when their grace is over; returns whether all have ended."""
    from queueapp.conf import settings

    from .watchdog import interrupt_all

    for pump in pumps:
        pump.wake()
    if stages.retiring.is_set():
        _wait_for_healthy(pumps, stages)
    grace = (
        settings.SHUTDOWN_GRACE.total_seconds()
        if not stages.retiring.is_set() or stages.stop_requested.is_set()
        else 0.0
    )
    if _wait_for_pumps(pumps, services, stages, grace):
        return True
    count = interrupt_all(pumps)
    log.warning("%d handler%s still running; interrupted.", count, " was" if count == 1 else "s were")
    return _wait_for_pumps(pumps, services, stages, INTERRUPT_GRACE, until_hard_stop=False)


class StatsLog:
    """The work of these pumps since the last line."""

    def __init__(self, pumps: Sequence[QueuePump]) -> None:
        self._pumps = pumps
        self._before = dict.fromkeys(pumps, (0, 0))

    def log_interval(self) -> None:
        """Log one line, at INFO."""
        parts = []
        for pump in self._pumps:
            now = pump.stats.handled, pump.stats.failed
            handled, failed = (new - old for new, old in zip(now, self._before[pump], strict=True))
            self._before[pump] = now
            part = f"{pump.queue._meta.label} {handled} handled" + (f", {failed} failed" if failed else "")
            if state := "paused" if pump.paused else pump.health.degraded_text():
                part += f" ({state})"
            parts.append(part)
        log.info("Worker %d, in %.0f s: %s.", os.getpid(), STATS_INTERVAL, "; ".join(parts))

    def log_totals(self) -> None:
        """Log the work of each pump since its start."""
        for pump in self._pumps:
            stats = pump.stats
            log.info(
                "%s: received %d, handled %d, failed %d, returned %d, lost leases %d, empty receives %d, peeks %d.",
                pump.queue._meta.label, stats.received, stats.handled, stats.failed, stats.returned, stats.lost,
                stats.empty, stats.peeks,
                extra={"queue": pump.queue._meta.label},
            )  # fmt: skip


def _wait_for_healthy(pumps: Any, stages: ShutdownStages) -> None:
    """Wait until every handler has ended that is not stuck, or the process has to stop."""
    from .watchdog import is_stuck

    quiet = 0
    while quiet < 2 and not stages.stop_requested.wait(SLICE / 10):
        stuck = sum(
            (running := receiver.active_handler or receiver.active_callback) is not None and is_stuck(running)
            for pump in pumps
            for receiver in pump.receivers
        )
        # Twice in a row: between two handlers a receiver writes acks.
        quiet = quiet + 1 if sum(pump.pool.busy for pump in pumps) <= stuck else 0


def _wait_for_pumps(
    pumps: Any,
    services: Sequence[FunctionService],
    stages: ShutdownStages,
    seconds: float,
    until_hard_stop: bool = True,
) -> bool:
    """Wait until all pumps and receivers have ended; returns whether they have."""

    def ended() -> bool:
        return not any(service.is_alive() for service in services) and all(pump.pool.join(0) for pump in pumps)

    deadline = monotonic() + seconds
    while monotonic() < deadline and not (until_hard_stop and stages.hard_stop.is_set()):
        if ended():
            return True
        for service in services:
            service.join(0.02)
    return ended()


def run_dispatcher(options: ChildOptions, stages: ShutdownStages) -> int:
    """Dispatch delayed messages, run maintenance, or both, until stopping."""
    from django.db import router

    from queueapp import delayed, notifier, registry
    from queueapp.circuit_breaker import Breaker
    from queueapp.conf import settings
    from queueapp.consuming.registry import registered
    from queueapp.models import DISPATCHER, MAINTENANCE
    from queueapp.models.queue import holds
    from queueapp.services.connection_timeouts import ConnectionWatchdog
    from queueapp.services.delayed_dispatcher import DelayedDispatcher, Forwarder
    from queueapp.services.expression_evaluator import ExpressionEvaluator
    from queueapp.services.journal_service import JournalService, has_work
    from queueapp.services.leader_election import Elector, role_name
    from queueapp.services.listener import Listener
    from queueapp.services.maintenance import AlertEvaluator, Maintenance
    from queueapp.services.subscriber_rows import ServiceHeartbeat

    from .crash_recovery import FAILED

    services: list[Service] = [ConnectionWatchdog()]
    all_dispatchers: list[DelayedDispatcher] = []
    all_breakers: list[Breaker] = []
    for alias in options.aliases:
        holder = uuid.uuid5(uuid.UUID(options.holder or options.supervisor), alias)
        breakers: dict[str, list[Breaker]] = {}
        dispatchers: list[DelayedDispatcher] = []
        if options.role == "dispatcher":
            forwarders = [Forwarder(alias, target, holder) for target in sorted(delayed.addresses(alias))]
            dispatchers = [DelayedDispatcher(alias, holder), *forwarders]
            services += dispatchers
            breakers[DISPATCHER] = [breaker for dispatcher in dispatchers for breaker in dispatcher.breakers]
        if options.runs_maintenance:
            # A foreign table is maintained where this project has consumers for it, whichever of its trees is elected.
            queues = [
                queue
                for queue in registry.queues
                if registered.maintains(queue) and router.db_for_write(queue) == alias
            ]
            maintenance = Maintenance(alias, queues, Elector(alias, role_name("maintenance"), holder))
            services.append(maintenance)
            breakers[MAINTENANCE] = [maintenance.breaker]
            if settings.ALERTS:
                alerts = AlertEvaluator(alias, queues, maintenance)
                services.append(alerts)
                breakers[MAINTENANCE].append(alerts.breaker)
            if with_expressions := [queue for queue in queues if holds(queue)]:
                evaluator = ExpressionEvaluator(alias, with_expressions)
                services.append(evaluator)
                breakers[MAINTENANCE].append(evaluator.breaker)
        journals: list[Service] = []
        if options.runs_maintenance and has_work(queues):
            journal = JournalService(alias, queues, Elector(alias, role_name("journal"), holder))
            journals = [journal]
            services.append(journal)
            breakers[MAINTENANCE].append(journal.breaker)
        services.append(ServiceHeartbeat(alias, breakers, uuid.UUID(options.supervisor)))
        all_dispatchers += dispatchers
        all_breakers += [breaker for process_breakers in breakers.values() for breaker in process_breakers]
        if settings.NOTIFY and (dispatchers or journals):
            woken: dict[str, Sequence[Service]] = {notifier.DELAYED: dispatchers, notifier.JOURNAL: journals}

            def on_notify(payload: str, woken: dict[str, Sequence[Service]] = woken) -> None:
                for service in woken.get(payload, ()):
                    service.wake()

            services.append(Listener(alias, on_notify))
    services += _liveness_service(options, breakers=all_breakers, dispatchers=all_dispatchers)
    stages.begin()
    for service in services:
        service.start(stages.fail)
    stages.wait()
    stop_all(services, INTERRUPT_GRACE)
    return FAILED if stages.failed else 0


def database_names() -> dict[str, str]:
    """The present name of each database of this process, by alias."""
    current = {connection.alias: connection.settings_dict for connection in connections.all(initialized_only=True)}
    names = {alias: current.get(alias, entry).get("NAME") for alias, entry in connections.settings.items()}
    return {alias: name for alias, name in names.items() if isinstance(name, str)}


def use_databases(names: Mapping[str, str]) -> None:
    """Let connections that are opened from now on, on any thread, go to the databases of these names."""
    for alias, name in names.items():
        if alias in connections.settings:
            connections.settings[alias]["NAME"] = name


def require_shareable_databases() -> None:
    """Raise CommandError where child processes could not use what this process uses: in a transaction, which they do
    not see, or with settings that are in no module."""
    if not os.environ.get("DJANGO_SETTINGS_MODULE") and not getattr(django_settings, "SETTINGS_MODULE", None):
        raise CommandError(
            "The settings were made by settings.configure(), so worker processes cannot import them: put them into a "
            "module and name it in DJANGO_SETTINGS_MODULE."
        )
    for connection in connections.all(initialized_only=True):
        if connection.in_atomic_block:
            raise CommandError(
                f"There is an open transaction on {connection.alias!r}, and worker processes would not see what is "
                "done in it. In tests use TransactionTestCase, or @pytest.mark.django_db(transaction=True)."
            )


if __name__ == "__main__":
    code = main(sys.argv[1])
    from queueapp.telemetry import tracing

    tracing.flush()
    logging.shutdown()
    # Threads that ignore the interruption (a handler in an endless C call) must not keep the process.
    os._exit(code)
