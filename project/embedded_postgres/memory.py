"""How much of the machine's memory the server may keep pages in."""

import contextlib
import os
from pathlib import Path

_SMALLEST_MB, _LARGEST_MB = 128, 2048
_MB = 2**20


def shared_buffers_mb(container_limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """A tenth of the memory there is, from 128 MB to 2 GB: a backlog of a million leased messages is 0.8 GB."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no container, or "max"
        memory = min(memory, int(container_limit.read_text()))
    return max(_SMALLEST_MB, min(_LARGEST_MB, memory // 10 // _MB))
