"""What ``QUEUEAPP["ALERTS"]`` may hold."""

from __future__ import annotations

from typing import Any

from ..conf import settings


def bound_of(name: str, queue: str) -> Any:
    """The bound of a queue: its own, or the one for all; None: it has none."""
    given = settings.ALERTS.get(name)
    return given.get(queue, given.get("*")) if isinstance(given, dict) else given


def channels() -> list[str]:
    """Who is told."""
    return ["signal", *(name for name in ("mail", "webhook") if settings.ALERTS.get(name))]
