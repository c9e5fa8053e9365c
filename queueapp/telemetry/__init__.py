"""OpenTelemetry: spans and metrics after its messaging conventions, made with its API alone.

Nothing here is imported unless ``QUEUEAPP["OPENTELEMETRY"]`` is on; ``following`` looks at that.
"""
