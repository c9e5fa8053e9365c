"""Tools for the tests of a project: ``Kit``, ``QueueTestMixin``, ``plugin`` for pytest, ``delayed_store`` for custom
stores. Nothing of it is imported by the app itself, and none of it before it is used: pytest loads its
plugins first."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..inline import Outcome
    from .kit import Kit, QueueTestMixin, Sent, reset_caches

__all__ = ["Kit", "Outcome", "QueueTestMixin", "Sent", "reset_caches"]

_PUBLIC = {"Kit": ".kit", "Outcome": "..inline", "QueueTestMixin": ".kit", "Sent": ".kit", "reset_caches": ".kit"}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
