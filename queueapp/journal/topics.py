"""Which topics are journaled, and for how long: ``QUEUEAPP["JOURNAL"]``, read once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import lru_cache
from typing import Any

from django.core.signals import setting_changed

from ..conf import settings
from ..models.delivery.topics import is_pattern

#: Topics whose result is cached. Publishers may use any names, so not all are.
_KEPT = 4096


def finder(text: str) -> Callable[[str], Any]:
    """A function that returns whether a topic matches this name or regular expression. Raises ``re.error``."""
    return re.compile(text).search if is_pattern(text) else text.__eq__


def among(topics: Iterable[str], text: str) -> list[str]:
    """The topics that match a name or regular expression."""
    return list(filter(finder(text), topics))


@lru_cache(maxsize=1)
def _declared() -> tuple[tuple[Callable[[str], Any], timedelta | None], ...]:
    return tuple((finder(text), kept) for text, kept in settings.JOURNAL.items())


@lru_cache(maxsize=_KEPT)
def _place(topic: str) -> int:
    """The index of the declaration that a topic matches; -1: none."""
    return next((n for n, (found, _) in enumerate(_declared()) if found(topic)), -1)


def is_journaled(topic: str) -> bool:
    """Whether messages published to this topic are journaled."""
    return _place(topic) >= 0


def retention_of(topic: str) -> timedelta | None:
    """How long its entries are kept; None: for ever, as those of a topic that is not declared any more."""
    place = _place(topic)
    return _declared()[place][1] if place >= 0 else None


def _forget(*, setting: str, **_: Any) -> None:
    if setting == "QUEUEAPP":
        _declared.cache_clear()
        _place.cache_clear()


setting_changed.connect(_forget, dispatch_uid="queueapp.journal")
