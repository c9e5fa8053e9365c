"""The Django app that carries the worker commands."""

from __future__ import annotations

from django.apps import AppConfig


class WorkersConfig(AppConfig):
    """Configuration of the ``workers`` app; it has no models."""

    name = "workers"
    verbose_name = "Workers"
