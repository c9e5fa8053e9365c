"""How far a command is: one line on stderr, where somebody looks at it."""

from __future__ import annotations

import sys
from time import monotonic
from typing import Any

#: Seconds between two times that the line is written.
EVERY = 0.2
_WIDTH = 30


class Progress:
    """A bar where the total is known, else a count. Writes nothing where stderr is no terminal."""

    def __init__(self, stderr: Any, what: str, total: int | None = None) -> None:
        self._stderr, self._what, self._total = stderr, what, total
        self._shown = sys.stderr is not None and bool(stderr.isatty())
        self._next_at = 0.0
        self._written = False
        #: So many are done.
        self.count = 0

    def at(self, count: int) -> None:
        """So many are done now."""
        self.count = count
        if not self._shown or monotonic() < self._next_at:
            return
        self._next_at = monotonic() + EVERY
        self._written = True
        self._stderr.write("\r" + self.line(count), ending="")
        self._stderr.flush()

    def line(self, count: int) -> str:
        """What is written."""
        if not self._total:
            return f"{count} {self._what}"
        share = min(1.0, count / self._total)
        bar = "#" * int(share * _WIDTH)
        return f"[{bar:<{_WIDTH}}] {share:4.0%} {count} of {self._total} {self._what}"

    def end(self) -> None:
        """What follows begins on a line of its own."""
        if self._written:
            self._stderr.write("")
