"""The transport: ``broker_url = "queueapp://"`` is the default database, ``queueapp://alias`` another one of DATABASES.

It looks for messages of all consumers at once and hands out what their prefetch counts allow, in Celery's event loop or in
``drain_events``. Wake-ups come to a socket that either of them waits on, so nothing is polled that need not be.
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
    django.setup()  # a command of Celery's that has no worker: before anything that imports a model

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
from .prefetch import PACE, Poller
from .process_agent import ProcessAgent, agent_of
from .sessions import Session
from .topology import Declaration
from .waker import Waker

SCHEME = "queueapp"
#: Seconds between two ticks of an event loop.
TICK = 0.25


class Transport(virtual.Transport):
    """One connection."""

    Channel = Channel
    driver_type = SCHEME
    driver_name = SCHEME
    default_port = None
    can_parse_url = True
    #: Ours to be mended by another connection.
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
        self.kinds: dict[str, str] = {}
        self.declarations: dict[str, Declaration] = {}
        #: By exchange: until when its bindings are remembered, and which they are.
        self.tables: dict[str, tuple[float, list[Any]]] = {}
        #: By queue: the bindings that were made here.
        self.bound: dict[str, set[tuple[str, str]]] = {}
        self.closed = False
        #: Whether a consumer of it acks.
        self.acks = False
        self._process = os.getpid()
        self._session = Session(self.alias)
        self._agent: ProcessAgent | None = None
        self._lock = threading.Lock()
        self._poller = Poller(self.options)
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
        if self._is_a_childs:
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
    def _is_a_childs(self) -> bool:
        """Whether this was made before a fork: it is the parent's."""
        return self._process != os.getpid()

    def flush(self) -> None:
        """Write the acks that wait."""
        if self._agent is None or self._is_a_childs:
            return
        leases = self._agent.leases
        try:
            with self._session.use() as connection:
                leases.flush(connection)
        except Error:
            self._agent.wake()  # which tries again, for as long as it takes

    # -- consuming ---------------------------------------------------------------------------------------------------

    def consuming(self, *, acks: bool) -> None:
        """A consumer has come."""
        self.acks = self.acks or acks
        self._registered_agent()
        self.told()

    def _registered_agent(self) -> ProcessAgent:
        while self._agent is None or not self._agent.joined(self):
            self._agent = agent_of(self.alias)
        return self._agent

    def queues(self) -> set[str]:
        """The queues that have consumers here."""
        return {queue for channel in list(self.channels) for queue in list(channel.consumers)}

    def used_declarations(self) -> list[Declaration]:
        """How they were declared, as far as they go by themselves."""
        declarations = [self.declarations.get(queue) for queue in self.queues()]
        return [one for one in declarations if one is not None and one.expires_ms is not None]

    def declare_again(self, one: Declaration) -> None:
        """A queue that is in use was deleted: this process did not answer for longer than it stays.

        Called by the member's thread, while others declare, bind and delete. What a consumer here deleted between that thread's
        look and this, as one who asks does with the queue of its replies, stays deleted; in the moment after, it is made once
        more, and goes by itself, as all that are declared again do.
        """
        if self.declarations.get(one.name) is not one:
            return
        for exchange, key in tuple(self.bound.get(one.name, ())):
            topology.bind(self.alias, exchange, key, one.name)
        # Last: nothing comes in before.
        topology.declare(self.alias, one)

    def queue_of(self, row: Claimed) -> str:
        """The queue of a claimed message."""
        return str(row[RECIPIENT])

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        deadline = None if timeout is None else monotonic() + timeout
        while not self._pump():
            now = monotonic()
            if deadline is not None and now >= deadline:
                raise socket.timeout("timed out")  # noqa: UP041 - as kombu's callers catch it
            hungry = self._hungry()
            until = self._poller.next_look(_queues_of(hungry)) if hungry else now + PACE
            if deadline is not None:
                until = min(until, deadline)
            self._waker.wait(0.0 if self._poller.told else max(0.0, until - now))

    def _pump(self) -> int:
        """Hand out what is there; look for more where nothing is. Returns how many messages were handed out."""
        if (delivered := self._hand_out()) or self.closed:
            return delivered
        hungry = self._hungry()
        paused = self._agent is not None and self._agent.paused
        if not hungry or not self._poller.may_look(_queues_of(hungry), paused=paused):
            return 0
        self._look(hungry)
        return self._hand_out()

    def _hand_out(self) -> int:
        count = 0
        # Commands before tasks: whoever revokes a task and sends it then has them in one claim, in that order.
        for channel in sorted(self.channels, key=_acks):
            while channel.ahead and not channel.closed and channel.qos.can_consume():
                with self._lock:
                    if not channel.ahead:
                        break
                    row, held = channel.ahead.popleft()
                count += channel.deliver(row, held)
        return count

    def _hungry(self) -> list[Any]:
        """The channels whose consumers may have more than is there."""
        return [one for one in self.channels if one.consumers and not one.ahead and one.qos.can_consume()]

    def _look(self, hungry: Sequence[Any]) -> None:
        looking, queues = self._poller, _queues_of(hungry)
        by_queue = {queue: channel for channel in hungry for queue in channel.consumers}
        limits = [one.qos.can_consume_max_estimate() for one in hungry]
        most = self.options.max_prefetch
        limit = min(most if one is None else one for one in limits)
        found = self._claim(queues, min(3500, limit + looking.readable(queues)))
        looking.looked(queues, found=bool(found), hears=self._agent is not None and self._agent.hears)
        with self._lock:
            looking.read_at = monotonic()
            for row, held in found:
                by_queue[self.queue_of(row)].ahead.append((row, held))

    def take(self, channel: Any, queues: Sequence[str], limit: int) -> list[tuple[Claimed, LeasedMessage]]:
        """Claim for a caller that waits for nothing."""
        self._registered_agent()
        with self._lock:
            for place, (row, _) in enumerate(channel.ahead):
                if self.queue_of(row) in queues:
                    found = channel.ahead[place]
                    del channel.ahead[place]
                    return [found]
        return self._claim(tuple(queues), limit, own_floors=True)

    def _claim(
        self, queues: tuple[str, ...], limit: int, own_floors: bool = False
    ) -> list[tuple[Claimed, LeasedMessage]]:
        leases = self._registered_agent().leases
        return self._without_spent(self._poller.claim(self._session, leases, queues, limit, own_floors=own_floors))

    def _without_spent(self, found: list[tuple[Claimed, LeasedMessage]]) -> list[tuple[Claimed, LeasedMessage]]:
        """Keep what was handed out too often as poison: it may be what kills its workers."""
        most = self.options.max_deliveries
        if not most:
            return found
        spent = [one for one in found if one[0][DELIVERIES] - one[0][CANCELS] > most]
        if not spent:
            return found
        kept = [one for one in found if one not in spent]
        channel = next(iter(self.channels))
        try:
            for row, held in spent:
                channel._bury(held, f"max_deliveries: it was handed out {row[DELIVERIES] - 1} times and never acked.")
        except Exception:
            self.give_back([held for _, held in kept], handled=False)  # nobody else knows of them
            raise
        return kept

    # -- ending ------------------------------------------------------------------------------------------------------

    def acked(self, held: LeasedMessage) -> None:
        """A message is done."""
        if self._is_a_childs:
            return
        self._agent_leases().ack(held)
        self.ring()

    def _agent_leases(self) -> Any:
        return (self._agent or self._registered_agent()).leases

    def forget(self, some: list[LeasedMessage]) -> None:
        """These were ended in another way."""
        self._agent_leases().forget(some)

    def give_back(self, some: list[LeasedMessage], *, handled: bool) -> None:
        """Release leases at once; where the database is away, the member does it as soon as that is back."""
        if self._is_a_childs or not some:
            return
        member = self._agent or self._registered_agent()
        try:
            with self._session.use() as connection:
                if member.leases.give_back(connection, some, handled=handled):
                    notifier.sent(BrokerQueue, connection)
        except Error:
            member.wake()
            return
        seqs = [held.seq for held in some]
        for transport in member.present():
            transport.came_back(seqs)

    def came_back(self, seqs: Sequence[int]) -> None:
        """These are free again, in their old places."""
        self._poller.came_back(seqs)
        self.told()

    def unread(self, channel: Any, queue: str | None = None) -> None:
        """Give back what was read ahead for a channel, or for one of its queues."""
        with self._lock:
            gone = [one for one in channel.ahead if queue is None or self.queue_of(one[0]) == queue]
            for one in gone:
                channel.ahead.remove(one)
        self.give_back([held for _, held in gone], handled=False)

    def give_back_stale(self, before: float) -> None:
        """What was read ahead before this time and was not delivered is for others: a task has the main thread, or all places."""
        if self._poller.read_at >= before:
            return
        gone: list[LeasedMessage] = []
        with self._lock:
            if self._poller.read_at >= before:
                return
            for channel in list(self.channels):
                gone += [held for _, held in channel.ahead]
                channel.ahead.clear()
        self._poller.ahead = 0
        self.give_back(gone, handled=False)

    # -- waiting -----------------------------------------------------------------------------------------------------

    def told(self) -> None:
        """There may be something."""
        self._poller.told = True
        self.ring()

    def ring(self) -> None:
        """Wake whoever waits: from any thread."""
        if not self._is_a_childs:
            self._waker.ring()

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        self._leave_loop()
        self._loop = loop
        loop.add_reader(self._waker.ears(), self._waker.silence)
        loop.on_tick.add(self._tick)
        # The loop may have nothing else to wake it.
        self._timer = loop.call_repeatedly(TICK, self._no_message)

    def _no_message(self) -> None:
        """The tick of the loop that follows does it."""

    def _tick(self) -> None:
        if self.closed or self._is_a_childs:
            return
        if self._pump():
            self.ring()  # there may be more, and the loop has others to serve

    def _leave_loop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is None:
            return
        loop.on_tick.discard(self._tick)
        if self._timer is not None:
            self._timer.cancel()
        with contextlib.suppress(KeyError, ValueError, OSError):
            loop.remove_reader(self._waker.ears())


def _acks(channel: Any) -> bool:
    """Whether what it receives is acked: tasks are, commands and replies are not."""
    return any(not no_ack for _, no_ack in channel.consumers.values())


def _queues_of(channels: Sequence[Any]) -> tuple[str, ...]:
    """Commands first here as well, or a backlog of tasks would leave no room for them."""
    acks = {queue: not consumer[1] for channel in channels for queue, consumer in channel.consumers.items()}
    return tuple(sorted(acks, key=lambda queue: (acks[queue], queue)))


def _refuse_eventlet() -> None:
    """Under it a thread that waits for the database keeps all the others waiting, and a worker would hang without a word."""
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is not None and patcher.is_monkey_patched("thread"):
        raise ImproperlyConfigured(
            f"{SCHEME}:// does not work under eventlet, whose own authors advise against it: "
            "the pool (--pool, worker_pool) has to be one of prefork, threads, solo, gevent."
        )


def _alias_of(url: str | None) -> str:
    """The database that a URL, or a host, names. Raises ImproperlyConfigured."""
    wanted = (url or "").removeprefix(f"{SCHEME}://").strip("/") or "default"
    if wanted not in connections:
        raise ImproperlyConfigured(
            f"{SCHEME}://{wanted} is not accepted: DATABASES has {', '.join(sorted(connections))}."
        )
    return wanted
