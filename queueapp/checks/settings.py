"""What is wrong with the settings of the project, and with those of Celery that name this broker or result backend."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.apps import apps
from django.conf import settings as django_settings
from django.core import checks
from django.core.checks import Error, Tags, Warning, register
from django.db import connections
from django.utils.module_loading import import_string

from .. import delayed, inline, telemetry
from ..conf import settings
from ..errors import InvalidOption
from ..operations.statistics import is_part
from ..registry import queues


@register(Tags.compatibility)
def check_settings(**_: Any) -> list[Any]:
    """queueapp.E001: a setting is not accepted. W001: the peek delay is long. E002: settings contradict each other.
    E004: the delayed store is none. E008: eager mode without an engine. E009: nothing is around handlers. E010: traces
    are asked for without the extra. W009: an alert's bound is for a queue that is not there."""
    try:
        peek_delay = settings.PEEK_DELAY
    except InvalidOption as error:
        return [checks.Error(str(error), id="queueapp.E001")]
    found: list[Any] = []
    if peek_delay > timedelta(seconds=10):
        found.append(
            Warning(
                f"QUEUEAPP.PEEK_DELAY is {peek_delay}: messages may back up for that long.",
                hint="Use 100 ms to 10 s.",
                id="queueapp.W001",
            )
        )
    if settings.DEAD_AFTER < 2 * settings.HEARTBEAT_INTERVAL:
        found.append(
            checks.Error(
                f"QUEUEAPP.DEAD_AFTER ({settings.DEAD_AFTER}) must be at least twice HEARTBEAT_INTERVAL "
                f"({settings.HEARTBEAT_INTERVAL}): one late heartbeat would give away the leases of a live worker.",
                id="queueapp.E002",
            )
        )
    if telemetry.is_missing():
        found.append(
            checks.Error(str(InvalidOption("QUEUEAPP.OPENTELEMETRY", True, telemetry.NEEDS_EXTRA)), id="queueapp.E010")
        )
    if settings.EAGER and not inline.has_engine():
        found.append(
            checks.Error(
                f"QUEUEAPP.EAGER is {settings.EAGER!r}, and nothing here can handle messages.",
                hint="Add 'queueapp.workers' to INSTALLED_APPS.",
                id="queueapp.E008",
            )
        )
    if settings.HANDLER_CONTEXT_MANAGER and (problem := _no_function(settings.HANDLER_CONTEXT_MANAGER)):
        found.append(
            checks.Error(
                f"QUEUEAPP.HANDLER_CONTEXT_MANAGER is {settings.HANDLER_CONTEXT_MANAGER!r}: {problem}. No worker can "
                "start.",
                hint="Name a function of the context that returns a context manager, by its dotted path.",
                id="queueapp.E009",
            )
        )
    try:
        delayed.store_class()
    except InvalidOption as error:
        found.append(checks.Error(str(error), id="queueapp.E004"))
    return [*found, *_unknown_bounds()]


def _unknown_bounds() -> list[Warning]:
    """Names in the bounds of alerts that no queue has: they would never raise an alert."""
    labels = {queue._meta.label for queue in queues} | {"*"}
    return [
        Warning(
            f"QUEUEAPP.ALERTS: {option} has a bound for {name!r}, and no queue has that label: it never raises an "
            "alert.",
            hint="Name a queue as queuestats does, app_label.ClassName; '*' is for all others.",
            id="queueapp.W009",
        )
        for option in ("max_age", "max_waiting")
        if isinstance(given := settings.ALERTS.get(option), dict)
        for name in sorted(given.keys() - labels)
        if not is_part(name)
    ]


def _no_function(path: str) -> str:
    try:
        return "" if callable(import_string(path)) else "it cannot be called"
    except ImportError as error:
        return str(error)


SCHEME = "queueapp://"


@register(Tags.compatibility)
def check_celery(**_: Any) -> list[Any]:
    """queueapp.E110: the app with the tables is not installed. E111: the database does not exist."""
    found: list[Any] = []
    for name in ("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL", "CELERY_RESULT_BACKEND"):
        url = getattr(django_settings, name, None)
        if not isinstance(url, str) or not url.startswith(SCHEME):
            continue
        if not apps.is_installed("queueapp.contrib.celery"):
            found.append(
                Error(
                    f"{name} = {url!r}: its tables belong to the app queueapp.contrib.celery, which is not in "
                    "INSTALLED_APPS.",
                    hint="Add 'queueapp.contrib.celery' to INSTALLED_APPS and run `manage.py migrate`.",
                    id="queueapp.E110",
                )
            )
        alias = url.removeprefix(SCHEME).strip("/") or "default"
        if alias not in connections:
            known = ", ".join(sorted(connections))
            found.append(Error(f"{name} = {url!r} names no database: DATABASES has {known}.", id="queueapp.E111"))
    return found
