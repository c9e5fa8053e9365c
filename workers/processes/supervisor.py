"""The process tree: one supervisor, N worker processes, one dispatcher process.

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
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from django.conf import settings as django_settings
from django.db import Error, connections, router

from queueapp.conf import settings
from queueapp.models import DelayedMessage
from queueapp.sql import queue_sql

from ..connections.circuit_breaker import CircuitBreaker
from ..connections.dead_peers import Answering, prepare_connections
from ..services.peer_watch import PeerWatch
from ..services.service import Service
from . import crashes
from .child import ChildOptions
from .same_databases import names_of_databases
from .shared_floors import SharedFloors
from .signals import Signals
from .slots import Slots

log = logging.getLogger("workers")

#: A child that lived shorter than this is restarted with growing delay.
SHORT_LIFE = 5.0
FIRST_BACKOFF, LONGEST_BACKOFF = 0.1, 30.0


class Child:
    """One child process over its restarts."""

    def __init__(self, name: str, options: ChildOptions) -> None:
        self.name = name
        self.options = options
        self.slots = Slots(options.slots) if options.slots else None
        self.process: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0
        self.restart_at = 0.0
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
        environment = os.environ | {
            "DJANGO_SETTINGS_MODULE": os.environ.get("DJANGO_SETTINGS_MODULE", django_settings.SETTINGS_MODULE or ""),
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
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
        self.options.watchful_for = settings.CAREFUL_PERIOD.total_seconds()
        self._backoff = FIRST_BACKOFF if lived > SHORT_LIFE else min(self._backoff * 2, LONGEST_BACKOFF)
        return self._backoff

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
        until_empty: bool = False,
    ) -> None:
        self.id = uuid.uuid4()
        self.queues = list(queues)
        self._until_empty = until_empty
        self._signals = Signals()
        self._failed = False
        labels = [queue._meta.label for queue in self.queues]
        self._floors = SharedFloors(len(labels))
        slots = sum(concurrency or q.delivery.concurrency or settings.CONCURRENCY for q in self.queues)
        self.children = [
            Child(
                f"worker {n + 1}",
                ChildOptions("worker", labels, str(self.id), concurrency, slots, floors_fd=self._floors.fd),
            )
            for n in range(processes if labels else 0)
        ]
        if dispatcher:
            aliases = sorted({router.db_for_write(queue) for queue in self.queues} or {"default"})
            self.children.append(
                Child(
                    "dispatcher", ChildOptions("dispatcher", labels, str(self.id), holder=str(self.id), aliases=aliases)
                )
            )
        for child in self.children:
            child.options.databases = names_of_databases()
        self._unaccounted: list[crashes.Crash] = []
        self._breaker = CircuitBreaker("Accounting for crashes")
        self._account_at = 0.0

    def stop(self, *_: Any) -> None:
        """Stop the tree; called again: do not wait for handlers. Safe in a signal handler and from any thread."""
        self._signals.note()

    def run(self, on_started: Callable[[Supervisor], None] | None = None) -> int:
        """Start everything, watch over it, stop it."""
        life_read, life_write = os.pipe()
        as_before = prepare_connections()
        peer_watch = PeerWatch()
        peer_watch.start(self._fail)
        try:
            with self._signals.installed(children=True):
                return self._run(life_read, on_started)
        finally:
            for child in self.children:
                if child.alive:
                    child.signal(signal.SIGKILL)
            os.close(life_write)
            os.close(life_read)
            peer_watch.stop()
            connections.close_all()
            as_before()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _run(self, life_read: int, on_started: Callable[[Supervisor], None] | None) -> int:
        for child in self.children:
            child.start(life_read)
        if on_started is not None:
            on_started(self)
        empty_polls = 0
        while True:
            self._signals.wait(0.1 if self._until_empty else 0.2)
            if self._signals.asked:
                break
            self._watch(life_read)
            if self._until_empty:
                empty_polls = empty_polls + 1 if self._is_empty() else 0
                # Twice in a row: a message on its way from the delayed store to its queue is in neither for a moment
                # only between two statements of ours, not of the database; the second look sees it.
                if empty_polls >= 2:
                    break
        return self._stop_children()

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
                          crashes.exit_text(child.process.returncode), wait)  # fmt: skip
                self._account(child)
                child.restart_at = monotonic() + wait
            if monotonic() >= child.restart_at:
                child.restart_at = 0.0
                child.start(life_read)
        if self._unaccounted and monotonic() >= self._account_at:
            self._settle(self._unaccounted)

    def _account(self, child: Child) -> None:
        """Count the crash against what the child was handling. What fails is tried again after a while."""
        if child.slots is None:
            return
        assert child.process is not None
        crash = crashes.Crash.of(child.slots, self.queues, child.process.returncode)
        self._settle([*self._unaccounted, crash])

    def _settle(self, open_crashes: list[crashes.Crash]) -> None:
        self._unaccounted, wait = crashes.account(open_crashes, self._breaker)
        self._account_at = monotonic() + wait
        if len(self._unaccounted) < len(open_crashes):
            self._floors.came_back()

    def _is_empty(self) -> bool:
        try:
            for queue in self.queues:
                alias = router.db_for_write(queue)
                connection = connections[alias]
                with Answering(connection):
                    if not queue_sql(queue, connection).is_empty(connection):
                        return False
                    if DelayedMessage.objects.using(alias).filter(destination=queue._meta.label).exists():
                        return False
        except Error:
            connections.close_all()
            return False
        return True

    def _stop_children(self) -> int:
        grace = settings.SHUTDOWN_GRACE.total_seconds() + 10.0
        for child in self.children:
            child.signal(signal.SIGTERM)
        deadline = monotonic() + grace
        asked = 1
        while any(child.alive for child in self.children) and monotonic() < deadline:
            self._signals.wait(0.05)
            if self._signals.asked > asked:
                asked = self._signals.asked
                for child in self.children:
                    child.signal(signal.SIGTERM)  # once more: do not wait for handlers
        code = 1 if self._failed else 0
        for child in self.children:
            if child.alive:
                log.error("%s did not stop in %.0f s and is killed.", child.name, grace)
                child.signal(signal.SIGKILL)
                assert child.process is not None
                child.process.wait()
            # -SIGTERM: it was asked to stop before it had its handlers, so before it had claimed anything.
            if child.process is not None and child.process.returncode not in (0, -signal.SIGTERM):
                self._account(child)
                code = 1
        if self._unaccounted:
            self._settle(self._unaccounted)
        return code
