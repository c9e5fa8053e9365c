"""Checks of a send: its database, its recipient, its options against those of the queue, and the type of its body.

``Delivery.types`` refuses other types, and a type that no consumer takes is a warning. The warning is for a process
that knows consumers of the queue, as a project does that sends to itself. It is logged once for each queue and type.
Neither check applies to a message that operators move or that SQL inserts; a worker leaves a message of an unknown type
in the queue.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import datetime, timedelta
from time import monotonic
from types import MappingProxyType
from typing import Any, TypedDict

from django.db import Error, connections, router, transaction

from .. import messages
from ..consuming.registry import matching_consumers, registered
from ..errors import InvalidMessage, shortened
from ..models import Now, Subscriber, Subscription
from ..models.delivery import NEVER, OnConflict
from ..models.subscribers import parse_json_list
from ..options import is_storable
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
        raise InvalidMessage(
            f"{name} = {shortened(value)} is not accepted: it must be a timedelta (a bare number has no unit)."
        )
    result = int(value / timedelta(milliseconds=1))
    if result < low or value > FAR_FUTURE:
        raise InvalidMessage(f"{name} = {shortened(value)} is not accepted: it must be from {low} ms to 100 years.")
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
    carried: Mapping[str, Any] = MappingProxyType({}),
) -> Outgoing:
    """A message ready to be stored, its options checked against the queue. ``carried``: further message columns. Raises
    InvalidMessage."""
    delivery = queue.delivery
    if not isinstance(identity, uuid.UUID):
        raise InvalidMessage(f"message_id = {shortened(identity)} is not accepted: it must be a uuid.UUID.")
    if delivery.priority and priority != 0:
        raise InvalidMessage(
            f"priority = {shortened(priority)} is not accepted by {queue._meta.label}: its expression decides "
            f"(Delivery.priority = {delivery.priority!r})."
        )
    if not isinstance(priority, int) or isinstance(priority, bool) or not 0 <= priority < delivery.priorities:
        raise InvalidMessage(
            f"priority = {shortened(priority)} is not accepted by {queue._meta.label}: it must be from 0 to "
            f"{delivery.priorities - 1} (Delivery.priorities = {delivery.priorities})."
        )
    for name, value, longest in (
        ("recipient", recipient, messages.MAX_RECIPIENT),
        ("correlation_id", correlation_id, messages.MAX_ADDRESS),
        ("reply_to", reply_to, messages.MAX_ADDRESS),
    ):
        if not value and (value == "" or (value is None and name != "recipient")):
            continue
        if not is_storable(value, longest):
            raise InvalidMessage(
                f"{name} = {shortened(value)} is not accepted: a string of at most {longest} characters, without NUL "
                "and halves of surrogate pairs."
            )
    message_expires = _expires_ms(delivery, expires_in)
    message = Outgoing(identity, headers, body, message_expires, recipient, priority, correlation_id, reply_to)
    return message._replace(**_checked(carried)) if carried else message


def with_ordering_key(queue: Any, headers: Mapping[str, str] | None, key: str | None) -> Mapping[str, str] | None:
    """The headers of a message with this ordering key. Raises InvalidMessage."""
    if key is None:
        return headers
    if queue.delivery.ordering is None:
        raise InvalidMessage(f"{queue._meta.label} has no ordering keys: set Delivery.ordering.")
    if not isinstance(key, str) or not key or not is_storable(key, messages.MAX_RECIPIENT):
        limit = messages.MAX_RECIPIENT
        raise InvalidMessage(f"ordering_key = {key!r} is not accepted: a text of 1 to {limit} characters.")
    return {**(headers or {}), messages.ORDERING_KEY: key}


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
_OPTIONAL_COLUMNS = {column.name: column for column in SENT if column.name not in _NAMED}


def _checked(carried: Mapping[str, Any]) -> dict[str, Any]:
    """Further message columns, checked by their declarations."""
    checked = {}
    for name, value in carried.items():
        column = _OPTIONAL_COLUMNS.get(name)
        if column is None:
            if name in ("then", "keep_result"):
                raise TypeError(f"{name!r} is an argument of one message: write Queue.send(body, {name}=...) for each")
            raise TypeError(f"a send got an unexpected keyword argument {name!r}")
        if column.kind is Kind.TIME:
            checked[column.outgoing] = None if value is None else milliseconds(name, value)
            continue
        if not (value is None and column.default is None):
            fits, words = _KINDS[column.kind]
            if not fits(value, column):
                raise InvalidMessage(f"{name} = {shortened(value)} is not accepted: {words.format(column)}.")
        checked[name] = value
    return checked


_KINDS: dict[Kind, tuple[Callable[[Any, MessageColumn], bool], str]] = {
    Kind.BOOL: (lambda value, _: isinstance(value, bool), "True or False"),
    Kind.INT64: (lambda value, _: isinstance(value, int) and -(2**63) <= value < 2**63, "a whole number of 64 bits"),
    Kind.INT16: (lambda value, _: isinstance(value, int) and -(2**15) <= value < 2**15, "a whole number of 16 bits"),
    Kind.TEXT: (
        lambda value, column: is_storable(value, column.max_length),
        "a string of at most {0.max_length} characters",
    ),
}


# -- keyword arguments -------------------------------------------------------------------------------------------------
# The keyword arguments of ``Queue.send``, ``asend``, ``send_many`` and ``asend_many``, for type checkers.
#
# Tests compare them with the signatures and with ``sql.message_columns``; no code reads them at run time.


class CarriedOptions(TypedDict, total=False):
    """Message columns without a named argument in ``send``."""

    is_barrier: bool


class CommonOptions(CarriedOptions, total=False):
    """Arguments of ``send`` and ``send_many``."""

    dedupe_key: str | Callable[[Any], str | None] | None
    on_conflict: OnConflict | str | None
    headers: Mapping[str, str] | None
    expires_in: timedelta | None
    priority: int
    recipient: str
    unknown_recipient: bool
    using: str | None


class SelectOptions(CarriedOptions, total=False):
    """Arguments of ``send_from`` beside the rows."""

    of: type | None
    headers: Mapping[str, str] | None
    expires_in: timedelta | None
    priority: int
    recipient: str
    unknown_recipient: bool
    using: str | None


class BulkOptions(CommonOptions, total=False):
    """Arguments of ``send_many``, for all of its messages."""

    ordering_key: str | Callable[[Any], str | None] | None


class SendOptions(CommonOptions, total=False):
    """Arguments of ``send`` beside the body."""

    ordering_key: str | None
    then: Any
    keep_result: timedelta | None
    delay: timedelta | None
    at: datetime | None
    delayed_in: str | None
    correlation_id: str | None
    reply_to: str | None
    message_id: uuid.UUID | None
    isolated: bool


# -- the recipient: a misspelt name would never be received
# --------------------------------------------------------------
#
# Known are the consumers that this process has imported, those with subscriptions, and those in the rows of live
# workers (for a producer that imports no consumers). A known name stays known to this process, so the workers may be
# stopped during a deploy; an unknown name is queried again after some seconds. If no consumer of the queue is known at
# all, every recipient is accepted.


#: Seconds after which an unknown name is queried again.
REFRESH_AFTER = 5.0


class _KnownConsumers:
    """The consumers of one queue in the rows of workers."""

    __slots__ = ("complete", "looked_at", "names")

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.complete = True
        self.looked_at = float("-inf")


_known: dict[tuple[str, str], _KnownConsumers] = {}


def forget() -> None:
    """Clear the cache (tests)."""
    _known.clear()


def names_of(cls: type, headers: str) -> tuple[str, ...]:
    """The types of a message that is being sent: of its class, or, of stored bytes, those in its headers."""
    names = messages.type_names(cls)
    return names if names[0] else messages.read_kind(headers).names


def refuse_unknown_recipient(queue: Any, alias: str, recipient: str) -> None:
    """Raise InvalidMessage if consumers of this queue are known and none has this name. A known name costs two look-ups
    in memory."""
    if not queue.delivery.recipients:
        return
    if any(
        recipient == registration.name or recipient in registration.aliases for registration in registered.of(queue)
    ):
        return
    label = queue._meta.label
    known_consumers = _known.setdefault((alias, label), _KnownConsumers())
    if recipient in known_consumers.names:
        return
    if monotonic() - known_consumers.looked_at >= REFRESH_AFTER and not _look(alias, label, known_consumers):
        return
    known = {registration.name for registration in registered.of(queue)} | known_consumers.names
    if known_consumers.complete and known and recipient not in known:
        names = sorted(known)[:20]
        raise InvalidMessage(
            f"recipient = {recipient!r} is not accepted by {label}: no consumer of this process or of a live worker "
            f"has that name. Known: {', '.join(names)}{', …' if len(known) > len(names) else ''}. To send all the "
            "same: unknown_recipient=True."
        )


def _look(alias: str, label: str, known_consumers: _KnownConsumers) -> bool:
    """Query the rows of workers; False if that fails, which is no reason to refuse a message."""
    rows = Subscriber.objects.using(alias).filter(queue=label, alive_until__gt=Now()).order_by()
    try:
        # A savepoint: without the privilege to read that table the caller's transaction must stay usable.
        in_transaction = connections[alias].in_atomic_block
        with transaction.atomic(using=alias) if in_transaction else nullcontext():
            texts = list(rows.values_list("consumers", flat=True))
            subscribed = Subscription._default_manager.using(alias).filter(queue=label).order_by()
            names = set(subscribed.values_list("consumer", flat=True))
    except Error:
        return False
    known_consumers.looked_at = monotonic()
    known_consumers.complete = all(texts)  # a worker of an older version lists no consumers and may have it
    known_consumers.names |= names | {str(name) for text in texts for name, _ in parse_json_list(text)}
    return True


log = logging.getLogger("queueapp")

#: Types of queues that were found to be in order, or warned about. The names are those that senders give.
_seen: set[tuple[str, tuple[str, ...]]] = set()
_MAX_SEEN = 10_000


def check_type(queue: Any, cls: type, headers: str, recipient: str = "") -> None:
    """Raise InvalidMessage for a type that the queue does not accept, and warn once of one that no consumer of this
    process takes. ``headers``: as they are stored, for bodies without a class."""
    accepted = queue.delivery.accepted_types
    if accepted is None and (recipient or not registered.of(queue)):
        return
    names = names_of(cls, headers)
    if accepted is not None and accepted.isdisjoint(names):
        raise InvalidMessage(
            f"{_in_words(names)} is not accepted by {queue._meta.label}: its Delivery.types are "
            f"{', '.join(sorted(name or 'messages without a type' for name in accepted))}."
        )
    if not recipient and (queue._meta.label, names) not in _seen:
        _warn(queue, names)


def _warn(queue: Any, names: tuple[str, ...]) -> None:
    label, registrations = queue._meta.label, registered.of(queue)
    if len(_seen) >= _MAX_SEEN:
        _seen.clear()
    _seen.add((label, names))
    if not registrations or registered.resolver_of(queue) is not None or matching_consumers(registrations, names):
        return
    known = sorted({name or "messages without a type" for item in registrations for name in item.type_names})
    log.warning(
        "%s was sent to %s, and no consumer of this process takes it: it waits until a worker has one. Its consumers "
        "take %s. Check the type, or limit the queue to its types (Delivery.types).",
        _in_words(names), label, ", ".join(known), extra={"queue": label, "message_type": names[0]},
    )  # fmt: skip


def _in_words(names: tuple[str, ...]) -> str:
    return f"A message of type {names[0]!r}" if names[0] else "A message without a type"


def forget_warned_types() -> None:
    """Clear what was warned about (tests)."""
    _seen.clear()
