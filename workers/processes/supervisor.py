"""The process tree: one supervisor, N worker processes, and one process that runs the dispatcher and maintenance.

The supervisor starts children, restarts the ones that die (with back-off), and stops them in stages. It knows from
shared memory which messages a dead child was handling: the crash is counted against those, and the child's other leases
are released uncounted (``crash_recovery``). Children stop by themselves when the supervisor dies: the pipe of which it
holds the other end closes.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from time import monotonic
from typing import Any

from django.conf import settings as django_settings
from django.db import connections, router

from queueapp import delayed
from queueapp.conf import settings
from queueapp.models import DISPATCHER, MAINTENANCE, NO_QUEUES
from queueapp.services.connection_timeouts import ConnectionWatchdog, prepare_connections
from queueapp.services.service import Service

from .child import ChildOptions, database_names
from .crash_recovery import CrashRecorder, CrashReport, exit_text
from .http import Endpoint
from .probes import Probes
from .shared_memory import InFlightSlots, LivenessBoard, SharedLowWaterMarks, receivers_and_slots
from .signals import Signals
from .stalled_children import StalledChildren
from .until_empty import NOTHING, DrainCheck, Remaining

log = logging.getLogger("queueapp.workers")

#: A child that lived shorter than this is restarted with growing delay.
SHORT_LIFE = 5.0
FIRST_BACKOFF, LONGEST_BACKOFF = 0.1, 30.0
#: Exit codes of a tree that worked until empty: no consumer here takes what is left; the database user lacks
#: privileges.
UNROUTABLE, REFUSED = 3, 4
#: Seconds beyond ``SHUTDOWN_GRACE`` after which a child that has not stopped is killed.
KILL_AFTER = 10.0


def _metrics_collector() -> Any:
    """The metrics of the tree; None where the library is not installed."""
    try:
        from .metrics import MetricsCollector
    except ImportError as error:
        if not (error.name or "").startswith("prometheus_client"):
            raise
        return None
    return MetricsCollector()


class Child:
    """One child process over its restarts."""

    def __init__(self, name: str, options: ChildOptions) -> None:
        self.name = name
        self.options = options
        self.slots = InFlightSlots(options.slots) if options.slots else None
        self.process: subprocess.Popen[bytes] | None = None
        #: Environment variables in addition to those of the supervisor.
        self.environment: dict[str, str] = {}
        self.started_at = 0.0
        #: It has died and is restarted then, once the crash is recorded; 0: it runs.
        self.restart_at = 0.0
        #: The report of that death, until it is restarted.
        self.crash: CrashReport | None = None
        #: Why the supervisor has killed it; '': it has not.
        self.kill_reason = ""
        #: The process that this one replaces, while that finishes its handlers.
        self.predecessor: Predecessor | None = None
        self._backoff = FIRST_BACKOFF

    def start(self, parent_fd: int) -> None:
        """Start the process with its slots and the reading end of the parent pipe."""
        self.options.parent_fd = parent_fd
        passed = [parent_fd]
        self.kill_reason = ""
        if self.slots is not None:
            self.slots.clear()
            self.options.slots_fd = self.slots.fd
            passed.append(self.slots.fd)
        passed += [fd for fd in (self.options.marks_fd, self.options.liveness_fd) if fd >= 0]
        environment = (
            os.environ
            | self.environment
            | {
                "DJANGO_SETTINGS_MODULE": os.environ.get(
                    "DJANGO_SETTINGS_MODULE", django_settings.SETTINGS_MODULE or ""
                ),
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            }
        )
        # Its own process group: a Ctrl-C in the terminal reaches the supervisor alone, which stops the children in
        # order.
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.child", self.options.to_json()],
            pass_fds=passed,
            env=environment,
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
        self.options.replaces = True  # from the second start on
        self.started_at = monotonic()

    def died(self) -> float:
        """It ended without having been asked to: returns how many seconds to wait before the restart."""
        lived = monotonic() - self.started_at
        self._backoff = FIRST_BACKOFF if lived > SHORT_LIFE else min(self._backoff * 2, LONGEST_BACKOFF)
        return self._backoff

    def failed_to_start(self) -> float:
        """It could not be restarted: returns how many seconds to wait before the next try."""
        self._backoff = min(self._backoff * 2, LONGEST_BACKOFF)
        return self._backoff

    def may_restart(self) -> bool:
        """Whether its crash is recorded, or cannot be for now. Before that it is not restarted: a message that ends its
        process would run more often than its attempts allow (``crash_recovery``)."""
        return self.crash is None or self.crash.is_tried

    def signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int | None:
        """Its process id; None while it does not run."""
        return self.process.pid if self.process is not None and self.process.returncode is None else None

    def kill(self, reason: str) -> None:
        """Kill it; ``reason``: how it ended, for the crash report."""
        self.kill_reason = reason
        self.signal(signal.SIGKILL)

    @property
    def exit_text(self) -> str:
        """How it ended, in words."""
        assert self.process is not None
        return self.kill_reason or exit_text(self.process.returncode)

    def detach(self) -> Predecessor:
        """Hand the running process over to a predecessor; the next start takes new slots."""
        predecessor = Predecessor(self)
        self.process, self.slots = None, InFlightSlots(self.options.slots)
        return predecessor


class Predecessor(Child):
    """A process with a stuck handler that is replaced: it finishes its other handlers and ends."""

    def __init__(self, child: Child) -> None:
        self.name, self.options = f"the predecessor of {child.name}", copy(child.options)
        self.slots, self.process = child.slots, child.process
        self.kill_reason, self.started_at, self.restart_at, self.crash = "", child.started_at, 0.0, None
        self.predecessor = None
        #: It was signalled that its replacement runs, or to stop.
        self.is_retired = self.is_stopped = False


class Supervisor:
    """Runs the tree until stopped; ``run`` returns the exit code."""

    def __init__(
        self,
        queues: Sequence[Any],
        *,
        processes: int = 1,
        concurrency: int | None = None,
        dispatcher: bool = True,
        maintenance: bool = True,
        until_empty: bool = False,
        backlogs: Mapping[str, int] | None = None,
        filters: Mapping[str, str] | None = None,
        only_consumers: Sequence[str] = (),
        endpoint: Endpoint | None = None,
    ) -> None:
        """``backlogs`` and ``filters``: limits and filters of the subscriptions of each worker process, by the label of
        a queue. ``only_consumers``: the consumers that they run; none: all. ``endpoint``: serves probes and metrics;
        closed at the end."""
        self.id = uuid.uuid4()
        self.queues = list(queues)
        #: Decides when a tree that runs until empty has finished.
        self._drain = (
            DrainCheck(self.queues, runs_maintenance=maintenance and settings.PURGE_INTERVAL is not None)
            if until_empty
            else None
        )
        self._signals = Signals()
        self._failed = False
        labels = [queue._meta.label for queue in self.queues]
        self._marks = SharedLowWaterMarks(len(labels))
        slots = sum(receivers_and_slots(queue, concurrency)[1] for queue in self.queues)
        self.children = [
            Child(
                f"worker {n + 1}",
                ChildOptions("worker", labels, str(self.id), concurrency, slots, marks_fd=self._marks.fd),
            )
            for n in range(processes if labels else 0)
        ]
        if dispatcher or maintenance:
            role = "dispatcher" if dispatcher else "maintenance"
            aliases = {router.db_for_write(queue) for queue in self.queues}
            if dispatcher:
                aliases |= {alias for queue in self.queues for alias in delayed.stores_of(queue)}
            options = ChildOptions(
                role, labels, str(self.id), holder=str(self.id), aliases=sorted(aliases or {"default"})
            )
            options.runs_maintenance = maintenance
            self.children.append(Child(role, options))
        here = {DISPATCHER: dispatcher, MAINTENANCE: maintenance}
        # One child reports it for all.
        for child in self.children[:1]:
            child.options.lacking = [name for name in NO_QUEUES if not here[name]]
        for child in self.children:
            child.options.backlogs, child.options.filters = dict(backlogs or {}), dict(filters or {})
            child.options.only_consumers = list(only_consumers)
            child.options.databases = database_names()
        self._endpoint = endpoint
        #: Two entries per child: a replacement and its predecessor run side by side.
        self._liveness = LivenessBoard(2 * len(self.children))
        self._metrics = _metrics_collector() if endpoint is not None else None
        #: The last turn of its loop.
        self.turned_at = monotonic()
        for number, child in enumerate(self.children):
            child.options.liveness_fd, child.options.liveness_entry = self._liveness.fd, number
            child.options.has_metrics = self._metrics is not None
            child.environment = self._metrics.environment if self._metrics is not None else {}
        self._stalled_children = StalledChildren(
            self.queues, lambda: self._processes, lambda child: self._liveness.age(child.options.liveness_entry)
        )
        self._crash_recorder = CrashRecorder(self._marks.messages_returned)

    def stop(self, *_: Any) -> None:
        """Stop the tree; called again: do not wait for handlers. Safe in a signal handler and from any thread."""
        self._signals.stop()

    def run(self, on_started: Callable[[Supervisor], None] | None = None) -> int:
        """Start the children, watch them, stop them."""
        parent_read, parent_write = os.pipe()
        restore_connections = prepare_connections()
        watchdog = ConnectionWatchdog()
        watchdog.start(self._fail)
        self._crash_recorder.start(self._fail)
        self._stalled_children.start(self._fail)
        try:
            if self._endpoint is not None:
                self._endpoint.start(self.probes.pages, immediate=("/healthz",))
            with self._signals.installed(children=True):
                try:
                    return self._run(parent_read, on_started)
                except BaseException:
                    log.critical("The supervisor has failed; it stops its processes in order.")
                    self._stop_children()
                    raise
        finally:
            for child in self._processes:
                if child.alive:
                    child.signal(signal.SIGKILL)
            os.close(parent_write)
            os.close(parent_read)
            watchdog.stop()
            self._stalled_children.stop()
            self._crash_recorder.stop(0.0)
            self.close()
            connections.close_all()
            restore_connections()

    @property
    def probes(self) -> Probes:
        """The pages of its HTTP server."""
        return Probes(self, self._metrics)

    def close(self) -> None:
        """Stop the HTTP server, and remove the files of the metrics."""
        if self._endpoint is not None:
            self._endpoint.close()
        if self._metrics is not None:
            self._metrics.close()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _run(self, parent_read: int, on_started: Callable[[Supervisor], None] | None) -> int:
        for child in self.children:
            child.start(parent_read)
        if on_started is not None:
            on_started(self)
        while True:
            self._signals.wait(0.2 if self._drain is None else 0.1)
            self.turned_at = monotonic()
            if self._signals.stop_count:
                self._log_stop()
                break
            self._watch(parent_read)
            if self._drain is not None and self._drain.is_done(self._is_busy):
                break
        code = self._stop_children()
        if code or not self.remaining.words:
            return code
        return REFUSED if self.remaining.refused else UNROUTABLE

    def _fail(self, service: Service) -> None:
        log.critical("The worker stops because %s ended.", service.name)
        self._failed = True
        self.stop()

    @property
    def _processes(self) -> list[Child]:
        """The children, and the predecessors of those that were replaced."""
        return [process for child in self.children for process in (child, child.predecessor) if process is not None]

    def _watch_predecessor(self, child: Child, parent_read: int) -> None:
        """Replace a child with a stuck handler: start its replacement first, and let it finish its other handlers."""
        wants = child.alive and self._liveness.wants_replacement(child.options.liveness_entry)
        old = child.predecessor
        if old is None:
            if not wants:
                return
            old = child.predecessor = child.detach()
            count = len(self.children)
            child.options.liveness_entry = (child.options.liveness_entry + count) % (2 * count)
            self._liveness.reset(child.options.liveness_entry)
            assert old.process is not None
            log.warning("%s (%d) has a stuck handler; starting its replacement.", child.name, old.process.pid,
                        extra={"worker": old.process.pid})  # fmt: skip
            self._restart(child, parent_read)
        elif not old.alive:
            assert old.process is not None
            child.predecessor = None
            log.error("%s (%d) %s.", old.name, old.process.pid, old.exit_text, extra={"worker": old.process.pid})
            if self._metrics is not None:
                self._metrics.restarts += 1
                self._metrics.died(old.process.pid)
            if old.process.returncode:
                self._record_crash(old)
        elif not old.is_retired and self._liveness.age(child.options.liveness_entry) is not None:
            old.is_retired = True
            old.signal(signal.SIGUSR1)
        elif wants and not old.is_stopped:
            # One predecessor at a time: its handlers have the grace of a shutdown, and the next replacement waits for
            # its end.
            old.is_stopped = True
            old.signal(signal.SIGTERM)

    def _watch(self, parent_read: int) -> None:
        for child in self.children:
            self._watch_predecessor(child, parent_read)
            if child.alive:
                continue
            if child.restart_at == 0.0 and child.process is not None:
                wait = child.died()
                log.error("%s (%d) %s; restarting in %.1f s.", child.name, child.process.pid,
                          child.exit_text, wait)  # fmt: skip
                self._forget(child)
                self._record_crash(child)
                child.restart_at = monotonic() + wait
            if monotonic() >= child.restart_at and child.may_restart():
                self._restart(child, parent_read)

    def _restart(self, child: Child, parent_read: int) -> None:
        child.options.restarts += 1
        try:
            child.start(parent_read)
        except OSError as error:  # no process id or no memory: the other children go on
            wait = child.failed_to_start()
            log.error("%s cannot be started: %s; trying again in %.1f s.", child.name, error, wait)
            child.restart_at = monotonic() + wait
        else:
            child.restart_at, child.crash = 0.0, None

    @property
    def stopping(self) -> bool:
        """Whether it was asked to stop."""
        return bool(self._signals.stop_count)

    def silence_of(self, child: Child) -> float | None:
        """Seconds since a child's last sign of life; None: it has given none yet."""
        age = self._liveness.age(child.options.liveness_entry)
        return None if age is None else round(age, 1)

    def keeps_alive(self, child: Child) -> bool:
        """Whether a handler of a child keeps the interpreter lock, and the supervisor renews its leases."""
        return self._stalled_children.keeps(child)

    def _forget(self, child: Child) -> None:
        """Reset what the HTTP server knows of a child that is gone."""
        self._liveness.reset(child.options.liveness_entry)
        if self._metrics is not None:
            assert child.process is not None
            self._metrics.restarts += 1
            self._metrics.died(child.process.pid)

    def _record_crash(self, child: Child) -> None:
        """Count the crash against the messages that the child was handling."""
        if child.slots is None:
            return
        assert child.process is not None
        child.crash = CrashReport.of(child.slots, self.queues, child.exit_text)
        self._crash_recorder.add(child.crash)

    @property
    def remaining(self) -> Remaining:
        """What was left when a tree that runs until empty ended, because nothing of it can be handled here."""
        return NOTHING if self._drain is None else self._drain.remaining

    def _is_busy(self) -> bool:
        """Whether a handler runs, or messages were claimed that are in no table."""
        return any(child.alive and child.slots is not None and child.slots.is_busy() for child in self._processes)

    def _log_stop(self) -> None:
        """Say what the stop waits for, and how long."""
        running: Counter[str] = Counter()
        for child in self._processes:
            if child.alive and child.slots is not None:
                running.update(self.queues[message.queue]._meta.label for message in child.slots.in_flight())
        count = running.total()
        where = ", ".join(f"{label}: {number}" for label, number in sorted(running.items()))
        what = (
            f"waiting up to {settings.SHUTDOWN_GRACE.total_seconds():g} s (SHUTDOWN_GRACE) for {count} running "
            f"handler{'s' if count != 1 else ''} ({where}); a second signal interrupts {'them' if count != 1 else 'it'}"
            if count
            else "no handler is running"
        )
        log.info("Stopping: %s.", what, extra={"running": dict(running)})

    def _stop_children(self) -> int:
        grace = settings.SHUTDOWN_GRACE.total_seconds() + KILL_AFTER
        processes = self._processes
        for child in processes:
            child.signal(signal.SIGTERM)
        deadline = monotonic() + grace
        signalled = 1
        while any(child.alive for child in processes) and monotonic() < deadline:
            self._signals.wait(0.05)
            self.turned_at = monotonic()
            if self._signals.stop_count > signalled:
                signalled = self._signals.stop_count
                for child in processes:
                    child.signal(signal.SIGTERM)  # once more: do not wait for handlers
        code = 1 if self._failed else 0
        for child in processes:
            if child.restart_at:
                continue  # recorded when it died; twice, and its message would lose two attempts by one death
            if child.alive:
                log.error("%s did not stop in %.0f s and is killed.", child.name, grace)
                child.signal(signal.SIGKILL)
                assert child.process is not None
                child.process.wait()
            # -SIGTERM: it was stopped before it had signal handlers, so before it had claimed anything.
            if child.process is not None and child.process.returncode not in (0, -signal.SIGTERM):
                log.error("%s (%d) %s.", child.name, child.process.pid, child.exit_text)
                self._record_crash(child)
                code = 1
        for report in self._crash_recorder.end():
            log.error(
                "A crash could not be recorded, because the database is away or a row is locked: %s.", report.in_words()
            )
            code = 1
        return code
