"""The transport: ``broker_url = "queueapp://"`` is the default database, ``queueapp://alias`` another one of DATABASES.

It claims messages for all consumers at once and delivers as many as their prefetch counts allow, in Celery's event loop
or in ``drain_events``. Both wait on a socket that notifications wake, so idle polls are rare.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Sequence
from time import monotonic
from typing import Any

import django
from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, Error, InterfaceError, OperationalError, connections
from kombu.transport import virtual

if not apps.ready and not apps.loading:
    django.setup()  # a Celery command that starts no worker; before anything that imports a model

if not apps.is_installed("queueapp.contrib.celery"):
    raise ImproperlyConfigured(
        "The broker queueapp:// needs 'queueapp.contrib.celery' in INSTALLED_APPS; run `manage.py migrate` after "
        "adding it."
    )

import select

from ... import notifier
from ...errors import NotMigrated
from ...sql import ErrorKind, backend_of
from ...sql.claims import CANCELS, DELIVERIES, RECIPIENT, Claimed
from ...version import VERSION
from . import topology
from .channel import Channel
from .in_flight import LeasedMessage
from .models import BrokerQueue, DeclaredQueue
from .options import TransportOptions
from .polling import PAUSED_POLL, Poller, Session
from .process_agent import ProcessAgent, agent_of
from .topology import Declaration


class Waker:
    """A pair of sockets, created by the first reader. Several wake-ups before a read count as one."""

    def __init__(self) -> None:
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._is_set = False

    def socket(self) -> socket.socket:
        """The socket that becomes readable with a wake-up."""
        if self._ends is None:
            self._ends = socket.socketpair()
            for end in self._ends:
                end.setblocking(False)
        return self._ends[0]

    def wake(self) -> None:
        """Wake the reader. Safe from any thread."""
        ends = self._ends
        if ends is not None and not self._is_set:
            self._is_set = True
            with contextlib.suppress(OSError):
                ends[1].send(b"\0")

    def wait(self, seconds: float) -> None:
        """Wait for a wake-up, at most this many seconds."""
        select.select([self.socket()], [], [], seconds)
        self.clear()

    def clear(self, *_: Any) -> None:
        """Reset after a wake-up."""
        if self._ends is not None:
            with contextlib.suppress(OSError):
                self._ends[0].recv(4096)
        self._is_set = False

    def close(self) -> None:
        """Close both sockets."""
        ends, self._ends, self._is_set = self._ends, None, False
        for end in ends or ():
            end.close()


SCHEME = "queueapp"
#: Seconds between two ticks of an event loop.
TICK = 0.25
#: Maximum number of messages of one claim.
MAX_CLAIM = 3500


class Transport(virtual.Transport):
    """One connection."""

    Channel = Channel
    driver_type = SCHEME
    driver_name = SCHEME
    default_port = None
    can_parse_url = True
    #: Errors after which kombu opens another connection.
    connection_errors = (OperationalError, InterfaceError, ConnectionError)
    recoverable_connection_errors = connection_errors
    channel_errors = (*virtual.Transport.channel_errors, DatabaseError)
    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset(["direct", "topic", "fanout"])
    )

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self.options = TransportOptions(client.transport_options or {})
        self.alias = _alias_of(client.hostname)
        self.exchange_kinds: dict[str, str] = {}
        self.declarations: dict[str, Declaration] = {}
        #: By exchange: when its cached bindings expire, and the bindings.
        self.routing_tables: dict[str, tuple[float, list[Any]]] = {}
        #: By queue: the bindings that this connection made.
        self.bindings_made: dict[str, set[tuple[str, str]]] = {}
        self.closed = False
        #: Whether one of its consumers acks.
        self.acks = False
        self._process = os.getpid()
        self._session = Session(self.alias)
        self.agent: ProcessAgent | None = None
        self._lock = threading.Lock()
        self.poller = Poller(self.options)
        self._waker = Waker()
        self._loop: Any = None
        self._timer: Any = None

    def driver_version(self) -> str:
        return VERSION

    @property
    def default_connection_params(self) -> dict[str, Any]:
        return {}

    def as_uri(self, uri: str | None, include_password: bool = False, mask: str = "**") -> str:
        return f"{SCHEME}://{'' if self.alias == 'default' else self.alias}"

    # -- connecting --------------------------------------------------------------------------------------------------

    def establish_connection(self) -> Transport:
        _refuse_eventlet()
        self.closed = False
        connection = connections[self.alias]
        try:
            DeclaredQueue.objects.using(self.alias).filter(pk="").exists()
        except Error as error:
            kind = backend_of(connection).error_kind(error)
            if kind is ErrorKind.MISSING:
                raise NotMigrated(self.alias, [DeclaredQueue._meta.db_table]) from error
            if kind is ErrorKind.CONNECTION and not connection.in_atomic_block:
                connection.close()
            raise
        super().establish_connection()
        return self

    def verify_connection(self, connection: Any) -> bool:
        return not self.closed

    def close_connection(self, connection: Any) -> None:
        if self._is_inherited:
            self.channels.clear()
            self._avail_channels.clear()
            return
        self._leave_loop()
        super().close_connection(connection)
        self.closed = True
        self.flush()
        self._session.close()
        self._waker.close()

    @property
    def _is_inherited(self) -> bool:
        """Whether it was created before a fork: then it belongs to the parent."""
        return self._process != os.getpid()

    def flush(self) -> None:
        """Write the queued acks."""
        if self.agent is None or self._is_inherited:
            return
        leases = self.agent.leases
        try:
            with self._session.use() as connection:
                leases.flush(connection)
        except Error:
            self.agent.wake()  # the agent retries until it succeeds

    # -- consuming ---------------------------------------------------------------------------------------------------

    def consuming(self, *, acks: bool) -> None:
        """Note that a consumer was added."""
        self.acks = self.acks or acks
        self._join_agent()
        self.notify()

    def _join_agent(self) -> ProcessAgent:
        while self.agent is None or not self.agent.register(self):
            self.agent = agent_of(self.alias)
        return self.agent

    def queues(self) -> set[str]:
        """The queues that have consumers on this connection."""
        return {queue for channel in list(self.channels) for queue in list(channel.consumers)}

    def expiring_declarations(self) -> list[Declaration]:
        """The declarations of those queues that have an expiry time."""
        declarations = [self.declarations.get(queue) for queue in self.queues()]
        return [found for found in declarations if found is not None and found.expires_ms is not None]

    def redeclare(self, declaration: Declaration) -> None:
        """Declare a queue again that expired while it was in use, because this process did not run for longer than its
        expiry.

        Called by the agent's thread while other threads declare, bind and delete. A queue that a consumer deleted
        between the agent's check and this call, as the caller of a remote command does with its reply queue, stays
        deleted; deleted in the moment after, it is declared once more and expires.
        """
        name = declaration.name
        if self.declarations.get(name) is not declaration:
            return
        for exchange, key in tuple(self.bindings_made.get(name, ())):
            topology.bind(self.alias, exchange, key, name)
        # Last: no message is routed before the bindings are complete.
        topology.declare(self.alias, declaration)

    def queue_of(self, row: Claimed) -> str:
        """The Celery queue of a claimed message."""
        return str(row[RECIPIENT])

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        deadline = None if timeout is None else monotonic() + timeout
        while not self._deliver_or_fetch():
            now = monotonic()
            if deadline is not None and now >= deadline:
                raise socket.timeout("timed out")  # noqa: UP041 - as kombu's callers catch it
            ready = self._ready_channels()
            until = self.poller.next_poll(_queues_of(ready)) if ready else now + PAUSED_POLL
            if deadline is not None:
                until = min(until, deadline)
            self._waker.wait(0.0 if self.poller.notified else max(0.0, until - now))

    def _deliver_or_fetch(self) -> int:
        """Deliver what was read ahead; claim messages if there is nothing. Returns the number of messages delivered."""
        if (delivered := self._deliver()) or self.closed:
            return delivered
        ready = self._ready_channels()
        paused = self.agent is not None and self.agent.paused
        if not ready or not self.poller.is_due(_queues_of(ready), paused=paused):
            return 0
        self._fetch(ready)
        return self._deliver()

    def _deliver(self) -> int:
        count = 0
        # Commands before tasks: a revoke that was sent before its task comes in the same claim and must act first.
        for channel in sorted(self.channels, key=_has_acks):
            while channel.read_ahead and not channel.closed and channel.qos.can_consume():
                with self._lock:
                    if not channel.read_ahead:
                        break
                    row, lease = channel.read_ahead.popleft()
                count += channel.deliver(row, lease)
        return count

    def _ready_channels(self) -> list[Any]:
        """The channels whose consumers have capacity and nothing read ahead."""
        return [
            channel
            for channel in self.channels
            if channel.consumers and not channel.read_ahead and channel.qos.can_consume()
        ]

    def _fetch(self, ready: Sequence[Any]) -> None:
        poller, queues = self.poller, _queues_of(ready)
        by_queue = {queue: channel for channel in ready for queue in channel.consumers}
        capacities = [channel.qos.can_consume_max_estimate() for channel in ready]
        max_prefetch = self.options.max_prefetch
        limit = min(max_prefetch if capacity is None else capacity for capacity in capacities)
        found = self._claim(queues, min(MAX_CLAIM, limit + poller.next_read_ahead(queues)))
        notifications = self.agent is not None and self.agent.receives_notifications
        poller.polled(queues, found=bool(found), notifications=notifications)
        with self._lock:
            poller.read_at = monotonic()
            for row, lease in found:
                by_queue[self.queue_of(row)].read_ahead.append((row, lease))

    def claim_now(self, channel: Any, queues: Sequence[str], limit: int) -> list[tuple[Claimed, LeasedMessage]]:
        """Claim messages for a caller that does not wait, ``basic_get``."""
        self._join_agent()
        with self._lock:
            for index, (row, _) in enumerate(channel.read_ahead):
                if self.queue_of(row) in queues:
                    found = channel.read_ahead[index]
                    del channel.read_ahead[index]
                    return [found]
        return self._claim(tuple(queues), limit, own_marks=True)

    def _claim(
        self, queues: tuple[str, ...], limit: int, own_marks: bool = False
    ) -> list[tuple[Claimed, LeasedMessage]]:
        agent = self._join_agent()
        found = self.poller.claim(self._session, agent.leases, queues, limit, own_marks=own_marks)
        if found:
            agent.renewal_process.report()  # before a task begins that may stop the agent
        return self._keep_spent_as_poison(found)

    def _keep_spent_as_poison(self, found: list[tuple[Claimed, LeasedMessage]]) -> list[tuple[Claimed, LeasedMessage]]:
        """Move messages to poison that reached ``max_deliveries`` without an ack: they may kill the processes that run
        them."""
        limit = self.options.max_deliveries
        if not limit:
            return found
        spent = [claim for claim in found if claim[0][DELIVERIES] - claim[0][CANCELS] > limit]
        if not spent:
            return found
        deliverable = [claim for claim in found if claim not in spent]
        channel = next(iter(self.channels))
        try:
            for row, lease in spent:
                channel._move_to_poison(
                    lease, f"max_deliveries: delivered {row[DELIVERIES] - 1} times and never acked."
                )
        except Exception:
            self.release([lease for _, lease in deliverable], cancelled=False)  # no other code has their leases
            raise
        return deliverable

    # -- ending ------------------------------------------------------------------------------------------------------

    def acked(self, lease: LeasedMessage) -> None:
        """Queue the ack of a message."""
        if self._is_inherited:
            return
        self._agent_leases().ack(lease)
        self.wake()

    def _agent_leases(self) -> Any:
        return (self.agent or self._join_agent()).leases

    def forget(self, leases: list[LeasedMessage]) -> None:
        """Drop messages that were ended without an ack."""
        self._agent_leases().forget(leases)

    def release(self, leases: list[LeasedMessage], *, cancelled: bool) -> None:
        """End leases now; if the database is not available, the agent does it as soon as it is."""
        if self._is_inherited or not leases:
            return
        agent = self.agent or self._join_agent()
        try:
            with self._session.use() as connection:
                if agent.leases.release(connection, leases, cancelled=cancelled):
                    notifier.sent(BrokerQueue, connection)
        except Error:
            agent.wake()
            return
        seqs = [lease.seq for lease in leases]
        for transport in agent.consuming():
            transport.released(seqs)

    def released(self, seqs: Sequence[int]) -> None:
        """Poll again: these messages are ready, in their old places."""
        self.poller.released(seqs)
        self.notify()

    def release_read_ahead(self, channel: Any, queue: str | None = None) -> None:
        """Release the messages read ahead for a channel, or for one of its queues."""
        with self._lock:
            claims = [claim for claim in channel.read_ahead if queue is None or self.queue_of(claim[0]) == queue]
            for claim in claims:
                channel.read_ahead.remove(claim)
        self.release([lease for _, lease in claims], cancelled=False)

    def release_stale(self, before: float) -> None:
        """Release messages read ahead before this time and not delivered: a task blocks the main thread, or the pool is
        full."""
        if self.poller.read_at >= before:
            return
        leases: list[LeasedMessage] = []
        with self._lock:
            if self.poller.read_at >= before:
                return
            for channel in list(self.channels):
                leases += [lease for _, lease in channel.read_ahead]
                channel.read_ahead.clear()
        self.poller.read_ahead = 0
        self.release(leases, cancelled=False)

    # -- waiting -----------------------------------------------------------------------------------------------------

    def notify(self) -> None:
        """Poll now: there may be messages."""
        self.poller.notified = True
        self.wake()

    def wake(self) -> None:
        """Wake the waiting thread. Safe from any thread."""
        if not self._is_inherited:
            self._waker.wake()

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        self._leave_loop()
        self._loop = loop
        loop.add_reader(self._waker.socket(), self._waker.clear)
        loop.on_tick.add(self._tick)
        # Without another event the loop would not run ``_tick``.
        self._timer = loop.call_repeatedly(TICK, self._wake_loop)

    def _wake_loop(self) -> None:
        """Make the loop run ``_tick``."""

    def _tick(self) -> None:
        if self.closed or self._is_inherited:
            return
        if self._deliver_or_fetch():
            self.wake()  # there may be more messages; other events of the loop come first

    def _leave_loop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is None:
            return
        loop.on_tick.discard(self._tick)
        if self._timer is not None:
            self._timer.cancel()
        with contextlib.suppress(KeyError, ValueError, OSError):
            loop.remove_reader(self._waker.socket())


def _has_acks(channel: Any) -> bool:
    """Whether its messages are acked: tasks are, commands and replies are not."""
    return any(not no_ack for _, no_ack in channel.consumers.values())


def _queues_of(channels: Sequence[Any]) -> tuple[str, ...]:
    """The queues of these channels, commands first: a backlog of tasks must not fill the whole claim."""
    acks = {queue: not consumer[1] for channel in channels for queue, consumer in channel.consumers.items()}
    return tuple(sorted(acks, key=lambda queue: (acks[queue], queue)))


def _refuse_eventlet() -> None:
    """Raise ImproperlyConfigured under eventlet: there a thread that waits for the database blocks all others."""
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is not None and patcher.is_monkey_patched("thread"):
        raise ImproperlyConfigured(
            f"{SCHEME}:// does not work under eventlet: use one of the pools (--pool, worker_pool) prefork, threads, "
            "solo, gevent."
        )


def _alias_of(url: str | None) -> str:
    """The database alias that a URL names. Raises ImproperlyConfigured."""
    wanted = (url or "").removeprefix(f"{SCHEME}://").strip("/") or "default"
    if wanted not in connections:
        raise ImproperlyConfigured(
            f"{SCHEME}://{wanted}: DATABASES has no {wanted!r}; it has {', '.join(sorted(connections))}."
        )
    return wanted
