"""The watchdog: one thread per process that looks at what all receive tasks are doing.

It raises ``TimeLimitExceeded`` in the thread of a handler that is over its limit, renews the leases of batches that are
half over, and behind a handler that takes long acks what is done and gives back what waits. It looks ten times a second
while something runs, and never sits in the path of a message: a task writes two attributes per message and takes no lock.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from time import monotonic

from django.db import Error, connections

from queueapp.conf import settings
from queueapp.sql.base import SEQ

from ..connections.dead_peers import Answering
from ..receiving.handling import Interrupted, TimeLimitExceeded, WorkerStopped
from ..receiving.pump import QueuePump
from ..receiving.strategies import LeaseTask, Running, Task

log = logging.getLogger("workers")

_BUSY, _IDLE = 0.1, 0.25
#: What waits behind one message for longer than this is given to others.
STUCK_AFTER = 0.5


class Watchdog(threading.Thread):
    """Watches the tasks of all pumps of this process until ``ended``, which comes after the pumps have stopped."""

    def __init__(
        self, pumps: Sequence[QueuePump], ended: threading.Event, on_wedged: Callable[[], None] | None = None
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._pumps = pumps
        self._ended = ended
        self._on_wedged = on_wedged

    def run(self) -> None:
        while True:
            busy = False
            for pump in self._pumps:
                pump.quarantine.look(careful=any(other.careful for other in self._pumps))
                for task in pump.tasks:
                    running = task.running
                    busy = busy or running is not None
                    if running is not None and running.deadline is not None and monotonic() > running.deadline:
                        self._over_its_limit(task, running, running.deadline)
                    if isinstance(task, LeaseTask):
                        self._look_after(task, running)
            if self._ended.wait(_BUSY if busy else _IDLE):
                break
        connections.close_all()

    def _over_its_limit(self, task: Task, running: Running, deadline: float) -> None:
        interrupt(task, running)
        if monotonic() > deadline + settings.WEDGED_AFTER.total_seconds() and self._on_wedged is not None:
            log.critical(
                "%s: %s ignores its time limit with message %d; this process is drained and replaced.",
                task.queue._meta.label, running.entry.registration.name, running.seq,
            )  # fmt: skip
            on_wedged, self._on_wedged = self._on_wedged, None
            on_wedged()

    def _look_after(self, task: LeaseTask, running: Running | None) -> None:
        batch = task.batch
        if batch is None:
            return
        now = monotonic()
        slow = running is not None and now - running.started > STUCK_AFTER
        period = task.queue.delivery.lease_period.total_seconds()
        try:
            with Answering(connections[task.alias]):
                if slow and batch.done:
                    task.ack_done(batch)
                if slow and batch.waiting:
                    surplus = []
                    while batch.waiting:
                        try:
                            surplus.append(batch.waiting.pop()[SEQ])
                        except IndexError:  # the task took the last one
                            break
                    if surplus:
                        connection = connections[task.alias]
                        task.sql.give_back(connection, sorted(surplus), batch.token, handled=False)
                        task.desk.came_back(surplus)
                if task.queue.delivery.renew_leases and batch.expires - now < period / 2:
                    seqs = sorted({*batch.held, *(row[SEQ] for row in list(batch.waiting))})
                    if seqs:
                        asked = monotonic()
                        task.sql.extend(connections[task.alias], seqs, batch.token, int(period * 1000))
                        batch.expires = asked + period
        except Error as error:
            connections[task.alias].close()
            log.warning("%s: the watchdog could not reach the database: %s", task.queue._meta.label, error)


def interrupt(task: Task, running: Running) -> None:
    """Raise TimeLimitExceeded in the task's thread, unless the handler has ended meanwhile.

    Python delivers it between two bytecodes: a handler inside one long C call (a query, ``time.sleep``) sees it when
    that call returns. An async handler keeps its own time limit, on its event loop; what a sync one has returned to be
    awaited is cancelled there: its thread runs the ORM's part of it, and must not be torn out of that.
    """
    with task.stop_lock:
        # Re-checked under the lock, which the task takes before it goes on to the next message once it is late: so the
        # exception can never reach another message's handler.
        if task.running is not running or task.hit is running:
            return
        task.hit = running
        if not running.entry.registration.is_async:
            if (cancel := getattr(running.context, "_cancel", None)) is not None:
                cancel(for_its_time_limit=True)
            else:
                _raise_in(task, TimeLimitExceeded)
    log.warning(
        "%s: message %d is over the time limit of %s.",
        task.queue._meta.label,
        running.seq,
        running.entry.registration.name,
    )


def interrupt_all(pumps: Sequence[QueuePump]) -> int:
    """Interrupt every handler that runs now (a hard stop); returns how many. Their messages are given back."""
    count = 0
    for pump in pumps:
        for task in pump.tasks:
            # Before the look at what runs: a handler that ends from here on looks out for the exception.
            task.hurry = True
            running = task.running
            with task.stop_lock:
                if running is None or task.running is not running or task.cut_off is running:
                    continue
                task.cut_off = running
                count += 1
                if (cancel := getattr(running.context, "_cancel", None)) is not None:
                    cancel()
                elif not running.entry.registration.is_async:
                    _raise_in(task, WorkerStopped)
    return count


def _raise_in(task: Task, exception: type[Interrupted]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(task.thread_id), ctypes.py_object(exception))
