"""A stored message, whole and by name. What a claim returns per message is shorter, and by place: see ``base.Claimed``."""

from __future__ import annotations

import uuid
from typing import Any

from .carried import BY_NAME, CARRIED, COUNTS, carried_by, tuple_class

_row: Any = tuple_class(
    ("seq", "id", "headers", "body", *COUNTS, *BY_NAME), (0, 0, None, *(one.default for one in CARRIED))
)


class Row(_row):  # type: ignore[misc]
    """A message as it is stored, with all that has to survive a move to another table: the counts, then what ``carried``
    declares, in that order."""

    __slots__ = ()

    seq: int
    id: uuid.UUID
    headers: str
    body: bytes | None
    deliveries: int
    cancels: int
    failures: str | None


#: What a claim of whole messages appends.
REST = tuple(BY_NAME)


def row_from(stored: Any, **changes: Any) -> Row:
    """A message of the delayed or poison table, or of a third party's store, as a row to be put into a queue."""
    counts = {name: getattr(stored, name) for name in COUNTS}
    return Row(**{"seq": 0, "id": stored.message_id, "body": None} | counts | carried_by(stored) | changes)
