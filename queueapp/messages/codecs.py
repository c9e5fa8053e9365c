"""How plain values become bytes and back: one codec per message type of a queue (``Delivery.message_type``).

``json`` and ``msgpack`` are here, and ``binary``, which takes bytes and knows nothing of them. A project adds its own
with ``register_codec``. Consumers find the codec by the content type that a message names; a message that names none,
of a foreign producer, is of its queue's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from ..errors import InvalidOption
from .header_names import BYTES, JSON, MSGPACK


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
