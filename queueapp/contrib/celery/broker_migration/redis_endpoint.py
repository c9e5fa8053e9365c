"""Redis as one end of a move, in kombu's layout: a list per queue and priority, and a hash of the messages in flight.

Messages taken out are in a Redis list, ``queueapp.moving.<queue>``; the records of messages put are in a set,
``queueapp.moved.<queue>``. Both are empty unless a move is running or was interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from time import monotonic, time
from typing import Any

from kombu import Connection
from kombu.utils.json import dumps, loads
from kombu.utils.uuid import uuid

from .envelope import Envelope, closed, key_of, opened

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
            _envelope_of(queue, _text(payload))
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
        message["properties"]["delivery_tag"] = uuid()
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
                message["properties"].update(delivery_tag=uuid(), delivery_mode=2)
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


def _envelope_of(queue: str, text: str) -> Envelope:
    message = loads(text)
    return Envelope(key_of(queue, message), queue, opened(message))
