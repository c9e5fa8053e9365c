"""What is measured: the figures with their bars, and the measurements that yield samples of them.

Every figure that compares is a ratio of two measurements made one right after the other, again and again (A B A B ...);
its value is the median of those ratios, so that a machine that is slow for a while is slow for both.
"""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from math import isnan, nan
from statistics import median
from typing import Any

_COMPARE: dict[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le}

#: Where the measurements are, in the order of the table.
FAMILIES = ("drain", "peers", "sending", "backlog", "crowd", "latency", "footprint")


@dataclass(frozen=True)
class Figure:
    """One line of the table. ``bar`` is what must hold, as text: ``>= 1.5``."""

    name: str
    bar: str
    unit: str
    meaning: str

    def holds(self, value: float) -> bool:
        """Whether a value passes the bar."""
        sign, limit = self.bar.split()
        return _COMPARE[sign](value, float(limit))


@dataclass(frozen=True)
class Ratio:
    """A sample that is one measurement divided by another."""

    measured: float
    base: float


Sample = float | Ratio


@dataclass
class Result:
    """The samples of one figure, and what follows from them."""

    figure: Figure
    samples: list[Sample] = field(default_factory=list)
    error: str = ""

    @property
    def values(self) -> list[float]:
        """The samples as plain numbers."""
        return [s.measured / s.base if isinstance(s, Ratio) else s for s in self.samples]

    @property
    def value(self) -> float:
        """The median of the samples; NaN when there is none."""
        return median(self.values) if self.samples else nan

    @property
    def ok(self) -> bool:
        """Whether the bar holds. What could not be measured does not hold."""
        return not self.error and self.figure.holds(self.value)

    @property
    def compared(self) -> tuple[float, float] | None:
        """Medians of what was divided by what; None for a figure that is no ratio."""
        pairs = [s for s in self.samples if isinstance(s, Ratio)]
        return (median(p.measured for p in pairs), median(p.base for p in pairs)) if pairs else None

    def as_json(self) -> dict[str, Any]:
        """The object of ``bench.json``; a ratio also tells what it was made of."""
        found: dict[str, Any] = {
            "figure": self.figure.name,
            "value": None if isnan(self.value) else round(self.value, 4),
            "bar": self.figure.bar,
            "ok": self.ok,
            "unit": self.figure.unit,
            "samples": [round(value, 4) for value in self.values],
            "meaning": self.figure.meaning,
        }
        pairs = [s for s in self.samples if isinstance(s, Ratio)]
        if pairs:
            found["measured"] = [round(p.measured, 3) for p in pairs]
            found["base"] = [round(p.base, 3) for p in pairs]
        if self.error:
            found["error"] = self.error
        return found


@dataclass(frozen=True)
class Scale:
    """How much is measured. ``quick`` proves that everything runs; its numbers mean little."""

    runs: int
    quick: bool = False

    def count(self, messages: int) -> int:
        """So many messages, a tenth of them when quick."""
        return messages // 10 if self.quick else messages


Samples = Iterator[dict[str, Sample]]


@dataclass(frozen=True)
class Measurement:
    """One function that measures one or more figures: it yields a sample of each per run."""

    name: str
    figures: tuple[Figure, ...]
    run: Callable[[Scale], Samples]


_measurements: list[Measurement] = []


def measures(*figures: Figure) -> Callable[[Callable[[Scale], Samples]], Callable[[Scale], Samples]]:
    """Register a generator function as the measurement of these figures."""

    def register(function: Callable[[Scale], Samples]) -> Callable[[Scale], Samples]:
        _measurements.append(Measurement(function.__name__, figures, function))
        return function

    return register


def all_measurements() -> list[Measurement]:
    """Every measurement, in the order of the table. Django has to be set up."""
    for family in FAMILIES:
        import_module(f"tests.benchmarks.measurements.{family}")
    return list(_measurements)


def chosen(patterns: Iterable[str]) -> list[Measurement]:
    """The measurements that have a figure of these names; ``*`` and ``?`` match as in a shell, nothing means all.

    Raises LookupError for a name that matches nothing.
    """
    known = all_measurements()
    wanted: list[Measurement] = []
    for pattern in patterns:
        found = [m for m in known if any(fnmatch.fnmatch(f.name, pattern) for f in m.figures)]
        if not found:
            names = ", ".join(figure.name for one in known for figure in one.figures)
            raise LookupError(f"there is no figure {pattern!r}; known figures: {names}")
        wanted += found
    return [one for one in known if one in wanted] if wanted else known
