"""Our queues as one end of a move."""

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

_NOBODY = uuid.UUID(int=0)


class QueueappEndpoint:
    """The queues of one database. As the target of a move it takes a message once, however often it is put."""

    exact = True
    inverts = False

    def __init__(self, connection: Connection) -> None:
        self._channel: Any = connection.default_channel
        self.alias: str = self._channel.alias
        self._odd: dict[Any, set[int]] = {BrokerQueue: set(), DelayedMessage: set()}

    @property
    def unreadable(self) -> int:
        """Messages that kombu did not write, which no other broker could take: they stay."""
        return sum(map(len, self._odd.values()))

    def queues(self) -> list[str]:
        """The queues that stay when their workers go."""
        names = DeclaredQueue.objects.using(self.alias).filter(expires_at=None).values_list("name", flat=True)
        aside = PendingMove.objects.using(self.alias).values_list("queue", flat=True)
        return sorted({*names, *aside})

    def bindings(self, queue: str) -> list[tuple[str, str, str]]:
        """(exchange, its kind, routing key) by which messages come into a queue."""
        found = topology.bindings_of(self.alias, queue)
        return [(one, topology.exchange_kind(self.alias, one) or "direct", key) for one, key in found]

    def declare(self, queue: str, bindings: Sequence[tuple[str, str, str]]) -> None:
        """Make a queue that is not there yet."""
        if not topology.exists(self.alias, queue):
            topology.declare(self.alias, Declaration(queue, durable=True, auto_delete=False, arguments=None))
        for exchange, kind, key in bindings:
            if topology.exchange_kind(self.alias, exchange) is None:
                topology.declare_exchange(self.alias, exchange, kind)
            topology.bind(self.alias, exchange, key, queue)

    # -- as a source -----------------------------------------------------------------------------------------------

    def set_aside(self, queue: str, limit: int) -> None:
        """Take so many messages out of a queue, the most urgent first, then what is delayed for it; what a worker has stays."""
        with transaction.atomic(using=self.alias):
            ready = topology.ready_messages(self.alias, queue).order_by("-priority", "seq")
            kept = self._take(ready, BrokerQueue, limit)
            if len(kept) < limit:
                delayed = topology.delayed(self.alias, queue).order_by("due", "number")
                kept += self._take(delayed, DelayedMessage, limit - len(kept))
            PendingMove.objects.using(self.alias).bulk_create(kept)

    def _take(self, waiting: Any, kind: Any, limit: int) -> list[PendingMove]:
        odd = self._odd[kind]
        rows = waiting.exclude(pk__in=odd).select_for_update(skip_locked=True)[:limit]
        kept = {}
        for row in rows:
            message_id = row.message_id if kind is DelayedMessage else row.id
            body = None if row.body is None else bytes(row.body)
            try:
                _message_of(message_id, row.headers, body)
            except UndecodableMessage:
                odd.add(row.pk)
                continue
            kept[row.pk] = PendingMove(message_id=message_id, queue=row.recipient, headers=row.headers, body=body)
        kind.objects.using(self.alias).filter(pk__in=kept).delete()
        return list(kept.values())

    def aside(self, queue: str) -> list[Envelope]:
        """What was set aside of a queue and is not known to have arrived, in its order."""
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

    def arrived(self, queue: str, carried: Sequence[Envelope]) -> None:
        """These have arrived."""
        PendingMove.objects.using(self.alias).filter(pk__in=[one.number for one in carried]).delete()

    def put_back(self, queue: str) -> int:
        """Give back what was set aside of a queue; returns how many. For a move that is given up."""
        with transaction.atomic(using=self.alias):
            rows = list(PendingMove.objects.using(self.alias).filter(queue=queue).select_for_update())
            connection = connections[self.alias]
            for row in rows:
                message = _message_of(row.message_id, row.headers, row.body)
                self._channel._store(connection, queue, message)
            PendingMove.objects.using(self.alias).filter(pk__in=[row.pk for row in rows]).delete()
        return len(rows)

    def orphaned(self, queue: str) -> str:
        """Nothing: the lease of a worker that is gone lapses, and its messages are ready again."""
        return ""

    def left(self, queue: str) -> tuple[int, int]:
        """How many messages wait in a queue, delayed ones included, and how many are with workers."""
        rows = (
            BrokerQueue.objects.using(self.alias).filter(recipient=queue).filter(Q(expires=None) | Q(expires__gt=Now()))
        )
        leased = rows.filter(lease_expires__gte=Now()).count()
        aside = PendingMove.objects.using(self.alias).filter(queue=queue).count()
        waiting = rows.exclude(pk__in=self._odd[BrokerQueue]).count() - leased
        delayed = topology.delayed(self.alias, queue).exclude(pk__in=self._odd[DelayedMessage]).count()
        return waiting + delayed + aside, leased

    # -- as a target -----------------------------------------------------------------------------------------------

    def put(self, queue: str, carried: Sequence[Envelope]) -> int:
        """Put messages into a queue that are not there yet, in one transaction; returns how many."""
        with transaction.atomic(using=self.alias):
            had = self.known(queue, carried)
            new = {one.key: one for one in carried if one.key not in had}
            connection = connections[self.alias]
            for one in new.values():
                self._channel._store(connection, queue, one.message)
            CompletedMove.objects.using(self.alias).bulk_create(CompletedMove(key=uuid.UUID(key)) for key in new)
        return len(new)

    def forget(self, queue: str, carried: Sequence[Envelope]) -> None:
        """The source knows that these have arrived: they cannot come again."""
        CompletedMove.objects.using(self.alias).filter(pk__in=[uuid.UUID(one.key) for one in carried]).delete()

    def known(self, queue: str, carried: Sequence[Envelope]) -> set[str]:
        """Keys of those that it has."""
        rows = CompletedMove.objects.using(self.alias).filter(pk__in=[uuid.UUID(one.key) for one in carried])
        return {key.hex for key in rows.values_list("key", flat=True)}

    def close(self) -> None:
        """Nothing is held."""


def _message_of(message_id: uuid.UUID, headers: str, body: bytes | memoryview | None) -> dict[str, Any]:
    """What kombu stored as this row."""
    message = payload_of((0, message_id.bytes, headers, bytes(body or b""), 0, 0), _NOBODY)
    message.pop("redelivered", None)
    properties = message["properties"]
    properties.pop("delivery_tag", None)
    properties.get("delivery_info", {}).pop("redelivered", None)
    return message
