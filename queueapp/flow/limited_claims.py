"""Taking messages of a queue that counts what is out: within its limit, and shared out where it has a fairness model.

*Combining dispatch*: there is no dispatcher. While there is more than all live subscribers could hold together every model fills
everybody, so a worker claims as on any other queue, with a look before it: nothing is locked, and of what is out nothing is
counted. Else whoever wants messages first takes up what was shared out to it. If that is nothing, it locks the queue for a
moment, and either there is more than everybody has room for now, so that it takes its part, or it shares out all there is among
all live subscribers and wakes them. What one does not take up in time lapses, and what a dead one has is released, as any lease.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, NamedTuple

from django.db import transaction

from .. import notifier, overrides
from ..conf import settings
from ..models import FairTurn, Now, Subscriber
from ..models.delivery import FairnessModel
from ..sql import QueueSql
from ..sql.claims import BODY, FOREVER_MS, HEADERS, SEQ, Claimed, SeqRange
from ..sql.limits import KnownClaims, LimitedClaim
from . import claim_record_cache
from .fairness import Capacity, assign
from .filters import SubscriberFilter, filter_of

#: No limit on the queue as a whole.
_UNLIMITED = 2**31 - 1
#: So many messages are shared out at a time, and with filters read for it; free places beyond are not counted.
WINDOW, FILTERED_WINDOW = 5_000, 1_000
#: Seconds for which it is believed who lives and how much they may hold. What was shared out to a subscriber meanwhile waits as long.
KNOWN_FOR = 0.2


class Subscription(NamedTuple):
    """A live subscriber of a queue. ``filter``: None, it takes every message."""

    id: uuid.UUID
    room: Capacity
    filter: SubscriberFilter | None = None


class ClaimResult(NamedTuple):
    """What a claim got. ``at_limit``: as many messages are out as may be. ``full``: there may be more for this subscriber.
    ``unassigned``: messages, as a claim returns them, that no live subscriber's filter lets pass; they were left alone."""

    rows: list[Claimed]
    at_limit: bool = False
    full: bool = False
    unassigned: Sequence[Claimed] = ()


class LimitedClaims:
    """Of one queue on one database, for any number of threads."""

    def __init__(self, queue: Any, alias: str, sql: QueueSql) -> None:
        self.queue, self.alias, self.sql = queue, alias, sql
        self.label: str = queue._meta.label
        self._dispatches: bool = queue.delivery.dispatches
        self._model: FairnessModel = queue.delivery.fairness_model
        #: How much all live subscribers may hold, and until when that is believed; 0: a filter or a limit decides as well.
        self._room, self._known_until = 0, 0.0

    @property
    def most(self) -> int:
        """How many messages of the queue may be out now."""
        most: int | None = overrides.effective_value(self.queue, "max_backlog", self.alias)
        return _UNLIMITED if most is None else most

    def take(
        self,
        connection: Any,
        ranges: Sequence[SeqRange],
        limit: int,
        token: uuid.UUID,
        owner: uuid.UUID,
        lease_ms: int | None,
        *,
        own: Subscription | None = None,
        bounded: bool = False,
    ) -> ClaimResult:
        """Lease at most ``limit`` messages. ``own``: a subscription without a row, which comes this once. ``bounded``: the caller
        counts what its subscriber holds, and has room for so many."""
        if not self._dispatches:
            most = self.most

            def claim(seen: KnownClaims | None) -> LimitedClaim:
                return self.sql.limits.claim_within(connection, ranges, limit, token, owner, lease_ms, most, seen)

            got = claim_record_cache.of(self.queue, connection).claim(self.sql, connection, claim)
            return ClaimResult(got.rows, got.at_limit, len(got.rows) == limit)
        if bounded and self._abounds(connection, ranges):
            return self._take_freely(connection, ranges, limit, token, owner, lease_ms)
        given = self.sql.limits.take_up(connection, owner, limit, token, lease_ms)
        if given:
            return ClaimResult(given, full=True)
        if bounded and self._learn(owner) and self._abounds(connection, ranges):
            return self._take_freely(connection, ranges, limit, token, owner, lease_ms)
        with transaction.atomic(using=self.alias):
            self.sql.limits.lock(connection)
            taken = self._take_or_share_out(connection, ranges, limit, token, owner, lease_ms, own)
        if isinstance(taken, ClaimResult):
            return taken
        at_limit, unassigned = taken
        given = self.sql.limits.take_up(connection, owner, limit, token, lease_ms)
        return ClaimResult(given, at_limit, bool(given or unassigned), unassigned)

    def shared_out(self, connection: Any, owner: uuid.UUID) -> int:
        """How many messages were shared out to a subscriber that has not taken them up."""
        return self.sql.limits.count_shared_out(connection, owner) if self._dispatches else 0

    def _learn(self, owner: uuid.UUID) -> bool:
        """Learn how much all live subscribers may hold, unless that is known; whether anything is new."""
        if monotonic() < self._known_until:
            return False
        room = 0
        if self.most == _UNLIMITED:
            subscriptions = self._subscriptions(Counter(), owner, None)
            # Of one whose heartbeat is late the room is 0: it is to get nothing.
            if all(one.filter is None and one.room.backlog for one in subscriptions):
                room = sum(one.room.backlog for one in subscriptions)
        self._room, self._known_until = min(room, WINDOW), monotonic() + KNOWN_FOR
        return True

    def _abounds(self, connection: Any, ranges: Sequence[SeqRange]) -> bool:
        """Whether there is more than all live subscribers may hold, whatever they hold."""
        room = self._room if monotonic() < self._known_until else 0
        return room > 0 and self.sql.claims.peek(connection, ranges, (), room).ahead >= room

    def _take_freely(
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

    def _take_or_share_out(
        self,
        connection: Any,
        ranges: Sequence[SeqRange],
        limit: int,
        token: uuid.UUID,
        owner: uuid.UUID,
        lease_ms: int | None,
        own: Subscription | None,
    ) -> ClaimResult | tuple[bool, Sequence[Claimed]]:
        """Under the lock. What it took for itself; or, after it shared out, whether the limit is reached, and what is nobody's."""
        out = Counter[uuid.UUID]()
        for one in self.sql.limits.leases(connection):
            out[one.owner] += one.messages
        subscriptions = self._subscriptions(out, owner, own)
        most = self.most
        left = max(0, most - out.total())
        free = sum(one.room.free for one in subscriptions)
        wanted = min(left, free)
        if not wanted:
            return ClaimResult([], at_limit=not left)
        filtered = any(one.filter is not None for one in subscriptions)
        window = min(wanted, WINDOW)
        if not filtered and wanted == free and self.sql.claims.peek(connection, ranges, (), window).ahead >= window:
            # More than there is room for: every model fills everybody.
            mine = next(one.room.free for one in subscriptions if one.id == owner)
            if not mine:
                return ClaimResult([])
            wanted = min(limit, mine)
            got = self.sql.limits.claim_within(connection, ranges, wanted, token, owner, lease_ms, most)
            return ClaimResult(got.rows, got.at_limit, len(got.rows) == wanted)
        heads = self.sql.limits.lock_heads(connection, ranges, FILTERED_WINDOW if filtered else window, bodies=filtered)
        passes = self._matching(subscriptions, heads) if filtered else None
        shared = self._share_out(connection, subscriptions, heads, left, passes)
        unassigned = [] if passes is None else [
            row for n, row in enumerate(heads) if not any(passes(place, n) for place in range(len(subscriptions)))
        ]  # fmt: skip
        return shared >= left, unassigned

    def _subscriptions(self, out: Counter[uuid.UUID], owner: uuid.UUID, own: Subscription | None) -> list[Subscription]:
        rows = Subscriber.objects.using(self.alias).filter(queue=self.label, alive_until__gt=Now(), receives=True)
        found = [
            Subscription(key, Capacity(1 if backlog is None else backlog, out[key]), filter_of(text, self.label))
            for key, backlog, text in rows.order_by("started_at", "id").values_list("id", "backlog", "filter")
        ]
        # With a backlog of 0 it is there for barriers alone.
        found = [one for one in found if one.room.backlog]
        if own is not None:
            found.append(own)
        elif all(one.id != owner for one in found):
            found.append(Subscription(owner, Capacity(0, 0)))  # its heartbeat is late
        return found

    @staticmethod
    def _matching(subscriptions: Sequence[Subscription], heads: Sequence[Claimed]) -> Callable[[int, int], bool]:
        """Whether the filter of a subscription lets a message pass, asked once for each pair."""
        known: dict[tuple[SubscriberFilter | None, int], bool] = {}

        def passes(place: int, message: int) -> bool:
            key = subscriptions[place].filter, message
            if key not in known:
                row = heads[message]
                known[key] = key[0] is None or key[0].passes(row[HEADERS], row[BODY])
            return known[key]

        return passes

    def _share_out(
        self,
        connection: Any,
        subscriptions: Sequence[Subscription],
        heads: Sequence[Claimed],
        left: int,
        passes: Callable[[int, int], bool] | None,
    ) -> int:
        """Give what is there to who is to have it; returns how many messages."""
        turn, turns = -1, self._model is FairnessModel.ROUND_ROBIN
        keys = [one.id for one in subscriptions]
        if turns:
            last = FairTurn.objects.using(self.alias).filter(queue=self.label).values_list("last", flat=True).first()
            turn = keys.index(last) if last in keys else -1
        rooms = [one.room for one in subscriptions]
        places, now = assign(rooms, len(heads), self._model, turn, passes)
        given = [(row[SEQ], keys[place]) for row, place in zip(heads, places, strict=True) if place is not None][:left]
        if not given:
            return 0
        seqs, owners = zip(*given, strict=True)
        # It is to be taken up while its subscriber lives; nothing is revived that was not.
        self.sql.limits.share_out(connection, seqs, owners, int(self._patience() / timedelta(milliseconds=1)))
        if turns and now != turn:
            last = owners[-1]
            FairTurn.objects.using(self.alias).update_or_create(queue=self.label, defaults={"last": last})
        notifier.sent(self.queue, connection)
        return len(given)

    def _patience(self) -> timedelta:
        """How long a subscriber has to come for what was shared out to it."""
        period: timedelta | None = overrides.effective_value(self.queue, "lease_period", self.alias)
        dead_after: timedelta = settings.DEAD_AFTER
        return dead_after if period is None else min(period, dead_after)
