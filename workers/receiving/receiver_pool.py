"""The receive tasks of one queue in one process: threads that wait until the pump calls them, and end when idle for long.

    (none) --call--> working --the claims saw the end--> idle --call--> working
                                                          idle --HELPER_IDLE, unless it is the last--> (none)

A task is started when one is called for and none is idle; each holds a database connection. The concurrency can change at
any time: tasks above it end with the message they have in hand. Stopping can come at any instant: a thread is known here
from the moment it runs and not before, and none is started after ``close``.
"""

from __future__ import annotations

import logging
import threading
from asyncio import _set_running_loop
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic

from django.db import connections

from queueapp.conf import MAX_CONCURRENCY
from queueapp.errors import InvalidOption
from queueapp.sending.isolation import close_isolated

from .receivers import Receiver
from .slot import Slot

log = logging.getLogger("queueapp.workers")

#: An idle task ends after so many seconds, and closes its connection; the last one stays.
HELPER_IDLE = 10.0


class ReceiverPool:
    """The tasks of the queue ``label``. ``make`` makes one for a slot, ``work`` is what a called task does; it is given the
    number of messages that it may take, None for as many as there are. ``ended`` is told when it has done so."""

    def __init__(
        self,
        label: str,
        alias: str,
        make: Callable[[Slot | None], Receiver],
        work: Callable[[Receiver, int | None], None],
        ended: Callable[[], None],
        *,
        concurrency: int,
        slots: Sequence[Slot] | None,
    ) -> None:
        #: How many tasks there may be at once; as it was made, and what it can be set to.
        self.concurrency = self.declared = concurrency
        self.max_concurrency = len(slots) if slots is not None else MAX_CONCURRENCY
        self.receivers: list[Receiver] = []
        self._label, self._alias = label, alias
        self._make, self._work, self._ended = make, work, ended
        self._slots = slots
        self._tasks_at_most = concurrency
        self._free_slots = list(range(concurrency - 1, -1, -1))
        self._cond = threading.Condition()
        self._calls: deque[int | None] = deque()
        self._idle = 0
        #: Tasks that were called and are not idle yet, those included whose thread has not picked the call up.
        self._busy = 0
        self._live = 0  # threads that still take calls
        self._threads: set[threading.Thread] = set()  # those that have not ended
        self._closed = False
        #: The last thread could not be started, and the log says so.
        self._refused = False

    # -- from the pump and from other threads ------------------------------------------------------------------------

    @property
    def busy(self) -> int:
        """Tasks that work, or are about to."""
        return self._busy

    @property
    def assigned(self) -> int:
        """Messages that tasks were called for whose threads have not picked the call up."""
        with self._cond:
            return sum(messages or 1 for messages in self._calls)

    @property
    def idle(self) -> int:
        """How many more could be called."""
        return max(0, self.concurrency - self._busy)

    def submit(self, tasks: int, messages: int | None = None) -> int:
        """Let so many tasks work, as far as the concurrency goes, each for at most so many messages; returns how many."""
        with self._cond:
            if self._closed:
                return 0
            called = 0
            while called < tasks and self._busy < self.concurrency:
                if len(self._calls) >= self._idle and not self._start():
                    break
                self._busy += 1
                self._calls.append(messages)
                self._cond.notify()
                called += 1
            return called

    def _start(self) -> bool:
        """Start one more thread. Under ``_cond``, so that nobody sees it before it runs."""
        if self._live >= self.concurrency:
            return True  # one that has just ended its work takes the call
        thread = threading.Thread(target=self._run, name=f"{self._label}-{self._live + 1}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if not self._refused:  # a wake-up tries for each message
                log.error("%s: no further receive task can be started: %s", self._label, error)
            self._refused = True
            return self._busy < self._live  # else all there are may be in long handlers
        self._refused = False
        self._live += 1
        self._threads.add(thread)
        return True

    def set_concurrency(self, concurrency: int) -> None:
        """Change how many tasks there may be at once, in the middle of whatever is going on: those above it end with the
        message they have in hand. Safe from any thread. Raises InvalidOption."""
        if not 1 <= concurrency <= self.max_concurrency:
            raise InvalidOption("concurrency", concurrency, f"a whole number from 1 to {self.max_concurrency}")
        with self._cond:
            self._free_slots[:0] = range(concurrency - 1, self._tasks_at_most - 1, -1)
            self._tasks_at_most = max(self._tasks_at_most, concurrency)
            self.concurrency = concurrency
            self._cond.notify_all()

    def may_go_on(self) -> bool:
        """Whether the calling task may take another message now that the concurrency is what it is."""
        return self._busy <= self.concurrency or self._closed  # the hot path: no lock

    def close(self) -> None:
        """Stopping: no call is taken any more. Safe at any instant, from any thread."""
        with self._cond:
            self._closed = True
            self._busy -= len(self._calls)
            self._calls.clear()
            self._cond.notify_all()

    def join(self, timeout: float) -> bool:
        """Wait for the tasks to end; False when some are still running."""
        deadline = monotonic() + timeout
        with self._cond:
            while self._threads:
                left = deadline - monotonic()
                if left <= 0:
                    return False
                self._cond.wait(left)
        return True

    # -- the threads ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        me = threading.current_thread()
        index = None
        called = failed = ready = False
        try:
            index = self._take_slot()
            task = self._make(self._slots[index] if self._slots is not None else None)
            task.bind()
            with self._cond:
                self.receivers = [*self.receivers, task]
            ready = True
            try:
                while True:
                    called = False
                    found, messages = self._next_call()
                    if not found:
                        break
                    called = True
                    self._work(task, messages)
                    with self._cond:
                        self._busy -= 1
                    called = False
                    self._ended()
            finally:
                with self._cond:
                    self.receivers = [other for other in self.receivers if other is not task]
        except BaseException:  # whatever it is: a thread that ends uncounted would be counted on for ever
            log.exception("%s: a receive task failed; the pump goes on without it.", self._label)
            failed = True
            with self._cond:
                self._live -= 1
                self._busy -= called
                if self._calls and self._busy > self._live:
                    # It was counted on for a call. Those that are left may be in long handlers: the next look calls again.
                    self._calls.pop()
                    self._busy -= 1
        finally:
            self._close_connections()
            with self._cond:
                if index is not None:
                    self._free_slots.append(index)
                self._threads.discard(me)
                self._cond.notify_all()
            if failed and ready:
                self._ended()  # where none can be made the next look tries again, and no sooner: each tells why

    def _close_connections(self) -> None:
        """Whatever the last handler has made of this thread: who is not counted out would be waited for at the end."""
        _set_running_loop(None)
        try:
            connections[self._alias].close()
            close_isolated()
        except Exception:
            log.exception("%s: a receive task could not close its connection.", self._label)

    def _take_slot(self) -> int:
        with self._cond:
            while not self._free_slots:  # of a task that left and is closing its connection
                self._cond.wait(1)
            return self._free_slots.pop()

    def _next_call(self) -> tuple[bool, int | None]:
        """(True, messages) of the next call; (False, None) when this thread is to end. In one breath: a call that came
        between the decision and the end of the thread would count on it."""
        deadline = monotonic() + HELPER_IDLE
        with self._cond:
            while True:
                # A call is taken also by a task too many: whoever called counts on it.
                if self._calls:
                    return True, self._calls.popleft()
                left = deadline - monotonic()
                if self._closed or self._live > self.concurrency or (left <= 0 and self._live > 1):
                    self._live -= 1
                    return False, None
                self._idle += 1
                self._cond.wait(max(left, 0.01) if self._live > 1 else None)
                self._idle -= 1
