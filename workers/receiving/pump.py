"""The peek <-> receive state machine of one queue in one worker process, after NServiceBus' transports.

**peek**: a cheap estimate; nothing there -> wait one peek delay, or until a wake-up. Something there -> **receive**: the
pump's own thread becomes the first receive task; further tasks join after consecutive successes while the estimate
says there is more, never beyond the concurrency. The first empty receive (``END_AFTER``) ends the round, back to peek.

Many workers on one small backlog must not all claim it: an estimate is spent as messages are claimed and peeked anew
when it is spent or stale, a claim takes no more than this worker's share of it, and of a backlog smaller than the
number of workers only those take part whose turn it is (``seq`` modulo rank), the others a few milliseconds later.
"""

from __future__ import annotations

import logging
import random
import threading
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager
from time import monotonic
from typing import Any

from django.db import Error, connections

from queueapp.conf import settings
from queueapp.messages import new_id
from queueapp.receiving.floors import Floors, floors_of
from queueapp.sending.isolation import close_isolated
from queueapp.sql import ErrorKind, backend_of, queue_sql
from queueapp.sql.base import Claimed, Range

from ..connections.circuit_breaker import CircuitBreaker, State
from ..connections.dead_peers import Answering
from ..processes.slots import Slot
from .claiming import Claiming, UnderWay
from .crew import Crew
from .handling import Handlers
from .quarantine import Quarantine
from .rounds import Estimate, Round, Stats
from .strategies import STRATEGIES, Task

log = logging.getLogger("workers")

#: An uncapped estimate is believed this long; slower handlers peek before each claim, which costs them nothing. Eight
#: workers on two cores that take one message at a time: 1.4 % of the receives in vain; at 10 ms 3 %, at 20 ms 5 %.
ESTIMATE_LIFETIME = 0.005
#: A capped one this long at most, as long as claims come back full: counting costs the server a tenth of the claims, and
#: the other tasks wait for it.
CAPPED_LIFETIME = 1.0
#: Wait per place in the line when it is another worker's turn.
TURN = 0.003
#: Messages of unknown types that a process remembers, so as not to claim them again and again.
MAX_SKIP = 10_000


class QueuePump:
    """Receives one queue in this process until ``stopping`` is set. ``run`` is the body of its thread."""

    def __init__(
        self,
        queue: Any,
        alias: str,
        *,
        stopping: threading.Event,
        slots: Sequence[Slot] | None = None,
        concurrency: int | None = None,
        handlers: Handlers | None = None,
        quarantine: Quarantine | None = None,
    ) -> None:
        self.queue = queue
        self.alias = alias
        self.subscriber: uuid.UUID = new_id()
        self.stopping = stopping
        self.handlers = handlers or Handlers(queue)
        delivery = queue.delivery
        self.crew = Crew(
            queue._meta.label,
            alias,
            lambda slot: STRATEGIES[delivery.semantics](self, slot),
            self._work,
            concurrency=concurrency or delivery.concurrency or settings.CONCURRENCY,
            slots=slots,
            stopping=stopping,
        )
        self.peek_delay = (delivery.peek_delay or settings.PEEK_DELAY).total_seconds()
        self.peek_limit = delivery.max_records_to_peek or settings.MAX_RECORDS_TO_PEEK
        levels = tuple((r, p) for p in range(delivery.priorities - 1, -1, -1) for r in self.handlers.recipients)
        self.floors: Floors = floors_of(queue, alias, levels, bool(queue_sql(queue, connections[alias]).table.claim_by))
        self.claiming = Claiming(self.floors)
        self.skip: tuple[int, ...] = ()
        self.stats = Stats()
        label = queue._meta.label
        patience = settings.TIME_TO_TRIGGER_RECEIVE_CIRCUIT_BREAKER
        self.peek_breaker = CircuitBreaker(f"Peek of {label}", patience)
        self.breaker = CircuitBreaker(f"Receive from {label}", patience)
        self.store_breaker = CircuitBreaker(
            f"Store of delayed messages of {label}", settings.TIME_TO_TRIGGER_STORE_CIRCUIT_BREAKER
        )
        #: This worker's place among the live workers of the queue, and how many they are; kept by the heartbeat.
        self.rank, self.workers = 0, 1
        self.paused = False
        #: Receive one message at a time and record the attempt first; kept by the heartbeat (see ``CAREFUL_PERIOD``).
        self.careful = False
        self.quarantine = quarantine or Quarantine()
        self._consecutive_failures = 0
        self._wake = threading.Event()
        self._deferred = 0
        self._woken = False

    @property
    def tasks(self) -> list[Task]:
        """The receive tasks there are now."""
        return self.crew.tasks

    # -- from other threads ---------------------------------------------------------------------------------------

    def wake(self) -> None:
        """A message was sent: look now. Safe from any thread."""
        self._woken = True
        self._wake.set()

    def set_concurrency(self, concurrency: int) -> None:
        """Change how many receive tasks there may be at once, in the middle of whatever is going on. Safe from any thread.

        Raised: more tasks join the round at once. Lowered: tasks above it end with the message they have in hand.
        """
        self.crew.set_concurrency(concurrency)
        for round_ in {task.round for task in self.tasks}:
            if round_ is not None:
                for _ in range(concurrency - round_.active):
                    self._invite(round_)

    def came_back(self, seq: int, count: int = 1) -> None:
        """Messages from ``seq`` on were given back unhandled by this process."""
        self.stats.returned += count
        self.floors.lower(seq)

    def trouble(self) -> str:
        """Which breakers are not disarmed, and the throttle, in words; '' when all is well."""
        breakers = (self.peek_breaker, self.breaker, self.store_breaker)
        told = [
            f"{one.name}: {one.state.value}: {one.last_error}" for one in breakers if one.state is not State.DISARMED
        ]
        if self.throttled:
            told.append(f"throttled after {self._consecutive_failures} failures in a row")
        return "; ".join(told)[:2000]

    # -- from the tasks -------------------------------------------------------------------------------------------

    def claimed(self, task: Task, rows: Sequence[Claimed]) -> None:
        """A task claimed these rows and is about to handle them. This is where more tasks are asked for, because its
        handlers may take long. (The floors have passed these rows already.)"""
        self.stats.received += len(rows)
        self.breaker.success()
        round_ = task.round
        if round_ is not None and round_.remaining > 0:
            task.successes += 1
            if task.successes >= settings.GROW_AFTER:
                task.successes = 0
                self._invite(round_)

    def succeeded(self, count: int) -> None:
        """Messages were handled and ended well."""
        self.stats.handled += count
        if self._consecutive_failures:
            if self.throttled:
                log.warning("%s: a handler succeeded; receiving at full speed again.", self.queue._meta.label)
            self._consecutive_failures = 0

    def failed(self) -> None:
        """An attempt failed; if many did in a row, wait before the next one."""
        self.stats.failed += 1
        self._consecutive_failures += 1
        if self.throttled:
            if self._consecutive_failures == settings.THROTTLE_AFTER:
                log.warning(
                    "%s: %d attempts failed in a row; one task, with %s between attempts, until one succeeds.",
                    self.queue._meta.label, self._consecutive_failures, settings.THROTTLE_WAIT,
                )  # fmt: skip
            self.stopping.wait(settings.THROTTLE_WAIT.total_seconds())

    @property
    def throttled(self) -> bool:
        """Whether an outage of something that the handlers need is assumed."""
        return 0 < settings.THROTTLE_AFTER <= self._consecutive_failures

    def ranges(self, task: Task) -> Sequence[Range]:
        """Where a task may claim one message: in the window behind the floors that the peek found messages in, or ahead of
        them. (``claim`` is for batches: it costs more than to step over three rows of others.)"""
        return (task.round is not None and task.round.behind) or self.floors.ahead()

    def claim(self, task: Task, limit: int) -> AbstractContextManager[UnderWay]:
        """Around a task's claim of a batch: says where, in the window behind the floors that the peek found messages in or ahead of
        them, and moves the floors past what was claimed."""
        return self.claiming.claim(task.round.behind if task.round is not None else None, limit)

    def leave_alone(self, seqs: Sequence[int]) -> None:
        """No consumer here takes these: they stay where they are, and this process looks past them."""
        if not self.stats.unknown:
            log.warning(
                "%s: message %d has a type that no consumer of this process takes; such messages are left to others.",
                self.queue._meta.label,
                seqs[0],
            )
        self.stats.unknown += len(seqs)
        self.skip = tuple(sorted({*self.skip[-(MAX_SKIP - len(seqs)) :], *seqs}))

    def survive(self, error: BaseException, breaker: CircuitBreaker, connection: Any) -> bool:
        """Deal with a database error: reconnect, wait as the breaker says. False: stopping, or it is not the database's."""
        kind = backend_of(connection).error_kind(error)
        if kind is ErrorKind.DEADLOCK:
            self.stopping.wait(random.uniform(0, 0.02))
            return True
        if not connection.in_atomic_block:
            connection.close()
            close_isolated(self.alias)
        wait = breaker.failure(error)
        if self.stopping.is_set():
            # On the way out there is no time for the breaker's waits: two quick tries, then let the lease lapse.
            self._woken = False
            return breaker.failures < 3
        self.stopping.wait(wait * random.uniform(0.8, 1.2))
        return True

    # -- the state machine ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Peek and receive until stopping."""
        task, index = self.crew.begin()
        after_round = False
        try:
            while not self.stopping.is_set():
                self._wake.clear()
                woken, self._woken = self._woken, False
                if self.paused:
                    self._wait(self.peek_delay)
                    continue
                # One worker alone needs no peek to know that a wake-up is for it: straight to the claim.
                if woken and self.workers == 1 and self.breaker.failures == 0:
                    round_: Round | None = Round(Estimate(1, False, 0, None))
                else:
                    round_ = self._peek_for_round()
                if round_ is not None:
                    self._work(task, round_)
                    after_round = True
                    continue
                if not self._wake.is_set():
                    # What was sent just after the round is covered by a throttled wake-up: look once more soon.
                    interval = settings.WAKE_UP_INTERVAL.total_seconds()
                    self._wait(min(interval, self.peek_delay) if after_round else self.peek_delay)
                    after_round = False
        finally:
            self.crew.wake_all()
            self.crew.end(task, index)

    def _wait(self, seconds: float) -> None:
        self._wake.wait(seconds)

    def _peek_for_round(self) -> Round | None:
        """Peek; a round when there is something for this worker, else None."""
        while not self.stopping.is_set():
            estimate = self._peek()
            if estimate is None or estimate.waiting == 0:
                self._deferred = 0
                return None
            place = self._place_in_line(estimate)
            if place == 0:
                return Round(self._part_of(estimate))
            # If the first message is still there after my place in the line, those before me are busy: I take it.
            self._deferred = estimate.first
            self.stopping.wait(place * TURN)
        return None

    def _part_of(self, estimate: Estimate) -> Estimate:
        """What of a small backlog is this worker's to take before it peeks again: all the others saw the same one, and the
        parts add up to it. (Eight workers on 5 to 34 messages: 1 % of the receives in vain; when each believed in all
        of it, 32 %.)"""
        if estimate.capped:
            return estimate
        part, left_over = divmod(estimate.waiting, self.workers)
        mine = (self.rank - estimate.first) % self.workers < left_over
        return estimate._replace(waiting=max(1, part + mine))

    def _place_in_line(self, estimate: Estimate) -> int:
        """0: take part. Else how many turns to wait: there are fewer messages than workers, and whose turn it is follows
        from the first message, so that they need not talk."""
        if estimate.capped or estimate.waiting >= self.workers or self._deferred == estimate.first:
            return 0
        place = (self.rank - estimate.first) % self.workers
        return 0 if place < estimate.waiting else place

    def _peek(self) -> Estimate | None:
        """Peek ahead of the floors and into the rescan window; None when the database failed."""
        connection = connections[self.alias]
        started = monotonic()
        ahead, behind = self.floors.ahead(), self.floors.behind()
        try:
            with Answering(connection):
                seen = queue_sql(self.queue, connection).peek(connection, ahead, behind, self.peek_limit, self.skip)
        except Error as error:
            self.survive(error, self.peek_breaker, connection)
            return None
        self.stats.peeks += 1
        self.peek_breaker.success()
        if seen.behind:
            # Came back behind the floor, or was committed late: first these, the window stays until it is clear.
            if seen.reached:
                behind = [only._replace(high=min(only.high, seen.reached)) for only in behind]
            return Estimate(seen.behind, seen.behind >= self.peek_limit, seen.first, behind)
        self.floors.rescanned(monotonic() - started, seen.reached)
        if seen.ahead:
            self.floors.seen(seen.first)
        return Estimate(seen.ahead, seen.ahead >= self.peek_limit, seen.first, None)

    def _take(self, task: Task, round_: Round) -> int:
        """How many messages this task may claim now; 0 ends its part in the round."""
        with round_.lock:
            if round_.ended or (self.throttled and round_.active > 1):
                return 0
            lifetime = min(self.peek_delay, CAPPED_LIFETIME) if round_.capped else ESTIMATE_LIFETIME
            stale = monotonic() - round_.peeked_at > lifetime
            if round_.capped and round_.remaining <= 0 and not stale:
                round_.remaining = self.peek_limit  # all claims came back full: as much again
            if round_.remaining <= 0 or stale:
                estimate = self._peek()
                if estimate is None or estimate.waiting == 0 or self.paused or self._place_in_line(estimate):
                    round_.ended = True  # if it is not our turn, the pump waits for it
                    return 0
                round_.renew(self._part_of(estimate))
            share = 1 if self.throttled else task.size.n
            if not round_.capped:
                share = min(share, max(1, -(-round_.remaining // round_.active)))
            round_.remaining -= share
            return share

    def _work(self, task: Task, round_: Round) -> None:
        """A task's part in a round: claim and handle until the round ends."""
        task.round, task.successes = round_, 0
        empty = 0
        try:
            while not self.stopping.is_set() and not self.paused and self.crew.may_go_on():
                asked = self._take(task, round_)
                if not asked:
                    break
                try:
                    count = task.receive(asked)
                except Error as error:
                    round_.spent()
                    if not self.survive(error, self.breaker, connections[self.alias]):
                        break
                    continue
                if count < asked:
                    round_.spent()  # the claim saw the end: peek before the next one
                if count:
                    empty = 0
                    continue
                self.stats.empty += 1
                empty += 1
                task.successes = 0
                if empty >= settings.END_AFTER:
                    round_.ended = True
                    break
        finally:
            task.round = None
            with round_.lock:
                round_.active -= 1

    def _invite(self, round_: Round) -> None:
        """Ask for one more task, unless there is trouble: then one task feels its way."""
        if not self.breaker.failures and not self.throttled:
            self.crew.invite(round_)
