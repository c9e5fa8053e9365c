"""The HTTP pages of a process tree: liveness, readiness and metrics.

``/healthz`` is the liveness probe and queries no database: a worker survives an outage of its database, and a restart
would only add to the load. ``/readyz`` is the readiness probe, for deploys; it checks what ``manage.py healthcheck``
checks.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from django.db import connections, router

from queueapp.operations import statistics
from queueapp.operations.health import Bounds, Health, health
from queueapp.services.connection_timeouts import deadline_per_statement

from .http import Page, Reply, Request

if TYPE_CHECKING:
    import subprocess
    import uuid

    from .metrics import MetricsCollector

#: Seconds without a sign of life before a process counts as stuck, and seconds that it may take to start.
SILENT, STARTING = 30.0, 120.0
#: Pairs of bounds whose results are cached.
MAX_BOUNDS = 16


class Process(Protocol):
    """A process of the tree, over its restarts."""

    name: str
    process: subprocess.Popen[bytes] | None
    started_at: float

    @property
    def alive(self) -> bool: ...


class Tree(Protocol):
    """The part of a supervisor that the pages use."""

    id: uuid.UUID
    queues: list[Any]
    turned_at: float

    @property
    def children(self) -> Sequence[Process]: ...

    @property
    def stopping(self) -> bool: ...

    def silence_of(self, child: Any) -> float | None: ...

    def keeps_alive(self, child: Any) -> bool: ...


class Probes:
    """The pages of one supervisor."""

    def __init__(self, supervisor: Tree, metrics: MetricsCollector | None) -> None:
        self._supervisor = supervisor
        self._health: dict[Bounds, CachedQuery[Health]] = {}
        self._metrics: Any = self._registry(metrics) if metrics is not None else None

    @property
    def pages(self) -> Mapping[str, Page]:
        """The pages by path."""
        return {"/healthz": self.healthz, "/readyz": self.readyz, "/metrics": self.metrics}

    # -- liveness --------------------------------------------------------------------------------------------------

    def healthz(self, request: Request) -> Reply:
        """200, or 503 when a process of the tree is stuck."""
        processes, problems = self._processes(), []
        silent = monotonic() - self._supervisor.turned_at
        if silent > SILENT:
            problems.append(f"the supervisor is silent for {silent:.0f} s")
        for process in processes:
            # A dead process is replaced; one that runs without a sign of life is stuck, unless a handler in C code
            # keeps the interpreter lock: its supervisor keeps its leases, and holds it to its time limit.
            if (
                process["alive"]
                and not process["kept_alive"]
                and (process["silent"] if process["silent"] is not None else process["age"] - STARTING) > SILENT
            ):
                problems.append(f"{process['name']} ({process['process']}) is silent")
        return _report(problems, {"processes": processes})

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
                    "kept_alive": self._supervisor.keeps_alive(child),
                }
            )
        return found

    # -- readiness -----------------------------------------------------------------------------------------------

    def readyz(self, request: Request) -> Reply:
        """200, or 503: a process is missing, the database does not answer, a breaker is open, or a queue exceeds
        ``?max-age`` or ``?max-waiting``. 400 for another parameter or value."""
        try:
            bounds = _bounds(request.query)
        except ValueError:
            return Reply(
                400,
                b"Parameters: max-age (seconds) and max-waiting (messages), each from 0 to 1000000000.\n",
            )
        processes = self._processes()
        problems = [f"{process['name']} is not running" for process in processes if not process["alive"]]
        problems += [
            f"{process['name']} is starting" for process in processes if process["alive"] and process["silent"] is None
        ]
        if self._supervisor.stopping:
            problems.append("the tree is stopping")
        found = self._health_query(bounds)()
        problems += ["the database does not answer"] if found is None else found.problems
        return _report(problems, {"processes": processes} | (found.as_dict() if found is not None else {}))

    def _health_query(self, bounds: Bounds) -> CachedQuery[Health]:
        if bounds not in self._health:
            if len(self._health) >= MAX_BOUNDS:
                self._health.clear()
            self._health[bounds] = CachedQuery(lambda: self._read_health(bounds))
        return self._health[bounds]

    def _read_health(self, bounds: Bounds) -> Health:
        queues = self._supervisor.queues
        with ExitStack() as stack:
            for alias in {router.db_for_read(queue) or "default" for queue in queues}:
                stack.enter_context(deadline_per_statement(connections[alias]))
            return health(queues or None, supervisor=self._supervisor.id, bounds=bounds)

    # -- metrics --------------------------------------------------------------------------------------------------

    def metrics(self, request: Request) -> Reply:
        """The counters of all processes of the tree, and the statistics of their queues."""
        if self._metrics is None:
            return Reply(501, b"Not installed: pip install 'queueapp[prometheus]'\n")
        from prometheus_client.exposition import choose_encoder

        from queueapp.conf import settings
        from queueapp.metrics.permissions import UNAUTHORIZED, has_token

        if settings.METRICS_TOKEN and not has_token(request.headers.get("Authorization") or ""):
            return Reply(401, UNAUTHORIZED.encode(), headers={"WWW-Authenticate": 'Bearer realm="metrics"'})
        encode, content_type = choose_encoder(request.headers.get("Accept") or "")
        return Reply(200, encode(self._metrics), content_type)

    def _registry(self, metrics: MetricsCollector) -> Any:
        from prometheus_client import CollectorRegistry

        from queueapp.metrics.views import StatsCollector

        stats = CachedQuery(self._stats)
        registry = CollectorRegistry()
        registry.register(metrics)
        registry.register(StatsCollector(lambda: stats() or ()))
        return registry

    def _stats(self) -> list[statistics.QueueStats]:
        by_alias = defaultdict(list)
        for queue in self._supervisor.queues:
            by_alias[router.db_for_read(queue) or "default"].append(queue)
        found = []
        for alias, queues in by_alias.items():
            with deadline_per_statement(connections[alias]):
                found += statistics.queue_stats(queues)
        return found


def _bounds(query: Mapping[str, str]) -> Bounds:
    if not query.keys() <= {"max-age", "max-waiting"}:
        raise ValueError  # a mistyped bound would never be exceeded
    age = float(query["max-age"]) if "max-age" in query else None
    waiting = int(query["max-waiting"]) if "max-waiting" in query else None
    if (age is not None and not 0 <= age <= 1e9) or (waiting is not None and not 0 <= waiting <= 10**9):
        raise ValueError
    return Bounds(age=None if age is None else timedelta(seconds=age), waiting=waiting)


def _report(problems: list[str], more: dict[str, Any]) -> Reply:
    body = {"ok": not problems} | more | {"problems": problems, "ok": not problems}
    return Reply(503 if problems else 200, json.dumps(body).encode() + b"\n", "application/json")


log = logging.getLogger("queueapp.workers")
_T = TypeVar("_T")


class CachedQuery(Generic[_T]):
    """The result of ``read``, at most ``max_age`` seconds old.

    A caller waits for at most ``timeout`` seconds; None: there is no result by then. However many call, and however
    long the database takes, one thread reads, with one connection.
    """

    def __init__(self, read: Callable[[], _T], max_age: float = 2.0, timeout: float = 5.0) -> None:
        self._read, self._max_age, self._timeout = read, max_age, timeout
        self._cond = threading.Condition()
        self._result: _T | None = None
        self._read_at = float("-inf")
        self._reading = False

    def __call__(self) -> _T | None:
        """The result."""
        with self._cond:
            called = monotonic()
            if called - self._read_at > self._max_age:
                if not self._reading:
                    # The flag is set only once the thread runs: where no thread can be started now, a later call may.
                    # The thread waits for this lock before it reports its end.
                    threading.Thread(target=self._run, name="background-query", daemon=True).start()
                    self._reading = True
                self._cond.wait_for(lambda: not self._reading, self._timeout)
            return self._result if called - self._read_at <= self._max_age else None

    def _run(self) -> None:
        result: _T | None = None
        try:
            result = self._read()
        except Exception as error:
            log.warning("A background query failed: %s", error)
        finally:
            connections.close_all()
            with self._cond:
                if result is not None:
                    self._result, self._read_at = result, monotonic()
                self._reading = False
                self._cond.notify_all()
