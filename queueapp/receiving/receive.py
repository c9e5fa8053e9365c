"""``Queue.receive()``: receiving without a worker, for scripts, pipelines and tests.

Workers and scripts use the same statements and the same three semantics. A message that a script took ends in one of
four ways: acked, cancelled (given back), expired (dropped now), or, when the block is left without any of these, given
back. A terminal write that touches no row raises LeaseLost: a stale lease never ends a message; where ``leasing`` lets
others end it as well, that is no error. What reaches a limit of its queue when it is given back (``max_deliveries``,
``max_cancels``) is given up instead, in the same transaction; a message that was handed out so often and that nobody gave
back is given up when it is claimed, and is not handed out.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from time import monotonic
from types import TracebackType
from typing import Any

from django.db import connections, transaction

from .. import messages, overrides
from ..errors import InvalidOption, QueueError
from ..flow.fairness import Capacity
from ..flow.limited_claims import LimitedClaims, Subscription
from ..models.delivery import Semantics
from ..sending import fanout, validation
from ..sql import QueueSql, queue_sql
from ..sql.claims import FOREVER_MS, MAX_ORDER_KEY, Claimed, SeqRange
from ..topics.evaluate_pending import evaluate_pending_messages
from . import barriers
from .message import Message
from .priority64_marks import Priority64Marks, marks_for
from .receive_batch import ReceiveBatch
from .temporary_subscriber import register


class Receive:
    """The context manager behind ``Queue.receive()``: one batch of at most ``max_backlog`` messages.

    AT_LEAST_ONCE: the messages are leased for ``lease_period``, to ``client`` if it is given (a uuid of the caller's: under
    STRICT leasing whoever names it may end them as well). A queue whose leases never lapse must be given one that does.
    TRANSACTIONAL: the whole block is one transaction on the queue's database, and what is acked in it goes when it commits.
    AT_MOST_ONCE: they are gone when the block is entered; ack, cancel and expire do nothing but free a place, where the
    queue counts them. It is a subscriber of its own: the queue's ``max_per_subscription_backlog`` bounds it as well. Raises
    InvalidOption for a ``max_backlog`` out of 1 to 3,500.
    """

    def __init__(
        self,
        queue: Any,
        max_backlog: int = 1,
        *,
        lease_period: timedelta | None = None,
        client: uuid.UUID | None = None,
        recipient: str = "",
        using: str | None = None,
    ) -> None:
        if not isinstance(max_backlog, int) or not 1 <= max_backlog <= 3500:
            raise InvalidOption("max_backlog", max_backlog, "a whole number from 1 to 3500")
        self.queue = queue
        self.alias = validation.alias_of(queue, using)
        delivery = queue.delivery
        self._limit = min(max_backlog, delivery.max_per_subscription_backlog or max_backlog)
        #: None: what is in force is asked for when the block is entered; here nothing may be read.
        self._period = lease_period
        if lease_period is not None:
            validation.milliseconds("lease_period", lease_period, low=1)
        self._recipient = recipient
        self._held = ReceiveBatch(queue, self.alias, messages.new_id() if client is None else _checked_client(client))
        self._atomic: AbstractContextManager[Any] | None = None
        self._started: list[Message] = []
        self._waiting: list[Message] = []
        self._entered = False
        self._taking: LimitedClaims | None = None
        #: TRANSACTIONAL: in a transaction of the caller's.
        self._within = False

    def __enter__(self) -> Receive:
        self._held.lease_ms = self._how_long()
        if self.queue.delivery.semantics is Semantics.TRANSACTIONAL:
            self._within = connections[self.alias].in_atomic_block
            self._atomic = transaction.atomic(using=self.alias)
            self._atomic.__enter__()
        try:
            self._waiting = [Message(self._held, claimed) for claimed in self._claim()] or self._barriers()
        except BaseException as error:
            if self._atomic is not None:
                self._atomic.__exit__(type(error), error, error.__traceback__)
            raise
        self._waiting.reverse()
        self._entered = True
        return self

    def _how_long(self) -> int:
        """Milliseconds of a lease: as asked for, else what is in force."""
        if overrides.affects(self.queue):
            overrides.refresh(self.alias)
        period = self._period or overrides.lease_period(self.queue, self.alias)
        if period is not None:
            return validation.milliseconds("lease_period", period, low=1)
        if self.queue.delivery.semantics is Semantics.AT_LEAST_ONCE:
            raise InvalidOption(
                "lease_period",
                None,
                f"a timedelta: the leases of {self.queue._meta.label} never lapse, and nobody would notice when this process dies",
            )
        return FOREVER_MS

    def __iter__(self) -> Iterator[Message]:
        if not self._entered:
            label = self.queue.__name__
            raise QueueError(
                f"Nothing was received yet: write `with {label}.receive(...) as batch:` and iterate over the batch in it."
            )
        while self._waiting:
            message = self._waiting.pop()
            self._started.append(message)
            yield message

    def __len__(self) -> int:
        """Messages not yet handed out by the iteration."""
        return len(self._waiting)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if self._atomic is None or kind is None:
                self._held.give_back(self._waiting, self._started)
        except BaseException as failed:
            if self._atomic is not None:
                self._atomic.__exit__(type(failed), failed, failed.__traceback__)
            raise
        if self._atomic is not None:
            self._atomic.__exit__(kind, error, tb)

    def _barriers(self) -> list[Message]:
        """What waits for nothing but a subscriber, which this is as well: the barriers that nothing stands before. Gone, as they
        are taken once."""
        sql = queue_sql(self.queue, connections[self.alias])
        if not sql.table.barriers:
            return []
        barriers.release(self.queue, self.alias, self._held.owner, self._recipient)
        found = []
        # Also what an earlier block of the same client left, which died before it took it: while it is there no claim gets anything.
        while (row := barriers.take(self.alias, self._held.owner)) is not None:
            found.append(Message(self._held, barriers.as_claimed(sql.table, row), barrier=True))
        return found

    def _claim(self) -> list[Claimed]:
        sql, connection = self._held.sql
        delivery = self.queue.delivery
        if delivery.max_backlog is not None and delivery.semantics is Semantics.TRANSACTIONAL:
            # Places of the queue, freed when the block's transaction ends.
            most = overrides.effective_value(self.queue, "max_backlog", self.alias)
            self._limit = sql.limits.take_permits(connection, most, self._limit, more=self._within)
            if not self._limit:
                return []
        if self._held.sent:
            register(self.queue, self.alias, self._held.owner)
        self._taking = LimitedClaims(self.queue, self.alias, sql) if delivery.counts_leases else None
        if sql.table.has_unevaluated:
            evaluate_pending_messages(self.queue, self.alias)  # there may be no worker that does
        levels = [(self._recipient, priority) for priority in range(delivery.priorities - 1, -1, -1)]
        leveled = bool(sql.table.claim_by)
        marks = marks_for(self.queue, self.alias, tuple(levels), leveled)
        if isinstance(marks, Priority64Marks):
            return self._claim_by_rank(sql, connection, marks)
        # What came back keeps its place, so the present rescan window comes first: a backlog above the mark that
        # fills every batch must not starve it. At last, when that does not fill the batch, from the very beginning.
        behind, ahead = marks.behind(), marks.ahead()
        looks = [sorted(behind + ahead, key=lambda r: -r.priority)] if leveled else [behind, ahead]
        looks.append([SeqRange(0, recipient=r, priority=p) for r, p in levels])
        started, returns = monotonic(), marks.returns
        rows: list[Claimed] = []

        def take(ranges: list[SeqRange]) -> None:
            while ranges and (limit := self._limit - len(rows)) > 0:
                got = self._claim_in(sql, connection, ranges, limit)
                if got:
                    marks.advance(got, returns)
                handed_out = self._held.without_spent(got)
                rows.extend(handed_out)
                if len(handed_out) == len(got):
                    break  # else there may be others in the place of those

        for ranges in looks:
            take(ranges)
        # Last what lies in none of the levels, and no more of it than is taken: a worker's housekeeper may not be there.
        if (left := self._limit - len(rows)) > 0 and sql.maintenance.clamp_priorities(
            connection, [self._recipient], left
        ):
            take(looks[-1])
        left = self._limit - len(rows) if self._recipient and delivery.recipients else 0
        if left > 0 and fanout.replace_waiting(self.queue, connection, self._recipient, left):
            take(looks[-1])
        if behind and (self._taking is None or rows) and not marks.count_in(behind, rows):
            marks.rescanned(monotonic() - started)
        return rows

    def _claim_in(self, sql: QueueSql, connection: Any, ranges: list[SeqRange], limit: int) -> list[Claimed]:
        owner = self._held.owner
        # A token of its own: one that is the owner's says that it was shared out and not taken up.
        token = self._held.lease
        if self._taking is not None:
            own = Subscription(owner, Capacity(self._limit, self._limit - limit))
            lease_ms = None if self._held.sent else self._held.lease_ms
            return self._taking.take(connection, ranges, limit, token, owner, lease_ms, own=own).rows
        if self._held.leased or self._held.sent:
            lease_ms = FOREVER_MS if self._held.sent else self._held.lease_ms
            return sql.claims.claim_by_lease(connection, ranges, limit, token, owner, lease_ms)
        return sql.claims.claim_by_delete(connection, ranges, limit, self._held.whole, owner=owner)

    def _claim_by_rank(self, sql: QueueSql, connection: Any, marks: Priority64Marks) -> list[Claimed]:
        """With a priority of 64 bits. What came back or was committed late has its place before the mark, so that is looked
        for first; at last, when that does not fill the batch, from the very beginning."""
        rows: list[Claimed] = []
        beginning = False
        while (limit := self._limit - len(rows)) > 0:
            if not rows and not beginning:
                marks.rescan(sql, connection)
            taken, got = marks.begin_claim(limit), None
            try:
                got = self._claim_in(
                    sql, connection, [SeqRange(0, MAX_ORDER_KEY)] if beginning else taken.ranges, limit
                )
            finally:
                marks.end_claim(taken, got, got is not None and len(got) == limit)
            handed_out = self._held.without_spent(got)
            rows += handed_out
            if len(handed_out) == len(got):
                if beginning or len(rows) == self._limit:
                    break
                beginning = True
        return rows


def _checked_client(client: Any) -> uuid.UUID:
    if not isinstance(client, uuid.UUID):
        raise InvalidOption("client", client, "a uuid.UUID")
    return client
