"""Three limits on what one process has of a queue at once: messages in flight, handlers of one consumer, and messages
of one claim.

``InFlightLimit``: how many messages the process may hold (its backlog), counted in memory, exactly. A worker process is
one subscriber, whatever the number of its receivers. What it declares (``--backlog``) and what the queue allows
(``max_per_subscription_backlog``) bound it, whichever is less; without either, its batches do. On a queue that shares
messages out, it then has as many as it has receivers, since others must know its capacity; there the database counts as
well what was shared out to it and not claimed yet.

``ConsumerLimiter``: how many handlers of one consumer run at once (``@consumer(..., concurrency=N)``). A receiver runs
one handler at a time, so receivers are counted. One takes a permit of the consumer before a claim that may bring
messages of it, since what is claimed is in flight:

    (none) --before a claim, a permit is free--> taken --the claim brought none of its messages--> (none)
           --none is free--> (none): the claim leaves the consumer's messages in the queue, and takes those of the
               others
    taken  --none of its messages waits in the batch, and a handler of another consumer begins--> (none)
           --what waited was released--> (none)
           --the receiver is done--> (none)

No receiver waits for a permit. When one is free that was refused before, the pump peeks again.

``BatchSizer``: how many messages a receiver claims at once: as many as its handlers do in about ``BATCH_TARGET``, and
as many as have about ``MAX_BATCH_BYTES`` of bodies together.

A lease must not wait behind a long handler, so one slow batch shrinks the size at once; growth at most doubles it.
No-op handlers reach 500 after nine claims, a 1 ms handler settles near 70, a 20 ms handler at 3 (measured). Only
handlers count: where claims are slow, larger ones are fewer.

Bodies are weighed when they have arrived, so a claim follows those before it. Since a receiver begins with one message
and growth doubles, bodies of one size stay within the limit from the first claim on, except a single body that is
larger. When bodies become larger from one claim to the next, one claim of each receiver is over the limit by the same
factor, and at the very most ``MAX_BATCH`` of the largest; the next one is back within it. Weighing costs 30 ns a
message.

A consumer that takes batches is another case: a caller that asks for 500 at once wants 500 (``WholeBatches``,
``Multiples``).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from queueapp.conf import settings
from queueapp.consuming.registry import Registration
from queueapp.sql.claims import BODY, MAX_SEQ, RECIPIENT, SEQ, Claimed, SeqRange

from .claim_tracker import ActiveClaim
from .events import NoPump, ReceiverEvents

Call = Callable[[Any, Any], None]


class Holder(Protocol):
    """A receiver, as far as messages in flight are counted."""

    #: Capacity that it has taken for an active claim, or for what it holds otherwise than as a leased batch.
    reserved: int

    def in_flight_count(self) -> int:
        """Messages of its leased batch that have not ended."""


class Pool(Protocol):
    """The receivers of the process, as far as messages in flight are counted."""

    concurrency: int

    @property
    def receivers(self) -> Iterable[Holder]: ...


class InFlightLimit:
    """The backlog of one pump. ``declared``: by this process; ``allowed``: by the queue; ``shares``: the queue shares
    messages out."""

    def __init__(self, pool: Pool, declared: int | None, allowed: int | None, shares: bool) -> None:
        given = [limit for limit in (declared, allowed) if limit is not None]
        self._pool = pool
        self._limit = min(given) if given else None
        self._shares = shares
        self._lock = threading.Lock()
        #: Messages that were taken out of batches and have not ended yet. Written by the thread that renews leases.
        self.leaving = 0

    def granted(self) -> int | None:
        """The limit as the subscriber's row states it; None: as many as its batches take."""
        return self._pool.concurrency if self._limit is None and self._shares else self._limit

    @property
    def limited(self) -> bool:
        """Whether each claim has to reserve first."""
        return self._limit is not None or self._shares

    @property
    def takes_none(self) -> bool:
        """Whether the limit is 0: this process is given no message."""
        return self._limit == 0

    @property
    def free(self) -> int:
        """How many more messages this process may have in flight."""
        granted = self.granted()
        return sys.maxsize if granted is None else max(0, granted - self.outstanding())

    def outstanding(self) -> int:
        """Messages that the receivers hold, or are about to claim."""
        return self.leaving + sum(receiver.reserved + receiver.in_flight_count() for receiver in self._pool.receivers)

    def reserve(self, receiver: Holder, wanted: int) -> int:
        """Reserve capacity for a claim of this receiver, until it sets ``reserved`` again; return how much it got."""
        granted = self.granted()
        assert granted is not None
        with self._lock:
            receiver.reserved = max(0, min(wanted, granted - self.outstanding()))
            return receiver.reserved


class Permits:
    """The permits of one receiver, by consumer, each with those of its messages that wait in the receiver's batch."""

    __slots__ = ("running", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[str, set[int]] = {}
        #: The consumer whose handler began last: it may be called again with the messages that its call failed on.
        self.running = ""


class ConsumerLimiter:
    """The permits of all consumers of one queue that have a limit."""

    def __init__(self, registrations: Iterable[Registration]) -> None:
        limited = list(registrations)
        self._limits: Mapping[str, int] = {consumer.name: consumer.options["concurrency"] for consumer in limited}
        #: By what its messages are addressed to.
        self._consumer = {name: consumer.name for consumer in limited for name in (consumer.name, *consumer.aliases)}
        self._recipients = {consumer.name: (consumer.name, *consumer.aliases) for consumer in limited}
        self._permits: dict[int, Permits] = {}
        self._taken = dict.fromkeys(self._limits, 0)
        #: Consumers of which a permit was refused, or whose messages were not peeked for because none was free.
        self._refused: set[str] = set()
        #: A peek behind the marks left messages out.
        self._passed_over = False
        #: Notified when a permit is free that was refused; set by the state of the queue.
        self.events: ReceiverEvents = NoPump()
        self._lock = threading.Lock()

    def __contains__(self, name: str) -> bool:
        """Whether this consumer has a limit."""
        return name in self._limits

    # -- around claims and peeks --------------------------------------------------------------------------------------

    @contextmanager
    def around_claim(self, claim: AbstractContextManager[ActiveClaim]) -> Iterator[ActiveClaim]:
        """Around a claim of the calling receiver."""
        full = self.take_permits()
        with claim as active:
            if full:
                visible = self._without(active.ranges, full)
                if active.behind and any(
                    seq_range.high != MAX_SEQ for seq_range in active.ranges if seq_range not in visible
                ):
                    active.behind = ()  # it does not say that nothing is there
                active.ranges = visible
            yield active

    def visible(self, ahead: Sequence[SeqRange], behind: Sequence[SeqRange]) -> tuple[list[SeqRange], list[SeqRange]]:
        """The ranges of a peek without those of consumers that have no free permit."""
        with self._lock:
            full = [name for name, taken in self._taken.items() if taken >= self._limits[name]]
            self._refused.update(full)
        if not full:
            return list(ahead), list(behind)
        return self._without(ahead, full), self._without(behind, full)

    def _without(self, ranges: Sequence[SeqRange], full: Collection[str]) -> list[SeqRange]:
        names = {recipient for name in full for recipient in self._recipients[name]}
        visible = [seq_range for seq_range in ranges if seq_range.recipient not in names]
        if any(seq_range.high != MAX_SEQ for seq_range in ranges if seq_range.recipient in names):
            self._passed_over = True
        return visible

    def take_permits(self) -> list[str]:
        """Take a permit of each consumer that has one for the calling receiver; return the consumers that have none."""
        thread = threading.get_ident()
        full: list[str] = []
        with self._lock:
            permits = self._permits.setdefault(thread, Permits())
            for name, limit in self._limits.items():
                if name in permits.waiting:
                    continue
                if self._taken[name] < limit:
                    self._taken[name] += 1
                    permits.waiting[name] = set()
                else:
                    full.append(name)
            self._refused.update(full)
        return full

    # -- what a receiver has in flight --------------------------------------------------------------------------------

    def claimed(self, rows: Sequence[Claimed]) -> None:
        """The calling receiver has these messages in flight now, and no others."""
        with self._releasing():
            permits = self._permits.get(threading.get_ident())
            if permits is None:
                return
            permits.running = ""
            for waiting in permits.waiting.values():
                waiting.clear()
            for row in rows:
                name = self._consumer.get(row[RECIPIENT])
                if name is not None and name in permits.waiting:
                    permits.waiting[name].add(row[SEQ])
            self._release_unused(permits)

    def returned(self, seqs: Sequence[int]) -> None:
        """These were released, by their receiver or, while that is busy with another one, by the service that renews
        leases."""
        with self._releasing():
            for permits in self._permits.values():
                for name, waiting in list(permits.waiting.items()):
                    if waiting and not waiting.difference(seqs) and name != permits.running:
                        self._release(permits, name)
                    else:
                        waiting.difference_update(seqs)

    def leave(self) -> None:
        """The calling receiver has nothing in flight."""
        with self._releasing():
            permits = self._permits.pop(threading.get_ident(), None)
            if permits is not None:
                for name in list(permits.waiting):
                    self._release(permits, name)

    def around_handler(self, registration: Registration, call: Call) -> Call:
        """The handler of a consumer of this queue, with or without a limit: while it runs, the receiver needs no other
        permits."""
        name, takes_batch = registration.name, registration.takes_several

        def called(message: Any, context: Any) -> None:
            self._begin(name, [item.seq for item in context] if takes_batch else [context.seq])
            call(message, context)

        return called

    def _begin(self, name: str, seqs: Sequence[int]) -> None:
        with self._releasing():
            permits = self._permits.get(threading.get_ident())
            if permits is not None:
                permits.running = name
                if name in permits.waiting:
                    permits.waiting[name].difference_update(seqs)
                self._release_unused(permits)

    # -- under the lock -----------------------------------------------------------------------------------------------

    @contextmanager
    def _releasing(self) -> Iterator[None]:
        """Under the lock; afterwards the pump is notified of permits that were refused and are free now."""
        with self._lock:
            yield
            wanted = {name for name in self._refused if self._taken[name] < self._limits[name]}
            self._refused -= wanted
            passed_over = bool(wanted) and self._passed_over
            if wanted:
                self._passed_over = False
        if wanted:
            self.events.permit_freed(passed_over)

    def _release_unused(self, permits: Permits) -> None:
        """Release the permits of consumers without a message in the batch."""
        for name, waiting in list(permits.waiting.items()):
            if not waiting and name != permits.running:
                self._release(permits, name)

    def _release(self, permits: Permits, name: str) -> None:
        del permits.waiting[name]
        self._taken[name] -= 1


def limiter_of(registrations: Iterable[Registration]) -> ConsumerLimiter | None:
    """The limiter of those consumers that have a limit; None: none has."""
    limited = [registration for registration in registrations if registration.options["concurrency"] is not None]
    return ConsumerLimiter(limited) if limited else None


#: Seconds of a handler that are more than a claim and an ack.
SLOW_HANDLER = 0.005


class BatchSizer:
    """The batch size ``n`` of one receiver."""

    __slots__ = ("_average", "_fits", "_max_bytes", "_target", "_weight", "limit", "n")

    def __init__(self, limit: int, target_seconds: float, max_bytes: int = sys.maxsize) -> None:
        self.limit = limit
        self.n = 1
        self._target = target_seconds
        self._average = 0.0
        self._max_bytes = max_bytes
        self._weight = 0.0
        #: How many messages have so many bytes.
        self._fits = limit

    def at_most(self, limit: int) -> BatchSizer:
        """Another sizer, with the same targets and a lower limit."""
        return BatchSizer(min(limit, self.limit), self._target, self._max_bytes)

    @property
    def is_slow(self) -> bool:
        """Whether a handler takes longer than a claim and an ack, so that several receivers with one message each are
        worth more than one with several. Not known of those that take batches."""
        return self._average > SLOW_HANDLER

    def weigh(self, rows: Sequence[Claimed]) -> None:
        """A claim has brought these rows."""
        weight = sum([len(row[BODY] or b"") for row in rows]) / len(rows)
        # As with the time: heavier counts at once, lighter by a third.
        self._weight = weight if weight > self._weight else self._weight * 0.7 + weight * 0.3
        self._fits = max(1, int(self._max_bytes / self._weight)) if self._weight else self.limit
        self.n = min(self.n, self._fits)

    def observe(self, count: int, seconds: float, *, full: bool = True) -> None:
        """The handlers of ``count`` messages took ``seconds``. ``full``: their claim got as many as it asked for."""
        average = seconds / count
        # Slower than expected counts at once, faster by a third.
        self._average = average if average > self._average else self._average * 0.7 + average * 0.3
        wanted = int(self._target / self._average) if self._average else self.limit
        # Only a full batch says that a larger one would have been filled.
        ceiling = self.n * 2 if full and count >= self.n else self.n
        self.n = max(1, min(wanted, ceiling, self.limit, self._fits))


class WholeBatches(BatchSizer):
    """As many as the largest batch of a consumer, whatever its handler takes. Only bodies bound it."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit, 1.0, settings.MAX_BATCH_BYTES)
        self.n = limit

    def weigh(self, rows: Sequence[Claimed]) -> None:
        self.n = self.limit
        super().weigh(rows)

    def observe(self, count: int, seconds: float, *, full: bool = True) -> None:
        """The size stays as it is."""


class Multiples(WholeBatches):
    """Several batches a claim where handlers are fast: calls of 100, claimed and acked by 500, make a fifth of the
    round trips."""

    def __init__(self, batch: int, max_batch: int, target_seconds: float) -> None:
        super().__init__(batch)
        self._batch, self._time = batch, target_seconds
        self.limit = self._fits = max(1, max_batch // batch) * batch

    def weigh(self, rows: Sequence[Claimed]) -> None:
        n = self.n
        super().weigh(rows)
        self.n = min(n, self._fits)

    def observe(self, count: int, seconds: float, *, full: bool = True) -> None:
        wanted = int(self._time * count / seconds) if seconds else self.limit
        ceiling = self.n * 2 if full and count >= self.n else self.n
        self.n = max(self._batch, min(wanted, ceiling, self.limit) // self._batch * self._batch)
        self.n = min(self.n, max(1, self._fits))
