"""Untrusted text on a page: ids, headers, bodies and exception texts of messages.

Every text from a message reaches a page through this module or Django's escaping, and within a bound. Escaping stops
markup; it does not stop characters that are invisible, that reverse the reading order of a line, or that a terminal
executes after copy and paste. Those are shown by their code point.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe

from ...messages.escaping import visible as visible

#: Most bytes of a body, and most characters of any other text, that a page shows. The rest is in the download.
SHOWN = 64 * 1024
#: Bytes of a binary body shown as hex: 256 lines.
SHOWN_AS_HEX = 4096
#: Most headers shown, and most characters of each.
SHOWN_HEADERS = 200
SHOWN_HEADER = 4096
#: Deeper JSON is not indented further: ``[[[[...`` would turn one kilobyte into megabytes of blanks.
_DEEPEST_INDENT = 40
_AFTER_DOT = re.compile(r"(?<=\w\.)(?=[^\W\d])")


def inline(text: Any, longest: int = 80) -> SafeString:
    """One line of untrusted text: escaped, bounded, and unable to change the direction of the text around it."""
    whole = " ".join(visible(str(text)[: 4 * longest]).split())
    short = whole if len(whole) <= longest else whole[: longest - 1] + "…"
    return format_html('<bdi class="queueapp-untrusted" title="{}">{}</bdi>', whole, breakable(short))


def breakable(name: str) -> SafeString:
    """A name, escaped, with line breaks allowed after dots only: a narrow column would break it anywhere."""
    return format_html_join(mark_safe("<wbr>"), "{}", ((part,) for part in _AFTER_DOT.split(name)))


# -- bodies --------------------------------------------------------------------------------------------------------


class Shown(NamedTuple):
    """A body, or other long text, for a page: its kind, the text, and whether that is all of it."""

    kind: str
    text: str
    complete: bool


def body(start: bytes | None, size: int | None) -> Shown:
    """A body for a page, given its first ``SHOWN`` bytes and its whole size: JSON indented, else text, else hex."""
    if start is None or size is None:
        return Shown("none", "", True)
    complete = size <= len(start)
    try:
        # A truncated body may end within a character.
        text = codecs.getincrementaldecoder("utf-8")().decode(start, final=complete)
    except UnicodeDecodeError:
        return _as_hex(start, size)
    if complete and _is_json(start):
        pretty = _indented(text)
        return Shown("JSON", visible(pretty[:SHOWN]), len(pretty) <= SHOWN)
    if sum(not (c.isprintable() or c.isspace()) for c in text) > len(text) // 3:
        return _as_hex(start, size)
    return Shown("text", visible(text), complete)


def text(value: str | None) -> Shown:
    """Long text for a page, bounded."""
    value = value or ""
    return Shown("text", visible(value[:SHOWN]), len(value) <= SHOWN)


def block(shown: Shown) -> SafeString:
    """It as a block of text, with a note where that is not all."""
    cut = "" if shown.complete else "\n(truncated)"
    return format_html('<pre class="queueapp-text">{}{}</pre>', shown.text, cut)


def _is_json(data: bytes) -> bool:
    try:
        # Raw checks the syntax and builds no objects, for any nesting.
        msgspec.json.decode(data, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return data.lstrip()[:1] in (b"{", b"[")


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)


def _indented(json: str) -> str:
    # By tokens, not by decoding: 1.10, 12345678901234567890123 and a key that occurs twice are shown as they were sent.
    pieces: list[str] = []
    length = 0
    for piece in _indent(json):
        pieces.append(piece)
        length += len(piece)
        if length > SHOWN:
            break
    return "".join(pieces)


def _indent(json: str) -> Iterator[str]:
    depth, before = 0, ""
    for match in _TOKEN.finditer(json):
        piece = match[0]
        if piece in "}]":
            depth -= 1
            if before not in ("{", "["):
                yield _line(depth)
        elif before in ("{", "[", ","):
            yield _line(depth)
        yield piece
        if piece in "{[":
            depth += 1
        elif piece == ":":
            yield " "
        before = piece


def _line(depth: int) -> str:
    return "\n" + "  " * min(depth, _DEEPEST_INDENT)


def _as_hex(data: bytes, size: int) -> Shown:
    lines = []
    for at in range(0, min(len(data), SHOWN_AS_HEX), 16):
        row = data[at : at + 16]
        readable = "".join(chr(b) if 32 <= b < 127 else "." for b in row)
        lines.append(f"{at:08x}  {row[:8].hex(' '):<23}  {row[8:].hex(' '):<23}  |{readable}|")
    return Shown("bytes", "\n".join(lines), size <= SHOWN_AS_HEX)


# -- headers -------------------------------------------------------------------------------------------------------


class Headers(NamedTuple):
    """Headers for a page. ``raw`` instead of ``rows``: they do not parse; ``more``: how many are left out."""

    rows: list[tuple[str, str]]
    raw: str
    more: int


def headers(stored: str | None) -> Headers:
    """The first ``SHOWN`` characters of stored headers as rows. Accepts any text."""
    stored = stored or ""
    try:
        decoded = msgspec.json.decode(stored)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        decoded = None
    if not isinstance(decoded, dict):
        return Headers([], visible(stored[:SHOWN]), 0)
    rows = [
        (visible(name[:SHOWN_HEADER]), visible(_header_value(value)[:SHOWN_HEADER]))
        for name, value in sorted(decoded.items())[:SHOWN_HEADERS]
    ]
    return Headers(rows, "", len(decoded) - len(rows))


def _header_value(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
