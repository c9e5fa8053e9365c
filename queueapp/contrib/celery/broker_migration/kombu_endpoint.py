"""Any other kombu broker as one end of a move. It delivers a message again when its receiver is gone, so nothing is
lost; it has no record of the messages that were put, so the last few messages before a kill may be duplicated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kombu import Connection, Producer

from .envelope import Envelope, key_of

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
        """Celery\'s default binding of a queue."""
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
    return Envelope(key_of(queue, parts), queue, {**parts, "properties": properties})
