"""What is measured: the figures with their bars, and the measurements that yield samples of them.

Every figure that compares is a ratio of two measurements made one right after the other, again and again (A B A B ...);
its value is the median of those ratios, so that a machine that is slow for a while is slow for both. What must not
happen at all is counted, and its value is the sum over the runs.
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
FAMILIES = (
    "drain",
    "several",
    "peers",
    "sending",
    "keyed",
    "flow",
    "backlog",
    "crowd",
    "wal",
    "latency",
    "crash_tracking",
    "stopping",
    "footprint",
    "filtering",
    "amps",
    "tasks",
    "tracing",
    "celery",
    "spark",
)


@dataclass(frozen=True)
class Figure:
    """One line of the table. ``bar`` is what must hold, as text: ``>= 1.5``; without one a figure is reported, not
    judged. ``over_runs`` makes its value of the samples."""

    name: str
    bar: str
    unit: str
    meaning: str
    over_runs: Callable[[Iterable[float]], float] = median

    def holds(self, value: float) -> bool:
        """Whether a value passes the bar."""
        if not self.bar:
            return True
        sign, limit = self.bar.split()
        return _COMPARE[sign](value, float(limit))


@dataclass(frozen=True)
class Ratio:
    """A sample that is one measurement divided by another. Raises ValueError where there is nothing to divide by."""

    measured: float
    base: float

    def __post_init__(self) -> None:
        if not self.base > 0:
            raise ValueError(
                f"measured {self.measured:g} beside {self.base:g}: what it is compared with did not happen"
            )


@dataclass(frozen=True)
class Beside:
    """A sample without a ratio; the figure that it was measured beside is reported with it."""

    measured: float
    base: float


@dataclass(frozen=True)
class Absent:
    """There is no sample: this machine lacks what it takes."""

    reason: str


Sample = float | Ratio | Beside | Absent


@dataclass
class Result:
    """The samples of one figure, and what follows from them."""

    figure: Figure
    samples: list[Sample] = field(default_factory=list)
    error: str = ""

    @property
    def values(self) -> list[float]:
        """The samples as plain numbers."""
        return [_number(s) for s in self.samples if not isinstance(s, Absent)]

    @property
    def value(self) -> float:
        """What the samples come to, mostly their median; NaN when there is none."""
        return self.figure.over_runs(self.values) if self.values else nan

    @property
    def absent(self) -> str:
        """What this machine lacks for this figure; '' when it was measured."""
        return next((s.reason for s in self.samples if isinstance(s, Absent)), "")

    @property
    def ok(self) -> bool:
        """Whether the bar holds. What failed to be measured does not hold; what cannot be measured here is no miss."""
        return not self.error and (bool(self.absent) or (bool(self.values) and self.figure.holds(self.value)))

    @property
    def pairs(self) -> list[Ratio | Beside]:
        """The samples that were measured beside something."""
        return [s for s in self.samples if isinstance(s, Ratio | Beside)]

    @property
    def compared(self) -> tuple[float, float] | None:
        """Medians of what was measured beside what; None for a figure that stands alone."""
        pairs = self.pairs
        return (median(p.measured for p in pairs), median(p.base for p in pairs)) if pairs else None

    def as_json(self) -> dict[str, Any]:
        """The object of ``bench.json``; a figure that compares also tells what it was made of."""
        found: dict[str, Any] = {
            "figure": self.figure.name,
            "value": None if isnan(self.value) else round(self.value, 4),
            "bar": self.figure.bar,
            "ok": self.ok,
            "unit": self.figure.unit,
            "samples": [round(value, 4) for value in self.values],
            "meaning": self.figure.meaning,
        }
        if self.pairs:
            found["measured"] = [round(p.measured, 3) for p in self.pairs]
            found["base"] = [round(p.base, 3) for p in self.pairs]
        if self.absent:
            found["absent"] = self.absent
        if self.error:
            found["error"] = self.error
        return found


def _number(sample: float | Ratio | Beside) -> float:
    if isinstance(sample, Ratio):
        return sample.measured / sample.base
    return sample.measured if isinstance(sample, Beside) else sample


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
            names = ", ".join(figure.name for item in known for figure in item.figures)
            raise LookupError(f"there is no figure {pattern!r}; known figures: {names}")
        wanted += found
    return [item for item in known if item in wanted] if wanted else known
