"""``Queue.receive()``: receiving without a worker, for scripts, pipelines and tests.

Workers and scripts use the same statements and the same three semantics. A message that a script took ends in one of
four ways: acked, cancelled (given back), expired (dropped now), or, when the block is left without any of these, given
back. A terminal write that touches no row raises LeaseLost: a stale lease never ends a message. What reaches a limit of
its queue when it is given back (``max_deliveries``, ``max_cancels``) becomes poison instead, in the same transaction; a
message that was handed out so often and that nobody gave back becomes it when it is claimed, and is not handed out.
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

from .. import messages, signals
from ..errors import InvalidOption, LeaseLost, QueueError
from ..messages.ids import as_uuid
from ..messages.telling import WellKnown
from ..models.delivery import Semantics
from ..poison.burying import bury
from ..poison.failures import attempts_of
from ..poison.limits import reasons
from ..sending import accepting
from ..sql import queue_sql
from ..sql.claimed import BODY, CANCELS, DELIVERIES, HEADERS, ID, SEQ, Claimed, Range
from .floors import floors_of, lower_floors

#: How long to wait for whoever looks at a message that is leased here.
_PATIENCE_MS = 10_000


class Message(WellKnown):
    """One message of ``Queue.receive()``."""

    __slots__ = ("_claimed", "_receive", "_state")

    def __init__(self, receive: Receive, claimed: Claimed) -> None:
        self._receive = receive
        self._claimed = claimed
        self._state = ""

    def __repr__(self) -> str:
        return f"<message {self.seq} of {self._receive.queue._meta.label}>"

    @property
    def seq(self) -> int:
        """Its place in the queue: the bookmark that an ack names."""
        return int(self._claimed[SEQ])

    @property
    def id(self) -> uuid.UUID:
        """The id its sender gave it."""
        return as_uuid(self._claimed[ID])

    @property
    def deliveries(self) -> int:
        """How often it was handed out, this time included."""
        return int(self._claimed[DELIVERIES]) + (0 if self._receive.leased else 1)

    @property
    def headers(self) -> dict[str, str]:
        """All headers. Raises UndecodableMessage."""
        return messages.decode_headers(self._claimed[HEADERS])

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
        return messages.decode_body(self.raw_body, messages.read_head(self._claimed[HEADERS])[1], cls)

    def ack(self) -> None:
        """Done: the message goes. Raises LeaseLost when the lease is somebody else's by now."""
        self._receive._end(self, "acked")

    @property
    def cancels(self) -> int:
        """How often it was given back before."""
        return int(self._claimed[CANCELS])

    def cancel(self) -> None:
        """Give it back to its place in the queue; counted in ``cancels``, and poison at a limit. Raises LeaseLost."""
        self._receive._end(self, "cancelled")

    def expire(self, reason: str = "dropped by its receiver") -> None:
        """Drop it now, as if its time were over; the ``expired`` signal tells the reason. Raises LeaseLost."""
        self._receive._end(self, "expired", reason)

    def extend(self, period: timedelta | None = None) -> None:
        """Let the lease run ``period`` from now (default: the queue's lease period). Raises LeaseLost."""
        self._receive._extend(self.seq, period)


class Receive:
    """The context manager behind ``Queue.receive()``: one batch of at most ``max_backlog`` messages.

    AT_LEAST_ONCE: the messages are leased for ``lease_period``. TRANSACTIONAL: the whole block is one transaction on
    the queue's database, and what is acked in it goes when it commits. AT_MOST_ONCE: they are gone when the block is
    entered; ack, cancel and expire do nothing. Raises InvalidOption for a ``max_backlog`` out of 1 to 3,500.
    """

    def __init__(
        self,
        queue: Any,
        max_backlog: int = 1,
        *,
        lease_period: timedelta | None = None,
        recipient: str = "",
        using: str | None = None,
    ) -> None:
        if not isinstance(max_backlog, int) or not 1 <= max_backlog <= 3500:
            raise InvalidOption("max_backlog", max_backlog, "a whole number from 1 to 3500")
        self.queue = queue
        self.alias = accepting.alias_of(queue, using)
        self._limit = max_backlog
        period = lease_period if lease_period is not None else queue.delivery.lease_period
        self._lease_ms = accepting.milliseconds("lease_period", period, low=1)
        self._recipient = recipient
        self._token = messages.new_id()
        self._atomic: AbstractContextManager[Any] | None = None
        self._started: list[Message] = []
        self._waiting: list[Message] = []
        self._entered = False
        columns = {field.name for field in queue._meta.local_concrete_fields}
        #: Leased, even in a transaction: it lets single messages be given back. A foreign table has no such columns.
        self.leased = queue.delivery.semantics is not Semantics.AT_MOST_ONCE and "lease_token" in columns

    def __enter__(self) -> Receive:
        if self.queue.delivery.semantics is Semantics.TRANSACTIONAL:
            self._atomic = transaction.atomic(using=self.alias)
            self._atomic.__enter__()
        try:
            self._waiting = [Message(self, claimed) for claimed in self._claim()]
        except BaseException as error:
            if self._atomic is not None:
                self._atomic.__exit__(type(error), error, error.__traceback__)
            raise
        self._waiting.reverse()
        self._entered = True
        return self

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

    def _claim(self) -> list[Claimed]:
        connection = connections[self.alias]
        sql = queue_sql(self.queue, connection)
        delivery = self.queue.delivery
        levels = [(self._recipient, priority) for priority in range(delivery.priorities - 1, -1, -1)]
        leveled = bool(sql.table.claim_by)
        floors = floors_of(self.queue, self.alias, tuple(levels), leveled)
        # What came back keeps its place, so the present rescan window comes first: a backlog ahead of the floor that
        # fills every batch must not starve it. At last, when that does not fill the batch, from the very beginning.
        behind, ahead = floors.behind(), floors.ahead()
        looks = [sorted(behind + ahead, key=lambda r: -r.priority)] if leveled else [behind, ahead]
        looks.append([Range(0, recipient=r, priority=p) for r, p in levels])
        started, returns = monotonic(), floors.returns
        rows: list[Claimed] = []

        def take(ranges: list[Range]) -> None:
            while ranges and (limit := self._limit - len(rows)) > 0:
                if self.leased:
                    owner = self._token
                    got = sql.claim_by_lease(connection, ranges, limit, self._token, owner, self._lease_ms)
                else:
                    got = sql.claim_by_delete(connection, ranges, limit)
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
        if behind and not any(row[SEQ] <= behind[0].high for row in rows):
            floors.rescanned(monotonic() - started)
        return rows

    def _end(self, message: Message, how: str, reason: str = "") -> None:
        if message._state:
            raise QueueError(f"{message!r} was {message._state} already.")
        if not self.leased:
            if how == "cancelled" and self.queue.delivery.semantics is Semantics.TRANSACTIONAL:
                raise QueueError(
                    f"{self.queue._meta.label} has no lease columns: raise in the block to give back its messages."
                )
            message._state = how
            if how == "expired":
                self._tell_expired(message, reason)
            return
        connection = connections[self.alias]
        sql = queue_sql(self.queue, connection)
        if how == "cancelled" and (why := self._reasons(message)):
            ended = self._bury(message.seq, why, cancelled=True)
        elif how == "cancelled":
            ended = sql.give_back(connection, [message.seq], self._token, handled=True)
        else:
            ended = sql.ack(connection, [message.seq], self._token)
        message._state = how
        if ended != 1:
            raise LeaseLost(self.queue._meta.label, message.seq)
        if how == "cancelled":
            lower_floors(self.queue, self.alias, message.seq)
        elif how == "expired":
            self._tell_expired(message, reason)

    def _tell_expired(self, message: Message, reason: str) -> None:
        """In a transaction once that has committed: what is rolled back has not expired."""
        tell = partial(signals.send_expired, self.queue, [message.id], reason)
        transaction.on_commit(tell, using=self.alias)

    # -- limits of the queue (``poison.limits``) -------------------------------------------------------------------

    def _reasons(self, message: Message) -> str:
        """Why this message may not be given back once more, if so."""
        return reasons(self.queue.delivery, message.deliveries, message.cancels + 1)

    def _without_spent(self, claimed: list[Claimed]) -> list[Claimed]:
        """Bury what was handed out as often as it may before this time, and was never acked."""
        most = self.queue.delivery.max_deliveries
        if not self.leased or not most:
            return claimed
        kept = []
        for row in claimed:
            if row[DELIVERIES] > most:
                self._bury(row[SEQ], reasons(self.queue.delivery, row[DELIVERIES] - 1, 0), cancelled=False)
            else:
                kept.append(row)
        return kept

    def _bury(self, seq: int, reason: str, *, cancelled: bool) -> int:
        """Move a message that is leased here to the poison table; returns how many that were."""
        connection = connections[self.alias]
        sql = queue_sql(self.queue, connection)
        with transaction.atomic(using=self.alias):
            # The token fences. Nobody else can have it locked for long: a lease is ended in one statement.
            row = sql.lock(connection, seq, self._token, _PATIENCE_MS)
            if row is None:
                return 0
            # The hand-out that ends here as it began is none; one that is given back is counted as such.
            counts = {"cancels": row.cancels + 1} if cancelled else {"deliveries": row.deliveries - 1}
            row = row._replace(**counts)
            label = self.queue._meta.label
            bury(self.alias, label, row, f"not acked: {reason}", attempts=attempts_of(row.failures))
            signals.log.error("%s: message %s is poison, not acked: %s", label, row.id, reason)
            return sql.remove(connection, [seq])

    def _extend(self, seq: int, period: timedelta | None) -> None:
        if not self.leased:
            return
        connection = connections[self.alias]
        lease_ms = self._lease_ms if period is None else accepting.milliseconds("period", period, low=1)
        if not queue_sql(self.queue, connection).extend(connection, [seq], self._token, lease_ms):
            raise LeaseLost(self.queue._meta.label, seq)

    def _give_back_the_rest(self) -> None:
        if not self.leased:
            return
        connection = connections[self.alias]
        sql = queue_sql(self.queue, connection)
        unstarted = sorted(message.seq for message in self._waiting)
        unended = sorted(message.seq for message in self._started if not message._state)
        # A lease that was lost meanwhile is not an error here: whoever has it now ends it.
        if unstarted:
            sql.give_back(connection, unstarted, self._token, handled=False)
        for message in self._started:
            if not message._state and (why := self._reasons(message)):
                self._bury(message.seq, why, cancelled=True)
                unended.remove(message.seq)
        if unended:
            sql.give_back(connection, unended, self._token, handled=True)
        if unstarted or unended:
            lower_floors(self.queue, self.alias, min(unstarted + unended))
