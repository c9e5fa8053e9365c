"""Where a claim looks and what it returns; and what a look returns."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from .carried import COUNTS, LAST_TIME

MAX_SEQ = 2**63 - 1
#: The highest of 64 bits. (PostgreSQL reads the lowest one as the negative of a numeric, and would compare as that.)
MAX_PRIORITY = 2**63 - 1
#: When a lease ends that never lapses: NULL means free, and Python cannot hold an infinity that a server knows.
FOREVER = LAST_TIME
#: What ends after this is for ever: a lease that never lapses, and a message that never expires though its queue says so.
LAST_END = datetime(9000, 1, 1, tzinfo=UTC)
#: The duration that leads there, from now and from any time within the hundred years that are accepted: so every statement
#: that adds a duration to the clock can say "for ever", and none has to be written twice.
FOREVER_MS = int(timedelta(days=7050 * 365.2425) / timedelta(milliseconds=1))


#: Of a queue with a priority of 64 bits: where its order ends.
MAX_PLACE = 2**128 - 1
_BIAS, _SEQS = 2**63, 2**64


def place_of(priority: int, seq: int) -> int:
    """Where a message stands in the order of a queue with a priority of 64 bits, as one number: the highest priority first, and
    of one priority the lowest seq."""
    return (_BIAS - 1 - priority) * _SEQS + seq + _BIAS


def rank_and_seq(place: int) -> tuple[int, int]:
    """The two columns of a place: ``~priority`` and seq."""
    rank, seq = divmod(place, _SEQS)
    return rank - _BIAS, seq - _BIAS


class Range(NamedTuple):
    """Where one claim may look: a recipient and priority level, and the seqs ``low`` to ``high``, both inclusive. On a queue with
    a priority of 64 bits ``low`` and ``high`` are places (``place_of``), and there is one level.

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
