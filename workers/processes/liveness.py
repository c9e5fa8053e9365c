"""Liveness of the processes of a tree, in memory that they share: each writes the time, the supervisor reads it.

The heartbeats of workers are rows and need the database; these signs say that a process executes Python code at all,
whatever its database does. A process with a stuck handler also asks here for its replacement.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from time import monotonic

from queueapp.services.service import Service

#: Seconds between two signs of life, and between two calls of what is done beside them.
INTERVAL, ALSO_INTERVAL = 0.2, 1.0


class LivenessBoard:
    """An entry of two numbers per process: the time of its last sign, and whether it asks for a replacement.

    ``fd`` is passed to the children. All processes of a machine share one monotonic clock.
    """

    def __init__(self, processes: int, fd: int | None = None) -> None:
        size = max(1, processes) * 16
        if fd is None:
            with tempfile.TemporaryFile() as file:
                file.truncate(size)
                fd = os.dup(file.fileno())
        self.fd = fd
        self._numbers = memoryview(mmap.mmap(fd, size)).cast("d")

    def sign(self, process: int) -> None:
        """This process runs."""
        self._numbers[2 * process] = monotonic()

    def age(self, process: int) -> float | None:
        """Seconds since a process gave its last sign of life; None: it has given none since it was started."""
        signed = self._numbers[2 * process]
        return max(0.0, monotonic() - signed) if signed else None

    def request_replacement(self, process: int) -> None:
        """This process has a stuck handler."""
        self._numbers[2 * process + 1] = 1.0

    def wants_replacement(self, process: int) -> bool:
        """Whether a process has asked for its replacement."""
        return bool(self._numbers[2 * process + 1])

    def reset(self, process: int) -> None:
        """Another process takes the entry."""
        self._numbers[2 * process] = self._numbers[2 * process + 1] = 0.0


class LivenessReporter(Service):
    """Gives the signs of life of this process, and calls ``also`` now and then."""

    def __init__(self, board: LivenessBoard, process: int, also: Callable[[], None] | None = None) -> None:
        super().__init__("liveness")
        self._board, self._process, self._also = board, process, also

    def serve(self) -> None:
        also_at = 0.0
        while not self.stopping:
            self._board.sign(self._process)
            if self._also is not None and monotonic() >= also_at:
                also_at = monotonic() + ALSO_INTERVAL
                self._also()
            self.pause(INTERVAL)
        if self._also is not None:
            self._also()
