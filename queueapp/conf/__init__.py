"""The project-wide settings: ``QUEUEAPP = {...}`` in Django's settings, each with default and bounds.

Each is declared once, in ``options``. Arguments of a consumer and a queue's ``class Delivery`` override settings of the
same name. Reading a setting never touches the database. ``checks`` reads all of them once at start.
"""

from __future__ import annotations

from typing import Any

from django.conf import settings as django_settings
from django.core.signals import setting_changed

from ..errors import InvalidOption
from ..options import Option, read_all
from .asyncmonolith_names import ALIASES, translated
from .options import GROUPS, MAX_CONCURRENCY

__all__ = ["GROUPS", "MAX_CONCURRENCY", "OPTIONS", "Settings", "settings"]

OPTIONS: tuple[Option, ...] = tuple(option for group in GROUPS.values() for option in group)


class Settings:
    """The settings as attributes: ``conf.settings.PEEK_DELAY``. Read on first use, and again after an override in
    tests."""

    def __getattr__(self, name: str) -> Any:
        # Called only for names that are not in __dict__: after the first one, settings are plain attributes.
        if name not in _NAMES:
            raise AttributeError(f"QUEUEAPP has no setting {name!r}")
        given = translated(getattr(django_settings, "QUEUEAPP", {}), "QUEUEAPP.")
        self.__dict__.update(read_all(OPTIONS, given, "QUEUEAPP.", aliases=ALIASES))
        return self.__dict__[name]

    def are_accepted(self) -> bool:
        """Whether they can be read at all. If not, every attribute raises InvalidOption."""
        try:
            return self.PEEK_DELAY is not None
        except InvalidOption:
            return False

    def reload(self) -> None:
        """Drop the cached values; the next access reads Django's settings again."""
        self.__dict__.clear()


_NAMES = frozenset(option.name for option in OPTIONS)
settings = Settings()


def _reload(*, setting: str, **_: Any) -> None:
    if setting == "QUEUEAPP":
        settings.reload()


setting_changed.connect(_reload, dispatch_uid="queueapp.conf")
