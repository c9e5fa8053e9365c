"""The background threads of a process that consumes: one agent per process and database, shared by all of its
connections.

The agent sends heartbeats, so that leases are released when the process dies; writes acks; renews leases; extends the
declared queues of its consumers and deletes expired ones; listens for notifications; and takes part in dispatching
delayed messages and in maintenance, for a project that has no other workers. It has threads of its own because a task
may block the main thread for hours, and a process that renews leases while a task blocks all threads
(``renewal_process``). A forked child has no agent.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, Protocol
from weakref import WeakSet

from django.db import Error, connections, router

from ... import delayed, notifier, registry
from ...circuit_breaker import Breaker, CircuitBreaker
from ...conf import settings
from ...consuming.registry import registered
from ...models import DISPATCHER, MAINTENANCE, QueueControl, Subscriber
from ...services.connection_timeouts import ConnectionWatchdog, ResponseDeadline
from ...services.delayed_dispatcher import DelayedDispatcher, Forwarder
from ...services.leader_election import Elector, role_name
from ...services.listener import Listener
from ...services.maintenance import AlertEvaluator, Maintenance
from ...services.service import Service, stop_all
from ...services.subscriber_rows import ServiceHeartbeat, breakers_json, heartbeat
from . import topology
from .in_flight import Leases
from .models import BrokerQueue
from .options import TransportOptions
from .renewal_process import RenewalProcess

log = logging.getLogger("queueapp")

LABEL = BrokerQueue._meta.label
#: Seconds between rounds of an idle agent; seconds that acks are collected; seconds that an agent without connections
#: stays.
IDLE_WAIT, ACK_DELAY, LINGER = 0.25, 0.02, 2.0
#: Seconds between two rounds of its maintenance: an idle worker sends few statements.
MAINTENANCE_INTERVAL = 5.0
#: Seconds between two deletions of expired queues; seconds until a consuming process takes part in the services.
QUEUE_EXPIRY_INTERVAL, SERVES_AFTER = 10.0, 1.0
#: Messages read ahead and not delivered for so many seconds are released.
STALE_AFTER = timedelta(seconds=1).total_seconds()


class ConnectionProtocol(Protocol):
    """A connection that consumes, as the agent uses it: a ``Transport``."""

    closed: bool
    acks: bool
    options: TransportOptions

    def queues(self) -> set[str]: ...
    def expiring_declarations(self) -> list[topology.Declaration]: ...
    def redeclare(self, declaration: topology.Declaration) -> None: ...
    def release_stale(self, before: float) -> None: ...
    def released(self, seqs: Sequence[int]) -> None: ...
    def notify(self) -> None: ...


class ProcessAgent(Service):
    """The agent's thread and the state that it maintains."""

    def __init__(self, alias: str) -> None:
        super().__init__(f"celery-{alias}")
        self.alias = alias
        self.leases = Leases(self.wake)
        self.transports: WeakSet[ConnectionProtocol] = WeakSet()
        #: Whether an operator has paused the queue.
        self.paused = False
        self._supervisor = uuid.uuid4()
        database = connections[alias].settings_dict["NAME"]
        self.renewal_process = RenewalProcess(alias, database, self._supervisor, self.leases)
        self._breaker = CircuitBreaker(f"Leases in {alias}", kind="leases", subject=alias)
        self.services: list[Service] = []
        self._listener = Listener(alias, self._on_notification)
        self.helpers: list[Service] = [ConnectionWatchdog(), *([self._listener] if settings.NOTIFY else [])]
        self._delayed_services: list[Service] = []
        self.consuming_since: float | None = None
        self._unused_since: float | None = None
        self._logged_error: type[Exception] | None = None
        self.next_beat = self._next_expiry = 0.0
        self.refreshed_at = float("-inf")
        self._has_row = False
        self._beats = 0

    # -- from outside ------------------------------------------------------------------------------------------------

    def register(self, transport: ConnectionProtocol) -> bool:
        """Add a connection that consumes. False: this agent is stopping, and another one is needed."""
        with _lock:
            if self.stopping:
                return False
            self.transports.add(transport)
            self._unused_since = None
        if not self.is_alive():
            self._keep_running(self.helpers)
            self.start()
        return True

    def consuming(self) -> list[ConnectionProtocol]:
        """The connections that consume, or did. A copy: other threads register connections meanwhile."""
        with _lock:
            return list(self.transports)

    @property
    def receives_notifications(self) -> bool:
        """Whether notifications arrive."""
        return self._listener.established.is_set()

    # -- the thread --------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        while not self.stopping:
            wait = IDLE_WAIT
            try:
                with ResponseDeadline(connections[self.alias]):
                    self._run_round()
                self._breaker.success()
                self._logged_error = None
            except Exception as error:
                # Any exception: nothing else in this process renews leases and writes acks, and nothing restarts a
                # Celery process whose agent has ended.
                if not isinstance(error, Error) and self._logged_error is not type(error):
                    self._logged_error = type(error)
                    log.exception(
                        "%s: a round of the process agent in %r failed; the agent continues.",
                        LABEL,
                        self.alias,
                    )
                connections[self.alias].close()
                # Short: leases have to be renewed in time once the database is back.
                wait = min(1.0, self._breaker.failure(error))
            if self._is_unused():
                break
            if self.pause(wait) and not self.stopping:
                time.sleep(ACK_DELAY)
        self._end()

    def _run_round(self) -> None:
        connection = connections[self.alias]
        now = monotonic()
        self.renewal_process.report()
        if self.leases.unwritten_since is not None:
            self.leases.flush(connection)
        self.leases.renew(connection)
        if self.leases.retry_releases(connection):
            notifier.sent(BrokerQueue, connection)
        for transport in self.consuming():
            transport.release_stale(now - STALE_AFTER)
        if now >= self.next_beat:
            self.next_beat = now + settings.HEARTBEAT_INTERVAL.total_seconds()
            self._beat()
            self._keep_running(self.helpers)  # after the heartbeat: a start that fails must not prevent it
            self.renewal_process.restart_if_ended()
        self._refresh(now)
        if now >= self._next_expiry:
            self._next_expiry = now + QUEUE_EXPIRY_INTERVAL
            for name in topology.delete_expired(self.alias):
                log.info("Queue %r was deleted: it was unused for its expiry time.", name, extra={"queue": name})
        self.run_services(now)

    def _beat(self) -> None:
        if self.consuming_since is None and not any(transport.acks for transport in self.consuming()):
            return  # it has no leases
        leases = self.leases
        queues = sorted({queue for transport in self.consuming() for queue in transport.queues()})
        columns = {
            "received": leases.received,
            "handled": leases.acked,
            "outstanding": leases.outstanding,
            "leases_lost": leases.lost,
            "breakers": breakers_json([report for report in (self._breaker.report(),) if report is not None]),
            "consumers": json.dumps([(queue, "") for queue in queues]),
        }
        if not heartbeat(self.alias, leases.owner, BrokerQueue, self._supervisor, columns, dict) and self._has_row:
            log.warning(
                "This process missed its heartbeats and was declared dead; messages that it had leased may run twice."
            )
        self._has_row = True
        self._beats += 1
        if self._beats % 2:
            self._read_control()

    def _read_control(self) -> None:
        row = QueueControl.objects.using(self.alias).filter(queue=BrokerQueue._meta.label)
        paused = bool(row.values_list("paused", flat=True).first())
        if paused != self.paused:
            self.paused = paused
            log.info("%s is %s.", BrokerQueue._meta.label, "paused" if paused else "resumed")
            self._wake_transports()

    def _refresh(self, now: float) -> None:
        """Extend the declared queues of the consumers, twice within the shortest of their expiry times. The shortest is
        computed each time: a consumer of a queue with a shorter one may have been added."""
        declared = [(transport, transport.expiring_declarations()) for transport in self.consuming()]
        times = [queue.expires_ms for _, queues in declared for queue in queues if queue.expires_ms is not None]
        shortest = min([60_000, *times])
        if now - self.refreshed_at < shortest / 2000:
            return
        self.refreshed_at = now
        for transport, queues in declared:
            missing = topology.extend(self.alias, queues)
            for queue in queues:
                if queue.name in missing:
                    transport.redeclare(queue)

    def run_services(self, now: float) -> None:
        """Take part in the services of the database, once this process has consumed for a while."""
        acking = [transport for transport in self.consuming() if transport.acks]
        if not acking:
            return
        if self.consuming_since is None:
            self.consuming_since = now
        if now - self.consuming_since < SERVES_AFTER or not any(transport.options.services for transport in acking):
            return
        if not self.services:
            self.services = self._create_services()
        self._keep_running(self.services)

    def _keep_running(self, services: Sequence[Service]) -> None:
        """Start the services that do not run: at first, and after one has ended unexpectedly."""
        for service in services:
            if not service.is_alive() and not self.stopping:
                service.start()

    def _create_services(self) -> list[Service]:
        alias, holder = self.alias, uuid.uuid5(self._supervisor, self.alias)
        # Those that a worker's maintenance has, which this one may be elected in place of.
        queues = [
            queue for queue in registry.queues if registered.maintains(queue) and router.db_for_write(queue) == alias
        ]
        if BrokerQueue not in queues:
            queues.append(BrokerQueue)  # the URL names this database, even if a router names another
        forwarders = [Forwarder(alias, target, holder) for target in sorted(delayed.addresses(alias))]
        movers = [DelayedDispatcher(alias, holder), *forwarders]
        maintenance = Maintenance(alias, queues, Elector(alias, role_name("maintenance"), holder), MAINTENANCE_INTERVAL)
        breakers: dict[str, list[Breaker]] = {
            DISPATCHER: [breaker for mover in movers for breaker in mover.breakers],
            MAINTENANCE: [maintenance.breaker],
        }
        self._delayed_services = [*movers]
        # The evaluator of a worker's maintenance does nothing while this one leads.
        alerts = [AlertEvaluator(alias, queues, maintenance)] if settings.ALERTS else []
        breakers[MAINTENANCE] += [evaluator.breaker for evaluator in alerts]
        return [*movers, maintenance, *alerts, ServiceHeartbeat(alias, breakers, self._supervisor)]

    def _on_notification(self, payload: str) -> None:
        if payload == BrokerQueue._meta.label:
            self._wake_transports()
        elif payload == notifier.DELAYED:
            for service in self._delayed_services:
                service.wake()

    def _wake_transports(self) -> None:
        for transport in self.consuming():
            transport.notify()

    # -- the end -----------------------------------------------------------------------------------------------------

    def _is_unused(self) -> bool:
        """Whether no connection has consumed for some time and everything is written."""
        if any(not transport.closed for transport in self.consuming()):
            self._unused_since = None
            return False
        if self._unused_since is None:
            self._unused_since = monotonic()
        return monotonic() - self._unused_since > LINGER and self.leases.idle and deregister(self)

    def _end(self) -> None:
        self.renewal_process.stop()  # which would write the deleted row anew
        connection = connections[self.alias]
        try:
            # First: a process has only seconds to exit, and on a busy machine stopping the services may take all of
            # them.
            with ResponseDeadline(connection):
                self.leases.flush(connection)
                self.leases.retry_releases(connection)
                Subscriber.objects.using(self.alias).filter(pk=self.leases.owner).delete()
        except Error as error:
            log.info("The process could not deregister from %r; its leases expire: %s", self.alias, error)
        finally:
            stop_all([*self.services, *self.helpers])
            with _lock:
                stopping_agents.discard(self)


_agents: dict[str, ProcessAgent] = {}
#: Agents without connections that are deregistering: the exit of the process waits for them, too.
stopping_agents: set[ProcessAgent] = set()
_lock = threading.Lock()
#: In a forked child: the agents of its parent.
_inherited: list[Any] = []


def agent_of(alias: str) -> ProcessAgent:
    """The agent of this process in a database."""
    with _lock:
        agent = _agents.get(alias)
        if agent is None or agent.stopping:
            agent = _agents[alias] = ProcessAgent(alias)
        return agent


def deregister(agent: ProcessAgent) -> bool:
    """Remove the agent, unless a connection was added meanwhile."""
    with _lock:
        if any(not transport.closed for transport in list(agent.transports)):
            return False
        if _agents.get(agent.alias) is agent:
            del _agents[agent.alias]
        stopping_agents.add(agent)
        agent.ask_to_stop()
        return True


def stop_agents(seconds: float = 10.0) -> None:
    """Stop all agents: at the exit of the process, and in tests."""
    with _lock:
        agents = [*_agents.values(), *stopping_agents]
        _agents.clear()
        stopping_agents.clear()
    stop_all(agents, seconds)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _inherited.append((dict(_agents), set(stopping_agents)))
    _agents.clear()
    stopping_agents.clear()


atexit.register(stop_agents)
os.register_at_fork(after_in_child=_after_fork)
