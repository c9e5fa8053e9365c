"""Checks of a send: its database, and its options against those of the queue."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from django.db import router

from .. import messages
from ..errors import InvalidMessage
from ..models.delivery import NEVER
from ..sql.claims import FOREVER_MS
from ..sql.message_columns import SENT, Kind, MessageColumn, Outgoing

#: The longest duration, and the farthest time from now, that is accepted.
FAR_FUTURE = timedelta(days=100 * 365)


def alias_of(queue: Any, using: str | None = None) -> str:
    """The database of a queue: ``using``, or the choice of the database router."""
    return using or router.db_for_write(queue)


def milliseconds(name: str, value: timedelta, *, low: int = 0) -> int:
    """A duration in whole milliseconds. Raises InvalidMessage for a value that is no timedelta or out of bounds."""
    if not isinstance(value, timedelta):
        raise InvalidMessage(f"{name} = {value!r} is not accepted: it must be a timedelta (a bare number has no unit).")
    result = int(value / timedelta(milliseconds=1))
    if result < low or value > FAR_FUTURE:
        raise InvalidMessage(f"{name} = {value!r} is not accepted: it must be from {low} ms to 100 years.")
    return result


def build_outgoing(
    queue: Any,
    identity: uuid.UUID,
    headers: str,
    body: bytes | None,
    expires_in: timedelta | None,
    priority: int,
    recipient: str,
    correlation_id: str | None,
    reply_to: str | None,
    others: Mapping[str, Any] = MappingProxyType({}),
) -> Outgoing:
    """A message ready to be stored, its options checked against the queue. ``others``: further message columns. Raises
    InvalidMessage."""
    delivery = queue.delivery
    if not isinstance(identity, uuid.UUID):
        raise InvalidMessage(f"message_id = {identity!r} is not accepted: it must be a uuid.UUID.")
    if delivery.priority and priority != 0:
        raise InvalidMessage(
            f"priority = {priority!r} is not accepted by {queue._meta.label}: its expression decides "
            f"(Delivery.priority = {delivery.priority!r})."
        )
    if not isinstance(priority, int) or isinstance(priority, bool) or not 0 <= priority < delivery.priorities:
        raise InvalidMessage(
            f"priority = {priority!r} is not accepted by {queue._meta.label}: it must be from 0 to "
            f"{delivery.priorities - 1}"
            f" (Delivery.priorities = {delivery.priorities})."
        )
    for name, value, longest in (
        ("recipient", recipient, messages.MAX_RECIPIENT),
        ("correlation_id", correlation_id, messages.MAX_ADDRESS),
        ("reply_to", reply_to, messages.MAX_ADDRESS),
    ):
        if value and not is_storable(value, longest):
            raise InvalidMessage(f"{name} = {value!r} is not accepted: a string of at most {longest} characters.")
    message_expires = _expires_ms(delivery, expires_in)
    message = Outgoing(identity, headers, body, message_expires, recipient, priority, correlation_id, reply_to)
    return message._replace(**_checked(others)) if others else message


def is_storable(value: Any, longest: int) -> bool:
    """Whether a text column of this length can hold a value: no NUL, and no half of a surrogate pair."""
    if not isinstance(value, str) or len(value) > longest or "\0" in value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _expires_ms(delivery: Any, expires_in: timedelta | None) -> int | None:
    """The value of ``expires``: the message's own. The queue's expiration is part of its statements, except for a
    foreign table, which has no time of arrival."""
    if expires_in == NEVER:
        return FOREVER_MS if delivery.expires_by_age else None
    if expires_in is None and not delivery.expires_by_age:
        expires_in = delivery.expiration
    return None if expires_in is None else milliseconds("expires_in", expires_in, low=1)


#: The options that ``build_outgoing`` has arguments for.
_NAMED = ("expires", "recipient", "priority", "correlation_id", "reply_to_address")
_OTHERS = {one.name: one for one in SENT if one.name not in _NAMED}


def _checked(others: Mapping[str, Any]) -> dict[str, Any]:
    """Further message columns, checked by their declarations."""
    checked = {}
    for name, value in others.items():
        one = _OTHERS.get(name)
        if one is None:
            raise TypeError(f"a send got an unexpected keyword argument {name!r}")
        if one.kind is Kind.TIME:
            checked[one.outgoing] = None if value is None else milliseconds(name, value)
            continue
        if not (value is None and one.default is None):
            fits, words = _KINDS[one.kind]
            if not fits(value, one):
                raise InvalidMessage(f"{name} = {value!r} is not accepted: {words.format(one)}.")
        checked[name] = value
    return checked


_KINDS: dict[Kind, tuple[Callable[[Any, MessageColumn], bool], str]] = {
    Kind.BOOL: (lambda value, _: isinstance(value, bool), "True or False"),
    Kind.INT64: (lambda value, _: isinstance(value, int) and -(2**63) <= value < 2**63, "a whole number of 64 bits"),
    Kind.INT16: (lambda value, _: isinstance(value, int) and -(2**15) <= value < 2**15, "a whole number of 16 bits"),
    Kind.TEXT: (
        lambda value, one: is_storable(value, one.max_length),
        "a string of at most {0.max_length} characters",
    ),
}
