"""Ending messages by naming them: ``Queue.ack``, ``cancel``, ``expire`` and ``extend``.

Whoever does it need not have received them: a bookmark (``seq``) can go to another process, and come back from it. What he
may end is a matter of the queue's ``leasing``; what he may not is passed over, which is no error but a number: each returns
how many messages it has ended. In the caller's transaction, if there is one.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

from django.db import connections, transaction

from .. import notifier
from ..errors import InvalidOption, QueueError, UndecodableMessage
from ..failures import expire_actions
from ..models import DelayedMessage, Now
from ..models.delivery import Leasing, Semantics
from ..models.delivery.expire_actions import FORCED_EXPIRE
from ..models.delivery.topics import content_type_of, publish_target
from ..sending.enqueue_expressions import NEEDS_EXTRA
from ..sending.validation import alias_of, milliseconds
from ..sql import QueueSql, backend_of, queue_sql
from ..sql.acks import LeaseHolder, Limits
from ..sql.message_columns import Row, message_values
from .low_water_marks import retreat_marks

#: Messages that an ack by expression looks at in one statement.
LOOKED_AT = 500


class AckBySeq:
    """Who ends messages of a queue, and in which database."""

    def __init__(self, queue: Any, client: uuid.UUID | None, using: str | None) -> None:
        self.queue, self.label = queue, queue._meta.label
        self.alias = alias_of(queue, using)
        self.connection = connections[self.alias]
        self.sql: QueueSql = queue_sql(queue, self.connection)
        self.holder = LeaseHolder(queue.delivery.leasing.value, client)
        if queue.delivery.semantics is not Semantics.AT_LEAST_ONCE:
            raise QueueError(
                f"{self.label} is {queue.delivery.semantics.value}: nothing of it is leased, so who receives a message is the "
                "only one who can end it."
            )
        if client is not None and not isinstance(client, uuid.UUID):
            raise InvalidOption("client", client, "a uuid.UUID: the token or the owner of a lease")
        if client is None and queue.delivery.leasing is Leasing.FENCED:
            raise InvalidOption(
                "client",
                None,
                f"the token of the lease, since {self.label}.Delivery.leasing is fenced (or strict, or sublet)",
            )

    def parts(self, seqs: list[int]) -> Iterator[list[int]]:
        """So many at a time as one statement may name."""
        most = backend_of(self.connection).max_batch
        yield from (seqs[first : first + most] for first in range(0, len(seqs), most))

    def ack(self, seqs: list[int]) -> int:
        """Delete them; returns how many went."""
        return sum(self.sql.ack_by_seq.ack(self.connection, part, self.holder) for part in self.parts(seqs))

    def expire(self, seqs: list[int], reason: str) -> int:
        """Take them out and do with them what the queue does with what it gives up; returns how many."""
        done = 0
        for part in self.parts(seqs):
            with transaction.atomic(using=self.alias):
                rows = self.sql.ack_by_seq.take(self.connection, part, self.holder)
                given = [expire_actions.ExpiredMessage(row, (FORCED_EXPIRE,), reason) for row in rows]
                expire_actions.apply_expire_actions(self.queue, self.alias, given)
            done += len(rows)
        return done

    def cancel(self, seqs: list[int], delay_ms: int | None) -> int:
        """Give them back, now or later, but for those that have reached a limit with it; returns how many leases ended."""
        delivery, done = self.queue.delivery, 0
        limits = Limits(delivery.max_cancels, delivery.max_deliveries)
        for part in self.parts(seqs):
            with transaction.atomic(using=self.alias):
                if any(limits):
                    done += self._give_up_spent(part, limits)
                if delay_ms is not None:
                    done += self._put_off(part, delay_ms)
                    continue
                freed = self.sql.ack_by_seq.cancel(self.connection, part, self.holder, limits)
                done += len(freed)
            if freed:
                retreat_marks(self.queue, self.alias, freed)
                notifier.sent(self.queue, self.connection)
        return done

    def _give_up_spent(self, seqs: list[int], limits: Limits) -> int:
        rows = self.sql.ack_by_seq.take(self.connection, seqs, self.holder, leased=True, limits=limits)
        spent = (expire_actions.limit_reached(self.queue, row._replace(cancels=row.cancels + 1)) for row in rows)
        expire_actions.apply_expire_actions(self.queue, self.alias, [one for one in spent if one is not None])
        return len(rows)

    def _put_off(self, seqs: list[int], delay_ms: int) -> int:
        rows = self.sql.ack_by_seq.take(self.connection, seqs, self.holder, leased=True)
        due = Now() + timedelta(milliseconds=delay_ms)
        # Not save(): its signals are the user's.
        DelayedMessage.objects.using(self.alias).bulk_create([self._delayed(row, due) for row in rows])
        if rows:
            notifier.delayed(self.connection)
        return len(rows)

    def _delayed(self, row: Row, due: Any) -> DelayedMessage:
        counts = {"deliveries": row.deliveries, "cancels": row.cancels + 1, "failures": row.failures}
        return DelayedMessage(destination=self.label, due=due, message_id=row.id, **counts, **message_values(row))

    def matching(self, where: str) -> Iterator[list[int]]:
        """The messages that are there now, that this holder may end, and of which an expression is true; in batches."""
        try:
            from ..expressions import ParsedMessage, compile_expression
        except ImportError as error:
            raise InvalidOption("where", where, NEEDS_EXTRA) from error
        if self.queue.delivery.encrypts:
            raise InvalidOption(
                "where", where, "absent: no expression can read the bodies of this queue, which are encrypted"
            )
        if not isinstance(where, str):
            raise InvalidOption("where", where, "the text of an expression")
        expression = compile_expression(where)
        # What a message does not say of itself is as it was when it entered.
        topic, content_type = publish_target(self.queue), content_type_of(self.queue)
        after, upto = -(2**63), self.sql.figures.last_seq(self.connection)
        while True:
            found = self.sql.ack_by_seq.candidates(self.connection, after, upto, LOOKED_AT, self.holder)
            matched = []
            for seq, headers, body in found:
                try:
                    if expression.matches(ParsedMessage.stored(headers, body, topic, content_type)):
                        matched.append(seq)
                except UndecodableMessage:  # it matches nothing, and is not ours to bury
                    continue
            if matched:
                yield matched
            if len(found) < LOOKED_AT:
                return
            after = found[-1][0]


def ack(
    queue: Any, bookmarks: int | Iterable[int], *, where: str | None, client: uuid.UUID | None, using: str | None
) -> int:
    """See ``Queue.ack``."""
    ending_ = AckBySeq(queue, client, using)
    if where is None:
        return ending_.ack(seqs_of(bookmarks))
    if not isinstance(bookmarks, tuple) or bookmarks:
        raise InvalidOption("where", where, "absent where bookmarks are named")
    return sum(ending_.ack(some) for some in ending_.matching(where))


def cancel(
    queue: Any,
    bookmarks: int | Iterable[int],
    *,
    delay: timedelta | None,
    client: uuid.UUID | None,
    using: str | None,
) -> int:
    """See ``Queue.cancel``."""
    delay_ms = None if delay is None else milliseconds("delay", delay)
    return AckBySeq(queue, client, using).cancel(seqs_of(bookmarks), delay_ms)


def expire(
    queue: Any, bookmarks: int | Iterable[int], *, reason: str, client: uuid.UUID | None, using: str | None
) -> int:
    """See ``Queue.expire``."""
    return AckBySeq(queue, client, using).expire(seqs_of(bookmarks), reason)


def extend(
    queue: Any,
    bookmarks: int | Iterable[int],
    period: timedelta,
    *,
    client: uuid.UUID | None,
    using: str | None,
) -> int:
    """See ``Queue.extend``."""
    lease_ms = milliseconds("period", period, low=1)
    one = AckBySeq(queue, client, using)
    parts = one.parts(seqs_of(bookmarks))
    return sum(len(one.sql.ack_by_seq.extend(one.connection, part, one.holder, lease_ms)) for part in parts)


def seqs_of(bookmarks: int | Iterable[int]) -> list[int]:
    """Bookmarks, ascending and each once. Raises InvalidOption for what is none."""
    given = [bookmarks] if isinstance(bookmarks, int) or not isinstance(bookmarks, Iterable) else list(bookmarks)
    for one in given:
        if not isinstance(one, int) or isinstance(one, bool) or not -(2**63) <= one < 2**63:
            raise InvalidOption("bookmarks", one, "the seq of a message, or several of them")
    return sorted(set(given))
