"""Of what a claim has taken out of its table: which messages are not for this process. They are looked for before any handler
runs, since there is no giving back one message of several that were deleted."""

from __future__ import annotations

from collections.abc import Sequence

from queueapp.errors import UndecodableMessage
from queueapp.sql.claims import BODY, HEADERS, SEQ, Claimed

from .base import Receiver


def strangers_of(task: Receiver, rows: Sequence[Claimed]) -> list[int]:
    """The seqs of those that no consumer here takes, or that the filter of this subscriber does not let pass."""
    if not task.queue.delivery.recipients:
        # Most have the headers of those before.
        known = task._route.headers if task._route is not None and task.state.filter is None else None
        rows = [row for row in rows if row[HEADERS] != known]
    return [row[SEQ] for row in rows if _is_stranger(task, row)]


def _is_stranger(task: Receiver, claimed: Claimed) -> bool:
    passing = task.state.filter
    if passing is not None and not passing.passes(claimed[HEADERS], claimed[BODY]):
        return True
    try:
        return task.handlers.find(claimed)[0] is None
    except UndecodableMessage:
        return False
