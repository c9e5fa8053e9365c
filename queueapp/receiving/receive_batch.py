"""The messages of a ``receive()`` block (``Message``), and the terminal writes that end them: each is fenced by the
block's lease token, and one that changes no row raises LeaseLost."""

from __future__ import annotations

import os
import socket
import uuid
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

from django.db import connections, transaction

from .. import messages, notifier, overrides, signals
from ..errors import LeaseLost, NoCheckpoint, QueueError
from ..failures import expire_actions
from ..failures.limits import reached
from ..flow import ledger
from ..messages.checkpoints import read_checkpoint, take_checkpoint, with_checkpoint
from ..messages.headers import WellKnown
from ..messages.ids import as_uuid
from ..models import Now, Subscriber
from ..models.delivery import Leasing, Semantics
from ..models.delivery.options import FORCED_EXPIRE
from ..models.delivery.topics import content_type_of
from ..sending import validation
from ..sql import QueueSql, queue_sql
from ..sql.acks import FENCED, LeaseHolder
from ..sql.claims import BODY, CANCELS, DELIVERIES, FOREVER_MS, HEADERS, ID, SEQ, Claimed
from ..sql.message_columns import Row
from ..telemetry import tracing
from .low_water_marks import retreat_marks

#: How long to wait for the lock of a message that is leased here.
_LOCK_TIMEOUT_MS = 10_000


class ReceiveBatch:
    """The messages of one block: their lease, its period, and how they end."""

    def __init__(self, queue: Any, alias: str, owner: uuid.UUID) -> None:
        self.queue = queue
        self.alias = alias
        self.owner = owner
        self.lease = messages.new_id()
        #: The lease period; set when the block is entered.
        self.lease_ms = 0
        delivery = queue.delivery
        columns = {field.name for field in queue._meta.local_concrete_fields}
        #: TRANSACTIONAL leases as well, so that single messages can be returned. A foreign table has no columns for it.
        self.leased = delivery.semantics is not Semantics.AT_MOST_ONCE and "lease_token" in columns
        #: AT_MOST_ONCE that keeps a message as in flight until it is acked.
        self.keeps_in_flight = delivery.keeps_in_flight
        #: The claim returns whole rows: a message that the receiver expires is stored elsewhere, and nothing stays in
        #: the table.
        self.whole = not self.leased and expire_actions.keeps(queue, FORCED_EXPIRE)

    def end(self, message: Message, how: str, reason: str = "") -> None:
        """Ack, cancel or expire a message. Raises LeaseLost, and QueueError if it was ended before."""
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
            if self.keeps_in_flight and not (how == "expired" and self.whole):
                queue_sql(self.queue, connections[self.alias]).acks.ack(
                    connections[self.alias], [message.seq], self.lease
                )
            if how == "expired":
                self._expire(message, reason)
            message._state = how
            return
        sql, connection = self.sql
        if how == "cancelled" and self._reasons(message):
            ended = self._expire_at_limit(message.seq, cancelled=True)
        elif how == "cancelled":
            ended = sql.acks.release(connection, [message.seq], self.lease, cancelled=True)
        elif how == "expired":
            ended = self._expire(message, reason)
        else:
            ended = self._ack(message.seq)
        message._state = how
        if ended != 1:
            # Where other clients may end it as well, one has done so, or has leased it.
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
        """Expire a message and apply the queue's expiry actions; returns how many rows that changed."""
        sql, connection = self.sql
        # With a workflow an ack would do more than delete.
        if expire_actions.keeps(self.queue, FORCED_EXPIRE) or self.queue.delivery.workflow:
            with transaction.atomic(using=self.alias):
                rows = (
                    sql.ack_by_seq.take(connection, [message.seq], self._holder) if self.leased else self._rows(message)
                )
                given = [expire_actions.ExpiredMessage(row, (FORCED_EXPIRE,), reason) for row in rows]
                expire_actions.apply_expire_actions(self.queue, self.alias, given)
            return len(rows)
        ended = self._ack(message.seq) if self.leased else 1
        if ended:
            ledger.reclassify(self.queue, connection, 1, ledger.ACKED, ledger.EXPIRED)
            # In a transaction after its commit: a rollback undoes the expiry.
            send_signal = partial(signals.send_expired, self.queue, [message.id], reason, (FORCED_EXPIRE,))
            transaction.on_commit(send_signal, using=self.alias)
        return ended

    def _rows(self, message: Message) -> list[Row]:
        """The whole row of a message without a lease. The claim of one that is already deleted did not count the
        delivery."""
        sql, connection = self.sql
        if self.keeps_in_flight:
            return sql.ack_by_seq.take(connection, [message.seq], LeaseHolder(FENCED, self.lease))
        ledger.reclassify(self.queue, connection, 1, ledger.ACKED, ledger.MOVED)
        return [sql.table.row_of(message._claimed)._replace(deliveries=message.deliveries)]

    @property
    def sql(self) -> tuple[QueueSql, Any]:
        """The queue's statements and their connection."""
        connection = connections[self.alias]
        return tracing.statements(self.queue, queue_sql(self.queue, connection)), connection

    @property
    def _holder(self) -> LeaseHolder:
        leasing = self.queue.delivery.leasing
        return LeaseHolder(leasing.value, self.lease if leasing is Leasing.FENCED else self.owner)

    # -- limits of the queue (``failures.limits``) ------------------------------------------------------------------

    def _reasons(self, message: Message) -> tuple[str, ...]:
        """The limits that this message reaches if it is returned."""
        return reached(self.queue.delivery, message.deliveries, message.cancels + 1)

    def drop_at_limit(self, claimed: list[Claimed]) -> list[Claimed]:
        """Expire the claimed messages that had reached ``max_deliveries`` before this delivery; return the others."""
        limit = self.queue.delivery.max_deliveries
        if not self.leased or not limit:
            return claimed
        kept = []
        for row in claimed:
            if row[DELIVERIES] > limit:
                self._expire_at_limit(row[SEQ], cancelled=False)
            else:
                kept.append(row)
        return kept

    def _expire_at_limit(self, seq: int, *, cancelled: bool) -> int:
        """Remove a message that is leased here, because of the limits that it has reached; returns how many rows that
        changed."""
        connection = connections[self.alias]
        sql = queue_sql(self.queue, connection)
        with transaction.atomic(using=self.alias):
            # Fenced by the token. Another process locks it briefly at most: one statement ends a lease.
            row = sql.failures.lock(connection, seq, self.lease, _LOCK_TIMEOUT_MS)
            if row is None:
                return 0
            # The claim of a message that expires at once is no delivery; that of a cancelled one is.
            counts = {"cancels": row.cancels + 1} if cancelled else {"deliveries": row.deliveries - 1}
            row = row._replace(**counts)
            reasons = reached(self.queue.delivery, row.deliveries, row.cancels if cancelled else 0)
            expire_actions.apply_expire_actions(self.queue, self.alias, [expire_actions.ExpiredMessage(row, reasons)])
            return sql.failures.remove(connection, [seq])

    def extend(self, seq: int, period: timedelta | None) -> None:
        """Extend a lease to ``period`` from now; None: the lease period. Raises LeaseLost."""
        if not self.leased or self.lease_ms == FOREVER_MS:
            return
        connection = connections[self.alias]
        lease_ms = self.lease_ms if period is None else validation.milliseconds("period", period, low=1)
        if not queue_sql(self.queue, connection).acks.extend(connection, [seq], self.lease, lease_ms):
            raise LeaseLost(self.queue._meta.label, seq)

    def write_headers(self, seq: int, headers: str) -> None:
        """Replace a message's headers. Raises LeaseLost, and NoCheckpoint in a semantics without leases."""
        semantics = self.queue.delivery.semantics
        if semantics is not Semantics.AT_LEAST_ONCE:
            raise NoCheckpoint(self.queue._meta.label, semantics.name)
        connection = connections[self.alias]
        if not queue_sql(self.queue, connection).acks.write_headers(connection, seq, self.lease, headers):
            raise LeaseLost(self.queue._meta.label, seq)

    def release(self, waiting: list[Message], started: list[Message]) -> None:
        """At the end of the block: release messages that were not handed out, uncounted, and return those that were not
        ended, counted."""
        if self.keeps_in_flight:
            self._ack_in_flight([*waiting, *started])
        if not self.leased:
            return
        connection = connections[self.alias]
        sql = queue_sql(self.queue, connection)
        unstarted = sorted(message.seq for message in waiting if not message.is_barrier)
        unended = sorted(message.seq for message in started if not message._state and not message.is_barrier)
        # A lease that was lost meanwhile is not an error here: its new owner ends the message.
        if unstarted:
            sql.acks.release(connection, unstarted, self.lease, cancelled=False)
        for message in started:
            if not message._state and not message.is_barrier and self._reasons(message):
                self._expire_at_limit(message.seq, cancelled=True)
                unended.remove(message.seq)
        if unended:
            sql.acks.release(connection, unended, self.lease, cancelled=True)
        if unstarted or unended:
            retreat_marks(self.queue, self.alias, unstarted + unended)

    def _ack_in_flight(self, held: list[Message]) -> None:
        """AT_MOST_ONCE: ack all messages, also those that were not iterated over."""
        connection = connections[self.alias]
        if seqs := sorted(message.seq for message in held if not (message._state or message.is_barrier)):
            queue_sql(self.queue, connection).acks.ack(connection, seqs, self.lease)
        deregister_subscriber(self.alias, self.owner)
        notifier.sent(self.queue, connection)


# -- the subscriber row of one ``receive()`` block on an AT_MOST_ONCE queue that counts messages in flight
# ---------------
#
# Messages in flight keep their permits until the block acks them. A script has no heartbeat, and one that dies acks
# nothing: its row states until when it may hold them, a lease period, and then maintenance deletes row and messages, as
# for any dead subscriber.


#: Used where leases of the queue do not expire: a slow script cannot be distinguished from a dead one.
_SUBSCRIBER_PERIOD = timedelta(hours=1)


def register_subscriber(queue: Any, alias: str, subscriber: uuid.UUID) -> None:
    """Insert the row, before messages are claimed for it."""
    Subscriber.objects.using(alias).create(
        id=subscriber,
        queue=queue._meta.label,
        table=queue._meta.db_table,
        host=socket.gethostname()[:255],
        process=os.getpid(),
        supervisor=subscriber,
        alive_until=Now() + (overrides.effective_value(queue, "lease_period", alias) or _SUBSCRIBER_PERIOD),
        receives=False,
        at_most_once=True,
    )


def deregister_subscriber(alias: str, subscriber: uuid.UUID) -> None:
    """Delete the row, after all its messages are acked."""
    Subscriber.objects.using(alias).filter(pk=subscriber).delete()


class Batch(Protocol):
    """The batch that a message belongs to (``receive_batch.ReceiveBatch``)."""

    queue: Any
    alias: str
    leased: bool
    keeps_in_flight: bool

    def end(self, message: Message, how: str, reason: str = "") -> None: ...

    def extend(self, seq: int, period: timedelta | None) -> None: ...

    def write_headers(self, seq: int, headers: str) -> None: ...


class Message(WellKnown):
    """One message of ``Queue.receive()``."""

    __slots__ = ("_batch", "_claimed", "_state", "is_barrier")

    def __init__(self, batch: Batch, claimed: Claimed, *, barrier: bool = False) -> None:
        self._batch = batch
        self._claimed = claimed
        self._state = ""
        #: A barrier is deleted before it is handed out: ending it does nothing.
        self.is_barrier = barrier

    def __repr__(self) -> str:
        return f"<message {self.seq} of {self._batch.queue._meta.label}>"

    @property
    def seq(self) -> int:
        """The position in the queue: the bookmark that an ack names."""
        return int(self._claimed[SEQ])

    @property
    def id(self) -> uuid.UUID:
        """The id that the sender gave it."""
        return as_uuid(self._claimed[ID])

    @property
    def deliveries(self) -> int:
        """How often it was handed out, including this time."""
        counted = self._batch.leased or self._batch.keeps_in_flight or self.is_barrier
        return int(self._claimed[DELIVERIES]) + (0 if counted else 1)

    @property
    def headers(self) -> dict[str, str]:
        """All headers, without what is to be done after its ack. Raises UndecodableMessage."""
        headers = messages.decode_headers(self._claimed[HEADERS])
        take_checkpoint(headers)
        headers.pop(messages.WORKFLOW, None)
        return headers

    @property
    def checkpointed(self) -> Any:
        """The value of the last ``checkpoint``, of this receiver or of a handler; None: there is none."""
        text = take_checkpoint(messages.decode_headers(self._claimed[HEADERS]))
        return read_checkpoint(text, self.id, self._batch.alias)

    def checkpoint(self, value: Any) -> None:
        """Store the progress of the work, as ``Context.checkpoint``. Raises LeaseLost, InvalidMessage and, for a
        message that is not leased, NoCheckpoint."""
        headers = with_checkpoint(self._claimed[HEADERS], value, self.id, self._batch.alias)
        self._batch.write_headers(self.seq, headers)

    @property
    def raw_body(self) -> bytes | None:
        """The body as it is stored."""
        body: bytes | None = self._claimed[BODY]
        return body

    @property
    def body(self) -> Any:
        """The body: plain JSON values, or bytes. Raises UndecodableMessage."""
        return self.decode()

    def decode(self, cls: Any = Any) -> Any:
        """The body as an instance of ``cls``. Raises UndecodableMessage when it does not fit."""
        default_type = content_type_of(self._batch.queue)
        return messages.read_stored(
            self.raw_body, self._claimed[HEADERS], self.id, self._batch.alias, cls, default_type
        )

    def ack(self) -> None:
        """Delete the message: it is processed. Raises LeaseLost if the lease expired and another receiver has the
        message."""
        self._batch.end(self, "acked")

    @property
    def cancels(self) -> int:
        """How often it was cancelled before."""
        return int(self._claimed[CANCELS])

    def cancel(self) -> None:
        """Return it to its position in the queue; counts in ``cancels``, and moves it to poison at a limit. Raises
        LeaseLost."""
        self._batch.end(self, "cancelled")

    def expire(self, reason: str = "dropped by its receiver") -> None:
        """Expire it now; the ``expired`` signal carries the reason. Raises LeaseLost."""
        self._batch.end(self, "expired", reason)

    def extend(self, period: timedelta | None = None) -> None:
        """Extend the lease to ``period`` from now (default: the queue's lease period). Raises LeaseLost."""
        if not self.is_barrier:
            self._batch.extend(self.seq, period)
