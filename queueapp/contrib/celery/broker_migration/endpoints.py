"""The brokers that are ends of a move: this package, Redis in kombu's layout (a list per queue and priority, and a hash
of the messages in flight), and any other kombu broker.

In Redis, messages taken out are in a list, ``queueapp.moving.<queue>``; the records of messages put are in a set,
``queueapp.moved.<queue>``. Both are empty unless a move is running or was interrupted.

Another kombu broker delivers a message again when its receiver is gone, so nothing is lost; it has no record of the
messages that were put, so the last few messages before a kill may be duplicated.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from time import monotonic, time
from typing import Any

from django.db import connections, transaction
from django.db.models import Q
from kombu import Connection, Producer
from kombu.utils.json import dumps, loads
from kombu.utils.uuid import uuid as new_tag

from ....errors import UndecodableMessage
from ....models import DelayedMessage, Now
from .. import topology
from ..models import BrokerQueue, CompletedMove, DeclaredQueue, PendingMove
from ..serialization import payload_of
from ..topology import Declaration
from .envelope import Envelope, closed, digest, key_of, opened

_NO_TOKEN = uuid.UUID(int=0)


class QueueappEndpoint:
    """The queues of one database. As a target, it stores a message once, however often it is put."""

    exact = True
    inverts = False

    def __init__(self, connection: Connection) -> None:
        self._channel: Any = connection.default_channel
        self.alias: str = self._channel.alias
        self._unreadable_keys: dict[Any, set[int]] = {BrokerQueue: set(), DelayedMessage: set()}

    @property
    def unreadable(self) -> int:
        """Number of messages that kombu did not write. No other broker could store them, so they stay."""
        return sum(map(len, self._unreadable_keys.values()))

    def queues(self) -> list[str]:
        """The queues without an expiry."""
        names = DeclaredQueue.objects.using(self.alias).filter(expires_at=None).values_list("name", flat=True)
        taken_out = PendingMove.objects.using(self.alias).values_list("queue", flat=True)
        return sorted({*names, *taken_out})

    def bindings(self, queue: str) -> list[tuple[str, str, str]]:
        """(exchange, its kind, routing key) by which messages come into a queue."""
        found = topology.bindings_of(self.alias, queue)
        return [(exchange, topology.exchange_kind(self.alias, exchange) or "direct", key) for exchange, key in found]

    def declare(self, queue: str, bindings: Sequence[tuple[str, str, str]]) -> None:
        """Declare a queue and its bindings, if they do not exist."""
        if not topology.exists(self.alias, queue):
            topology.declare(self.alias, Declaration(queue, durable=True, auto_delete=False, arguments=None))
        for exchange, kind, key in bindings:
            if topology.exchange_kind(self.alias, exchange) is None:
                topology.declare_exchange(self.alias, exchange, kind)
            topology.bind(self.alias, exchange, key, queue)

    # -- as a source -----------------------------------------------------------------------------------------------

    def take_out(self, queue: str, limit: int) -> None:
        """Take up to ``limit`` messages out of a queue: the most urgent first, delayed ones last. Messages in flight
        stay."""
        with transaction.atomic(using=self.alias):
            ready = topology.ready_messages(self.alias, queue).order_by("-priority", "seq")
            kept = self._take(ready, BrokerQueue, limit)
            if len(kept) < limit:
                delayed = topology.delayed(self.alias, queue).order_by("due", "number")
                kept += self._take(delayed, DelayedMessage, limit - len(kept))
            PendingMove.objects.using(self.alias).bulk_create(kept)

    def _take(self, waiting: Any, kind: Any, limit: int) -> list[PendingMove]:
        unreadable_keys = self._unreadable_keys[kind]
        rows = waiting.exclude(pk__in=unreadable_keys).select_for_update(skip_locked=True)[:limit]
        kept = {}
        for row in rows:
            message_id = row.message_id if kind is DelayedMessage else row.id
            body = None if row.body is None else bytes(row.body)
            try:
                _message_of(message_id, row.headers, body)
            except UndecodableMessage:
                unreadable_keys.add(row.pk)
                continue
            kept[row.pk] = PendingMove(message_id=message_id, queue=row.recipient, headers=row.headers, body=body)
        kind.objects.using(self.alias).filter(pk__in=kept).delete()
        return list(kept.values())

    def taken_out(self, queue: str) -> list[Envelope]:
        """The messages taken out of a queue and not confirmed, in their order."""
        rows = PendingMove.objects.using(self.alias).filter(queue=queue)
        return [
            Envelope(
                digest(f"{row.message_id} {row.number}"),
                queue,
                _message_of(row.message_id, row.headers, row.body),
                row.number,
            )
            for row in rows.iterator()
        ]

    def confirm(self, queue: str, envelopes: Sequence[Envelope]) -> None:
        """Delete messages that the target has."""
        PendingMove.objects.using(self.alias).filter(pk__in=[envelope.number for envelope in envelopes]).delete()

    def put_back(self, queue: str) -> int:
        """Return the messages taken out of a queue, for a move that is given up; returns the number."""
        with transaction.atomic(using=self.alias):
            rows = list(PendingMove.objects.using(self.alias).filter(queue=queue).select_for_update())
            connection = connections[self.alias]
            for row in rows:
                message = _message_of(row.message_id, row.headers, row.body)
                self._channel._store(connection, queue, message)
            PendingMove.objects.using(self.alias).filter(pk__in=[row.pk for row in rows]).delete()
        return len(rows)

    def recover_orphans(self, queue: str) -> str:
        """Nothing: the leases of a dead worker expire, and its messages are ready again."""
        return ""

    def remaining(self, queue: str) -> tuple[int, int]:
        """(messages to move, delayed ones included; messages in flight) of a queue."""
        rows = (
            BrokerQueue.objects.using(self.alias).filter(recipient=queue).filter(Q(expires=None) | Q(expires__gt=Now()))
        )
        leased = rows.filter(lease_expires__gte=Now()).count()
        taken_out = PendingMove.objects.using(self.alias).filter(queue=queue).count()
        waiting = rows.exclude(pk__in=self._unreadable_keys[BrokerQueue]).count() - leased
        delayed = topology.delayed(self.alias, queue).exclude(pk__in=self._unreadable_keys[DelayedMessage]).count()
        return waiting + delayed + taken_out, leased

    # -- as a target -----------------------------------------------------------------------------------------------

    def put(self, queue: str, envelopes: Sequence[Envelope]) -> int:
        """Put messages into a queue that it does not have yet, in one transaction; returns the number."""
        with transaction.atomic(using=self.alias):
            known = self.known_keys(queue, envelopes)
            new = {envelope.key: envelope for envelope in envelopes if envelope.key not in known}
            connection = connections[self.alias]
            for envelope in new.values():
                self._channel._store(connection, queue, envelope.message)
            CompletedMove.objects.using(self.alias).bulk_create(CompletedMove(key=uuid.UUID(key)) for key in new)
        return len(new)

    def forget(self, queue: str, envelopes: Sequence[Envelope]) -> None:
        """Delete the records of messages that the source has removed: they cannot come again."""
        CompletedMove.objects.using(self.alias).filter(
            pk__in=[uuid.UUID(envelope.key) for envelope in envelopes]
        ).delete()

    def known_keys(self, queue: str, envelopes: Sequence[Envelope]) -> set[str]:
        """The keys of the messages that this broker has."""
        rows = CompletedMove.objects.using(self.alias).filter(
            pk__in=[uuid.UUID(envelope.key) for envelope in envelopes]
        )
        return {key.hex for key in rows.values_list("key", flat=True)}

    def close(self) -> None:
        """Nothing to close."""


def _message_of(message_id: uuid.UUID, headers: str, body: bytes | memoryview | None) -> dict[str, Any]:
    """The kombu message of a row."""
    message = payload_of((0, message_id.bytes, headers, bytes(body or b""), 0, 0), _NO_TOKEN)
    message.pop("redelivered", None)
    properties = message["properties"]
    properties.pop("delivery_tag", None)
    properties.get("delivery_info", {}).pop("redelivered", None)
    return message


#: Exchanges with one queue per worker, whose messages are for that worker only.
_WORKER_EXCHANGES = ("celery.pidbox", "reply.celery.pidbox", "celeryev")
_TAKEN_OUT = "queueapp.moving."
#: Seconds that the bindings are cached.
BINDINGS_CACHED_FOR = 2.0
#: Seconds between two inspections of the workers, and seconds that they have for a reply.
INSPECT_INTERVAL, INSPECT_TIMEOUT = 5.0, 2.0
#: Messages delivered this many seconds before an inspection are known to their workers.
KNOWN_AFTER = 3.0


class RedisEndpoint:
    """A Redis database. As a target, it stores a message once, however often it is put."""

    exact = True
    inverts = True
    unreadable = 0

    def __init__(self, connection: Connection) -> None:
        import redis

        self._connection = connection
        self._channel: Any = connection.default_channel
        self._prefix = str(self._channel.global_keyprefix or "")
        self._client = redis.Redis(connection_pool=self._channel.pool)
        self._inspect_at = self._bindings_at = 0.0
        self._note = ""
        self._bindings: list[tuple[str, str, str]] = []

    def queues(self) -> list[str]:
        """The bound queues, those with messages, and those of an interrupted move."""
        bound = self._bound()
        found = {queue for exchange, _, queue in bound if exchange not in _WORKER_EXCHANGES}
        of_workers = {queue for exchange, _, queue in bound if exchange in _WORKER_EXCHANGES}
        for key in self._client.scan_iter(match=f"{self._prefix}*", count=1000, _type="list"):
            name = _text(key).removeprefix(self._prefix)
            if name.startswith(_TAKEN_OUT):
                found.add(name.removeprefix(_TAKEN_OUT))
            elif _is_kombus(self._client.lindex(key, 0)):
                found.add(name.partition(self._channel.sep)[0])
        return sorted(found - of_workers)

    def _bound(self) -> list[tuple[str, str, str]]:
        """(exchange, routing key, queue) of all bindings. Cached for a moment: each read scans all keys of the
        database, which may hold the results of a million tasks."""
        if monotonic() >= self._bindings_at:
            self._bindings = list(self._all_bindings())
            self._bindings_at = monotonic() + BINDINGS_CACHED_FOR
        return self._bindings

    def _all_bindings(self) -> Iterator[tuple[str, str, str]]:
        start = self._key(self._channel.keyprefix_queue % "")
        for key in self._client.scan_iter(match=f"{start}*", count=1000):
            if self._client.type(key) != b"set":
                continue
            for member in self._client.smembers(key):
                parts = _text(member).split(self._channel.sep)
                if len(parts) == 3:
                    yield _text(key).removeprefix(start), parts[0], parts[2]

    def bindings(self, queue: str) -> list[tuple[str, str, str]]:
        """(exchange, its kind, routing key). Redis does not store the kind of an exchange: one with wildcards is a
        topic."""
        return [
            (exchange, "topic" if set(key) & set("*#") else "direct", key)
            for exchange, key, bound in self._bound()
            if bound == queue and exchange not in _WORKER_EXCHANGES
        ]

    def declare(self, queue: str, bindings: Sequence[tuple[str, str, str]]) -> None:
        """Bind a queue; Redis creates it with its first message."""
        for exchange, kind, key in bindings:
            self._channel.exchange_declare(exchange, kind, durable=True)
            self._channel.queue_bind(queue, exchange, key)

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _lists(self, queue: str) -> list[str]:
        """The lists of a queue, the most urgent first."""
        return [self._key(self._channel._q_for_pri(queue, step)) for step in self._channel.priority_steps]

    def _taken_out_key(self, queue: str) -> str:
        return self._key(_TAKEN_OUT + queue)

    def _confirmed_key(self, queue: str) -> str:
        return self._key(f"queueapp.moved.{queue}")

    # -- as a source -----------------------------------------------------------------------------------------------

    def take_out(self, queue: str, limit: int) -> None:
        """Take up to ``limit`` messages out of a queue."""
        for waiting in self._lists(queue):
            taken = min(limit, int(self._client.llen(waiting)))
            if taken:
                with self._client.pipeline(transaction=True) as pipe:
                    for _ in range(taken):
                        pipe.rpoplpush(waiting, self._taken_out_key(queue))
                    limit -= sum(payload is not None for payload in pipe.execute())
            if limit <= 0:
                return

    def taken_out(self, queue: str) -> list[Envelope]:
        """The messages taken out of a queue, in their order."""
        return [
            _envelope_in(queue, _text(payload))
            for payload in reversed(self._client.lrange(self._taken_out_key(queue), 0, -1))
        ]

    def confirm(self, queue: str, envelopes: Sequence[Envelope]) -> None:
        """Delete messages that the target has: the oldest ones taken out, which only this migrator removes."""
        if envelopes:
            self._client.ltrim(self._taken_out_key(queue), 0, -(len(envelopes) + 1))

    def put_back(self, queue: str) -> int:
        """Return the messages taken out of a queue to the head of its lists; returns the number."""
        count = 0
        # The newest first: each is put before the one that arrived after it.
        while (payload := self._client.lindex(self._taken_out_key(queue), 0)) is not None:
            with self._client.pipeline(transaction=True) as pipe:
                pipe.lpop(self._taken_out_key(queue))
                pipe.rpush(self._list_of(queue, loads(_text(payload))), payload)
                pipe.execute()
            count += 1
        return count

    def _list_of(self, queue: str, message: dict[str, Any]) -> str:
        priority = self._channel._get_message_priority(message, reverse=False)
        return self._key(self._channel._q_for_pri(queue, priority))

    def remaining(self, queue: str) -> tuple[int, int]:
        """(ready messages, messages in flight) of a queue."""
        waiting = sum(int(self._client.llen(key)) for key in [*self._lists(queue), self._taken_out_key(queue)])
        return waiting, sum(1 for _ in self._with_workers(queue))

    def _with_workers(self, queue: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """(tag, message) of the messages in flight of a queue, those of killed workers included."""
        bound = {(exchange, key): name for exchange, key, name in self._bound()}
        for tag, text in self._client.hscan_iter(self._key(self._channel.unacked_key), count=500):
            message, exchange, key = loads(_text(text))
            if bound.get((exchange, key), key) == queue:
                yield _text(tag), message

    def recover_orphans(self, queue: str) -> str:
        """Take out the messages of workers that are gone. All connected workers are asked for their tasks; if one of
        them does not reply, nothing is taken from any of them. Returns why messages stay, or ''."""
        if monotonic() < self._inspect_at:
            return self._note
        self._note = self._take_orphans(queue) if any(self._with_workers(queue)) else ""
        self._inspect_at = monotonic() + INSPECT_INTERVAL if self._note else 0.0
        return self._note

    def _take_orphans(self, queue: str) -> str:
        began = time()
        connected = self._count_workers()
        answers, running = self._tasks_of_workers() if connected else (0, set())
        if answers < connected:
            return (
                f"{connected - answers} of {connected} workers do not reply: stop them, and their messages are moved."
            )
        index = self._key(self._channel.unacked_index_key)
        unacked = self._key(self._channel.unacked_key)
        kept = 0
        for tag, message in list(self._with_workers(queue)):
            since = self._client.zscore(index, tag)
            task = (message.get("headers") or {}).get("id") or message["properties"].get("correlation_id")
            if task in running or (since is not None and since > began - KNOWN_AFTER):
                kept += 1
                continue
            # The process that removes it from the index owns it; if it was removed before, an interrupted run of this
            # one did.
            if since is None or self._client.zrem(index, tag):
                with self._client.pipeline(transaction=True) as pipe:
                    pipe.hdel(unacked, tag)
                    pipe.lpush(self._taken_out_key(queue), dumps(message))
                    pipe.execute()
        return f"{kept} messages are in flight; they stay with their workers until these ack or stop." if kept else ""

    def _count_workers(self) -> int:
        """Number of workers that receive broadcasts, counted by a ping that no worker is the destination of."""
        body = json.dumps({"method": "ping", "arguments": {}, "destination": ["no-worker"]})
        message = self._channel.prepare_message(body, None, "application/json", "utf-8", {}, {})
        self._channel._inplace_augment_message(message, "celery.pidbox", "")
        message["properties"]["delivery_tag"] = new_tag()
        topic = self._key(self._channel._get_publish_topic("celery.pidbox", ""))
        return int(self._client.publish(topic, dumps(message)))

    def _tasks_of_workers(self) -> tuple[int, set[str]]:
        """Number of workers that reply, and the ids of the tasks that they have."""
        from celery import Celery

        app = Celery(broker=self._connection.as_uri(include_password=True), set_as_current=False)
        app.conf.broker_transport_options = self._connection.transport_options
        inspect = app.control.inspect(timeout=INSPECT_TIMEOUT)
        task_ids: set[str] = set()
        answered: set[str] | None = None
        try:
            # In the order of a task's states: one that moves on meanwhile is seen in its next state.
            for query in (inspect.scheduled, inspect.reserved, inspect.active):
                replies = query() or {}
                answered = set(replies) if answered is None else answered & set(replies)
                for tasks in replies.values():
                    task_ids |= {str((task.get("request") or task)["id"]) for task in tasks}
        finally:
            app.close()
        return len(answered or ()), task_ids

    # -- as a target -----------------------------------------------------------------------------------------------

    def put(self, queue: str, envelopes: Sequence[Envelope]) -> int:
        """Put messages into a queue that it does not have yet, and record them, in one transaction; returns the
        number."""
        with self._client.pipeline(transaction=False) as pipe:
            for envelope in envelopes:
                pipe.sismember(self._confirmed_key(queue), envelope.key)
            known = pipe.execute()
        new = [envelope for envelope, is_known in zip(envelopes, known, strict=True) if not is_known]
        with self._client.pipeline(transaction=True) as pipe:
            for envelope in new:
                message = closed(envelope.message)
                message["properties"].update(delivery_tag=new_tag(), delivery_mode=2)
                message["properties"].setdefault("delivery_info", {"exchange": "", "routing_key": queue})
                pipe.sadd(self._confirmed_key(queue), envelope.key)
                pipe.lpush(self._list_of(queue, message), dumps(message))
            pipe.execute()
        return len(new)

    def forget(self, queue: str, envelopes: Sequence[Envelope]) -> None:
        """Delete the records of messages that the source has removed."""
        if envelopes:
            self._client.srem(self._confirmed_key(queue), *[envelope.key for envelope in envelopes])

    def known_keys(self, queue: str, envelopes: Sequence[Envelope]) -> set[str]:
        """The keys of the messages that this broker has."""
        return {
            envelope.key for envelope in envelopes if self._client.sismember(self._confirmed_key(queue), envelope.key)
        }

    def close(self) -> None:
        """Close the connection."""
        self._connection.release()


def _text(value: Any) -> str:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


def _is_kombus(payload: Any) -> bool:
    try:
        message = json.loads(payload)
    except (TypeError, ValueError):
        return False
    return isinstance(message, dict) and {"body", "properties", "headers"} <= message.keys()


def _envelope_in(queue: str, text: str) -> Envelope:
    message = loads(text)
    return Envelope(key_of(queue, message), queue, opened(message))


_PROPERTIES = (
    "correlation_id", "reply_to", "priority", "delivery_mode", "timestamp", "message_id", "type", "app_id",
    "expiration",
)  # fmt: skip


class KombuEndpoint:
    """A broker that is used through kombu's interface only. Its queues must be named."""

    exact = False
    inverts = False
    unreadable = 0

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._channel: Any = connection.default_channel
        self._producer = Producer(self._channel)
        self._unacked: dict[str, list[tuple[Envelope, Any]]] = {}

    def queues(self) -> list[str]:
        """Empty: kombu cannot list the queues."""
        return []

    def bindings(self, queue: str) -> list[tuple[str, str, str]]:
        """Celery's default binding of a queue."""
        return [(queue, "direct", queue)]

    def declare(self, queue: str, bindings: Sequence[tuple[str, str, str]]) -> None:
        """Declare a queue and its bindings."""
        self._channel.queue_declare(queue=queue, durable=True, auto_delete=False)
        for exchange, kind, key in bindings:
            self._channel.exchange_declare(exchange=exchange, type=kind, durable=True, auto_delete=False)
            self._channel.queue_bind(queue=queue, exchange=exchange, routing_key=key)

    def take_out(self, queue: str, limit: int) -> None:
        """Receive up to ``limit`` messages, unacked until they are confirmed."""
        unacked = self._unacked.setdefault(queue, [])
        while len(unacked) < limit and (message := self._channel.basic_get(queue=queue, no_ack=False)) is not None:
            if isinstance(message, Sequence) or not hasattr(message, "properties"):
                break
            unacked.append((_envelope_of(queue, message), message))

    def taken_out(self, queue: str) -> list[Envelope]:
        """The messages received and not acked."""
        return [envelope for envelope, _ in self._unacked.get(queue, ())]

    def confirm(self, queue: str, envelopes: Sequence[Envelope]) -> None:
        """Ack these messages."""
        for _, message in self._unacked[queue][: len(envelopes)]:
            self._channel.basic_ack(message.delivery_tag)
        del self._unacked[queue][: len(envelopes)]

    def put_back(self, queue: str) -> int:
        """Nothing: the broker requeues unacked messages."""
        return 0

    def recover_orphans(self, queue: str) -> str:
        """Nothing: the broker requeues them."""
        return ""

    def remaining(self, queue: str) -> tuple[int, int]:
        """(ready messages, 0): the broker does not report messages in flight."""
        return int(self._channel.queue_declare(queue=queue, passive=True).message_count), 0

    def put(self, queue: str, envelopes: Sequence[Envelope]) -> int:
        """Publish messages into a queue; returns the number."""
        for envelope in envelopes:
            message = envelope.message
            properties = {name: value for name in _PROPERTIES if (value := message["properties"].get(name)) is not None}
            if "expiration" in properties:
                properties["expiration"] = float(properties["expiration"]) / 1000  # kombu takes seconds here
            self._producer.publish(
                message.get("body") or b"",
                exchange="",
                routing_key=queue,
                content_type=message.get("content-type") or "application/octet-stream",
                content_encoding=message.get("content-encoding") or "binary",
                headers=message.get("headers") or {},
                **properties,
            )
        return len(envelopes)

    def forget(self, queue: str, envelopes: Sequence[Envelope]) -> None:
        """Nothing: the broker has no record of puts."""

    def known_keys(self, queue: str, envelopes: Sequence[Envelope]) -> set[str]:
        """Empty: the broker has no record of puts."""
        return set()

    def close(self) -> None:
        """Close the connection; unacked messages are requeued."""
        self._connection.release()


def _envelope_of(queue: str, message: Any) -> Envelope:
    properties = dict(message.properties or {})
    properties.setdefault("delivery_info", {})
    parts = {
        "body": message.body,
        "content-type": message.content_type,
        "content-encoding": message.content_encoding,
        "headers": dict(message.headers or {}),
        "properties": properties,
    }
    return Envelope(key_of(queue, parts), queue, parts)
