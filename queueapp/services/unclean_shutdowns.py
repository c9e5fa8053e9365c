"""Subscribers of other process trees that may have died: while there are some, their queues are received with crash
tracking.

A message that kills its whole tree leaves no process to count it. The next tree has to count it, so it has to know that
there was a previous run: by rows of subscribers that did not deregister. But such a row looks like that of a living
neighbour, and crash tracking because of a neighbour handles one message after the other for no reason. So each row of
another tree that exists when a process begins is judged by what can be known at once:

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

import os
import socket
import uuid
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import Any

from django.db.models import Q

from ..conf import settings
from ..models import Now, Subscriber

_PROC = Path("/proc")


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
        # After the name, which may hold anything: state, then 18 more fields, then the start in ticks since the boot.
        fields = (_PROC / str(process) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        boot = (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"


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
