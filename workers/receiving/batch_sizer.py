"""How many messages a receiver claims at once: as many as its handlers do in about ``BATCH_TARGET``, and as many as
have about ``MAX_BATCH_BYTES`` of bodies together.

A lease must not wait behind a long handler, so one slow batch shrinks the size at once; growth at most doubles it.
No-op handlers reach 500 after nine claims, a 1 ms handler settles near 70, a 20 ms handler at 3 (measured). Only
handlers count: where claims are slow, larger ones are fewer.

Bodies are weighed when they have arrived, so a claim follows those before it. Since a receiver begins with one message
and growth doubles, bodies of one size stay within the limit from the first claim on, except a single body that is
larger. When bodies become larger from one claim to the next, one claim of each receiver is over the limit by the same
factor, and at the very most ``MAX_BATCH`` of the largest; the next one is back within it. Weighing costs 30 ns a
message.

A consumer that takes batches is another case: a caller that asks for 500 at once wants 500 (``WholeBatches``,
``Multiples``).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from queueapp.conf import settings
from queueapp.sql.claims import BODY, Claimed

#: Seconds of a handler that are more than a claim and an ack.
SLOW_HANDLER = 0.005


class BatchSizer:
    """The batch size ``n`` of one receiver."""

    __slots__ = ("_average", "_fits", "_max_bytes", "_target", "_weight", "limit", "n")

    def __init__(self, limit: int, target_seconds: float, max_bytes: int = sys.maxsize) -> None:
        self.limit = limit
        self.n = 1
        self._target = target_seconds
        self._average = 0.0
        self._max_bytes = max_bytes
        self._weight = 0.0
        #: How many messages have so many bytes.
        self._fits = limit

    def at_most(self, limit: int) -> BatchSizer:
        """Another sizer, with the same targets and a lower limit."""
        return BatchSizer(min(limit, self.limit), self._target, self._max_bytes)

    @property
    def is_slow(self) -> bool:
        """Whether a handler takes longer than a claim and an ack, so that several receivers with one message each are
        worth more than one with several. Not known of those that take batches."""
        return self._average > SLOW_HANDLER

    def weigh(self, rows: Sequence[Claimed]) -> None:
        """A claim has brought these rows."""
        weight = sum([len(row[BODY] or b"") for row in rows]) / len(rows)
        # As with the time: heavier counts at once, lighter by a third.
        self._weight = weight if weight > self._weight else self._weight * 0.7 + weight * 0.3
        self._fits = max(1, int(self._max_bytes / self._weight)) if self._weight else self.limit
        self.n = min(self.n, self._fits)

    def observe(self, count: int, seconds: float, *, full: bool = True) -> None:
        """The handlers of ``count`` messages took ``seconds``. ``full``: their claim got as many as it asked for."""
        average = seconds / count
        # Slower than expected counts at once, faster by a third.
        self._average = average if average > self._average else self._average * 0.7 + average * 0.3
        wanted = int(self._target / self._average) if self._average else self.limit
        # Only a full batch says that a larger one would have been filled.
        ceiling = self.n * 2 if full and count >= self.n else self.n
        self.n = max(1, min(wanted, ceiling, self.limit, self._fits))


class WholeBatches(BatchSizer):
    """As many as the largest batch of a consumer, whatever its handler takes. Only bodies bound it."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit, 1.0, settings.MAX_BATCH_BYTES)
        self.n = limit

    def weigh(self, rows: Sequence[Claimed]) -> None:
        self.n = self.limit
        super().weigh(rows)

    def observe(self, count: int, seconds: float, *, full: bool = True) -> None:
        """The size stays as it is."""


class Multiples(WholeBatches):
    """Several batches a claim where handlers are fast: calls of 100, claimed and acked by 500, make a fifth of the
    round trips."""

    def __init__(self, batch: int, max_batch: int, target_seconds: float) -> None:
        super().__init__(batch)
        self._batch, self._time = batch, target_seconds
        self.limit = self._fits = max(1, max_batch // batch) * batch

    def weigh(self, rows: Sequence[Claimed]) -> None:
        n = self.n
        super().weigh(rows)
        self.n = min(n, self._fits)

    def observe(self, count: int, seconds: float, *, full: bool = True) -> None:
        wanted = int(self._time * count / seconds) if seconds else self.limit
        ceiling = self.n * 2 if full and count >= self.n else self.n
        self.n = max(self._batch, min(wanted, ceiling, self.limit) // self._batch * self._batch)
        self.n = min(self.n, max(1, self._fits))
