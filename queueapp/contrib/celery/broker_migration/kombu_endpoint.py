"""Any other broker of kombu as one end of a move. It hands a message out again when whoever had it is gone, so nothing is lost;
it cannot remember what it was given, so of a move that is killed its last few messages may be in it twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kombu import Connection, Producer

from .envelope import Envelope, key_of

_PROPERTIES = (
    "correlation_id", "reply_to", "priority", "delivery_mode", "timestamp", "message_id", "type", "app_id", "expiration",
)  # fmt: skip


class KombuEndpoint:
    """A broker that is known by kombu's interface alone. Its queues have to be named."""

    exact = False
    inverts = False
    unreadable = 0

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._channel: Any = connection.default_channel
        self._producer = Producer(self._channel)
        self._held: dict[str, list[tuple[Envelope, Any]]] = {}

    def queues(self) -> list[str]:
        """Unknown: none."""
        return []

    def bindings(self, queue: str) -> list[tuple[str, str, str]]:
        """As Celery binds a queue unless told otherwise."""
        return [(queue, "direct", queue)]

    def declare(self, queue: str, bindings: Sequence[tuple[str, str, str]]) -> None:
        """Make a queue that is not there yet."""
        self._channel.queue_declare(queue=queue, durable=True, auto_delete=False)
        for exchange, kind, key in bindings:
            self._channel.exchange_declare(exchange=exchange, type=kind, durable=True, auto_delete=False)
            self._channel.queue_bind(queue=queue, exchange=exchange, routing_key=key)

    def set_aside(self, queue: str, limit: int) -> None:
        """Take so many messages, unacked until they have arrived."""
        held = self._held.setdefault(queue, [])
        while len(held) < limit and (message := self._channel.basic_get(queue=queue, no_ack=False)) is not None:
            if isinstance(message, Sequence) or not hasattr(message, "properties"):
                break
            held.append((_carried(queue, message), message))

    def aside(self, queue: str) -> list[Envelope]:
        """What it was handed."""
        return [carried for carried, _ in self._held.get(queue, ())]

    def arrived(self, queue: str, carried: Sequence[Envelope]) -> None:
        """Ack these."""
        for _, message in self._held[queue][: len(carried)]:
            self._channel.basic_ack(message.delivery_tag)
        del self._held[queue][: len(carried)]

    def put_back(self, queue: str) -> int:
        """Nothing: what was not acked comes back by itself."""
        return 0

    def orphaned(self, queue: str) -> str:
        """Nothing: the broker does it."""
        return ""

    def left(self, queue: str) -> tuple[int, int]:
        """How many messages wait in a queue; of what workers have it does not say."""
        return int(self._channel.queue_declare(queue=queue, passive=True).message_count), 0

    def put(self, queue: str, carried: Sequence[Envelope]) -> int:
        """Publish messages into a queue; returns how many."""
        for one in carried:
            message = one.message
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
        return len(carried)

    def forget(self, queue: str, carried: Sequence[Envelope]) -> None:
        """Nothing was remembered."""

    def known(self, queue: str, carried: Sequence[Envelope]) -> set[str]:
        """Nothing is remembered."""
        return set()

    def close(self) -> None:
        """Close the connection; what was not acked goes back."""
        self._connection.release()


def _carried(queue: str, message: Any) -> Envelope:
    properties = dict(message.properties or {})
    properties.setdefault("delivery_info", {})
    said = {
        "body": message.body,
        "content-type": message.content_type,
        "content-encoding": message.content_encoding,
        "headers": dict(message.headers or {}),
        "properties": properties,
    }
    return Envelope(key_of(queue, said), queue, {**said, "properties": properties})
