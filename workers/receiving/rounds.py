"""What a pump counts, what a peek tells it, and one stay in receive mode."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import monotonic
from typing import NamedTuple

from queueapp.sql.base import Range


class Stats:
    """Counters of one pump. Written by several threads without a lock: each is for display, not for decisions."""

    __slots__ = ("empty", "failed", "handled", "lost", "peeks", "received", "returned", "unknown")

    def __init__(self) -> None:
        self.received = self.handled = self.failed = self.empty = self.lost = 0
        self.returned = self.unknown = self.peeks = 0


class Estimate(NamedTuple):
    """What a peek says to the round: how many, whether it stopped counting at the limit, the lowest seq, and the window
    behind the floors if that is where they are."""

    waiting: int
    capped: bool
    first: int
    behind: Sequence[Range] | None


class Round:
    """One stay in receive mode. ``remaining`` is what is left of the estimate, claims in progress taken off."""

    __slots__ = ("active", "behind", "capped", "ended", "lock", "peeked_at", "remaining")

    def __init__(self, estimate: Estimate) -> None:
        self.ended = False
        self.active = 1
        self.lock = threading.Lock()
        self.renew(estimate)

    def renew(self, estimate: Estimate) -> None:
        self.remaining = estimate.waiting
        self.capped = estimate.capped
        self.behind = estimate.behind
        self.peeked_at = monotonic()

    def spent(self) -> None:
        """Nothing is left of the estimate: peek before the next claim."""
        self.remaining, self.capped = 0, False
