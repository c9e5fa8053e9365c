"""``Queue.ack``, ``cancel``, ``expire`` and ``extend``: ending messages by their bookmarks, or by their ids, also
before they are sent (``sending.early_acks``).

The caller need not have received the messages: a bookmark (``seq``) can be passed to another process. The queue's
``leasing`` decides which messages a caller may end; the others are skipped without an error, and each function returns
how many messages it ended. All statements run in the caller's transaction, if there is one.

An id that is not in the queue is stored as an early ack for ``deferred_ack_expiration``. Each such id has its own
transaction, unless the caller has one open, so that two acks of several ids cannot deadlock.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

from django.db import Error, connections, transaction

from .. import notifier
from ..errors import InvalidOption, QueueError, UndecodableMessage
from ..failures import expire_actions
from ..flow import ledger
from ..models import DelayedMessage, Now
from ..models.delivery import Leasing, Semantics
from ..models.delivery.options import FORCED_EXPIRE
from ..models.delivery.topics import content_type_of, publish_target
from ..models.message_records import DeferredAck
from ..sending import early_acks
from ..sending.preparation import NEEDS_EXTRA
from ..sending.validation import alias_of, milliseconds
from ..sql import ErrorKind, QueueSql, backend_of, queue_sql
from ..sql.acks import LeaseHolder, Limits
from ..sql.message_columns import Row, message_values
from .low_water_marks import retreat_marks

#: Messages that an ack by expression reads in one statement.
ROWS_PER_QUERY = 500


class AckBySeq:
    """Ends messages of one queue on behalf of one client."""

    def __init__(self, queue: Any, client: uuid.UUID | None, using: str | None) -> None:
        self.queue, self.label = queue, queue._meta.label
        self.alias = alias_of(queue, using)
        self.connection = connections[self.alias]
        self.sql: QueueSql = queue_sql(queue, self.connection)
        self.holder = LeaseHolder(queue.delivery.leasing.value, client)
        if queue.delivery.semantics is not Semantics.AT_LEAST_ONCE:
            raise QueueError(
                f"{self.label} is {queue.delivery.semantics.value}: nothing of it is leased, so only its receiver can "
                "end it."
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
        """The seqs in parts that one statement can name."""
        limit = backend_of(self.connection).max_batch
        yield from (seqs[first : first + limit] for first in range(0, len(seqs), limit))

    def ack(self, seqs: list[int]) -> int:
        """Delete the messages; returns how many were deleted."""
        return sum(self.sql.ack_by_seq.ack(self.connection, part, self.holder) for part in self.parts(seqs))

    def expire(self, seqs: list[int], reason: str) -> int:
        """Remove the messages and apply the queue's expiry actions to them; returns how many were removed."""
        done = 0
        for part in self.parts(seqs):
            with transaction.atomic(using=self.alias):
                rows = self.sql.ack_by_seq.take(self.connection, part, self.holder)
                given = [expire_actions.ExpiredMessage(row, (FORCED_EXPIRE,), reason) for row in rows]
                expire_actions.apply_expire_actions(self.queue, self.alias, given)
            done += len(rows)
        return done

    def cancel(self, seqs: list[int], delay_ms: int | None) -> int:
        """Return the messages to the queue, now or later; those that reach a limit expire. Returns how many leases
        ended."""
        delivery, done = self.queue.delivery, 0
        limits = Limits(delivery.max_cancels, delivery.max_deliveries)
        for part in self.parts(seqs):
            with transaction.atomic(using=self.alias):
                if any(limits):
                    done += self._expire_at_limit(part, limits)
                if delay_ms is not None:
                    done += self._delay(part, delay_ms)
                    continue
                freed = self.sql.ack_by_seq.cancel(self.connection, part, self.holder, limits)
                done += len(freed)
            if freed:
                retreat_marks(self.queue, self.alias, freed)
                notifier.sent(self.queue, self.connection)
        return done

    def _expire_at_limit(self, seqs: list[int], limits: Limits) -> int:
        rows = self.sql.ack_by_seq.take(self.connection, seqs, self.holder, leased=True, limits=limits)
        spent = (expire_actions.limit_reached(self.queue, row._replace(cancels=row.cancels + 1)) for row in rows)
        expire_actions.apply_expire_actions(
            self.queue, self.alias, [message for message in spent if message is not None]
        )
        return len(rows)

    def _delay(self, seqs: list[int], delay_ms: int) -> int:
        rows = self.sql.ack_by_seq.take(self.connection, seqs, self.holder, leased=True)
        due = Now() + timedelta(milliseconds=delay_ms)
        # Not save(): it sends the project's signals.
        DelayedMessage.objects.using(self.alias).bulk_create([self._delayed(row, due) for row in rows])
        ledger.count(self.connection, self.label, ledger.DELAYED, ledger.MOVED, len(rows))
        if rows:
            notifier.delayed(self.connection)
        return len(rows)

    def _delayed(self, row: Row, due: Any) -> DelayedMessage:
        counts = {"deliveries": row.deliveries, "cancels": row.cancels + 1, "failures": row.failures}
        return DelayedMessage(destination=self.label, due=due, message_id=row.id, **counts, **message_values(row))

    def matching(self, where: str) -> Iterator[list[int]]:
        """Batches of the present messages that this client may end and of which the expression is true."""
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
        # Topic and content type that a message does not name are the queue's, as when it was enqueued.
        topic, content_type = publish_target(self.queue), content_type_of(self.queue)
        after, upto = -(2**63), self.sql.figures.last_seq(self.connection)
        while True:
            found = self.sql.ack_by_seq.candidates(self.connection, after, upto, ROWS_PER_QUERY, self.holder)
            matched = []
            for seq, headers, body in found:
                try:
                    if expression.matches(ParsedMessage.stored(headers, body, topic, content_type)):
                        matched.append(seq)
                except UndecodableMessage:  # it matches nothing; its receiver moves it to poison
                    continue
            if matched:
                yield matched
            if len(found) < ROWS_PER_QUERY:
                return
            after = found[-1][0]


def ack(
    queue: Any, bookmarks: int | Iterable[int], *, where: str | None, client: uuid.UUID | None, using: str | None
) -> int:
    """See ``Queue.ack``."""
    acks = AckBySeq(queue, client, using)
    if where is None:
        return acks.ack(seqs_of(bookmarks))
    if not isinstance(bookmarks, tuple) or bookmarks:
        raise InvalidOption("where", where, "absent where bookmarks are named")
    return sum(acks.ack(part) for part in acks.matching(where))


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
    acks = AckBySeq(queue, client, using)
    parts = acks.parts(seqs_of(bookmarks))
    return sum(len(acks.sql.ack_by_seq.extend(acks.connection, part, acks.holder, lease_ms)) for part in parts)


def seqs_of(bookmarks: int | Iterable[int]) -> list[int]:
    """The bookmarks in ascending order without duplicates. Raises InvalidOption for a value that is not a seq."""
    given = [bookmarks] if isinstance(bookmarks, int) or not isinstance(bookmarks, Iterable) else list(bookmarks)
    for message in given:
        if not isinstance(message, int) or isinstance(message, bool) or not -(2**63) <= message < 2**63:
            raise InvalidOption("bookmarks", message, "the seq of a message, or several of them")
    return sorted(set(given))


#: How often one id is tried whose transaction was a deadlock victim (of a sender in the bulk path).
MAX_TRIES = 5


def ack_ids(
    queue: Any,
    ids: Iterable[uuid.UUID],
    bookmarks: Any = (),
    where: str | None = None,
    *,
    client: uuid.UUID | None,
    using: str | None,
) -> int:
    """See ``Queue.ack``."""
    _refuse_both(bookmarks, where)
    acks = _acks_of(queue, client, using)
    return _end(acks, _checked(ids), acks.ack, DeferredAck.Kind.ACK)


def expire_ids(
    queue: Any, ids: Iterable[uuid.UUID], bookmarks: Any, reason: str, *, client: uuid.UUID | None, using: str | None
) -> int:
    """See ``Queue.expire``."""
    _refuse_both(bookmarks, None)
    acks = _acks_of(queue, client, using)
    return _end(acks, _checked(ids), lambda seqs: acks.expire(seqs, reason), DeferredAck.Kind.EXPIRE)


def _end(acks: AckBySeq, ids: list[uuid.UUID], end: Callable[[list[int]], int], kind: str) -> int:
    ended, missing = 0, []
    for first in range(0, len(ids), 1000):
        part = ids[first : first + 1000]
        found = acks.sql.ack_by_seq.seqs_of(acks.connection, part)
        ended += end([seq for _, seq in found])
        there = {identity for identity, _ in found}
        missing += [identity for identity in part if identity not in there]
    return ended + sum(_end_or_store(acks, identity, end, kind) for identity in missing)


def _end_or_store(acks: AckBySeq, identity: uuid.UUID, end: Callable[[list[int]], int], kind: str) -> int:
    backend, tries = backend_of(acks.connection), 0
    while True:
        try:
            with transaction.atomic(using=acks.alias):
                early_acks.lock(acks.queue, acks.connection, identity)
                if found := acks.sql.ack_by_seq.seqs_of(acks.connection, [identity]):
                    return end([seq for _, seq in found])
                early_acks.keep(acks.queue, acks.connection, [identity], kind)
                return 0
        except Error as error:
            tries += 1
            transient = backend.error_kind(error) is ErrorKind.DEADLOCK
            if acks.connection.in_atomic_block or not transient or tries >= MAX_TRIES:
                raise


def _acks_of(queue: Any, client: uuid.UUID | None, using: str | None) -> AckBySeq:
    if not early_acks.defers(queue):
        accepted = f"absent: {queue._meta.label} has no deferred_ack_expiration, and so no index to find an id by"
        raise InvalidOption("ids", "given", accepted)
    return AckBySeq(queue, client, using)


def _refuse_both(bookmarks: Any, where: str | None) -> None:
    if where is not None or not isinstance(bookmarks, tuple) or bookmarks:
        raise InvalidOption("ids", "given", "absent where bookmarks or an expression say which messages are meant")


def _checked(ids: Iterable[uuid.UUID]) -> list[uuid.UUID]:
    given = list(ids) if isinstance(ids, Iterable) else [None]
    for identity in given:
        if not isinstance(identity, uuid.UUID):
            raise InvalidOption(
                "ids", identity if isinstance(ids, Iterable) else ids, "uuid.UUIDs, in a list or another iterable"
            )
    return sorted(set(given))
