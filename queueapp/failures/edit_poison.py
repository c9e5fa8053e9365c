"""Sending a mended copy of a poison message in its place."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from django.db import connections, transaction

from .. import messages as wire
from .. import notifier
from ..errors import InvalidMessage, MessageNotFound, UndecodableMessage
from ..messages.body_filters import innermost, is_secret, wrapped_anew
from ..models import Now, PoisonMessage
from ..models.delivery.topics import content_type_of
from ..sql import queue_sql
from ..sql.message_columns import COUNTS, row_from
from .requeue_poison import is_admitted, meant_for, send_back


def edit_and_requeue(
    number: int,
    *,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    to: Any = None,
    using: str = "default",
) -> uuid.UUID:
    """Send a mended copy of an unresolved poison message, with a new id and all its attempts; returns that id.

    ``body`` (as its codec wrote it, neither compressed nor encrypted) and ``headers`` (all of them) replace those of
    the message; None leaves them as they are. What was compressed or encrypted is so again. The copy names the original
    in its header ``edit-of``; the original stays as ``edited``, names the copy, and can be neither edited again nor
    requeued. Raises MessageNotFound when it is not unresolved any more, QueueNotFound, and InvalidMessage for an empty
    body, one that its content type contradicts, headers that are locked, and what is encrypted and cannot be read.

    >>> edit_and_requeue(17, body=b'{"gate": "B12"}')  # doctest: +SKIP
    UUID('01941f29-7c00-7000-8000-5c3ea1f0a2b4')
    """
    connection = connections[using]
    with transaction.atomic(using=using):
        # Locked: of two operators who edit together the second finds it edited.
        row = PoisonMessage.objects.using(using).select_for_update().filter(number=number).first()
        if row is None or row.status != PoisonMessage.Status.UNRESOLVED:
            now = "gone" if row is None else row.status
            raise MessageNotFound(f"Poison message {number} is {now}: only unresolved ones can be edited.")
        name = row.destination or row.queue
        queue, is_elsewhere = (to, False) if to else meant_for(name, using)
        identity = wire.new_id()
        stored = wire.edited_headers(row.headers, headers, row.message_id, identity)
        if body is not None:
            _check_body(queue, body, stored)
        stored, body = _wrapped(row, stored, body, identity, using)
        # A new message: not tried yet, arriving now, and without an expiry, since an operator has just edited it.
        new = {"id": identity, "headers": stored, "expires": None, "enqueued_at": None} | dict.fromkeys(COUNTS)
        copy = row_from(row, **new, body=body)
        if is_elsewhere:
            send_back(using, name, [copy])
        else:
            if not is_admitted(queue, connection, copy):
                raise InvalidMessage(f"Another message with the dedupe key of the copy waits in {queue._meta.label}.")
            queue_sql(queue, connection).inserts.insert_row(connection, copy)
            notifier.sent(queue, connection)
        row.status, row.edited_as, row.archived_at = PoisonMessage.Status.EDITED, identity, Now()
        row.save(update_fields=["status", "edited_as", "archived_at"])
    return identity


def _wrapped(
    row: PoisonMessage, headers: str, body: bytes | None, identity: uuid.UUID, using: str
) -> tuple[str, bytes | None]:
    """(headers, body) of the copy: compressed and encrypted as the original is, under the copy's id. What is encrypted
    stays so."""
    try:
        before = wire.read_head(row.headers)[1]
    except UndecodableMessage:
        before = ""
    after = wire.read_head(headers)[1]
    if is_secret(before) and before != after:
        raise InvalidMessage(f"Header {wire.CONTENT_TYPE!r} is locked: an encrypted message stays encrypted.")
    try:
        return wrapped_anew(
            headers, None if row.body is None else bytes(row.body), body, row.message_id, identity, using
        )
    except UndecodableMessage as error:
        raise InvalidMessage(
            f"The copy cannot be encrypted anew, since its original cannot be read: {error}"
        ) from error


def _check_body(queue: Any, body: bytes, headers: str) -> None:
    if not body:
        raise InvalidMessage("The edited body is empty; a message that should be without one is sent anew.")
    content_type = innermost(wire.read_head(headers)[1] or content_type_of(queue))
    if "json" in content_type or wire.codec_for(content_type) is not None:
        try:
            wire.decode_body(body, content_type)
        except UndecodableMessage as error:
            raise InvalidMessage(f"The edited body does not suit its content type {content_type}. {error}") from error
