"""Compares the connections that worker processes need with what their pool and their database allow.

The formula is that of docs/howto/deployment.md. A process that gets too few connections does not fail: its receivers
wait for each other, which looks like a slow database. So ``runqueueworker`` reports a shortfall at its start, and
``manage.py check`` before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from django.db import connections

from .. import registry
from ..conf import settings
from ..models.delivery import Semantics
from ..sql import backend_of

_FEWER = "use fewer --processes, a lower --concurrency, or trees for some queues only"


class WorkerConnections(NamedTuple):
    """The most connections that one worker process has to a database, by what uses them."""

    pumps: int
    receivers: int
    services: int

    @property
    def total(self) -> int:
        return self.pumps + self.receivers + self.services

    @property
    def minimum(self) -> int:
        """With fewer no message is handled."""
        return self.pumps + 1 + self.services

    def __str__(self) -> str:
        pumps = f"{self.pumps} for the pump{'s' if self.pumps != 1 else ''}"
        return f"{pumps}, {self.receivers} for receivers, {self.services} for services"


class Shortfall(NamedTuple):
    """Fewer connections than workers need. ``fatal``: no message could be handled."""

    problem: str
    remedy: str
    fatal: bool = False


def receivers_of(queue: Any, concurrency: int | None) -> int:
    """The receivers of a queue in one process. ``concurrency``: the value of the command line."""
    receivers: int = concurrency or queue.delivery.concurrency or settings.CONCURRENCY
    return receivers


def of_worker(queues: Sequence[Any], concurrency: int | None = None) -> WorkerConnections:
    """What one worker process needs for these queues of one database: heartbeat, lease renewal and listener beside
    pumps and receivers."""
    leases = any(queue.delivery.semantics is not Semantics.AT_MOST_ONCE for queue in queues)
    receivers = sum(receivers_of(queue, concurrency) for queue in queues)
    return WorkerConnections(len(queues), receivers, 1 + leases + bool(settings.NOTIFY))


def of_tree(
    queues: Sequence[Any], processes: int = 1, concurrency: int | None = None, *, dispatcher: bool = True,
    maintenance: bool = True,
) -> int:  # fmt: skip
    """The most connections that one ``runqueueworker`` has to the database of these queues."""
    return processes * of_worker(queues, concurrency).total + of_services(dispatcher, maintenance) + 1


def of_services(dispatcher: bool, maintenance: bool) -> int:
    """The most connections that the process has to a database that dispatches or runs maintenance: one for each of its
    services."""
    journal = bool(maintenance and settings.JOURNAL)
    services = 0
    if dispatcher or maintenance:
        services += 1 + dispatcher + bool(settings.NOTIFY and (dispatcher or journal))
    if maintenance:
        evaluation = any(queue.delivery.has_expressions for queue in registry.queues)
        services += 1 + evaluation + bool(settings.ALERTS) + journal
    return services


def pool_shortfall(alias: str, queues: Sequence[Any], concurrency: int | None = None) -> Shortfall | None:
    """Whether the connection pool of a database (``OPTIONS["pool"]``) is smaller than one worker process needs. Does
    not connect."""
    size = pool_size(alias)
    needed = of_worker(queues, concurrency)
    if size is None or size >= needed.total:
        return None
    problem = (
        f"the connection pool of database {alias!r} has at most {size} connections (OPTIONS['pool']), and a worker "
        f"process needs {needed.total}: {needed}"
    )
    remedy = f"set its max_size to {needed.total} or more, lower --concurrency, or remove the pool"
    if size < needed.minimum:
        return Shortfall(problem, f"at least {needed.minimum} are required: {remedy}", fatal=True)
    return Shortfall(f"{problem}; receivers will wait for each other", remedy)


def services_shortfall(alias: str, *, dispatcher: bool = True, maintenance: bool = True) -> Shortfall | None:
    """Whether the connection pool of a database is smaller than the process needs that dispatches or runs maintenance.
    Does not connect."""
    size = pool_size(alias)
    needed = of_services(dispatcher, maintenance)
    if size is None or size >= needed:
        return None
    return Shortfall(
        f"the connection pool of database {alias!r} has at most {size} connections (OPTIONS['pool']), and the "
        f"dispatcher process needs {needed}, one for each of its services; delayed or expired messages may stay",
        f"set its max_size to {needed} or more, or remove the pool",
    )


def server_shortfalls(alias: str, needed: int, *, free: bool = False) -> list[Shortfall]:
    """Which limits of the server, the database or its user are below the connections that a tree of processes needs.
    ``free``: connections that others have now are not available to it. Behind a pooler these are the pooler's own."""
    connection = connections[alias]
    found = []
    for limit in backend_of(connection).schema.connection_limits(connection):
        used = limit.used if free else 0
        if needed <= limit.accepted - used:
            continue
        in_use = f", of which {used} are in use now" if used else ""
        problem = (
            f"{limit.subject} {limit.accepted} connections ({limit.setting}){in_use}, and this process tree needs up "
            f"to {needed} to database {alias!r}"
        )
        found.append(Shortfall(problem, f"{limit.remedy}, or {_FEWER}"))
    return found


def pool_size(alias: str) -> int | None:
    """The largest size of the connection pool of a database as ``psycopg_pool`` reads its options; None: it has
    none."""
    pool = connections[alias].settings_dict.get("OPTIONS", {}).get("pool")
    if not pool:
        return None
    options = pool if isinstance(pool, dict) else {}
    size: int = options.get("max_size") or options.get("min_size", 4)
    return size
