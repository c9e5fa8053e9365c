"""A Celery broker and result backend in the application's own database; the broker works for any program on kombu.

Importing this package registers the URL scheme with kombu. The tables belong to this app::

    INSTALLED_APPS = [..., "queueapp", "queueapp.contrib.celery"]
    CELERY_BROKER_URL = "queueapp://"
"""

from __future__ import annotations

from contextlib import suppress

# Without kombu the URL scheme has no use.
with suppress(ImportError):
    from kombu.transport import TRANSPORT_ALIASES

    TRANSPORT_ALIASES.setdefault("queueapp", "queueapp.contrib.celery.transport:Transport")
