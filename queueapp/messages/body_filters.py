"""What is done to an encoded body before it is stored, and undone before it is read: made smaller, or encrypted.

The content type says it, by a suffix for each step in the order in which they were done: ``application/json+zstd`` is
JSON that was compressed. So a queue may hold all kinds side by side, and reading needs no option: ``Delivery.encoding``
says only how its messages are sent. Nothing at all stays nothing, whatever is done to bodies.

No database here: ``queueapp.encryption`` registers what needs one.
"""

from __future__ import annotations

import base64
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ..errors import QueueError, UndecodableMessage
from .headers import CONTENT_TYPE, ENCRYPT_FOR, ENCRYPTION_KEY, decode_headers, encode_headers

#: (body, id of its message) -> body
Step = Callable[[bytes, uuid.UUID], bytes]


class Wrapping(Protocol):
    """One thing that can be done to a body."""

    #: In ``Delivery.encoding``.
    name: str
    #: Of the content type.
    suffix: str
    #: Whether it takes a key to read it.
    secret: bool

    def sealer(self, headers: dict[str, str], using: str) -> Step:
        """Does it to bodies of messages that have these headers, to which it adds what reading them needs."""

    def opener(self, headers: Mapping[str, str], using: str) -> Step:
        """Undoes it. Both raise UndecodableMessage for bytes that are none of it."""


def _no_limit_yet() -> int:
    return 64 * 1024 * 1024


#: Most bytes that a body may become: a small one may be made to fill any memory. Set to the project's setting
#: (``apps``).
largest: Callable[[], int] = _no_limit_yet


class Zlib:
    """The format of RFC 1950, which Python and everybody else can read."""

    name, suffix, secret = "zlib", "+zlib", False

    def sealer(self, headers: dict[str, str], using: str) -> Step:
        return lambda body, _: zlib.compress(body)

    def opener(self, headers: Mapping[str, str], using: str) -> Step:
        return self._open

    def _open(self, body: bytes, _: uuid.UUID) -> bytes:
        max_bytes, reading = largest(), zlib.decompressobj()
        try:
            found = reading.decompress(body, max_bytes)
        except zlib.error as error:
            raise UndecodableMessage(f"The body is not compressed by zlib: {error}.") from error
        if not reading.eof and (reading.unconsumed_tail or len(found) >= max_bytes):
            raise _too_large(max_bytes)
        if not reading.eof or reading.unused_data:
            raise UndecodableMessage("The body is not compressed by zlib: it is cut off, or something follows it.")
        return found


class Zstd:
    """Zstandard (RFC 8878): of the standard library since Python 3.14, before that of the extra ``queueapp[zstd]``."""

    name, suffix, secret = "zstd", "+zstd", False

    def sealer(self, headers: dict[str, str], using: str) -> Step:
        compress = zstd()[0]
        return lambda body, _: compress(body)

    def opener(self, headers: Mapping[str, str], using: str) -> Step:
        decompress = zstd()[1]
        return lambda body, _: decompress(body, largest())


def _too_large(max_bytes: int) -> UndecodableMessage:
    return UndecodableMessage(
        f"The body is larger than {max_bytes} bytes when it is not compressed (QUEUEAPP.MAX_DECOMPRESSED)."
    )


def zstd() -> tuple[Callable[[bytes], bytes], Callable[[bytes, int], bytes]]:
    """What compresses and decompresses, in whichever library there is. Raises QueueError without one."""
    try:
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        try:
            import zstandard
        except ImportError as error:
            raise QueueError("Bodies compressed by Zstandard need the extra: pip install 'queueapp[zstd]'.") from error

        def compress(body: bytes) -> bytes:
            return zstandard.ZstdCompressor().compress(body)

        def decompress(body: bytes, max_bytes: int) -> bytes:
            try:
                # A frame that says how large it is would be given that much, whatever the limit.
                if 0 <= zstandard.frame_content_size(body) <= max_bytes:
                    return zstandard.ZstdDecompressor().decompress(body, allow_extra_data=False)
                if zstandard.frame_content_size(body) > max_bytes:
                    raise _too_large(max_bytes)
                found = bytearray()
                with zstandard.ZstdDecompressor().stream_reader(body, read_across_frames=False) as reader:
                    while piece := reader.read(min(max_bytes + 1 - len(found), 1 << 20)):
                        found += piece
                        if len(found) > max_bytes:
                            raise _too_large(max_bytes)
                return bytes(found)
            except zstandard.ZstdError as error:
                raise UndecodableMessage(f"The body is not compressed by Zstandard: {error}.") from error

        return compress, decompress

    def decompress_own(body: bytes, max_bytes: int) -> bytes:
        reading = zstd.ZstdDecompressor()
        try:
            found: bytes = reading.decompress(body, max_bytes + 1)
        except (zstd.ZstdError, EOFError) as error:
            raise UndecodableMessage(f"The body is not compressed by Zstandard: {error}.") from error
        if len(found) > max_bytes:
            raise _too_large(max_bytes)
        if not reading.eof or reading.unused_data:
            raise UndecodableMessage("The body is not compressed by Zstandard: it is cut off, or something follows it.")
        return found

    return zstd.compress, decompress_own


#: All that there are, by name; what needs keys is added at start.
NAMES = ("zlib", "zstd", "encrypted")
_by_name: dict[str, Wrapping] = {"zlib": Zlib(), "zstd": Zstd()}
#: Of the content types of all, also of those that are not registered here.
SUFFIXES = {"+zlib": "zlib", "+zstd": "zstd", "+aes256gcm": "encrypted"}
#: A body is not opened more often: there are bytes that zlib makes the same bytes of.
MOST_STEPS = 16
#: How a sealed text begins (no JSON does), and the content type that its seal covers: it cannot be exchanged with the
#: body.
_SEALED, _TEXT = "aes256gcm ", "text"


def register_wrapping(wrapping: Wrapping) -> None:
    """Let messages be wrapped and opened by this one."""
    _by_name[wrapping.name] = wrapping


def _of(name: str) -> Wrapping:
    try:
        return _by_name[name]
    except KeyError:
        raise QueueError(f"Bodies that are {name} need the app queueapp in INSTALLED_APPS.") from None


def is_wrapped(content_type: str) -> bool:
    """Whether bodies of this content type are to be opened before they can be decoded."""
    return "+" in content_type and bool(_taken_apart(content_type)[1])


def is_secret(content_type: str) -> bool:
    """Whether it takes a key to read bodies of this content type."""
    return "encrypted" in _taken_apart(content_type)[1]


def innermost(content_type: str) -> str:
    """The content type of what was wrapped."""
    return _taken_apart(content_type)[0]


def _taken_apart(content_type: str) -> tuple[str, list[str]]:
    """(content type of what was wrapped, names of what was done to it in order); looks no deeper than ``opened`` goes,
    since it is a text of unknown origin and of any length."""
    parts = content_type.rsplit("+", MOST_STEPS + 1)
    plain, first = len(parts), 1 if parts[0] else 2
    while plain > first and f"+{parts[plain - 1]}" in SUFFIXES:
        plain -= 1
    return "+".join(parts[:plain]), [SUFFIXES[f"+{part}"] for part in parts[plain:]]


def sealing(
    encoding: Sequence[str], headers: str, using: str
) -> tuple[str, Callable[[bytes | None, uuid.UUID], bytes | None]]:
    """(stored headers, what is done to bodies) of messages that a queue with this encoding sends with these headers.
    What comes wrapped stays as it is. Raises InvalidMessage, KeyMissing and InvalidOption (of the keyring)."""
    decoded = decode_headers(headers)
    content_type = decoded.get(CONTENT_TYPE, "")
    if is_wrapped(content_type) and (is_secret(content_type) or "encrypted" not in encoding):
        return headers, lambda body, _: body
    wrapped, content_type = content_type, innermost(content_type)
    steps: list[Step] = []
    for name in encoding:
        wrapping = _of(name)
        steps.append(wrapping.sealer(decoded, using))
        content_type += wrapping.suffix
    decoded[CONTENT_TYPE] = content_type
    decoded.pop(ENCRYPT_FOR, None)

    def seal(body: bytes | None, identity: uuid.UUID) -> bytes | None:
        if body is not None and wrapped != innermost(wrapped):
            body, _ = opened(body, wrapped, decoded, identity, using)
        if body is not None:
            for step in steps:
                body = step(body, identity)
        return body

    return encode_headers(decoded), seal


def opened(
    body: bytes | None, content_type: str, headers: Mapping[str, str], identity: uuid.UUID, using: str
) -> tuple[bytes | None, str]:
    """(body, its content type) as it was before it was wrapped. Raises UndecodableMessage."""
    plain, names = _taken_apart(content_type)
    if len(names) > MOST_STEPS:
        raise UndecodableMessage(f"The body is wrapped more than {MOST_STEPS} times, says its content type.")
    if body is not None:
        for name in reversed(names):
            body = _of(name).opener(headers, using)(body, identity)
    return body, plain


def decompressed(body: bytes | None, content_type: str) -> tuple[bytes | None, str]:
    """``opened``, where no key is needed. Raises UndecodableMessage for what is encrypted."""
    if is_secret(content_type):
        raise UndecodableMessage("The body is encrypted: it cannot be read here.")
    return opened(body, content_type, {}, uuid.UUID(int=0), "")


def seal_text(text: str, headers: Mapping[str, str], identity: uuid.UUID, using: str) -> str | None:
    """A text that travels with an encrypted body, sealed as the body is, with the name of its key; None: the body is
    not encrypted. Raises KeyMissing."""
    if not is_secret(headers.get(CONTENT_TYPE, "")):
        return None
    # A key of its own: with the current key of the keyring the header of the body must not change.
    kept_headers = {CONTENT_TYPE: _TEXT} | (
        {ENCRYPTION_KEY: headers[ENCRYPTION_KEY]} if ENCRYPTION_KEY in headers else {}
    )
    sealed = _of("encrypted").sealer(kept_headers, using)(text.encode(), identity)
    return f"{_SEALED}{kept_headers[ENCRYPTION_KEY]} {base64.b64encode(sealed).decode()}"


def open_text(text: str, identity: uuid.UUID, using: str) -> str:
    """The inverse of ``seal_text``; a text that is not sealed is returned as it is. Raises UndecodableMessage,
    KeyMissing."""
    if not text.startswith(_SEALED):
        return text
    name, _, sealed = text.removeprefix(_SEALED).partition(" ")
    try:
        data = base64.b64decode(sealed, validate=True)
    except ValueError as error:
        raise UndecodableMessage("A sealed text is not base64.") from error
    opener = _of("encrypted").opener({CONTENT_TYPE: _TEXT, ENCRYPTION_KEY: name}, using)
    return opener(data, identity).decode()


def wrapped_anew(
    headers: str, body: bytes | None, plain: bytes | None, before: uuid.UUID, after: uuid.UUID, using: str
) -> tuple[str, bytes | None]:
    """(stored headers, stored body) of a copy with another id, wrapped as its original is. ``plain``: what it holds, if
    not the same. Raises UndecodableMessage where the original cannot be read and would have to be."""
    decoded = decode_headers(headers)
    content_type = decoded.get(CONTENT_TYPE, "")
    if not is_wrapped(content_type) or (plain is None and not is_secret(content_type)):
        return headers, body if plain is None else plain
    if plain is None:
        plain, _ = opened(body, content_type, decoded, before, using)
    steps = [_of(name).sealer(decoded, using) for name in _taken_apart(content_type)[1]]
    if plain is not None:
        for step in steps:
            plain = step(plain, after)
    return encode_headers(decoded), plain
