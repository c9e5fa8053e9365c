"""What a typed body is, and the name that its class has on the wire."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

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


_STRUCTURED = (inspect.StructType, inspect.DataclassType)


def unstorable(annotation: Any) -> str | None:
    """Why no message can be of this type, in words; None when it can: what JSON holds, and structs and dataclasses of it."""
    try:
        info = inspect.type_info(annotation)
    except Exception as error:  # a name that does not exist, a union of two structs, a string
        return str(error)
    if isinstance(info, inspect.UnionType) and any(isinstance(one, _STRUCTURED) for one in info.types):
        return "it handles one type, and this is a union: write a consumer for each"
    for where, found in _walk(info, getattr(annotation, "__qualname__", ""), set()):
        if isinstance(found, inspect.CustomType) and found.cls is not object:
            return f"{where} is a {found.cls.__module__}.{found.cls.__qualname__}, which JSON cannot hold"
        if isinstance(found, inspect.DataclassType) and not dataclasses.is_dataclass(found.cls):
            return f"{where} is an attrs class"
    return None


def _walk(info: inspect.Type, where: str, seen: set[int]) -> Iterator[tuple[str, inspect.Type]]:
    """A type and those that it is made of, each with the place of the field that it belongs to."""
    if id(info) in seen:
        return
    seen.add(id(info))
    yield where, info
    for value in (getattr(info, name) for name in info.__struct_fields__):
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, inspect.Field):
                yield from _walk(one.type, f"{where}.{one.name}", seen)
            elif isinstance(one, inspect.Type):
                yield from _walk(one, where, seen)
