"""The rows that say that a process is alive: the columns that every kind of process writes, and what the rows of other
process trees say of their end.

While there are subscribers of other trees that may have died (``PreviousRuns``), their queues are received with crash
tracking. A message that kills its whole tree leaves no process to count it. The next tree has to count it, so it has to
know that there was a previous run: by rows of subscribers that did not deregister. But such a row looks like that of a
living neighbour, and crash tracking because of a neighbour handles one message after the other for no reason. So each
row of another tree that exists when a process begins is judged by what can be known at once:

* on this host, by its process: does it still exist, with the same start time (process ids are reused, above all in a
  container that was restarted)? Then it lives. If not, it is dead: the usual case of a tree that starts again.
* on another host, by its heartbeat, which counts as alive until shown otherwise. It is *late* once it has missed one
  and may be dead from then on. A tree that starts again under another host name knows no better: a message that kills
  it each time is not counted for the runs that fit into two heartbeats, and then it is.

A row is judged again at each check until it has shown a heartbeat or is gone: deregistered, or declared dead, which is
then known. A subscriber that dies after this process has begun is found by its time, ``alive_until``, as are the rows
of the long dead. A row that no process deletes (none is permitted to, or none runs maintenance) counts for as long as
one that was deleted: ``CRASH_TRACKING_PERIOD``, from when this process first saw it. By its own clock and not by the
row's time: each run of a tree has to track crashes at first.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import Any

from django.db import Error, connections
from django.db.models import Q

from ..circuit_breaker import Breaker, BreakerReport, CircuitBreaker
from ..conf import settings
from ..models import Now, Subscriber
from ..version import VERSION
from .connection_timeouts import ResponseDeadline
from .service import Service

#: Characters of an error in a row.
MAX_ERROR_LENGTH = 500


def liveness_columns() -> dict[str, Any]:
    """The columns of every heartbeat."""
    return {"heartbeat_at": Now(), "alive_until": Now() + settings.DEAD_AFTER}


def process_columns(process: int | None = None) -> dict[str, Any]:
    """The columns that identify this process, or another one of this host."""
    process = process or os.getpid()
    return {
        "host": host_name(),
        "process": process,
        "process_start": process_start_id(process) or "",
        "version": version(),
    }


def heartbeat(
    alias: str,
    subscriber: uuid.UUID,
    queue: Any,
    supervisor: uuid.UUID,
    changes: Mapping[str, Any],
    first_columns: Callable[[], Mapping[str, Any]],
    process: int | None = None,
) -> bool:
    """Write a subscriber's heartbeat and what has changed.

    False: its row did not exist, because this is the first heartbeat, or because the process was declared dead and its
    leases were released. The row is then written anew, with ``first_columns``. ``process``: the subscriber's, where it
    is not this one.
    """
    rows = Subscriber.objects.using(alias)
    if rows.filter(pk=subscriber).update(**liveness_columns(), **changes):
        return True
    rows.create(
        id=subscriber,
        queue=queue._meta.label,
        table=queue._meta.db_table,
        supervisor=supervisor,
        **process_columns(process),
        **first_columns(),
        **liveness_columns(),
        **changes,
    )
    return False


def heartbeat_unchanged(alias: str, subscribers: Sequence[uuid.UUID]) -> bool:
    """Write the heartbeats of subscribers whose other columns have not changed. False: at least one has no row."""
    rows = Subscriber.objects.using(alias).filter(pk__in=subscribers)
    return rows.update(**liveness_columns()) == len(subscribers)


def heartbeat_interval() -> float:
    """Seconds between two heartbeats that one process writes in place of another, to keep it alive."""
    return min(settings.HEARTBEAT_INTERVAL.total_seconds(), settings.DEAD_AFTER.total_seconds() / 4)


def resident_bytes() -> int | None:
    """The memory of this process, rounded to 8 MiB so that a row does not change all the time; None: unknown."""
    try:
        with open("/proc/self/statm", "rb") as file:
            pages = int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    step = 8 * 1024 * 1024
    return -(-pages * os.sysconf("SC_PAGE_SIZE") // step) * step


def version() -> str:
    """The version of this process, as its rows name it."""
    return os.environ.get("QUEUEAPP_WORKER_VERSION", VERSION)[:64]


def breakers_json(reports: Iterable[BreakerReport]) -> str:
    """Reports of breakers as their column holds them; '' where all are closed."""
    found = [report | {"error": report["error"][:MAX_ERROR_LENGTH]} for report in reports]
    return json.dumps(found) if found else ""


# -- the heartbeat of a process that runs the dispatcher, maintenance, or both
# -------------------------------------------
#
# A subscriber row for each says that it is alive and which of its breakers are not closed. It holds no leases: the row
# of a dead one is simply deleted.


log = logging.getLogger("queueapp.workers")


class ServiceHeartbeat(Service):
    """Writes the rows of one database. ``breakers``: those of each of ``NO_QUEUES`` that this process runs."""

    def __init__(self, alias: str, breakers: Mapping[str, Sequence[Breaker]], supervisor: uuid.UUID) -> None:
        super().__init__(f"service-heartbeat-{alias}")
        self.alias = alias
        self.breakers = {name: (uuid.uuid4(), process_breakers) for name, process_breakers in breakers.items()}
        self._supervisor = supervisor
        self.breaker = CircuitBreaker(f"Heartbeat of services in {alias}", kind="service_heartbeat", subject=alias)
        self._written: dict[str, str] | None = None

    def serve(self) -> None:
        while not self.stopping:
            wait = settings.HEARTBEAT_INTERVAL.total_seconds()
            try:
                with ResponseDeadline(connections[self.alias]):
                    self._write()
                self.breaker.success()
            except Error as error:
                connections[self.alias].close()
                wait = self.breaker.failure(error)
            self.pause(wait)
        try:
            with ResponseDeadline(connections[self.alias]):
                Subscriber.objects.using(self.alias).filter(pk__in=[key for key, _ in self.breakers.values()]).delete()
        except Error as error:
            log.info(
                "%s could not deregister from %r; other processes see it as dead in %.0f s: %s",
                " and ".join(self.breakers), self.alias, settings.DEAD_AFTER.total_seconds(), error,
            )  # fmt: skip

    def _write(self) -> None:
        columns = {name: breakers_json(_reports(breakers)) for name, (_, breakers) in self.breakers.items()}
        keys = [key for key, _ in self.breakers.values()]
        # One statement for all rows that have not changed.
        if self._written == columns and heartbeat_unchanged(self.alias, keys):
            return
        rows = Subscriber.objects.using(self.alias)
        for name, breakers in columns.items():
            key, _ = self.breakers[name]
            if not rows.filter(pk=key).update(**liveness_columns(), breakers=breakers):
                rows.create(
                    id=key, queue=name, supervisor=self._supervisor, **process_columns(), **liveness_columns(),
                    breakers=breakers,
                )  # fmt: skip
        self._written = columns


def _reports(breakers: Sequence[Breaker]) -> list[BreakerReport]:
    return [report for breaker in breakers if (report := breaker.report()) is not None]


_PROC = Path("/proc")


def _stat(process: int) -> list[str]:
    """What Linux says of a process, after its name, which may hold anything: the state, 18 more fields, and the start
    in ticks since the boot. Raises OSError if there is none."""
    return (_PROC / str(process) / "stat").read_text(errors="replace").rpartition(")")[2].split()


def process_start_id(process: int) -> str | None:
    """Boot id and start time of a process of this host, which tell it from others with the same process id.

    None: there is no such process. '': the system does not say.
    """
    if not (_PROC / "self" / "stat").exists():
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return None
        except OSError:
            pass  # it exists and belongs to another user
        return ""
    try:
        fields = _stat(process)
        boot = (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"


def is_running(process: int) -> bool:
    """Whether a process of this host exists and is not stopped; true where the system does not say."""
    try:
        state = _stat(process)[0]
    except (OSError, IndexError):
        return not (_PROC / "self" / "stat").exists()
    return state not in "TtZX"


def host_name() -> str:
    """This host, as the rows of subscribers name it."""
    return socket.gethostname()[:255]


class PreviousRuns:
    """What one heartbeat knows about the subscribers of other trees."""

    def __init__(self, alias: str, supervisor: uuid.UUID) -> None:
        self._alias = alias
        self._supervisor = supervisor
        self._host = host_name()
        self._began = monotonic()
        #: Subscribers of the first check without a heartbeat since, and their last heartbeat. None: not checked yet.
        self._unconfirmed: dict[uuid.UUID, datetime] | None = None
        #: Dead subscribers whose rows still exist, and when they were first seen.
        self._dead: dict[uuid.UUID, float] = {}

    @property
    def unconfirmed(self) -> set[uuid.UUID]:
        """Subscribers that are not known to live."""
        return set(self._unconfirmed or ())

    def queues(self) -> set[str]:
        """The queues (labels) with a subscriber that has died, or may have died, and whose row still exists."""
        rows = Subscriber.objects.using(self._alias).exclude(supervisor=self._supervisor)
        if self._unconfirmed is None:
            self._unconfirmed = dict(rows.values_list("id", "heartbeat_at"))
        elif monotonic() - self._began >= settings.DEAD_AFTER.total_seconds():
            self._unconfirmed = {}  # those that died are found by their time
        now = monotonic()
        expired = list(rows.filter(alive_until__lt=Now()).values_list("id", "queue"))
        self._dead = {key: self._dead.get(key, now) for key, _ in expired}
        period = settings.CRASH_TRACKING_PERIOD.total_seconds()
        dead = {queue for key, queue in expired if now - self._dead[key] < period}
        return dead | self._maybe_dead(rows) if self._unconfirmed else dead

    def _maybe_dead(self, rows: Any) -> set[str]:
        unconfirmed = self._unconfirmed or {}
        late = Q(heartbeat_at__lt=Now() - 2 * settings.HEARTBEAT_INTERVAL)
        existing = rows.filter(pk__in=list(unconfirmed)).annotate(late=late)
        silent = [row for row in existing if row.heartbeat_at == unconfirmed[row.pk]]
        self._unconfirmed = {row.pk: row.heartbeat_at for row in silent}
        return {row.queue for row in silent if self._may_be_dead(row)}

    def _may_be_dead(self, row: Any) -> bool:
        if row.host != self._host:
            return bool(row.late)
        start_id = process_start_id(row.process)
        # A version or a system that does not say: only a heartbeat proves anything.
        return not start_id or start_id != row.process_start
