"""A checkpoint: the progress of earlier attempts, stored in the headers of the message. It stays with the message in
the delayed store and in poison, and is deleted with it. The checkpoint of an encrypted message is sealed with the key
of its body."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from ..errors import InvalidMessage, UndecodableMessage
from .bodies import first_not_finite
from .body_filters import open_text, seal_text
from .headers import CHECKPOINT, decode_headers

#: Bytes of JSON. It is written anew with each checkpoint, and read with each claim.
MAX_CHECKPOINT = 64 * 1024

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


def with_checkpoint(headers: str, value: Any, identity: uuid.UUID, using: str) -> str:
    """Stored headers with this checkpoint in place of another; None: without one. Raises InvalidMessage for a value
    that JSON cannot hold or that is too large."""
    changed = decode_headers(headers)
    changed.pop(CHECKPOINT, None)
    if value is not None:
        text = _encoded(value)
        changed[CHECKPOINT] = seal_text(text, changed, identity, using) or text
    # As in ``count_attempts``: what another system wrote is written back as it was.
    return _encode(changed).decode()


def _encoded(value: Any) -> str:
    kind = type(value).__qualname__
    try:
        data = _encode(value)
        where = first_not_finite(value)
    except Exception as error:
        raise InvalidMessage(f"A {kind} cannot be a checkpoint: {error}.") from error
    if where is not None:
        raise InvalidMessage(f"A {kind} cannot be a checkpoint: it holds {where[1]}, and JSON has no such number.")
    if len(data) > MAX_CHECKPOINT:
        raise InvalidMessage(
            f"A checkpoint of {len(data)} bytes is not accepted: it must be at most {MAX_CHECKPOINT} bytes of JSON. "
            "Keep the work in a table of your own, and here how far it has got."
        )
    return data.decode()


def take_checkpoint(headers: dict[str, str]) -> str | None:
    """Remove the stored checkpoint from decoded headers and return it; None: there is none."""
    return headers.pop(CHECKPOINT, None)


def read_checkpoint(text: str | None, identity: uuid.UUID, using: str) -> Any:
    """The value of a stored checkpoint. None without one, and for one that cannot be read: it was edited, or its
    message has another id."""
    try:
        return None if text is None else _decode(open_text(text, identity, using))
    except (msgspec.DecodeError, UndecodableMessage):
        return None
