"""Converts kombu messages to rows and back: the body is stored as its bytes, which need no second decoding, the rest in
a header."""

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
from ...options import is_storable
from ...sql.claims import BODY, CANCELS, DELIVERIES, HEADERS, SEQ, Claimed
from ...sql.message_columns import Outgoing
from .models import MAX_ID_LENGTH, MAX_NAME_LENGTH

#: The header with kombu's own fields of a message, as JSON.
KOMBU = "kombu"
#: Highest priority level of ``BrokerQueue``; the lowest is 0.
HIGHEST = 9
_MAX_TYPE_LENGTH = 255
_decode = msgspec.json.Decoder().decode
#: Not msgspec's encoder: it writes times and the like as plain text, where kombu marks them with their type.
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
#: The key by which kombu's JSON marks values that plain JSON has no type for.
_TYPE_MARK = "__type__"
#: Properties of one publish or delivery, which are not stored.
_TRANSIENT_PROPERTIES = ("delivery_tag", "body_encoding")
_MAX_DELAY = timedelta(days=36500)


def priority_level(priority: Any) -> int:
    """The level of an AMQP priority, 0 to 255: 0 to 9 have a level each, higher ones share level 9.

    >>> [priority_level(p) for p in (0, 3, 9, 10, 255, None)]
    [0, 3, 9, 9, 9, 0]
    """
    try:
        return max(0, min(HIGHEST, int(priority)))
    except (TypeError, ValueError):
        return 0


def row_for(message: Mapping[str, Any], queue: str, ttl_ms: int | None = None) -> Outgoing:
    """The row of a message for one queue. ``ttl_ms``: the time limit of the queue. Raises InvalidMessage."""
    if not queue or not is_storable(queue, MAX_NAME_LENGTH):
        raise InvalidMessage(
            f"The queue {queue!r:.100} is not accepted: 1 to {MAX_NAME_LENGTH} characters, without NUL and halves of "
            "surrogate pairs."
        )
    return _row(message, queue, ttl_ms)


def row_to_route(message: Mapping[str, Any]) -> Outgoing:
    """The row of a message for the queues that are bound to an exchange."""
    return _row(message, "", None)


def _row(message: Mapping[str, Any], queue: str, ttl_ms: int | None) -> Outgoing:
    headers, properties = message.get("headers") or {}, message["properties"]
    kept = {
        "content-encoding": message.get("content-encoding"),
        "headers": headers,
        "properties": {name: value for name, value in properties.items() if name not in _TRANSIENT_PROPERTIES},
    }
    inner = _encoded(kept)
    task = headers.get("task")
    if isinstance(task, str):
        _refuse_unusable(task, headers.get("id"))
    stored = {TYPE: task[:_MAX_TYPE_LENGTH]} if isinstance(task, str) else {}
    kind = message.get("content-type")
    if kind:
        stored[CONTENT_TYPE] = str(kind)
    stored[KOMBU] = inner
    expires = [ms for ms in (ttl_ms, _milliseconds(properties.get("expiration"))) if ms is not None]
    return Outgoing(
        _identity(headers, properties),
        encode_headers(stored),
        _bytes(message.get("body")),
        min(expires) if expires else None,
        queue,
        priority_level(properties.get("priority")),
    )


def _encoded(fields: dict[str, Any]) -> str:
    """kombu's fields as JSON. Raises InvalidMessage for values that no worker could read: NaN, infinity and lone
    surrogates."""
    try:
        try:
            text = _encode(fields)
        except (TypeError, ValueError):
            text = str(dumps(fields, allow_nan=False))
        if "\\ud" in text:
            _decode(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidMessage(f"The headers of the message are not accepted: {error}") from error
    return text


def _refuse_unusable(task: str, task_id: Any) -> None:
    """Raise InvalidMessage for a task that no worker can run, or whose result cannot be stored."""
    if "\0" in task:
        raise InvalidMessage(f"The task name {task!r:.100} is not accepted: it has a NUL character.")
    if isinstance(task_id, str) and (len(task_id) > MAX_ID_LENGTH or "\0" in task_id):
        raise InvalidMessage(
            f"The task id {task_id!r:.100} is not accepted: at most {MAX_ID_LENGTH} characters without NUL."
        )


def _identity(headers: Mapping[str, Any], properties: Mapping[str, Any]) -> uuid.UUID:
    """The task's id, so that its message is found by it; else a new id."""
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
    """The expiration property: AMQP has it as a string of milliseconds."""
    if expiration in (None, ""):
        return None
    try:
        ms = int(float(expiration))
    except (TypeError, ValueError, OverflowError):
        return None
    return max(1, min(ms, int(_MAX_DELAY / timedelta(milliseconds=1))))


def due_at(message: Mapping[str, Any]) -> datetime | None:
    """When a task is due; None: now, or its eta is not readable, which its worker rejects."""
    eta = (message.get("headers") or {}).get("eta")
    if not eta:
        return None
    try:
        due = eta if isinstance(eta, datetime) else datetime.fromisoformat(str(eta))
    except ValueError:
        return None
    due = due.replace(tzinfo=UTC) if due.tzinfo is None else due
    now = datetime.now(UTC)
    return min(due, now + _MAX_DELAY) if due > now else None


def until_due(row: Outgoing, due: datetime) -> Outgoing:
    """The row for the delayed store: there the time limit counts from the due time, in ``row`` from now."""
    if row.expires_ms is None:
        return row
    remaining = row.expires_ms - int((due - datetime.now(UTC)) / timedelta(milliseconds=1))
    return row._replace(expires_ms=max(1, remaining))


def fields_of(stored: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """kombu's fields of a message by its stored headers, and the properties among them. Raises UndecodableMessage."""
    headers = decode_headers(stored)
    text = headers.get(KOMBU)
    try:
        fields: dict[str, Any] = (
            {"headers": headers} if text is None else loads(text) if _TYPE_MARK in text else _decode(text)
        )
        properties = fields.setdefault("properties", {})
        fields["content-type"] = headers.get(CONTENT_TYPE)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UndecodableMessage(f"The header {KOMBU!r} is not readable: {error}") from error
    return fields, properties


def payload_of(row: Claimed, token: uuid.UUID) -> dict[str, Any]:
    """The payload of a kombu ``Message``. Raises UndecodableMessage."""
    kept, properties = fields_of(row[HEADERS])
    try:
        info = properties.setdefault("delivery_info", {})
        info["redelivered"] = row[DELIVERIES] > 1
    except (TypeError, AttributeError) as error:
        raise UndecodableMessage(f"The header {KOMBU!r} is not readable: {error}") from error
    # By seq, not by id: a task that is sent twice is two messages with one id, which may be in one claim.
    properties["delivery_tag"] = f"{row[SEQ]}.{token.hex}.{row[DELIVERIES]}.{row[CANCELS]}"
    kept["deliveries"] = row[DELIVERIES]
    kept["redelivered"] = row[DELIVERIES] > 1
    kept["body"] = row[BODY]
    return kept
