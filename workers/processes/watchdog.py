"""The watchdog: one thread per process that holds handlers to their time limits.

It raises ``TimeLimitExceeded`` in the thread of a handler that exceeds its limit, or of a callback: a hook after a
commit, a policy, a signal receiver. It checks ten times a second while something runs, and is never on the path of a
message: a receiver writes two attributes per message and takes no lock. It uses no database: the renewal of leases,
which may have to wait for one, is another service (``services.lease_renewer``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import monotonic
from weakref import WeakKeyDictionary

from queueapp.conf import settings
from queueapp.services.service import Service

from ..receiving.handlers import TimeLimitExceeded, WorkerStopped
from ..receiving.pump import QueuePump
from ..receiving.receivers import ActiveCallback, ActiveHandler, Receiver
from ..receiving.receivers.base import cancel_awaited, raise_in_thread

log = logging.getLogger("queueapp.workers")

#: Seconds between two checks while something runs, and while nothing does.
_BUSY, _IDLE = 0.1, 0.25


class Watchdog(Service):
    """Watches the receivers of all pumps of this process; to be stopped after them."""

    def __init__(self, pumps: Sequence[QueuePump], on_stuck: Callable[[], None] | None = None) -> None:
        """``on_stuck``: called once, when a handler ignores its time limit for longer than ``STUCK_HANDLER_AFTER``."""
        super().__init__("watchdog")
        self._pumps = pumps
        self._on_stuck = on_stuck
        #: Callbacks without a limit that have run for long, and were reported.
        self._reported: WeakKeyDictionary[Receiver, ActiveCallback] = WeakKeyDictionary()

    def serve(self) -> None:
        while not self.stopping:
            self.pause(_BUSY if self.check() else _IDLE)

    def check(self) -> bool:
        """Interrupt what exceeds its limit; returns whether anything runs."""
        busy = False
        late: list[tuple[Receiver, ActiveHandler | ActiveCallback]] = []
        stuck: list[tuple[Receiver, ActiveHandler | ActiveCallback]] = []
        slow: list[tuple[Receiver, ActiveCallback]] = []
        for pump in self._pumps:
            for receiver in pump.receivers:
                running = receiver.active_handler or receiver.active_callback
                if running is None:
                    continue
                busy = True
                if isinstance(running, ActiveCallback) and self._is_unreported(receiver, running):
                    slow.append((receiver, running))
                if running.deadline is None or monotonic() <= running.deadline:
                    continue
                if interrupt(receiver, running):
                    late.append((receiver, running))
                    continue  # it has a round to react, also where this process stood still beyond its limit
                if is_stuck(running) and self._on_stuck is not None:
                    stuck.append((receiver, running))
                    on_stuck, self._on_stuck = self._on_stuck, None
                    on_stuck()
        # Last: a log handler may be slow, and no time limit is to wait for it.
        for receiver, running in late:
            _log_late(receiver, running)
        for receiver, running in stuck:
            what = running.what if isinstance(running, ActiveCallback) else running.consumer.registration.name
            label = receiver.queue._meta.label
            log.critical(
                "%s: %s ignores its time limit with message %d; the supervisor replaces this process.",
                label, what, running.seq, extra={"queue": label, "seq": running.seq},
            )  # fmt: skip
        for receiver, callback in slow:
            label = receiver.queue._meta.label
            log.warning(
                "%s: %s, for message %d, has been running for %.1f s, and its consumer has no time limit.",
                label, callback.what, callback.seq, monotonic() - callback.started,
                extra={"queue": label, "seq": callback.seq},
            )  # fmt: skip
        return busy

    def _is_unreported(self, receiver: Receiver, callback: ActiveCallback) -> bool:
        """Whether a callback without a limit has run for so long that the log is to say so, once."""
        if callback.deadline is not None or self._reported.get(receiver) is callback:
            return False
        if monotonic() - callback.started < settings.STUCK_HANDLER_AFTER.total_seconds():
            return False
        self._reported[receiver] = callback
        return True


def is_stuck(running: ActiveHandler | ActiveCallback) -> bool:
    """Whether it ignores its time limit for longer than ``STUCK_HANDLER_AFTER``."""
    limit = settings.STUCK_HANDLER_AFTER.total_seconds()
    return running.deadline is not None and monotonic() - running.deadline > limit


def _log_late(receiver: Receiver, running: ActiveHandler | ActiveCallback) -> None:
    label = receiver.queue._meta.label
    what = running.what if isinstance(running, ActiveCallback) else running.consumer.registration.name
    seconds = monotonic() - running.started
    log.warning(
        "%s: %s exceeds its time limit after %.1f s with message %d and is "
        "interrupted.", label, what, seconds, running.seq,
        extra={"queue": label, "seq": running.seq},
    )  # fmt: skip


def interrupt(receiver: Receiver, running: ActiveHandler | ActiveCallback) -> bool:
    """Raise TimeLimitExceeded in the receiver's thread, unless what runs has ended meanwhile or was interrupted before;
    returns whether it did.

    Python delivers it between two bytecodes: a handler inside one long C call (a query, ``time.sleep``) gets it when
    that call returns. An async handler keeps its own time limit, on its event loop. Of a sync handler that has returned
    an awaitable, the awaitable is cancelled there: its thread runs the ORM's part of it and must not be interrupted in
    that.
    """
    with receiver.interrupt_lock:
        # Checked again under the lock, which a late receiver takes before it goes on to the next message: so the
        # exception never reaches another message's handler.
        current = receiver.active_callback if isinstance(running, ActiveCallback) else receiver.active_handler
        if current is not running or receiver.interrupted_for_timeout is running:
            return False
        receiver.interrupted_for_timeout = running
        if isinstance(running, ActiveCallback):
            raise_in_thread(receiver, TimeLimitExceeded)
        elif not running.consumer.registration.is_async:
            if (cancel := running.context._cancel) is not None:
                cancel_awaited(cancel, for_its_time_limit=True)
            else:
                raise_in_thread(receiver, TimeLimitExceeded)
        return True


def interrupt_all(pumps: Sequence[QueuePump]) -> int:
    """Interrupt every handler that runs now (a hard stop); returns how many. Their messages are released."""
    count = 0
    for pump in pumps:
        for receiver in pump.receivers:
            # Set before it is read what runs: a handler that ends from here on checks for the exception.
            receiver.hard_stop = True
            running = receiver.active_handler
            with receiver.interrupt_lock:
                if running is None:
                    _interrupt_callback(receiver)
                    continue
                if receiver.active_handler is not running or receiver.interrupted_for_shutdown is running:
                    continue
                receiver.interrupted_for_shutdown = running
                count += 1
                if (cancel := running.context._cancel) is not None:
                    cancel_awaited(cancel)
                elif not running.consumer.registration.is_async:
                    raise_in_thread(receiver, WorkerStopped)
    return count


def _interrupt_callback(receiver: Receiver) -> None:
    """A policy is not interrupted: the default one would then decide, and otherwise."""
    callback = receiver.active_callback
    if callback is not None and callback.outcome_final and receiver.interrupted_for_shutdown is not callback:
        receiver.interrupted_for_shutdown = callback
        raise_in_thread(receiver, WorkerStopped)
