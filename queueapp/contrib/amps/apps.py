"""The Django app of the ``importamps`` command; it has no tables."""

from __future__ import annotations

from django.apps import AppConfig


class AmpsConfig(AppConfig):
    """Configuration of the ``queueapp.contrib.amps`` app."""

    name = "queueapp.contrib.amps"
    label = "queueapp_amps"
    verbose_name = "AMPS"
