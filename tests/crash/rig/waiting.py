"""Waiting for a condition with a deadline: tests of this suite never sleep for a guess."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
#: Generous: two busy cores may take long to start a process; a condition that holds ends the wait at once.
PATIENCE_SECONDS = 120.0


def wait_until(condition: Callable[[], T], what: str = "", seconds: float = PATIENCE_SECONDS, pause: float = 0.05) -> T:
    """Poll until ``condition()`` is true and return its value; AssertionError when it does not become so in time."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {what or getattr(condition, '__name__', condition)}")
        time.sleep(pause)
    return value


def holds_for(condition: Callable[[], object], seconds: float, pause: float = 0.05) -> bool:
    """Whether ``condition()`` stays true all the time, for what must not happen."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not condition():
            return False
        time.sleep(pause)
    return True
