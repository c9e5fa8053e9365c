"""Checks of Celery settings that name this broker or result backend."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.conf import settings
from django.core.checks import Error, Tags, register
from django.db import connections

SCHEME = "queueapp://"


@register(Tags.compatibility)
def check_celery(**_: Any) -> list[Any]:
    """queueapp.E110: the app with the tables is not installed. E111: the database does not exist."""
    found: list[Any] = []
    for name in ("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL", "CELERY_RESULT_BACKEND"):
        url = getattr(settings, name, None)
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
