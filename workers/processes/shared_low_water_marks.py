"""The low-water marks of all worker processes of one supervisor, in memory that they share.

A process that knows only its own marks scans over what its siblings have leased since its last claim: with eight of
them, most of what it reads. A mark is a hint (``queueapp.receiving.low_water_marks``), so writers take no lock.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from zlib import crc32

from queueapp.receiving.low_water_marks import LowWaterMarks

#: Words of one queue: a checksum of its levels, how often messages were returned, how often a mark went down otherwise,
#: then a mark per level.
WORDS = 512


class SharedLowWaterMarks:
    """A range of words per queue; ``fd`` is passed to the children."""

    def __init__(self, queues: int, fd: int | None = None) -> None:
        size = max(1, queues) * WORDS * 8
        if fd is None:
            with tempfile.TemporaryFile() as file:
                file.truncate(size)
                fd = os.dup(file.fileno())
        self.fd = fd
        self._words = memoryview(mmap.mmap(fd, size)).cast("q")

    def share(self, queue: int, marks: LowWaterMarks) -> bool:
        """Keep the marks of a queue here. False: its siblings have other levels (a newer version of the code), or it
        has too many; then it keeps its own."""
        levels = len(marks.levels)
        start = queue * WORDS
        checksum = crc32(repr(marks.levels).encode()) + 1
        if levels + 3 > WORDS or self._words[start] not in (0, checksum):
            return False
        self._words[start] = checksum
        marks.share(self._words[start + 3 : start + 3 + levels], self._words[start + 1 : start + 3])
        return True

    def messages_returned(self) -> None:
        """Messages of a dead process were released: the others rescan for them."""
        for start in range(0, len(self._words), WORDS):
            self._words[start + 1] += 1
