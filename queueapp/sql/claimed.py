"""Where a claim looks and what it returns; and what a look returns."""

from __future__ import annotations

from typing import Any, NamedTuple

from .carried import COUNTS

MAX_SEQ = 2**63 - 1


class Range(NamedTuple):
    """Where one claim may look: a recipient and priority level, and the seqs ``low`` to ``high``, both inclusive.

    On a queue without recipients or levels those two are ignored. There is one floor per (recipient, priority): a
    single floor over priorities would leave a new urgent message behind it.
    """

    low: int = 0
    high: int = MAX_SEQ
    recipient: str = ""
    priority: int = 0


#: What a claim returns per message, as a plain tuple: seq, id (16 bytes), headers, body, deliveries, cancels, failures; on
#: a queue with recipients or levels also recipient, priority, expires; on one with recipients all else that is carried, for
#: the copies that are made of it. ``claim_by_delete`` with ``whole=True`` appends the rest of ``Row`` (what is carried): the
#: row is gone, so it has to be carried. ``QueueTable.row_of`` makes a ``Row`` of it.
Claimed = tuple[Any, ...]
SEQ, ID, HEADERS, BODY, DELIVERIES, CANCELS, FAILURES, RECIPIENT, PRIORITY, EXPIRES = range(10)
ALWAYS = ("seq", "id", "headers", "body", *COUNTS)
OF_LEVEL = ("recipient", "priority", "expires")


#: A rescan window is at most this many rows of a level, free or not: about 10 ms where none of them is in memory.
WINDOW_ROWS = 30_000


class Peek(NamedTuple):
    """What a peek saw: available messages ahead of the floor and in the rescanned range, at most ``limit`` each, the
    lowest seq among them (0: none), and where in the rescanned range it ended after ``WINDOW_ROWS`` (0: at its end)."""

    ahead: int
    behind: int
    first: int
    reached: int = 0
