"""Who may be the killer: a message that was handed out to a process that died. The message itself tells (``limits.suspicion``).

When a process dies, what it had in hand is counted, and most of that is innocent. If a killer strikes again with its neighbours
of the last time beside it, they are counted with it until all of them are poison together. So each time the next death is to
be counted against fewer, and everything else goes on at full speed:

    0  nobody died of it               leased in batches as large as handlers allow
    1  it was one of many              all that a whole tree had leased is counted by the hand-outs that nobody ended. At most
                                       ``SMALL_BATCH`` of them are leased at once: the next death leaves few that were lost twice
    2  it was one of few               in hand of a process that died, as its supervisor wrote down, or lost among ``SMALL_BATCH``.
                                       It is handled alone in its process; one of which no supervisor told is leased alone too

A TRANSACTIONAL message that is rolled back with its whole tree tells nothing: while its queue is ``careful`` (the heartbeat
says so) its hand-outs are recorded as leases, and then it does.

Whoever starts knows nothing yet, and a killer strikes just then: what the other queues of the process have leased at that
moment, to look what it is, would be counted each time. So the first message of each queue is leased alone, until it is known.

Nobody waits longer than ``PATIENCE``, and nobody for a suspect that is in hand for longer: this is about who is counted, not
about safety. While there is none it costs each message a look at ``wanted``.
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
#: Seconds: of a wait for one's turn; and so long after the last suspect its queue is leased as if there was another, because
#: the ones beside it come next.
PATIENCE, LASTS = 5.0, 1.0


class _Receiver(Protocol):
    #: Whether it has its turn: its handler runs or is about to.
    inside: bool


class _Pool(Protocol):
    @property
    def receivers(self) -> Sequence[_Receiver]: ...


class Quarantine:
    """Whose turn it is to handle; one per process, shared by its receive tasks. A task is ``inside`` before it looks at
    ``wanted``, and looks again when it is not any more, so that neither misses the other without a lock."""

    def __init__(self) -> None:
        #: All that are received by this process.
        self.pools: list[_Pool] = []
        #: Quarantine in hand or waiting for their turn: who has no other has to ``enter`` and to ``leave``.
        self.wanted = 0
        #: How long the others wait for the newest of them.
        self._until = 0.0
        self._cond = threading.Condition()
        self._leasing = threading.Lock()

    def enter(self, task: _Receiver, suspect: bool) -> None:
        """Wait for one's turn: a suspect until nobody else is inside, the others until there is no suspect."""
        deadline = monotonic() + PATIENCE
        with self._cond:
            if suspect:
                self.wanted += 1
                self._until = deadline
            task.inside = False
            self._cond.notify_all()
            while self._anybody_inside() if suspect else self.wanted:
                left = (deadline if suspect else min(deadline, self._until)) - monotonic()
                if left <= 0:
                    break
                self._cond.wait(left)
            task.inside = True
            if suspect:
                self._until = monotonic() + PATIENCE

    def leave(self, suspect: bool) -> None:
        """A task is not inside any more."""
        with self._cond:
            self.wanted -= suspect
            self._cond.notify_all()

    def _anybody_inside(self) -> bool:
        return any(task.inside for pool in self.pools for task in pool.receivers)

    @contextmanager
    def leasing_alone(self, stopping: threading.Event) -> Iterator[LeaseLock | None]:
        """From before the claim to the end: a message that waited in hand for its turn would be counted with the killer that
        had it. Waits for no longer than ``PATIENCE``. None: stopping."""
        deadline = monotonic() + PATIENCE
        turn = LeaseLock(self._leasing)
        while not stopping.is_set() and not turn.take(0.1) and monotonic() < deadline:
            pass
        try:
            yield None if stopping.is_set() else turn
        finally:
            turn.end()


class LeaseLock:
    """To lease alone in a process."""

    __slots__ = ("_leasing", "_taken")

    def __init__(self, leasing: threading.Lock) -> None:
        self._leasing = leasing
        self._taken = False

    def take(self, seconds: float) -> bool:
        """Wait for it so long."""
        self._taken = self._leasing.acquire(timeout=seconds)
        return self._taken

    def end(self) -> None:
        """The others may lease. Once is enough."""
        if self._taken:
            self._taken = False
            self._leasing.release()


class BatchLimit:
    """How carefully to lease; one per queue and process. Written by several tasks without a lock: the worst that a lost update
    costs is a batch."""

    __slots__ = ("_level", "_until", "knows")

    def __init__(self) -> None:
        self._level = 0
        self._until = 0.0
        #: Whether anything was leased yet that says how careful to be.
        self.knows = False

    @property
    def level(self) -> int:
        """How careful to be now."""
        if self._level and monotonic() > self._until:
            self._level = 0
        return self._level if self.knows else 2

    def needed(self, rows: Sequence[Claimed]) -> int:
        """How careful these rows, just leased, ask to be; from now on everybody is."""
        level = 0
        for row in rows:
            if row[DELIVERIES] > 1:
                attempt = limits.attempt_of(row, keeps_counts=True)
                level = max(level, min(2, limits.unacknowledged_deliveries(row, attempt, leased=True)))
        if level and level >= self._level:
            self._level, self._until = level, monotonic() + LASTS
        self.knows = True
        return level
