"""Consumers: the functions and classes that handle messages.

A consumer belongs to a queue and handles one message type, read from the annotation of its first parameter. On a
queue with ``recipients`` several consumers may handle one type, each with a copy of its own; elsewhere a type has one
consumer. A module ``consumers.py`` in an installed app is imported at start.
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from types import FunctionType, MethodType
from typing import Any, Generic, TypedDict, TypeVar, Unpack

from django.db import models

from ..errors import InvalidOption, UnknownOption
from ..failures.recoverability import Verdict
from .registration import OPTIONS, Registration, located, source_location, unwrap
from .registry import registered

MessageT = TypeVar("MessageT")
HandlerT = TypeVar("HandlerT", bound=Callable[..., Any])


class ConsumerOptions(TypedDict, total=False):
    """What ``@consumer`` takes beside the queue, for type checkers; ``OPTIONS`` has bounds and meaning."""

    name: str
    aliases: Iterable[str]
    timeout: timedelta | float | None
    attempts: int | None
    retry_delay: timedelta | float | None
    retry_delay_increase: timedelta | float | None
    retry_backoff: float | None
    retry_backoff_max: timedelta | float | None
    retry_jitter: float | None
    immediate_retries: int | None
    unrecoverable: tuple[type[BaseException], ...] | None
    policy: Callable[[Any], Verdict] | None
    batch: int | None
    batch_wait: timedelta | float | None
    concurrency: int | None


class Consumer(Generic[MessageT]):
    """Base of class consumers: subclass with the message type, set ``queue``, write ``handle``.

    >>> class Rebook(Consumer[FlightDelayed]):
    ...     queue = FlightDelays
    ...     attempts = 3
    ...     def handle(self, message: FlightDelayed, context: Context) -> None: ...

    Options are class attributes with the names of ``@consumer``'s arguments. One instance serves all threads. A class
    without ``queue`` is a base for others. Any other public attribute of the class is refused as a misspelt option;
    begin its name with an underscore or write it in capitals. Raises InvalidOption.
    """

    queue: type[models.Model] | None = None
    # For type checkers: the names of ``ConsumerOptions``.
    name: str
    aliases: Iterable[str]
    timeout: timedelta | float | None
    attempts: int | None
    retry_delay: timedelta | float | None
    retry_delay_increase: timedelta | float | None
    retry_backoff: float | None
    retry_backoff_max: timedelta | float | None
    retry_jitter: float | None
    immediate_retries: int | None
    unrecoverable: tuple[type[BaseException], ...] | None
    policy: Callable[[Any], Verdict] | None
    batch: int | None
    batch_wait: timedelta | float | None
    concurrency: int | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if inspect.isabstract(cls) or cls.queue is None:
            return
        own_name = f"{cls.__module__}.{cls.__qualname__}"
        location = source_location(cls)
        if ", line " not in location:  # the class has no function yet
            location += f", line {sys._getframe(1).f_lineno}"
        with located(location):
            _refuse_no_queue(cls.queue, cls.__qualname__)
            if cls.handle is Consumer.handle:
                raise InvalidOption(f"consumer {own_name}", cls, "a class with a method handle(self, message, context)")
            _refuse_unknown_attributes(cls, own_name)
            names = {option.name for option in OPTIONS}
            given = {name: getattr(cls, name) for name in dir(cls) if name in names}
            of = next((typing.get_args(b)[0] for b in getattr(cls, "__orig_bases__", ()) if typing.get_args(b)), Any)
            if given.get("batch") is not None:
                of = _element(of, own_name)
            try:
                handler = cls().handle
            except TypeError as error:
                accepted = f"a class that can be made without arguments ({error})"
                raise InvalidOption(f"consumer {own_name}", cls, accepted) from error
            name, aliases = getattr(cls, "name", None) or own_name, getattr(cls, "aliases", ())
            registered.add(Registration(cls.queue, name, of, handler, given, aliases=aliases))

    def handle(self, message: MessageT, context: Any) -> Any:
        """Handle one message, with its ``Context``; a ``Consumer[list[FlightDelayed]]`` with a ``batch`` handles
        several, with their ``BatchContext``. It may be ``async def``. Raising fails the attempt."""
        raise NotImplementedError


def consumer(queue: type[models.Model], **options: Unpack[ConsumerOptions]) -> Callable[[HandlerT], HandlerT]:
    """Make a function the handler of a message type of a queue; the function itself stays unchanged.

    Any callable works, sync or async, but no generator: calling one runs nothing of it. If a sync one returns an
    awaitable, that is awaited within the same time limit. The type is the annotation of the first parameter (none,
    ``dict`` or ``Any``: messages without a type); a consumer of a base class handles its subclasses as well. ``name``
    addresses it independently of the function's name, and ``aliases`` are its former names. For the other arguments see
    ``OPTIONS``.

    >>> @consumer(FlightDelays, timeout=5, attempts=3, retry_delay=10)
    ... def rebook(message: FlightDelayed, context: Context) -> None: ...

    Raises InvalidOption for a bad argument, or for a second consumer of one type on a queue without ``recipients``,
    with the file and the line.
    """
    caller = sys._getframe(1)
    here = f"{caller.f_code.co_filename}, line {caller.f_lineno}"
    with located(source_location(queue) if isinstance(queue, FunctionType) else here):
        _refuse_no_queue(queue)
    given: dict[str, Any] = dict(options)
    name, aliases = given.pop("name", None), given.pop("aliases", ())

    def register(function: HandlerT) -> HandlerT:
        with located(source_location(function) or here):
            if not callable(function):
                raise InvalidOption("@consumer", function, "above a function of (message) or (message, context)")
            named = next((layer for layer in unwrap(function) if hasattr(layer, "__qualname__")), type(function))
            full = name or f"{named.__module__}.{named.__qualname__}"
            of = _annotation(function, named.__qualname__)
            if given.get("batch") is not None:
                of = _element(of, full)
            registered.add(Registration(queue, full, of, function, given, aliases=aliases))
        return function

    return register


def _element(of: Any, name: str) -> Any:
    """The type of the messages in the list that the handler of a batch takes. Raises InvalidOption."""
    if of is Any:
        return Any
    if (found := _listed(of)) is not None:
        return found
    accepted = "annotated as a list, list[OrderPlaced] for one: with a batch its handler takes several messages at once"
    raise InvalidOption(f"messages of consumer {name}", of, accepted)


def _listed(of: Any) -> Any:
    """The element type of a list or sequence type; None: it is another type."""
    if of in (list, Sequence):
        return Any
    arguments = typing.get_args(of)
    return arguments[0] if typing.get_origin(of) in (list, Sequence) and len(arguments) == 1 else None


def _refuse_no_queue(queue: Any, above: str = "") -> None:
    """Raise InvalidOption for a value that is not the class of a queue with a table."""
    option = f"queue of {above}" if above else "queue of @consumer"
    if isinstance(queue, FunctionType):
        accepted = f"the class of a queue: write @consumer(Orders), with parentheses, above {queue.__name__}"
        raise InvalidOption(option, queue, accepted)
    if isinstance(queue, str):
        raise InvalidOption(option, queue, "the class of a queue, not its name: import it from its models")
    if not (isinstance(queue, type) and hasattr(queue, "delivery") and hasattr(queue, "_meta")):
        raise InvalidOption(option, queue, "the class of a queue, a subclass of queueapp.Queue")
    if queue._meta.abstract:
        raise InvalidOption(option, queue, "a queue with a table, and this class is abstract")


def _refuse_unknown_attributes(cls: type, name: str) -> None:
    """Raise UnknownOption for an attribute that is no option: most likely it is misspelt."""
    known = {"queue", "name", "aliases", *(option.name for option in OPTIONS)}
    for base in cls.__mro__[: cls.__mro__.index(Consumer)]:
        for attribute, value in vars(base).items():
            declared = (
                attribute.startswith("_") or attribute.isupper() or isinstance(value, type) or hasattr(value, "__get__")
            )
            if attribute not in known and not declared:
                advice = " A value of the class' own is written in CAPITALS or begins with an underscore."
                raise UnknownOption(f"consumer {name}: ", attribute, value, known, advice)


def _annotation(function: Any, name: str) -> Any:
    """The annotation of the first parameter, on the function or on the one it wraps. Raises InvalidOption."""
    try:
        parameter = next(iter(inspect.signature(function).parameters), "")
    except ValueError:
        return Any  # a builtin without a signature; ``Registration`` refuses it
    unknown: NameError | None = None
    for layer in unwrap(function):
        if isinstance(layer, FunctionType | MethodType | type):
            try:
                hints = typing.get_type_hints(layer)
            except NameError as error:
                unknown = unknown or error
                continue
            if parameter in hints:
                return hints[parameter]
    if unknown is not None:
        accepted = f"annotated with names that exist ({unknown})"
        raise InvalidOption(f"@consumer {name}", function, accepted) from unknown
    return Any
