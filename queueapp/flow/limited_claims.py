"""Claims on a queue with a limit on messages in flight or a fairness model.

*Combining dispatch*: there is no dispatcher. While the queue has more messages than all live subscribers have capacity
for, every model fills all of them, so a worker claims as on any other queue, after a peek: nothing is locked, and
messages in flight are not counted. Otherwise a receiver first takes up messages that were assigned to its subscriber.
If there are none, it locks the queue for a moment, and either there is more than the free capacity now, and it claims
its part, or it assigns all available messages to the live subscribers and notifies them. An assignment that is not
taken up in time expires, and that of a dead subscriber is released, as a lease is.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, NamedTuple

from django.db import router, transaction

from .. import notifier, overrides, registry
from ..conf import settings
from ..models import ClaimRecord, FairTurn, Now, Subscriber
from ..models.delivery import FairnessModel
from ..sql import QueueSql
from ..sql.claims import BODY, FOREVER_MS, HEADERS, SEQ, Claimed, SeqRange
from ..sql.limits import KnownClaims, LimitedClaim, lock_number
from .fairness import Capacity, assign
from .filters import SubscriberFilter, filter_of

#: The limit of a queue without one.
_UNLIMITED = 2**31 - 1
#: The most messages that are assigned at a time, without and with filters, which read them; capacity beyond is not
#: counted.
WINDOW, FILTERED_WINDOW = 5_000, 1_000
#: Seconds for which the known capacity of live subscribers is used. Messages assigned to a subscriber meanwhile wait as
#: long.
KNOWN_FOR = 0.2


class Subscription(NamedTuple):
    """A live subscriber of a queue. ``filter``: None, it takes every message."""

    id: uuid.UUID
    capacity: Capacity
    filter: SubscriberFilter | None = None


class ClaimResult(NamedTuple):
    """The result of a claim. ``at_limit``: as many messages are in flight as the limit allows. ``full``: there may be
    more for this subscriber. ``unassigned``: messages that no live subscriber's filter accepts; they stay in the
    queue."""

    rows: list[Claimed]
    at_limit: bool = False
    full: bool = False
    unassigned: Sequence[Claimed] = ()


class LimitedClaims:
    """The claims on one queue in one database, for any number of threads."""

    def __init__(self, queue: Any, alias: str, sql: QueueSql) -> None:
        self.queue, self.alias, self.sql = queue, alias, sql
        self.label: str = queue._meta.label
        self._dispatches: bool = queue.delivery.dispatches
        self._model: FairnessModel = queue.delivery.fairness_model
        #: The capacity of all live subscribers, and until when it is used; 0: a filter or a limit decides as well.
        self._capacity, self.known_until = 0, 0.0

    @property
    def limit(self) -> int:
        """How many messages of the queue may be in flight now."""
        max_backlog: int | None = overrides.effective_value(self.queue, "max_backlog", self.alias)
        return _UNLIMITED if max_backlog is None else max_backlog

    def take(
        self,
        connection: Any,
        ranges: Sequence[SeqRange],
        limit: int,
        token: uuid.UUID,
        owner: uuid.UUID,
        lease_ms: int | None,
        *,
        subscription: Subscription | None = None,
        bounded: bool = False,
    ) -> ClaimResult:
        """Lease at most ``limit`` messages. ``subscription``: one without a row, for this claim only. ``bounded``:
        the caller counts the messages of its subscriber, and has capacity for ``limit``."""
        if not self._dispatches:
            maximum = self.limit

            def claim(seen: KnownClaims | None) -> LimitedClaim:
                return self.sql.limits.claim_within(connection, ranges, limit, token, owner, lease_ms, maximum, seen)

            got = record_cache_of(self.queue, connection).claim(self.sql, connection, claim)
            # Short of what was asked for because of the limit: there may be more, once these have ended.
            full = len(got.rows) == limit or bool(got.rows and got.at_limit)
            return ClaimResult(got.rows, got.at_limit, full)
        if bounded and self._exceeds_capacity(connection, ranges):
            return self._claim_unlimited(connection, ranges, limit, token, owner, lease_ms)
        given = self.sql.limits.take_up(connection, owner, limit, token, lease_ms)
        if given:
            return ClaimResult(given, full=True)
        if bounded and self._refresh_capacity(owner) and self._exceeds_capacity(connection, ranges):
            return self._claim_unlimited(connection, ranges, limit, token, owner, lease_ms)
        with transaction.atomic(using=self.alias):
            self.sql.limits.lock(connection)
            taken = self._claim_or_assign(connection, ranges, limit, token, owner, lease_ms, subscription)
        if isinstance(taken, ClaimResult):
            return taken
        at_limit, unassigned = taken
        given = self.sql.limits.take_up(connection, owner, limit, token, lease_ms)
        return ClaimResult(given, at_limit, bool(given or unassigned), unassigned)

    def assigned(self, connection: Any, owner: uuid.UUID) -> int:
        """How many messages are assigned to a subscriber that has not taken them up."""
        return self.sql.limits.count_shared_out(connection, owner) if self._dispatches else 0

    def _refresh_capacity(self, owner: uuid.UUID) -> bool:
        """Read the capacity of all live subscribers, unless it is known; returns whether it was read."""
        if monotonic() < self.known_until:
            return False
        capacity = 0
        if self.limit == _UNLIMITED:
            subscriptions = self._subscriptions(Counter(), owner, None)
            # A subscriber whose heartbeat is late has the capacity 0: it gets nothing.
            if all(subscription.filter is None and subscription.capacity.backlog for subscription in subscriptions):
                capacity = sum(subscription.capacity.backlog for subscription in subscriptions)
        self._capacity, self.known_until = min(capacity, WINDOW), monotonic() + KNOWN_FOR
        return True

    def _exceeds_capacity(self, connection: Any, ranges: Sequence[SeqRange]) -> bool:
        """Whether there are more messages than all live subscribers may hold."""
        capacity = self._capacity if monotonic() < self.known_until else 0
        return capacity > 0 and self.sql.claims.peek(connection, ranges, (), capacity).ahead >= capacity

    def _claim_unlimited(
        self,
        connection: Any,
        ranges: Sequence[SeqRange],
        limit: int,
        token: uuid.UUID,
        owner: uuid.UUID,
        lease_ms: int | None,
    ) -> ClaimResult:
        until = FOREVER_MS if lease_ms is None else lease_ms
        rows = self.sql.claims.claim_by_lease(connection, ranges, limit, token, owner, until)
        return ClaimResult(rows, full=len(rows) == limit)

    def _claim_or_assign(
        self,
        connection: Any,
        ranges: Sequence[SeqRange],
        limit: int,
        token: uuid.UUID,
        owner: uuid.UUID,
        lease_ms: int | None,
        subscription: Subscription | None,
    ) -> ClaimResult | tuple[bool, Sequence[Claimed]]:
        """Under the lock: the messages claimed, or, after an assignment, whether the limit is reached and the
        unassigned messages."""
        leases = self.sql.limits.leases(connection)
        if leases is None:  # what cannot be counted may be at the limit
            return ClaimResult([], at_limit=True)
        out = Counter[uuid.UUID]()
        for lease in leases:
            out[lease.owner] += lease.messages
        subscriptions = self._subscriptions(out, owner, subscription)
        maximum = self.limit
        remaining = max(0, maximum - out.total())
        free = sum(subscription.capacity.free for subscription in subscriptions)
        wanted = min(remaining, free)
        if not wanted:
            return ClaimResult([], at_limit=not remaining)
        filtered = any(subscription.filter is not None for subscription in subscriptions)
        window = min(wanted, WINDOW)
        if not filtered and wanted == free and self.sql.claims.peek(connection, ranges, (), window).ahead >= window:
            # More than the free capacity: every model fills all subscribers.
            owned = next(subscription.capacity.free for subscription in subscriptions if subscription.id == owner)
            if not owned:
                return ClaimResult([])
            wanted = min(limit, owned)
            got = self.sql.limits.claim_within(connection, ranges, wanted, token, owner, lease_ms, maximum)
            return ClaimResult(got.rows, got.at_limit, len(got.rows) == wanted or bool(got.rows and got.at_limit))
        heads = self.sql.limits.lock_heads(connection, ranges, FILTERED_WINDOW if filtered else window, bodies=filtered)
        passes = self._matching(subscriptions, heads) if filtered else None
        shared = self._assign(connection, subscriptions, heads, remaining, passes)
        unassigned = [] if passes is None else [
            row for n, row in enumerate(heads) if not any(passes(index, n) for index in range(len(subscriptions)))
        ]  # fmt: skip
        return shared >= remaining, unassigned

    def _subscriptions(
        self, out: Counter[uuid.UUID], owner: uuid.UUID, subscription: Subscription | None
    ) -> list[Subscription]:
        rows = Subscriber.objects.using(self.alias).filter(queue=self.label, alive_until__gt=Now(), receives=True)
        found = [
            Subscription(key, Capacity(1 if backlog is None else backlog, out[key]), filter_of(text, self.label))
            for key, backlog, text in rows.order_by("started_at", "id").values_list("id", "backlog", "filter")
        ]
        # A backlog of 0: it receives barriers only.
        found = [subscription for subscription in found if subscription.capacity.backlog]
        if subscription is not None:
            found.append(subscription)
        elif all(subscription.id != owner for subscription in found):
            found.append(Subscription(owner, Capacity(0, 0)))  # its heartbeat is late
        return found

    @staticmethod
    def _matching(subscriptions: Sequence[Subscription], heads: Sequence[Claimed]) -> Callable[[int, int], bool]:
        """Whether the filter of a subscription accepts a message; each pair is evaluated once."""
        known: dict[tuple[SubscriberFilter | None, int], bool] = {}

        def passes(index: int, message: int) -> bool:
            key = subscriptions[index].filter, message
            if key not in known:
                row = heads[message]
                known[key] = key[0] is None or key[0].passes(row[HEADERS], row[BODY])
            return known[key]

        return passes

    def _assign(
        self,
        connection: Any,
        subscriptions: Sequence[Subscription],
        heads: Sequence[Claimed],
        remaining: int,
        passes: Callable[[int, int], bool] | None,
    ) -> int:
        """Assign the available messages; returns how many were assigned."""
        turn, turns = -1, self._model is FairnessModel.ROUND_ROBIN
        keys = [subscription.id for subscription in subscriptions]
        if turns:
            last = FairTurn.objects.using(self.alias).filter(queue=self.label).values_list("last", flat=True).first()
            turn = keys.index(last) if last in keys else -1
        rooms = [subscription.capacity for subscription in subscriptions]
        indexes, now = assign(rooms, len(heads), self._model, turn, passes)
        given = [(row[SEQ], keys[index]) for row, index in zip(heads, indexes, strict=True) if index is not None][
            :remaining
        ]
        if not given:
            return 0
        seqs, owners = zip(*given, strict=True)
        # The assignment lasts while its subscriber is alive, and revives none that is dead.
        self.sql.limits.share_out(connection, seqs, owners, int(self._assignment_period() / timedelta(milliseconds=1)))
        if turns and now != turn:
            last = owners[-1]
            FairTurn.objects.using(self.alias).update_or_create(queue=self.label, defaults={"last": last})
        notifier.sent(self.queue, connection)
        return len(given)

    def _assignment_period(self) -> timedelta:
        """How long a subscriber may wait before it takes up an assignment."""
        period: timedelta | None = overrides.effective_value(self.queue, "lease_period", self.alias)
        dead_after: timedelta = settings.DEAD_AFTER
        return dead_after if period is None else min(period, dead_after)


# -- claim records, cached in this process -----------------------------------------------------------------------------
# Caches the claim records of each queue and database (``sql.claim_records``) in this process.
#
# Only committed records are cached: a claim in the caller's transaction may be rolled back, together with the acks that
# it saw.


#: The process whose record number it divides drops records that are not needed any more. A prime: numbers are shared by
#: all queues of a database, and a queue that gets only even ones has its turn as well.
DROP_EVERY = 499

_of: dict[tuple[Any, ...], ClaimRecordCache] = {}


class ClaimRecordCache:
    """The cache of one queue in one database, for any number of threads: a lost update is as valid as the other one, it
    only reads some records once more."""

    __slots__ = ("_drop", "_dropped_to", "_seen")

    def __init__(self) -> None:
        self._seen: KnownClaims | None = None
        #: Records of earlier processes were probably never dropped.
        self._drop = True
        self._dropped_to = 0

    def claim(
        self, sql: QueueSql, connection: Any, claim: Callable[[KnownClaims | None], LimitedClaim]
    ) -> LimitedClaim:
        """Run ``claim`` with the cached records."""
        starts_transaction = connection.get_autocommit() and not connection.in_atomic_block
        if starts_transaction and self._drop:
            self._drop = False  # before it is done: if it fails, the next turn tries again
            self._dropped_to = sql.limits.drop_records(connection, self._dropped_to)
        got = claim(self._seen)
        if starts_transaction and got.known is not None:
            self._seen = got.known
            if got.rows and got.known.upto % DROP_EVERY == 0:
                self._drop = True
        return got


def forget_uncounted(alias: str) -> int:
    """Delete the records of queues that have no limit any more; returns how many. If such a queue gets a limit again,
    messages leased meanwhile have no record, and counting must begin anew."""
    kept = {queue._meta.db_table for queue in registry.queues if keeps_records(queue)}
    numbers = [lock_number(table) for table in {queue._meta.db_table for queue in registry.queues} - kept]
    if not router.allow_migrate_model(alias, ClaimRecord):
        return 0
    return ClaimRecord.objects.using(alias).filter(queue__in=numbers).delete()[0]


def keeps_records(queue: Any) -> bool:
    """Whether messages in flight of this queue are counted by records."""
    return bool(queue.delivery.counts_leases and not queue.delivery.dispatches)


def record_cache_of(queue: Any, connection: Any) -> ClaimRecordCache:
    """The cache of this queue's table in the database of this connection."""
    database = connection.settings_dict
    key = (connection.vendor, database["HOST"], database["PORT"], database["NAME"], queue._meta.db_table)
    found = _of.get(key)
    return _of.setdefault(key, ClaimRecordCache()) if found is None else found
