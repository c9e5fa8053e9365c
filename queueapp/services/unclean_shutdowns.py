"""Subscribers of other process trees that may be dead: while there are some, their queues are received carefully.

A message that kills its whole tree leaves nobody behind to count it. The next life of the tree has to count it, so it has
to know that there was a life before: by the rows of subscribers that nobody signed off. But these rows look like those of
a living neighbour, and whoever is careful because of a neighbour handles one message after the other for no reason. So
each row of another tree that is there when a process begins is judged by what can be known of it at once:

* on this host, by its process: does it still exist, begun at the same time (numbers are used again, above all in a
  container that was restarted)? Then it lives. If not, it is dead: this is the usual case of a tree that starts again.
* on another host, by its heartbeat, which says that it is alive until shown otherwise. It is *late* once it has missed one
  and may be dead from then on. A tree that starts again under another host's name knows nothing better: a message that
  kills it each time is not counted for the lives that fit into two heartbeats, and then it is.

It is judged again with each look until it has beaten once or is gone: signed off, or buried, which is known. What died
after this process has begun is found by its time, ``alive_until``, as are the rows of the long dead. One that nobody
buries (no housekeeper may, or there is none) is a reason for as long as one that was buried: ``CRASH_TRACKING_PERIOD``, from when
this process first saw it. By its own clock and not by the row's time: each life of a tree has to be careful at first.
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


def life_of(process: int) -> str | None:
    """What tells this life of a process number of this host from others: boot and start time. None: there is no such
    process, '' where the system does not say."""
    if not (_PROC / "self" / "stat").exists():
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return None
        except OSError:
            pass  # somebody else's
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


class Strangers:
    """What one heartbeat knows about the subscribers of other trees."""

    def __init__(self, alias: str, supervisor: uuid.UUID) -> None:
        self._alias = alias
        self._supervisor = supervisor
        self._host = host_name()
        self._began = monotonic()
        #: Those of the first look that have not shown a sign of life since, with their last heartbeat. None: not looked yet.
        self._met: dict[uuid.UUID, datetime] | None = None
        #: The dead that were not buried yet, and when they were first seen.
        self._dead: dict[uuid.UUID, float] = {}

    @property
    def met(self) -> set[uuid.UUID]:
        """Those of which it is not certain yet that they live."""
        return set(self._met or ())

    def queues(self) -> set[str]:
        """The queues (labels) that have a subscriber which died, or may have died, and was not buried yet."""
        rows = Subscriber.objects.using(self._alias).exclude(supervisor=self._supervisor)
        if self._met is None:
            self._met = dict(rows.values_list("id", "heartbeat_at"))
        elif monotonic() - self._began >= settings.DEAD_AFTER.total_seconds():
            self._met = {}  # those that died are found by their time
        now = monotonic()
        lapsed = list(rows.filter(alive_until__lt=Now()).values_list("id", "queue"))
        self._dead = {key: self._dead.get(key, now) for key, _ in lapsed}
        period = settings.CRASH_TRACKING_PERIOD.total_seconds()
        dead = {queue for key, queue in lapsed if now - self._dead[key] < period}
        return dead | self._suspected(rows) if self._met else dead

    def _suspected(self, rows: Any) -> set[str]:
        met = self._met or {}
        late = Q(heartbeat_at__lt=Now() - 2 * settings.HEARTBEAT_INTERVAL)
        seen = rows.filter(pk__in=list(met)).annotate(late=late)
        silent = [row for row in seen if row.heartbeat_at == met[row.pk]]
        self._met = {row.pk: row.heartbeat_at for row in silent}
        return {row.queue for row in silent if self._may_be_dead(row)}

    def _may_be_dead(self, row: Any) -> bool:
        if row.host != self._host:
            return bool(row.late)
        life = life_of(row.process)
        # Of a version that did not say, or on a system that does not: only a heartbeat proves anything.
        return not life or life != row.life
