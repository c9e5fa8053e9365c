"""What a typed body is, the name that its class has on the wire, and the versions of a type."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from inspect import iscoroutinefunction
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from ..errors import InvalidOption, UndecodableMessage

_T = TypeVar("_T", bound=type)


def message_type(name: str | None = None, *, version: int = 1, aliases: Iterable[str] = ()) -> Callable[[_T], _T]:
    """Give a message class a name of its own on the wire, so that it can be moved or shared with other languages.

    ``aliases`` are names that it had before: messages that carry one of them are of this class. ``version`` goes into a
    header when it is above 1; ``upcast`` says how older bodies become of this one, and newer ones are left to workers
    that know them. Subclasses inherit none of it. Raises InvalidOption.

    >>> @message_type("Acme.Sales.OrderPlaced", version=2, aliases=["shop.messages.OrderPlaced"])
    ... class OrderPlaced(msgspec.Struct): ...
    """
    if name is not None:
        _check_name("name", name)
    former = tuple(aliases) if not isinstance(aliases, str) else (aliases,)
    for alias in former:
        _check_name("aliases", alias)
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= MAX_VERSION:
        raise InvalidOption("message_type version", version, f"a whole number from 1 to {MAX_VERSION}")

    def mark(cls: _T) -> _T:
        marks: dict[str, Any] = {"__queue_type__": name, "__queue_version__": version, "__queue_aliases__": former}
        for mark, value in marks.items():
            setattr(cls, mark, value)
        for cached in (type_name, type_names, type_version):
            cached.cache_clear()
        return cls

    return mark


#: A version is a number in a header of unknown origin.
MAX_VERSION = 1_000_000


def _check_name(option: str, name: Any) -> None:
    if not isinstance(name, str) or not name.strip() or any(character in name for character in ";\0"):
        raise InvalidOption(f"message_type {option}", name, "a text that is not empty and holds no ';'")


@lru_cache(maxsize=1024)
def type_name(cls: Any) -> str:
    """The name of a message class in the ``type`` header: ``module.Class`` unless ``@message_type`` gave another."""
    declared = cls.__dict__.get("__queue_type__")
    return declared if declared is not None else f"{cls.__module__}.{cls.__qualname__}"


@lru_cache(maxsize=1024)
def type_version(cls: Any) -> int:
    """Which version of its type a message class is."""
    return int(cls.__dict__.get("__queue_version__", 1))


def known_as(cls: Any) -> tuple[str, ...]:
    """The name of a message class and those that it had before; ('',) for untyped bodies."""
    if not (isinstance(cls, type) and is_typed(cls)):
        return ("",)
    return (type_name(cls), *cls.__dict__.get("__queue_aliases__", ()))


@lru_cache(maxsize=1024)
def type_names(cls: Any) -> tuple[str, ...]:
    """The names of what a body of this class is: its own and those of its typed bases, the nearest first; ('',) for
    untyped bodies."""
    if not (isinstance(cls, type) and is_typed(cls)):
        return ("",)
    return tuple(type_name(base) for base in cls.__mro__ if base is not msgspec.Struct and is_typed(base))


def class_named(cls: Any, name: str) -> type | None:
    """A message class or the one below it that is known by this name, as far as this process has imported it."""
    if not (isinstance(cls, type) and is_typed(cls)):
        return None
    pending = [cls]
    while pending:
        subclass = pending.pop()
        if name in known_as(subclass):
            return subclass
        pending += subclass.__subclasses__()
    return None


def type_name_of(cls: Any) -> str:
    """The ``type`` header of bodies of this class; '' for untyped ones."""
    return type_name(cls) if isinstance(cls, type) and is_typed(cls) else ""


def is_typed(cls: type) -> bool:
    """Whether instances of this class are typed bodies: a msgspec.Struct or a dataclass."""
    return issubclass(cls, msgspec.Struct) or dataclasses.is_dataclass(cls)


#: Default factories whose value is the same each time.
CONSTANT_FACTORIES: tuple[Any, ...] = (list, dict, set, frozenset, tuple)
_STRUCTURED = (inspect.StructType, inspect.DataclassType)


def unstorable(annotation: Any) -> str | None:
    """Why no message can be of this type, in words; None when it can: what JSON holds, and structs and dataclasses of
    it."""
    try:
        info = inspect.type_info(annotation)
    except Exception as error:  # a name that does not exist, a union of two structs, a string
        return str(error)
    if isinstance(info, inspect.UnionType) and any(isinstance(kind, _STRUCTURED) for kind in info.types):
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
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, inspect.Field):
                yield from _walk(part.type, f"{where}.{part.name}", seen)
            elif isinstance(part, inspect.Type):
                yield from _walk(part, where, seen)


# -- versions: bodies of an older version of their type are made into the one that this process knows, step by step ----
#
# A step is a function of the plain body (what JSON holds) that returns the plain body of the next version. It runs
# where the message is read: nothing in the table is changed, and a message that older workers may still take stays
# readable for them.


Step = Callable[[Any], Any]
StepT = TypeVar("StepT", bound=Step)

_STEPS = "__queue_upcasts__"


def upcast(cls: type, from_version: int) -> Callable[[StepT], StepT]:
    """Say how a body of ``from_version`` becomes one of the next; as many of them as there are versions are chained.

    >>> @message_type("Order", version=2)
    ... class Order(msgspec.Struct):
    ...     number: int
    ...     currency: str
    >>> @upcast(Order, 1)
    ... def with_currency(body: dict[str, Any]) -> dict[str, Any]:
    ...     return body | {"currency": "EUR"}

    What it raises makes the message poison, as a body that is not of its type does. Raises InvalidOption.
    """
    if not (isinstance(cls, type) and is_typed(cls)):
        raise InvalidOption("upcast", cls, "a message class: a msgspec.Struct or a dataclass")
    known = type_version(cls)
    if type(from_version) is not int or not 1 <= from_version < known:
        accepted = f"a version older than {type_name(cls)} has, which is {known}" + (
            " (give it one: @message_type(version=2))" if known == 1 else ""
        )
        raise InvalidOption("upcast from_version", from_version, accepted)

    def add(step: StepT) -> StepT:
        if not callable(step) or iscoroutinefunction(step):
            raise InvalidOption(f"@upcast of {type_name(cls)}", step, "a function of the body, and no async one")
        steps = _steps(cls)
        if from_version in steps and steps[from_version] is not step:
            accepted = f"the only one from version {from_version}, and there is {steps[from_version]!r}"
            raise InvalidOption(f"@upcast of {type_name(cls)}", step, accepted)
        steps[from_version] = step
        return step

    return add


def _steps(cls: type) -> dict[int, Step]:
    """A class' own: a subclass has versions of its own."""
    if _STEPS not in cls.__dict__:
        setattr(cls, _STEPS, {})
    found: dict[int, Step] = cls.__dict__[_STEPS]
    return found


def missing_steps(cls: type) -> list[int]:
    """The versions before its own from which a class has no step."""
    steps = cls.__dict__.get(_STEPS, {})
    return [version for version in range(1, type_version(cls)) if version not in steps]


def to_known_version(cls: type, version: int, body: Any) -> Any:
    """A plain body of ``version`` as one of the version that the class is. Raises UndecodableMessage."""
    steps: dict[int, Step] = cls.__dict__.get(_STEPS, {})
    for number in range(version, type_version(cls)):
        step = steps.get(number)
        if step is None:
            raise UndecodableMessage(
                f"The body is version {version} of {type_name(cls)}, and nothing says how version {number} becomes "
                f"{number + 1}: write @upcast({cls.__qualname__}, {number})."
            )
        try:
            body = step(body)
        except Exception as error:
            raise UndecodableMessage(
                f"The upcast of {type_name(cls)} from version {number} failed: {type(error).__name__}: {error}"
            ) from error
        if body is None:
            raise UndecodableMessage(f"The upcast of {type_name(cls)} from version {number} returned nothing.")
    return body
