"""What a called task does, on its own thread and connection: the part of a ``QueuePump`` that is not its scheduler.

It claims and handles until a claim is not full, or it has had its share, and says what it came across: the scheduler looks
once more soon after a task has ended, and sooner where more tasks may be of use.
"""

from __future__ import annotations

import threading
from time import monotonic

from django.db import Error, connections

from queueapp.conf import settings
from queueapp.sql.claims import PeekResult

from .prefetch_limit import InFlightLimit
from .queue_state import QueueState
from .receiver_pool import ReceiverPool
from .receivers import Receiver, barrier
from .work_sharing import share_of_backlog

#: So many empty claims in a row are followed by looks that come sooner than what a throttled wake-up did not tell is covered.
COVERING = 3
#: So long after a full claim, in seconds, whether more tasks are of use is looked at, and after one that came back short
#: below another one what was sent meanwhile: it came too late for the one, and the other one looked above it.
GROW_WAIT = 0.005
#: What a look saw is believed for so long, in seconds, where other workers look as well: eight of them on two cores that take
#: one message at a time were in vain 1.4 % of the time with it, 3 % with 10 ms, 5 % with 20 ms.
LOOK_LIFETIME = 0.005


class Receives:
    """The receiving part of a pump. What it shares with the scheduler is made here."""

    alias: str
    state: QueueState
    pool: ReceiverPool
    backlog: InFlightLimit
    stopping: threading.Event
    peek_limit: int

    def __init__(self) -> None:
        #: See ``CLAIM_PAUSE``; in seconds.
        self._claim_pause = settings.CLAIM_PAUSE.total_seconds()
        #: This worker's place among the live workers of the queue, and how many they are; kept by the heartbeat.
        self.rank, self.workers = 0, 1
        self.paused = False
        self._wake = threading.Event()
        #: It is to look at once; after so long, for what a throttled wake-up did not tell; a wake-up found no free task.
        self._now, self._covered_at, self._unserved = True, 0.0, False
        #: When it looks whether more tasks are of use, while one of them handles what a full claim gave it; or what was left.
        self._grow_at: float | None = None
        self._empty_claims = 0
        self._deferred = 0
        #: When its last look began; and the last one that saw something, its own or a task's.
        self._looked_at = self._seen_at = 0.0
        #: A task had all of its share.
        self._used_up = False

    def _peek(self) -> PeekResult | None:
        """See ``QueuePump``."""
        raise NotImplementedError

    def _look_now(self) -> None:
        self._now = True
        self._wake.set()

    def _feeling(self) -> int:
        """In trouble one task feels its way: how many do."""
        busy = [task.active_handler or task.active_callback for task in self.pool.receivers]
        elsewhere = sum(one is not None and not self.state.feels_its_way(one.started) for one in busy)
        return max(0, self.pool.busy - elsewhere)

    def _work(self, task: Receiver, messages: int | None) -> None:
        """What a called task does: claim and handle until a claim is not full, or it has had its share."""
        task.share, task.share_at = messages or 0, monotonic()
        try:
            self._receive(task, messages)
        finally:
            task.share = 0
            if self.state.limiter is not None:
                self.state.limiter.leave()

    def _receive(self, task: Receiver, messages: int | None) -> None:
        state = self.state
        seen_at = self._seen_at
        while self._may_go_on():
            if messages is not None and self.workers > 1 and monotonic() - seen_at > LOOK_LIFETIME:
                # On a busy machine it took long to get here, and others look at the same few messages.
                seen_at, messages = monotonic(), self._share_anew()
                if not messages:
                    return
            if state.throttled and self._feeling() > 1:
                break
            limit = 1 if state.throttled else task.most
            if messages is not None:
                limit = min(limit, messages)
                task.share, task.share_at = messages, monotonic()
            try:
                if state.barriers is not None:
                    barrier.receive(task, state.barriers)  # which no backlog bounds
                if self.backlog.takes_none:
                    return
                if self.backlog.limited and not (limit := self.backlog.reserve(task, limit)):
                    self._unserved = True  # whoever ends some of what this process holds goes on
                    return
                count = task.receive(limit)
                if state.barriers is not None and state.barriers.release():
                    self._look_now()
            except Error as error:
                if not state.retry_after(error, state.breaker, connections[self.alias]):
                    break
                continue
            finally:
                task.reserved = 0
            if count:
                self._empty_claims = 0
            else:
                state.breaker.success()  # it was answered; or the trouble would last until there is a message
                state.stats.empty += 1
                self._empty_claims += 1
                if state.limiter is not None:
                    state.limiter.leave()  # whoever it kept from looking goes first
            if not task.full:
                if not self._unserved:
                    return
                self._unserved = False  # something was sent while all tasks were busy
            if messages is not None:
                messages -= count
                if messages <= 0:
                    self._used_up = True  # all of them were there, so there may be more
                    return
            if self._claim_pause:
                self.stopping.wait(self._claim_pause)

    def _may_go_on(self) -> bool:
        return not (self.stopping.is_set() or self.paused) and self.pool.may_go_on()

    def _share_anew(self) -> int:
        """How many messages are this worker's to take, by a look of the task's own."""
        seen = self._peek()
        waiting = 0 if seen is None else min(seen.ahead + seen.behind, self.peek_limit)
        if seen is None or not waiting:
            return 0
        # What others left longer than our place in the line is still ours; or where looks are slow nobody ever takes it.
        return share_of_backlog(waiting, seen.first, self.rank, self.workers) or int(seen.first == self._deferred)

    def _more(self) -> None:
        """A claim was full: there may be more, and its handlers may take long."""
        if self._grow_at is None and self.pool.idle and not self.state.is_degraded:
            self._grow_at = monotonic() + GROW_WAIT * self.workers
            self._wake.set()

    def _task_ended(self) -> None:
        self._covered_at = monotonic() + settings.NOTIFY_INTERVAL.total_seconds()
        if self.state.claims.left and self._grow_at is None and self._empty_claims <= COVERING:
            self._grow_at = monotonic() + GROW_WAIT
        # Many workers on one backlog: what the others of this one were promised is not to be given away meanwhile.
        if self._used_up and (self.workers == 1 or not self.pool.busy):
            self._used_up, self._now = False, True
        self._wake.set()
