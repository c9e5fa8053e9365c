"""Code of the user's that is no handler: hooks after a commit, recoverability policies, receivers of signals.

Nobody waits for it, so what hangs in it would hang unseen. Who calls such code calls it through ``run``; who can see it
through to an end (a worker's receive task, with a time limit) has said so for its thread with ``guard``. On any other thread
it is called and nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

_T = TypeVar("_T")


class Guard(Protocol):
    """Calls the code, returns what it returns and raises what it raises, or an exception of its own to end it."""

    def __call__(self, what: str, call: Callable[[], _T], *, settled: bool) -> _T: ...


_thread = threading.local()


def guard(by: Guard | None) -> None:
    """From now on ``by`` calls what this thread runs."""
    _thread.guard = by


def run(what: str, call: Callable[[], _T], *, settled: bool = True) -> _T:
    """Call code of the user's that is no handler; ``what`` it is, for the log. ``settled``: what becomes of the message does not
    depend on it any more."""
    by: Guard | Any = getattr(_thread, "guard", None)
    if by is None:
        return call()
    guarded: _T = by(what, call, settled=settled)
    return guarded
