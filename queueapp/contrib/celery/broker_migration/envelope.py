"""A message in transit, in a form of neither broker."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..serialization import HIGHEST


class Envelope(NamedTuple):
    """One message in transit between two brokers."""

    #: Unique, and the same each time that the message is read from its source.
    key: str
    queue: str
    #: In kombu's form, with the plain body (no base64).
    message: dict[str, Any]
    #: Number of its row of messages taken out.
    number: int = 0


def key_of(queue: str, message: Mapping[str, Any]) -> str:
    """The identity of a message: the delivery tag that kombu stores with each publish or, for a broker with tags of its
    own, a hash of the message. A message that a topic exchange routed to two queues counts as two."""
    tag = message.get("properties", {}).get("delivery_tag")
    if not isinstance(tag, str) or len(tag) < 16:
        parts = [message.get("headers"), message.get("properties", {}).get("correlation_id"), message.get("body")]
        tag = hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()
    return digest(f"{queue}\0{tag}")


def digest(text: str) -> str:
    """A key of 128 bits, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def opened(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as a text-based broker stores it, with its body decoded from base64."""
    properties = dict(message.get("properties") or {})
    body = message.get("body")
    if properties.pop("body_encoding", None) == "base64" and isinstance(body, str):
        with contextlib.suppress(binascii.Error):  # unchanged: its receiver reports the error
            body = base64.b64decode(body, validate=True)
    return {**message, "properties": properties, "body": body}


def closed(message: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of ``opened``."""
    body = message.get("body") or b""
    text = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else bytes(body)
    properties = {**message["properties"], "body_encoding": "base64"}
    return {**message, "properties": properties, "body": base64.b64encode(text).decode("ascii")}


def inverted(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its priority reversed: on Redis 0 is received first, elsewhere the highest.

    >>> inverted({"properties": {"priority": 3}})["properties"]["priority"]
    6
    """
    properties = dict(message.get("properties") or {})
    priority = properties.get("priority")
    number = priority if isinstance(priority, int) and not isinstance(priority, bool) else 0
    properties["priority"] = HIGHEST - max(0, min(HIGHEST, number))
    return {**message, "properties": properties}
