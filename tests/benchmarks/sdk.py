"""OpenTelemetry's SDK for the benchmarks: every span is made, kept in a batch, and exported to nowhere."""

from __future__ import annotations

import os
from collections.abc import Sequence

#: In the environment of a process that is to have it.
SDK = "BENCH_SDK"


def provide() -> None:
    """Set it up, once per process."""
    from opentelemetry import metrics, trace
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    if isinstance(trace.get_tracer_provider(), TracerProvider):
        return

    class Nowhere(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Nowhere(), max_queue_size=100_000))
    trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider())


def provide_if_asked() -> None:
    """As the environment says."""
    if os.environ.get(SDK):
        provide()
