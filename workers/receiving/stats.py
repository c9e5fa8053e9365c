"""What a pump counts, for people to read."""

from __future__ import annotations


class Stats:
    """Counters of one pump. Written by several threads without a lock: each is for display, not for decisions."""

    __slots__ = ("empty", "failed", "handled", "lost", "peeks", "received", "returned", "unknown")

    def __init__(self) -> None:
        self.received = self.handled = self.failed = self.empty = self.lost = 0
        self.returned = self.unknown = self.peeks = 0
