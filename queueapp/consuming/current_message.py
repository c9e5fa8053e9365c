"""Which message is being handled: what is sent meanwhile says that it came of it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

#: Who calls handlers in the present thread or task of an event loop; ``running`` of it is None between them, or has the
#: ``context``. Set once for a thread and not for each message, which would cost 0.2 µs.
handling: ContextVar[Any] = ContextVar("queueapp_handling", default=None)


def context_of(caller: Any) -> Any:
    """The ``Context`` of the handler that runs, or None: outside of handlers, and in policies."""
    running = None if caller is None else caller.running
    return None if running is None else running.context
