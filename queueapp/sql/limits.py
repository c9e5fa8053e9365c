"""Concurrency limits: queues that limit how many messages are in flight, or share messages out among their subscribers.

``max_backlog`` is never exceeded: a claim holds the queue's lock, which is one of the transaction, while its own
statement runs, so no claim runs while another one counts. Acks need no lock. In flight are the leases that have not
expired; an expired lease is not revived on such a queue, since its slot may have been assigned again. A message that
was *shared out* to a subscriber and not started by it has that subscriber's id as its token.

In-flight messages are counted by *claim records*: each claim records which messages it took, in its own transaction.
Candidates are the messages of those records; the row itself, found by its key, shows whether it is still in flight. So
there is no index on a column that each lease and ack changes, and nothing to repair after a crash. ``KnownClaims`` is
the cache of one process: the last record read, and which messages of the records read may be in flight. A claim reads
the records that came since, and reads rows only if the limit would be reached with all of them in flight. Dead records
are scanned once, and dead messages sought by key: no old snapshot makes it slower.

Where messages are shared out they are counted by an index on the leased rows, which their subscribers need anyway.
"""

from __future__ import annotations

import abc
import hashlib
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from .claims import Claimed, SeqRange


class KnownClaims(NamedTuple):
    """The records up to number ``upto`` are known; of the messages that they name at most ``in_flight`` are in flight,
    and ``pending`` are the records that are not filled in yet. As the database writes them."""

    upto: int
    pending: str
    in_flight: str


class LimitedClaim(NamedTuple):
    """The result of a claim under a limit: the messages, whether the limit is reached now, and what the process may
    cache for its next claim once the transaction is committed."""

    rows: list[Claimed]
    at_limit: bool
    known: KnownClaims | None = None


class Leased(NamedTuple):
    """The number of messages that one subscriber holds under one token."""

    owner: uuid.UUID
    token: uuid.UUID
    messages: int


def lock_number(db_table: str) -> int:
    """The number of a table's lock within its database: 64 bits of a digest, prefixed so that other lock users do not
    collide."""
    return int.from_bytes(hashlib.blake2b(f"queueapp:{db_table}".encode(), digest_size=8).digest(), "big", signed=True)


class ConcurrencyLimits(abc.ABC):
    """Claims under a limit, permits and sharing out; for tables with leases."""

    @abc.abstractmethod
    def claim_within(
        self,
        connection: Any,
        ranges: Sequence[SeqRange],
        limit: int,
        token: uuid.UUID,
        owner: uuid.UUID,
        lease_ms: int | None,
        max_in_flight: int,
        known: KnownClaims | None = None,
    ) -> LimitedClaim:
        """``claim_by_lease`` of at most as many messages as keep ``max_in_flight``. Several statements in one
        transaction: the caller's, in which the queue stays locked until its end, or an own one, in one round trip where
        the database allows. ``lease_ms`` None: the lease never expires. ``known`` None: the process has read no record;
        the first claim of all records what is leased, by a scan of the table."""

    @abc.abstractmethod
    def drop_records(self, connection: Any, after: int) -> int:
        """Delete records above number ``after`` none of whose messages is leased, except the queue's first; returns the
        number above which the next call starts. Safe at any time, concurrently too: two statements, outside of a
        transaction."""

    @abc.abstractmethod
    def lock(self, connection: Any) -> None:
        """Wait until no other session claims from this queue under its limit, and keep others waiting until the
        transaction ends."""

    @abc.abstractmethod
    def take_permits(self, connection: Any, permits: int, wanted: int, *, more: bool = False) -> int:
        """TRANSACTIONAL: take at most ``wanted`` of the queue's permits for the open transaction; returns how many.
        They are free again when it ends in any way. Does not wait. ``more``: the transaction may hold some already."""

    @abc.abstractmethod
    def leases(self, connection: Any) -> list[Leased] | None:
        """What is in flight now, by subscriber and token; only on a table that counts. Excludes what was leased before
        its counting began. None if that cannot be read because another session keeps a message locked (SQL Server)."""

    @abc.abstractmethod
    def lock_heads(self, connection: Any, ranges: Sequence[SeqRange], limit: int, *, bodies: bool) -> list[Claimed]:
        """Lock the lowest unlocked messages of the ranges until the transaction ends and return them in claim order, as
        a claim does; headers and bodies only if ``bodies``."""

    @abc.abstractmethod
    def share_out(self, connection: Any, seqs: Sequence[int], owners: Sequence[uuid.UUID], lease_ms: int) -> int:
        """Assign each of these messages, which the caller has locked, to the subscriber at the same index. Counted as a
        delivery only when it is taken up."""

    @abc.abstractmethod
    def count_shared_out(self, connection: Any, owner: uuid.UUID) -> int:
        """The number of messages that were shared out to a subscriber and not taken up."""

    @abc.abstractmethod
    def take_up(
        self, connection: Any, owner: uuid.UUID, limit: int, token: uuid.UUID, lease_ms: int | None
    ) -> list[Claimed]:
        """Lease the lowest of the messages that were shared out to a subscriber, and count the delivery. In claim
        order."""

    @abc.abstractmethod
    def delete_in_flight(self, connection: Any, owner: uuid.UUID, limit: int) -> int:
        """AT_MOST_ONCE: delete what was leased to a (dead) subscriber. What was shared out to it and not taken up
        stays, for ``release_owner``."""
