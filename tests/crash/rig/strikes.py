"""Carrying out the faults of a schedule, and the record of what was done to whom and when.

The record is what explains a duplicate effect of an AT_LEAST_ONCE message afterwards: something must have happened to
the worker that made the first one, between its handler and its ack.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import psutil
import psycopg

from ..workload.ledger import QUEUES
from .processes import Program, Tree
from .proxy import Proxy
from .scene import Scene
from .schedule import Fault

EVERYBODY = "*"


@dataclass
class Event:
    """What happened, from when to when, and to which tree (or to everybody)."""

    kind: str
    whom: str
    began: datetime
    ended: datetime


class Striker:
    """Strikes as the schedule says."""

    def __init__(self, scene: Scene, trees: Sequence[Tree], producers: Sequence[Program], proxy: Proxy) -> None:
        self._scene = scene
        self._trees = list(trees)
        self._producers = list(producers)
        self._proxy = proxy
        self.struck: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        self.events: list[Event] = []

    def strike(self, fault: Fault, stopping: threading.Event) -> None:
        """Carry out one fault; one that finds no victim (all are restarting) is counted as missed."""
        began = datetime.now(UTC)
        method = getattr(self, f"_{fault.kind}")
        try:
            victims: list[str] = method(fault, stopping)
        except (psycopg.Error, psutil.Error, ProcessLookupError):
            victims = []  # it ended by itself in this very moment, or the server is not back yet
        (self.struck if victims else self.missed)[fault.kind] += 1
        self.events += [Event(fault.kind, victim, began, datetime.now(UTC)) for victim in victims]

    # -- processes ------------------------------------------------------------------------------------------------

    def _kill_one(self, fault: Fault, role: str) -> list[str]:
        living = [(tree, child) for tree in self._trees for child in tree.children(role)]
        if not living:
            return []
        tree, child = fault.pick(living)
        child.kill()
        return [tree.name]

    def _child(self, fault: Fault, stopping: threading.Event) -> list[str]:
        return self._kill_one(fault, "worker")

    def _dispatcher(self, fault: Fault, stopping: threading.Event) -> list[str]:
        return self._kill_one(fault, "dispatcher")

    def _supervisor(self, fault: Fault, stopping: threading.Event) -> list[str]:
        tree = fault.pick(self._trees)
        return [tree.name] if tree.signal(signal.SIGKILL) else []

    def _deploy(self, fault: Fault, stopping: threading.Event) -> list[str]:
        tree = fault.pick(self._trees)
        return [tree.name] if tree.signal(signal.SIGTERM) else []

    def _tree(self, fault: Fault, stopping: threading.Event) -> list[str]:
        tree = fault.pick(self._trees)
        return [tree.name] if tree.kill_tree() else []

    def _producer(self, fault: Fault, stopping: threading.Event) -> list[str]:
        return ["producer"] if fault.pick(self._producers).signal(signal.SIGKILL) else []

    def _killer(self, fault: Fault, stopping: threading.Event) -> list[str]:
        """Sent as a foreign producer would: the columns of the wire format and nothing else."""
        how = ("exit", "SIGKILL", "SIGSEGV", "tree")[int(fault.how * 4)]
        label, table = list(QUEUES.items())[int(fault.whom * len(QUEUES))]
        key = f"killer-{uuid.uuid4()}"
        headers = '{"type": "tests.crash.workload.messages.Act", "content-type": "application/json"}'
        body = f'{{"key": "{key}", "die": "{how}"}}'.encode()
        with self._scene.server.connect(self._scene.name) as connection, connection.transaction():
            connection.execute("INSERT INTO crash_sent (key, queue, how) VALUES (%s, %s, 'killer')", (key, label))
            connection.execute(
                f"INSERT INTO {table} (id, headers, body) VALUES (%s, %s, %s)", (uuid.uuid4(), headers, body)
            )
        # Whom it will hit, and when, is in the starts file.
        return ["somebody"]

    # -- the database and the network -----------------------------------------------------------------------------

    def _backend(self, fault: Fault, stopping: threading.Event) -> list[str]:
        living = self._scene.backends()
        if not living:
            return []
        first = int(fault.whom * len(living))
        chosen = living[first : first + 1 + int(fault.how * 3)]
        self._scene.execute("SELECT pg_terminate_backend(pid) FROM unnest(%s::int[]) pid", [row[0] for row in chosen])
        return sorted({row[1] for row in chosen})

    def _server(self, fault: Fault, stopping: threading.Event) -> list[str]:
        self._scene.server.stop("immediate")
        stopping.wait(2 * fault.long)
        self._scene.server.start()
        return [EVERYBODY]

    def _stall(self, fault: Fault, stopping: threading.Event) -> list[str]:
        to_server, to_client = ((True, True), (True, False), (False, True))[int(fault.how * 3)]
        self._proxy.stall(to_server=to_server, to_client=to_client)
        stopping.wait(1 + 6 * fault.long)
        self._proxy.resume()
        return self._behind_proxy()

    def _cut(self, fault: Fault, stopping: threading.Event) -> list[str]:
        return self._behind_proxy() if self._proxy.cut() else []

    def _behind_proxy(self) -> list[str]:
        port = f":{self._proxy.port}/"
        return [
            program.name for program in [*self._trees, *self._producers] if port in program.environment["DATABASE_URL"]
        ]


def unexplained(scene: Scene, duplicates: Sequence[str], events: Sequence[Event], lease: timedelta) -> list[str]:
    """The duplicate keys of AT_LEAST_ONCE messages whose first effect's worker came to no harm before the next one.

    An event counts from when it began until one lease period after its end: what a struck worker held comes back, and
    what was stalled arrives, within that time.
    """
    killers = _processes_of_killers(scene)
    left = []
    for key in duplicates:
        rows = scene.execute("SELECT worker, process, at FROM crash_effect WHERE key = %s ORDER BY number", key)
        for (worker, process, at), (_, _, next_at) in itertools.pairwise(rows):
            harmed = process in killers or any(
                event.whom in (worker, EVERYBODY) and event.began <= next_at and event.ended + lease >= at
                for event in events
            )
            if not harmed:
                left.append(key)
                break
    return left


def _processes_of_killers(scene: Scene) -> set[int]:
    """Ids of the processes that a handler killed from within."""
    found: set[int] = set()
    with contextlib.suppress(FileNotFoundError):
        for line in scene.starts_file.read_text().splitlines():
            fields: list[Any] = line.rsplit(" ", 3)
            if fields[0].startswith("killer-"):
                found.add(int(fields[3]))
    return found
