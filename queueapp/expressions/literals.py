"""Literals: numbers, quoted strings with their escapes, raw strings. Raises ValueError with the reason."""

from __future__ import annotations

import re
from math import isinf

from .coercion import Number, fitting

_ESCAPE = re.compile(rb"\\(x[0-9A-Fa-f]{1,2}|[0-7]{1,3}|.)", re.DOTALL)

_LETTERS = {b"a": b"\a", b"b": b"\b", b"t": b"\t", b"n": b"\n", b"f": b"\f", b"r": b"\r"}


def number(text: str) -> Number:
    """An unsigned number; of more than 64 bits it is a double."""
    value = fitting(int(text)) if text.isdecimal() else float(text)
    if isinf(value):
        raise ValueError("this number is too large for a double")
    return value


def string(token: str) -> str | None:
    """What a literal with its quotes stands for; '' is NULL."""
    if token[0] in "rR":
        return token[2:-1] or None
    # By bytes, as \xHH and \OOO name them.
    data = _ESCAPE.sub(_unescaped, token[1:-1].encode())
    try:
        return data.decode() or None
    except UnicodeDecodeError:
        raise ValueError("the escapes of this string are not UTF-8") from None


def _unescaped(escape: re.Match[bytes]) -> bytes:
    what = escape[1]
    if what[:1] == b"x" and len(what) > 1:
        return bytes([int(what[1:], 16)])
    if what.isdigit() and what[:1] < b"8":
        return bytes([int(what, 8) & 0xFF])
    return _LETTERS.get(what, what)
