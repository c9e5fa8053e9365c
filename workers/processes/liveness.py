"""Signs of life of the processes of a tree, in memory that they share: each writes the time, the supervisor reads it.

The heartbeats of workers are rows and need the database; these say that a process runs at all, whatever its database does.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from time import monotonic

from queueapp.services.service import Service

#: Seconds between two of them.
EVERY = 1.0


class Signs:
    """One place per process; ``fd`` is passed to the children. The monotonic clock is one for all processes of a machine."""

    def __init__(self, processes: int, fd: int | None = None) -> None:
        size = max(1, processes) * 8
        if fd is None:
            with tempfile.TemporaryFile() as file:
                file.truncate(size)
                fd = os.dup(file.fileno())
        self.fd = fd
        self._places = memoryview(mmap.mmap(fd, size)).cast("d")

    def give(self, process: int) -> None:
        """This process runs."""
        self._places[process] = monotonic()

    def age(self, process: int) -> float | None:
        """Seconds since it was last seen to; None: not yet in its present life."""
        given = self._places[process]
        return max(0.0, monotonic() - given) if given else None

    def forget(self, process: int) -> None:
        """It begins a new life."""
        self._places[process] = 0.0


class Signing(Service):
    """Gives signs of life of this process, and does what else is to be done as often."""

    def __init__(self, signs: Signs, process: int, also: Callable[[], None] | None = None) -> None:
        super().__init__("signs of life")
        self._signs, self._process, self._also = signs, process, also

    def serve(self) -> None:
        while not self.stopping:
            self._signs.give(self._process)
            if self._also is not None:
                self._also()
            self.pause(EVERY)
        if self._also is not None:
            self._also()
