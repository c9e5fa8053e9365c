"""What is inside a message: its id, its headers and its typed body. No database here.

Headers are a JSON object of strings; two of them are ours: ``type`` (which class the body is) and ``content-type``.
A message of an NServiceBus endpoint carries the same facts under that system's names, and both are read. A body is
JSON by ``msgspec`` (structs, dataclasses, dicts), or raw bytes. What does not parse raises UndecodableMessage, and the
caller moves the row to poison with its bytes untouched.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import struct
import time
import uuid
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from itertools import repeat
from typing import Any, TypeVar, cast

import msgspec

from .errors import InvalidMessage, UndecodableMessage

JSON = "application/json"
BYTES = "application/octet-stream"
TYPE = "type"
CONTENT_TYPE = "content-type"
CORRELATION_ID = "correlation-id"
REPLY_TO = "reply-to"
#: In a message that was edited out of poison: the id of the one it replaces.
EDIT_OF = "edit-of"

#: The same facts under the names of the NServiceBus wire format (spec/000, 001), read from and written to foreign tables.
NSB_MESSAGE_ID = "NServiceBus.MessageId"
NSB_CORRELATION_ID = "NServiceBus.CorrelationId"
NSB_REPLY_TO = "NServiceBus.ReplyToAddress"
NSB_TYPES = "NServiceBus.EnclosedMessageTypes"
NSB_CONTENT_TYPE = "NServiceBus.ContentType"
NSB_TIME_SENT = "NServiceBus.TimeSent"

_TO_NSB = {
    TYPE: NSB_TYPES,
    CONTENT_TYPE: NSB_CONTENT_TYPE,
    CORRELATION_ID: NSB_CORRELATION_ID,
    REPLY_TO: NSB_REPLY_TO,
}

MAX_RECIPIENT = 200
MAX_ADDRESS = 255

_encoder = msgspec.json.Encoder()
_T = TypeVar("_T", bound=type)


# -- ids ----------------------------------------------------------------------------------------------------------


def new_id() -> uuid.UUID:
    """A time-ordered id (UUID version 7): 48 bits of milliseconds, 74 random bits."""
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10))
    return _as_uuid(value & ~(0xF << 76) & ~(0x3 << 62) | 0x7 << 76 | 0x2 << 62)


def id_sequence() -> Callable[[int], list[bytes]]:
    """A source of time-ordered ids for bulk sends, so many at a time, 16 bytes each: one random base, then counted up (0.1
    µs instead of 2)."""
    high, low = divmod(new_id().int & ~((1 << 62) - 1) | secrets.randbits(61), 1 << 64)
    start = high.to_bytes(8, "big")

    def following(count: int) -> list[bytes]:
        nonlocal low
        low += count
        return list(map(_pack_id, repeat(start), range(low - count, low)))

    return following


_pack_id = struct.Struct(">8sQ").pack


def _as_uuid(value: int) -> uuid.UUID:
    """``UUID.__init__`` validates for most of a microsecond what is known to be right here."""
    one = _make_uuid(uuid.UUID)
    _set(one, "int", value)
    _set(one, "is_safe", uuid.SafeUUID.unknown)
    return one


_make_uuid, _set = uuid.UUID.__new__, object.__setattr__


# -- type names ---------------------------------------------------------------------------------------------------


def message_type(name: str) -> Callable[[_T], _T]:
    """Give a message class a name of its own on the wire, so that it can be moved or shared with other languages.

    >>> @message_type("Acme.Sales.OrderPlaced")
    ... class OrderPlaced(msgspec.Struct): ...
    """

    def mark(cls: _T) -> _T:
        cls.__queue_type__ = name  # type: ignore[attr-defined]
        type_name.cache_clear()
        return cls

    return mark


@lru_cache(maxsize=1024)
def type_name(cls: Any) -> str:
    """The name of a message class in the ``type`` header: ``module.Class`` unless ``@message_type`` gave another."""
    own = cls.__dict__.get("__queue_type__")
    return own if own is not None else f"{cls.__module__}.{cls.__qualname__}"


def type_name_of(cls: Any) -> str:
    """The ``type`` header of bodies of this class; '' for untyped ones."""
    return type_name(cls) if isinstance(cls, type) and is_typed(cls) else ""


# -- headers ------------------------------------------------------------------------------------------------------


def encode_headers(headers: Mapping[str, str]) -> str:
    """Headers as they are stored. Raises InvalidMessage for what is not a string, or holds a NUL."""
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidMessage(f"Header {name!r} = {value!r}: header names and values must be strings.")
        if "\0" in name or "\0" in value:
            raise InvalidMessage(f"Header {name!r} contains a NUL character, which a text column cannot hold.")
    try:
        return _encoder.encode(headers).decode()
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"A header is not valid Unicode: {error}.") from error


class _Head(msgspec.Struct):
    """The headers that decide who handles a message; everything else is decoded only when somebody looks."""

    type: str | None = None
    content_type: str | None = msgspec.field(default=None, name=CONTENT_TYPE)
    nsb_types: str | None = msgspec.field(default=None, name=NSB_TYPES)
    nsb_content_type: str | None = msgspec.field(default=None, name=NSB_CONTENT_TYPE)


_decode_head = msgspec.json.Decoder(_Head).decode
_decode_headers = msgspec.json.Decoder(dict[str, str | None]).decode
#: RecursionError: a hundred thousand opening brackets are enough for it.
_NOT_HEADERS = (msgspec.DecodeError, UnicodeEncodeError, RecursionError)


def read_head(headers: str) -> tuple[str, str]:
    """(type name, content type) of stored headers; '' where unknown. Raises UndecodableMessage."""
    # Messages of one type have the same headers, unless somebody gives them some of their own.
    return _head_of(headers) if len(headers) < _LONG else _head_of.__wrapped__(headers)


#: Headers longer than this are not worth remembering.
_LONG = 300


@lru_cache(maxsize=1024)
def _head_of(headers: str) -> tuple[str, str]:
    try:
        head = _decode_head(headers)
    except _NOT_HEADERS as error:
        raise UndecodableMessage(f"The headers are not a JSON object of strings: {error}") from error
    kind = head.type
    if kind is None and head.nsb_types:
        # "Acme.OrderPlaced, Acme, Version=1.0.0.0; Acme.IEvent, Acme": most derived first, assembly after the comma.
        kind = head.nsb_types.split(";", 1)[0].split(",", 1)[0].strip()
    return kind or "", head.content_type or head.nsb_content_type or ""


def decode_headers(headers: str) -> dict[str, str]:
    """All headers as a dict; a null value reads as ''. Raises UndecodableMessage."""
    try:
        return {name: value or "" for name, value in _decode_headers(headers).items()}
    except _NOT_HEADERS as error:
        raise UndecodableMessage(f"The headers are not a JSON object of strings: {error}") from error


def well_known(headers: Mapping[str, str], name: str) -> str | None:
    """One of our header names, also where the message carries it under NServiceBus' name; None when it has neither."""
    value = headers.get(name)
    if value is None:
        value = headers.get(_TO_NSB.get(name, ""))
        if value is not None and name == TYPE:
            value = value.split(";", 1)[0].split(",", 1)[0].strip()
    return value or None


def time_sent(headers: Mapping[str, str]) -> datetime | None:
    """When an NServiceBus endpoint sent it (``yyyy-MM-dd HH:mm:ss:ffffff Z``); None when absent or unreadable."""
    text = headers.get(NSB_TIME_SENT)
    if not text:
        return None
    try:
        return datetime.strptime(text, _NSB_TIME).replace(tzinfo=UTC)
    except ValueError:
        return None


def to_nservicebus(headers: str, identity: uuid.UUID) -> str:
    """Stored headers under the names of NServiceBus' wire format, with its message id and time sent."""
    ours = decode_headers(headers)
    theirs = {_TO_NSB.get(name, name): value for name, value in ours.items()}
    theirs.setdefault(NSB_MESSAGE_ID, str(identity))
    theirs.setdefault(NSB_CORRELATION_ID, theirs[NSB_MESSAGE_ID])
    theirs.setdefault(NSB_TIME_SENT, datetime.now(UTC).strftime(_NSB_TIME))
    return encode_headers(theirs)


#: Where the failed attempts of a message are counted in a table that has no column for it.
ATTEMPTS = "queueapp.Attempts"


def counted_attempts(headers: str) -> int:
    """Failed attempts according to the headers; 0 when they do not say or do not parse."""
    try:
        return int(decode_headers(headers).get(ATTEMPTS, "0"))
    except (UndecodableMessage, ValueError):
        return 0


def count_attempts(headers: str, attempts: int) -> str:
    """Headers that say how many attempts failed; 0 takes the count out. Raises UndecodableMessage."""
    changed = decode_headers(headers)
    changed.pop(ATTEMPTS, None)
    return encode_headers(changed | ({ATTEMPTS: str(attempts)} if attempts else {}))


#: What says who a message is, what it belongs to and what happened to it; whole names, and beginnings of names.
_LOCKED = frozenset(
    {CORRELATION_ID, EDIT_OF, ATTEMPTS, NSB_MESSAGE_ID, NSB_CORRELATION_ID, "NServiceBus.ConversationId"}
    | {"NServiceBus.RelatedTo", "NServiceBus.MessageIntent", "NServiceBus.FailedQ", "NServiceBus.TimeOfFailure"}
)
_LOCKED_BEGINNINGS = (
    "NServiceBus.Saga", "NServiceBus.OriginatingSaga", "NServiceBus.Retries", "NServiceBus.ExceptionInfo.",
    "NServiceBus.DelayedRetries", "ServiceControl.EditOf",
)  # fmt: skip


def edited_headers(before: str, after: Mapping[str, str] | None, original: uuid.UUID, identity: uuid.UUID) -> str:
    """Stored headers of the edited copy ``identity`` of a message: ``after`` in place of ``before`` (None: the same),
    linked to the original. Raises InvalidMessage where one was changed, added or taken out that is locked: ids,
    correlation, conversation, saga, intent, retries and faults."""
    try:
        old = decode_headers(before)
    except UndecodableMessage as error:
        if after is None:
            raise InvalidMessage(f"{error} Give the edited message headers of its own.") from error
        old = {}
    new = dict(old if after is None else after)
    for name in sorted(old.keys() | new.keys()):
        locked = name in _LOCKED or name.startswith(_LOCKED_BEGINNINGS)
        if locked and old.get(name) != new.get(name):
            raise InvalidMessage(f"Header {name!r} is locked: an edited message keeps it as it was.")
    new[EDIT_OF] = str(original)
    if NSB_MESSAGE_ID in new:
        new[NSB_MESSAGE_ID] = str(identity)
    return encode_headers(new)


def edit_of(headers: str) -> uuid.UUID | None:
    """The message that this one was edited from; None when it was not, or the headers do not parse."""
    if EDIT_OF not in headers:
        return None
    try:
        return uuid.UUID(decode_headers(headers).get(EDIT_OF, ""))
    except (UndecodableMessage, ValueError):
        return None


_NSB_TIME = "%Y-%m-%d %H:%M:%S:%f Z"


# -- bodies -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _plain_headers(cls: Any) -> str:
    """Stored headers of a typed message without headers of its own: one text per class."""
    return encode_headers({TYPE: type_name(cls), CONTENT_TYPE: JSON})


#: Bodies that are stored as they are.
_RAW = (bytes, bytearray, memoryview)

_UNTYPED_HEADERS = encode_headers({CONTENT_TYPE: JSON})
_BYTES_HEADERS = encode_headers({CONTENT_TYPE: BYTES})


def is_typed(cls: type) -> bool:
    """Whether instances of this class are typed bodies: a msgspec.Struct or a dataclass."""
    return issubclass(cls, msgspec.Struct) or dataclasses.is_dataclass(cls)


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
        plain = _plain_headers(cast("Hashable", cls)) if is_typed(cls) else _UNTYPED_HEADERS
    if not headers:
        return plain, data
    merged = decode_headers(plain)
    merged.update(headers)
    return encode_headers(merged), data


def encode_alike(bodies: Sequence[Any], headers: Mapping[str, str] | None = None) -> tuple[str, list[bytes | None]]:
    """(stored headers, stored bodies) of bodies that are all of one class; at least one. Raises InvalidMessage."""
    stored, first = encode(bodies[0], headers)
    if first is None or isinstance(bodies[0], _RAW):
        return stored, [encode(body)[1] for body in bodies]
    try:
        return stored, list(map(_encoder.encode, bodies))
    except Exception:
        return stored, [encode(body)[1] for body in bodies]  # says which class, and why not


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
