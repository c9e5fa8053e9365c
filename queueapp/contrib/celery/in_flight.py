"""What a process has claimed and not ended yet: acks come one by one from any thread, and are written in batches.

A token is used for the claims of half a lease. No lease can lapse and be taken again under the same token in that time, so it
fences as one for each claim would, and the acks of many claims are one statement.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any, NamedTuple

from django.db import Error, transaction

from ...messages import new_id
from ...sql import ErrorKind, backend_of, queue_sql
from .models import BrokerQueue

log = logging.getLogger("queueapp")

#: What somebody has locked is not waited for.
WAIT_MS = 200
#: Most keys of a statement.
MOST = 3000


class LeasedMessage(NamedTuple):
    """A message that is leased here."""

    seq: int
    token: uuid.UUID


class Batch:
    """What was claimed under one token."""

    __slots__ = ("expires", "period", "renews", "seqs")

    def __init__(self) -> None:
        self.seqs: set[int] = set()
        self.expires = 0.0
        self.period = 0.0
        self.renews = True


class Leases:
    """Those of one process in one database. Safe from any thread."""

    def __init__(self, on_ack: Callable[[], None]) -> None:
        self.owner = new_id()
        self._lock = threading.Lock()
        self._batches: dict[uuid.UUID, Batch] = {}
        self._done: dict[uuid.UUID, list[int]] = {}
        #: To be given back, by token and whether a consumer had them, since it could not be done at once.
        self._owed: dict[tuple[uuid.UUID, bool], list[int]] = {}
        self._token = new_id()
        self._token_until = 0.0
        self._on_ack = on_ack
        #: When the oldest ack came that is not written yet.
        self.waits_since: float | None = None
        self.received = self.acked = self.lost = 0

    def token(self, period: float) -> uuid.UUID:
        """The token for a claim now, whose leases last so many seconds."""
        with self._lock:
            now = monotonic()
            if now >= self._token_until:
                self._token, self._token_until = new_id(), now + period / 2
            else:
                self._token_until = min(self._token_until, now + period / 2)
            return self._token

    def took(self, token: uuid.UUID, seqs: Iterable[int], asked: float, period: float, renews: bool) -> None:
        """These were claimed by a statement that was sent at ``asked``."""
        with self._lock:
            batch = self._batches.setdefault(token, Batch())
            before = len(batch.seqs)
            # The earliest end counts: renewing lengthens all of them.
            batch.expires = min(batch.expires, asked + period) if batch.seqs else asked + period
            batch.period, batch.renews = period, renews
            batch.seqs.update(seqs)
            self.received += len(batch.seqs) - before

    def ack(self, held: LeasedMessage) -> None:
        """A message is done; it is written soon."""
        with self._lock:
            self._done.setdefault(held.token, []).append(held.seq)
            first = self.waits_since is None
            if first:
                self.waits_since = monotonic()
        if first:
            self._on_ack()

    def forget(self, some: Iterable[LeasedMessage]) -> None:
        """These were ended in another way."""
        with self._lock:
            for held in some:
                self._drop(held.token, (held.seq,))

    def _drop(self, token: uuid.UUID, seqs: Iterable[int]) -> None:
        batch = self._batches.get(token)
        if batch is not None:
            batch.seqs.difference_update(seqs)
            if not batch.seqs and token != self._token:
                del self._batches[token]

    @property
    def outstanding(self) -> int:
        """How many are held."""
        with self._lock:
            return sum(len(batch.seqs) for batch in self._batches.values())

    @property
    def idle(self) -> bool:
        """Whether nothing is left to be written."""
        return not (self._done or self._owed)

    # -- statements ------------------------------------------------------------------------------------------------

    def flush(self, connection: Any) -> int:
        """Write the acks that wait; returns how many messages went."""
        with self._lock:
            done, self._done, self.waits_since = self._done, {}, None
        total = 0
        sql = queue_sql(BrokerQueue, connection)
        while done:
            token, seqs = next(iter(done.items()))
            some = sorted(seqs)[:MOST]
            try:
                count = sql.acks.ack(connection, some, token)
            except BaseException:
                with self._lock:
                    for one, left in done.items():
                        self._done.setdefault(one, []).extend(left)
                    self.waits_since = self.waits_since or monotonic()
                raise
            total += count
            left = seqs if len(seqs) == len(some) else sorted(seqs)[MOST:]
            if left is seqs:
                del done[token]
            else:
                done[token] = left
            with self._lock:
                self._drop(token, some)
                self.acked += count
                self.lost += len(some) - count
            if count < len(some):
                log.warning(
                    "%s: %d leases were lost before the ack; those messages are handled again.",
                    BrokerQueue._meta.label, len(some) - count,
                )  # fmt: skip
        return total

    def give_back(self, connection: Any, some: Iterable[LeasedMessage], *, handled: bool) -> int:
        """Release leases at once, each message in its old place; returns how many were still held. ``handled``: a consumer has
        had them, so their delivery stays counted. What fails is owed."""
        by_token: dict[uuid.UUID, list[int]] = {}
        for held in some:
            by_token.setdefault(held.token, []).append(held.seq)
        sql = queue_sql(BrokerQueue, connection)
        count = 0
        while by_token:
            token, seqs = next(iter(by_token.items()))
            try:
                count += sql.acks.release(connection, sorted(seqs), token, handled=handled)
            except BaseException:
                with self._lock:
                    for one, left in by_token.items():
                        self._owed.setdefault((one, handled), []).extend(left)
                raise
            del by_token[token]
            with self._lock:
                self._drop(token, seqs)
        return count

    def settle(self, connection: Any) -> int:
        """Give back what is owed."""
        with self._lock:
            owed, self._owed = self._owed, {}
        count = 0
        for (token, handled), seqs in owed.items():
            count += self.give_back(connection, [LeasedMessage(seq, token) for seq in seqs], handled=handled)
        return count

    def renew(self, connection: Any) -> None:
        """Lengthen the leases that are half over."""
        now = monotonic()
        with self._lock:
            due = [
                (token, batch, sorted(batch.seqs))
                for token, batch in self._batches.items()
                if batch.seqs and batch.renews and batch.expires - now < batch.period / 2
            ]
        sql = queue_sql(BrokerQueue, connection)
        for token, batch, seqs in due:
            asked = monotonic()
            try:
                with transaction.atomic(using=connection.alias):
                    sql.acks.renew(connection, seqs, token, int(batch.period * 1000), WAIT_MS)
            except Error as error:
                if backend_of(connection).error_kind(error) is not ErrorKind.LOCKED:
                    raise
                continue  # at the next look
            with self._lock:
                batch.expires = asked + batch.period
