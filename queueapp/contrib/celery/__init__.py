"""Celery, or any other program on kombu, with the application's own database as its broker.

Importing this makes the URL known to kombu. Its tables belong to an app of their own::

    INSTALLED_APPS = [..., "queueapp", "queueapp.contrib.celery"]
    CELERY_BROKER_URL = "queueapp://"
"""

from __future__ import annotations

from contextlib import suppress

# Without Celery there is nobody who would name the URL.
with suppress(ImportError):
    from kombu.transport import TRANSPORT_ALIASES

    TRANSPORT_ALIASES.setdefault("queueapp", "queueapp.contrib.celery.transport:Transport")
