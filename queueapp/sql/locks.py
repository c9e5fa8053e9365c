"""The names of the locks of a queue with barriers, which no row can stand for: who sends, and who releases."""

from __future__ import annotations

from zlib import crc32


def lock_numbers(purpose: str, db_table: str) -> tuple[int, int]:
    """Two signed numbers of 32 bits. Two tables with the same ones wait for each other and do nothing wrong."""
    return _signed(f"queueapp {purpose}"), _signed(db_table)


def lock_name(purpose: str, db_table: str) -> str:
    """The same as a name of at most 255 characters."""
    return f"queueapp {purpose} {db_table[:150]} {crc32(db_table.encode()):08x}"


def _signed(text: str) -> int:
    number = crc32(text.encode())
    return number - 2**32 if number >= 2**31 else number
