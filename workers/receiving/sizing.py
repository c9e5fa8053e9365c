"""How many messages a receive task leases at once: as many as its handlers do in about ``BATCH_TARGET``.

A lease must not wait behind a long handler, so one slow batch shrinks the size at once; growth at most doubles it. No-op
handlers reach 500 after nine claims, a 1 ms handler settles near 70, a 20 ms handler at 3 (measured). Only handlers count:
where claims are slow, larger ones are fewer.
"""

from __future__ import annotations


class BatchSize:
    """The batch size of one receive task."""

    __slots__ = ("_average", "_target", "limit", "n")

    def __init__(self, limit: int, target_seconds: float) -> None:
        self.limit = limit
        self.n = 1
        self._target = target_seconds
        self._average = 0.0

    def observe(self, count: int, seconds: float, *, full: bool = True) -> None:
        """The handlers of ``count`` messages took ``seconds``. ``full``: their claim got as many as it asked for."""
        average = seconds / count
        # Slower than thought: believe it at once. Faster: believe a third of it.
        self._average = average if average > self._average else self._average * 0.7 + average * 0.3
        wanted = int(self._target / self._average) if self._average else self.limit
        # Only a full batch says that a bigger one would have been filled.
        ceiling = self.n * 2 if full and count >= self.n else self.n
        self.n = max(1, min(wanted, ceiling, self.limit))
