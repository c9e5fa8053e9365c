"""Reports the outcome: a progress line while it runs, a table, and ``bench.json``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from time import monotonic

from tests.benchmarks.figures import Result

_BAR = 24


class Progress:
    """One line on stderr that is rewritten, on a terminal only."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._started = monotonic()
        self._shown = sys.stderr.isatty()

    def show(self, doing: str) -> None:
        """Say what is being measured now."""
        if not self._shown:
            return
        filled = _BAR * self._done // max(1, self._total)
        minutes, seconds = divmod(int(monotonic() - self._started), 60)
        bar = "#" * filled + "." * (_BAR - filled)
        line = f"[{bar}] {self._done}/{self._total}  {minutes}:{seconds:02d}  {doing}"
        sys.stderr.write("\r\x1b[K" + line[: os.get_terminal_size(sys.stderr.fileno()).columns - 1])
        sys.stderr.flush()

    def advance(self) -> None:
        """One run of one measurement is done."""
        self._done += 1

    def clear(self) -> None:
        """Leave the line to others."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def line(result: Result) -> str:
    """One line of the table."""
    if result.error:
        return f"{result.figure.name:<26} {'failed':>9} {'':<6} {result.figure.bar:<8} MISSED  {result.error}"
    if result.absent:
        return f"{result.figure.name:<26} {'':>9} {'':<6} {result.figure.bar:<8} absent  {result.absent}"
    values = result.values
    spread = f"{number(min(values))}-{number(max(values))}" if len(values) > 1 else ""
    verdict = ("ok" if result.figure.bar else "info") if result.ok else "MISSED"
    compared = result.compared
    made_of = f"{number(compared[0])} / {number(compared[1])}" if compared else ""
    unit = "" if result.figure.unit == "ratio" else result.figure.unit
    return (
        f"{result.figure.name:<26} {number(result.value):>9} {unit:<6} {result.figure.bar:<8} "
        f"{verdict:<7} {spread:<15} {made_of:<19} n={len(values)}"
    )


def heading() -> str:
    """The line above the table."""
    return f"{'figure':<26} {'value':>9} {'unit':<6} {'bar':<8} {'':<7} {'samples':<15} {'measured / base':<19}"


def number(value: float) -> str:
    """A number with about three digits that mean something."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def summary(results: Sequence[Result]) -> str:
    """One closing line."""
    judged = [result for result in results if result.error or (result.figure.bar and not result.absent)]
    missed = [result.figure.name for result in judged if not result.ok]
    absent = [result.figure.name for result in results if result.absent]
    return (
        f"{len(judged) - len(missed)} of {len(judged)} bars hold"
        + (f"; missed: {', '.join(missed)}" if missed else "")
        + (f"; not measured here: {', '.join(absent)}" if absent else "")
        + "."
    )


def write_json(path: Path, results: Iterable[Result]) -> None:
    """Write ``bench.json``: a list with one object per figure."""
    path.write_text(json.dumps([result.as_json() for result in results], indent=1) + "\n")
