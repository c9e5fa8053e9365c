"""How many messages one process may hold of one queue: its backlog, counted in memory, exactly.

A worker process is one subscriber, whatever the number of its tasks. What it declares (``--backlog``) and what the queue
allows (``max_per_subscription_backlog``) bound it, whichever is less; without either its batches do. On a queue that shares
messages out it has as many as it has tasks then, since others must know what there is room for; there the database counts as
well, what was shared out to it and not taken up yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Protocol


class Holder(Protocol):
    """A receive task, as far as this counts it."""

    #: ConsumerLimiter that it has taken for a claim under way, or for what it holds otherwise than as a leased batch.
    reserved: int

    def in_flight_count(self) -> int:
        """Messages of its leased batch that have not ended."""


class InFlightLimit:
    """The backlog of one pump."""

    def __init__(
        self,
        declared: int | None,
        allowed: int | None,
        shares: bool,
        tasks: Callable[[], Iterable[Holder]],
        concurrency: Callable[[], int],
    ) -> None:
        given = [one for one in (declared, allowed) if one is not None]
        self._granted = min(given) if given else None
        self._shares, self._tasks, self._concurrency = shares, tasks, concurrency
        self._lock = threading.Lock()
        #: Taken out of batches, and not ended yet: kept by the thread that looks after leases.
        self.leaving = 0

    def granted(self) -> int | None:
        """What its row says; None: as many as its batches take."""
        return self._concurrency() if self._granted is None and self._shares else self._granted

    @property
    def limited(self) -> bool:
        """Whether a claim has to ask here first."""
        return self._granted is not None or self._shares

    @property
    def takes_none(self) -> bool:
        """A backlog of 0: it is given no message."""
        return self._granted == 0

    def outstanding(self) -> int:
        """Messages that the tasks hold, or are about to."""
        return self.leaving + sum(task.reserved + task.in_flight_count() for task in self._tasks())

    def reserve(self, task: Holder, wanted: int) -> int:
        """Take at most so many places for a claim of this task, until it sets ``reserved`` again; how many it got."""
        granted = self.granted()
        assert granted is not None
        with self._lock:
            task.reserved = max(0, min(wanted, granted - self.outstanding()))
            return task.reserved
