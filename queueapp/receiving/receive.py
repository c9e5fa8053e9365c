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
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any

from django.db import connections, transaction

from .. import messages, overrides, signals, tracing, wakeups
from ..errors import InvalidOption, LeaseLost, NoCheckpoint, QueueError
from ..flow import in_force
from ..flow.fairness import Room
from ..flow.taking import Subscription, Taking
from ..models.delivery import Leasing, Semantics
from ..models.delivery.expired import FORCED_EXPIRE
from ..poison import ending
from ..poison.limits import reached
from ..sending import accepting, copies
from ..sql import QueueSql, queue_sql
from ..sql.bookmarks import FENCED, Holder
from ..sql.claimed import DELIVERIES, FOREVER_MS, MAX_PLACE, SEQ, Claimed, Range
from ..sql.rows import Row
from ..topics.holding import evaluate_held
from . import barriers
from .floors import lower_floors
from .message import Message
from .ranked import RankedFloors, floors_for
from .sent import sign_off, sign_on

#: How long to wait for whoever looks at a message that is leased here.
_PATIENCE_MS = 10_000


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
        self.alias = accepting.alias_of(queue, using)
        delivery = queue.delivery
        self._limit = min(max_backlog, delivery.max_per_subscription_backlog or max_backlog)
        #: None: what is in force is asked for when the block is entered; here nothing may be read.
        self._period = lease_period
        if lease_period is not None:
            accepting.milliseconds("lease_period", lease_period, low=1)
        self._lease_ms = 0
        self._recipient = recipient
        self._lease = messages.new_id()
        self._owner = messages.new_id() if client is None else _checked_client(client)
        self._atomic: AbstractContextManager[Any] | None = None
        self._started: list[Message] = []
        self._waiting: list[Message] = []
        self._entered = False
        self._taking: Taking | None = None
        #: TRANSACTIONAL: in a transaction of the caller's.
        self._within = False
        columns = {field.name for field in queue._meta.local_concrete_fields}
        #: Leased, even in a transaction: it lets single messages be given back. A foreign table has no such columns.
        self.leased = delivery.semantics is not Semantics.AT_MOST_ONCE and "lease_token" in columns
        #: AT_MOST_ONCE that keeps what it sent until it has ended.
        self._sent = delivery.keeps_sent
        #: What its receiver drops is wanted whole, and nothing of it stays in the table.
        self._whole = not self.leased and ending.keeps(queue, FORCED_EXPIRE)

    def __enter__(self) -> Receive:
        self._lease_ms = self._how_long()
        if self.queue.delivery.semantics is Semantics.TRANSACTIONAL:
            self._within = connections[self.alias].in_atomic_block
            self._atomic = transaction.atomic(using=self.alias)
            self._atomic.__enter__()
        try:
            self._waiting = [Message(self, claimed) for claimed in self._claim()] or self._barriers()
        except BaseException as error:
            if self._atomic is not None:
                self._atomic.__exit__(type(error), error, error.__traceback__)
            raise
        self._waiting.reverse()
        self._entered = True
        return self

    def _how_long(self) -> int:
        """Milliseconds of a lease: as asked for, else what is in force."""
        if in_force.matters(self.queue):
            in_force.refresh(self.alias)
        period = self._period or overrides.lease_period(self.queue, self.alias)
        if period is not None:
            return accepting.milliseconds("lease_period", period, low=1)
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
                self._give_back_the_rest()
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
        barriers.release(self.queue, self.alias, self._owner, self._recipient)
        found = []
        # Also what an earlier block of the same client left, which died before it took it: while it is there no claim gets anything.
        while (row := barriers.take(self.alias, self._owner)) is not None:
            found.append(Message(self, barriers.as_claimed(sql.table, row), barrier=True))
        return found

    def _claim(self) -> list[Claimed]:
        sql, connection = self._sql
        delivery = self.queue.delivery
        if delivery.max_backlog is not None and delivery.semantics is Semantics.TRANSACTIONAL:
            # Places of the queue, freed when the block's transaction ends.
            most = in_force.value(self.queue, "max_backlog", self.alias)
            self._limit = sql.take_permits(connection, most, self._limit, more=self._within)
            if not self._limit:
                return []
        if self._sent:
            sign_on(self.queue, self.alias, self._owner)
        self._taking = Taking(self.queue, self.alias, sql) if delivery.counts_leases else None
        if sql.table.holds:
            evaluate_held(self.queue, self.alias)  # there may be no worker that does
        levels = [(self._recipient, priority) for priority in range(delivery.priorities - 1, -1, -1)]
        leveled = bool(sql.table.claim_by)
        floors = floors_for(self.queue, self.alias, tuple(levels), leveled)
        if isinstance(floors, RankedFloors):
            return self._claim_by_rank(sql, connection, floors)
        # What came back keeps its place, so the present rescan window comes first: a backlog ahead of the floor that
        # fills every batch must not starve it. At last, when that does not fill the batch, from the very beginning.
        behind, ahead = floors.behind(), floors.ahead()
        looks = [sorted(behind + ahead, key=lambda r: -r.priority)] if leveled else [behind, ahead]
        looks.append([Range(0, recipient=r, priority=p) for r, p in levels])
        started, returns = monotonic(), floors.returns
        rows: list[Claimed] = []

        def take(ranges: list[Range]) -> None:
            while ranges and (limit := self._limit - len(rows)) > 0:
                got = self._claim_in(sql, connection, ranges, limit)
                if got:
                    floors.passed(got, returns)
                handed_out = self._without_spent(got)
                rows.extend(handed_out)
                if len(handed_out) == len(got):
                    break  # else there may be others in the place of those

        for ranges in looks:
            take(ranges)
        # Last what lies in none of the levels, and no more of it than is taken: a worker's housekeeper may not be there.
        if (left := self._limit - len(rows)) > 0 and sql.clamp_priorities(connection, [self._recipient], left):
            take(looks[-1])
        left = self._limit - len(rows) if self._recipient and delivery.recipients else 0
        if left > 0 and copies.replace_waiting(self.queue, connection, self._recipient, left):
            take(looks[-1])
        if behind and (self._taking is None or rows) and not any(row[SEQ] <= behind[0].high for row in rows):
            floors.rescanned(monotonic() - started)
        return rows

    def _claim_in(self, sql: QueueSql, connection: Any, ranges: list[Range], limit: int) -> list[Claimed]:
        owner = self._owner
        # A token of its own: one that is the owner's says that it was shared out and not taken up.
        token = self._lease
        if self._taking is not None:
            own = Subscription(owner, Room(self._limit, self._limit - limit))
            lease_ms = None if self._sent else self._lease_ms
            return self._taking.take(connection, ranges, limit, token, owner, lease_ms, own=own).rows
        if self.leased or self._sent:
            lease_ms = FOREVER_MS if self._sent else self._lease_ms
            return sql.claim_by_lease(connection, ranges, limit, token, owner, lease_ms)
        return sql.claim_by_delete(connection, ranges, limit, self._whole, owner=owner)

    def _claim_by_rank(self, sql: QueueSql, connection: Any, floors: RankedFloors) -> list[Claimed]:
        """With a priority of 64 bits. What came back or was committed late has its place before the floor, so that is looked
        for first; at last, when that does not fill the batch, from the very beginning."""
        rows: list[Claimed] = []
        beginning = False
        while (limit := self._limit - len(rows)) > 0:
            if not rows and not beginning:
                floors.look_behind(sql, connection)
            taken, got = floors.take(limit), None
            try:
                got = self._claim_in(sql, connection, [Range(0, MAX_PLACE)] if beginning else taken.ranges, limit)
            finally:
                floors.ended(taken, got, got is not None and len(got) == limit)
            handed_out = self._without_spent(got)
            rows += handed_out
            if len(handed_out) == len(got):
                if beginning or len(rows) == self._limit:
                    break
                beginning = True
        return rows

    def _end(self, message: Message, how: str, reason: str = "") -> None:
        if message._state:
            raise QueueError(f"{message!r} was {message._state} already.")
        if message.is_barrier:
            message._state = how
            return
        if not self.leased:
            if how == "cancelled" and self.queue.delivery.semantics is Semantics.TRANSACTIONAL:
                raise QueueError(
                    f"{self.queue._meta.label} has no lease columns: raise in the block to give back its messages."
                )
            if self._sent and not (how == "expired" and self._whole):
                queue_sql(self.queue, connections[self.alias]).ack(connections[self.alias], [message.seq], self._lease)
            if how == "expired":
                self._expire(message, reason)
            message._state = how
            return
        sql, connection = self._sql
        if how == "cancelled" and self._reasons(message):
            ended = self._give_up(message.seq, cancelled=True)
        elif how == "cancelled":
            ended = sql.give_back(connection, [message.seq], self._lease, handled=True)
        elif how == "expired":
            ended = self._expire(message, reason)
        else:
            ended = self._ack(message.seq)
        message._state = how
        if ended != 1:
            # Where others may end it as well, that is what they did, or it is theirs.
            if not self.queue.delivery.others_may_end:
                raise LeaseLost(self.queue._meta.label, message.seq)
        elif how == "cancelled":
            lower_floors(self.queue, self.alias, [message.seq])

    def _ack(self, seq: int) -> int:
        sql, connection = self._sql
        if self.queue.delivery.leasing is Leasing.FENCED:
            return sql.ack(connection, [seq], self._lease)
        return sql.ack_held(connection, [seq], self._holder)

    def _expire(self, message: Message, reason: str) -> int:
        """Drop a message, or do with it what its queue wants; returns how many that were."""
        sql, connection = self._sql
        if ending.keeps(self.queue, FORCED_EXPIRE):
            with transaction.atomic(using=self.alias):
                rows = sql.take_held(connection, [message.seq], self._holder) if self.leased else self._rows(message)
                given = [ending.GivenUp(row, (FORCED_EXPIRE,), reason) for row in rows]
                ending.give_up(self.queue, self.alias, given)
            return len(rows)
        ended = self._ack(message.seq) if self.leased else 1
        if ended:
            # In a transaction once that has committed: what is rolled back has not expired.
            tell = partial(signals.send_expired, self.queue, [message.id], reason, (FORCED_EXPIRE,))
            transaction.on_commit(tell, using=self.alias)
        return ended

    def _rows(self, message: Message) -> list[Row]:
        """A message that nobody leases, whole. One that is in no table any more was counted by nobody when it was handed out."""
        sql, connection = self._sql
        if self._sent:
            return sql.take_held(connection, [message.seq], Holder(FENCED, self._lease))
        return [sql.table.row_of(message._claimed)._replace(deliveries=message.deliveries)]

    @property
    def _sql(self) -> tuple[QueueSql, Any]:
        connection = connections[self.alias]
        return tracing.statements(self.queue, queue_sql(self.queue, connection)), connection

    @property
    def _holder(self) -> Holder:
        leasing = self.queue.delivery.leasing
        return Holder(leasing.value, self._lease if leasing is Leasing.FENCED else self._owner)

    # -- limits of the queue (``poison.limits``) -------------------------------------------------------------------

    def _reasons(self, message: Message) -> tuple[str, ...]:
        """Why this message may not be given back once more, if so."""
        return reached(self.queue.delivery, message.deliveries, message.cancels + 1)

    def _without_spent(self, claimed: list[Claimed]) -> list[Claimed]:
        """Give up what was handed out as often as it may before this time, and was never acked."""
        most = self.queue.delivery.max_deliveries
        if not self.leased or not most:
            return claimed
        kept = []
        for row in claimed:
            if row[DELIVERIES] > most:
                self._give_up(row[SEQ], cancelled=False)
            else:
                kept.append(row)
        return kept

    def _give_up(self, seq: int, *, cancelled: bool) -> int:
        """Take a message that is leased here out of its queue, for the limits that it has reached; returns how many that
        were."""
        connection = connections[self.alias]
        sql = queue_sql(self.queue, connection)
        with transaction.atomic(using=self.alias):
            # The token fences. Nobody else can have it locked for long: a lease is ended in one statement.
            row = sql.lock(connection, seq, self._lease, _PATIENCE_MS)
            if row is None:
                return 0
            # The hand-out that ends here as it began is none; one that is given back is counted as such.
            counts = {"cancels": row.cancels + 1} if cancelled else {"deliveries": row.deliveries - 1}
            row = row._replace(**counts)
            reasons = reached(self.queue.delivery, row.deliveries, row.cancels if cancelled else 0)
            ending.give_up(self.queue, self.alias, [ending.GivenUp(row, reasons)])
            return sql.remove(connection, [seq])

    def _extend(self, seq: int, period: timedelta | None) -> None:
        if not self.leased or self._lease_ms == FOREVER_MS:
            return
        connection = connections[self.alias]
        lease_ms = self._lease_ms if period is None else accepting.milliseconds("period", period, low=1)
        if not queue_sql(self.queue, connection).extend(connection, [seq], self._lease, lease_ms):
            raise LeaseLost(self.queue._meta.label, seq)

    def _write_headers(self, seq: int, headers: str) -> None:
        semantics = self.queue.delivery.semantics
        if semantics is not Semantics.AT_LEAST_ONCE:
            raise NoCheckpoint(self.queue._meta.label, semantics.name)
        connection = connections[self.alias]
        if not queue_sql(self.queue, connection).write_headers(connection, seq, self._lease, headers):
            raise LeaseLost(self.queue._meta.label, seq)

    def _give_back_the_rest(self) -> None:
        if self._sent:
            self._end_what_was_sent()
        if not self.leased:
            return
        connection = connections[self.alias]
        sql = queue_sql(self.queue, connection)
        unstarted = sorted(message.seq for message in self._waiting if not message.is_barrier)
        unended = sorted(message.seq for message in self._started if not message._state and not message.is_barrier)
        # A lease that was lost meanwhile is not an error here: whoever has it now ends it.
        if unstarted:
            sql.give_back(connection, unstarted, self._lease, handled=False)
        for message in self._started:
            if not message._state and not message.is_barrier and self._reasons(message):
                self._give_up(message.seq, cancelled=True)
                unended.remove(message.seq)
        if unended:
            sql.give_back(connection, unended, self._lease, handled=True)
        if unstarted or unended:
            lower_floors(self.queue, self.alias, unstarted + unended)

    def _end_what_was_sent(self) -> None:
        """AT_MOST_ONCE: what was not iterated over was sent all the same."""
        connection = connections[self.alias]
        left = [message for message in (*self._waiting, *self._started) if not message._state]
        if seqs := sorted(message.seq for message in left if not message.is_barrier):
            queue_sql(self.queue, connection).ack(connection, seqs, self._lease)
        sign_off(self.alias, self._owner)
        wakeups.sent(self.queue, connection)


def _checked_client(client: Any) -> uuid.UUID:
    if not isinstance(client, uuid.UUID):
        raise InvalidOption("client", client, "a uuid.UUID")
    return client
