"""``Queue.ack(ids=…)`` and ``expire(ids=…)``: ending messages by their ids, also before they are sent
(``sending.early_acks``).

An id that is not in the queue is stored as an early ack for ``deferred_ack_expiration``. Each such id has its own
transaction, unless the caller has one open, so that two acks of several ids cannot deadlock.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Any

from django.db import Error, transaction

from ..errors import InvalidOption
from ..models.message_key import DeferredAck
from ..sending import early_acks
from ..sql import ErrorKind, backend_of
from .ack_by_seq import AckBySeq

#: How often one id is tried whose transaction was a deadlock victim (of a sender in the bulk path).
MAX_TRIES = 5


def ack(
    queue: Any,
    ids: Iterable[uuid.UUID],
    bookmarks: Any = (),
    where: str | None = None,
    *,
    client: uuid.UUID | None,
    using: str | None,
) -> int:
    """See ``Queue.ack``."""
    _refuse_both(bookmarks, where)
    acks = _acks_of(queue, client, using)
    return _end(acks, _checked(ids), acks.ack, DeferredAck.Kind.ACK)


def expire(
    queue: Any, ids: Iterable[uuid.UUID], bookmarks: Any, reason: str, *, client: uuid.UUID | None, using: str | None
) -> int:
    """See ``Queue.expire``."""
    _refuse_both(bookmarks, None)
    acks = _acks_of(queue, client, using)
    return _end(acks, _checked(ids), lambda seqs: acks.expire(seqs, reason), DeferredAck.Kind.EXPIRE)


def _end(acks: AckBySeq, ids: list[uuid.UUID], end: Callable[[list[int]], int], kind: str) -> int:
    ended, missing = 0, []
    for first in range(0, len(ids), 1000):
        part = ids[first : first + 1000]
        found = acks.sql.ack_by_seq.seqs_of(acks.connection, part)
        ended += end([seq for _, seq in found])
        there = {identity for identity, _ in found}
        missing += [identity for identity in part if identity not in there]
    return ended + sum(_end_or_store(acks, identity, end, kind) for identity in missing)


def _end_or_store(acks: AckBySeq, identity: uuid.UUID, end: Callable[[list[int]], int], kind: str) -> int:
    backend, tries = backend_of(acks.connection), 0
    while True:
        try:
            with transaction.atomic(using=acks.alias):
                early_acks.lock(acks.queue, acks.connection, identity)
                if found := acks.sql.ack_by_seq.seqs_of(acks.connection, [identity]):
                    return end([seq for _, seq in found])
                early_acks.keep(acks.queue, acks.connection, [identity], kind)
                return 0
        except Error as error:
            tries += 1
            transient = backend.error_kind(error) is ErrorKind.DEADLOCK
            if acks.connection.in_atomic_block or not transient or tries >= MAX_TRIES:
                raise


def _acks_of(queue: Any, client: uuid.UUID | None, using: str | None) -> AckBySeq:
    if not early_acks.defers(queue):
        accepted = f"absent: {queue._meta.label} has no deferred_ack_expiration, and so no index to find an id by"
        raise InvalidOption("ids", "given", accepted)
    return AckBySeq(queue, client, using)


def _refuse_both(bookmarks: Any, where: str | None) -> None:
    if where is not None or not isinstance(bookmarks, tuple) or bookmarks:
        raise InvalidOption("ids", "given", "absent where bookmarks or an expression say which messages are meant")


def _checked(ids: Iterable[uuid.UUID]) -> list[uuid.UUID]:
    given = list(ids) if isinstance(ids, Iterable) else [None]
    for identity in given:
        if not isinstance(identity, uuid.UUID):
            raise InvalidOption(
                "ids", identity if isinstance(ids, Iterable) else ids, "uuid.UUIDs, in a list or another iterable"
            )
    return sorted(set(given))
