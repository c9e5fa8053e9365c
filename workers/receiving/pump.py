"""The scheduler of one queue in one worker process. It looks, decides how many receive tasks are worth waking, and never
runs a handler; a task claims, handles and ends its own batches on its own connection (``crew``, ``strategies``).

    asleep    --a wake-up, or the peek delay is over--> looking
    looking   --nothing--> asleep
              --fewer messages than workers, not our turn--> looking again some milliseconds later
              --n messages--> calls as many tasks as they are worth, each for its share --> asleep
    a task    --a full claim--> goes on and needs nobody's leave; while it handles, the pump looks for more (GROW_WAIT)
              --its share was there--> idle; the pump looks at once
              --a claim that was not full--> idle; the pump looks once more soon, for what a throttled wake-up did not tell,
                and sooner (GROW_WAIT) where another claim had given way to it
              --an empty claim--> idle; the pump looks again after a wait that doubles from EMPTY_WAIT to the peek delay

What a look saw is a hint: a message may be gone, or in somebody's hands, when it is claimed. So a wake-up always calls a
task while one is free, and the wait of a new message does not depend on the handlers of others; and an empty claim never
leads to the next one at once. One worker alone needs no look to know that a wake-up is for it.
"""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Collection, Sequence
from time import monotonic
from typing import Any

from django.db import Error, connections

from queueapp.circuit_breaker import CircuitBreaker
from queueapp.conf import settings
from queueapp.flow.filters import SubscriberFilter
from queueapp.receiving.low_water_marks import WINDOWS_PER_CYCLE, LowWaterMarks
from queueapp.receiving.priority64_marks import marks_for
from queueapp.sending.isolation import close_isolated
from queueapp.services.connection_timeouts import ResponseDeadline
from queueapp.sql import queue_sql
from queueapp.sql.claims import PeekResult

from .claim_tracker import PATIENCE
from .handlers import HandlerTable
from .prefetch_limit import InFlightLimit
from .quarantine import Quarantine
from .queue_state import QueueState
from .receiver_pool import ReceiverPool
from .receivers import Receiver, receiver_class_for
from .receives import COVERING, GROW_WAIT, Receives
from .slot import Slot
from .stats import Stats
from .work_sharing import TURN, queue_position, share_of_backlog

#: The first wait after an empty claim, in seconds.
EMPTY_WAIT = 0.01
#: Pieces of stretches without anything for this process that a look reads again.
REREADS = 3


class QueuePump(Receives):
    """Receives one queue in this process until ``stopping`` is set. ``run`` is the body of its thread."""

    def __init__(
        self,
        queue: Any,
        alias: str,
        *,
        stopping: threading.Event,
        slots: Sequence[Slot] | None = None,
        concurrency: int | None = None,
        handlers: HandlerTable | None = None,
        quarantine: Quarantine | None = None,
        backlog: int | None = None,
        filter: str = "",
        lane: Collection[str] = (),
    ) -> None:
        """``backlog`` and ``filter`` are what this process subscribes with; see ``InFlightLimit`` and ``SubscriberFilter``; ``lane``: see
        ``HandlerTable``."""
        super().__init__()
        self.queue = queue
        self.alias = alias
        self.stopping = stopping
        self.handlers = handlers or HandlerTable(queue, lane)
        delivery = queue.delivery
        self.peek_delay = (delivery.peek_delay or settings.PEEK_DELAY).total_seconds()
        self.peek_limit = delivery.max_records_to_peek or settings.MAX_RECORDS_TO_PEEK
        levels = tuple((r, p) for p in range(delivery.priorities - 1, -1, -1) for r in self.handlers.recipients)
        self.marks: LowWaterMarks = marks_for(
            queue, alias, levels, bool(queue_sql(queue, connections[alias]).table.claim_by)
        )
        quarantine = quarantine or Quarantine()
        self.state = QueueState(
            queue,
            alias,
            handlers=self.handlers,
            floors=self.marks,
            quarantine=quarantine,
            stopping=stopping,
            more=self._more,
            again=self._look_now,
            may_go_on=self._may_go_on,
            filter=SubscriberFilter(filter, queue._meta.label) if filter else None,
        )
        self.pool = ReceiverPool(
            self.state.label,
            alias,
            lambda slot: receiver_class_for(delivery, self.handlers)(self.state, slot),
            self._work,
            self._task_ended,
            concurrency=concurrency or delivery.concurrency or settings.CONCURRENCY,
            slots=slots,
        )
        quarantine.pools.append(self.pool)
        allowed = delivery.max_per_subscription_backlog
        self.backlog = InFlightLimit(
            backlog, allowed, delivery.dispatches, lambda: self.pool.receivers, lambda: self.pool.concurrency
        )

    @property
    def subscriber(self) -> uuid.UUID:
        """What ``lease_owner`` names."""
        return self.state.subscriber

    @property
    def stats(self) -> Stats:
        """What was counted so far."""
        return self.state.stats

    @property
    def receivers(self) -> list[Receiver]:
        """The receive tasks there are now."""
        return self.pool.receivers

    @property
    def crash_tracking(self) -> bool:
        """See ``QueueState.careful``."""
        return self.state.crash_tracking

    @crash_tracking.setter
    def crash_tracking(self, crash_tracking: bool) -> None:
        self.state.crash_tracking = crash_tracking

    # -- from other threads ---------------------------------------------------------------------------------------

    def wake(self) -> None:
        """A message was sent: somebody is to take it now. Safe from any thread, not from a signal handler."""
        self._empty_claims = 0
        if self.workers == 1 and self._may_call():
            # Straight to the claim. With all tasks busy, the first to have done goes on to it.
            self._unserved = not self.pool.submit(1)
            return
        self._look_now()

    def set_concurrency(self, concurrency: int) -> None:
        """Change how many receive tasks there may be at once, in the middle of whatever is going on. Safe from any thread.

        Raised: more tasks are called at the next look. Lowered: tasks above it end with the message they have in hand.
        """
        self.pool.set_concurrency(concurrency)
        self._look_now()

    def degraded_text(self) -> str:
        """Which breakers are not disarmed, and the throttle, in words; '' when all is well."""
        return self.state.degraded_text()

    @property
    def throttled(self) -> bool:
        """See ``QueueState.throttled``."""
        return self.state.throttled

    # -- the scheduler --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Look, and call tasks, until stopping."""
        next_look = monotonic()
        try:
            while not self.stopping.is_set():
                wait = min(next_look, self._grow_at or next_look) - monotonic()
                if wait > 0 and not self._now:
                    self._wait(wait)
                    self._wake.clear()
                    next_look = self._cover(next_look)
                    continue
                claiming = self.state.claims
                asked = self._now
                if asked:
                    self._now = False  # and not else: somebody may be asking now, and would not be heard
                hinted = self._grow_at is not None and monotonic() < next_look and not asked
                growing = hinted and not claiming.left
                self._grow_at, claiming.left = None, False
                if self.paused or (growing and not self.pool.busy):
                    next_look = max(next_look, monotonic() + (self.peek_delay if self.paused else 0))
                    continue
                self._look()
                next_look = self._cover(monotonic() + self._until_next_look())
        finally:
            self.pool.close()
            connections[self.alias].close()
            close_isolated()

    def _wait(self, seconds: float) -> bool:
        """Wait until woken, True, or for so long."""
        return self._wake.wait(seconds)

    def _cover(self, next_look: float) -> float:
        """Look once more soon after a task has ended, and not before: what was sent meanwhile a throttled wake-up may not
        have told. Where claims are in vain again and again, looks have seen that since; what is held is not to be claimed
        twenty times a second."""
        if self._empty_claims > COVERING:
            return next_look
        return min(next_look, self._covered_at) if self._covered_at > self._looked_at else next_look

    def _until_next_look(self) -> float:
        if not self._empty_claims:
            # A fresh process on an old queue looks through it in windows: all of them within a peek delay, not one.
            due = self.state.claims.goes_on_at
            if due is None:
                return self.peek_delay
            return min(max(due - monotonic(), self.peek_delay / WINDOWS_PER_CYCLE), self.peek_delay)
        wait: float = EMPTY_WAIT * 2 ** min(self._empty_claims, 20) * random.uniform(0.5, 1.0)
        return min(wait, self.peek_delay)

    def _may_call(self) -> bool:
        """Whether a task may be called for messages."""
        return self._may_work() and not self.backlog.takes_none

    def _may_work(self) -> bool:
        return not (self.paused or self.stopping.is_set() or (self.state.is_degraded and self._feeling()))

    def _look(self) -> None:
        """Look once, and call the tasks that what was seen is worth."""
        self._looked_at = monotonic()
        if self._take_up() and self._looked_at - self._seen_at < PATIENCE:
            return  # where something is shared out at each look the rescan goes on all the same
        while not self.stopping.is_set():
            seen = self._peek()
            waiting = 0 if seen is None else seen.ahead + seen.behind
            if seen is not None and self.state.barriers is not None and self.state.barriers.called and self._may_work():
                # A barrier is for each worker: no share of it is another's.
                self.pool.submit(1)
            if not waiting:
                if seen is not None:
                    self._empty_claims = self._deferred = 0
                return
            if not self._may_call():
                return
            if waiting >= self.peek_limit:
                # More than was counted: all for themselves, each until its claims are not full any more.
                self.pool.submit(1 if self.state.is_degraded else self.pool.concurrency)
                return
            assert seen is not None
            waiting -= self._promised()
            if waiting <= 0:
                return
            mine = share_of_backlog(waiting, seen.first, self.rank, self.workers)
            if not mine and self._deferred != seen.first:
                # If the first message is still there after our place in the line, those before us are busy: we take it.
                self._deferred = seen.first
                if self._wake.wait(queue_position(seen.first, self.rank, self.workers) * TURN) and self._now:
                    self._wake.clear()
                continue
            self._call_for(max(1, mine))
            return

    def _take_up(self) -> bool:
        """Call tasks for what others have shared out to this worker; whether there was any."""
        state = self.state
        if state.limited_claims is None or not self._may_call():
            return False
        connection = connections[self.alias]
        try:
            with ResponseDeadline(connection):
                messages = state.limited_claims.shared_out(connection, state.subscriber)
        except Error as error:
            state.retry_after(error, self.peek_breaker, connection)
            self.marks.reconnected()
            self._now = True
            return True
        if messages:
            # Nobody else takes these, so there is no share to keep to.
            self.pool.submit(min(-(-messages // self._batch_size()), self.pool.idle))
        return bool(messages)

    def _promised(self) -> int:
        """What was counted by a look and is promised to tasks at work; of what a slow one was promised others may take."""
        now = monotonic()
        shares = ((task.active_handler or task.active_callback, task) for task in self.pool.receivers)
        return self.pool.assigned + sum(
            task.share
            for running, task in shares
            if (running.started > now - GROW_WAIT if running else task.share_at > now - PATIENCE)
        )

    def _call_for(self, messages: int) -> None:
        """Call tasks for so many messages, each for its share: one for each, or for each batch where handlers are fast. Of many
        workers each calls one: what they saw is old by the time of their claims, and one task is in vain once at most."""
        tasks = min(-(-messages // self._batch_size()), self.pool.idle)
        if self.workers > 1 or self.state.is_degraded:
            tasks = min(tasks, 1)
        if tasks:
            self.pool.submit(tasks, -(-messages // tasks))

    def _batch_size(self) -> int:
        return max((task.size.n for task in self.pool.receivers), default=1)

    def _peek(self) -> PeekResult | None:
        """Peek ahead of the floors and into the rescan window; None when the database failed."""
        state = self.state
        connection = connections[self.alias]
        started = monotonic()
        try:
            with ResponseDeadline(connection):
                state.look_behind()
                came_down = self.marks.retreats
                ahead, behind = state.look()
                seen = state.sql.claims.peek(connection, ahead, behind, self.peek_limit)
                state.skipped.reread(REREADS)
        except Error as error:
            state.retry_after(error, self.peek_breaker, connection)
            self.marks.reconnected()
            self._now = True
            return None
        self._seen_at = started
        state.stats.peeks += 1
        state.peek_breaker.success()
        state.claims.seen(seen, behind, monotonic() - started, came_down)
        return seen

    @property
    def peek_breaker(self) -> CircuitBreaker:
        """See ``QueueState.peek_breaker``."""
        return self.state.peek_breaker
