"""The process tree: one supervisor, N worker processes, one process that dispatches delayed messages and keeps house.

The supervisor starts children, restarts the ones that die (with back-off), and stops them in stages. It knows from
shared memory what a dead child was handling: that crash is counted against those messages, and the rest of the child's
leases is given back uncounted (``crashes``). Children end by themselves when the supervisor dies: a pipe of which it
holds the other end closes.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any

from django.conf import settings as django_settings
from django.db import connections, router

from queueapp import delayed
from queueapp.conf import settings
from queueapp.models import DISPATCHER, MAINTENANCE, NO_QUEUES
from queueapp.services.connection_timeouts import ConnectionWatchdog, prepare_connections
from queueapp.services.service import Service

from . import crash_recovery
from .accounting import Accounting
from .child import ChildOptions
from .child_databases import names_of_databases
from .http import Endpoint
from .in_flight_slots import Slots, slots_of
from .liveness import Signs
from .probes import Probes
from .shared_low_water_marks import SharedLowWaterMarks
from .signals import Signals
from .until_empty import is_empty, remaining

log = logging.getLogger("queueapp.workers")

#: A child that lived shorter than this is restarted with growing delay.
SHORT_LIFE = 5.0
FIRST_BACKOFF, LONGEST_BACKOFF = 0.1, 30.0
#: Exit codes of a tree that worked until empty: what is left is for nobody here; the database does not let its user.
NOT_FOR_US, REFUSED = 3, 4
#: Seconds between two looks at what is left, and how many in a row have to find nothing for anybody here.
LOOK_INTERVAL, HOPELESS_LOOKS = 1.0, 3
#: Seconds before what is waited for is said, between two lines that differ, and until the same is said again.
SAY_FIRST, SAY_INTERVAL, SAY_AGAIN = 2.0, 10.0, 120.0


def _measured() -> Any:
    """What the tree counts; None without the library that it is counted with."""
    try:
        from .measured import Measured
    except ImportError as error:
        if not (error.name or "").startswith("prometheus_client"):
            raise
        return None
    return Measured()


class Child:
    """One child process over its restarts."""

    def __init__(self, name: str, options: ChildOptions) -> None:
        self.name = name
        self.options = options
        self.slots = Slots(options.slots) if options.slots else None
        self.process: subprocess.Popen[bytes] | None = None
        #: What it has beside the environment of its supervisor.
        self.environment: dict[str, str] = {}
        self.started_at = 0.0
        #: It died, which was counted, and is started again then; 0: neither.
        self.restart_at = 0.0
        #: That death, until it is started again.
        self.crash: crash_recovery.Crash | None = None
        self._backoff = FIRST_BACKOFF

    def start(self, life_fd: int) -> None:
        """Start the process with its slots and the reading end of the life pipe."""
        self.options.life_fd = life_fd
        passed = [life_fd]
        if self.slots is not None:
            self.slots.clear()
            self.options.slots_fd = self.slots.fd
            passed.append(self.slots.fd)
        if self.options.floors_fd >= 0:
            passed.append(self.options.floors_fd)
        if self.options.signs_fd >= 0:
            passed.append(self.options.signs_fd)
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
        # Its own process group: a Ctrl-C in the terminal reaches the supervisor alone, which stops the children in order.
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.child", self.options.to_json()],
            pass_fds=passed,
            env=environment,
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
        self.started_at = monotonic()

    def died(self) -> float:
        """It ended though nobody asked: returns how many seconds to wait before it is started again."""
        lived = monotonic() - self.started_at
        self._backoff = FIRST_BACKOFF if lived > SHORT_LIFE else min(self._backoff * 2, LONGEST_BACKOFF)
        return self._backoff

    def failed_to_start(self) -> float:
        """It could not be started again: returns how many seconds to wait before the next try."""
        self._backoff = min(self._backoff * 2, LONGEST_BACKOFF)
        return self._backoff

    def is_counted(self) -> bool:
        """Whether its death was tried to be counted, or that takes too long to wait for. Before that it is not started again: a
        message that kills would run more often than its attempts say (``crashes``)."""
        return self.crash is None or self.crash.is_tried

    def signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None


class Supervisor:
    """Runs the tree until stopped; ``run`` returns the exit code."""

    def __init__(
        self,
        queues: Sequence[Any],
        *,
        processes: int = 1,
        concurrency: int | None = None,
        dispatcher: bool = True,
        housekeeping: bool = True,
        until_empty: bool = False,
        backlogs: Mapping[str, int] | None = None,
        filters: Mapping[str, str] | None = None,
        lane: Sequence[str] = (),
        endpoint: Endpoint | None = None,
    ) -> None:
        """``backlogs`` and ``filters``: what each worker process subscribes to a queue with, by label; ``lane``: the
        consumers that they are for. ``endpoint``: answers probes and collectors; closed at the end."""
        self.id = uuid.uuid4()
        self.queues = list(queues)
        self._until_empty = until_empty
        self._purges = housekeeping
        self._signals = Signals()
        self._failed = False
        #: Working until empty: what was left when it ended, in words.
        self.left = ""
        #: That is what the database user lacks.
        self.refused = False
        self._empty_looks = self._hopeless_looks = 0
        self._look_at, self._say_at, self._said = 0.0, monotonic() + SAY_FIRST, ""
        labels = [queue._meta.label for queue in self.queues]
        self._floors = SharedLowWaterMarks(len(labels))
        slots = sum(slots_of(queue, concurrency)[1] for queue in self.queues)
        self.children = [
            Child(
                f"worker {n + 1}",
                ChildOptions("worker", labels, str(self.id), concurrency, slots, floors_fd=self._floors.fd),
            )
            for n in range(processes if labels else 0)
        ]
        if dispatcher or housekeeping:
            role = "dispatcher" if dispatcher else "housekeeper"
            aliases = {router.db_for_write(queue) for queue in self.queues}
            if dispatcher:
                aliases |= {alias for queue in self.queues for alias in delayed.stores_of(queue)}
            options = ChildOptions(
                role, labels, str(self.id), holder=str(self.id), aliases=sorted(aliases or {"default"})
            )
            options.keeps_house = housekeeping
            self.children.append(Child(role, options))
        here = {DISPATCHER: dispatcher, MAINTENANCE: housekeeping}
        # One of them says it for all.
        for child in self.children[:1]:
            child.options.lacking = [name for name in NO_QUEUES if not here[name]]
        for child in self.children:
            child.options.backlogs, child.options.filters = dict(backlogs or {}), dict(filters or {})
            child.options.lane = list(lane)
            child.options.databases = names_of_databases()
        self._endpoint = endpoint
        self._signs = Signs(len(self.children)) if endpoint is not None else None
        self._measured = _measured() if endpoint is not None else None
        #: When its loop turned last.
        self.turned_at = monotonic()
        if self._signs is not None:
            for number, child in enumerate(self.children):
                child.options.signs_fd, child.options.sign = self._signs.fd, number
                child.options.measured = self._measured is not None
                child.environment = self._measured.environment if self._measured is not None else {}
        self._accounting = Accounting(self._floors.came_back)

    def stop(self, *_: Any) -> None:
        """Stop the tree; called again: do not wait for handlers. Safe in a signal handler and from any thread."""
        self._signals.note()

    def run(self, on_started: Callable[[Supervisor], None] | None = None) -> int:
        """Start everything, watch over it, stop it."""
        life_read, life_write = os.pipe()
        as_before = prepare_connections()
        watchdog = ConnectionWatchdog()
        watchdog.start(self._fail)
        self._accounting.start(self._fail)
        try:
            if self._endpoint is not None:
                self._endpoint.start(self.probes.pages)
                log.info("Probes and metrics: %s", self._endpoint.address)
            with self._signals.installed(children=True):
                try:
                    return self._run(life_read, on_started)
                except BaseException:
                    log.critical("The supervisor has failed; its processes are stopped in order.")
                    self._stop_children()
                    raise
        finally:
            for child in self.children:
                if child.alive:
                    child.signal(signal.SIGKILL)
            os.close(life_write)
            os.close(life_read)
            watchdog.stop()
            self._accounting.stop(0.0)
            self.close()
            connections.close_all()
            as_before()

    @property
    def probes(self) -> Probes:
        """What its HTTP server answers."""
        return Probes(self, self._measured)

    def close(self) -> None:
        """Listen no longer, and remove what was measured."""
        if self._endpoint is not None:
            self._endpoint.close()
        if self._measured is not None:
            self._measured.close()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _run(self, life_read: int, on_started: Callable[[Supervisor], None] | None) -> int:
        for child in self.children:
            child.start(life_read)
        if on_started is not None:
            on_started(self)
        while True:
            self._signals.wait(0.1 if self._until_empty else 0.2)
            self.turned_at = monotonic()
            if self._signals.asked:
                break
            self._watch(life_read)
            if self._until_empty and self._is_done():
                break
        code = self._stop_children()
        return code or (REFUSED if self.refused else NOT_FOR_US if self.left else 0)

    def _fail(self, service: Service) -> None:
        log.critical("The tree stops without %s.", service.name)
        self._failed = True
        self.stop()

    def _watch(self, life_read: int) -> None:
        for child in self.children:
            if child.alive:
                continue
            if child.restart_at == 0.0:
                assert child.process is not None
                wait = child.died()
                log.error("%s (%d) %s; restarting in %.1f s.", child.name, child.process.pid,
                          crash_recovery.exit_text(child.process.returncode), wait)  # fmt: skip
                self._forget(child)
                self._account(child)
                child.restart_at = monotonic() + wait
            if monotonic() >= child.restart_at and child.is_counted():
                self._restart(child, life_read)

    def _restart(self, child: Child, life_read: int) -> None:
        try:
            child.start(life_read)
        except OSError as error:  # no more processes or no more memory: that is no end of those that run
            wait = child.failed_to_start()
            log.error("%s cannot be started: %s; trying again in %.1f s.", child.name, error, wait)
            child.restart_at = monotonic() + wait
        else:
            child.restart_at, child.crash = 0.0, None

    @property
    def stopping(self) -> bool:
        """Whether it was asked to stop."""
        return bool(self._signals.asked)

    def silence_of(self, child: Child) -> float | None:
        """Seconds since a child's last sign of life; None: it has given none yet."""
        age = self._signs.age(child.options.sign) if self._signs is not None else None
        return None if age is None else round(age, 1)

    def _forget(self, child: Child) -> None:
        """What the HTTP server knows of a child that is gone."""
        if self._signs is not None:
            self._signs.forget(child.options.sign)
        if self._measured is not None:
            assert child.process is not None
            self._measured.restarts += 1
            self._measured.died(child.process.pid)

    def _account(self, child: Child) -> None:
        """Count the crash against what the child was handling. What fails is tried again after a while."""
        if child.slots is None:
            return
        assert child.process is not None
        child.crash = crash_recovery.Crash.of(child.slots, self.queues, child.process.returncode)
        self._accounting.add(child.crash)

    def _is_done(self) -> bool:
        """Whether the queues are empty, or what is left is not for anybody here. Says from time to time what it waits for."""
        empty = is_empty(self.queues)
        # Asked after that: what was in no table then was claimed before, and is handled by now or seen here.
        at_work = any(child.alive and child.slots is not None and child.slots.only_here() for child in self.children)
        if empty and not at_work:
            self._empty_looks += 1
            # Twice in a row: a message on its way from the delayed store to its queue is in neither for a moment
            # only between two statements of ours, not of the database; the second look sees it.
            return self._empty_looks >= 2
        self._empty_looks = 0
        now = monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_INTERVAL
        left = remaining(self.queues, purges=self._purges and settings.PURGE_INTERVAL is not None)
        # Some looks in a row: what somebody has taken may come back, and what a handler sends may be on its way.
        self._hopeless_looks = self._hopeless_looks + 1 if left.hopeless and not at_work else 0
        if self._hopeless_looks >= HOPELESS_LOOKS:
            self.left, self.refused = left.words, left.refused
            return True
        words = left.words or "what handlers were given for once"
        if now >= self._say_at and (words != self._said or now >= self._say_at + SAY_AGAIN):
            self._say_at, self._said = now + SAY_INTERVAL, words
            log.info("Waiting until this is gone: %s.", words)
        return False

    def _stop_children(self) -> int:
        grace = settings.SHUTDOWN_GRACE.total_seconds() + 10.0
        for child in self.children:
            child.signal(signal.SIGTERM)
        deadline = monotonic() + grace
        asked = 1
        while any(child.alive for child in self.children) and monotonic() < deadline:
            self._signals.wait(0.05)
            self.turned_at = monotonic()
            if self._signals.asked > asked:
                asked = self._signals.asked
                for child in self.children:
                    child.signal(signal.SIGTERM)  # once more: do not wait for handlers
        code = 1 if self._failed else 0
        for child in self.children:
            if child.restart_at:
                continue  # counted when it died: once more, and its message would lose two attempts by one death
            if child.alive:
                log.error("%s did not stop in %.0f s and is killed.", child.name, grace)
                child.signal(signal.SIGKILL)
                assert child.process is not None
                child.process.wait()
            # -SIGTERM: it was asked to stop before it had its handlers, so before it had claimed anything.
            if child.process is not None and child.process.returncode not in (0, -signal.SIGTERM):
                log.error(
                    "%s (%d) %s.", child.name, child.process.pid, crash_recovery.exit_text(child.process.returncode)
                )
                self._account(child)
                code = 1
        for crash in self._accounting.end():
            log.error("Not counted, because the database or a row was not to be had: %s.", crash.in_words())
            code = 1
        return code
