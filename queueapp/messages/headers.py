"""Headers, a JSON object of strings: the names that mean something, ours and those of the NServiceBus wire format for
the same facts, and reading and writing them.

What does not parse raises UndecodableMessage, and the caller moves the row to poison with its bytes untouched.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ..errors import InvalidMessage, UndecodableMessage, shortened
from .types import MAX_VERSION

JSON = "application/json"

BYTES = "application/octet-stream"

MSGPACK = "application/msgpack"

TYPE = "type"

CONTENT_TYPE = "content-type"

#: Of a type with versions: which one the body is; without this header it is the first.
TYPE_VERSION = "type-version"

#: Of a type with typed bases: their names, the nearest first, as NServiceBus encloses them (``A; B``).
BASE_TYPES = "base-types"

#: Of an encrypted body: the id of the key it opens with.
ENCRYPTION_KEY = "encryption-key"
#: Given to a send, and never stored: the subject whose key it is to be encrypted with.
ENCRYPT_FOR = "encrypt-for"

CORRELATION_ID = "correlation-id"

REPLY_TO = "reply-to"

#: Of a message whose sender gave its dedupe key: the digest of that key.
DEDUPE_KEY = "dedupe-key"

#: Of a message of a queue with ``Delivery.ordering``: messages with one key are handled in order.
ORDERING_KEY = "ordering-key"

#: In what a handler sent: the id of the message that it was handling.
RELATED_TO = "related-to"

CONVERSATION_ID = "conversation-id"

#: Of a message that was published: the topic it was published to.
TOPIC = "topic"

#: Of a message that a schedule sent: its name, and the time that the run was for (ISO 8601, UTC).
SCHEDULE = "schedule"
SCHEDULED_FOR = "scheduled-for"

#: Of a member of a group, and of the group's completion message: the group's id. Of the latter also how many members
#: were handled, and how many have failed.
GROUP = "group-id"
GROUP_DONE = "group-done"
GROUP_FAILED = "group-failed"

#: Of a message of a queue with ``Delivery.workflow``: what its ack brings about (``flow.workflow``).
WORKFLOW = "workflow"

#: In a message that was edited out of poison: the id of the one it replaces.
EDIT_OF = "edit-of"

#: In a message that was published because its queue gave it up: which queue, and for which reasons.
EXPIRED_FROM = "expired-from"
EXPIRED_FOR = "expired-for"

#: The same facts under the names of the NServiceBus wire format, read from and written to foreign tables.
NSB_MESSAGE_ID = "NServiceBus.MessageId"

NSB_CORRELATION_ID = "NServiceBus.CorrelationId"

NSB_REPLY_TO = "NServiceBus.ReplyToAddress"

NSB_RELATED_TO = "NServiceBus.RelatedTo"

NSB_CONVERSATION_ID = "NServiceBus.ConversationId"

#: What a message is for; "Reply" in an answer.
NSB_INTENT = "NServiceBus.MessageIntent"

NSB_TYPES = "NServiceBus.EnclosedMessageTypes"

NSB_CONTENT_TYPE = "NServiceBus.ContentType"

NSB_TIME_SENT = "NServiceBus.TimeSent"

TO_NSB = {
    TYPE: NSB_TYPES,
    CONTENT_TYPE: NSB_CONTENT_TYPE,
    CORRELATION_ID: NSB_CORRELATION_ID,
    REPLY_TO: NSB_REPLY_TO,
    RELATED_TO: NSB_RELATED_TO,
    CONVERSATION_ID: NSB_CONVERSATION_ID,
}

MAX_RECIPIENT = 200

MAX_ADDRESS = 255

#: Where the failed attempts of a message are counted in a table that has no column for it.
ATTEMPTS = "queueapp.Attempts"
#: There as well: one of them ended with the process that made it.
DIED = "queueapp.Died"

#: How far the attempts before have got.
CHECKPOINT = "queueapp.Checkpoint"

NSB_TIME = "%Y-%m-%d %H:%M:%S:%f Z"


_encoder = msgspec.json.Encoder()


def encode_headers(headers: Mapping[str, str]) -> str:
    """Headers as they are stored. Raises InvalidMessage for what is not a string, or holds a NUL."""
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidMessage(
                f"Header {shortened(name)} = {shortened(value)}: header names and values must be strings."
            )
        if "\0" in name or "\0" in value:
            raise InvalidMessage(f"Header {name!r} contains a NUL character, which a text column cannot hold.")
    try:
        return _encoder.encode(headers).decode()
    except UnicodeEncodeError as error:
        named = next(name for name, value in headers.items() if any(map(_is_half, (name, value))))
        raise InvalidMessage(
            f"Header {shortened(named)} = {shortened(headers[named])} is not valid Unicode: {error}."
        ) from error


def _is_half(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


class _Head(msgspec.Struct):
    """The headers that decide who handles a message; everything else is decoded on demand."""

    type: str | None = None
    content_type: str | None = msgspec.field(default=None, name=CONTENT_TYPE)
    nsb_types: str | None = msgspec.field(default=None, name=NSB_TYPES)
    nsb_content_type: str | None = msgspec.field(default=None, name=NSB_CONTENT_TYPE)
    version: str | None = msgspec.field(default=None, name=TYPE_VERSION)
    base_types: str | None = msgspec.field(default=None, name=BASE_TYPES)


_decode_head = msgspec.json.Decoder(_Head).decode

_decode_headers = msgspec.json.Decoder(dict[str, str | None]).decode

#: RecursionError: a hundred thousand opening brackets are enough for it.
_NOT_HEADERS = (msgspec.DecodeError, UnicodeEncodeError, RecursionError)


def read_head(headers: str) -> tuple[str, str]:
    """(type name, content type) of stored headers; '' where unknown. Raises UndecodableMessage."""
    # Messages of one type have the same headers, unless a sender adds some.
    return _head_of(headers) if len(headers) < _LONG else _head_of.__wrapped__(headers)


#: Headers longer than this are not worth remembering.
_LONG = 300


@lru_cache(maxsize=1024)
def _head_of(headers: str) -> tuple[str, str]:
    head = _head(headers)
    kind = head.type
    if kind is None and head.nsb_types:
        kind = _first_enclosed(head.nsb_types)
    return kind or "", head.content_type or head.nsb_content_type or ""


def _head(headers: str) -> _Head:
    try:
        return _decode_head(headers)
    except _NOT_HEADERS as error:
        raise UndecodableMessage(f"The headers are not a JSON object of strings: {error}") from error


class Kind(NamedTuple):
    """What a message says of its body."""

    #: The names of its type and of its bases, most derived first; ('',) where it says none.
    names: tuple[str, ...]
    #: Of the first name.
    version: int
    content_type: str


def read_kind(headers: str) -> Kind:
    """What stored headers say of the body. Raises UndecodableMessage."""
    return _kind_of(headers) if len(headers) < _LONG else _kind_of.__wrapped__(headers)


@lru_cache(maxsize=256)
def _plain_kind(type_name: str | None, content_type: str | None) -> Kind:
    """Of most messages: made once, where their headers are all different (0.9 µs of each)."""
    return Kind((type_name or "",), 1, content_type or "")


@lru_cache(maxsize=1024)
def _kind_of(headers: str) -> Kind:
    head = _head(headers)
    if head.version is None and head.base_types is None and head.nsb_types is None:
        return _plain_kind(head.type, head.content_type or head.nsb_content_type)
    # A message that came through an endpoint of NServiceBus may have both.
    said = [] if not head.type else [head.type]
    for text in (head.base_types, head.nsb_types):
        if text:
            said += _enclosed(text)
    version = 1
    if head.version is not None:
        if not head.version.isascii() or not head.version.isdigit() or not 1 <= int(head.version[:9]) <= MAX_VERSION:
            raise UndecodableMessage(
                f"Header {TYPE_VERSION!r} = {head.version[:40]!r} is no version: 1, 2, 3 and so on."
            )
        version = int(head.version)
    return Kind(tuple(dict.fromkeys(said)) or ("",), version, head.content_type or head.nsb_content_type or "")


def type_label(headers: str) -> str:
    """The type that headers name, with its version if that is not the first; '' where they name none, or do not
    parse."""
    try:
        kind = read_kind(headers)
    except UndecodableMessage:
        return ""
    return versioned_name(kind.names[0], kind.version)


def versioned_name(name: str, version: int) -> str:
    """A type in words."""
    return name if version == 1 else f"{name} (version {version})"


def _enclosed(text: str) -> list[str]:
    """The names of a list like "Acme.OrderPlaced, Acme, Version=1.0.0.0; Acme.IEvent, Acme": most derived first, the
    assembly after the comma. A generic type has commas of its own, in brackets."""
    names = []
    for part in text.split(";"):
        depth, end = 0, len(part)
        for place, letter in enumerate(part):
            depth += (letter == "[") - (letter == "]")
            if letter == "," and depth <= 0:
                end = place
                break
        if name := part[:end].strip():
            names.append(name)
    return names


def _first_enclosed(text: str) -> str:
    return next(iter(_enclosed(text)), "")


def decode_headers(headers: str) -> dict[str, str]:
    """All headers as a dict; a null value reads as ''. Raises UndecodableMessage."""
    try:
        return {name: value or "" for name, value in _decode_headers(headers).items()}
    except _NOT_HEADERS as error:
        raise UndecodableMessage(f"The headers are not a JSON object of strings: {error}") from error


def readable_headers(headers: str) -> dict[str, str]:
    """All headers as a dict; empty where they cannot be decoded."""
    try:
        return decode_headers(headers)
    except UndecodableMessage:
        return {}


def well_known(headers: Mapping[str, str], name: str) -> str | None:
    """One of our header names, also where the message carries it under NServiceBus' name; None when it has neither."""
    value = headers.get(name)
    if value is None:
        value = headers.get(TO_NSB.get(name, ""))
        if value is not None and name == TYPE:
            value = _first_enclosed(value)
    return value or None


def time_sent(headers: Mapping[str, str]) -> datetime | None:
    """When an NServiceBus endpoint sent it (``yyyy-MM-dd HH:mm:ss:ffffff Z``); None when absent or unreadable."""
    text = headers.get(NSB_TIME_SENT)
    if not text:
        return None
    try:
        return datetime.strptime(text, NSB_TIME).replace(tzinfo=UTC)
    except ValueError:
        return None


def counted_attempts(headers: str) -> int:
    """Failed attempts according to the headers; 0 when they do not say or do not parse."""
    if ATTEMPTS not in headers:
        return 0
    try:
        return max(0, int(decode_headers(headers).get(ATTEMPTS, "0")[:10]))
    except (UndecodableMessage, ValueError):
        return 0


def count_attempts(headers: str, attempts: int, *, died: bool = False) -> str:
    """Headers that say how many attempts failed, and whether the last one ``died`` with its process; 0 takes all of
    that out. Raises UndecodableMessage."""
    changed = decode_headers(headers)
    died = died or DIED in changed
    for name in (ATTEMPTS, DIED):
        changed.pop(name, None)
    if attempts:
        changed[ATTEMPTS] = str(attempts)
        if died:
            changed[DIED] = "1"
    # Not ``encode_headers``: what a sender of another system wrote is written back, a NUL as \u0000 included.
    return _encoder.encode(changed).decode()


def counts_a_death(headers: str) -> bool:
    """Whether an attempt died with its process, according to the headers."""
    return f'"{DIED}":' in headers  # as it is written above


#: What says who a message is, what it belongs to and what happened to it; whole names, and beginnings of names.
_LOCKED = frozenset(
    {
        CORRELATION_ID,
        EDIT_OF,
        ENCRYPTION_KEY,
        GROUP,
        WORKFLOW,
        ATTEMPTS,
        DIED,
        NSB_MESSAGE_ID,
        NSB_CORRELATION_ID,
        "NServiceBus.ConversationId",
    }
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


class WellKnown:
    """For what has ``headers``: what the well-known ones of them say, whichever wire format the message came in."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def headers(self) -> Mapping[str, str]: ...

    @property
    def message_type(self) -> str:
        """The name of its type; '' for a message without one."""
        return well_known(self.headers, TYPE) or ""

    @property
    def correlation_id(self) -> str | None:
        """What it answers to or belongs to, whichever wire format it came in."""
        return well_known(self.headers, CORRELATION_ID)

    @property
    def reply_to(self) -> str | None:
        """Where its sender wants answers."""
        return well_known(self.headers, REPLY_TO)

    @property
    def related_to(self) -> str | None:
        """The id of the message whose handler sent it."""
        return well_known(self.headers, RELATED_TO)

    @property
    def conversation_id(self) -> str | None:
        """What NServiceBus endpoints give to all that came of one message."""
        return well_known(self.headers, CONVERSATION_ID)

    @property
    def sent_at(self) -> datetime | None:
        """When its sender sent it, if it said so (NServiceBus endpoints do)."""
        return time_sent(self.headers)
