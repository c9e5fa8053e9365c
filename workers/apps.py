"""The Django app that carries the worker commands.

A checkout has it as ``workers``, an installed project as ``queueapp.workers``: so that ``workers`` is free for a package
of the project's own. Nothing in here says either name; modules name each other relatively.
"""

from __future__ import annotations

from django.apps import AppConfig


class WorkersConfig(AppConfig):
    """Configuration of the app; it has no models."""

    name = __package__
    #: The same wherever the package lies. A project whose own app has this label gives ours another, in a subclass.
    label = "workers"
    verbose_name = "Workers"
