"""System check of ``CELERY_BROKER_TRANSPORT_OPTIONS``."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.checks import Error, Tags, Warning, register

from ...errors import InvalidOption
from .options import TransportOptions, mistyped


@register(Tags.compatibility)
def check_transport_options(**_: Any) -> list[Any]:
    """queueapp.E112: one of the broker's options is not accepted. W112: one is ignored that looks mistyped."""
    given = getattr(settings, "CELERY_BROKER_TRANSPORT_OPTIONS", None) or {}
    if not str(getattr(settings, "CELERY_BROKER_URL", "")).startswith("queueapp://"):
        return []
    try:
        TransportOptions(given)
    except InvalidOption as error:
        return [Error(str(error), id="queueapp.E112")]
    return [
        Warning(
            f"CELERY_BROKER_TRANSPORT_OPTIONS: {name!r} is none of this transport's options and is ignored.",
            hint=f"Did you mean {meant!r}?",
            id="queueapp.W112",
        )
        for name, meant in mistyped(given).items()
    ]
