"""How carefully a leased queue is received, by what the messages themselves tell.

A hand-out that nobody ended is on the row: it is a delivery that is neither a failed attempt nor a cancel (``limits.unended``).
One such says that a whole process tree died with the message in a batch, or that a lease lapsed: the message *may* be what
killed it, most are not. Two say that it happened again when few were in hand.

    0  fresh messages                       batches as large as handlers allow
    1  messages that were lost once         at most ``FEW`` of them in a batch, so that the next death leaves few that
                                            were lost twice
    2  messages that were lost twice        one at a time in the whole process: what dies now is what was in hand

So after the death of a tree everybody goes on at nearly full speed, an innocent message is lost twice at most, and one
that kills everything is poison after as many hand-outs as it has attempts, and two more. Caution outlasts the last such
message by ``LASTS``, because the ones beside it come next.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from queueapp.poison import limits
from queueapp.sql.claimed import DELIVERIES, Claimed

#: Messages of a batch while some of them were lost once.
FEW = 25
#: Seconds.
LASTS = 1.0


class Caution:
    """One per queue and process. Written by several tasks without a lock: the worst that a lost update costs is a batch."""

    __slots__ = ("_level", "_until")

    def __init__(self) -> None:
        self._level = 0
        self._until = 0.0

    @property
    def level(self) -> int:
        """How careful to be now."""
        if self._level and monotonic() > self._until:
            self._level = 0
        return self._level

    def needed(self, rows: Sequence[Claimed]) -> int:
        """How careful these rows, just leased, ask to be; from now on everybody is."""
        level = 0
        for row in rows:
            if row[DELIVERIES] > 1:
                attempt = limits.attempt_of(row, keeps_counts=True)
                level = max(level, min(2, limits.unended(row, attempt, leased=True)))
        if level and level >= self._level:
            self._level, self._until = level, monotonic() + LASTS
        return level
