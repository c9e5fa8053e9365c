"""The pages of a tree: whether it lives, whether it is ready, and its metrics.

``/healthz`` is for whoever would kill it, and asks no database: a worker survives an outage of that by itself, and a restart would
only add to the load. ``/readyz`` is for whoever waits for it, during a deploy: what ``manage.py healthcheck`` looks at.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from django.db import connections, router

from queueapp.operations import statistics
from queueapp.operations.health import Bounds, Health, health
from queueapp.services.connection_timeouts import deadline_per_statement

from .background_query import Asked
from .http import Page, Reply, Request

if TYPE_CHECKING:
    import subprocess
    import uuid

    from .measured import Measured

#: Seconds that a process may be silent, and that it may take to start.
SILENT, STARTING = 30.0, 120.0
#: Pairs of bounds that are remembered.
MOST_BOUNDS = 16


class Process(Protocol):
    """A process of the tree, over its restarts."""

    name: str
    process: subprocess.Popen[bytes] | None
    started_at: float

    @property
    def alive(self) -> bool: ...


class Tree(Protocol):
    """What is asked of a supervisor."""

    id: uuid.UUID
    queues: list[Any]
    turned_at: float

    @property
    def children(self) -> Sequence[Process]: ...

    @property
    def stopping(self) -> bool: ...

    def silence_of(self, child: Any) -> float | None: ...


class Probes:
    """The pages of one supervisor."""

    def __init__(self, supervisor: Tree, measured: Measured | None) -> None:
        self._supervisor = supervisor
        self._measured = measured
        self._health: dict[Bounds, Asked[Health]] = {}
        self._metrics: Any = self._registry(measured) if measured is not None else None

    @property
    def pages(self) -> Mapping[str, Page]:
        """By path."""
        return {"/healthz": self.healthz, "/readyz": self.readyz, "/metrics": self.metrics}

    # -- whether it lives -----------------------------------------------------------------------------------------

    def healthz(self, request: Request) -> Reply:
        """200, or 503 where a process of the tree does nothing any more."""
        processes, unwell = self._processes(), []
        silent = monotonic() - self._supervisor.turned_at
        if silent > SILENT:
            unwell.append(f"the supervisor is silent for {silent:.0f} s")
        for one in processes:
            # One that died is replaced; whoever is not seen for long although it runs is stuck.
            if one["alive"] and (one["silent"] if one["silent"] is not None else one["age"] - STARTING) > SILENT:
                unwell.append(f"{one['name']} ({one['process']}) is silent")
        return _told(unwell, {"processes": processes})

    def _processes(self) -> list[dict[str, Any]]:
        now, found = monotonic(), []
        for child in self._supervisor.children:
            found.append(
                {
                    "name": child.name,
                    "process": child.process.pid if child.process is not None else None,
                    "alive": child.alive,
                    "age": round(now - child.started_at, 1),
                    "silent": self._supervisor.silence_of(child),
                }
            )
        return found

    # -- whether it is ready --------------------------------------------------------------------------------------

    def readyz(self, request: Request) -> Reply:
        """200, or 503: a process is missing, the database cannot be asked, a breaker is open, a queue is behind ``?max-age`` or
        ``?max-waiting``; 400 for bounds that are none."""
        try:
            bounds = _bounds(request.query)
        except ValueError:
            return Reply(
                400,
                b"There are max-age, a number of seconds, and max-waiting, one of messages; from 0 to 1000000000.\n",
            )
        processes = self._processes()
        unwell = [f"{one['name']} is not running" for one in processes if not one["alive"]]
        unwell += [f"{one['name']} is starting" for one in processes if one["alive"] and one["silent"] is None]
        if self._supervisor.stopping:
            unwell.append("it is stopping")
        found = self._asked(bounds)()
        unwell += ["the database does not answer"] if found is None else found.unwell
        return _told(unwell, {"processes": processes} | (found.as_dict() if found is not None else {}))

    def _asked(self, bounds: Bounds) -> Asked[Health]:
        if bounds not in self._health:
            if len(self._health) >= MOST_BOUNDS:
                self._health.clear()
            self._health[bounds] = Asked(lambda: self._look(bounds))
        return self._health[bounds]

    def _look(self, bounds: Bounds) -> Health:
        queues = self._supervisor.queues
        with ExitStack() as stack:
            for alias in {router.db_for_read(queue) or "default" for queue in queues}:
                stack.enter_context(deadline_per_statement(connections[alias]))
            return health(queues or None, supervisor=self._supervisor.id, bounds=bounds)

    # -- metrics --------------------------------------------------------------------------------------------------

    def metrics(self, request: Request) -> Reply:
        """What all processes have counted, and the figures of their queues."""
        if self._metrics is None:
            return Reply(501, b"Not installed: pip install 'queueapp[prometheus]'\n")
        from prometheus_client.exposition import choose_encoder

        from queueapp.conf import settings
        from queueapp.metrics.permissions import may_read

        if settings.METRICS_TOKEN and not may_read(request.headers.get("Authorization") or ""):
            return Reply(401, b"not for you\n", headers={"WWW-Authenticate": 'Bearer realm="metrics"'})
        encode, content_type = choose_encoder(request.headers.get("Accept") or "")
        return Reply(200, encode(self._metrics), content_type)

    def _registry(self, measured: Measured) -> Any:
        from prometheus_client import CollectorRegistry

        from queueapp.metrics.figures import FiguresCollector

        figures = Asked(self._figures)
        registry = CollectorRegistry()
        registry.register(measured)
        registry.register(FiguresCollector(lambda: figures() or ()))
        return registry

    def _figures(self) -> list[statistics.QueueFigures]:
        by_alias = defaultdict(list)
        for queue in self._supervisor.queues:
            by_alias[router.db_for_read(queue) or "default"].append(queue)
        found = []
        for alias, queues in by_alias.items():
            with deadline_per_statement(connections[alias]):
                found += statistics.figures(queues)
        return found


def _bounds(query: Mapping[str, str]) -> Bounds:
    if not query.keys() <= {"max-age", "max-waiting"}:
        raise ValueError  # a bound that nobody looks at would be well for ever
    age = float(query["max-age"]) if "max-age" in query else None
    waiting = int(query["max-waiting"]) if "max-waiting" in query else None
    if (age is not None and not 0 <= age <= 1e9) or (waiting is not None and not 0 <= waiting <= 10**9):
        raise ValueError
    return Bounds(age=None if age is None else timedelta(seconds=age), waiting=waiting)


def _told(unwell: list[str], more: dict[str, Any]) -> Reply:
    body = {"healthy": not unwell} | more | {"unwell": unwell, "healthy": not unwell}
    return Reply(503 if unwell else 200, json.dumps(body).encode() + b"\n", "application/json")
