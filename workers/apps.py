"""The Django app that carries the worker commands.

A checkout has it as ``workers``, an installed project as ``queueapp.workers``, so that the name ``workers`` is free for
a package of the project. No module in this package uses either name; imports are relative.
"""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig


class WorkersConfig(AppConfig):
    """Configuration of the app; it has no models."""

    name = __package__
    #: The same under both names; an app of the project may be called "workers".
    label = "queueapp_workers"
    verbose_name = "Workers"

    def ready(self) -> None:
        from queueapp import inline

        inline.register_engine(_handle_next, _rehearse)


def _handle_next(queue: Any, alias: str) -> Any:
    """Import the engine only when a message is handled, which most processes of a site never do."""
    from .inline import handle_next

    return handle_next(queue, alias)


def _rehearse(queue: Any, alias: str, columns: Any) -> Any:
    from .inline import rehearse

    return rehearse(queue, alias, columns)
