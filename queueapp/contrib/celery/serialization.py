"""A message of kombu as a row, and back: the body as its bytes, which nobody has to decode twice, the rest in the headers."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from kombu.utils.json import dumps, loads

from ...errors import InvalidMessage, UndecodableMessage
from ...messages import CONTENT_TYPE, TYPE, decode_headers, encode_headers, new_id
from ...sql.claims import BODY, CANCELS, DELIVERIES, HEADERS, SEQ, Claimed
from ...sql.message_columns import Outgoing
from .models import MAX_NAME_LENGTH

#: The header that holds what kombu keeps about a message, as JSON.
KOMBU = "kombu"
#: Levels of ``BrokerQueue``: 0 to this.
HIGHEST = 9
_LONGEST_TYPE = 255
_decode = msgspec.json.Decoder().decode
#: Not msgspec's: that has a text for times and the like, which kombu marks with their type.
_encode = json.JSONEncoder(separators=(",", ":")).encode
#: What kombu's JSON marks that plain JSON has no type for.
_MARK = "__type__"
#: Of each publish on its own, so not kept.
_OF_A_DELIVERY = ("delivery_tag", "body_encoding")
_FAR = timedelta(days=36500)


def level_of(priority: Any) -> int:
    """The level of AMQP's priority, 0 to 255: 0 to 9 have one each, and what is above shares the highest.

    >>> [level_of(p) for p in (0, 3, 9, 10, 255, None)]
    [0, 3, 9, 9, 9, 0]
    """
    try:
        return max(0, min(HIGHEST, int(priority)))
    except (TypeError, ValueError):
        return 0


def row_for(message: Mapping[str, Any], queue: str, ttl_ms: int | None = None) -> Outgoing:
    """What is stored of a message that goes into a queue. ``ttl_ms``: the queue's own limit. Raises InvalidMessage."""
    if not queue or len(queue) > MAX_NAME_LENGTH or "\0" in queue:
        raise InvalidMessage(f"The queue {queue!r} is not accepted: a name of 1 to {MAX_NAME_LENGTH} characters.")
    return _row(message, queue, ttl_ms)


def row_for_bound(message: Mapping[str, Any]) -> Outgoing:
    """The same for whatever queues are bound to an exchange."""
    return _row(message, "", None)


def _row(message: Mapping[str, Any], queue: str, ttl_ms: int | None) -> Outgoing:
    headers, properties = message.get("headers") or {}, message["properties"]
    kept = {
        "content-encoding": message.get("content-encoding"),
        "headers": headers,
        "properties": {name: value for name, value in properties.items() if name not in _OF_A_DELIVERY},
    }
    try:
        inner = _encode(kept)
    except (TypeError, ValueError):
        inner = dumps(kept)
    task = headers.get("task")
    said = {TYPE: task[:_LONGEST_TYPE].replace("\0", "")} if isinstance(task, str) else {}
    kind = message.get("content-type")
    if kind:
        said[CONTENT_TYPE] = str(kind)
    said[KOMBU] = inner
    expires = [ms for ms in (ttl_ms, _milliseconds(properties.get("expiration"))) if ms is not None]
    return Outgoing(
        _identity(headers, properties),
        encode_headers(said),
        _bytes(message.get("body")),
        min(expires) if expires else None,
        queue,
        level_of(properties.get("priority")),
    )


def _identity(headers: Mapping[str, Any], properties: Mapping[str, Any]) -> uuid.UUID:
    """The task's own id, so that its message is found by it."""
    text = headers.get("id") or properties.get("correlation_id")
    if isinstance(text, str) and len(text) == 36:
        try:
            return uuid.UUID(text)
        except ValueError:
            pass
    return new_id()


def _bytes(body: Any) -> bytes:
    if isinstance(body, str):
        return body.encode("utf-8", "surrogatepass")
    return bytes(body or b"")


def _milliseconds(expiration: Any) -> int | None:
    """AMQP has it as a string of milliseconds."""
    if expiration in (None, ""):
        return None
    try:
        ms = int(float(expiration))
    except (TypeError, ValueError, OverflowError):
        return None
    return max(1, min(ms, int(_FAR / timedelta(milliseconds=1))))


def due_at(message: Mapping[str, Any]) -> datetime | None:
    """When a task is due; None: at once, or it does not say so in a way that can be read, which its worker deals with."""
    eta = (message.get("headers") or {}).get("eta")
    if not eta:
        return None
    try:
        due = eta if isinstance(eta, datetime) else datetime.fromisoformat(str(eta))
    except ValueError:
        return None
    due = due.replace(tzinfo=UTC) if due.tzinfo is None else due
    now = datetime.now(UTC)
    return min(due, now + _FAR) if due > now else None


def until_due(row: Outgoing, due: datetime) -> Outgoing:
    """The row for the delayed store, where the time that a message may wait counts from when it is due: here it counts from now."""
    if row.expires_ms is None:
        return row
    left = row.expires_ms - int((due - datetime.now(UTC)) / timedelta(milliseconds=1))
    return row._replace(expires_ms=max(1, left))


def payload_of(row: Claimed, token: uuid.UUID) -> dict[str, Any]:
    """What kombu makes a ``Message`` of. Raises UndecodableMessage."""
    headers = decode_headers(row[HEADERS])
    text = headers.get(KOMBU)
    try:
        kept: dict[str, Any] = {"headers": headers} if text is None else loads(text) if _MARK in text else _decode(text)
        properties = kept.setdefault("properties", {})
        info = properties.setdefault("delivery_info", {})
        info["redelivered"] = row[DELIVERIES] > 1
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UndecodableMessage(f"The header {KOMBU!r} is not what kombu writes: {error}") from error
    # By its place: a task that somebody sent twice is two messages with one id, and may come twice in one claim.
    properties["delivery_tag"] = f"{row[SEQ]}.{token.hex}.{row[DELIVERIES]}.{row[CANCELS]}"
    kept["deliveries"] = row[DELIVERIES]
    kept["redelivered"] = row[DELIVERIES] > 1
    kept["content-type"] = headers.get(CONTENT_TYPE)
    kept["body"] = row[BODY]
    return kept
