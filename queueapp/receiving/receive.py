"""``Queue.receive()``: receiving without a worker, for scripts, pipelines and tests.

Workers and scripts use the same statements and the same three semantics. A script ends each message in one of three
ways (ack, cancel, expire); a message that it does not end is returned to the queue when the block exits. A
terminal write that changes no row raises LeaseLost, so that a stale lease never ends a message; where ``leasing`` lets
other clients end it as well, that is no error. A message that reaches a limit of its queue (``max_deliveries``,
``max_cancels``) when it is returned expires instead, in the same transaction; one that reached ``max_deliveries``
without being returned expires when it is claimed, and is not handed out.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, overload

from django.db import connections, transaction

from .. import messages, overrides
from ..consuming.shielded import run_shielded
from ..errors import InvalidOption, QueueError
from ..flow.fairness import Capacity
from ..flow.limited_claims import LimitedClaims, Subscription
from ..flow.rate_limit import rate_limit_of
from ..models.delivery import Semantics
from ..options import require_text
from ..sending import fanout, validation
from ..sending.isolation import outside_transaction
from ..sql import QueueSql, queue_sql
from ..sql.claims import FOREVER_MS, MAX_ORDER_KEY, Claimed, SeqRange
from ..topics.evaluate_pending import evaluate_pending_messages
from . import barriers
from .low_water_marks import Priority64Marks, marks_for
from .receive_batch import Message, ReceiveBatch, register_subscriber


class Receive(Sequence[Message]):
    """The context manager behind ``Queue.receive()``: one batch of at most ``max_backlog`` messages, a sequence of
    ``Message``.

    A message that the caller has got by iteration or by index counts as handed out; the others are released uncounted
    at the end.

    AT_LEAST_ONCE: the messages are leased for ``lease_period``, to ``client`` if it is given (a uuid; under STRICT
    leasing every caller that names it may end them as well). A queue whose leases do not expire needs a
    ``lease_period`` here. TRANSACTIONAL: the whole block is one transaction on the queue's database, and its commit
    deletes what was acked. AT_MOST_ONCE: the messages are deleted when the block is entered; ack, cancel and expire
    only release a permit, where the queue counts them. The block is a subscriber of its own:
    ``max_per_subscription_backlog`` limits it as well. Raises InvalidOption for a ``max_backlog`` outside of 1 to
    3,500, and for a ``recipient`` that is no text of a recipient's length.
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
        of_key = [name for name in ("max_concurrent_per_key", "rate_per_key") if getattr(delivery, name) is not None]
        if of_key and delivery.semantics is Semantics.TRANSACTIONAL:
            raise QueueError(
                f"{queue.__name__}.receive() leases within its transaction, where {of_key[0]} cannot count: "
                "have a worker handle the messages, or make the queue AT_LEAST_ONCE."
            )
        self._limit = min(max_backlog, delivery.max_per_subscription_backlog or max_backlog)
        #: None: the value in effect, which is read when the block is entered. The constructor may not query the
        #: database.
        self._period = lease_period
        if lease_period is not None:
            validation.milliseconds("lease_period", lease_period, low=1)
        self._recipient = require_text("recipient", recipient, messages.MAX_RECIPIENT, shortest=0)
        self._batch = ReceiveBatch(queue, self.alias, messages.new_id() if client is None else _checked_client(client))
        self._atomic: AbstractContextManager[Any] | None = None
        self._messages: list[Message] = []
        #: Indexes of the messages that were handed out.
        self._handed_out: set[int] = set()
        self._entered = False
        self._limited_claims: LimitedClaims | None = None
        #: TRANSACTIONAL: the block is within a transaction of the caller.
        self._in_transaction = False

    def __enter__(self) -> Receive:
        if self._entered:
            raise QueueError(f"A batch is received once: call {self.queue.__name__}.receive() again for the next one.")
        self._batch.lease_ms = self._lease_ms()
        if self.queue.delivery.semantics is Semantics.TRANSACTIONAL:
            self._in_transaction = connections[self.alias].in_atomic_block
            self._atomic = transaction.atomic(using=self.alias)
            self._atomic.__enter__()
        try:
            self._messages = [Message(self._batch, claimed) for claimed in self._claim_at_rate()] or self._barriers()
        except BaseException as error:
            if self._atomic is not None:
                self._atomic.__exit__(type(error), error, error.__traceback__)
            raise
        self._entered = True
        return self

    def _lease_ms(self) -> int:
        """The lease in milliseconds: the given period, else the one in effect."""
        if overrides.affects(self.queue):
            overrides.refresh(self.alias)
        period = self._period or overrides.lease_period(self.queue, self.alias)
        if period is not None:
            return validation.milliseconds("lease_period", period, low=1)
        if self.queue.delivery.semantics is Semantics.AT_LEAST_ONCE:
            raise InvalidOption(
                "lease_period",
                None,
                f"a timedelta: the leases of {self.queue._meta.label} do not expire, so a message of a process that "
                "dies would stay leased",
            )
        return FOREVER_MS

    def __iter__(self) -> Iterator[Message]:
        self._refuse_before_entering()
        for index, message in enumerate(self._messages):
            self._handed_out.add(index)
            yield message

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        self._refuse_before_entering()
        found = self._messages[index]
        self._handed_out.update(range(len(self))[index] if isinstance(index, slice) else [range(len(self))[index]])
        return found

    def __len__(self) -> int:
        """The number of messages of the batch."""
        return len(self._messages)

    def _refuse_before_entering(self) -> None:
        if not self._entered:
            label = self.queue.__name__
            raise QueueError(
                f"Nothing was received yet: write `with {label}.receive(...) as batch:` and iterate over the batch in "
                "it."
            )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if self._atomic is None or kind is None:
                self._batch.release(
                    [message for index, message in enumerate(self._messages) if index not in self._handed_out],
                    [message for index, message in enumerate(self._messages) if index in self._handed_out],
                )
        except BaseException as failed:
            if self._atomic is not None:
                self._atomic.__exit__(type(failed), failed, failed.__traceback__)
            raise
        if self._atomic is not None:
            self._atomic.__exit__(kind, error, tb)

    def _barriers(self) -> list[Message]:
        """The barriers that no row precedes: this block is a subscriber of them. They are deleted already, since each
        is taken once."""
        sql = queue_sql(self.queue, connections[self.alias])
        if not sql.table.barriers:
            return []
        barriers.release(self.queue, self.alias, self._batch.owner, self._recipient)
        found = []
        # Also those that an earlier block of this client released and did not take: a claim gets nothing while one is
        # there.
        while (row := barriers.take(self.alias, self._batch.owner)) is not None:
            found.append(Message(self._batch, barriers.as_claimed(sql.table, row), barrier=True))
        return found

    def _claim_at_rate(self) -> list[Claimed]:
        """``_claim`` of at most as many messages as the rate of the queue allows now."""
        if self.queue.delivery.rate is None:
            return self._claim()
        rate, outside = rate_limit_of(self.queue, self.alias), partial(outside_transaction, self.alias)
        tokens = self._limit = rate.take(self._limit, outside)
        rows = self._claim() if tokens else []
        rate.give_back(tokens - len(rows), outside)
        return rows

    def _claim(self) -> list[Claimed]:
        sql, connection = self._batch.sql
        delivery = self.queue.delivery
        if delivery.max_backlog is not None and delivery.semantics is Semantics.TRANSACTIONAL:
            # Permits of the queue, released when the block's transaction ends.
            maximum = overrides.effective_value(self.queue, "max_backlog", self.alias)
            self._limit = sql.limits.take_permits(connection, maximum, self._limit, more=self._in_transaction)
            if not self._limit:
                return []
        if self._batch.keeps_in_flight:
            register_subscriber(self.queue, self.alias, self._batch.owner)
        self._limited_claims = LimitedClaims(self.queue, self.alias, sql) if delivery.counts_leases else None
        if sql.table.has_unevaluated:
            evaluate_pending_messages(self.queue, self.alias)  # there may be no worker that does
        levels = [(self._recipient, priority) for priority in range(delivery.priorities - 1, -1, -1)]
        leveled = bool(sql.table.claim_by)
        marks = marks_for(self.queue, self.alias, tuple(levels), leveled)
        if isinstance(marks, Priority64Marks):
            return self._claim_by_order_key(sql, connection, marks)
        # Returned messages keep their position, so the present window of the rescan comes first: a backlog above the
        # mark that fills every batch must not starve them. If the batch is not full after that, claim from the
        # beginning.
        behind, ahead = marks.behind(), marks.ahead()
        scans = [sorted(behind + ahead, key=lambda r: -r.priority)] if leveled else [behind, ahead]
        scans.append([SeqRange(0, recipient=r, priority=p) for r, p in levels])
        started, returns = monotonic(), marks.returns
        rows: list[Claimed] = []

        def take(ranges: list[SeqRange]) -> None:
            while ranges and (limit := self._limit - len(rows)) > 0:
                got = self._claim_in(sql, connection, ranges, limit)
                if got and not sql.table.claims_by_key:  # where some stay behind another one of their key
                    marks.advance(got, returns)
                handed_out = self._batch.drop_at_limit(got)
                rows.extend(handed_out)
                if len(handed_out) == len(got):
                    break  # else the expired ones have space left for others

        for ranges in scans:
            take(ranges)
        # Last, messages whose priority is none of the levels: maintenance, which corrects it, may not be running.
        if (remaining := self._limit - len(rows)) > 0 and sql.maintenance.clamp_priorities(
            connection, [self._recipient], remaining
        ):
            take(scans[-1])
        remaining = self._limit - len(rows) if self._recipient and delivery.recipients else 0
        if remaining > 0 and fanout.replace_waiting(self.queue, connection, self._recipient, remaining):
            take(scans[-1])
        if behind and (self._limited_claims is None or rows) and not marks.count_in(behind, rows):
            marks.rescanned(monotonic() - started)
        return rows

    def _claim_in(self, sql: QueueSql, connection: Any, ranges: list[SeqRange], limit: int) -> list[Claimed]:
        owner = self._batch.owner
        # Another token than the owner's id, which marks a message that was assigned and not taken up.
        token = self._batch.lease
        if self._limited_claims is not None:
            subscription = Subscription(owner, Capacity(self._limit, self._limit - limit))
            lease_ms = None if self._batch.keeps_in_flight else self._batch.lease_ms
            return self._limited_claims.take(
                connection, ranges, limit, token, owner, lease_ms, subscription=subscription
            ).rows
        if self._batch.leased or self._batch.keeps_in_flight:
            lease_ms = FOREVER_MS if self._batch.keeps_in_flight else self._batch.lease_ms
            return sql.claims.claim_by_lease(connection, ranges, limit, token, owner, lease_ms)
        return sql.claims.claim_by_delete(connection, ranges, limit, self._batch.whole, owner=owner)

    def _claim_by_order_key(self, sql: QueueSql, connection: Any, marks: Priority64Marks) -> list[Claimed]:
        """With a priority of 64 bits: returned messages and late commits have an order key below the mark, so the
        rescan comes first. If the batch is not full after that, claim from the beginning."""
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
            handed_out = self._batch.drop_at_limit(got)
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


class AsyncReceive:
    """``async with Queue.areceive(10) as batch: async for message in batch: await message.ack()``.

    Every call runs on the thread of Django's async ORM, so in the same connection and transaction.
    """

    def __init__(self, queue: Any, max_backlog: int = 1, **options: Any) -> None:
        self._receive = Receive(queue, max_backlog, **options)

    async def __aenter__(self) -> AsyncReceive:
        await run_shielded(self._receive.__enter__, undo=self._receive.__exit__)
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await run_shielded(self._receive.__exit__, *exc, droppable=False)

    def __len__(self) -> int:
        return len(self._receive)

    def __getitem__(self, index: int) -> AsyncMessage:
        return AsyncMessage(self._receive[index])

    async def __aiter__(self) -> AsyncIterator[AsyncMessage]:
        for message in self._receive:
            yield AsyncMessage(message)


class AsyncMessage:
    """A message whose terminal methods are coroutines; everything else is as in ``Message``."""

    def __init__(self, message: Message) -> None:
        self._message = message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)

    async def ack(self) -> None:
        """See ``Message.ack``."""
        await run_shielded(self._message.ack)

    async def cancel(self) -> None:
        """See ``Message.cancel``."""
        await run_shielded(self._message.cancel)

    async def expire(self, reason: str = "dropped by its receiver") -> None:
        """See ``Message.expire``."""
        await run_shielded(self._message.expire, reason)

    async def extend(self, period: timedelta | None = None) -> None:
        """See ``Message.extend``."""
        await run_shielded(self._message.extend, period)
