"""Sending many messages at once: one COPY, or one OPENJSON insert on SQL Server, in the caller's transaction."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from itertools import groupby, islice
from typing import Any, Unpack

from asgiref.sync import sync_to_async
from django.db import connections, transaction

from .. import messages, wakeups
from ..consuming.registry import recipients_of
from ..errors import InvalidMessage
from ..sql import queue_sql
from ..sql.outgoing import RUN_LENGTH, Outgoing, Run
from .accepting import alias_of, outgoing
from .options import BulkOptions, CarriedOptions
from .recipients import refuse_unknown_recipient


def send_many(
    queue: Any,
    bodies: Iterable[Any],
    *,
    headers: Mapping[str, str] | None = None,
    expires_in: timedelta | None = None,
    priority: int = 0,
    recipient: str = "",
    unknown_recipient: bool = False,
    using: str | None = None,
    **others: Unpack[CarriedOptions],
) -> int:
    """Send every body of an iterable by the bulk path; all or nothing, in the caller's transaction if there is one.

    Returns how many messages were stored. Raises InvalidMessage at the first body that cannot be encoded, and for what is
    one message and not many.
    """
    _refuse_one_message(bodies)
    alias = alias_of(queue, using)
    connection = connections[alias]
    if recipient and not unknown_recipient:
        refuse_unknown_recipient(queue, alias, recipient)
    like = outgoing(queue, messages.new_id(), "{}", None, expires_in, priority, recipient, None, None, others)
    runs = _runs(queue, bodies, headers, like)
    with transaction.atomic(using=alias):
        # Bodies that exist already: to draw them asks nothing of the database.
        count = queue_sql(queue, connection).insert_runs(connection, runs, isinstance(bodies, list | tuple))
    if count:
        wakeups.sent(queue, connection)
    return count


async def asend_many(queue: Any, bodies: Iterable[Any], **options: Unpack[BulkOptions]) -> int:
    """``send_many`` for async code, on the thread that Django's async ORM uses, so in the same transaction."""
    return await sync_to_async(send_many, thread_sensitive=True)(queue, bodies, **options)


def _refuse_one_message(bodies: Any) -> None:
    """A dict would send its keys, a string its characters, and nothing would say so."""
    if isinstance(bodies, Mapping | str | bytes | bytearray | memoryview):
        kind = type(bodies).__name__
        raise InvalidMessage(
            f"send_many takes an iterable of messages, and a {kind} is one: write send(...), or send_many([...])."
        )
    if not isinstance(bodies, Iterable):
        later = (
            " Collect an asynchronous one first: [one async for one in ...]." if hasattr(bodies, "__aiter__") else ""
        )
        raise InvalidMessage(f"send_many takes an iterable of messages, not a {type(bodies).__name__}.{later}")


def _runs(queue: Any, bodies: Iterable[Any], headers: Mapping[str, str] | None, like: Outgoing) -> Iterator[Run]:
    """The bodies as they are stored: encoded by the class and not one by one, 0.7 µs each instead of 3."""
    iterator, ids_of = iter(bodies), messages.id_sequence()
    fan_out = queue.delivery.recipients and not like.recipient
    while some := list(islice(iterator, RUN_LENGTH)):
        for cls, group in groupby(some, type):
            stored, data = messages.encode_alike(list(group), headers)
            ids = ids_of(len(data))
            recipients = recipients_of(queue, messages.type_name_of(cls)) if fan_out else (like.recipient,)
            if queue.wire_format:
                yield from _foreign_runs(like, stored, ids, data, recipients)
                continue
            for name in recipients:
                yield Run(like._replace(headers=stored, recipient=name), ids, data)


def _foreign_runs(
    like: Outgoing, headers: str, ids: list[bytes], data: list[bytes | None], recipients: Iterable[str]
) -> Iterator[Run]:
    """Each message on its own: its id is in its headers."""
    for identity, body in zip(ids, data, strict=True):
        told = messages.to_nservicebus(headers, uuid.UUID(bytes=identity))
        for name in recipients:
            yield Run(like._replace(headers=told, recipient=name), [identity], [body])
