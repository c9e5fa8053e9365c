"""Bodies: JSON by ``msgspec`` (structs, dataclasses, dicts), raw bytes, or what the codec of another message type
makes.

There is one codec per message type of a queue (``Delivery.message_type``): ``json``, ``msgpack``, and ``binary``, which
takes bytes and knows nothing of them. A project adds its own with ``register_codec``. Consumers find the codec by the
content type that a message names; a message that names none, of a foreign producer, is of its queue's.
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import msgspec

from ..errors import InvalidMessage, InvalidOption, UndecodableMessage, shortened
from .body_filters import decompressed, is_wrapped, opened
from .headers import (
    ATTEMPTS,
    BASE_TYPES,
    BYTES,
    CONTENT_TYPE,
    DEDUPE_KEY,
    DIED,
    JSON,
    MSGPACK,
    NSB_CONTENT_TYPE,
    NSB_TYPES,
    TYPE,
    TYPE_VERSION,
    Kind,
    decode_headers,
    encode_headers,
    read_kind,
)
from .types import class_named, is_typed, to_known_version, type_name, type_names, type_version

_encoder = msgspec.json.Encoder()


@lru_cache(maxsize=1024)
def _plain_headers(cls: Any) -> str:
    """Stored headers of a typed message without headers of its own: one text per class."""
    return encode_headers({**type_headers(cls), CONTENT_TYPE: JSON})


def type_headers(cls: Any) -> dict[str, str]:
    """The headers that say what class a body is; none for untyped ones."""
    name, *bases = type_names(cls)
    headers = {TYPE: name} if name else {}
    if bases:
        # For workers that consume a base and have never imported this class.
        headers[BASE_TYPES] = "; ".join(bases)
    if name and type_version(cls) != 1:
        headers[TYPE_VERSION] = str(type_version(cls))
    return headers


#: Bodies that are stored as they are.
_RAW = (bytes, bytearray, memoryview)

_UNTYPED_HEADERS = encode_headers({CONTENT_TYPE: JSON})

_BYTES_HEADERS = encode_headers({CONTENT_TYPE: BYTES})


def encode(body: Any, headers: Mapping[str, str] | None = None, message_type: str = "json") -> tuple[str, bytes | None]:
    """(stored headers, stored body) of one message. Bytes are stored as they are, whatever the message type. Raises
    InvalidMessage when the body cannot be encoded.

    >>> encode({"order": 7})
    ('{"content-type":"application/json"}', b'{"order":7}')
    """
    cls = type(body)
    if body is None:
        plain, data = _BYTES_HEADERS, None
    elif cls is bytes or isinstance(body, _RAW):
        plain, data = _BYTES_HEADERS, bytes(body)
    elif message_type != "json":
        codec = codec_of(message_type)
        plain, data = _headers_of(cast("Hashable", cls), codec), _encode_by(codec, body)
    else:
        try:
            data = _encoder.encode(body)
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            raise InvalidMessage(f"A {cls.__qualname__} cannot be a message body: {error}.") from error
        if has_null(data) and may_be_not_finite(body):
            refuse_not_finite(body)
        plain = _plain_headers(cast("Hashable", cls)) if is_typed(cls) else _UNTYPED_HEADERS
    return (_with(plain, headers) if headers else plain), data


def json_headers(cls: Any, headers: Mapping[str, str] | None = None) -> str:
    """The stored headers of messages whose bodies the database writes as JSON; ``cls`` None: they have no type. Raises
    InvalidMessage."""
    if cls is not None and not (isinstance(cls, type) and is_typed(cls)):
        raise InvalidMessage(
            f"of = {shortened(cls)} is not accepted: it must be a msgspec.Struct or a dataclass, or None."
        )
    plain = _UNTYPED_HEADERS if cls is None else _plain_headers(cast("Hashable", cls))
    return _with(plain, headers) if headers else plain


#: Headers that say of which class a body is; and what this package writes about one message alone.
_OF_TYPE = (TYPE, BASE_TYPES, TYPE_VERSION, NSB_TYPES)
_OF_MESSAGE = (ATTEMPTS, DIED, DEDUPE_KEY)


def _with(plain: str, headers: Mapping[str, str]) -> str:
    declared = decode_headers(plain)
    merged, written = dict(declared), declared[CONTENT_TYPE]
    try:
        merged.update(headers)
    except (TypeError, ValueError):
        raise InvalidMessage(f"headers = {shortened(headers)} is not accepted: it must be a dict of strings.") from None
    # The headers may be those of another message, which a handler passes on: how the body is read depends on this one.
    for name in _OF_MESSAGE:
        merged.pop(name, None)
    for name in (CONTENT_TYPE, NSB_CONTENT_TYPE):
        if name in merged and not _is_read_as(written, merged[name]):
            merged[name] = written
    if TYPE in declared and any(merged.get(name) != declared.get(name) for name in _OF_TYPE):
        given = {name: text for name, text in merged.items() if name not in _OF_TYPE or not isinstance(text, str)}
        merged = {name: declared[name] for name in _OF_TYPE if name in declared} | given
    stored = encode_headers(merged)
    if TYPE_VERSION in merged:
        try:
            read_kind(stored)
        except UndecodableMessage as error:
            raise InvalidMessage(str(error)) from error
    return stored


def _is_read_as(written: str, given: Any) -> bool:
    """Whether a body that was encoded here as ``written`` is decoded under the content type that its sender gave. Of
    bytes the sender alone knows what they are."""
    if given == written or written == BYTES or not isinstance(given, str):
        return True
    codec = codec_for(given)
    if is_wrapped(given) or codec is not None:
        return codec is not None and codec.content_type == written
    return written == JSON and "json" in given


@lru_cache(maxsize=1024)
def _headers_of(cls: Any, codec: Codec) -> str:
    """Stored headers of a message of another type than JSON, without headers of its own."""
    return encode_headers({**type_headers(cls), CONTENT_TYPE: codec.content_type})


def _encode_by(codec: Codec, body: Any) -> bytes:
    try:
        return bytes(codec.encode(body))
    except Exception as error:  # a project's codec raises what it likes
        raise InvalidMessage(
            f"A {type(body).__qualname__} cannot be a message body of message_type {codec.name!r}: {error}."
        ) from error


def encode_alike(
    bodies: Sequence[Any], headers: Mapping[str, str] | None = None, message_type: str = "json"
) -> tuple[str, list[bytes | None]]:
    """(stored headers, stored bodies) of bodies that are all of one class; at least one. Raises InvalidMessage."""
    stored, first = encode(bodies[0], headers, message_type)
    if first is None or isinstance(bodies[0], _RAW):
        return stored, [encode(body)[1] for body in bodies]
    if message_type != "json":
        codec = codec_of(message_type)
        return stored, [_encode_by(codec, body) for body in bodies]
    try:
        data = list(map(_encoder.encode, bodies))
        if not any(map(has_null, data)) or not any(map(may_be_not_finite, bodies)):
            return stored, data  # type: ignore[return-value]
    except Exception:  # noqa: S110
        pass
    return stored, [encode(body)[1] for body in bodies]  # says which one, and why not


def refuse_not_finite(body: Any) -> None:
    """Raise InvalidMessage for a body with a number that JSON does not have."""
    found = first_not_finite(body)
    if found is not None:
        where, number = found
        raise InvalidMessage(
            f"A {type(body).__qualname__} cannot be a message body: it holds {number}{where and f' at {where}'}, and "
            "JSON has no such number (it would arrive as null)."
        )


@lru_cache(maxsize=1024)
def body_decoder(cls: Any) -> Callable[[bytes], Any]:
    """The JSON decoder of a message class, made once."""
    return msgspec.json.Decoder(cls).decode if cls is not Any else msgspec.json.Decoder().decode


def decode_body(body: bytes | None, content_type: str, cls: Any = Any) -> Any:
    """The body as an instance of ``cls`` (``Any``: plain JSON values; ``bytes``: untouched). Raises UndecodableMessage,
    also for an empty body where ``cls`` has no place for None."""
    if is_wrapped(content_type):
        body, content_type = decompressed(body, content_type)
    if cls is bytes:
        return body if body is not None else _refuse_empty(cls)
    if content_type == BYTES:
        if not (body and isinstance(cls, type) and is_typed(cls)):
            return body if _may_be_none(cls) or body else _refuse_empty(cls)
        content_type = JSON  # encoded by its sender, who says which class it is
    if body is None or body == b"":
        return None if _may_be_none(cls) else _refuse_empty(cls)
    codec = codec_for(content_type) if content_type and content_type != JSON else None
    if codec is not None:
        return _decode_by(codec, body, cls)
    if cls is Any and content_type and "json" not in content_type:
        return body
    try:
        # Foreign JSON often starts with a byte order mark, which no JSON parser accepts.
        return body_decoder(cls)(body[3:] if body.startswith(b"\xef\xbb\xbf") else body)
    except Exception as error:  # also whatever the class itself raises in __post_init__
        what = "JSON" if cls is Any else f"a {getattr(cls, '__qualname__', str(cls))}"
        raise UndecodableMessage(f"The body is not {what}: {error}") from error


@lru_cache(maxsize=1024)
def _may_be_none(cls: Any) -> bool:
    """Whether who reads a body as ``cls`` expects that there may be none."""
    if cls is Any:
        return True
    try:
        msgspec.convert(None, cls)
    except Exception:
        return False
    return True


def _refuse_empty(cls: Any) -> None:
    raise UndecodableMessage(f"The body is empty: that is not a {getattr(cls, '__qualname__', str(cls))}.")


def read_as(body: bytes | None, kind: Kind, cls: Any) -> Any:
    """The body of a message as an instance of ``cls`` or of the class below it that the message names, from whichever
    version it has. Raises UndecodableMessage."""
    found = class_named(cls, kind.names[0])
    if found is None or (found is not cls and kind.version > type_version(found)):
        return decode_body(body, kind.content_type, cls)  # of a type that is known elsewhere; what it has of this one
    known = type_version(found)
    if kind.version == known:
        return decode_body(body, kind.content_type, found)
    if kind.version > known:
        raise UndecodableMessage(
            f"The body is version {kind.version} of {type_name(found)}, and this process knows version {known}."
        )
    if not body:
        _refuse_empty(found)
    plain = decode_body(body, JSON if kind.content_type == BYTES else kind.content_type)
    plain = to_known_version(found, kind.version, plain)
    try:
        return msgspec.convert(plain, found)
    except Exception as error:
        raise UndecodableMessage(f"The body is not a {found.__qualname__}: {error}") from error


#: Reads any body: (body, stored headers, id, database).
Read = Callable[[bytes | None, str, uuid.UUID, str], Any]


def reader_of(cls: Any, kind: Kind) -> tuple[Callable[[bytes], Any] | None, Read]:
    """How messages of this kind are read as ``cls``: (what reads the usual body fast and raises for any other, or None;
    what reads any)."""
    if is_wrapped(kind.content_type):

        def unwrap(body: bytes | None, headers: str, identity: uuid.UUID, using: str) -> Any:
            return _read_stored(body, kind, cls, headers, identity, using)

        return None, unwrap
    found = class_named(cls, kind.names[0])
    if found is not None and kind.version != type_version(found):
        found = cls if found is not cls and kind.version > type_version(found) else None
    elif found is None and isinstance(cls, type) and is_typed(cls):
        found = cls
    fast = body_decoder(found) if found is not None and kind.content_type == JSON else None
    return fast, lambda body, headers, identity, using: read_as(body, kind, cls)


def read_stored(
    body: bytes | None, headers: str, identity: uuid.UUID, using: str, cls: Any = Any, content_type: str = ""
) -> Any:
    """The body of a stored message, whatever its encoding, as an instance of ``cls`` (``Any``: plain values). Every
    reader goes through this. ``content_type``: that of its queue, for a message that names none. Raises
    UndecodableMessage, ErasedMessage and KeyMissing."""
    kind = read_kind(headers)
    if not kind.content_type:
        kind = kind._replace(content_type=content_type)
    return _read_stored(body, kind, cls, headers, identity, using)


def _read_stored(body: bytes | None, kind: Kind, cls: Any, headers: str, identity: uuid.UUID, using: str) -> Any:
    if is_wrapped(kind.content_type):
        body, content_type = opened(body, kind.content_type, decode_headers(headers), identity, using)
        kind = kind._replace(content_type=content_type)
    return read_as(body, kind, cls)


def _decode_by(codec: Codec, body: bytes, cls: Any) -> Any:
    """A body of another type than JSON."""
    try:
        if codec.content_type == MSGPACK:
            return packed_decoder(cls)(body)
        plain = codec.decode(body)
        return plain if cls is Any else msgspec.convert(plain, cls)
    except Exception as error:  # whatever the codec raises, or the class itself in __post_init__
        what = codec.name if cls is Any else f"a {getattr(cls, '__qualname__', str(cls))} in {codec.name}"
        raise UndecodableMessage(f"The body is not {what}: {error}") from error


#: Whether an encoded body may hold what was not finite.
has_null: Callable[[bytes], object] = re.compile(b"null").search

_pack = msgspec.msgpack.Encoder().encode
#: MessagePack's mark of a float, and eleven bits of exponent that are all ones. Text may happen to look like it.
_looks_infinite = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]").search


def may_be_not_finite(body: Any) -> bool:
    """Whether a body that was encoded with a null in it has to be walked."""
    try:
        return _looks_infinite(_pack(body)) is not None
    except Exception:  # an integer of more than 64 bits, for one
        return True


def first_not_finite(body: Any) -> tuple[str, float] | None:
    """(where, number) of the first number in a body that JSON does not have, under the names that it has there."""
    pending: list[tuple[Any, str]] = [(msgspec.to_builtins(body, str_keys=True), "")]
    while pending:
        value, where = pending.pop()
        if isinstance(value, float):
            if not math.isfinite(value):
                return where, value
        elif isinstance(value, dict):
            pending += [(inner, f"{where}.{name}") for name, inner in reversed(value.items())]
        elif isinstance(value, list | tuple):
            pending += [(value[place], f"{where}[{place}]") for place in reversed(range(len(value)))]
    return None


@dataclass(frozen=True, slots=True)
class Codec:
    """One message type. ``decode`` gives what JSON has: dicts, lists, texts, numbers, truths, None; expressions read
    that."""

    name: str
    content_type: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


_by_name: dict[str, Codec] = {}
_by_content_type: dict[str, Codec] = {}


def register_codec(
    name: str,
    *,
    content_type: str,
    encode: Callable[[Any], bytes],
    decode: Callable[[bytes], Any],
    aliases: Iterable[str] = (),
) -> None:
    """Add a message type for ``Delivery.message_type``: in ``AppConfig.ready`` or beside the queues, in every process.

    ``encode`` makes bytes of a body and ``decode`` plain values of bytes; both raise whatever they like when they
    cannot. ``content_type`` goes into the header of that name; ``aliases`` are others under which foreign producers
    send the same. Raises InvalidOption for a name or content type that is taken.

    >>> register_codec("bson", content_type="application/bson", encode=bson.encode, decode=bson.decode)
    """
    codec = Codec(name, content_type, encode, decode)
    known = _by_name.get(name)
    if (known is not None and known.content_type != content_type) or name in _BUILT_IN:
        raise InvalidOption("register_codec name", name, f"none of {', '.join(sorted(_by_name))}")
    for spelling in (content_type, *aliases):
        if "/" not in spelling or spelling in (JSON, BYTES) or _by_content_type.get(spelling, codec).name != name:
            raise InvalidOption("register_codec content_type", spelling, "a content type that no other codec has")
    _by_name[name] = codec
    for spelling in (content_type, *aliases):
        _by_content_type[spelling] = codec


def codec_of(message_type: str, where: str = "message_type") -> Codec:
    """The codec of a message type. Raises InvalidOption for one that is not registered."""
    try:
        return _by_name[message_type]
    except KeyError:
        accepted = f"one of {', '.join(sorted(_by_name))}, or what register_codec added in this process"
        raise InvalidOption(where, message_type, accepted) from None


def codec_for(content_type: str) -> Codec | None:
    """The codec of a content type that is neither JSON nor bytes; None: none is registered."""
    return _by_content_type.get(content_type) or _by_content_type.get(content_type.partition(";")[0].strip().lower())


def encoded_content_types() -> tuple[str, ...]:
    """The content types that have a codec here: all but JSON and bytes."""
    return tuple(_by_content_type)


def _refuse_to_encode(body: Any) -> bytes:
    raise TypeError("the queue's message_type is binary, so a body is bytes or None")


def _keep(body: bytes) -> bytes:
    return body


@lru_cache(maxsize=1024)
def packed_decoder(cls: Any) -> Callable[[bytes], Any]:
    """The MessagePack decoder of a message class, made once."""
    return msgspec.msgpack.Decoder(cls).decode if cls is not Any else msgspec.msgpack.Decoder().decode


for _codec in (
    Codec("json", JSON, msgspec.json.Encoder().encode, msgspec.json.Decoder().decode),
    Codec("msgpack", MSGPACK, msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder().decode),
    Codec("binary", BYTES, _refuse_to_encode, _keep),
):
    _by_name[_codec.name] = _codec
_BUILT_IN = frozenset(_by_name)
_by_content_type |= dict.fromkeys((MSGPACK, "application/x-msgpack", "application/vnd.msgpack"), _by_name["msgpack"])
