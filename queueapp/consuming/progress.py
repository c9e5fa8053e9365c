"""Checks the progress that a handler reports: it is bounded, since each heartbeat carries it."""

from __future__ import annotations

from typing import Any

from ..errors import InvalidMessage

#: Characters of a note.
LONGEST_NOTE = 200


def checked(done: Any, total: Any, note: Any) -> tuple[float, float | None, str]:
    """The values, checked. Raises InvalidMessage."""
    if not _is_number(done):
        raise InvalidMessage(f"done = {done!r} is not accepted: it must be a finite number from 0.")
    if not (total is None or _is_number(total)):
        raise InvalidMessage(f"total = {total!r} is not accepted: it must be a finite number from 0, or None.")
    if not isinstance(note, str) or len(note) > LONGEST_NOTE:
        raise InvalidMessage(
            f"note = {note!r} is not accepted: it must be a text of at most {LONGEST_NOTE} characters."
        )
    # A page that shows it is UTF-8, and a column cannot hold NUL.
    return done, total, note.encode(errors="replace").decode().replace("\0", "")


def _is_number(value: Any) -> bool:
    # Neither infinity nor NaN is between these.
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e18
