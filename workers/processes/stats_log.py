"""What a worker process logs of its work: one line a minute, and one line per queue when it ends."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from ..receiving.pump import QueuePump

log = logging.getLogger("queueapp.workers")

#: Seconds between two lines.
INTERVAL = 60.0


class StatsLog:
    """The work of these pumps since the last line."""

    def __init__(self, pumps: Sequence[QueuePump]) -> None:
        self._pumps = pumps
        self._before = dict.fromkeys(pumps, (0, 0))

    def log_interval(self) -> None:
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
        log.info("Worker %d, in %.0f s: %s.", os.getpid(), INTERVAL, "; ".join(parts))

    def log_totals(self) -> None:
        """Log the work of each pump since its start."""
        for pump in self._pumps:
            stats = pump.stats
            log.info(
                "%s: received %d, handled %d, failed %d, returned %d, lost leases %d, empty receives %d, peeks %d.",
                pump.queue._meta.label, stats.received, stats.handled, stats.failed, stats.returned, stats.lost,
                stats.empty, stats.peeks,
                extra={"queue": pump.queue._meta.label},
            )  # fmt: skip
