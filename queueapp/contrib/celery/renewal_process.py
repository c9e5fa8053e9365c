"""The renewal process of a Celery worker: a child that renews the worker's heartbeat and leases while the worker
executes no Python code.

With Celery's pools other than prefork tasks run in the process that holds the leases. A task in C code that keeps the
interpreter lock (a regular expression, a compression, a numeric library) stops every thread of it, the process agent
too: other workers would declare the process dead, and run its messages as well. The agent reports its leases to the
child, which acts when the reports cease.

States of the child: **listening**, without Django and without a database connection -> no report for ``STALLED_AFTER``
-> **renewing** -> a report -> listening; the end of the pipe, or another parent -> **ended**. A worker that is stopped
(SIGSTOP, a debugger) is not kept alive: it does not work.

The upper part of this module runs in the worker, the lower part in the child, where nothing may be imported up here
that needs Django.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .in_flight import Leases

log = logging.getLogger("queueapp")

#: Seconds without a report after which the child renews, and after which it logs that. The agent reports four times a
#: second, and once a second while its database is away.
STALLED_AFTER, LOGGED_AFTER = 1.5, 3.0
#: Seconds between two rounds of the child.
INTERVAL = 0.25
#: Maximum number of seqs in one line: a line that fits into ``PIPE_BUF`` is written whole or not at all.
MAX_SEQS = (getattr(select, "PIPE_BUF", 512) - 100) // 20

#: The Celery worker of this process, if there is one.
worker: Any = None


def runs_tasks() -> bool:
    """Whether the tasks of a Celery worker run in this process: with any pool except prefork."""
    # Without the variable (``settings.configure()``) a child has no settings; without POSIX it has no such pipe.
    if worker is None or os.name != "posix" or "DJANGO_SETTINGS_MODULE" not in os.environ:
        return False
    prefork = sys.modules.get("celery.concurrency.prefork")
    return prefork is None or not issubclass(worker.pool_cls, prefork.TaskPool)


class RenewalProcess:
    """The child of one process agent, started with the first lease. Safe from any thread; never waits before ``stop``.

    ``database``: the name of the database, which in a test run is not that of the settings. ``supervisor``: what the
    agent's subscriber row has as such.
    """

    def __init__(self, alias: str, database: str, supervisor: uuid.UUID, leases: Leases) -> None:
        self._identity = [leases.owner.hex, supervisor.hex, alias, database]
        self._leases = leases
        self._lock = threading.Lock()
        self._stopped = False
        self.process: subprocess.Popen[bytes] | None = None
        #: The end to write to; None: not started yet.
        self._pipe: int | None = None
        #: What the child has been sent, by token: the expiry and the seqs.
        self._known: dict[uuid.UUID, tuple[float, frozenset[int]]] = {}

    def report(self) -> bool:
        """Report that the worker runs, and which leases have changed: before the messages of a claim are delivered, and
        in each round of the agent. Returns whether the child has been sent everything: what does not fit into the pipe
        is sent by the next report."""
        if not runs_tasks():
            return False
        with self._lock:
            leases = self._leases.snapshot()
            if self._stopped or (self._pipe is None and not leases):
                return False
            if self._pipe is None:
                self._start()
            for token in self._known.keys() - leases.keys():
                if self._write(token.hex):
                    del self._known[token]
            for token, (expires, period, renews, seqs) in leases.items():
                known_expiry, known = self._known.get(token, (0.0, frozenset[int]()))
                added = sorted(seqs - known)
                parts = [added[start : start + MAX_SEQS] for start in range(0, len(added), MAX_SEQS)]
                known &= seqs
                if expires != known_expiry and not parts:
                    parts = [[]]
                for part in parts:
                    if not self._write(token.hex, expires, period, renews, part):
                        break  # the next report goes on from here: more than a pipe holds would never be sent at once
                    known_expiry, known = expires, known.union(part)
                self._known[token] = known_expiry, known
            return self._write() and self._known == {token: (lease[0], lease[3]) for token, lease in leases.items()}

    def restart_if_ended(self) -> None:
        """Start the child again if it has ended, or could not be started."""
        with self._lock:
            if self._stopped or self._pipe is None or (self.process is not None and self.process.poll() is None):
                return
            code = self.process.returncode if self.process is not None else None
            log.warning("The renewal process of this worker has ended (exit code %s); it is started again.", code)
            os.close(self._pipe)
            self._start()

    def stop(self, seconds: float = 1.0) -> None:
        """End the child."""
        with self._lock:
            self._stopped = True
            if self._pipe is not None:
                os.close(self._pipe)
                self._pipe = None
            if self.process is None:
                return
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:  # it waits for a database that does not answer
                self.process.kill()
                self.process.wait()

    def _start(self) -> None:
        self._known.clear()
        self.process = None
        reading_end, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        try:
            # A session of its own: Ctrl-C in a terminal is a signal to the whole process group.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", f"{__package__}.renewal_process"],
                stdin=reading_end,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,
            )
        except OSError as error:
            log.warning("The renewal process of this worker could not be started: %s", error)
        finally:
            os.close(reading_end)
        self._write(*self._identity)

    def _write(self, *values: Any) -> bool:
        line = json.dumps(values, separators=(",", ":")) if values else ""
        try:
            os.write(self._pipe if self._pipe is not None else -1, f"{line}\n".encode())
        except OSError:
            return False  # the pipe is full, or the child has ended
        return True


# -- the child ---------------------------------------------------------------------------------------------------------


class _Renewals:
    """Renews in place of a worker that does not report, from one report to the next."""

    def __init__(self, identity: list[str], leases: Mapping[str, list[Any]], process: int, since: float) -> None:
        owner, supervisor, self._alias, database = identity
        _set_up(self._alias, database)
        from ...circuit_breaker import CircuitBreaker
        from ...services.subscriber_rows import heartbeat_interval
        from .in_flight import Leases

        self._owner, self._supervisor = uuid.UUID(owner), uuid.UUID(supervisor)
        self._process, self._since = process, since
        self._leases = Leases(lambda: None)
        # The clock of ``monotonic`` is that of the system: the worker's times hold here.
        for token, (expires, period, renews, seqs) in leases.items():
            self._leases.add(uuid.UUID(token), seqs, expires - period, period, renews)
        self._heartbeat_at = since + heartbeat_interval()
        self._breaker = CircuitBreaker(
            f"Renewals for process {process} in {self._alias}", kind="leases", subject=self._alias
        )
        self._logged = False

    def run_round(self) -> float:
        """Renew what is due; returns the seconds to the next round."""
        from django.db import Error, connections

        from ...services.connection_timeouts import ResponseDeadline
        from ...services.subscriber_rows import heartbeat, heartbeat_interval, is_running
        from .models import BrokerQueue

        now = monotonic()
        if not is_running(self._process):
            return INTERVAL
        try:
            with ResponseDeadline(connections[self._alias]):
                self._leases.renew(connections[self._alias])
                if now >= self._heartbeat_at:
                    # It has no row yet if the first task keeps the lock.
                    heartbeat(self._alias, self._owner, BrokerQueue, self._supervisor, {}, dict, self._process)
                    self._heartbeat_at = now + heartbeat_interval()
        except Error as error:
            connections.close_all()
            return min(1.0, self._breaker.failure(error))
        self._breaker.success()
        if not self._logged and now - self._since >= LOGGED_AFTER and self._leases.outstanding:
            self._logged = True
            log.warning(
                "Celery worker %d has not reported for %.1f s: probably a task in C code keeps the interpreter lock. "
                "Its heartbeat and its leases (%d in flight) are renewed meanwhile.",
                self._process, now - self._since, self._leases.outstanding, extra={"worker": self._process},
            )  # fmt: skip
        return INTERVAL

    def close(self) -> None:
        """Close the connection."""
        from django.db import connections

        connections.close_all()

    def end(self) -> None:
        """The worker renews by itself again."""
        self.close()
        if self._logged:
            log.warning("Celery worker %d reports again after %.1f s.", self._process,
                        monotonic() - self._since, extra={"worker": self._process})  # fmt: skip


def _set_up(alias: str, database: str) -> None:
    import django
    from django.apps import apps
    from django.db import connections

    if not apps.ready:
        django.setup()
        from ...services.connection_timeouts import ConnectionWatchdog, prepare_connections

        connections[alias].settings_dict["NAME"] = database
        prepare_connections()
        ConnectionWatchdog().start()


def main() -> None:
    """Read reports from the standard input until it ends."""
    # A signal to all processes of a service or container is for the worker, which may still run tasks.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # A child that the worker forks inherits the pipe and keeps it open: therefore the parent is checked as well.
    parent, reported_at, wait, unread = os.getppid(), monotonic(), INTERVAL, b""
    identity: list[str] = []
    leases: dict[str, list[Any]] = {}
    renewals: _Renewals | None = None
    while os.getppid() == parent:
        if select.select([0], [], [], wait)[0]:
            data = os.read(0, 65536)
            if not data:
                break
            *lines, unread = (unread + data).split(b"\n")
            for line in filter(None, lines):
                token, *report = json.loads(line)
                if not identity:
                    identity = [token, *report]
                elif report:
                    seqs = leases[token][3] if token in leases else set()
                    leases[token] = [*report[:3], seqs.union(report[3])]
                else:
                    leases.pop(token, None)
            reported_at, wait = monotonic(), INTERVAL
            if renewals is not None:
                renewals.end()
                renewals = None
        elif identity and monotonic() - reported_at >= STALLED_AFTER:
            if renewals is None:
                renewals = _Renewals(identity, leases, parent, reported_at)
            wait = renewals.run_round()
    if renewals is not None:
        renewals.close()
    os._exit(0)  # at once: the worker waits for it


if __name__ == "__main__":
    main()
