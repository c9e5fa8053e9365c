"""Sets the SDK up as the documentation says, in each process that has Django."""

import os
from pathlib import Path

from django.apps import AppConfig


class TracedConfig(AppConfig):
    name = "tests.traced"
    label = "traced"

    def ready(self) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

        if path := os.environ.get("TESTS_TRACES"):
            # A minute: what is there earlier was flushed by the end of its process.
            out = Path(path).open("a", buffering=1)  # noqa: SIM115
            exporter = ConsoleSpanExporter(out=out, formatter=lambda span: span.to_json(indent=None) + "\n")
            provider = TracerProvider()
            provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=60_000))
            trace.set_tracer_provider(provider)
