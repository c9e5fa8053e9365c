"""Bodies of an older version of their type, made into the one that this process knows, a version at a time.

A step is a function of the plain body (what JSON holds) that returns the plain body of the next version. It runs where
the message is read: nothing in the table is changed, and a message that older workers may still take stays readable for
them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import InvalidOption, UndecodableMessage
from .types import is_typed, type_name, type_version

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
        if not callable(step) or inspect.iscoroutinefunction(step):
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
    for one in range(version, type_version(cls)):
        step = steps.get(one)
        if step is None:
            raise UndecodableMessage(
                f"The body is version {version} of {type_name(cls)}, and nothing says how version {one} becomes "
                f"{one + 1}: "
                f"write @upcast({cls.__qualname__}, {one})."
            )
        try:
            body = step(body)
        except Exception as error:
            raise UndecodableMessage(
                f"The upcast of {type_name(cls)} from version {one} failed: {type(error).__name__}: {error}"
            ) from error
        if body is None:
            raise UndecodableMessage(f"The upcast of {type_name(cls)} from version {one} returned nothing.")
    return body
