"""The receivers of one queue in one process: threads that wait until the pump submits work, and end when idle for long.

    (none) --submit--> busy --the claims reached the end--> idle --submit--> busy
                                                            idle --IDLE_SECONDS, unless it is the last--> (none)

A receiver is started when work is submitted and none is idle; each holds a database connection. The concurrency can
change at any time: receivers above it end with the message in flight. Stopping can come at any instant: a thread is
registered from the moment it runs and not before, and none is started after ``close``.
"""

from __future__ import annotations

import logging
import threading
from asyncio import _set_running_loop
from collections import deque
from collections.abc import Sequence
from time import monotonic

from django.db import connections

from queueapp.conf import MAX_CONCURRENCY
from queueapp.errors import InvalidOption
from queueapp.sending.isolation import close_isolated

from .events import InFlightSlot, ReceiverEvents
from .receivers import Receiver

log = logging.getLogger("queueapp.workers")

#: An idle receiver ends after so many seconds, and closes its connection; the last one stays.
IDLE_SECONDS = 10.0


class ReceiverPool:
    """The receivers of the queue ``label``. ``events`` makes one for a slot and runs it."""

    def __init__(
        self,
        label: str,
        alias: str,
        events: ReceiverEvents,
        *,
        concurrency: int,
        slots: Sequence[InFlightSlot] | None,
    ) -> None:
        #: How many receivers there may be at once; as it was declared, and at most.
        self.concurrency = self.declared = concurrency
        self.max_concurrency = len(slots) if slots is not None else MAX_CONCURRENCY
        self.receivers: list[Receiver] = []
        self._label, self._alias, self._events = label, alias, events
        self._slots = slots
        self._highest_concurrency = concurrency
        self._free_slots = list(range(concurrency - 1, -1, -1))
        self.condition = threading.Condition()
        self.calls: deque[int | None] = deque()
        #: Threads that wait for a call.
        self.waiting = 0
        #: Receivers that were called and are not idle yet, those included whose thread has not picked the call up.
        self.busy = 0
        self._live = 0  # threads that still take calls
        self.threads: set[threading.Thread] = set()  # those that have not ended
        self._closed = False
        #: The last thread could not be started, and the log says so.
        self._refused = False

    # -- from the pump and from other threads ------------------------------------------------------------------------

    @property
    def assigned(self) -> int:
        """Messages of calls that no thread has picked up yet."""
        with self.condition:
            return sum(messages or 1 for messages in self.calls)

    @property
    def idle(self) -> int:
        """How many more receivers could be called."""
        return max(0, self.concurrency - self.busy)

    def submit(self, receivers: int, messages: int | None = None) -> int:
        """Call so many receivers, as far as the concurrency allows, each for at most so many messages; return how many
        were called."""
        with self.condition:
            if self._closed:
                return 0
            called = 0
            while called < receivers and self.busy < self.concurrency:
                if len(self.calls) >= self.waiting and not self._start():
                    break
                self.busy += 1
                self.calls.append(messages)
                self.condition.notify()
                called += 1
            return called

    def _start(self) -> bool:
        """Start one more thread. Under ``condition``, so that no other thread sees it before it runs."""
        if self._live >= self.concurrency:
            return True  # one that is just becoming idle takes the call
        thread = threading.Thread(target=self._run, name=f"{self._label}-{self._live + 1}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if not self._refused:  # a wake-up tries for each message
                log.error(
                    "%s: no further receiver can be started: %s", self._label, error, extra={"queue": self._label}
                )
            self._refused = True
            return self.busy < self._live  # else all there are may be in long handlers
        self._refused = False
        self._live += 1
        self.threads.add(thread)
        return True

    def set_concurrency(self, concurrency: int) -> None:
        """Change how many receivers there may be at once, at any time: those above it end with the message in flight.
        Safe from any thread. Raises InvalidOption."""
        if not 1 <= concurrency <= self.max_concurrency:
            raise InvalidOption("concurrency", concurrency, f"a whole number from 1 to {self.max_concurrency}")
        with self.condition:
            self._free_slots[:0] = range(concurrency - 1, self._highest_concurrency - 1, -1)
            self._highest_concurrency = max(self._highest_concurrency, concurrency)
            self.concurrency = concurrency
            self.condition.notify_all()

    def may_continue(self) -> bool:
        """Whether the calling receiver may take another message under the present concurrency."""
        return self.busy <= self.concurrency or self._closed  # the hot path: no lock

    def close(self) -> None:
        """Stopping: take no call any more. Safe at any instant, from any thread."""
        with self.condition:
            self._closed = True
            self.busy -= len(self.calls)
            self.calls.clear()
            self.condition.notify_all()

    def join(self, timeout: float) -> bool:
        """Wait for the threads to end; False when some are still running."""
        deadline = monotonic() + timeout
        with self.condition:
            while self.threads:
                remaining = deadline - monotonic()
                if remaining <= 0:
                    return False
                self.condition.wait(remaining)
        return True

    # -- the threads ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        thread = threading.current_thread()
        index = None
        called = failed = ready = False
        try:
            index = self._take_slot()
            receiver = self._events.make_receiver(self._slots[index] if self._slots is not None else None)
            receiver.bind()
            with self.condition:
                self.receivers = [*self.receivers, receiver]
            ready = True
            try:
                while True:
                    called = False
                    found, messages = self._next_call()
                    if not found:
                        break
                    called = True
                    self._events.run_receiver(receiver, messages)
                    with self.condition:
                        self.busy -= 1
                    called = False
                    self._events.receiver_done()
            finally:
                with self.condition:
                    self.receivers = [started for started in self.receivers if started is not receiver]
        except BaseException:  # of any kind: a thread that ended without being counted out would be counted on for ever
            log.exception(
                "%s: a receiver failed; the pump goes on without it.", self._label, extra={"queue": self._label}
            )
            failed = True
            with self.condition:
                self._live -= 1
                self.busy -= called
                if self.calls and self.busy > self._live:
                    # It was counted on for a call. The other threads may be in long handlers: the next peek calls
                    # again.
                    self.calls.pop()
                    self.busy -= 1
        finally:
            self._close_connections()
            with self.condition:
                if index is not None:
                    self._free_slots.append(index)
                self.threads.discard(thread)
                self.condition.notify_all()
            if failed and ready:
                # Where none can be made the next peek tries again, and no sooner: each logs why.
                self._events.receiver_done()

    def _close_connections(self) -> None:
        """Whatever state the last handler has left this thread in: a thread that is not counted out would be waited
        for."""
        _set_running_loop(None)
        try:
            connections[self._alias].close()
            close_isolated()
        except Exception:
            log.exception("%s: a receiver could not close its connection.", self._label, extra={"queue": self._label})

    def _take_slot(self) -> int:
        with self.condition:
            while not self._free_slots:  # of a thread that ends and is closing its connection
                self.condition.wait(1)
            return self._free_slots.pop()

    def _next_call(self) -> tuple[bool, int | None]:
        """(True, messages) of the next call; (False, None) when this thread is to end. Decided under the lock: a call
        that came between the decision and the end of the thread would count on it."""
        deadline = monotonic() + IDLE_SECONDS
        with self.condition:
            while True:
                # A thread above the concurrency takes a call as well: the call counts on it.
                if self.calls:
                    return True, self.calls.popleft()
                remaining = deadline - monotonic()
                if self._closed or self._live > self.concurrency or (remaining <= 0 and self._live > 1):
                    self._live -= 1
                    return False, None
                self.waiting += 1
                self.condition.wait(max(remaining, 0.01) if self._live > 1 else None)
                self.waiting -= 1
