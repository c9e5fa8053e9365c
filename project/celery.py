"""The site's Celery: its broker and its results are the site's own database."""

from __future__ import annotations

from celery import Celery

import queueapp.contrib.celery  # noqa: F401 - makes the URL known

app = Celery("project")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
