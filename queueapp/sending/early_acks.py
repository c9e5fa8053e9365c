"""Early acks: a message that is sent after its ack does not enter its queue.

Only queues with ``deferred_ack_expiration`` use this module. A send and an ack of the same message exclude each other
by an advisory lock: a send locks the message's id, a bulk send one name for all messages of the queue, and an ack that
finds no message locks both. The second waits until the transaction of the first has ended, and sees its result.

Other inserts (a foreign INSERT, a dispatched delayed message, a requeue) take no such lock. Maintenance removes their
messages (``settle``); until then they can be received.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from ..models.message_records import DeferredAck
from ..sql import backend_of, queue_sql
from ..sql.message_columns import Run
from .preparation import encode_runs

TABLE: str = DeferredAck._meta.db_table


def defers(queue: Any) -> bool:
    """Whether acks of this queue may precede their messages."""
    return queue.delivery.deferred_ack_expiration is not None


def was_acked(queue: Any, connection: Any, identity: uuid.UUID) -> bool:
    """Whether a message that is about to be stored was acked before; deletes that ack. In the transaction that stores
    it."""
    backend = backend_of(connection)
    backend.early_acks.lock_name(connection, name_of(queue, identity))
    return bool(backend.early_acks.take(connection, TABLE, queue._meta.label, [identity]))


def insert_runs(queue: Any, connection: Any, runs: Iterable[Run], undisturbed: bool) -> int:
    """``QueueSql.inserts.insert_runs`` of a bulk send, encoded, without messages that were acked before. In a
    transaction."""
    if queue.delivery.encoding:
        runs, undisturbed = encode_runs(queue, runs, connection.alias), False
    if defers(queue):
        runs, undisturbed = _without_acked(queue, connection, runs), False
    return queue_sql(queue, connection).inserts.insert_runs(connection, runs, undisturbed)


def _without_acked(queue: Any, connection: Any, runs: Iterable[Run]) -> Iterator[Run]:
    backend = backend_of(connection)
    backend.early_acks.lock_name(connection, name_of_all(queue), shared=True)
    #: All ids so far: copies for further recipients have the ids of the first.
    acked: set[bytes] = set()
    for run in chain.from_iterable(mixed.alike() for mixed in runs):
        ids = [uuid.UUID(bytes=identity) for identity in run.ids]
        acked |= {identity.bytes for identity in backend.early_acks.take(connection, TABLE, queue._meta.label, ids)}
        kept = [pair for pair in zip(run.ids, run.bodies, strict=True) if pair[0] not in acked]
        if kept:
            yield Run(run.like, [identity for identity, _ in kept], [body for _, body in kept])


def keep(queue: Any, connection: Any, ids: Sequence[uuid.UUID], kind: str) -> None:
    """Store acks of messages that are not in the queue; the caller holds their locks."""
    keep_ms = int(queue.delivery.deferred_ack_expiration.total_seconds() * 1000)
    backend_of(connection).early_acks.store(connection, TABLE, queue._meta.label, ids, kind, keep_ms)


def lock(queue: Any, connection: Any, identity: uuid.UUID) -> None:
    """Prevent sends of this message until the transaction ends."""
    backend = backend_of(connection)
    backend.early_acks.lock_name(connection, name_of(queue, identity))
    backend.early_acks.lock_name(connection, name_of_all(queue))


def name_of(queue: Any, identity: uuid.UUID) -> str:
    """The lock name of one message."""
    return f"queueapp:{queue._meta.label}:{identity}"


def name_of_all(queue: Any) -> str:
    """The lock name that all bulk sends share."""
    return f"queueapp:{queue._meta.label}"
