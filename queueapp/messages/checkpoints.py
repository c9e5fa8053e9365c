"""A checkpoint: how far the attempts before have got, kept in the headers of the message itself. So it goes wherever that goes:
into the delayed store, to poison and back; and it is gone with the message."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import InvalidMessage
from .header_names import CHECKPOINT
from .headers import decode_headers
from .nan_check import first_not_finite

#: Bytes of JSON. It is written anew with each checkpoint, and read with each claim.
MAX_CHECKPOINT = 64 * 1024

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


def with_checkpoint(headers: str, value: Any) -> str:
    """Stored headers with this checkpoint in the place of another; None: with none. Raises InvalidMessage for what JSON cannot
    hold, and for too much of it."""
    changed = decode_headers(headers)
    changed.pop(CHECKPOINT, None)
    if value is not None:
        changed[CHECKPOINT] = _encoded(value)
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
            f"A checkpoint of {len(data)} bytes is not accepted: it must be at most {MAX_CHECKPOINT} bytes of JSON. Keep the "
            "work in a table of your own, and here how far it has got."
        )
    return data.decode()


def take_checkpoint(headers: dict[str, str]) -> Any:
    """Take the checkpoint out of decoded headers; None: there is none, or somebody has changed it by hand into what is no
    JSON."""
    text = headers.pop(CHECKPOINT, None)
    try:
        return None if text is None else _decode(text)
    except msgspec.DecodeError:
        return None
