"""OpenTelemetry: spans and metrics after its messaging conventions, made with its API alone.

The tracer is on while ``QUEUEAPP["OPENTELEMETRY"]`` is; nothing else imports ``spans``.
"""

from typing import Any

from django.core.signals import setting_changed

from ..conf import settings
from ..errors import InvalidOption
from . import tracing

#: What a check says, too.
NEEDS_EXTRA = "False where the extra is not installed: pip install 'queueapp[opentelemetry]'"


def follow() -> None:
    """Trace from now on, or no longer. What is wrong with the setting is said by the checks."""
    try:
        wanted = settings.OPENTELEMETRY
    except InvalidOption:
        return
    if wanted and tracing.tracer is None:
        try:
            from .spans import OpenTelemetry
        except ImportError as error:
            if not (error.name or "").startswith("opentelemetry"):
                raise
            return
        tracing.tracer = OpenTelemetry()
    elif not wanted:
        tracing.tracer = None


def is_missing() -> bool:
    """Whether it is on and cannot be."""
    return bool(settings.OPENTELEMETRY) and tracing.tracer is None


def _changed(*, setting: str, **_: Any) -> None:
    if setting == "QUEUEAPP":
        follow()


setting_changed.connect(_changed, dispatch_uid="queueapp.telemetry")
