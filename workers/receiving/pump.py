"""The pump: the scheduler of one queue in one worker process, and what a called receiver does.

The scheduler peeks and decides how many receivers are worth calling; it never runs a handler. A receiver claims,
handles and ends its own batches on its own thread and connection (``receiver_pool``, ``receivers``).

    asleep     --a wake-up, or the peek delay is over--> peeking
    peeking    --nothing--> asleep
               --fewer messages than workers, not this worker's turn--> peeking again some milliseconds later
               --n messages--> calls as many receivers as they are worth, each for its share --> asleep
    a receiver --a full claim--> continues; while it handles, the pump peeks for more (GROW_WAIT)
               --its share was there--> idle; the pump peeks at once
               --a claim that was not full--> idle; the pump peeks once more soon, for what a throttled wake-up did
                 not announce, and sooner (GROW_WAIT) where another claim had given way to it
               --an empty claim--> idle; the pump peeks again after a wait that doubles from EMPTY_WAIT to the
                 peek delay

What a peek found is a hint: a message may be gone, or leased to another worker, when it is claimed. So a wake-up always
calls a receiver while one is idle, and the wait of a new message does not depend on the handlers of others; and an
empty claim never leads to the next one at once. A single worker needs no peek to know that a wake-up is for it.

Many workers on a small backlog divide it without communicating: all of them find the same messages, each knows its rank
among the live workers of the queue (from the heartbeat), and the first message's seq says which of them comes first, so
that their shares add up. Eight workers on 5 to 34 messages: 1 % of the claims are in vain; when each took all of it for
its own, 32 %."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Collection, Sequence
from time import monotonic
from typing import Any

from django.db import Error, connections

from queueapp.conf import settings
from queueapp.flow.filters import SubscriberFilter
from queueapp.flow.rate_limit import SHORTEST_WAIT, RateLimit
from queueapp.receiving.low_water_marks import WINDOWS_PER_CYCLE, LowWaterMarks, marks_for
from queueapp.sending.isolation import close_isolated
from queueapp.services.connection_timeouts import ResponseDeadline
from queueapp.sql import queue_sql
from queueapp.sql.claims import MAX_SEQ, PeekResult

from .claim_tracker import PATIENCE
from .events import InFlightSlot
from .handlers import HandlerTable
from .limits import InFlightLimit
from .quarantine import Quarantine
from .queue_state import QueueHealth, QueueState, Stats
from .receiver_pool import ReceiverPool
from .receivers import Receiver, receiver_class_for
from .receivers.outcomes import receive_barriers

#: The first wait after an empty claim, in seconds.
EMPTY_WAIT = 0.01
#: Skip ranges, or parts of them, that a peek reads again.
REREADS = 3
#: After more empty claims in a row than this, no earlier peek covers for a throttled wake-up.
COVERING = 3
#: So many seconds after a full claim the pump checks whether more receivers are of use, and after a claim that came
#: back short below another one, whether messages were sent meanwhile: too late for the one, and the other one claimed
#: above them.
GROW_WAIT = 0.005
#: What a peek found holds for so many seconds where other workers peek as well: eight of them on two cores that take
#: one message at a time were in vain 1.4 % of the time with it, 3 % with 10 ms, 5 % with 20 ms.
PEEK_LIFETIME = 0.005
#: Seconds to wait per position in the queue when it is another worker's turn.
TURN = 0.003


def share_of_backlog(waiting: int, first: int, rank: int, workers: int) -> int:
    """How many of so many messages this worker takes before it peeks again; 0: fewer than workers, not its turn."""
    share, remainder = divmod(waiting, workers)
    return share + ((rank - first) % workers < remainder)


def queue_position(first: int, rank: int, workers: int) -> int:
    """After how many others it is this worker's turn to take the first message."""
    return (rank - first) % workers


class PeekSchedule:
    """When the pump peeks next, and why. Receivers, wake-ups and the pump write it without a lock: each attribute is
    one fact, and a lost update costs one peek."""

    def __init__(self) -> None:
        #: Set to end the pump's wait.
        self.wake = threading.Event()
        #: Peek at once.
        self.is_due = True
        #: Peek at this time, for what a throttled wake-up did not announce.
        self.covered_at = 0.0
        #: A wake-up found no idle receiver: the first that is done claims again.
        self.unserved = False
        #: When to check whether more receivers are of use, while one handles what a full claim got; or for what a claim
        #: left to be found.
        self.grow_at: float | None = None
        #: A claim got nothing, and held back a key because of its rate: peek at this time.
        self.held_back_until = 0.0
        #: Claims in a row that got nothing.
        self.empty_claims = 0
        #: The first message of the last backlog that was left to other workers.
        self.deferred = 0
        #: When the last peek of the pump began; and the last one that was answered, the pump's own or a receiver's.
        self.peeked_at = self.answered_at = 0.0
        #: A receiver has handled all of its share.
        self.share_used_up = False

    def peek_now(self) -> None:
        """Let the pump peek at once."""
        self.is_due = True
        self.wake.set()

    def covering(self, next_peek: float) -> float:
        """When to peek: soon after a receiver was done, and no sooner, since a throttled wake-up may not have announced
        what was sent meanwhile. Where claims are in vain again and again, peeks have found that since; what others hold
        is not to be claimed twenty times a second. And not later than a key may be claimed again."""
        if self.held_back_until > self.peeked_at:
            next_peek = min(next_peek, self.held_back_until)
        if self.empty_claims > COVERING:
            return next_peek
        return min(next_peek, self.covered_at) if self.covered_at > self.peeked_at else next_peek


class QueuePump:
    """Receives one queue in this process until ``stopping`` is set. ``run`` is the body of its thread. Implements
    ``ReceiverEvents``."""

    def __init__(
        self,
        queue: Any,
        alias: str,
        *,
        stopping: threading.Event,
        slots: Sequence[InFlightSlot] | None = None,
        concurrency: int | None = None,
        handlers: HandlerTable | None = None,
        quarantine: Quarantine | None = None,
        backlog: int | None = None,
        filter: str = "",
        only_consumers: Collection[str] = (),
    ) -> None:
        """``backlog`` and ``filter`` are what this process subscribes with; see ``InFlightLimit`` and
        ``SubscriberFilter``. ``only_consumers``: see ``HandlerTable``."""
        self.queue = queue
        self.alias = alias
        self.stopping = stopping
        self.handlers = handlers or HandlerTable(queue, only_consumers)
        delivery = queue.delivery
        self.peek_delay = (delivery.peek_delay or settings.PEEK_DELAY).total_seconds()
        self.peek_limit = delivery.max_records_to_peek or settings.MAX_RECORDS_TO_PEEK
        #: See ``CLAIM_PAUSE``; in seconds.
        self._claim_pause = settings.CLAIM_PAUSE.total_seconds()
        #: This worker's rank among the live workers of the queue, and how many they are; written by the heartbeat.
        self.rank, self.workers = 0, 1
        self.paused = False
        self.schedule = PeekSchedule()
        levels = tuple((r, p) for p in range(delivery.priorities - 1, -1, -1) for r in self.handlers.recipients)
        self.marks: LowWaterMarks = marks_for(
            queue, alias, levels, bool(queue_sql(queue, connections[alias]).table.claim_by)
        )
        quarantine = quarantine or Quarantine()
        self.state = QueueState(
            queue,
            alias,
            self,
            handlers=self.handlers,
            marks=self.marks,
            quarantine=quarantine,
            filter=SubscriberFilter(filter, queue._meta.label) if filter else None,
        )
        self.pool = ReceiverPool(
            self.state.label,
            alias,
            self,
            concurrency=concurrency or delivery.concurrency or settings.CONCURRENCY,
            slots=slots,
        )
        quarantine.pools.append(self.pool)
        self.backlog = InFlightLimit(self.pool, backlog, delivery.max_per_subscription_backlog, delivery.dispatches)

    @property
    def health(self) -> QueueHealth:
        """Breakers and throttle of the queue in this process."""
        return self.state.health

    @property
    def stats(self) -> Stats:
        """What was counted so far."""
        return self.state.stats

    @property
    def subscriber(self) -> uuid.UUID:
        """The ``lease_owner`` of this process."""
        return self.state.subscriber

    @property
    def receivers(self) -> list[Receiver]:
        """The receivers that there are now."""
        return self.pool.receivers

    @property
    def crash_tracking(self) -> bool:
        """See ``QueueState.crash_tracking``."""
        return self.state.crash_tracking

    @crash_tracking.setter
    def crash_tracking(self, crash_tracking: bool) -> None:
        self.state.crash_tracking = crash_tracking

    # -- from other threads ---------------------------------------------------------------------------------------

    def wake(self) -> None:
        """A message was sent: a receiver is to claim it now. Safe from any thread, not from a signal handler."""
        self.schedule.empty_claims = 0
        if self.workers == 1 and self.may_submit():
            # Straight to the claim. With all receivers busy, the first that is done claims again.
            self.schedule.unserved = not self.pool.submit(1)
            return
        self.schedule.peek_now()

    def set_concurrency(self, concurrency: int) -> None:
        """Change how many receivers there may be at once, at any time. Safe from any thread.

        Raised: more receivers are called at the next peek. Lowered: receivers above it end with the message in flight.
        """
        self.pool.set_concurrency(concurrency)
        self.schedule.peek_now()

    # -- the scheduler --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Peek and call receivers until stopping."""
        schedule = self.schedule
        next_peek = monotonic()
        try:
            while not self.stopping.is_set():
                wait = min(next_peek, schedule.grow_at or next_peek) - monotonic()
                if wait > 0 and not schedule.is_due:
                    self.wait(wait)
                    schedule.wake.clear()
                    next_peek = schedule.covering(next_peek)
                    continue
                claims = self.state.claims
                asked = schedule.is_due
                if asked:
                    schedule.is_due = False  # and not otherwise: a request that comes just now would be lost
                hinted = schedule.grow_at is not None and monotonic() < next_peek and not asked
                growing = hinted and not claims.has_gap
                schedule.grow_at, claims.has_gap = None, False
                if self.paused or (growing and not self.pool.busy):
                    next_peek = max(next_peek, monotonic() + (self.peek_delay if self.paused else 0))
                    continue
                self.peek_and_submit()
                next_peek = schedule.covering(monotonic() + self.seconds_to_next_peek())
        finally:
            self.pool.close()
            connections[self.alias].close()
            close_isolated()

    def wait(self, seconds: float) -> bool:
        """Wait until woken, True, or for so long."""
        return self.schedule.wake.wait(seconds)

    def seconds_to_next_peek(self) -> float:
        """How long to wait after a peek."""
        rate = self.state.rate
        if rate is not None and (until_token := rate.wait):
            return min(until_token, self.peek_delay)  # nothing can be claimed before
        if not self.schedule.empty_claims:
            # A new process on an old queue rescans it in windows: all of them within a peek delay, not one per delay.
            due = self.state.claims.rescan_due_at
            if due is None:
                return self.peek_delay
            return min(max(due - monotonic(), self.peek_delay / WINDOWS_PER_CYCLE), self.peek_delay)
        wait: float = EMPTY_WAIT * 2 ** min(self.schedule.empty_claims, 20) * random.uniform(0.5, 1.0)
        return min(wait, self.peek_delay)

    def may_submit(self) -> bool:
        """Whether a receiver may be called for messages."""
        rate = self.state.rate
        return self._may_work() and not self.backlog.takes_none and not (rate is not None and rate.wait)

    def _may_work(self) -> bool:
        return not (self.paused or self.stopping.is_set() or (self.health.is_degraded and self.probing_receivers()))

    def peek_and_submit(self) -> None:
        """Peek once, and call the receivers that what was found is worth."""
        schedule = self.schedule
        schedule.peeked_at = monotonic()
        if self.state.rate is not None and self.state.rate.wait:
            return  # what it would find has to stay where it is
        if self.submit_for_assigned() and schedule.peeked_at - schedule.answered_at < PATIENCE:
            return  # where messages are shared out at each peek, the rescan continues all the same
        while not self.stopping.is_set():
            found = self.peek()
            waiting = 0 if found is None else found.ahead + found.behind
            barriers = self.state.barriers
            if found is not None and barriers is not None and barriers.is_due and self._may_work():
                # A barrier is for each worker: it is part of no worker's share.
                self.pool.submit(1)
            if not waiting:
                if found is not None:
                    schedule.empty_claims = schedule.deferred = 0
                return
            if not self.may_submit():
                return
            free = self.backlog.free
            if not free:
                schedule.unserved = True  # the receiver that ends messages of this process claims again
                return
            if waiting >= self.peek_limit:
                # More than was counted: all receivers, each until its claims are no longer full.
                self.pool.submit(1 if self.health.is_degraded else min(self.pool.concurrency, free))
                return
            assert found is not None
            waiting -= self.assigned_messages()
            if waiting <= 0:
                return
            share = share_of_backlog(waiting, found.first, self.rank, self.workers)
            if not share and schedule.deferred != found.first:
                # If the first message is still there at this worker's turn, the workers before it are busy: take it.
                schedule.deferred = found.first
                turn = queue_position(found.first, self.rank, self.workers) * TURN
                if schedule.wake.wait(turn) and schedule.is_due:
                    schedule.wake.clear()
                continue
            self._submit_for(max(1, share), free)
            return

    def submit_for_assigned(self) -> bool:
        """Call receivers for messages that other workers have assigned to this one; return whether there were any."""
        state = self.state
        if state.limited_claims is None or not self.may_submit():
            return False
        connection = connections[self.alias]
        try:
            with ResponseDeadline(connection):
                messages = state.limited_claims.assigned(connection, state.subscriber)
        except Error as error:
            self._peek_failed(error)
            return True
        if messages:
            # No other worker takes these, so there is no share to keep to.
            self.pool.submit(min(-(-messages // self._batch_size()), self.pool.idle))
        return bool(messages)

    def assigned_messages(self) -> int:
        """Messages that a peek counted and that busy receivers will claim. Those of a slow receiver may be claimed by
        others."""
        now = monotonic()
        shares = ((receiver.active_handler or receiver.active_callback, receiver) for receiver in self.pool.receivers)
        return self.pool.assigned + sum(
            receiver.share
            for active, receiver in shares
            if (active.started > now - GROW_WAIT if active else receiver.share_at > now - PATIENCE)
        )

    def _submit_for(self, messages: int, free: int) -> None:
        """Call receivers for so many messages, each for its share: one for each message, or for each batch where
        handlers are fast; no more than may be in flight besides (``free``). Of many workers each calls one: what they
        found is old by the time of their claims, and one receiver is in vain once at most."""
        receivers = min(-(-messages // self._batch_size()), self.pool.idle, free)
        if self.workers > 1 or self.health.is_degraded:
            receivers = min(receivers, 1)
        if receivers:
            self.pool.submit(receivers, -(-messages // receivers))

    def _batch_size(self) -> int:
        return max((self._batch_of(receiver) for receiver in self.pool.receivers), default=1)

    def peek(self) -> PeekResult | None:
        """Peek ahead of the marks and into the window of the rescan; None when the database failed."""
        state = self.state
        connection = connections[self.alias]
        started = monotonic()
        try:
            with ResponseDeadline(connection):
                state.prepare_peek()
                retreats = self.marks.retreats
                ahead, behind = state.peek_ranges()
                found = state.sql.claims.peek(connection, ahead, behind, self.peek_limit)
                state.skipped.reread(REREADS)
        except Error as error:
            self._peek_failed(error)
            return None
        self.schedule.answered_at = started
        state.stats.peeks += 1
        state.health.peek_breaker.success()
        state.claims.peeked(found, behind, monotonic() - started, retreats)
        return found

    def _peek_failed(self, error: Error) -> None:
        self.health.retry_after(error, self.health.peek_breaker, connections[self.alias])
        self.marks.reconnected()
        self.schedule.is_due = True

    # -- a called receiver, on its own thread -----------------------------------------------------------------------

    def make_receiver(self, slot: InFlightSlot | None) -> Receiver:
        return receiver_class_for(self.queue.delivery, self.handlers)(self.state, slot)

    def run_receiver(self, receiver: Receiver, messages: int | None) -> None:
        receiver.share, receiver.share_at = messages or 0, monotonic()
        try:
            self.receive_messages(receiver, messages)
        finally:
            receiver.share = 0
            if self.state.limiter is not None:
                self.state.limiter.leave()

    def receive_messages(self, receiver: Receiver, messages: int | None) -> None:
        """Claim and handle until a claim is not full, or the share of so many messages is used up."""
        state, health, schedule = self.state, self.health, self.schedule
        answered_at = schedule.answered_at
        while self.may_continue():
            if messages is not None and self.workers > 1 and monotonic() - answered_at > PEEK_LIFETIME:
                # On a busy machine it took long to get here, and others peek at the same few messages.
                answered_at, messages = monotonic(), self._peek_share()
                if not messages:
                    return
            if health.throttled and self.probing_receivers() > 1:
                break
            limit = 1 if health.throttled else self._batch_of(receiver)
            if messages is not None:
                limit = min(limit, messages)
                receiver.share, receiver.share_at = messages, monotonic()
            try:
                if state.barriers is not None:
                    receive_barriers(receiver, state.barriers)  # which no backlog bounds
                if self.backlog.takes_none:
                    return
                if self.backlog.limited and not (limit := self.backlog.reserve(receiver, limit)):
                    schedule.unserved = True  # the receiver that ends messages of this process claims again
                    return
                if state.rate is None:
                    count = receiver.receive(limit)
                elif (count := self._receive_at_rate(receiver, state.rate, limit)) < 0:
                    schedule.wake.set()  # the pump waits for the next token
                    return
                if state.barriers is not None and state.barriers.release():
                    schedule.peek_now()
            except Error as error:
                if not health.retry_after(error, health.breaker, connections[self.alias]):
                    break
                continue
            finally:
                receiver.reserved = 0
            if count:
                schedule.empty_claims = 0
            else:
                # The database answered; else the breaker would stay open until there is a message.
                health.breaker.success()
                state.stats.empty += 1
                schedule.empty_claims += 1
                if (turns := state.sql.claims.turns) is not None and turns.held_back_until:
                    schedule.held_back_until = max(turns.held_back_until, monotonic() + SHORTEST_WAIT)
                if state.limiter is not None:
                    state.limiter.leave()  # receivers that were refused a permit go first
            if not receiver.full:
                if not schedule.unserved:
                    return
                schedule.unserved = False  # a message was sent while all receivers were busy
            if messages is not None:
                messages -= count
                if messages <= 0:
                    schedule.share_used_up = True  # all of them were there, so there may be more
                    return
            if self._claim_pause:
                self.stopping.wait(self._claim_pause)

    def _receive_at_rate(self, receiver: Receiver, rate: RateLimit, limit: int) -> int:
        """Claim and handle as many messages as there are tokens; returns how many were claimed, -1: there is none."""
        tokens = rate.take(limit)
        if not tokens:
            return -1
        receiver.reserved = tokens  # it gathers no more than that for a batch consumer
        count = receiver.receive(tokens)
        # Not after an error: messages may have been claimed.
        rate.give_back(max(0, tokens - count))
        return count

    def _batch_of(self, receiver: Receiver) -> int:
        """How many messages a receiver claims at once. Where few may be in flight, a batch of a slow handler would keep
        from the other receivers what they could handle meanwhile."""
        allowed = self._allowed_in_flight() if receiver.size.is_slow else None
        if allowed is None:
            return receiver.max_batch
        return min(receiver.max_batch, max(1, allowed // self.pool.concurrency))

    def _allowed_in_flight(self) -> int | None:
        """How many messages this process may have in flight, by its limit and by its part of the queue's; None: as many
        as its batches take."""
        limited = self.state.limited_claims
        shared = self.queue.delivery.max_concurrent_per_key if limited is None else limited.limit
        limits = [self.backlog.granted(), None if shared is None else max(1, shared // self.workers)]
        return min((limit for limit in limits if limit is not None), default=None)

    def _peek_share(self) -> int:
        """How many messages are this worker's share, by a peek of the receiver's own."""
        found = self.peek()
        waiting = 0 if found is None else min(found.ahead + found.behind, self.peek_limit)
        if found is None or not waiting:
            return 0
        # What others left until this worker's turn is still its own; or where peeks are slow no worker ever takes it.
        share = share_of_backlog(waiting, found.first, self.rank, self.workers)
        return share or int(found.first == self.schedule.deferred)

    def probing_receivers(self) -> int:
        """While degraded, one receiver probes: how many do."""
        active = [receiver.active_handler or receiver.active_callback for receiver in self.pool.receivers]
        not_probing = sum(handler is not None and not self.health.is_probing(handler.started) for handler in active)
        return max(0, self.pool.busy - not_probing)

    # -- events of receivers ------------------------------------------------------------------------------------------

    def may_continue(self) -> bool:
        return not (self.stopping.is_set() or self.paused) and self.pool.may_continue()

    def claim_was_full(self) -> None:
        schedule = self.schedule
        if (
            schedule.grow_at is None
            and self.pool.idle
            and not self.health.is_degraded
            and not self.state.at_limit
            and self.backlog.free
        ):
            schedule.grow_at = monotonic() + GROW_WAIT * self.workers
            schedule.wake.set()

    def messages_available(self) -> None:
        self.schedule.peek_now()

    def permit_freed(self, passed_over: bool) -> None:
        if passed_over:
            self.marks.retreat(MAX_SEQ)  # retreats none: what lies just behind the marks is peeked at again
        self.schedule.peek_now()

    def receiver_done(self) -> None:
        schedule = self.schedule
        schedule.covered_at = monotonic() + settings.NOTIFY_INTERVAL.total_seconds()
        if self.state.claims.has_gap and schedule.grow_at is None and schedule.empty_claims <= COVERING:
            schedule.grow_at = monotonic() + GROW_WAIT
        # Many workers on one backlog: what the other receivers of this one are to claim must not be counted again
        # meanwhile.
        if schedule.share_used_up and (self.workers == 1 or not self.pool.busy):
            schedule.share_used_up, schedule.is_due = False, True
        schedule.wake.set()
