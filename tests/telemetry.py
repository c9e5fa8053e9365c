"""The real OpenTelemetry SDK with what it exports kept in memory. A process can set its providers once, so they are
here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.test import override_settings
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

_exporter = InMemorySpanExporter()
_reader = InMemoryMetricReader()
_provided: list[TracerProvider] = []


class Telemetry:
    """What was exported since the test began."""

    def __init__(self) -> None:
        if not _provided:
            _provided.append(TracerProvider())
            _provided[0].add_span_processor(SimpleSpanProcessor(_exporter))
            trace.set_tracer_provider(_provided[0])
            metrics.set_meter_provider(MeterProvider([_reader]))
        _exporter.clear()
        self._before = self._points()
        self.tracer = trace.get_tracer("tests")

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        """Those that have ended, in that order."""
        return _exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        """Those of this name, in the order in which they began."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start_time or 0)

    def figures(self, name: str) -> dict[tuple[tuple[str, Any], ...], float]:
        """How much was added to a counter, or how many values a histogram got, by attributes, since the test
        began."""
        now = self._points().get(name, {})
        before = self._before.get(name, {})
        return {key: value - before.get(key, 0) for key, value in now.items() if value != before.get(key, 0)}

    @staticmethod
    def _points() -> dict[str, dict[tuple[tuple[str, Any], ...], float]]:
        data = _reader.get_metrics_data()
        found: dict[str, dict[tuple[tuple[str, Any], ...], float]] = {}
        for resource in data.resource_metrics if data is not None else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    points = found.setdefault(metric.name, {})
                    for point in metric.data.data_points:
                        value = point.count if hasattr(point, "count") else point.value
                        points[tuple(sorted((point.attributes or {}).items()))] = value
        return found


@contextmanager
def telemetry(**settings: Any) -> Iterator[Telemetry]:
    """With the setting on, beside these others."""
    telemetry = Telemetry()
    with override_settings(QUEUEAPP=settings | {"OPENTELEMETRY": True}):
        yield telemetry


def is_child_of(span: ReadableSpan, parent: ReadableSpan) -> bool:
    """Whether a span was made in the context of another one, in its trace."""
    assert span.context is not None
    assert parent.context is not None
    return (
        span.parent is not None
        and span.parent.span_id == parent.context.span_id
        and span.context.trace_id == parent.context.trace_id
    )
