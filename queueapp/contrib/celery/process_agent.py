"""What keeps a process of Celery alive in the database: one member per process and database, for all of its connections.

It says that the process lives, so that its leases are released when it is dead; writes acks; renews leases; keeps the declared
queues of its consumers and deletes those that nobody uses; listens; and takes part in dispatching and keeping house, for a
project that has no other workers. Threads of its own, since a task may have the main one for hours. A forked child has none.
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
from ...models import DISPATCHER, MAINTENANCE, QueueControl, Subscriber
from ...services.connection_timeouts import ConnectionWatchdog, ResponseDeadline
from ...services.delayed_dispatcher import DelayedDispatcher
from ...services.forwarder import Forwarder
from ...services.leader_election import Elector, role_name
from ...services.listener import Listener
from ...services.maintenance import Maintenance
from ...services.service import Service, stop_all
from ...services.service_heartbeat import ServiceHeartbeat
from ...services.subscriber_rows import breakers_json, heartbeat
from . import topology
from .in_flight import Leases
from .models import BrokerQueue
from .options import TransportOptions

log = logging.getLogger("queueapp")

#: Seconds between two looks of an idle keeper; in which acks are collected; in which a process without connections stays.
IDLE, COLLECTED, LINGER = 0.25, 0.02, 2.0
#: Seconds between two rounds of its housekeeping: an idle worker is to ask little.
PACE = 5.0
#: Seconds between two looks for queues that nobody uses; until a process that consumes takes part in the services.
REAP_EVERY, SERVES_AFTER = 10.0, 1.0
#: What was read ahead and not delivered for so long is given to others.
STALE = timedelta(seconds=1).total_seconds()


class ConnectionProtocol(Protocol):
    """A connection that consumes, as a member knows it: a ``Transport``."""

    closed: bool
    acks: bool
    options: TransportOptions

    def queues(self) -> set[str]: ...
    def used_declarations(self) -> list[topology.Declaration]: ...
    def declare_again(self, one: topology.Declaration) -> None: ...
    def give_back_stale(self, before: float) -> None: ...
    def came_back(self, seqs: Sequence[int]) -> None: ...
    def told(self) -> None: ...


class ProcessAgent(Service):
    """The keeper's thread, and what it looks after."""

    def __init__(self, alias: str) -> None:
        super().__init__(f"celery-{alias}")
        self.alias = alias
        self.leases = Leases(self.wake)
        self.transports: WeakSet[ConnectionProtocol] = WeakSet()
        #: Whether an operator has paused the queue.
        self.paused = False
        self._supervisor = uuid.uuid4()
        self._breaker = CircuitBreaker(f"Leases in {alias}")
        self._services: list[Service] = []
        self._listener = Listener(alias, self._heard)
        self._helpers: list[Service] = [ConnectionWatchdog(), *([self._listener] if settings.NOTIFY else [])]
        self._woken: list[Service] = []
        self._acks_since: float | None = None
        self._alone_since: float | None = None
        self._told: type[Exception] | None = None
        self._next_beat = self._next_reap = 0.0
        self._refreshed_at = float("-inf")
        self._has_row = False
        self._beats = 0

    # -- from outside ------------------------------------------------------------------------------------------------

    def joined(self, transport: ConnectionProtocol) -> bool:
        """A connection consumes. False: this one ends, and another has to be asked for."""
        with _lock:
            if self.stopping:
                return False
            self.transports.add(transport)
            self._alone_since = None
        if not self.is_alive():
            self._keep_up(self._helpers)
            self.start()
        return True

    def present(self) -> list[ConnectionProtocol]:
        """The connections that consume, or did: others may come while they are looked at."""
        with _lock:
            return list(self.transports)

    @property
    def hears(self) -> bool:
        """Whether wake-ups arrive."""
        return self._listener.established.is_set()

    # -- the thread --------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        while not self.stopping:
            wait = IDLE
            try:
                with ResponseDeadline(connections[self.alias]):
                    self._look()
                self._breaker.success()
                self._told = None
            except Exception as error:
                # Of whatever kind: nobody else here renews leases and writes acks, and nobody replaces a process of Celery's
                # whose keeper has ended.
                if not isinstance(error, Error) and self._told is not type(error):
                    self._told = type(error)
                    log.exception("The keeper of %s in %r failed, and goes on.", BrokerQueue._meta.label, self.alias)
                connections[self.alias].close()
                # A lease has to be renewed in time once the database is back.
                wait = min(1.0, self._breaker.failure(error))
            if self._is_left():
                break
            if self.pause(wait) and not self.stopping:
                time.sleep(COLLECTED)
        self._end()

    def _look(self) -> None:
        connection = connections[self.alias]
        now = monotonic()
        if self.leases.waits_since is not None:
            self.leases.flush(connection)
        self.leases.renew(connection)
        if self.leases.settle(connection):
            notifier.sent(BrokerQueue, connection)
        for transport in self.present():
            transport.give_back_stale(now - STALE)
        if now >= self._next_beat:
            self._next_beat = now + settings.HEARTBEAT_INTERVAL.total_seconds()
            self._beat()
            self._keep_up(self._helpers)  # after it: what cannot be started must not take it away
        self._refresh(now)
        if now >= self._next_reap:
            self._next_reap = now + REAP_EVERY
            for name in topology.reap(self.alias):
                log.info("The queue %r was deleted: nobody has used it for as long as it stays.", name)
        self._serve_others(now)

    def _beat(self) -> None:
        if self._acks_since is None and not any(transport.acks for transport in self.present()):
            return  # it holds nothing
        leases = self.leases
        queues = sorted({queue for transport in self.present() for queue in transport.queues()})
        news = {
            "received": leases.received,
            "handled": leases.acked,
            "outstanding": leases.outstanding,
            "leases_lost": leases.lost,
            "breakers": breakers_json([one for one in (self._breaker.report(),) if one is not None]),
            "consumers": json.dumps([(queue, "") for queue in queues]),
        }
        if not heartbeat(self.alias, leases.owner, BrokerQueue, self._supervisor, news, dict) and self._has_row:
            log.warning("This process was taken for dead; what it had leased may be handled twice.")
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
        """Say that the queues of consumers are in use, twice in the time that the one of them stays that goes first. Which that is
        is looked at each time: a consumer of a queue that stays for less than the others may have come since."""
        used = [(transport, transport.used_declarations()) for transport in self.present()]
        shortest = min([60_000, *(one.expires_ms for _, many in used for one in many if one.expires_ms is not None)])
        if now - self._refreshed_at < shortest / 2000:
            return
        self._refreshed_at = now
        for transport, declarations in used:
            gone = topology.refresh(self.alias, declarations)
            for one in declarations:
                if one.name in gone:
                    transport.declare_again(one)

    def _serve_others(self, now: float) -> None:
        """Take part in what some process has to do: once this one has consumed for a while."""
        acking = [transport for transport in self.present() if transport.acks]
        if not acking:
            return
        if self._acks_since is None:
            self._acks_since = now
        if now - self._acks_since < SERVES_AFTER or not any(transport.options.services for transport in acking):
            return
        if not self._services:
            self._services = self._made_services()
        self._keep_up(self._services)

    def _keep_up(self, services: Sequence[Service]) -> None:
        """Start those that do not run: at first, and when one has ended unasked."""
        for service in services:
            if not service.is_alive() and not self.stopping:
                service.start()

    def _made_services(self) -> list[Service]:
        alias, holder = self.alias, uuid.uuid5(self._supervisor, self.alias)
        queues = [queue for queue in registry.queues if queue._meta.managed and router.db_for_write(queue) == alias]
        if BrokerQueue not in queues:
            queues.append(BrokerQueue)  # a URL named this database, whatever a router says
        forwarders = [Forwarder(alias, target, holder) for target in sorted(delayed.addresses(alias))]
        movers = [DelayedDispatcher(alias, holder), *forwarders]
        housekeeping = Maintenance(alias, queues, Elector(alias, role_name("maintenance"), holder), PACE)
        breakers: dict[str, list[Breaker]] = {
            DISPATCHER: [breaker for mover in movers for breaker in mover.breakers],
            MAINTENANCE: [housekeeping.breaker],
        }
        self._woken = [*movers]
        return [*movers, housekeeping, ServiceHeartbeat(alias, breakers, self._supervisor)]

    def _heard(self, payload: str) -> None:
        if payload == BrokerQueue._meta.label:
            self._wake_transports()
        elif payload == notifier.DELAYED:
            for service in self._woken:
                service.wake()

    def _wake_transports(self) -> None:
        for transport in self.present():
            transport.told()

    # -- the end -----------------------------------------------------------------------------------------------------

    def _is_left(self) -> bool:
        """Whether no connection consumes any more, for some time, and nothing is left to be written."""
        if any(not transport.closed for transport in self.present()):
            self._alone_since = None
            return False
        if self._alone_since is None:
            self._alone_since = monotonic()
        return monotonic() - self._alone_since > LINGER and self.leases.idle and _leave(self)

    def _end(self) -> None:
        connection = connections[self.alias]
        try:
            # First: at the end of a process there are seconds for this, of which the others may need all on a busy machine.
            with ResponseDeadline(connection):
                self.leases.flush(connection)
                self.leases.settle(connection)
                Subscriber.objects.using(self.alias).filter(pk=self.leases.owner).delete()
        except Error as error:
            log.info("Celery's process could not sign off from %r: %s", self.alias, error)
        finally:
            stop_all([*self._services, *self._helpers])
            with _lock:
                _leaving.discard(self)


_agents: dict[str, ProcessAgent] = {}
#: Those that have nobody left to keep anything for and are signing off: the end of the process waits for them, too.
_leaving: set[ProcessAgent] = set()
_lock = threading.Lock()
#: A forked child's: of its parent.
_of_a_parent: list[Any] = []


def agent_of(alias: str) -> ProcessAgent:
    """The member of this process in a database."""
    with _lock:
        member = _agents.get(alias)
        if member is None or member.stopping:
            member = _agents[alias] = ProcessAgent(alias)
        return member


def _leave(member: ProcessAgent) -> bool:
    """The member is forgotten, unless a connection has come meanwhile."""
    with _lock:
        if any(not transport.closed for transport in list(member.transports)):
            return False
        if _agents.get(member.alias) is member:
            del _agents[member.alias]
        _leaving.add(member)
        member.ask_to_stop()
        return True


def stop_agents(seconds: float = 10.0) -> None:
    """End all of them: at the end of the process, and in tests."""
    with _lock:
        members = [*_agents.values(), *_leaving]
        _agents.clear()
        _leaving.clear()
    stop_all(members, seconds)


def _in_a_child() -> None:
    global _lock
    _lock = threading.Lock()
    _of_a_parent.append((dict(_agents), set(_leaving)))
    _agents.clear()
    _leaving.clear()


atexit.register(stop_agents)
os.register_at_fork(after_in_child=_in_a_child)
