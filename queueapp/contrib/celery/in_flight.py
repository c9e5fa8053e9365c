"""The messages that this process has claimed and not ended yet, the acks and releases that are not written yet, and a
channel's record of both (``QoS``).

Acks arrive one by one from any thread and are written in batches. One token serves the claims of half a lease period:
no lease can expire and be taken again under the same token in that time, so the token fences as well as one per claim,
and the acks of many claims are one statement.
"""

from __future__ import annotations

import logging
import sys
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any, NamedTuple

from django.db import Error, transaction
from kombu.transport import virtual

from ...messages import new_id
from ...sql import ErrorKind, backend_of, queue_sql
from .models import BrokerQueue

log = logging.getLogger("queueapp")

#: Milliseconds that a renewal waits for a row lock.
LOCK_TIMEOUT_MS = 200
#: Maximum number of keys in one statement.
MAX_KEYS = 3000


class LeasedMessage(NamedTuple):
    """A message that this process has leased."""

    seq: int
    token: uuid.UUID


class TokenBatch:
    """The messages that are leased under one token."""

    __slots__ = ("expires", "period", "renews", "seqs")

    def __init__(self) -> None:
        self.seqs: set[int] = set()
        self.expires = 0.0
        self.period = 0.0
        self.renews = True


class Leases:
    """The leases of one process in one database. Safe from any thread."""

    def __init__(self, on_ack: Callable[[], None]) -> None:
        self.owner = new_id()
        self._lock = threading.Lock()
        self.batches: dict[uuid.UUID, TokenBatch] = {}
        self._acked: dict[uuid.UUID, list[int]] = {}
        #: Releases that failed and are tried again, by token and by whether a consumer had the messages.
        self._unreleased: dict[tuple[uuid.UUID, bool], list[int]] = {}
        self._token = new_id()
        self._token_until = 0.0
        self._on_ack = on_ack
        #: When the oldest unwritten ack arrived.
        self.unwritten_since: float | None = None
        self.received = self.acked = self.lost = 0

    def token(self, period: float) -> uuid.UUID:
        """The token for a claim that starts now, whose leases last ``period`` seconds."""
        with self._lock:
            now = monotonic()
            if now >= self._token_until:
                self._token, self._token_until = new_id(), now + period / 2
            else:
                self._token_until = min(self._token_until, now + period / 2)
            return self._token

    def add(self, token: uuid.UUID, seqs: Iterable[int], asked: float, period: float, renews: bool) -> None:
        """Record messages that were claimed by a statement sent at ``asked``."""
        with self._lock:
            batch = self.batches.setdefault(token, TokenBatch())
            before = len(batch.seqs)
            # The earliest expiry counts: a renewal extends all of them.
            batch.expires = min(batch.expires, asked + period) if batch.seqs else asked + period
            batch.period, batch.renews = period, renews
            batch.seqs.update(seqs)
            self.received += len(batch.seqs) - before

    def ack(self, lease: LeasedMessage) -> None:
        """Queue an ack; the process agent writes it within milliseconds."""
        with self._lock:
            self._acked.setdefault(lease.token, []).append(lease.seq)
            first = self.unwritten_since is None
            if first:
                self.unwritten_since = monotonic()
        if first:
            self._on_ack()

    def forget(self, leases: Iterable[LeasedMessage]) -> None:
        """Drop messages that were ended without an ack."""
        with self._lock:
            for lease in leases:
                self._drop(lease.token, (lease.seq,))

    def _drop(self, token: uuid.UUID, seqs: Iterable[int]) -> None:
        batch = self.batches.get(token)
        if batch is not None:
            batch.seqs.difference_update(seqs)
            if not batch.seqs and token != self._token:
                del self.batches[token]

    @property
    def outstanding(self) -> int:
        """Number of messages in flight."""
        with self._lock:
            return sum(len(batch.seqs) for batch in self.batches.values())

    @property
    def idle(self) -> bool:
        """Whether no ack and no release is unwritten."""
        return not (self._acked or self._unreleased)

    def snapshot(self) -> dict[uuid.UUID, tuple[float, float, bool, frozenset[int]]]:
        """By token: expiry and period in seconds, whether it is renewed, and the messages in flight."""
        with self._lock:
            return {
                token: (batch.expires, batch.period, batch.renews, frozenset(batch.seqs))
                for token, batch in self.batches.items()
                if batch.seqs
            }

    # -- statements ------------------------------------------------------------------------------------------------

    def flush(self, connection: Any) -> int:
        """Write the queued acks; returns the number of messages deleted."""
        with self._lock:
            acked, self._acked, self.unwritten_since = self._acked, {}, None
        total = 0
        sql = queue_sql(BrokerQueue, connection)
        while acked:
            token, seqs = next(iter(acked.items()))
            batch = sorted(seqs)[:MAX_KEYS]
            try:
                count = sql.acks.ack(connection, batch, token)
            except BaseException:
                with self._lock:
                    for unwritten, remaining in acked.items():
                        self._acked.setdefault(unwritten, []).extend(remaining)
                    self.unwritten_since = self.unwritten_since or monotonic()
                raise
            total += count
            if len(seqs) == len(batch):
                del acked[token]
            else:
                acked[token] = sorted(seqs)[MAX_KEYS:]
            lost = len(batch) - count
            with self._lock:
                self._drop(token, batch)
                self.acked += count
                self.lost += lost
            if lost:
                log.warning(
                    "%s: %d %s lost before the ack; the messages are delivered again.",
                    BrokerQueue._meta.label, lost, "lease was" if lost == 1 else "leases were",
                    extra={"queue": BrokerQueue._meta.label, "lost": lost},
                )  # fmt: skip
        return total

    def release(self, connection: Any, leases: Iterable[LeasedMessage], *, cancelled: bool) -> int:
        """End leases now, each message in its old place; returns the number that were still leased here.
        ``cancelled``: a consumer had the messages, so their delivery stays counted. A release that fails is tried
        again by ``retry_releases``."""
        by_token: dict[uuid.UUID, list[int]] = {}
        for lease in leases:
            by_token.setdefault(lease.token, []).append(lease.seq)
        sql = queue_sql(BrokerQueue, connection)
        count = 0
        while by_token:
            token, seqs = next(iter(by_token.items()))
            try:
                count += sql.acks.release(connection, sorted(seqs), token, cancelled=cancelled)
            except BaseException:
                with self._lock:
                    for unreleased, remaining in by_token.items():
                        self._unreleased.setdefault((unreleased, cancelled), []).extend(remaining)
                raise
            del by_token[token]
            with self._lock:
                self._drop(token, seqs)
        return count

    def retry_releases(self, connection: Any) -> int:
        """Repeat the releases that failed; returns the number of leases ended."""
        with self._lock:
            unreleased, self._unreleased = self._unreleased, {}
        count = 0
        for (token, cancelled), seqs in unreleased.items():
            count += self.release(connection, [LeasedMessage(seq, token) for seq in seqs], cancelled=cancelled)
        return count

    def renew(self, connection: Any) -> None:
        """Extend the leases that are past half of their period."""
        now = monotonic()
        with self._lock:
            due = [
                (token, batch, sorted(batch.seqs))
                for token, batch in self.batches.items()
                if batch.seqs and batch.renews and batch.expires - now < batch.period / 2
            ]
        sql = queue_sql(BrokerQueue, connection)
        for token, batch, seqs in due:
            asked = monotonic()
            try:
                with transaction.atomic(using=connection.alias):
                    sql.acks.renew(connection, seqs, token, int(batch.period * 1000), LOCK_TIMEOUT_MS)
            except Error as error:
                if backend_of(connection).error_kind(error) is not ErrorKind.LOCKED:
                    raise
                continue  # tried again in the next round
            with self._lock:
                batch.expires = asked + batch.period


class Delivered(virtual.Message):
    """A message that was received. If its body does not decode, an ack moves it to poison: acking is all that Celery
    does with such a message."""

    def __init__(self, payload: dict[str, Any], channel: Any = None, **kwargs: Any) -> None:
        super().__init__(payload, channel=channel, **kwargs)
        self.lease: LeasedMessage | None = payload.get("lease")
        self.undecodable: BaseException | None = None
        #: Why it is rejected, where that is known, and further columns of its poison record.
        self.reason = ""
        self.failure: dict[str, Any] = {}
        #: Number of deliveries so far, and whether its task ended the process that ran it.
        self.deliveries: int = payload.get("deliveries", 1)
        self.process_died = False
        #: The queue it was received from.
        self.queue = ""

    def _decode(self) -> Any:
        try:
            return super()._decode()
        except Exception as error:
            self.undecodable = error
            raise

    def ack(self, multiple: bool = False) -> None:
        if not self.decode_error() or self.lease is None or self.acknowledged:
            super().ack(multiple=multiple)
            return
        self.reject(requeue=False)

    def decode_error(self) -> str:
        """Why its body does not decode; '' if it was decoded, or decoding was not tried."""
        error = self.undecodable or (self.errors[0][1] if self.errors else None)
        return f"The body does not decode: {type(error).__name__}: {error}" if error is not None else ""


class QoS(virtual.QoS):
    """The deliveries that are not ended. The thread that ends one removes its entry; ``pop`` is atomic."""

    _delivered: OrderedDict[str, Delivered]

    def append(self, message: Delivered, delivery_tag: str) -> None:
        self._delivered[delivery_tag] = message

    def can_consume(self) -> bool:
        limit = self.prefetch_count
        return not limit or len(self._delivered) < limit

    def can_consume_max_estimate(self) -> int | None:
        limit = self.prefetch_count
        return max(limit - len(self._delivered), 0) if limit else None

    def ack(self, delivery_tag: str) -> None:
        message = self._delivered.pop(delivery_tag, None)
        if message is not None and message.lease is not None:
            self.channel.acked(message.lease)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        message = self._delivered.pop(delivery_tag, None)
        if message is None or message.lease is None:
            return
        if requeue and not self.channel.is_spent(message):
            self.channel.release([message.lease], cancelled=True)
        else:
            self.channel.move_to_poison(message)

    def restore_unacked(self) -> list[Any]:
        delivered = self._delivered
        self._delivered = OrderedDict()
        leases = [message.lease for message in delivered.values() if message.lease is not None]
        if leases:
            self.channel.release(leases, cancelled=True)
        return []

    def restore_unacked_once(self, stderr: Any = None) -> None:
        self._on_collect.cancel()
        if self.restore_at_shutdown and self.channel.do_restore:
            self.restore_unacked()


def rejection_reason(message: Delivered) -> str:
    """The likely reason for a rejection that gave none."""
    if undecoded := message.decode_error():
        return undecoded
    task = message.headers.get("task")
    if "celery" in sys.modules and task is not None:
        from celery import current_app

        if not isinstance(task, str) or task not in current_app.tasks:
            return f"This worker has no task {task!r:.300}."
        if (eta := message.headers.get("eta")) and (problem := _eta_error(eta)):
            return f"The worker cannot wait for the eta {eta!r:.100}: {problem}."
    return "Rejected by its consumer."


def _eta_error(eta: Any) -> str:
    """The error that a worker meets when it converts this eta, for which it rejects the task; '' if there is none."""
    from celery.utils.time import maybe_iso8601, timezone
    from kombu.asynchronous.timer import to_timestamp

    try:
        to_timestamp(timezone.to_system(maybe_iso8601(eta)))
    except (OverflowError, ValueError) as error:
        return str(error)
    return ""
