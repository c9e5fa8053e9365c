"""The progress of a command: one line on stderr, if that is a terminal."""

from __future__ import annotations

import sys
from time import monotonic
from typing import Any

#: Seconds between two updates of the line.
UPDATE_INTERVAL = 0.2
_WIDTH = 30


class Progress:
    """A bar if the total is known, else a count."""

    def __init__(self, stderr: Any, what: str, total: int | None = None) -> None:
        self._stderr, self._what, self._total = stderr, what, total
        self._shown = sys.stderr is not None and bool(stderr.isatty())
        self._next_at = 0.0
        self._written = False
        #: The number that is done.
        self.count = 0

    def at(self, count: int) -> None:
        """Set the number that is done."""
        self.count = count
        if not self._shown or monotonic() < self._next_at:
            return
        self._next_at = monotonic() + UPDATE_INTERVAL
        self._written = True
        self._stderr.write("\r" + self.line(count), ending="")
        self._stderr.flush()

    def line(self, count: int) -> str:
        """The text of the line."""
        if not self._total:
            return f"{count} {self._what}"
        share = min(1.0, count / self._total)
        bar = "#" * int(share * _WIDTH)
        return f"[{bar:<{_WIDTH}}] {share:4.0%} {count} of {self._total} {self._what}"

    def end(self) -> None:
        """End the line."""
        if self._written:
            self._stderr.write("")
