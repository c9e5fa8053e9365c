"""Receiving: peeks and claims of one queue, the ranges that they cover and the tuples that they return."""

from __future__ import annotations

import abc
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any, NamedTuple

from .message_columns import COUNTS, LAST_TIME

MAX_SEQ = 2**63 - 1
#: The highest priority of 64 bits. (PostgreSQL parses the lowest one as the negative of a numeric and compares
#: numerics.)
MAX_PRIORITY = 2**63 - 1
#: The end of a lease that never expires: NULL means unleased, and Python cannot hold the infinity of a server.
FOREVER = LAST_TIME
#: A later end means "never": a lease that never expires, and a message that never expires although its queue sets a
#: time.
LAST_END = datetime(9000, 1, 1, tzinfo=UTC)
#: The duration that reaches FOREVER from now and from any time within the hundred years that are accepted, so that
#: every statement that adds a duration to the clock can express "never".
FOREVER_MS = int(timedelta(days=7050 * 365.2425) / timedelta(milliseconds=1))

#: The last order key of a queue with a 64-bit priority.
MAX_ORDER_KEY = 2**128 - 1
_BIAS, _SEQS = 2**63, 2**64


def order_key(priority: int, seq: int) -> int:
    """The position of a message in the claim order of a queue with a 64-bit priority, as one number: the highest
    priority first, then the lowest seq."""
    return (_BIAS - 1 - priority) * _SEQS + seq + _BIAS


def split_order_key(key: int) -> tuple[int, int]:
    """The two columns of an order key: ``~priority`` and seq."""
    rank, seq = divmod(key, _SEQS)
    return rank - _BIAS, seq - _BIAS


class SeqRange(NamedTuple):
    """The part of a queue that one claim covers: a recipient and priority level, and the seqs ``low`` to ``high``, both
    inclusive. On a queue with a 64-bit priority ``low`` and ``high`` are order keys, and there is one level.

    Queues without recipients or levels ignore those two. Each (recipient, priority) has its own low-water mark: with
    one mark over all priorities a new urgent message would lie behind it.
    """

    low: int = 0
    high: int = MAX_SEQ
    recipient: str = ""
    priority: int = 0


#: One claimed message, as a plain tuple: seq, id (16 bytes), headers, body, deliveries, cancels, failures; on a queue
#: with recipients or levels also recipient, priority, expires; on one with recipients all other message columns, for
#: the copies that are made of it. ``claim_by_delete`` with ``whole=True`` appends the rest of ``Row``, since the row is
#: gone. ``QueueTable.row_of`` makes a ``Row`` of it.
Claimed = tuple[Any, ...]
SEQ, ID, HEADERS, BODY, DELIVERIES, CANCELS, FAILURES, RECIPIENT, PRIORITY, EXPIRES = range(10)
ALWAYS = ("seq", "id", "headers", "body", *COUNTS)
OF_LEVEL = ("recipient", "priority", "expires")

#: Where keys take turns: of so many a claim takes messages, and at so many it looks, at most.
KEYS_AT_ONCE, KEYS_LOOKED_AT = 100, 2_000


class KeyTurns:
    """Where the claims of this process are among the keys that take turns. Any value is right, so threads may overwrite
    each other's."""

    def __init__(self) -> None:
        #: The key at which the last claim ended; and how many messages it still gets in this turn (``fair_weights``).
        self.last, self.units_left = "", 0
        #: When a key may be claimed again that the last claim held back because of its rate (``monotonic``); 0: none
        #: was held back.
        self.held_back_until = 0.0

    def ended(self, last: str | None, used: int, held_back_us: int | None, claimed: int, limit: int) -> None:
        """Record the end of a claim: its last key, the units of the keys that it found, and how long the next key is
        held back (microseconds below 0)."""
        self.last, self.units_left = last or "", max(0, used - limit) if claimed == limit else 0
        self.held_back_until = 0.0 if held_back_us is None else monotonic() - held_back_us / 1_000_000


#: A rescan window is at most this many rows of a level, available or not: about 10 ms where none of them is in memory.
WINDOW_ROWS = 30_000


class PeekResult(NamedTuple):
    """The result of a peek: available messages ahead of the low-water mark and in the rescanned range, at most
    ``limit`` each, the lowest seq among them (0: none), and where the rescan stopped after ``WINDOW_ROWS`` (0: it
    reached the range's end)."""

    ahead: int
    behind: int
    first: int
    reached: int = 0


class Claims(abc.ABC):
    """Peeks and claims. Peeks and reads take no lock that outlives the statement. Ranges are in claim order; those of
    one level are ascending and disjoint."""

    #: On a queue whose keys take turns (``Delivery.fair_by``); else None.
    turns: KeyTurns | None = None

    @abc.abstractmethod
    def peek(self, connection: Any, ahead: Sequence[SeqRange], behind: Sequence[SeqRange], limit: int) -> PeekResult:
        """Count available messages, at most ``limit`` in each group of ranges. A message that another open transaction
        has claimed is not available."""

    @abc.abstractmethod
    def read_heads(self, connection: Any, only: SeqRange, limit: int) -> list[tuple[int, str]]:
        """(seq, headers) of the first available messages of a range, ascending, without claiming them."""

    @abc.abstractmethod
    def read_heads_and_bodies(self, connection: Any, only: SeqRange, limit: int) -> list[tuple[int, str, bytes | None]]:
        """``read_heads`` with the bodies, for readers that select messages by content."""

    @abc.abstractmethod
    def claim_by_lease(
        self,
        connection: Any,
        ranges: Sequence[SeqRange],
        limit: int,
        token: uuid.UUID,
        owner: uuid.UUID,
        lease_ms: int,
    ) -> list[Claimed]:
        """Lease the lowest unlocked messages of the ranges and count the delivery. Returns them in claim order."""

    @abc.abstractmethod
    def claim_by_delete(
        self,
        connection: Any,
        ranges: Sequence[SeqRange],
        limit: int,
        whole: bool = False,
        owner: uuid.UUID | None = None,
    ) -> list[Claimed]:
        """Delete the lowest unlocked messages of the ranges and return them in claim order. ``owner``: the claiming
        subscriber, on a queue with barriers: it gets no message while a released barrier still waits for it (the same
        holds for ``claim_by_lease``)."""

    @abc.abstractmethod
    def lock_waiting(self, connection: Any, ids: Sequence[uuid.UUID]) -> list[tuple[int, uuid.UUID]]:
        """(seq, id) of those of these messages that wait, locked until the transaction ends so that none is claimed
        before: not leased (not even by an expired lease), not expired, not locked by another transaction."""

    def scan_order_keys(
        self, connection: Any, low: int, high: int, before: int, limit: int
    ) -> tuple[list[int], int, int]:
        """(order keys of available messages ahead of the key ``before``, last seq read, rows read) of the seqs ``low``
        to ``high``, at most ``limit`` rows, ascending. Only on a queue with a 64-bit priority."""
        raise NotImplementedError

    def pipelined_claim(self, connection: Any, ranges: Sequence[SeqRange]) -> Any:
        """A plan for ``commit_and_claim`` on these ranges: commit the open transaction and claim the next message in
        one round trip. None: not possible on this connection."""
        return None

    def commit_and_claim(self, connection: Any, ranges: Sequence[SeqRange], plan: Any) -> list[Claimed] | None:
        """Two statements: commit, then ``claim_by_delete`` of one message in a transaction of its own, which stays
        open. ``plan``: the result of ``pipelined_claim`` just now. None: the commit is done, and the claim failed. An
        exception: nothing was committed, or the connection is lost and the result of the commit is unknown."""
        raise NotImplementedError
