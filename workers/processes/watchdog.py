"""The watchdog: one thread per process that holds handlers to their time limits, and waits for nobody.

It raises ``TimeLimitExceeded`` in the thread of a handler that is over its limit, or of a hook after a commit, a policy, the
receivers of a signal. It looks ten times a second while something runs, and never sits in the path of a message: a task
writes two attributes per message and takes no lock. It uses no database: what may have to wait for one, the renewal of
leases, is done elsewhere (``services.lease_renewer``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import monotonic
from weakref import WeakKeyDictionary

from queueapp.conf import settings
from queueapp.services.service import Service

from ..receiving.handlers import TimeLimitExceeded, WorkerStopped
from ..receiving.interrupt import cancel_awaited, raise_in_thread
from ..receiving.pump import QueuePump
from ..receiving.receivers import ActiveCallback, ActiveHandler, Receiver

log = logging.getLogger("queueapp.workers")

_BUSY, _IDLE = 0.1, 0.25


class Watchdog(Service):
    """Watches the tasks of all pumps of this process; to be stopped after them."""

    def __init__(self, pumps: Sequence[QueuePump], on_wedged: Callable[[], None] | None = None) -> None:
        super().__init__("watchdog")
        self._pumps = pumps
        self._on_wedged = on_wedged
        #: What runs for long without a limit, and was told.
        self._told: WeakKeyDictionary[Receiver, ActiveCallback] = WeakKeyDictionary()

    def serve(self) -> None:
        while not self.stopping:
            self.pause(_BUSY if self._look() else _IDLE)

    def _look(self) -> bool:
        """Interrupt whatever is over its limit; whether anything runs."""
        busy = False
        late: list[tuple[Receiver, ActiveHandler | ActiveCallback]] = []
        wedged: list[tuple[Receiver, ActiveHandler | ActiveCallback]] = []
        slow: list[tuple[Receiver, ActiveCallback]] = []
        for pump in self._pumps:
            for task in pump.receivers:
                running = task.active_handler or task.active_callback
                if running is None:
                    continue
                busy = True
                if isinstance(running, ActiveCallback) and self._is_news(task, running):
                    slow.append((task, running))
                if running.deadline is None or (over := monotonic() - running.deadline) <= 0:
                    continue
                if interrupt(task, running):
                    late.append((task, running))
                if over > settings.STUCK_HANDLER_AFTER.total_seconds() and self._on_wedged is not None:
                    wedged.append((task, running))
                    on_wedged, self._on_wedged = self._on_wedged, None
                    on_wedged()
        # Only now: whoever takes the log may be slow, and no handler's limit is to wait for that.
        for task, running in late:
            _tell_late(task, running)
        for task, running in wedged:
            what = running.what if isinstance(running, ActiveCallback) else running.consumer.registration.name
            log.critical(
                "%s: %s ignores its time limit with message %d; this process is drained and replaced.",
                task.queue._meta.label, what, running.seq,
            )  # fmt: skip
        for task, aside in slow:
            log.warning(
                "%s: %s, for message %d, runs for %.1f s by now, and its consumer has no time limit.",
                task.queue._meta.label, aside.what, aside.seq, monotonic() - aside.started,
            )  # fmt: skip
        return busy

    def _is_news(self, task: Receiver, aside: ActiveCallback) -> bool:
        """Whether it has no limit, and runs for so long that somebody is to be told, once."""
        if aside.deadline is not None or self._told.get(task) is aside:
            return False
        if monotonic() - aside.started < settings.STUCK_HANDLER_AFTER.total_seconds():
            return False
        self._told[task] = aside
        return True


def _tell_late(task: Receiver, running: ActiveHandler | ActiveCallback) -> None:
    label = task.queue._meta.label
    if isinstance(running, ActiveCallback):
        log.warning(
            "%s: %s, for message %d, is over its time limit after %.1f s and is interrupted.",
            label, running.what, running.seq, monotonic() - running.started,
        )  # fmt: skip
    else:
        log.warning(
            "%s: message %d is over the time limit of %s.", label, running.seq, running.consumer.registration.name
        )


def interrupt(task: Receiver, running: ActiveHandler | ActiveCallback) -> bool:
    """Raise TimeLimitExceeded in the task's thread, unless what runs has ended meanwhile or was interrupted before; whether it
    was done.

    Python delivers it between two bytecodes: a handler inside one long C call (a query, ``time.sleep``) sees it when
    that call returns. An async handler keeps its own time limit, on its event loop; what a sync one has returned to be
    awaited is cancelled there: its thread runs the ORM's part of it, and must not be torn out of that.
    """
    with task.interrupt_lock:
        # Re-checked under the lock, which the task takes before it goes on to the next message once it is late: so the
        # exception can never reach another message's handler.
        now = task.active_callback if isinstance(running, ActiveCallback) else task.active_handler
        if now is not running or task.interrupted_for_timeout is running:
            return False
        task.interrupted_for_timeout = running
        if isinstance(running, ActiveCallback):
            raise_in_thread(task, TimeLimitExceeded)
        elif not running.consumer.registration.is_async:
            if (cancel := running.context._cancel) is not None:
                cancel_awaited(cancel, for_its_time_limit=True)
            else:
                raise_in_thread(task, TimeLimitExceeded)
        return True


def interrupt_all(pumps: Sequence[QueuePump]) -> int:
    """Interrupt every handler that runs now (a hard stop); returns how many. Their messages are given back."""
    count = 0
    for pump in pumps:
        for task in pump.receivers:
            # Before the look at what runs: a handler that ends from here on looks out for the exception.
            task.hard_stop = True
            running = task.active_handler
            with task.interrupt_lock:
                if running is None:
                    _cut_off_aside(task)
                    continue
                if task.active_handler is not running or task.interrupted_for_shutdown is running:
                    continue
                task.interrupted_for_shutdown = running
                count += 1
                if (cancel := running.context._cancel) is not None:
                    cancel_awaited(cancel)
                elif not running.consumer.registration.is_async:
                    raise_in_thread(task, WorkerStopped)
    return count


def _cut_off_aside(task: Receiver) -> None:
    """A policy is left to decide: interrupted, the default one would, and otherwise."""
    aside = task.active_callback
    if aside is not None and aside.outcome_final and task.interrupted_for_shutdown is not aside:
        task.interrupted_for_shutdown = aside
        raise_in_thread(task, WorkerStopped)
