"""A channel: declares, publishes, consumes, acks and rejects."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping
from time import monotonic
from typing import Any

from amqp.protocol import queue_declare_ok_t
from django.db import Error, connections, transaction
from kombu.exceptions import ChannelError
from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.transport.virtual.base import UNDELIVERABLE_FMT, UndeliverableWarning
from kombu.utils.uuid import uuid

from ... import notifier
from ...errors import UndecodableMessage
from ...messages.escaping import in_one_line
from ...sending import send
from ...sending.isolation import atomic_on, isolated_connection, outside_transaction
from ...sql import ErrorKind, backend_of, queue_sql
from ...sql.claims import Claimed
from ...sql.inserts import BrokerTables
from . import poison, topology
from .in_flight import Delivered, LeasedMessage, QoS, rejection_reason
from .models import MAX_NAME_LENGTH, Binding, BrokerQueue, DeclaredQueue
from .retrying import with_retries
from .serialization import due_at, payload_of, row_for, row_to_route, until_due
from .topology import Declaration

#: Maximum that a declaration counts, and a passive one, whose caller asks for the count.
COUNT_LIMIT, PASSIVE_COUNT_LIMIT = 1_000, 1_000_000
#: How the names of Celery's exchanges of remote control end, those of the replies included.
CONTROL_SUFFIX = ".pidbox"
#: Seconds that a process caches the bindings of a topic exchange.
ROUTES_CACHED_FOR = 2.5


class Channel(virtual.Channel):
    """One channel of a ``Transport``, which is its ``connection``."""

    Message = Delivered
    QoS = QoS
    supports_fanout = True
    body_encoding = None
    from_transport_options = ("deadletter_queue",)

    def __init__(self, connection: Any, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self.alias: str = connection.alias
        self._transport = connection  # kept: kombu removes ``connection`` when the channel closes
        #: By queue: the callback of its consumer, and whether the consumer is ``no_ack``.
        self.consumers: dict[str, tuple[Any, bool]] = {}
        #: Messages that are claimed and not delivered yet.
        self.read_ahead: deque[tuple[Claimed, LeasedMessage]] = deque()

    # -- declaring -------------------------------------------------------------------------------------------------

    def prepare_queue_arguments(self, arguments: Any, **kwargs: Any) -> Any:
        return to_rabbitmq_queue_arguments(arguments, **kwargs)

    def exchange_declare(
        self,
        exchange: str | None = None,
        type: str = "direct",
        durable: bool = False,
        auto_delete: bool = False,
        arguments: Any = None,
        nowait: bool = False,
        passive: bool = False,
    ) -> None:
        kind = type or "direct"
        name = exchange or f"amq.{kind}"
        if passive:
            if self._kind_of(name) is None:
                raise self._not_found("exchange", name, "Channel.exchange_declare")
            return
        if kind not in self.exchange_types:
            raise ChannelError(
                f"Exchange type {kind!r} is not supported; the types are {', '.join(sorted(self.exchange_types))}."
            )
        topology.declare_exchange(self.alias, name, kind)
        self._transport.exchange_kinds[name] = kind

    def exchange_delete(self, exchange: str, if_unused: bool = False, nowait: bool = False) -> None:
        if if_unused and topology.bindings(self.alias, exchange):
            return
        topology.delete_exchange(self.alias, exchange)
        self._transport.exchange_kinds.pop(exchange, None)

    def _kind_of(self, exchange: str) -> str | None:
        exchange_kinds = self._transport.exchange_kinds
        if exchange not in exchange_kinds:
            kind = topology.exchange_kind(self.alias, exchange)
            if kind is None:
                return None
            exchange_kinds[exchange] = kind
        return str(exchange_kinds[exchange])

    def typeof(self, exchange: str, default: str = "direct") -> Any:
        return self.exchange_types[self._kind_of(exchange) or default]

    def queue_declare(
        self,
        queue: str | None = None,
        passive: bool = False,
        durable: bool = False,
        exclusive: bool = False,
        auto_delete: bool = False,
        nowait: bool = False,
        arguments: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> queue_declare_ok_t:
        name = queue or f"amq.gen-{uuid()}"
        if passive:
            if not self._has_queue(name):
                raise self._not_found("queue", name, "Channel.queue_declare")
            return queue_declare_ok_t(name, topology.size(self.alias, name, PASSIVE_COUNT_LIMIT), 0)
        declaration = Declaration(name, durable, auto_delete or exclusive, arguments)
        topology.declare(self.alias, declaration)
        self._transport.declarations[name] = declaration
        return queue_declare_ok_t(name, topology.size(self.alias, name, COUNT_LIMIT), 0)

    def _not_found(self, what: str, name: str, method: str) -> ChannelError:
        return ChannelError(f"NOT_FOUND - no {what} {name!r} in {self.alias!r}", (50, 10), method, "404")

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        return topology.exists(self.alias, queue)

    def _size(self, queue: str) -> int:
        return topology.size(self.alias, queue, PASSIVE_COUNT_LIMIT)

    def queue_bind(
        self, queue: str, exchange: str | None = None, routing_key: str = "", arguments: Any = None, **kwargs: Any
    ) -> None:
        topology.bind(self.alias, exchange or "amq.direct", routing_key or "", queue)
        self._transport.routing_tables.clear()
        self._transport.bindings_made.setdefault(queue, set()).add((exchange or "amq.direct", routing_key or ""))

    def queue_unbind(
        self, queue: str, exchange: str | None = None, routing_key: str = "", arguments: Any = None, **kwargs: Any
    ) -> None:
        topology.unbind(self.alias, exchange or "amq.direct", routing_key or "", queue)
        self._transport.routing_tables.clear()
        self._transport.bindings_made.get(queue, set()).discard((exchange or "amq.direct", routing_key or ""))

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any) -> None:
        if if_empty and self._size(queue):
            return
        if if_unused and any(queue in channel.consumers for channel in self._transport.channels):
            return
        self._delete(queue)

    def _delete(self, queue: str, *args: Any, **kwargs: Any) -> None:
        # Queued acks first: without their rows they would be reported as lost leases.
        self._transport.flush()
        self._transport.declarations.pop(queue, None)
        self._transport.bindings_made.pop(queue, None)
        self._transport.routing_tables.clear()
        outside_transaction(self.alias, lambda: topology.delete(self.alias, queue))

    def _purge(self, queue: str) -> int:
        return topology.purge(self.alias, queue)

    def get_table(self, exchange: str) -> list[tuple[str, Any, str]]:
        """The routes of a topic exchange, cached for a moment: each worker publishes a heartbeat there every two
        seconds."""
        cache, now = self._transport.routing_tables, monotonic()
        if exchange not in cache or now > cache[exchange][0]:
            kind = self.typeof(exchange)
            found = topology.bindings(self.alias, exchange)
            cache[exchange] = (
                now + ROUTES_CACHED_FOR,
                [kind.prepare_bind(queue, exchange, key, None) for _, key, queue in found],
            )
        return list(cache[exchange][1])

    def list_bindings(self) -> Any:
        return ((queue, exchange, key) for exchange, key, queue in topology.bindings(self.alias))

    def get_exchanges(self) -> list[str]:
        return sorted({exchange for exchange, _, _ in topology.bindings(self.alias)})

    # -- publishing ------------------------------------------------------------------------------------------------

    def _inplace_augment_message(self, message: dict[str, Any], exchange: str, routing_key: str) -> None:
        message["properties"].setdefault("delivery_info", {}).update(exchange=exchange, routing_key=routing_key)

    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any) -> None:
        topology.check_binding(exchange or "", routing_key or "")
        self._inplace_augment_message(message, exchange, routing_key)
        if not exchange:
            self._put(routing_key, message)
            return
        kind = self._kind_of(exchange) or "direct"
        if kind == "topic" or due_at(message) is not None:
            self._put_all(exchange, routing_key, message)
        elif not self._put_routed(exchange, None if kind == "fanout" else routing_key, message):
            self._unroutable(exchange, routing_key, message)

    def _put_all(self, exchange: str, routing_key: str, message: dict[str, Any]) -> None:
        queues = self.typeof(exchange).lookup(self.get_table(exchange), exchange, routing_key, None)
        if not queues:
            self._unroutable(exchange, routing_key, message)
            return
        with self._publishing() as connection, atomic_on(connection):
            for queue in sorted(queues):
                self._store(connection, queue, message)

    def _unroutable(self, exchange: str, routing_key: str, message: dict[str, Any]) -> None:
        """Drop an unroutable message, as a broker does, or put it into the dead-letter queue if there is one."""
        if self.deadletter_queue:
            warnings.warn(
                UndeliverableWarning(UNDELIVERABLE_FMT.format(exchange=exchange, routing_key=routing_key)), stacklevel=4
            )
            topology.declare(self.alias, Declaration(self.deadletter_queue, True, False, None))
            self._put(self.deadletter_queue, message)

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        with self._publishing() as connection:
            self._store(connection, queue, message)

    def _put_routed(self, exchange: str, routing_key: str | None, message: dict[str, Any]) -> int:
        # Remote control acts now: a ping inside of a transaction would wait for its commit, and a rollback would undo a
        # revoke.
        is_control = exchange.endswith(CONTROL_SUFFIX)
        row = row_to_route(message)
        tables = BrokerTables(DeclaredQueue._meta.db_table, Binding._meta.db_table)
        with self._publishing(isolated=is_control) as connection:
            count = queue_sql(BrokerQueue, connection).fanout.insert_routed(
                connection, tables, row, exchange, routing_key
            )
            if count:
                notifier.sent(BrokerQueue, connection)
        return count

    def _store(self, connection: Any, queue: str, message: dict[str, Any]) -> None:
        declaration = self._transport.declarations.get(queue)
        row = row_for(message, queue, declaration.ttl_ms if declaration is not None else None)
        due = due_at(message)
        send.insert(BrokerQueue, connection, row if due is None else until_due(row, due), bytes, None, due)

    def _publishing(self, isolated: bool = False) -> Any:
        """The connection of the caller's transaction, or a separate one; a lost one is closed, so that a retry opens
        another."""
        if (isolated or not self._transport.options.transactional) and connections[self.alias].in_atomic_block:
            return isolated_connection(self.alias)
        return _Publishing(connections[self.alias])

    # -- consuming -------------------------------------------------------------------------------------------------

    def basic_consume(self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **kwargs: Any) -> None:
        topology.check_name("queue", queue, MAX_NAME_LENGTH)
        self._tag_to_queue[consumer_tag] = queue
        self._active_queues.append(queue)
        self._consumers.add(consumer_tag)
        self.consumers[queue] = (callback, bool(no_ack))
        self._transport.consuming(acks=not no_ack)

    def basic_cancel(self, consumer_tag: str) -> None:
        if consumer_tag not in self._consumers:
            return
        self._consumers.remove(consumer_tag)
        queue = self._tag_to_queue.pop(consumer_tag, None)
        if queue in self._active_queues:
            self._active_queues.remove(queue)
        if queue is not None and queue not in self._active_queues:
            self.consumers.pop(queue, None)
            # Other consumers may have the messages read ahead for it.
            self._transport.release_read_ahead(self, queue)

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Delivered | None:
        topology.check_name("queue", queue, MAX_NAME_LENGTH)
        for row, lease in self._transport.claim_now(self, [queue], 1):
            return self.received(row, lease, no_ack)
        return None

    def deliver(self, row: Claimed, lease: LeasedMessage) -> bool:
        """Deliver a claimed message to its consumer; False: the consumer is gone, or the message is poison."""
        queue = self._transport.queue_of(row)
        consumer = self.consumers.get(queue)
        if consumer is None:
            self.release([lease], cancelled=False)
            return False
        callback, no_ack = consumer
        message = self.received(row, lease, no_ack)
        if message is None:
            return False
        message.queue = queue
        callback(message)
        return True

    def received(self, row: Claimed, lease: LeasedMessage, no_ack: bool) -> Delivered | None:
        """The message of a claimed row; None: the row is not readable and was moved to poison."""
        try:
            payload = payload_of(row, lease.token)
            payload["lease"] = lease
            message = Delivered(payload, channel=self)
        except (UndecodableMessage, LookupError, TypeError, ValueError, AttributeError) as error:
            text = str(error) if isinstance(error, UndecodableMessage) else f"{type(error).__name__}: {error}"
            self._move_to_poison(lease, f"Not a kombu message: {text}")
            return None
        if no_ack:
            self.acked(lease)
        else:
            self.qos.append(message, message.delivery_tag)
        return message

    def drain_events(self, timeout: float | None = None, callback: Any = None) -> None:
        self._transport.drain_events(self._transport, timeout=timeout)

    # -- ending ----------------------------------------------------------------------------------------------------

    def acked(self, lease: LeasedMessage) -> None:
        """Queue the ack of a message."""
        self._transport.acked(lease)

    def release(self, leases: list[LeasedMessage], *, cancelled: bool) -> None:
        """End leases now, or as soon as the database is available."""
        self._transport.release(leases, cancelled=cancelled)

    def is_spent(self, message: Delivered) -> bool:
        """Whether a message becomes poison instead of being requeued: its task killed its process in each of
        ``max_deliveries``."""
        limit = self._transport.options.max_deliveries
        if not message.process_died or not limit or message.deliveries < limit:
            return False
        message.reason = f"max_deliveries: its process died, after {message.deliveries} deliveries."
        return True

    def move_to_poison(self, message: Delivered) -> None:
        """Move a message to poison that its consumer rejects."""
        assert message.lease is not None
        self._move_to_poison(message.lease, message.reason or rejection_reason(message), **message.failure)

    @property
    def keeps_failed(self) -> bool:
        """Whether a task that has failed for good becomes poison."""
        return bool(self._transport.options.keep_failed)

    def _move_to_poison(self, lease: LeasedMessage, reason: str, **columns: Any) -> None:
        """Move a leased message to poison. After an error its lease is released, so that it is delivered again: a lease
        without an end would be renewed for as long as the worker lives."""

        def move() -> bool:
            with transaction.atomic(using=self.alias):
                return poison.move_to_poison(self.alias, lease, in_one_line(reason, 500), **columns)

        try:
            with_retries(self.alias, move)
        except Exception:
            self.release([lease], cancelled=True)
            raise
        self._transport.forget([lease])

    def close(self) -> None:
        if not self.closed:
            self._transport.release_read_ahead(self)
        super().close()


class _Publishing:
    """Context manager of the thread's own connection, which it closes after an error that says the connection is
    lost."""

    __slots__ = ("_connection",)

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __enter__(self) -> Any:
        return self._connection

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        connection = self._connection
        if (
            isinstance(error, Error)
            and not connection.in_atomic_block
            and backend_of(connection).error_kind(error) is ErrorKind.CONNECTION
        ):
            connection.close()
