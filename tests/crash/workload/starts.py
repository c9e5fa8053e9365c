"""The file of starts: each start of a handler or task is a line in the file ``CRASH_STARTS``, written by one ``write``:
it tells of attempts that were rolled back or died as well."""

from __future__ import annotations

import os
import time

_descriptor: int | None = None


def note(key: str, label: str, attempt: int, process: int | None = None) -> None:
    """This process, or that one, starts on a message; nothing without a file."""
    global _descriptor
    path = os.environ.get("CRASH_STARTS")
    if path is None:
        return
    if _descriptor is None:
        _descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(_descriptor, f"{key} {label} {attempt} {process or os.getpid()} {time.time():.3f}\n".encode())
