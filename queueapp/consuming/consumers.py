"""Consumers: the functions and classes that handle messages.

A consumer belongs to a queue and handles one message type, read from the annotation of its first parameter. On a
queue with ``recipients`` several consumers may handle one type, each with a copy of its own; elsewhere a type has one
consumer. A module ``consumers.py`` in an installed app is imported at start.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, Generic, TypeVar

from ..errors import InvalidOption
from ..recoverability import OPTIONS
from .registration import Registration, layers
from .registry import registered

MessageT = TypeVar("MessageT")


class Consumer(Generic[MessageT]):
    """Base of class consumers: subclass with the message type, set ``queue``, write ``handle``.

    >>> class Rebook(Consumer[FlightDelayed]):
    ...     queue = FlightDelays
    ...     attempts = 3
    ...     def handle(self, message: FlightDelayed, context: Context) -> None: ...

    Options are class attributes with the names of ``@consumer``'s arguments. One instance serves all threads.
    """

    queue: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if inspect.isabstract(cls) or cls.queue is None:
            return
        names = {option.name for option in OPTIONS}
        given = {name: getattr(cls, name) for name in dir(cls) if name in names}
        of = next((typing.get_args(b)[0] for b in getattr(cls, "__orig_bases__", ()) if typing.get_args(b)), Any)
        name = f"{cls.__module__}.{cls.__qualname__}"
        registered.add(Registration(cls.queue, name, of, cls().handle, given))

    def handle(self, message: MessageT, context: Any) -> Any:
        """Handle one message; ``async def`` works as well. Raising fails the attempt."""
        raise NotImplementedError


def consumer(queue: Any, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function the handler of a message type of a queue; the function itself stays as it is.

    Any callable will do, sync or async, but no generator: calling one runs nothing of it. If a sync one returns an
    awaitable, that is awaited, within the same time limit. The type is the annotation of the first parameter (none,
    ``dict`` or ``Any``: messages without a type). ``name`` addresses it where it has to outlive a rename. For the other
    arguments see ``OPTIONS``.

    >>> @consumer(FlightDelays, timeout=5, attempts=3, retry_delay=10)
    ... def rebook(message: FlightDelayed, context: Context) -> None: ...

    Raises InvalidOption for a bad argument, or for a second consumer of one type on a queue without ``recipients``.
    """
    name = options.pop("name", None)

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        named = next((one for one in layers(function) if hasattr(one, "__qualname__")), type(function))
        parameters = list(inspect.signature(function).parameters)
        if not parameters:
            raise InvalidOption(
                f"@consumer {named.__qualname__}", function, "a function of (message) or (message, context)"
            )
        of = _annotation(function, named.__qualname__, parameters[0])
        registered.add(Registration(queue, name or f"{named.__module__}.{named.__qualname__}", of, function, options))
        return function

    return register


def _annotation(function: Any, name: str, parameter: str) -> Any:
    """The annotation of a parameter, on the function or on what it wraps. Raises InvalidOption."""
    unknown: NameError | None = None
    for one in layers(function):
        if isinstance(one, FunctionType | MethodType | type):
            try:
                hints = typing.get_type_hints(one)
            except NameError as error:
                unknown = unknown or error
                continue
            if parameter in hints:
                return hints[parameter]
    if unknown is not None:
        accepted = f"annotated with names that exist ({unknown})"
        raise InvalidOption(f"@consumer {name}", function, accepted) from unknown
    return Any
