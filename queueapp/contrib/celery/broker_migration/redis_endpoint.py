"""Redis as one end of a move, by kombu's own layout: a list per queue and priority, and what workers have in a hash.

What is set aside lies in a list of Redis, ``queueapp.aside.<queue>``, and what has arrived is remembered in a set,
``queueapp.arrived.<queue>``. Both are empty unless a move is under way or was interrupted.
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

#: Exchanges of which each worker has a queue of its own: what is in those is for nobody else.
_OF_WORKERS = ("celery.pidbox", "reply.celery.pidbox", "celeryev")
_ASIDE = "queueapp.aside."
#: Seconds between two looks at the bindings.
LOOK_EVERY = 2.0
#: Seconds between two questions to the workers, and that they have for an answer.
ASK_EVERY, ANSWER = 5.0, 2.0
#: What was handed out this long before the workers are asked is known to them.
SETTLED = 3.0


class RedisEndpoint:
    """A database of Redis. As the target of a move it takes a message once, however often it is put."""

    exact = True
    inverts = True
    unreadable = 0

    def __init__(self, connection: Connection) -> None:
        import redis

        self._connection = connection
        self._channel: Any = connection.default_channel
        self._prefix = str(self._channel.global_keyprefix or "")
        self._client = redis.Redis(connection_pool=self._channel.pool)
        self._ask_at = self._look_at = 0.0
        self._note = ""
        self._bindings: list[tuple[str, str, str]] = []

    def queues(self) -> list[str]:
        """Queues that a program has bound, those that were only published to, and those of an interrupted move."""
        bound = self._bound()
        found = {queue for exchange, _, queue in bound if exchange not in _OF_WORKERS}
        of_workers = {queue for exchange, _, queue in bound if exchange in _OF_WORKERS}
        for key in self._client.scan_iter(match=f"{self._prefix}*", count=1000, _type="list"):
            name = _text(key).removeprefix(self._prefix)
            if name.startswith(_ASIDE):
                found.add(name.removeprefix(_ASIDE))
            elif _is_kombus(self._client.lindex(key, 0)):
                found.add(name.partition(self._channel.sep)[0])
        return sorted(found - of_workers)

    def _bound(self) -> list[tuple[str, str, str]]:
        """(exchange, routing key, queue) of all bindings. Remembered for a moment: each look walks over all keys of the database,
        which may hold the results of a million tasks."""
        if monotonic() >= self._look_at:
            self._bindings = list(self._all_bindings())
            self._look_at = monotonic() + LOOK_EVERY
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
        """(exchange, its kind, routing key). Of what kind an exchange is, Redis does not know: one with wildcards is a topic."""
        return [
            (exchange, "topic" if set(key) & set("*#") else "direct", key)
            for exchange, key, bound in self._bound()
            if bound == queue and exchange not in _OF_WORKERS
        ]

    def declare(self, queue: str, bindings: Sequence[tuple[str, str, str]]) -> None:
        """Bind a queue; Redis makes it with its first message."""
        for exchange, kind, key in bindings:
            self._channel.exchange_declare(exchange, kind, durable=True)
            self._channel.queue_bind(queue, exchange, key)

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _lists(self, queue: str) -> list[str]:
        """Its lists, the most urgent first."""
        return [self._key(self._channel._q_for_pri(queue, step)) for step in self._channel.priority_steps]

    def _aside(self, queue: str) -> str:
        return self._key(_ASIDE + queue)

    def _arrived(self, queue: str) -> str:
        return self._key(f"queueapp.arrived.{queue}")

    # -- as a source -----------------------------------------------------------------------------------------------

    def set_aside(self, queue: str, limit: int) -> None:
        """Take so many messages out of a queue."""
        for waiting in self._lists(queue):
            taken = min(limit, int(self._client.llen(waiting)))
            if taken:
                with self._client.pipeline(transaction=True) as pipe:
                    for _ in range(taken):
                        pipe.rpoplpush(waiting, self._aside(queue))
                    limit -= sum(one is not None for one in pipe.execute())
            if limit <= 0:
                return

    def aside(self, queue: str) -> list[Envelope]:
        """What was set aside of a queue, in its order."""
        return [_carried(queue, _text(one)) for one in reversed(self._client.lrange(self._aside(queue), 0, -1))]

    def arrived(self, queue: str, carried: Sequence[Envelope]) -> None:
        """These have arrived: the oldest of what is aside, which only this migrator takes away."""
        if carried:
            self._client.ltrim(self._aside(queue), 0, -(len(carried) + 1))

    def put_back(self, queue: str) -> int:
        """Give back what was set aside of a queue, to the head of its lists."""
        count = 0
        # The youngest first: each goes before the one that came after it.
        while (payload := self._client.lindex(self._aside(queue), 0)) is not None:
            with self._client.pipeline(transaction=True) as pipe:
                pipe.lpop(self._aside(queue))
                pipe.rpush(self._list_of(queue, loads(_text(payload))), payload)
                pipe.execute()
            count += 1
        return count

    def _list_of(self, queue: str, message: dict[str, Any]) -> str:
        priority = self._channel._get_message_priority(message, reverse=False)
        return self._key(self._channel._q_for_pri(queue, priority))

    def left(self, queue: str) -> tuple[int, int]:
        """How many messages wait in a queue, and how many are with workers."""
        waiting = sum(int(self._client.llen(one)) for one in [*self._lists(queue), self._aside(queue)])
        return waiting, sum(1 for _ in self._with_workers(queue))

    def _with_workers(self, queue: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """(tag, message) of what workers have of a queue, or had when they were killed."""
        bound = {(exchange, key): name for exchange, key, name in self._bound()}
        for tag, text in self._client.hscan_iter(self._key(self._channel.unacked_key), count=500):
            message, exchange, key = loads(_text(text))
            if bound.get((exchange, key), key) == queue:
                yield _text(tag), message

    def orphaned(self, queue: str) -> str:
        """Set aside what workers of a queue had that are gone. Whoever is connected is asked what he has; if one does not
        answer, nothing is taken, and that is what is returned."""
        if monotonic() < self._ask_at:
            return self._note
        self._note = self._take_orphans(queue) if any(self._with_workers(queue)) else ""
        self._ask_at = monotonic() + ASK_EVERY if self._note else 0.0
        return self._note

    def _take_orphans(self, queue: str) -> str:
        began = time()
        connected = self._connected()
        answers, held = self._asked() if connected else (0, set())
        if answers < connected:
            return (
                f"{connected - answers} of {connected} workers do not say what they have: stop them to have it moved."
            )
        index = self._key(self._channel.unacked_index_key)
        unacked = self._key(self._channel.unacked_key)
        kept = 0
        for tag, message in list(self._with_workers(queue)):
            since = self._client.zscore(index, tag)
            task = (message.get("headers") or {}).get("id") or message["properties"].get("correlation_id")
            if task in held or (since is not None and since > began - SETTLED):
                kept += 1
                continue
            # Whoever takes it out of the index has it; without that it was ours already, when this was interrupted.
            if since is None or self._client.zrem(index, tag):
                with self._client.pipeline(transaction=True) as pipe:
                    pipe.hdel(unacked, tag)
                    pipe.lpush(self._aside(queue), dumps(message))
                    pipe.execute()
        return f"{kept} messages are with workers, which have them until they are done or stop." if kept else ""

    def _connected(self) -> int:
        """How many workers hear what is told to all: it is told to nobody."""
        body = json.dumps({"method": "ping", "arguments": {}, "destination": ["nobody"]})
        message = self._channel.prepare_message(body, None, "application/json", "utf-8", {}, {})
        self._channel._inplace_augment_message(message, "celery.pidbox", "")
        message["properties"]["delivery_tag"] = uuid()
        topic = self._key(self._channel._get_publish_topic("celery.pidbox", ""))
        return int(self._client.publish(topic, dumps(message)))

    def _asked(self) -> tuple[int, set[str]]:
        """How many workers answer, and the ids of the tasks that they have."""
        from celery import Celery

        app = Celery(broker=self._connection.as_uri(include_password=True), set_as_current=False)
        app.conf.broker_transport_options = self._connection.transport_options
        asking = app.control.inspect(timeout=ANSWER)
        held: set[str] = set()
        answered: set[str] | None = None
        try:
            # The way that a task goes: one that moves on meanwhile is seen where it comes to.
            for what in (asking.scheduled, asking.reserved, asking.active):
                said = what() or {}
                answered = set(said) if answered is None else answered & set(said)
                for tasks in said.values():
                    held |= {str((one.get("request") or one)["id"]) for one in tasks}
        finally:
            app.close()
        return len(answered or ()), held

    # -- as a target -----------------------------------------------------------------------------------------------

    def put(self, queue: str, carried: Sequence[Envelope]) -> int:
        """Put messages into a queue that are not there yet, and remember them, in one transaction; returns how many."""
        with self._client.pipeline(transaction=False) as pipe:
            for one in carried:
                pipe.sismember(self._arrived(queue), one.key)
            known = pipe.execute()
        new = [one for one, is_known in zip(carried, known, strict=True) if not is_known]
        with self._client.pipeline(transaction=True) as pipe:
            for one in new:
                message = closed(one.message)
                message["properties"].update(delivery_tag=uuid(), delivery_mode=2)
                message["properties"].setdefault("delivery_info", {"exchange": "", "routing_key": queue})
                pipe.sadd(self._arrived(queue), one.key)
                pipe.lpush(self._list_of(queue, message), dumps(message))
            pipe.execute()
        return len(new)

    def forget(self, queue: str, carried: Sequence[Envelope]) -> None:
        """The source knows that these have arrived."""
        if carried:
            self._client.srem(self._arrived(queue), *[one.key for one in carried])

    def known(self, queue: str, carried: Sequence[Envelope]) -> set[str]:
        """Keys of those that it has."""
        return {one.key for one in carried if self._client.sismember(self._arrived(queue), one.key)}

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


def _carried(queue: str, text: str) -> Envelope:
    message = loads(text)
    return Envelope(key_of(queue, message), queue, opened(message))
