"""What a ``receive()`` block holds, and the terminal writes that end it: each is fenced by the block's lease token, and one that
touches no row raises LeaseLost."""

from __future__ import annotations

import uuid
from datetime import timedelta
from functools import partial
from typing import Any

from django.db import connections, transaction

from .. import messages, notifier, signals
from ..errors import LeaseLost, NoCheckpoint, QueueError
from ..failures import expire_actions
from ..failures.limits import reached
from ..models.delivery import Leasing, Semantics
from ..models.delivery.expire_actions import FORCED_EXPIRE
from ..sending import validation
from ..sql import QueueSql, queue_sql
from ..sql.acks import FENCED, LeaseHolder
from ..sql.claims import DELIVERIES, FOREVER_MS, SEQ, Claimed
from ..sql.message_columns import Row
from ..telemetry import tracing
from .low_water_marks import retreat_marks
from .message import Message
from .temporary_subscriber import deregister

#: How long to wait for whoever looks at a message that is leased here.
_PATIENCE_MS = 10_000


class ReceiveBatch:
    """The messages of one block: under which lease, for how long, and how they end."""

    def __init__(self, queue: Any, alias: str, owner: uuid.UUID) -> None:
        self.queue = queue
        self.alias = alias
        self.owner = owner
        self.lease = messages.new_id()
        #: How long a lease runs, once the block is entered.
        self.lease_ms = 0
        delivery = queue.delivery
        columns = {field.name for field in queue._meta.local_concrete_fields}
        #: Leased, even in a transaction: it lets single messages be given back. A foreign table has no such columns.
        self.leased = delivery.semantics is not Semantics.AT_MOST_ONCE and "lease_token" in columns
        #: AT_MOST_ONCE that keeps what it sent until it has ended.
        self.sent = delivery.keeps_sent
        #: What its receiver drops is wanted whole, and nothing of it stays in the table.
        self.whole = not self.leased and expire_actions.keeps(queue, FORCED_EXPIRE)

    def end(self, message: Message, how: str, reason: str = "") -> None:
        """A message is acked, cancelled or expired. Raises LeaseLost, and QueueError when it has ended before."""
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
            if self.sent and not (how == "expired" and self.whole):
                queue_sql(self.queue, connections[self.alias]).acks.ack(
                    connections[self.alias], [message.seq], self.lease
                )
            if how == "expired":
                self._expire(message, reason)
            message._state = how
            return
        sql, connection = self.sql
        if how == "cancelled" and self._reasons(message):
            ended = self._give_up(message.seq, cancelled=True)
        elif how == "cancelled":
            ended = sql.acks.release(connection, [message.seq], self.lease, handled=True)
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
            retreat_marks(self.queue, self.alias, [message.seq])

    def _ack(self, seq: int) -> int:
        sql, connection = self.sql
        if self.queue.delivery.leasing is Leasing.FENCED:
            return sql.acks.ack(connection, [seq], self.lease)
        return sql.ack_by_seq.ack(connection, [seq], self._holder)

    def _expire(self, message: Message, reason: str) -> int:
        """Drop a message, or do with it what its queue wants; returns how many that were."""
        sql, connection = self.sql
        if expire_actions.keeps(self.queue, FORCED_EXPIRE):
            with transaction.atomic(using=self.alias):
                rows = (
                    sql.ack_by_seq.take(connection, [message.seq], self._holder) if self.leased else self._rows(message)
                )
                given = [expire_actions.ExpiredMessage(row, (FORCED_EXPIRE,), reason) for row in rows]
                expire_actions.apply_expire_actions(self.queue, self.alias, given)
            return len(rows)
        ended = self._ack(message.seq) if self.leased else 1
        if ended:
            # In a transaction once that has committed: what is rolled back has not expired.
            tell = partial(signals.send_expired, self.queue, [message.id], reason, (FORCED_EXPIRE,))
            transaction.on_commit(tell, using=self.alias)
        return ended

    def _rows(self, message: Message) -> list[Row]:
        """A message that nobody leases, whole. One that is in no table any more was counted by nobody when it was handed out."""
        sql, connection = self.sql
        if self.sent:
            return sql.ack_by_seq.take(connection, [message.seq], LeaseHolder(FENCED, self.lease))
        return [sql.table.row_of(message._claimed)._replace(deliveries=message.deliveries)]

    @property
    def sql(self) -> tuple[QueueSql, Any]:
        """The queue's statements, and the connection that they are for."""
        connection = connections[self.alias]
        return tracing.statements(self.queue, queue_sql(self.queue, connection)), connection

    @property
    def _holder(self) -> LeaseHolder:
        leasing = self.queue.delivery.leasing
        return LeaseHolder(leasing.value, self.lease if leasing is Leasing.FENCED else self.owner)

    # -- limits of the queue (``poison.limits``) -------------------------------------------------------------------

    def _reasons(self, message: Message) -> tuple[str, ...]:
        """Why this message may not be given back once more, if so."""
        return reached(self.queue.delivery, message.deliveries, message.cancels + 1)

    def without_spent(self, claimed: list[Claimed]) -> list[Claimed]:
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
            row = sql.failures.lock(connection, seq, self.lease, _PATIENCE_MS)
            if row is None:
                return 0
            # The hand-out that ends here as it began is none; one that is given back is counted as such.
            counts = {"cancels": row.cancels + 1} if cancelled else {"deliveries": row.deliveries - 1}
            row = row._replace(**counts)
            reasons = reached(self.queue.delivery, row.deliveries, row.cancels if cancelled else 0)
            expire_actions.apply_expire_actions(self.queue, self.alias, [expire_actions.ExpiredMessage(row, reasons)])
            return sql.failures.remove(connection, [seq])

    def extend(self, seq: int, period: timedelta | None) -> None:
        """Let a lease run for ``period`` from now, None: for as long as it was taken. Raises LeaseLost."""
        if not self.leased or self.lease_ms == FOREVER_MS:
            return
        connection = connections[self.alias]
        lease_ms = self.lease_ms if period is None else validation.milliseconds("period", period, low=1)
        if not queue_sql(self.queue, connection).acks.extend(connection, [seq], self.lease, lease_ms):
            raise LeaseLost(self.queue._meta.label, seq)

    def write_headers(self, seq: int, headers: str) -> None:
        """Keep a message's headers anew. Raises LeaseLost, and NoCheckpoint in a semantics without leases."""
        semantics = self.queue.delivery.semantics
        if semantics is not Semantics.AT_LEAST_ONCE:
            raise NoCheckpoint(self.queue._meta.label, semantics.name)
        connection = connections[self.alias]
        if not queue_sql(self.queue, connection).acks.write_headers(connection, seq, self.lease, headers):
            raise LeaseLost(self.queue._meta.label, seq)

    def give_back(self, waiting: list[Message], started: list[Message]) -> None:
        """At the end of the block: what was not handed out, which does not count, and what nobody ended, which does."""
        if self.sent:
            self._end_what_was_sent([*waiting, *started])
        if not self.leased:
            return
        connection = connections[self.alias]
        sql = queue_sql(self.queue, connection)
        unstarted = sorted(message.seq for message in waiting if not message.is_barrier)
        unended = sorted(message.seq for message in started if not message._state and not message.is_barrier)
        # A lease that was lost meanwhile is not an error here: whoever has it now ends it.
        if unstarted:
            sql.acks.release(connection, unstarted, self.lease, handled=False)
        for message in started:
            if not message._state and not message.is_barrier and self._reasons(message):
                self._give_up(message.seq, cancelled=True)
                unended.remove(message.seq)
        if unended:
            sql.acks.release(connection, unended, self.lease, handled=True)
        if unstarted or unended:
            retreat_marks(self.queue, self.alias, unstarted + unended)

    def _end_what_was_sent(self, held: list[Message]) -> None:
        """AT_MOST_ONCE: what was not iterated over was sent all the same."""
        connection = connections[self.alias]
        if seqs := sorted(message.seq for message in held if not (message._state or message.is_barrier)):
            queue_sql(self.queue, connection).acks.ack(connection, seqs, self.lease)
        deregister(self.alias, self.owner)
        notifier.sent(self.queue, connection)
