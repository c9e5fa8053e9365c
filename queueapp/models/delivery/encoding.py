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
        and "encrypted" not in value[:-1]  # what is encrypted cannot be made smaller
    )


OPTIONS: tuple[Option, ...] = (
    Option(
        "encoding",
        tuple,
        (),
        'What is done to bodies when they are sent, in this order: "zlib" or "zstd" makes them smaller (extra '
        '`queueapp[zstd]` before Python 3.14), "encrypted" hides them (extra `queueapp[encryption]`). What is in the queue is '
        "read whatever this says.",
        accept=_is_encoding,
        words='a tuple of "zlib" or "zstd", then "encrypted", or of one of them',
    ),
)


class EncodingOptions:
    """The types of these options."""

    encoding: tuple[str, ...]
