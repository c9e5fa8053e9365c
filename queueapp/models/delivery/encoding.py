"""Options of ``class Delivery``: what is done to bodies before they are stored."""

from __future__ import annotations

from typing import Any

from ...messages.body_filters import NAMES
from ...options import Option

_COMPRESSIONS = {"zlib", "zstd"}


def _is_encoding(value: Any) -> bool:
    return (
        all(one in NAMES for one in value)
        and sum(one in _COMPRESSIONS for one in value) <= 1
        and value.count("encrypted") <= 1
        and "encrypted" not in value[:-1]  # encrypted bytes do not compress
    )


OPTIONS: tuple[Option, ...] = (
    Option(
        "encoding",
        tuple,
        (),
        'How bodies are encoded when they are sent, in this order: "zlib" or "zstd" compresses them (extra '
        '`queueapp[zstd]` before Python 3.14), "encrypted" encrypts them (extra `queueapp[encryption]`). Waiting '
        "messages of "
        "another encoding are still read.",
        accept=_is_encoding,
        words='a tuple of "zlib" or "zstd", then "encrypted", or of one of them',
    ),
)


class EncodingOptions:
    """The types of these options."""

    encoding: tuple[str, ...]
