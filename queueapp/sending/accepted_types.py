"""Checks the type of a message that is being sent: ``Delivery.types`` refuses others, and a type that no consumer takes
is a warning.

The warning is for a process that knows consumers of the queue, as a project does that sends to itself. It is logged
once for each queue and type. Neither check applies to a message that operators move or that SQL inserts; a worker
leaves a message of an unknown type in the queue.
"""

from __future__ import annotations

import logging
from typing import Any

from ..consuming.registry import matching_consumers, registered
from ..errors import InvalidMessage
from .validation import names_of

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


def forget() -> None:
    """Clear what was warned about (tests)."""
    _seen.clear()
