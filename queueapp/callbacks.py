"""Runs user callbacks (on_commit hooks, recoverability policies, signal receivers) under the handler's time limit.

A callback that hangs would hang unnoticed, so every caller runs it through ``run``. A thread that can limit it (a
worker's receiver) installs a ``Guard`` with ``guard``; on any other thread a callback is called directly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

_T = TypeVar("_T")


class Guard(Protocol):
    """Calls a callback, returns what it returns and raises what it raises, or an exception of its own to end it."""

    def __call__(self, what: str, call: Callable[[], _T], *, outcome_final: bool) -> _T: ...


_thread = threading.local()


def guard(by: Guard | None) -> None:
    """Install the guard of the calling thread; None removes it."""
    _thread.guard = by


def run(what: str, call: Callable[[], _T], *, outcome_final: bool = True) -> _T:
    """Run a callback.

    ``what`` names it in the log. ``outcome_final``: the outcome of the message no longer depends on the callback.
    """
    by: Guard | Any = getattr(_thread, "guard", None)
    if by is None:
        return call()
    guarded: _T = by(what, call, outcome_final=outcome_final)
    return guarded
