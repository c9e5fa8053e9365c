"""Running the schedules of one database in the dispatcher's loop.

It looks at the table when the next run is due, when a notification has woken the dispatcher, and every ``POLL``
seconds. Without schedules it wakes the dispatcher for nothing, and looks when that has a round, at most so often.
Declarations are written each time this process becomes the leader, so those of the version that leads apply.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic

from .stored import declare, run_due

#: Seconds between two looks at the table at most, and at least.
POLL, SHORTEST_WAIT = 10.0, 0.005


class ScheduleRunner:
    """The schedules of one database, run by the dispatcher that leads."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        #: The term of the leadership in which the declarations were written.
        self._declared_in = 0
        self._look_at = 0.0
        self._has_any = False

    def woken(self) -> None:
        """A notification came: a schedule may have been changed. Without any schedule the next poll is soon enough."""
        if self._has_any:
            self._look_at = 0.0

    def round(self, term: int, may_continue: Callable[[], bool]) -> float:
        """Run what is due; returns the seconds until the next look, infinite without schedules. ``term``: of this
        process's leadership."""
        if self._declared_in != term:
            declare(self._alias)
            self._declared_in, self._look_at = term, 0.0
        wait = self._look_at - monotonic()
        if wait > 0:
            return wait if self._has_any else math.inf
        due_in = run_due(self._alias, may_continue)
        self._has_any = due_in is not None
        wait = POLL if due_in is None else min(POLL, max(SHORTEST_WAIT, due_in.total_seconds()))
        self._look_at = monotonic() + wait
        return wait if self._has_any else math.inf
