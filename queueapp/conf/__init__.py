"""The project-wide settings: ``QUEUEAPP = {...}`` in Django's settings, each with default and bounds.

Each is declared once, in the module of what it is about. A queue's ``class Delivery`` and a consumer's arguments come before
these where they have the same name. Reading never touches the database. ``checks`` reads everything once at start.
"""

from __future__ import annotations

from typing import Any

from django.conf import settings as django_settings
from django.core.signals import setting_changed

from ..options import Option, read_all
from . import bodies, delayed, handlers, observability, processes, receiving, retention, retries
from .asyncmonolith_names import translated
from .receiving import MAX_CONCURRENCY

__all__ = ["MAX_CONCURRENCY", "OPTIONS", "Settings", "settings"]

OPTIONS: tuple[Option, ...] = (
    *receiving.OPTIONS,
    *retries.OPTIONS,
    *handlers.OPTIONS,
    *bodies.OPTIONS,
    *processes.OPTIONS,
    *delayed.OPTIONS,
    *retention.OPTIONS,
    *observability.OPTIONS,
)


class Settings:
    """The settings as attributes: ``conf.settings.PEEK_DELAY``. Read on first use, again after an override in tests."""

    def __getattr__(self, name: str) -> Any:
        # Called only for what is not in __dict__: once all are read, a setting is a plain attribute.
        if name not in _NAMES:
            raise AttributeError(f"QUEUEAPP has no setting {name!r}")
        given = translated(getattr(django_settings, "QUEUEAPP", {}), "QUEUEAPP.")
        self.__dict__.update(read_all(OPTIONS, given, "QUEUEAPP."))
        return self.__dict__[name]

    def reload(self) -> None:
        """Forget what was read; the next access reads Django's settings again."""
        self.__dict__.clear()


_NAMES = frozenset(option.name for option in OPTIONS)
settings = Settings()


def _reload(*, setting: str, **_: Any) -> None:
    if setting == "QUEUEAPP":
        settings.reload()


setting_changed.connect(_reload, dispatch_uid="queueapp.conf")
