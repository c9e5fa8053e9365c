"""What a typed body is, and the name that its class has on the wire."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T", bound=type)


def message_type(name: str) -> Callable[[_T], _T]:
    """Give a message class a name of its own on the wire, so that it can be moved or shared with other languages.

    >>> @message_type("Acme.Sales.OrderPlaced")
    ... class OrderPlaced(msgspec.Struct): ...
    """

    def mark(cls: _T) -> _T:
        cls.__queue_type__ = name  # type: ignore[attr-defined]
        type_name.cache_clear()
        return cls

    return mark


@lru_cache(maxsize=1024)
def type_name(cls: Any) -> str:
    """The name of a message class in the ``type`` header: ``module.Class`` unless ``@message_type`` gave another."""
    own = cls.__dict__.get("__queue_type__")
    return own if own is not None else f"{cls.__module__}.{cls.__qualname__}"


def type_name_of(cls: Any) -> str:
    """The ``type`` header of bodies of this class; '' for untyped ones."""
    return type_name(cls) if isinstance(cls, type) and is_typed(cls) else ""


def is_typed(cls: type) -> bool:
    """Whether instances of this class are typed bodies: a msgspec.Struct or a dataclass."""
    return issubclass(cls, msgspec.Struct) or dataclasses.is_dataclass(cls)
