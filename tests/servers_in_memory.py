"""Where the database servers of a run in several processes keep their files: in memory, if there is room.

To make a database of a thousand files takes 0.05 s there and a second on a disk, and the tests make hundreds; tests of
tables take a sixth less.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from project.embedded_postgres.clients import stop
from project.embedded_postgres.data_directory import is_running

VARIABLE = "QUEUEAPP_TEST_SERVERS"
_MEMORY = Path("/dev/shm")
_NAME = "queueapp-tests-{}"
#: A run needs a third of it.
_ROOM = 8 * 2**30


_made: Path | None = None


def make_place() -> None:
    """Make the directory of this run, and remove those of runs that were killed."""
    global _made
    if not _MEMORY.is_dir() or VARIABLE in os.environ:
        return
    for place in _MEMORY.iterdir():
        match = re.fullmatch(_NAME.format(r"(\d+)"), place.name)
        if match and not is_running(int(match[1])):
            shutil.rmtree(place, ignore_errors=True)
    if shutil.disk_usage(_MEMORY).free >= _ROOM:
        _made = _MEMORY / _NAME.format(os.getpid())
        _made.mkdir(mode=0o755)
        os.environ[VARIABLE] = str(_made)  # inherited by the processes of the run


def remove_place() -> None:
    """Stop the servers of this run, and remove their files."""
    if _made is not None:
        for home in _made.glob("gw*/postgres"):
            stop(home.parent)
        shutil.rmtree(_made, ignore_errors=True)
