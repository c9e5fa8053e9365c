"""A monotonic clock that a test moves."""

from __future__ import annotations


class Clock:
    """What a module under test has instead of ``time.monotonic``."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
