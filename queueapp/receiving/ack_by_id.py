"""Ending messages by the id that their sender gave them, also before they arrive: see ``sending.deferred``.

An id that is not there is waited for: the ack is kept for ``deferred_ack_expiration``. Each such id has a transaction of its
own, unless the caller has one open, so that two acks of several cannot wait for each other.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Any

from django.db import Error, transaction

from ..errors import InvalidOption
from ..models.deferred_ack import DeferredAck
from ..sending import early_acks
from ..sql import ErrorKind, backend_of
from .ack_by_seq import AckBySeq

#: How often one id is tried of which the transaction was a deadlock's victim: with a caller who sends and sends in bulk.
TRIES = 5


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
    one = _ending(queue, client, using)
    return _end(one, _checked(ids), one.ack, DeferredAck.Kind.ACK)


def expire(
    queue: Any, ids: Iterable[uuid.UUID], bookmarks: Any, reason: str, *, client: uuid.UUID | None, using: str | None
) -> int:
    """See ``Queue.expire``."""
    _refuse_both(bookmarks, None)
    one = _ending(queue, client, using)
    return _end(one, _checked(ids), lambda seqs: one.expire(seqs, reason), DeferredAck.Kind.EXPIRE)


def _end(one: AckBySeq, ids: list[uuid.UUID], end: Callable[[list[int]], int], kind: str) -> int:
    ended, missing = 0, []
    for first in range(0, len(ids), 1000):
        some = ids[first : first + 1000]
        found = one.sql.ack_by_seq.seqs_of(one.connection, some)
        ended += end([seq for _, seq in found])
        there = {identity for identity, _ in found}
        missing += [identity for identity in some if identity not in there]
    return ended + sum(_end_or_keep(one, identity, end, kind) for identity in missing)


def _end_or_keep(one: AckBySeq, identity: uuid.UUID, end: Callable[[list[int]], int], kind: str) -> int:
    backend, tries = backend_of(one.connection), 0
    while True:
        try:
            with transaction.atomic(using=one.alias):
                early_acks.lock(one.queue, one.connection, identity)
                if found := one.sql.ack_by_seq.seqs_of(one.connection, [identity]):
                    return end([seq for _, seq in found])
                early_acks.keep(one.queue, one.connection, [identity], kind)
                return 0
        except Error as error:
            tries += 1
            passing = backend.error_kind(error) is ErrorKind.DEADLOCK
            if one.connection.in_atomic_block or not passing or tries >= TRIES:
                raise


def _ending(queue: Any, client: uuid.UUID | None, using: str | None) -> AckBySeq:
    if not early_acks.defers(queue):
        accepted = f"absent: {queue._meta.label} has no deferred_ack_expiration, and so no index to find an id by"
        raise InvalidOption("ids", "given", accepted)
    return AckBySeq(queue, client, using)


def _refuse_both(bookmarks: Any, where: str | None) -> None:
    if where is not None or not isinstance(bookmarks, tuple) or bookmarks:
        raise InvalidOption("ids", "given", "absent where bookmarks or an expression say which messages are meant")


def _checked(ids: Iterable[uuid.UUID]) -> list[uuid.UUID]:
    given = list(ids) if isinstance(ids, Iterable) else [None]
    for one in given:
        if not isinstance(one, uuid.UUID):
            raise InvalidOption(
                "ids", one if isinstance(ids, Iterable) else ids, "uuid.UUIDs, in a list or another iterable"
            )
    return sorted(set(given))
