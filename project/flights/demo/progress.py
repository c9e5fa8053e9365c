"""How far the demo is: a bar that is drawn over itself on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import shutil
from time import monotonic
from typing import TextIO

BAR_WIDTH = 24
SECONDS_BETWEEN_LINES = 5.0
_SECONDS_BETWEEN_DRAWINGS = 0.1


class Progress:
    """Writes to ``stream``. One phase after the other: ``begin``, ``show`` again and again, ``end``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._phase = ""
        self._total = 0
        self._began = self._next = 0.0

    def say(self, text: str) -> None:
        """A line of its own; on a terminal the bar comes again below it."""
        self._clear()
        print(text, file=self._stream, flush=True)

    def begin(self, phase: str, total: int) -> None:
        """Start a phase that counts up to ``total``."""
        self._phase, self._total = phase, total
        self._began = monotonic()
        self._next = 0.0 if self._is_terminal else self._began + SECONDS_BETWEEN_LINES
        if self._is_terminal:
            self.show(0)

    def show(self, done: int, note: str = "") -> None:
        """Say that ``done`` of the total are done, if it is time to."""
        now = monotonic()
        if now < self._next:
            return
        self._next = now + (_SECONDS_BETWEEN_DRAWINGS if self._is_terminal else SECONDS_BETWEEN_LINES)
        share = min(1.0, done / self._total) if self._total else 1.0
        text = f"{done:,} of {self._total:,}{f'   {note}' if note else ''}"
        if not self._is_terminal:
            print(f"{self._phase}: {text}", file=self._stream, flush=True)
            return
        filled = round(BAR_WIDTH * share)
        line = f"{self._phase:<11}[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {share:4.0%}  {text}"
        # A line that wraps could not be drawn over.
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{line[:width]}", end="", file=self._stream, flush=True)

    def end(self) -> None:
        """The phase is over: the report says what came of it."""
        self._clear()

    def _clear(self) -> None:
        if self._is_terminal:
            print("\r\x1b[K", end="", file=self._stream, flush=True)
