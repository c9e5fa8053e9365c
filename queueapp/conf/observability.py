"""Settings of alerts, metrics and tracing."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ..options import Option


def _is_alerts(value: dict[Any, Any]) -> bool:
    return all(name in _ALERTS and _ALERTS[name](given) for name, given in value.items())


def _each(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """One value for all queues, or a dict of values by queue."""
    return lambda given: (
        all(isinstance(name, str) and accepts(one) for name, one in given.items())
        if isinstance(given, dict)
        else accepts(given)
    )


_ALERTS: dict[str, Callable[[Any], bool]] = {
    "mail": lambda given: isinstance(given, list | tuple) and all(isinstance(one, str) and "@" in one for one in given),
    "webhook": lambda given: isinstance(given, str) and given.startswith(("https://", "http://")),
    "max_age": _each(lambda given: isinstance(given, timedelta) and given > timedelta(0)),
    "max_waiting": _each(lambda given: type(given) is int and given >= 0),
    "poison": lambda given: isinstance(given, bool),
    "dead_worker": lambda given: isinstance(given, bool),
    "every": lambda given: isinstance(given, timedelta) and timedelta(seconds=1) <= given <= timedelta(hours=1),
}


OPTIONS: tuple[Option, ...] = (
    Option(
        "ALERTS",
        dict,
        {},
        "Conditions that raise alerts, and the channels that are notified ([alerts](howto/alerts.md)); empty: none.",
        accept=_is_alerts,
        words="a dict with any of mail (a list of addresses), webhook (an http or https URL), max_age (a timedelta), "
        "max_waiting (a "
        "whole number from 0; either also a dict of queues, '*' for the others), poison and dead_worker (True or "
        "False), every (a "
        "timedelta from 0:00:01 to 1:00:00)",
    ),
    Option(
        "METRICS_TOKEN",
        str,
        "",
        "Bearer token required to read [the metrics](monitoring.md#prometheus) without a login; empty: a login is "
        "required.",
    ),
    Option(
        "OPENTELEMETRY",
        bool,
        False,
        "Trace messages and measure them with OpenTelemetry ([tracing](howto/tracing.md)); needs "
        "`queueapp[opentelemetry]`.",
    ),
)
