"""The floors of all worker processes of one supervisor, in memory that they share.

A process that knows only its own floor walks over what its siblings have leased since its last claim: with eight of
them most of what it reads. A floor is a hint (``queueapp.floors``), so nobody locks these places.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from zlib import crc32

from queueapp.receiving.low_water_marks import LowWaterMarks

#: Places of one queue: what its levels are, how often messages came back, how often a floor came down otherwise, then a floor for
#: each level.
PLACES = 512


class SharedLowWaterMarks:
    """A stretch of places per queue; ``fd`` is passed to the children."""

    def __init__(self, queues: int, fd: int | None = None) -> None:
        size = max(1, queues) * PLACES * 8
        if fd is None:
            with tempfile.TemporaryFile() as file:
                file.truncate(size)
                fd = os.dup(file.fileno())
        self.fd = fd
        self._places = memoryview(mmap.mmap(fd, size)).cast("q")

    def share(self, queue: int, floors: LowWaterMarks) -> bool:
        """Keep the floors of a queue here. False: its siblings have other levels (a newer version of the code), or there
        are too many; it keeps its own."""
        levels = len(floors.levels)
        start = queue * PLACES
        what = crc32(repr(floors.levels).encode()) + 1
        if levels + 3 > PLACES or self._places[start] not in (0, what):
            return False
        self._places[start] = what
        floors.share(self._places[start + 3 : start + 3 + levels], self._places[start + 1 : start + 3])
        return True

    def came_back(self) -> None:
        """What a process had taken was given back after its death: let the others look for it."""
        for start in range(0, len(self._places), PLACES):
            self._places[start + 1] += 1
