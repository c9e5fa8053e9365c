"""What a worker process says of itself while all is well: one line a minute, and one per queue when it ends."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from ..receiving.pump import QueuePump

log = logging.getLogger("queueapp.workers")

#: Seconds between two lines.
EVERY = 60.0


class Report:
    """What these pumps have done since it was last told."""

    def __init__(self, pumps: Sequence[QueuePump]) -> None:
        self._pumps = pumps
        self._before = dict.fromkeys(pumps, (0, 0))

    def tell(self) -> None:
        """Log one line, at INFO."""
        parts = []
        for pump in self._pumps:
            now = pump.stats.handled, pump.stats.failed
            handled, failed = (new - old for new, old in zip(now, self._before[pump], strict=True))
            self._before[pump] = now
            part = f"{pump.queue._meta.label} {handled} handled" + (f", {failed} failed" if failed else "")
            if state := "paused" if pump.paused else pump.health.degraded_text():
                part += f" ({state})"
            parts.append(part)
        log.info("Worker %d, in %.0f s: %s.", os.getpid(), EVERY, "; ".join(parts))

    def tell_all(self) -> None:
        """Log what each pump has done in its life."""
        for pump in self._pumps:
            stats = pump.stats
            log.info(
                "%s: received %d, handled %d, failed %d, given back %d, lost leases %d, empty receives %d, peeks %d.",
                pump.queue._meta.label, stats.received, stats.handled, stats.failed, stats.returned, stats.lost,
                stats.empty, stats.peeks,
            )  # fmt: skip
