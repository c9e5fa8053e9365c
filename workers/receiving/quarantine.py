"""Poison-pill isolation: a message that may have ended a process is handled away from others. The message itself says
so (``failures.limits.suspicion_level``).

When a process dies, each message that it had in flight is counted, and most of those are harmless. If one of them ends
a process again with the same neighbours, they are counted with it until all of them are poison together. So each
further death is counted against fewer messages, and everything else continues at full speed:

    0  no process died of it    leased in batches as large as handlers allow
    1  it was one of many       all that a whole tree had leased is counted by its unacknowledged deliveries. At most
                                ``SMALL_BATCH`` of them are leased at once: the next death leaves few that were lost
                                twice
    2  it was one of few        in flight in a process that died, as its supervisor recorded, or lost among
                                ``SMALL_BATCH``. It is handled by itself in its process; one that no supervisor
                                recorded is leased by itself too

A TRANSACTIONAL message that is rolled back with its whole tree leaves no trace: while its queue tracks crashes (the
heartbeat decides) its deliveries are committed as leases, and then it does.

A process that has just started knows nothing yet, and may die at once: what its other queues have leased at that
moment would be counted each time. So the first message of each queue is leased by itself, until it is known.

No receiver waits longer than ``MAX_WAIT``, and none for a quarantined message whose handler takes longer: this decides
which message is counted, and is no matter of safety. While there is none, it costs each message a look at ``wanted``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Protocol

from queueapp.failures import limits
from queueapp.sql.claims import DELIVERIES, Claimed

#: Messages of a batch while some of them were lost once.
SMALL_BATCH = 25
#: Seconds: of a wait for a turn; and so long after the last suspected message its queue is leased as if there was
#: another, because its neighbours come next.
MAX_WAIT, QUARANTINE_TTL = 5.0, 1.0


class _Receiver(Protocol):
    #: Whether it has its turn: its handler runs or is about to.
    inside: bool


class _Pool(Protocol):
    @property
    def receivers(self) -> Sequence[_Receiver]: ...


class Quarantine:
    """Which receiver may handle; one per process, shared by all of its receivers. A receiver is ``inside`` before it
    looks at ``wanted``, and looks again when it no longer is, so that neither misses the other without a lock."""

    def __init__(self) -> None:
        #: The receivers of all queues of this process.
        self.pools: list[_Pool] = []
        #: Suspected messages in flight or waiting for their turn: receivers of other messages have to ``enter`` and to
        #: ``leave``.
        self.wanted = 0
        #: How long the others wait for the newest of them.
        self.wait_until = 0.0
        self._cond = threading.Condition()
        self._leasing = threading.Lock()

    def enter(self, receiver: _Receiver, quarantined: bool) -> None:
        """Wait for a turn: a suspected message until no other receiver is inside, others until there is no suspected
        message."""
        deadline = monotonic() + MAX_WAIT
        with self._cond:
            if quarantined:
                self.wanted += 1
                self.wait_until = deadline
            receiver.inside = False
            self._cond.notify_all()
            while self._any_inside() if quarantined else self.wanted:
                remaining = (deadline if quarantined else min(deadline, self.wait_until)) - monotonic()
                if remaining <= 0:
                    break
                self._cond.wait(remaining)
            receiver.inside = True
            if quarantined:
                self.wait_until = monotonic() + MAX_WAIT

    def leave(self, quarantined: bool) -> None:
        """A receiver is no longer inside."""
        with self._cond:
            self.wanted -= quarantined
            self._cond.notify_all()

    def _any_inside(self) -> bool:
        return any(receiver.inside for pool in self.pools for receiver in pool.receivers)

    @property
    def is_leasing_alone(self) -> bool:
        """Whether a receiver of the process leases by itself."""
        return self._leasing.locked()

    @contextmanager
    def leasing_alone(self, stopping: threading.Event) -> Iterator[LeaseLock | None]:
        """From before the claim to the end: a message that waited in its batch for its turn would be counted with the
        message that ended the process. Waits no longer than ``MAX_WAIT``. None: the process stops."""
        deadline = monotonic() + MAX_WAIT
        lock = LeaseLock(self._leasing)
        while not stopping.is_set() and not lock.take(0.1) and monotonic() < deadline:
            pass
        try:
            yield None if stopping.is_set() else lock
        finally:
            lock.release()


class LeaseLock:
    """The right to lease as the only receiver of a process."""

    __slots__ = ("_leasing", "_taken")

    def __init__(self, leasing: threading.Lock) -> None:
        self._leasing = leasing
        self._taken = False

    def take(self, seconds: float) -> bool:
        """Wait for it so long; return whether it was taken."""
        self._taken = self._leasing.acquire(timeout=seconds)
        return self._taken

    def release(self) -> None:
        """Others may lease. A second call does nothing."""
        if self._taken:
            self._taken = False
            self._leasing.release()


class BatchLimit:
    """The level of isolation at which a queue is leased; one per queue and process. Several receivers write it without
    a lock: a lost update costs a batch at most."""

    __slots__ = ("_level", "_until", "is_known")

    def __init__(self) -> None:
        self._level = 0
        self._until = 0.0
        #: Whether anything was leased yet, so that the level is known.
        self.is_known = False

    @property
    def level(self) -> int:
        """The present level: 0, 1 or 2, as in the module's table."""
        if self._level and monotonic() > self._until:
            self._level = 0
        return self._level if self.is_known else 2

    def needed(self, rows: Sequence[Claimed]) -> int:
        """The level that these rows, just leased, need; it holds for all receivers from now on."""
        level = 0
        for row in rows:
            if row[DELIVERIES] > 1:
                attempt = limits.attempt_of(row, keeps_counts=True)
                level = max(level, min(2, limits.unacknowledged_deliveries(row, attempt, leased=True)))
        if level and level >= self._level:
            self._level, self._until = level, monotonic() + QUARANTINE_TTL
        self.is_known = True
        return level
