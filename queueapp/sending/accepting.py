"""What is accepted of a send: the database it goes to, and options checked against the queue."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

from django.db import router

from .. import messages
from ..errors import InvalidMessage
from ..sql.outgoing import Outgoing

_FAR_FUTURE_MS = 100 * 365 * 86_400_000


def alias_of(queue: Any, using: str | None = None) -> str:
    """The database of a queue: ``using``, or what the database router says."""
    return using or router.db_for_write(queue)


def milliseconds(name: str, value: timedelta, *, low: int = 0) -> int:
    """A duration in whole milliseconds. Raises InvalidMessage when it is no timedelta or out of bounds."""
    if not isinstance(value, timedelta):
        raise InvalidMessage(f"{name} = {value!r} is not accepted: it must be a timedelta (a bare number has no unit).")
    result = int(value / timedelta(milliseconds=1))
    if not low <= result <= _FAR_FUTURE_MS:
        raise InvalidMessage(f"{name} = {value!r} is not accepted: it must be from {low} ms to 100 years.")
    return result


def outgoing(
    queue: Any,
    identity: uuid.UUID,
    headers: str,
    body: bytes | None,
    expires_in: timedelta | None,
    priority: int,
    recipient: str,
    correlation_id: str | None,
    reply_to: str | None,
) -> Outgoing:
    """A message ready to be stored, its options checked against the queue. Raises InvalidMessage."""
    delivery = queue.delivery
    if not isinstance(identity, uuid.UUID):
        raise InvalidMessage(f"message_id = {identity!r} is not accepted: it must be a uuid.UUID.")
    if not isinstance(priority, int) or not 0 <= priority < delivery.priorities:
        raise InvalidMessage(
            f"priority = {priority!r} is not accepted by {queue._meta.label}: it must be from 0 to {delivery.priorities - 1}"
            f" (Delivery.priorities = {delivery.priorities})."
        )
    for name, value, longest in (
        ("recipient", recipient, messages.MAX_RECIPIENT),
        ("correlation_id", correlation_id, messages.MAX_ADDRESS),
        ("reply_to", reply_to, messages.MAX_ADDRESS),
    ):
        if value and (not isinstance(value, str) or len(value) > longest or "\0" in value):
            raise InvalidMessage(f"{name} = {value!r} is not accepted: a string of at most {longest} characters.")
    lifetime = expires_in if expires_in is not None else delivery.expiration
    expires_ms = None if lifetime is None else milliseconds("expires_in", lifetime, low=1)
    return Outgoing(identity, headers, body, expires_ms, recipient, priority, correlation_id, reply_to)
