"""The receive tasks of one queue in one process: the pump's own thread, and helper threads that join its rounds.

A helper is started when a round asks for one more task and none is idle, takes part in the rounds it is invited to, and
ends after ``HELPER_IDLE`` without an invitation, because each holds a database connection. The concurrency can change
at any time: tasks above it end with the message they have in hand.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from time import monotonic

from django.db import connections

from queueapp.errors import InvalidOption
from queueapp.sending.isolation import close_isolated

from ..processes.slots import Slot
from .rounds import Round
from .strategies import Task

log = logging.getLogger("workers")

#: A helper task without work ends after this long, and closes its connection.
HELPER_IDLE = 10.0
MAX_CONCURRENCY = 256


class Crew:
    """The tasks of the queue ``label``. ``make`` makes one for a slot, ``work`` is a task's part in a round."""

    def __init__(
        self,
        label: str,
        alias: str,
        make: Callable[[Slot | None], Task],
        work: Callable[[Task, Round], None],
        *,
        concurrency: int,
        slots: Sequence[Slot] | None,
        stopping: threading.Event,
    ) -> None:
        self.concurrency = concurrency
        self.tasks: list[Task] = []
        self._label, self._alias = label, alias
        self._make, self._work = make, work
        self._slots = slots
        self._stopping = stopping
        self._tasks_at_most = concurrency
        self._free_slots = list(range(concurrency - 1, -1, -1))
        self._cond = threading.Condition()
        self._invitations: list[Round] = []
        self._idle = 0
        self._live = 0  # helpers that still take invitations; under _cond
        self._threads: set[threading.Thread] = set()  # those that have not ended
        self._retired: set[threading.Thread] = set()  # those of them that end because the concurrency was lowered

    # -- from the pump and from other threads ------------------------------------------------------------------------

    def set_concurrency(self, concurrency: int) -> None:
        """Change how many tasks there may be at once, in the middle of whatever is going on: those above it end with the
        message they have in hand. Safe from any thread. Raises InvalidOption."""
        most = len(self._slots) if self._slots is not None else MAX_CONCURRENCY
        if not 1 <= concurrency <= most:
            raise InvalidOption("concurrency", concurrency, f"a whole number from 1 to {most}")
        with self._cond:
            self._free_slots[:0] = range(concurrency - 1, self._tasks_at_most - 1, -1)
            self._tasks_at_most = max(self._tasks_at_most, concurrency)
            self.concurrency = concurrency
            self._cond.notify_all()

    def invite(self, round_: Round) -> None:
        """Let one more task take part, unless the concurrency is reached."""
        with round_.lock:
            if round_.active >= self.concurrency or round_.ended:
                return
            round_.active += 1
        with self._cond:
            self._invitations.append(round_)
            if self._idle >= len(self._invitations):
                self._cond.notify()
                return
            if self._live + 1 >= self.concurrency:
                return  # all exist; the next one to become idle takes the invitation
            self._live += 1
            helper = threading.Thread(target=self._help, name=f"{self._label}-{self._live}", daemon=True)
            self._threads.add(helper)
        helper.start()

    def may_go_on(self) -> bool:
        """Whether the calling task may take another message now that the concurrency is what it is: of too many the helpers
        end here, and the pump's own task waits until they did."""
        if self._live < self.concurrency:  # the hot path: no lock
            return True
        me = threading.current_thread()
        with self._cond:
            if me in self._threads:
                return not self._retire(me)
            while self._live >= self.concurrency and not self._stopping.is_set():
                self._cond.wait(0.1)
        return True

    def join(self, timeout: float) -> bool:
        """Wait for the helper tasks to end; False when some are still running."""
        deadline = monotonic() + timeout
        for helper in list(self._threads):
            helper.join(max(0.0, deadline - monotonic()))
        return not any(helper.is_alive() for helper in list(self._threads))

    def wake_all(self) -> None:
        """Stopping: nobody waits for an invitation any more."""
        with self._cond:
            self._cond.notify_all()

    def begin(self) -> tuple[Task, int]:
        """A task for the calling thread, and the place it occupies until ``end``."""
        with self._cond:
            while not self._free_slots:  # of a helper that left and is closing its connection
                self._cond.wait(1)
            index = self._free_slots.pop()
        task = self._make(self._slots[index] if self._slots is not None else None)
        task.bind()
        self.tasks = [*self.tasks, task]
        return task, index

    def end(self, task: Task, index: int) -> None:
        """The calling thread is done with its task."""
        self.tasks = [other for other in self.tasks if other is not task]
        connections[self._alias].close()
        close_isolated()
        with self._cond:
            self._free_slots.append(index)
            self._cond.notify_all()

    # -- the helpers -------------------------------------------------------------------------------------------------

    def _help(self) -> None:
        """Body of a helper thread: take part in the rounds it is invited to."""
        task, index = self.begin()
        try:
            while (round_ := self._next_invitation()) is not None:
                self._work(task, round_)
        except Exception:
            log.exception("%s: a receive task failed; the pump goes on without it.", self._label)
            with self._cond:
                self._leave(threading.current_thread())
        finally:
            self.end(task, index)
            self._threads.discard(threading.current_thread())

    def _next_invitation(self) -> Round | None:
        """Wait for a round to take part in; None after a while without one."""
        me = threading.current_thread()
        with self._cond:
            self._idle += 1
            deadline = monotonic() + HELPER_IDLE
            while not self._invitations and not self._stopping.is_set() and not self._retire(me):
                left = deadline - monotonic()
                if left <= 0:
                    break
                self._cond.wait(left)
            self._idle -= 1
            if self._invitations and not self._stopping.is_set() and not self._retire(me):
                return self._invitations.pop()
            # In the same breath: an invitation that came between this and the end of the thread would count on it.
            self._leave(me)
            return None

    def _leave(self, helper: threading.Thread) -> None:
        """This helper takes no more invitations. Under ``_cond``."""
        self._live -= 1
        self._retired.discard(helper)
        self._cond.notify_all()

    def _retire(self, helper: threading.Thread) -> bool:
        """Whether this helper is one too many since the concurrency was lowered; then its thread ends. Under ``_cond``."""
        if self._live - len(self._retired) >= self.concurrency:
            self._retired.add(helper)
        return helper in self._retired
