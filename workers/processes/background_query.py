"""Asking the database for whoever cannot wait for it: on a thread of its own, and not more often than is of use."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import monotonic
from typing import Generic, TypeVar

from django.db import connections

log = logging.getLogger("queueapp.workers")
_T = TypeVar("_T")


class Asked(Generic[_T]):
    """What ``read`` returns, at most so many ``seconds`` old. Whoever asks waits for at most ``patience`` seconds; None: there is no
    answer by then. However many ask, and however long the database takes, one thread does and has a connection."""

    def __init__(self, read: Callable[[], _T], seconds: float = 2.0, patience: float = 5.0) -> None:
        self._read, self._seconds, self._patience = read, seconds, patience
        self._cond = threading.Condition()
        self._found: _T | None = None
        self._read_at = float("-inf")
        self._reading = False

    def __call__(self) -> _T | None:
        """The answer."""
        with self._cond:
            asked = monotonic()
            if asked - self._read_at > self._seconds:
                if not self._reading:
                    # Only once it runs: where no thread can be had now, the next one may be. It waits for the lock to say its end.
                    threading.Thread(target=self._run, name="asking", daemon=True).start()
                    self._reading = True
                self._cond.wait_for(lambda: not self._reading, self._patience)
            return self._found if asked - self._read_at <= self._seconds else None

    def _run(self) -> None:
        found: _T | None = None
        try:
            found = self._read()
        except Exception as error:
            log.warning("Figures could not be read: %s", error)
        finally:
            connections.close_all()
            with self._cond:
                if found is not None:
                    self._found, self._read_at = found, monotonic()
                self._reading = False
                self._cond.notify_all()
