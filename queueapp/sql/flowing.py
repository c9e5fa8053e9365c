"""The verbs of queues that limit what is out, or share it out among their subscribers.

``max_backlog`` is never exceeded because nobody takes while somebody else counts: a claim holds the queue's lock, which is
one of the transaction, for as long as its own statement runs. Acks need no lock. What is out are the leases that have not
lapsed; a lapsed one is not revived on such a queue, since its place may have been given away. What was *shared out* to a
subscriber and not taken up by it has that subscriber's id as its token.

Counted is by *records*: each claim writes down which messages it took, in its own transaction. What is out is among those, and
whether it still is says its row, found by its key: no index on a column that each lease and ack changes, and nothing to repair
after a crash. ``Seen`` is what a process remembers: up to which record it knows them, and what was or may be out of these. Who
claims reads the records that came since, and looks at the rows only when there would be no room if all of that were out. Dead
records are walked over once, and dead messages sought by their key: no older snapshot makes it slower.

Where messages are shared out they are counted by an index on what is leased, which their subscribers need anyway.
"""

from __future__ import annotations

import abc
import hashlib
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from .claimed import Claimed, Range


class Seen(NamedTuple):
    """The records up to ``upto`` are known; nothing but ``out`` is out of what they name, and ``pending`` are those that said
    nothing yet. As the database writes it."""

    upto: int
    pending: str
    out: str


class Within(NamedTuple):
    """What a claim within a limit got, whether as many messages are out now as may be, and what the next one may remember when the
    transaction is committed."""

    rows: list[Claimed]
    at_limit: bool
    seen: Seen | None = None


class Leased(NamedTuple):
    """What one subscriber holds under one token."""

    owner: uuid.UUID
    token: uuid.UUID
    messages: int


def lock_number(db_table: str) -> int:
    """The number of a table's lock among those of its database: 64 bits, of which the high half is ours by its beginning."""
    return int.from_bytes(hashlib.blake2b(f"queueapp:{db_table}".encode(), digest_size=8).digest(), "big", signed=True)


class Flowing(abc.ABC):
    """Part of ``QueueSql``, for tables with leases."""

    @abc.abstractmethod
    def claim_within(
        self,
        connection: Any,
        ranges: Sequence[Range],
        limit: int,
        token: uuid.UUID,
        owner: uuid.UUID,
        lease_ms: int | None,
        most: int,
        seen: Seen | None = None,
    ) -> Within:
        """``claim_by_lease`` of so many that no more than ``most`` are out. Several statements in one transaction: the caller's,
        in which the queue stays locked until its end, or one of its own, in one trip where the database allows. ``lease_ms``
        None: the lease never lapses. ``seen`` None: nothing is known of the records; the first of all writes down what is
        leased, by a scan of the table."""

    @abc.abstractmethod
    def drop_records(self, connection: Any, after: int) -> int:
        """Delete records above this one of whose messages none is leased, but not the queue's first; returns above which to look
        the next time. Safe at any time and beside anybody: two statements, outside of a transaction."""

    @abc.abstractmethod
    def lock_flow(self, connection: Any) -> None:
        """Wait until nobody else takes messages of this queue by count; until the end of the transaction nobody does."""

    @abc.abstractmethod
    def take_permits(self, connection: Any, most: int, wanted: int, *, more: bool = False) -> int:
        """TRANSACTIONAL: at most ``wanted`` of the queue's ``most`` places, for the open transaction; how many it got. They are
        free again when it ends, however it ends. Waits for nobody. ``more``: the transaction may have some already."""

    @abc.abstractmethod
    def leases(self, connection: Any) -> list[Leased]:
        """What is out now, by subscriber and token; only on a table that counts. What was leased before its counting began is
        not in it."""

    @abc.abstractmethod
    def lock_heads(self, connection: Any, ranges: Sequence[Range], limit: int, *, bodies: bool) -> list[Claimed]:
        """The lowest unlocked messages of the ranges, in claim order, locked until the transaction ends; as a claim returns
        them, but headers and bodies only where they were asked for."""

    @abc.abstractmethod
    def share_out(self, connection: Any, seqs: Sequence[int], owners: Sequence[uuid.UUID], lease_ms: int) -> int:
        """Give each of these messages, which the caller has locked, to the subscriber in the same place. Not counted as a
        delivery before it is taken up."""

    @abc.abstractmethod
    def count_shared_out(self, connection: Any, owner: uuid.UUID) -> int:
        """How many messages were shared out to a subscriber that has not taken them up."""

    @abc.abstractmethod
    def take_up(
        self, connection: Any, owner: uuid.UUID, limit: int, token: uuid.UUID, lease_ms: int | None
    ) -> list[Claimed]:
        """Lease the lowest of what was shared out to a subscriber, and count the delivery. In claim order."""

    @abc.abstractmethod
    def delete_sent(self, connection: Any, owner: uuid.UUID, limit: int) -> int:
        """AT_MOST_ONCE: delete what was sent to a (dead) subscriber. What was shared out to it and not taken up stays, for
        ``release_owner``."""
