"""The queues of this package as one end of a move."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from django.db import connections, transaction
from django.db.models import Q
from kombu import Connection

from ....errors import UndecodableMessage
from ....models import DelayedMessage, Now
from .. import topology
from ..models import BrokerQueue, CompletedMove, DeclaredQueue, PendingMove
from ..serialization import payload_of
from ..topology import Declaration
from .envelope import Envelope, digest

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
