"""Carrying out the faults of a schedule, and the record of each fault with its victim and time, which is what explains
things afterwards (``explaining``)."""

from __future__ import annotations

import contextlib
import signal
import threading
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from time import monotonic

import psutil

from ..workload.ledger import QUEUES, WORDS
from .holding import DATABASE_ERRORS, Holder
from .processes import CeleryTree, Program, Tree
from .proxy import Proxy
from .scene import Scene
from .schedule import Fault

ALL_TREES = "*"
#: The session that holds rows: it hurts no worker, so it explains nothing.
HOLDER = "holder"
#: How long a session looks for rows that it could hold.
LOOK_FOR_ROWS_SECONDS = 3.0
#: How long a worker of Celery that is starting is waited for.
START_SECONDS = 60.0


@dataclass
class Event:
    """What happened, from when to when, and to which tree (or to everybody)."""

    kind: str
    victim: str
    began: datetime
    ended: datetime


class FaultInjector:
    """Injects the faults of a schedule."""

    def __init__(self, scene: Scene, trees: Sequence[Tree], producers: Sequence[Program], proxy: Proxy) -> None:
        self._scene = scene
        self._trees = list(trees)
        self._producers = list(producers)
        self._proxy = proxy
        self.injected: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        self.events: list[Event] = []

    def inject(self, fault: Fault, stopping: threading.Event) -> None:
        """Carry out one fault; one that finds no victim (all are restarting) is counted as missed."""
        began = datetime.now(UTC)
        method = getattr(self, f"_{fault.kind}")
        try:
            victims: list[str] = method(fault, stopping)
        except (*DATABASE_ERRORS, psutil.Error, ProcessLookupError):
            victims = []  # it ended by itself in this very moment, or the server is not back yet
        (self.injected if victims else self.missed)[fault.kind] += 1
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

    def _celery(self, fault: Fault, stopping: threading.Event) -> list[str]:
        """One that is starting is waited for: it takes longer than the gap between two faults."""
        trees = [tree for tree in self._trees if isinstance(tree, CeleryTree)]
        until = monotonic() + START_SECONDS
        while trees and monotonic() < until and not stopping.wait(0.05):
            tree = fault.pick(trees)
            if children := tree.children():
                if fault.how < 0.5:
                    fault.pick(children).kill()
                elif fault.how < 0.8:
                    tree.signal(signal.SIGKILL)
                else:
                    tree.kill_tree()
                return [tree.name]
        return []

    def _producer(self, fault: Fault, stopping: threading.Event) -> list[str]:
        return ["producer"] if fault.pick(self._producers).signal(signal.SIGKILL) else []

    def _poison_pill(self, fault: Fault, stopping: threading.Event) -> list[str]:
        """Sent as a foreign producer would: the columns of the wire format and nothing else."""
        how = ("exit", "SIGKILL", "SIGSEGV", "tree")[int(fault.how * 4)]
        label, table = list(QUEUES.items())[int(fault.victim * len(QUEUES))]
        key = f"pill-{uuid.uuid4()}"
        headers = '{"type": "tests.crash.workload.messages.Act", "content-type": "application/json"}'
        body = f'{{"key": "{key}", "die": "{how}"}}'.encode()
        with self._scene.server.connect(self._scene.name) as connection, connection.transaction():
            connection.execute(WORDS[self._scene.server.vendor].sent, (key, label, "poison_pill"))
            connection.execute(
                f"INSERT INTO {table} (id, headers, body) VALUES (%s, %s, %s)", (uuid.uuid4(), headers, body)
            )
        # Whom it will hit, and when, is in the starts file.
        return ["unknown"]

    # -- the database and the network -----------------------------------------------------------------------------

    def _backend(self, fault: Fault, stopping: threading.Event) -> list[str]:
        server, database = self._scene.server, self._scene.name
        living = server.sessions(database)
        if not living:
            return []
        first = int(fault.victim * len(living))
        chosen = living[first : first + 1 + int(fault.how * 3)]
        server.end_sessions(database, [session for session, _ in chosen])
        return sorted({name for _, name in chosen})

    def _server(self, fault: Fault, stopping: threading.Event) -> list[str]:
        self._scene.server.stop("immediate")
        stopping.wait(2 * fault.long)
        self._scene.server.start()
        return [ALL_TREES]

    def _savepoint(self, fault: Fault, stopping: threading.Event) -> list[str]:
        """Another session holds free rows, as a view does that receives under ATOMIC_REQUESTS. They are there, and
        no worker can have them; other faults follow meanwhile."""
        table = list(QUEUES.values())[int(fault.victim * len(QUEUES))]
        rows, seconds = 1 + int(20 * fault.how), 1 + 4 * fault.long
        holder = None
        try:
            holder = Holder(self._scene.server, self._scene.name)
            held = self._hold_free_rows(holder, table, rows, stopping)
        except DATABASE_ERRORS:
            held = 0
        if holder is None or not held:
            if holder is not None:
                holder.close()
            return []

        def release() -> None:
            stopping.wait(seconds)
            with contextlib.suppress(*DATABASE_ERRORS):  # the server may have failed meanwhile
                holder.release(committed=fault.how >= 0.5)
            holder.close()

        threading.Thread(target=release, name=HOLDER, daemon=True).start()
        return [HOLDER]

    @staticmethod
    def _hold_free_rows(holder: Holder, table: str, rows: int, stopping: threading.Event) -> int:
        """Lock at most so many rows as soon as there are any; returns how many."""
        until = monotonic() + LOOK_FOR_ROWS_SECONDS
        while monotonic() < until and not stopping.wait(0.005):
            if held := holder.hold_free(table, rows):
                return held
        return 0

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
