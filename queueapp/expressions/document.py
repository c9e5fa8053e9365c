"""What an expression is evaluated on: a parsed body and the columns that functions ask for."""

from __future__ import annotations

from typing import Any

import msgspec

from ..messages import TOPIC, decode_body, decode_headers, read_head


class ParsedMessage(msgspec.Struct, frozen=True, gc=False):
    """One message. ``body`` is made of what JSON has: dicts, lists, strings, numbers, booleans, None; of anything else,
    raw bytes among them, every identifier is NULL. ``topic`` is what TOPIC_NAME() says, and ``size``, in bytes, what
    MESSAGE_SIZE() says; both are NULL where they are not known.
    """

    body: Any = None
    topic: str = ""
    size: int | None = None

    @classmethod
    def stored(
        cls, headers: str, body: bytes | memoryview | None, topic: str = "", content_type: str = ""
    ) -> ParsedMessage:
        """Of a row as it is stored. ``topic`` and ``content_type`` hold for a message that names none of its own; '' is JSON. A
        body that is nothing a codec knows has no fields. Raises UndecodableMessage for one that is not what it says it
        is, and for headers that do not parse.
        """
        raw = None if body is None else bytes(body)
        own = decode_headers(headers).get(TOPIC) if f'"{TOPIC}"' in headers else None
        return cls(decode_body(raw, read_head(headers)[1] or content_type), own or topic, len(raw or b""))
