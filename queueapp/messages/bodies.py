"""Bodies: JSON by ``msgspec`` (structs, dataclasses, dicts), or raw bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import msgspec

from ..errors import InvalidMessage, UndecodableMessage
from .finite import first_not_finite, has_null, may_be_not_finite
from .headers import decode_headers, encode_headers
from .names import BYTES, CONTENT_TYPE, JSON, TYPE
from .types import is_typed, type_name

_encoder = msgspec.json.Encoder()


@lru_cache(maxsize=1024)
def _plain_headers(cls: Any) -> str:
    """Stored headers of a typed message without headers of its own: one text per class."""
    return encode_headers({TYPE: type_name(cls), CONTENT_TYPE: JSON})


#: Bodies that are stored as they are.
_RAW = (bytes, bytearray, memoryview)

_UNTYPED_HEADERS = encode_headers({CONTENT_TYPE: JSON})

_BYTES_HEADERS = encode_headers({CONTENT_TYPE: BYTES})


def encode(body: Any, headers: Mapping[str, str] | None = None) -> tuple[str, bytes | None]:
    """(stored headers, stored body) of one message. Raises InvalidMessage when the body cannot be encoded.

    >>> encode({"order": 7})
    ('{"content-type":"application/json"}', b'{"order":7}')
    """
    cls = type(body)
    if body is None:
        plain, data = _BYTES_HEADERS, None
    elif cls is bytes or isinstance(body, _RAW):
        plain, data = _BYTES_HEADERS, bytes(body)
    else:
        try:
            data = _encoder.encode(body)
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            raise InvalidMessage(f"A {cls.__qualname__} cannot be a message body: {error}.") from error
        if has_null(data) and may_be_not_finite(body):
            _refuse_not_finite(body)
        plain = _plain_headers(cast("Hashable", cls)) if is_typed(cls) else _UNTYPED_HEADERS
    if not headers:
        return plain, data
    merged = decode_headers(plain)
    try:
        merged.update(headers)
    except (TypeError, ValueError):
        raise InvalidMessage(f"headers = {headers!r} is not accepted: it must be a dict of strings.") from None
    return encode_headers(merged), data


def encode_alike(bodies: Sequence[Any], headers: Mapping[str, str] | None = None) -> tuple[str, list[bytes | None]]:
    """(stored headers, stored bodies) of bodies that are all of one class; at least one. Raises InvalidMessage."""
    stored, first = encode(bodies[0], headers)
    if first is None or isinstance(bodies[0], _RAW):
        return stored, [encode(body)[1] for body in bodies]
    try:
        data = list(map(_encoder.encode, bodies))
        if not any(map(has_null, data)) or not any(map(may_be_not_finite, bodies)):
            return stored, data  # type: ignore[return-value]
    except Exception:  # noqa: S110
        pass
    return stored, [encode(body)[1] for body in bodies]  # says which one, and why not


def _refuse_not_finite(body: Any) -> None:
    found = first_not_finite(body)
    if found is not None:
        where, number = found
        raise InvalidMessage(
            f"A {type(body).__qualname__} cannot be a message body: it holds {number}{where and f' at {where}'}, and JSON "
            "has no such number (it would arrive as null)."
        )


@lru_cache(maxsize=1024)
def body_decoder(cls: Any) -> Callable[[bytes], Any]:
    """The JSON decoder of a message class, made once."""
    return msgspec.json.Decoder(cls).decode if cls is not Any else msgspec.json.Decoder().decode


def decode_body(body: bytes | None, content_type: str, cls: Any = Any) -> Any:
    """The body as an instance of ``cls`` (``Any``: plain JSON values; ``bytes``: untouched). Raises UndecodableMessage."""
    if cls is bytes or content_type == BYTES:
        return body
    if body is None or body == b"":
        return None
    if cls is Any and content_type and "json" not in content_type:
        return body
    try:
        # Foreign JSON often starts with a byte order mark, which no JSON parser accepts.
        return body_decoder(cls)(body[3:] if body.startswith(b"\xef\xbb\xbf") else body)
    except Exception as error:  # also whatever the class itself raises in __post_init__
        what = "JSON" if cls is Any else f"a {getattr(cls, '__qualname__', str(cls))}"
        raise UndecodableMessage(f"The body is not {what}: {error}") from error
