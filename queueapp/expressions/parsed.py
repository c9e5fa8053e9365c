"""What an expression is evaluated on: a parsed body and the columns that functions ask for."""

from __future__ import annotations

from typing import Any

import msgspec

from ..messages import decode_body, read_head


class ParsedMessage(msgspec.Struct, frozen=True, gc=False):
    """One message. ``body`` is made of what JSON has: dicts, lists, strings, numbers, booleans, None; of anything else,
    raw bytes among them, every identifier is NULL. ``topic`` is what TOPIC_NAME() says, and ``size``, in bytes, what
    MESSAGE_SIZE() says; both are NULL where they are not known.
    """

    body: Any = None
    topic: str = ""
    size: int | None = None

    @classmethod
    def stored(cls, headers: str, body: bytes | memoryview | None, topic: str = "") -> ParsedMessage:
        """Of a row as it is stored. A body that is not JSON has no fields. Raises UndecodableMessage for one that says
        it is JSON, and for headers that do not parse.
        """
        raw = None if body is None else bytes(body)
        return cls(decode_body(raw, read_head(headers)[1]), topic, len(raw or b""))
