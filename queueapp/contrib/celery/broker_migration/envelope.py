"""A message on its way, in a form that belongs to neither broker."""

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
    """One message between two brokers."""

    #: The same whenever it is read from its source, and no other message has it.
    key: str
    queue: str
    #: As kombu has it, with the body as it is (no base64).
    message: dict[str, Any]
    #: Where its source has set it aside.
    number: int = 0


def key_of(queue: str, message: Mapping[str, Any]) -> str:
    """What tells a message from all others: kombu gives each one that it publishes a tag, which is stored with it; of a broker
    that has tags of its own, what the message says. A message that a topic brought into two queues is two."""
    tag = message.get("properties", {}).get("delivery_tag")
    if not isinstance(tag, str) or len(tag) < 16:
        said = [message.get("headers"), message.get("properties", {}).get("correlation_id"), message.get("body")]
        tag = hashlib.sha256(json.dumps(said, sort_keys=True, default=repr).encode()).hexdigest()
    return digest(f"{queue}\0{tag}")


def digest(text: str) -> str:
    """A key of 128 bits, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def opened(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as a broker of text stores it, with its body as it is."""
    properties = dict(message.get("properties") or {})
    body = message.get("body")
    if properties.pop("body_encoding", None) == "base64" and isinstance(body, str):
        with contextlib.suppress(binascii.Error):  # as it is: whoever receives it says what is wrong with it
            body = base64.b64decode(body, validate=True)
    return {**message, "properties": properties, "body": body}


def closed(message: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of ``opened``."""
    body = message.get("body") or b""
    text = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else bytes(body)
    properties = {**message["properties"], "body_encoding": "base64"}
    return {**message, "properties": properties, "body": base64.b64encode(text).decode("ascii")}


def inverted(message: Mapping[str, Any]) -> dict[str, Any]:
    """Its priority counted from the other end: on Redis 0 is received first, elsewhere the highest.

    >>> inverted({"properties": {"priority": 3}})["properties"]["priority"]
    6
    """
    properties = dict(message.get("properties") or {})
    priority = properties.get("priority")
    number = priority if isinstance(priority, int) and not isinstance(priority, bool) else 0
    properties["priority"] = HIGHEST - max(0, min(HIGHEST, number))
    return {**message, "properties": properties}
