"""The Django app that carries the worker commands.

A checkout has it as ``workers``, an installed project as ``queueapp.workers``: so that ``workers`` is free for a package
of the project's own. Nothing in here says either name; modules name each other relatively.
"""

from __future__ import annotations

from django.apps import AppConfig


class WorkersConfig(AppConfig):
    """Configuration of the app; it has no models."""

    name = __package__
    #: The same wherever the package lies, and free for it: an app of the project's own may well be called "workers".
    label = "queueapp_workers"
    verbose_name = "Workers"
