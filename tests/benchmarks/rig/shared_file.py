"""An array in a file that several processes have mapped: what handlers write there, the benchmark reads at no cost."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from pathlib import Path
from typing import ClassVar, Self


class SharedArray:
    """``size`` places of the type ``code`` (see ``memoryview.cast``), zero at first. Nothing is locked."""

    code: ClassVar[str]

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._places = memoryview(self._map).cast(self.code)  # type: ignore[call-overload]
        self.size: int = len(self._places)

    @classmethod
    def create(cls, size: int) -> Self:
        """A new one."""
        descriptor, name = tempfile.mkstemp(prefix=f"queueapp-{cls.__name__.lower()}-")
        os.ftruncate(descriptor, size * struct.calcsize(cls.code))
        os.close(descriptor)
        return cls(Path(name))

    def remove(self) -> None:
        """Unmap and delete the file."""
        self._places.release()
        self._map.close()
        self.path.unlink(missing_ok=True)
