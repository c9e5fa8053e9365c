"""Charts of a queue's history, drawn on the server as SVG: without scripts and without inline styles, so that a strict
content security policy allows them. Colours come from the style sheet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

#: A value at a time; None: unknown.
Series = Sequence[tuple[datetime, float | None]]

SPARK_WIDTH, SPARK_HEIGHT = 72, 20


def sparkline(series: Series, end: datetime, span: timedelta, label: str) -> SafeString:
    """A line without axes. Its label says in words what it shows."""
    known = [value for _, value in series if value is not None]
    if not known:
        return format_html('<span class="queueapp-nothing">{}</span>', "\u2013")
    lines = _lines(series, end, span, max(known), SPARK_WIDTH, SPARK_HEIGHT)
    text = f"{label}: from {known[0]:,.0f} to {known[-1]:,.0f}, highest {max(known):,.0f}"
    return format_html(
        '<svg class="queueapp-spark" width="{}" height="{}" role="img" aria-label="{}"><title>{}</title>{}</svg>',
        SPARK_WIDTH, SPARK_HEIGHT, text, text, _paths(lines, "queueapp-line-1"),
    )  # fmt: skip


CHART_WIDTH, CHART_HEIGHT = 600, 140
#: Rows of the table below a chart.
TABLE_ROWS = 60


@dataclass(frozen=True)
class Chart:
    """Lines over time with a table of the same values. Texts are outside the SVG, which is stretched to the width of
    the page."""

    title: str
    #: The name of each line, and its values.
    lines: Sequence[tuple[str, Series]]
    end: datetime
    span: timedelta
    text_of: Callable[[float], str]

    @property
    def highest(self) -> float:
        """The value at the upper edge."""
        return max((value for _, series in self.lines for _, value in series if value is not None), default=0.0)

    @property
    def is_empty(self) -> bool:
        """Whether no value is known."""
        return not any(value is not None for _, series in self.lines for _, value in series)

    @property
    def scale(self) -> str:
        """The value at the upper edge as text."""
        return self.text_of(self.highest)

    @property
    def svg(self) -> SafeString:
        """The drawing. Screen readers get its label, and the table."""
        paths = [
            _paths(_lines(series, self.end, self.span, self.highest, CHART_WIDTH, CHART_HEIGHT), f"queueapp-line-{n}")
            for n, (_, series) in enumerate(self.lines, 1)
        ]
        label = f"{self.title}: {', '.join(name for name, _ in self.lines)}; highest {self.scale}"
        return format_html(
            '<svg class="queueapp-chart" width="100%" height="{}" viewBox="0 0 {} {}" preserveAspectRatio="none" '
            'role="img" aria-label="{}">{}</svg>',
            CHART_HEIGHT, CHART_WIDTH, CHART_HEIGHT, label, format_html_join("", "{}", ((path,) for path in paths)),
        )  # fmt: skip

    @property
    def rows(self) -> list[tuple[datetime, list[str]]]:
        """The table, the newest first: every so many points, so that it has at most ``TABLE_ROWS``."""
        times = sorted({at for _, series in self.lines for at, _ in series}, reverse=True)
        values: list[dict[datetime, Any]] = [dict(series) for _, series in self.lines]
        step = -(-len(times) // TABLE_ROWS) or 1
        return [
            (at, ["\u2013" if (value := line.get(at)) is None else self.text_of(value) for line in values])
            for at in times[::step]
        ]


def _paths(lines: list[str], name: str) -> SafeString:
    return format_html_join("", '<polyline class="{}" points="{}"/>', ((name, line) for line in lines))


def _lines(series: Series, end: datetime, span: timedelta, highest: float, width: float, height: float) -> list[str]:
    """The points of each part of the line: it is broken where a value is unknown or missing. A pixel is left free at
    either edge for the width of the stroke."""
    gap = max(span / 20, timedelta(minutes=3))
    parts: list[list[str]] = [[]]
    last: datetime | None = None
    for at, value in series:
        if value is None or (last is not None and at - last > gap):
            parts.append([])
        if value is None:
            continue
        last = at
        x = width * max(0.0, 1 - (end - at) / span)
        y = 1 + (height - 2) * (1 - (value / highest if highest else 0.0))
        parts[-1].append(f"{x:.1f},{y:.1f}")
    # A single point is drawn as a short line.
    return [" ".join(part) if len(part) > 1 else f"{part[0]} {part[0]}" for part in parts if part]
