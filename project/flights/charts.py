"""Where the bars of a chart stand: numbers in, percentages and pixels out; the templates draw them as inline SVG.

Everything horizontal is in percent of the drawing and everything vertical in pixels, so that a chart fits a telephone
and a desktop with letters of the same size, and without a script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Any

from project.flights.figures import Figure

BAR_ROW = 38
COLUMNS_HEIGHT = 340
_TOP, _BOTTOM, _LEFT = 10, 24, 9.0
_LABEL_EVERY = 3


@dataclass(frozen=True, slots=True)
class Chart:
    """One drawing: the template that draws it, its height in pixels, its marks, and the lines of its scale."""

    template: str
    figures: Sequence[Figure]
    height: int
    marks: list[dict[str, Any]]
    grid: list[dict[str, Any]]


def bars(figures: Sequence[Figure]) -> Chart:
    """Horizontal bars, one row per figure: late, then cancelled, after one another, under a line of text."""
    longest = max((figure.total for figure in figures), default=0) or 1
    marks = []
    for row, figure in enumerate(figures):
        late, cancelled = 100 * figure.late / longest, 100 * figure.cancelled / longest
        marks.append(
            {
                "figure": figure,
                "label": figure.name if figure.name == figure.key else f"{figure.name} ({figure.key})",
                "row_y": row * BAR_ROW,
                "text_y": row * BAR_ROW + 13,
                "y": row * BAR_ROW + 19,
                "late": _percent(late),
                "cancelled_x": _percent(late),
                "cancelled": _percent(cancelled),
            }
        )
    return Chart("flights/_bars.html", figures, len(figures) * BAR_ROW, marks, [])


def columns(figures: Sequence[Figure]) -> Chart:
    """Columns side by side, one per figure: late below, cancelled on top, with a scale on the left."""
    step = _nice_step(max((figure.total for figure in figures), default=0))
    highest = step * max(1, ceil(max((figure.total for figure in figures), default=0) / step))
    height = COLUMNS_HEIGHT - _TOP - _BOTTOM
    slot = (100 - _LEFT) / max(1, len(figures))
    bottom_y = COLUMNS_HEIGHT - _BOTTOM
    marks = []
    for place, figure in enumerate(figures):
        late, cancelled = height * figure.late / highest, height * figure.cancelled / highest
        marks.append(
            {
                "figure": figure,
                "label": figure.key if place % _LABEL_EVERY == 0 else "",
                "x": _percent(_LEFT + slot * (place + 0.12)),
                "width": _percent(slot * 0.76),
                "middle": _percent(_LEFT + slot * (place + 0.5)),
                "slot_x": _percent(_LEFT + slot * place),
                "slot_width": _percent(slot),
                "late_y": f"{bottom_y - late:.2f}",
                "late": f"{late:.2f}",
                "cancelled_y": f"{bottom_y - late - cancelled:.2f}",
                "cancelled": f"{cancelled:.2f}",
            }
        )
    lines = range(0, highest + 1, step)
    grid = [
        {"y": f"{bottom_y - height * value / highest:.2f}", "label": f"{value:,}", "left": _percent(_LEFT)}
        for value in lines
    ]
    return Chart("flights/_columns.html", figures, COLUMNS_HEIGHT, marks, grid)


def _nice_step(highest: int) -> int:
    """A step of 1, 2 or 5 times a power of ten that needs three to five lines."""
    if highest <= 4:
        return 1
    power: int = 10 ** floor(log10(highest / 4))
    return next(power * factor for factor in (1, 2, 5, 10) if highest / (power * factor) <= 5)


def _percent(value: float) -> str:
    return f"{value:.3f}%"
