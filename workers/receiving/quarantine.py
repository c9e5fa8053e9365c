"""After a crash, a message that may have caused it is handled alone in its process.

What a dead process had in hand is counted, and several messages may have been in hand. If one of them kills again while
its neighbours of the last time are in hand again, they are counted with it until all of them are poison together. So in
watchful times (after a crash) a message that was handed out before is a suspect: it waits until the other handlers of
its process have ended, and they wait for it. Neither waits longer than ``PATIENCE``: this is about who is counted, not
about safety. In normal times it costs a task one look at ``watchful`` per message.

After a crash of everything (careful times) whatever is leased is counted with the next one. So there a task is ``alone``
from before its claim: a message that waited in hand for its turn would be counted with the killer that had it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

PATIENCE = 5.0


class Quarantine:
    """One per process, shared by its receive tasks."""

    def __init__(self, watchful_for: float = 0.0) -> None:
        self._until = monotonic() + watchful_for
        self._cond = threading.Condition()
        self._alone = threading.Lock()
        self._inside = 0
        self._suspects = 0
        self._suspect_inside = False
        #: Whether tasks have to ``enter``; kept by the watchdog.
        self.watchful = watchful_for > 0

    def look(self, careful: bool) -> None:
        """Decide whether the times are watchful: some seconds after a crash, and as long as a queue is careful."""
        self.watchful = careful or monotonic() < self._until

    @contextmanager
    def alone(self, stopping: threading.Event) -> Iterator[bool]:
        """Careful times: nobody else in this process claims or handles, or ``PATIENCE`` is over. False: stopping."""
        deadline = monotonic() + PATIENCE
        mine = False
        while not stopping.is_set() and not mine and monotonic() < deadline:
            mine = self._alone.acquire(timeout=0.1)
        try:
            yield not stopping.is_set()
        finally:
            if mine:
                self._alone.release()

    def enter(self, suspect: bool) -> None:
        """Wait for one's turn to run a handler; it has to ``leave``."""
        deadline = monotonic() + PATIENCE
        with self._cond:
            self._suspects += suspect
            while self._suspect_inside or (self._inside if suspect else self._suspects):
                left = deadline - monotonic()
                if left <= 0:
                    break
                self._cond.wait(left)
            self._suspects -= suspect
            self._inside += 1
            self._suspect_inside = self._suspect_inside or suspect

    def leave(self, suspect: bool) -> None:
        """The handler has ended."""
        with self._cond:
            self._inside -= 1
            if suspect:
                self._suspect_inside = False
            self._cond.notify_all()
