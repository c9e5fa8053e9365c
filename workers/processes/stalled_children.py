"""Keeps the heartbeat and the leases of a child that runs and executes no Python code, and ends it past a time limit.

A handler in C code that keeps the interpreter lock (a regular expression, a compression, a numeric library) stops every
thread of its process. Heartbeat and lease renewal stop with them: other workers would declare the process dead, and
handle its messages as well. The supervisor sees that the child exists and gives no sign of life (``LivenessBoard``).
Until the child runs again, the supervisor writes its heartbeats and renews its leases, from the shared slots; the
message is handled once.

States of a child: **running** -> no sign of life for ``STALLED_AFTER`` -> **stalled** -> a sign of life -> running, or
past the time limits of all its handlers -> **killed**, which counts as a crash of that process alone. A child that is
stopped (SIGSTOP, a debugger) is not kept alive: it does not work.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Protocol

from django.db import Error, connections, router, transaction

from queueapp.circuit_breaker import CircuitBreaker
from queueapp.conf import settings
from queueapp.consuming.registry import registered
from queueapp.models.delivery import Semantics
from queueapp.services.connection_timeouts import ResponseDeadline
from queueapp.services.service import Service
from queueapp.services.subscriber_rows import heartbeat_interval, heartbeat_unchanged, is_running
from queueapp.sql import queue_sql

from .crash_recovery import consumer_of
from .shared_memory import InFlightMessage, InFlightSlots, LeasedMessages

log = logging.getLogger("queueapp.workers")

#: Seconds between two checks, and without a sign of life after which a child counts as stalled.
INTERVAL, STALLED_AFTER = 0.2, 0.6
#: Seconds after which the log says that a child is stalled.
REPORT_AFTER = 2.0
#: How long to wait for a locked row, in milliseconds.
LOCK_WAIT_MS = 100


class Child(Protocol):
    """What is used of a child of the supervisor."""

    name: str
    slots: InFlightSlots | None

    @property
    def pid(self) -> int | None: ...

    def kill(self, reason: str) -> None: ...


class _Stall:
    """One stalled child."""

    def __init__(self, pid: int, since: float) -> None:
        self.pid, self.since = pid, since
        self.heartbeat_at = since + heartbeat_interval()
        #: When the leases of a token are renewed next.
        self.renew_at: dict[Any, float] = {}
        self.reported = False
        #: Time limit of the handlers in flight, in seconds; None: one has none. Empty: not looked up yet.
        self.limit: list[float | None] = []


class StalledChildren(Service):
    """Checks the children of one supervisor. ``age``: seconds since a child gave a sign of life; None: it has given
    none."""

    def __init__(
        self, queues: Sequence[Any], children: Callable[[], Sequence[Child]], age: Callable[[Any], float | None]
    ):
        super().__init__("stalled-children")
        self._queues, self._children, self._age = queues, children, age
        self._stalls: dict[int, _Stall] = {}
        self._breaker = CircuitBreaker("Keeping stalled processes alive", kind="stalled_children")

    def keeps(self, child: Child) -> bool:
        """Whether a child is stalled by a handler. Safe from any thread."""
        return child.pid in self._stalls and child.slots is not None and any(child.slots.in_flight())

    def serve(self) -> None:
        while not self.stopping:
            wait = INTERVAL
            try:
                self._check()
                self._breaker.success()
            except Error as error:
                connections.close_all()
                wait = min(1.0, self._breaker.failure(error))
            self.pause(wait)

    def _check(self) -> None:
        stalled: dict[int, _Stall] = {}
        for child in self._children():
            pid, age, slots = child.pid, self._age(child), child.slots
            if pid is None or age is None or slots is None or age < STALLED_AFTER or not is_running(pid):
                continue
            stall = stalled[pid] = self._stalls.get(pid) or _Stall(pid, monotonic() - age)
            self._keep(child, slots, stall)
        for pid, stall in self._stalls.items():
            if pid not in stalled and stall.reported:
                log.warning("Process %d executes Python code again after %.1f s.", pid, monotonic() - stall.since,
                            extra={"worker": pid})  # fmt: skip
        self._stalls = stalled

    def _keep(self, child: Child, slots: InFlightSlots, stall: _Stall) -> None:
        now = monotonic()
        for leased in slots.leased():
            queue = self._queues[leased.queue]
            if leased.lease_ms and queue.delivery.renew_leases:
                # A quarter of the period: the child renews a lease at half of it, so this is in time.
                period = leased.lease_ms / 1000
                if now >= stall.renew_at.setdefault(leased.token, stall.since + period / 4):
                    stall.renew_at[leased.token] = now + period / 4
                    _renew(queue, leased)
        if now >= stall.heartbeat_at:
            stall.heartbeat_at = now + heartbeat_interval()
            self._write_heartbeat(slots)
        in_flight = list(slots.in_flight())
        if not stall.reported and now - stall.since >= REPORT_AFTER and in_flight:
            stall.reported = True
            seqs = ", ".join(f"{self._queues[message.queue]._meta.label} seq {message.seq}" for message in in_flight)
            log.warning(
                "%s (%d) has executed no Python code for %.1f s: a handler keeps the interpreter lock in C code (in "
                "flight: %s). The supervisor renews its heartbeat and its leases.",
                child.name, stall.pid, now - stall.since, seqs, extra={"worker": stall.pid},
            )  # fmt: skip
        if in_flight:
            self._enforce_limit(child, stall, in_flight)

    def _write_heartbeat(self, slots: InFlightSlots) -> None:
        by_alias = defaultdict(list)
        for index, key in slots.subscribers():
            by_alias[router.db_for_write(self._queues[index])].append(key)
        for alias, keys in by_alias.items():
            with ResponseDeadline(connections[alias]):
                heartbeat_unchanged(alias, keys)

    def _enforce_limit(self, child: Child, stall: _Stall, in_flight: list[InFlightMessage]) -> None:
        """Kill a child in which every handler in flight exceeds its time limit. Which of several handlers keeps the
        lock is not known, so one without a limit prevents it."""
        if not stall.limit:
            limits = [_limit_of(self._queues[message.queue], message) for message in in_flight]
            stall.limit = [None if None in limits else max(limit for limit in limits if limit is not None)]
        limit = stall.limit[0]
        if limit is None:
            return
        if monotonic() > stall.since + limit + settings.STUCK_HANDLER_AFTER.total_seconds():
            child.kill(f"was killed by its supervisor: a handler exceeded its time limit of {limit:g} s in C code")


def _renew(queue: Any, leased: LeasedMessages) -> None:
    alias = router.db_for_write(queue)
    connection = connections[alias]
    with ResponseDeadline(connection), transaction.atomic(using=alias):
        queue_sql(queue, connection).acks.renew(
            connection, sorted(leased.seqs), leased.token, leased.lease_ms, LOCK_WAIT_MS
        )


def _limit_of(queue: Any, message: InFlightMessage) -> float | None:
    """The time limit of the handler of a message, in seconds; None: it has none."""
    limits = {_timeout(registration) for registration in registered.of(queue)}
    if len(limits) > 1 and queue.delivery.semantics is not Semantics.AT_MOST_ONCE:
        with ResponseDeadline(connections[router.db_for_write(queue)]):
            registration = consumer_of(queue, message)
        return _timeout(registration) if registration is not None else None
    return None if None in limits else max((limit for limit in limits if limit is not None), default=None)


def _timeout(registration: Any) -> float | None:
    timeout = registration.option("timeout") or settings.TIMEOUT
    return timeout.total_seconds() if timeout else None
