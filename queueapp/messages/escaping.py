"""Untrusted text, escaped for a page or a terminal.

Characters that are invisible, that turn the reading order of a line around, or that a terminal obeys, are shown by
their code point instead.
"""

from __future__ import annotations


def visible(text: str) -> str:
    """The text with every control, format, private or invisible character replaced by its code point.

    >>> visible("a\\u202eb")
    'a⟨U+202E⟩b'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else f"⟨U+{ord(c):04X}⟩" for c in text.replace("\r\n", "\n"))


def in_one_line(text: str, longest: int) -> str:
    """The text in one line; of one that is longer, the beginning and how much is missing.

    >>> in_one_line("boom\\n\\x1b[2J", 80)
    'boom ⟨U+001B⟩[2J'
    >>> in_one_line("a" * 100, 10)
    'aaaaaaaaaa… (90 characters more)'
    """
    whole = " ".join(visible(text[:longest]).split())
    return whole if len(text) <= longest else f"{whole}… ({len(text) - longest} characters more)"
