"""Consumers: the functions and classes that handle messages, and the registry of which handles what (spec/004).

A consumer belongs to a queue and handles one message type, read from the annotation of its first parameter. On a
queue with ``recipients`` several consumers may handle one type, each with a copy of its own; elsewhere a type has one
consumer. A module ``consumers.py`` in an installed app is imported at start.
"""

from __future__ import annotations

import inspect
import threading
import typing
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar

from . import messages, registry
from .errors import InvalidOption
from .options import Option, read_all

MessageT = TypeVar("MessageT")

OPTIONS: tuple[Option, ...] = (
    Option("timeout", timedelta, None, "Time limit of one attempt; None: QUEUEAPP.TIMEOUT.",
           timedelta(milliseconds=10), timedelta(hours=24), True, True),
    Option("attempts", int, None, "Attempts before the message is poison; None: QUEUEAPP.ATTEMPTS.", 1, 1000, True),
    Option("retry_delay", timedelta, None, "Wait between attempts; None: QUEUEAPP.RETRY_DELAY; 0: at once, in place.",
           timedelta(0), timedelta(days=30), True, True),
    Option("retry_delay_increase", timedelta, None, "Added to the wait at each further attempt.",
           timedelta(0), timedelta(days=30), True, True),
    Option("retry_jitter", float, None, "Share of the wait that is added at random.", 0.0, 1.0, True),
    Option("immediate_retries", int, None, "Attempts repeated at once before waits begin.", 0, 1000, True),
    Option("unrecoverable", tuple, (), "Exception classes that send the message to poison at once.",
           accept=lambda v: all(isinstance(c, type) and issubclass(c, BaseException) for c in v)),
    Option("policy", object, None, "Callable (context) -> RetryNow | RetryLater | Poison | Discard.", optional=True,
           accept=callable),
)  # fmt: skip


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
        _registry.add(Registration(cls.queue, name, of, cls().handle, given))

    def handle(self, message: MessageT, context: Any) -> Any:
        """Handle one message; ``async def`` works as well. Raising fails the attempt."""
        raise NotImplementedError


class Registration:
    """A registered consumer: which messages it takes, what it calls, and its options."""

    __slots__ = ("handler", "is_async", "message_type", "name", "options", "queue", "type_name", "wants_context")

    def __init__(self, queue: Any, name: str, message_type: Any, handler: Callable[..., Any], given: dict[str, Any]):
        if len(name) > messages.MAX_RECIPIENT:
            raise InvalidOption("consumer name", name, f"at most {messages.MAX_RECIPIENT} characters long")
        self.queue = queue
        self.name = name
        self.message_type = message_type
        self.type_name = messages.type_name_of(message_type)
        self.handler = handler
        self.is_async = inspect.iscoroutinefunction(handler)
        self.options = read_all(OPTIONS, given, f"@consumer {name}: ")
        self.wants_context = len(inspect.signature(handler).parameters) > 1

    def __repr__(self) -> str:
        return f"<consumer {self.name} of {self.type_name or 'untyped messages'} in {self.queue._meta.label}>"


def consumer(queue: Any, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function the handler of a message type of a queue; the function itself stays as it is.

    The type is the annotation of the first parameter (none, ``dict`` or ``Any``: messages without a type). ``name``
    addresses it where it has to outlive a rename. For the other arguments see ``OPTIONS``.

    >>> @consumer(FlightDelays, timeout=5, attempts=3, retry_delay=10)
    ... def rebook(message: FlightDelayed, context: Context) -> None: ...

    Raises InvalidOption for a bad argument, or for a second consumer of one type on a queue without ``recipients``.
    """
    name = options.pop("name", None)

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = list(inspect.signature(function).parameters)
        if not parameters:
            raise InvalidOption(
                f"@consumer {function.__qualname__}", function, "a function of (message) or (message, context)"
            )
        try:
            hints = typing.get_type_hints(function)
        except NameError as error:
            raise InvalidOption(
                f"@consumer {function.__qualname__}", function, f"annotated with names that exist ({error})"
            ) from error
        of = hints.get(parameters[0], Any)
        _registry.add(
            Registration(queue, name or f"{function.__module__}.{function.__qualname__}", of, function, options)
        )
        return function

    return register


class Registry:
    """The consumers of this process by queue, type and name."""

    def __init__(self) -> None:
        self._by_queue: dict[str, dict[str, Registration]] = {}
        self._lock = threading.Lock()

    def add(self, registration: Registration) -> None:
        label = registration.queue._meta.label
        with self._lock:
            own = self._by_queue.setdefault(label, {})
            if not registration.queue.delivery.recipients:
                for other in own.values():
                    if other.type_name == registration.type_name and other.name != registration.name:
                        raise InvalidOption(
                            f"@consumer {registration.name}",
                            registration.type_name or "messages without a type",
                            f"handled once in {label}, where {other.name} handles it already "
                            "(set Delivery.recipients = True to give each consumer a copy)",
                        )
            own[registration.name] = registration

    def remove(self, name: str) -> None:
        """Forget a consumer (tests)."""
        with self._lock:
            for own in self._by_queue.values():
                own.pop(name, None)

    def of(self, queue: Any) -> list[Registration]:
        """The consumers of a queue in the order of registration."""
        return list(self._by_queue.get(queue._meta.label, {}).values())

    def find(self, queue: Any, type_name: str, recipient: str) -> Registration | None:
        """Who handles a message of this type addressed to ``recipient``; None: nobody in this process."""
        own = self._by_queue.get(queue._meta.label)
        if own is None:
            return None
        if recipient:
            return own.get(recipient)
        return next((c for c in own.values() if c.type_name == type_name), None)

    def queues(self) -> list[Any]:
        """The queues that have a consumer in this process."""
        return [registry.queues.find(label) for label, own in self._by_queue.items() if own]


_registry = Registry()
registered = _registry


def recipients_of(queue: Any, type_name: str) -> tuple[str, ...]:
    """The names of all consumers of a type on a queue with ``recipients``; ('',) when this process knows none."""
    return tuple(c.name for c in _registry.of(queue) if c.type_name == type_name) or ("",)
