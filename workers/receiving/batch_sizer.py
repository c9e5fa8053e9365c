"""How many messages a receive task claims at once: as many as its handlers do in about ``BATCH_TARGET``, and as many as have
about ``MAX_BATCH_BYTES`` of bodies together.

A lease must not wait behind a long handler, so one slow batch shrinks the size at once; growth at most doubles it. No-op
handlers reach 500 after nine claims, a 1 ms handler settles near 70, a 20 ms handler at 3 (measured). Only handlers count:
where claims are slow, larger ones are fewer.

Bodies are weighed when they have come, so a claim follows those before it. Since a task begins with one message and growth
doubles, bodies of one size stay within the limit from the first claim on, but for a single one that is larger. When they
become larger from one claim to the next, one claim of each task is over the limit by the same factor, and at the very most
``MAX_BATCH`` of the largest; the next one is back within it. Weighing costs 30 ns a message.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from queueapp.sql.claims import BODY, Claimed


class BatchSizer:
    """The batch size of one receive task."""

    __slots__ = ("_average", "_fits", "_most_bytes", "_target", "_weight", "limit", "n")

    def __init__(self, limit: int, target_seconds: float, most_bytes: int = sys.maxsize) -> None:
        self.limit = limit
        self.n = 1
        self._target = target_seconds
        self._average = 0.0
        self._most_bytes = most_bytes
        self._weight = 0.0
        #: How many messages have so many bytes.
        self._fits = limit

    def at_most(self, limit: int) -> BatchSizer:
        """Another one, with the same targets and a lower limit."""
        return BatchSizer(min(limit, self.limit), self._target, self._most_bytes)

    def weigh(self, rows: Sequence[Claimed]) -> None:
        """A claim has brought these rows."""
        weight = sum([len(row[BODY] or b"") for row in rows]) / len(rows)
        # As with the time: heavier is believed at once, lighter by a third.
        self._weight = weight if weight > self._weight else self._weight * 0.7 + weight * 0.3
        self._fits = max(1, int(self._most_bytes / self._weight)) if self._weight else self.limit
        self.n = min(self.n, self._fits)

    def observe(self, count: int, seconds: float, *, full: bool = True) -> None:
        """The handlers of ``count`` messages took ``seconds``. ``full``: their claim got as many as it asked for."""
        average = seconds / count
        # Slower than thought: believe it at once. Faster: believe a third of it.
        self._average = average if average > self._average else self._average * 0.7 + average * 0.3
        wanted = int(self._target / self._average) if self._average else self.limit
        # Only a full batch says that a bigger one would have been filled.
        ceiling = self.n * 2 if full and count >= self.n else self.n
        self.n = max(1, min(wanted, ceiling, self.limit, self._fits))
