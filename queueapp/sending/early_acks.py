"""Acks that came before their message: a message that is sent after its ack never enters its queue.

Only queues with ``deferred_ack_expiration`` come here. A send and an ack of the same message exclude each other by a lock of
their transactions: a send on the message's own name, a bulk send on one name that all of them share, and an ack that finds
no message on both. Whichever comes second waits until the other's transaction is over, and sees what that did.

What enters by another way (a foreign INSERT, a delayed message that is due, a requeue) takes no such lock. Maintenance
finds it (``settle``); until then it can be received.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..models.deferred_ack import DeferredAck
from ..sql import backend_of, queue_sql
from ..sql.message_columns import Run
from .body_encoding import encode_runs

TABLE: str = DeferredAck._meta.db_table


def defers(queue: Any) -> bool:
    """Whether acks of this queue may come before their messages."""
    return queue.delivery.deferred_ack_expiration is not None


def was_acked(queue: Any, connection: Any, identity: uuid.UUID) -> bool:
    """Whether a message that is about to be stored was acked before; its ack is used up. In the transaction that stores it."""
    backend = backend_of(connection)
    backend.early_acks.lock_name(connection, name_of(queue, identity))
    return bool(backend.early_acks.take(connection, TABLE, queue._meta.label, [identity]))


def insert_runs(queue: Any, connection: Any, runs: Iterable[Run], undisturbed: bool) -> int:
    """``QueueSql.inserts.insert_runs`` of a bulk send, without what was acked before, encoded as the queue says. In a transaction."""
    if queue.delivery.encoding:
        runs, undisturbed = encode_runs(queue, runs, connection.alias), False
    if defers(queue):
        runs, undisturbed = _without_acked(queue, connection, runs), False
    return queue_sql(queue, connection).inserts.insert_runs(connection, runs, undisturbed)


def _without_acked(queue: Any, connection: Any, runs: Iterable[Run]) -> Iterator[Run]:
    backend = backend_of(connection)
    backend.early_acks.lock_name(connection, name_of_all(queue), shared=True)
    #: All so far: the copies for further recipients have the ids of the first.
    acked: set[bytes] = set()
    for run in runs:
        ids = [uuid.UUID(bytes=one) for one in run.ids]
        acked |= {one.bytes for one in backend.early_acks.take(connection, TABLE, queue._meta.label, ids)}
        kept = [pair for pair in zip(run.ids, run.bodies, strict=True) if pair[0] not in acked]
        if kept:
            yield Run(run.like, [one for one, _ in kept], [body for _, body in kept])


def keep(queue: Any, connection: Any, ids: Sequence[uuid.UUID], kind: str) -> None:
    """Keep acks of messages that are not there; their names are locked."""
    keep_ms = int(queue.delivery.deferred_ack_expiration.total_seconds() * 1000)
    backend_of(connection).early_acks.store(connection, TABLE, queue._meta.label, ids, kind, keep_ms)


def lock(queue: Any, connection: Any, identity: uuid.UUID) -> None:
    """From now until the transaction ends nobody stores this message by a send."""
    backend = backend_of(connection)
    backend.early_acks.lock_name(connection, name_of(queue, identity))
    backend.early_acks.lock_name(connection, name_of_all(queue))


def name_of(queue: Any, identity: uuid.UUID) -> str:
    """The lock of one message."""
    return f"queueapp:{queue._meta.label}:{identity}"


def name_of_all(queue: Any) -> str:
    """The lock that all bulk sends share."""
    return f"queueapp:{queue._meta.label}"
