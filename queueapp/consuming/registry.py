"""The consumers of this process, by queue, type and name: the registry, and ``Registration``, one consumer with its
options and the checks of what can be a handler.

A generator function cannot be one: calling it makes a generator and runs nothing of its body, and the message would be
acked. It is refused here, even if it is wrapped; where only the call shows it, the attempt fails (``workers``).
"""

from __future__ import annotations

import abc
import inspect
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from asgiref.sync import iscoroutinefunction

from .. import messages
from ..conf import MAX_CONCURRENCY
from ..errors import InvalidOption
from ..failures.recoverability import OPTIONS as RECOVERABILITY
from ..options import Option, read_all
from ..registry import queues

_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


def unwrap(handler: Any) -> Iterator[Any]:
    """A callable and the callables that it wraps, from the outside in: through ``functools.wraps``,
    ``functools.partial``, methods and callable objects."""
    seen: list[Any] = []
    pending = [handler]
    while pending:
        function = pending.pop()
        if any(function is known for known in seen):
            continue
        seen.append(function)
        yield function
        if isinstance(function, partial):
            pending.append(function.func)
            continue
        if isinstance(function, MethodType):
            pending.append(function.__func__)
        elif not isinstance(function, FunctionType | BuiltinFunctionType | type):
            pending.append(type(function).__call__)
        if (wrapped := getattr(function, "__wrapped__", None)) is not None:
            pending.append(wrapped)


def is_async(handler: Any) -> bool:
    """Whether calling it returns a coroutine."""
    while isinstance(handler, partial):
        handler = handler.func
    return iscoroutinefunction(handler) or (
        not isinstance(handler, FunctionType | MethodType | type) and iscoroutinefunction(type(handler).__call__)
    )


def _positional_arguments(handler: Any, name: str) -> int:
    """How many positional arguments a handler takes. Raises InvalidOption if it cannot be called with one or two."""
    try:
        parameters = list(inspect.signature(handler).parameters.values())
    except ValueError:
        parameters = []
    by_place = [p for p in parameters if p.kind in _POSITIONAL]
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    needed = [p for p in parameters if p.default is inspect.Parameter.empty and p.kind not in variable]
    beyond = [p for p in needed if p not in by_place[:2]]
    if not by_place or beyond:
        more = f", and nothing gives it {', '.join(p.name for p in beyond)}" if beyond else ""
        accepted = f"a function of (message) or (message, context){more}"
        raise InvalidOption(f"@consumer {name}", handler, accepted)
    return len(by_place)


def source_location(declared: Any) -> str:
    """File and line of a function, of the one it wraps, or of a class; '' if it has none."""
    for layer in unwrap(declared):
        code = getattr(layer, "__code__", None)
        if code is not None:
            return f"{code.co_filename}, line {code.co_firstlineno}"
    if isinstance(declared, type):
        lines = [member.__code__.co_firstlineno for member in vars(declared).values() if hasattr(member, "__code__")]
        file = getattr(sys.modules.get(declared.__module__), "__file__", None) or declared.__module__
        return f"{file}, line {min(lines)}" if lines else file
    return ""


@contextmanager
def located(where: str) -> Iterator[None]:
    """Add the location of the declaration to an InvalidOption of the block."""
    try:
        yield
    except InvalidOption as error:
        raise error.at(where) from error.__cause__


#: Versions of a type that a worker writes to its row.
MAX_ADVERTISED = 100


def _aliases(queue: Any, name: str, given: Any) -> tuple[str, ...]:
    option, longest = f"@consumer {name}: aliases", messages.MAX_RECIPIENT
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidOption(option, given, "a list of names that it had before")
    aliases = tuple(given)
    for alias in aliases:
        if not isinstance(alias, str) or not alias or len(alias) > longest or alias == name:
            raise InvalidOption(option, alias, f"a name of 1 to {longest} characters that it had before")
    if aliases and not queue.delivery.recipients:
        accepted = f"absent: nothing in {queue._meta.label} is addressed to a consumer (Delivery.recipients)"
        raise InvalidOption(option, aliases, accepted)
    return tuple(dict.fromkeys(aliases))


class Registration:
    """A registered consumer: the messages that it handles, its handler, and its options."""

    __slots__ = (
        "aliases",
        "finder",
        "handler",
        "is_async",
        "message_type",
        "name",
        "options",
        "queue",
        "type_name",
        "type_names",
        "wants_context",
    )

    def __init__(
        self,
        queue: Any,
        name: str,
        message_type: Any,
        handler: Callable[..., Any],
        given: dict[str, Any],
        finder: Any = None,
        aliases: Iterable[str] = (),
    ):
        if len(name) > messages.MAX_RECIPIENT:
            raise InvalidOption("consumer name", name, f"at most {messages.MAX_RECIPIENT} characters long")
        #: Its former names: messages addressed to them are its own.
        self.aliases = _aliases(queue, name, aliases)
        self.queue = queue
        self.name = name
        #: A ``resolver.ConsumerResolver``, which selects the consumer of each message of this queue; or None.
        self.finder = finder
        self.message_type = message_type
        self.type_name = messages.type_name_of(message_type)
        #: The same, with the former names of the type.
        self.type_names = messages.known_as(message_type)
        if any(inspect.isgeneratorfunction(layer) or inspect.isasyncgenfunction(layer) for layer in unwrap(handler)):
            accepted = "a function or an async function (the body of a generator does not run when it is called)"
            raise InvalidOption(f"@consumer {name}", handler, accepted)
        problem = messages.unstorable(message_type)
        if problem is not None:
            accepted = (
                f"of a type that a message can have: a msgspec.Struct, a dataclass, or what JSON holds ({problem})"
            )
            raise InvalidOption(f"first parameter of @consumer {name}", message_type, accepted)
        places = _positional_arguments(handler, name)
        self.handler = handler
        #: Whether calling it returns a coroutine, as far as inspection shows. ``functools.wraps`` around a coroutine
        #: function hides it: that is called as a sync function, and its result is awaited.
        self.is_async = is_async(handler)
        self.options = read_all(OPTIONS, given, f"@consumer {name}: ")
        if self.options["batch_wait"] is not None and self.options["batch"] is None:
            raise InvalidOption(f"@consumer {name}: batch_wait", given["batch_wait"], "absent where there is no batch")
        if self.options["concurrency"] is not None and not queue.delivery.recipients:
            # Its messages are between those of other consumers there: a claim could not skip them.
            accepted = (
                f"absent: in {queue._meta.label} nothing is addressed to a consumer (Delivery.recipients), where "
                "Delivery.concurrency and max_backlog bound all of them"
            )
            raise InvalidOption(f"@consumer {name}: concurrency", given["concurrency"], accepted)
        self.wants_context = places > 1

    def option(self, name: str) -> Any:
        """Its own option, else its queue's; None: neither has one, so the project's setting applies."""
        value = self.options[name]
        return value if value is not None else getattr(self.queue.delivery, name)

    @property
    def takes_several(self) -> bool:
        """Whether its handler is called with several messages and their ``BatchContext``: it has a ``batch``, or takes
        sets."""
        return self.options["batch"] is not None or (self.finder is not None and self.finder.alone)

    def knows(self, type_name: str) -> type | None:
        """Its message class, or the subclass with this name, also a former one, if this process has imported it."""
        return messages.class_named(self.message_type, type_name)

    def advertised(self) -> list[tuple[str, str]]:
        """(name, type) of all that it handles, for the row of a worker: with former names and versions."""
        known = messages.type_version(self.message_type) if self.type_name else 1
        types = [
            messages.versioned_name(type_name, n)
            for type_name in self.type_names
            for n in range(1, min(known, MAX_ADVERTISED) + 1)
        ]
        return [(name, kind) for name in (self.name, *self.aliases) for kind in types]

    def __repr__(self) -> str:
        return f"<consumer {self.name} of {self.type_name or 'untyped messages'} in {self.queue._meta.label}>"


class ConsumerResolver(abc.ABC):
    """Selects the consumers of one queue, and stores results of handled messages."""

    #: Whether the queue may have no other consumer.
    alone = False
    #: Whether the consumer depends on more than the type: see ``variant_of``.
    varies = False

    @abc.abstractmethod
    def find(self, type_name: str, variant: str = "") -> Registration:
        """The consumer of messages of this type and variant. Raises UndecodableMessage if there is none, so that the
        message becomes poison."""

    def variant_of(self, headers: str) -> str:
        """The part of the headers that selects among consumers of one type; called only if it ``varies``."""
        return ""

    @abc.abstractmethod
    def ack(self, sql: Any, connection: Any, seqs: Sequence[int], token: uuid.UUID) -> int:
        """``QueueSql.acks.ack``, and in the same transaction the results of these messages."""

    @abc.abstractmethod
    def try_ack(self, sql: Any, connection: Any, seqs: Sequence[int], token: uuid.UUID, wait_ms: int) -> list[int]:
        """``QueueSql.acks.try_ack``, in the same way. In a transaction of its own."""

    @abc.abstractmethod
    def run_maintenance(self, alias: str, may_continue: Callable[[], bool]) -> None:
        """Delete old results; called by the maintenance of a database, until ``may_continue`` returns False."""


#: A worker process writes its messages in flight to memory that its supervisor reads; that has space for so many.
MOST_IN_A_BATCH = 500

CONSUMER_OPTIONS: tuple[Option, ...] = (
    Option("batch", int, None,
           "The handler takes a list of so many messages at most, instead of one; None: "
           "one.", 1, MOST_IN_A_BATCH, True),
    Option("batch_wait", timedelta, None,
           "How long more messages are waited for before a batch that is not full is taken; None: not at all.",
           timedelta(milliseconds=1), timedelta(seconds=30), True, True),
    Option("concurrency", int, None,
           "Handlers of it that run at once in a worker process, at most; None: as many as the process has receivers. "
           "For queues with `recipients`.", 1, MAX_CONCURRENCY, True),
)  # fmt: skip

OPTIONS = (*RECOVERABILITY, *CONSUMER_OPTIONS)


def is_alone(registration: Registration) -> bool:
    """Whether it handles all messages of its queue: a set consumer."""
    return registration.finder is not None and registration.finder.alone


class Registry:
    """The consumers of this process by queue, type and name."""

    def __init__(self) -> None:
        self._by_queue: dict[str, dict[str, Registration]] = {}
        self._lock = threading.Lock()

    def add(self, registration: Registration) -> None:
        label = registration.queue._meta.label
        with self._lock:
            registrations = self._by_queue.setdefault(label, {})
            if not registration.queue.delivery.recipients and registration.finder is None:
                for registered in registrations.values():
                    same = set(registered.type_names) & set(registration.type_names)
                    if same and registered.name != registration.name:
                        raise InvalidOption(
                            f"@consumer {registration.name}",
                            min(same) or "messages without a type",
                            f"handled once in {label}, where {registered.name} handles it already "
                            "(set Delivery.recipients = True to give each consumer a copy)",
                        )
            for registered in registrations.values():
                if registered.name == registration.name:
                    continue
                if is_alone(registered) or is_alone(registration):
                    accepted = (
                        f"the only consumer of {label}: a set consumer takes all of its messages, and "
                        f"{registered.name} is there"
                    )
                    raise InvalidOption(f"@consumer {registration.name}", label, accepted)
                both = {registered.name, *registered.aliases} & {registration.name, *registration.aliases}
                if both:
                    accepted = f"a name of one consumer of {label}, and {registered.name} has it or had it"
                    raise InvalidOption(f"@consumer {registration.name}", min(both), accepted)
            registrations[registration.name] = registration

    def remove(self, name: str) -> None:
        """Forget a consumer (tests)."""
        with self._lock:
            for registrations in self._by_queue.values():
                registrations.pop(name, None)

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Within the block only the consumers that it registers; afterwards those of before (tests)."""
        before, self._by_queue = self._by_queue, {}
        try:
            yield
        finally:
            self._by_queue = before

    def of(self, queue: Any) -> list[Registration]:
        """The consumers of a queue in the order of registration."""
        return list(self._by_queue.get(queue._meta.label, {}).values())

    def resolver_of(self, queue: Any) -> Any:
        """The ``resolver.ConsumerResolver`` of a queue whose consumers are not registered one by one; else None."""
        return next((registration.finder for registration in self.of(queue) if registration.finder is not None), None)

    def find(self, queue: Any, kind: messages.Kind, recipient: str, headers: str = "") -> Registration | None:
        """The consumer of a message of this kind addressed to ``recipient``; None: this process has none. Raises
        UndecodableMessage if a resolver knows that none exists."""
        finder = self.resolver_of(queue)
        if finder is not None:
            found: Registration = finder.find(kind.names[0], finder.variant_of(headers))
            return found
        registrations = self.of(queue)
        if recipient:
            return next(
                (
                    registration
                    for registration in registrations
                    if recipient == registration.name or recipient in registration.aliases
                ),
                None,
            )
        return next(iter(matching_consumers(registrations, kind.names)), None)

    def maintains(self, queue: Any) -> bool:
        """Whether this project maintains the table of a queue: a foreign one only where it has consumers for it."""
        return bool(queue._meta.managed or self.of(queue))

    def queues(self) -> list[Any]:
        """The queues that have a consumer in this process."""
        return [queues.find(label) for label, registrations in self._by_queue.items() if registrations]


#: The consumers of this process.
registered = Registry()


def matching_consumers(registrations: Iterable[Registration], names: Sequence[str]) -> list[Registration]:
    """The consumers of a type and of its bases (``Kind.names``): those of the type first, then those of the nearest
    base."""
    candidates = list(registrations)
    found = {
        registration.name: registration
        for name in with_bases(candidates, names)
        for registration in candidates
        if name in registration.type_names
    }
    return list(found.values())


def with_bases(registrations: Iterable[Registration], names: Sequence[str]) -> Sequence[str]:
    """The names of a type and of its bases; the headers may lack the bases."""
    if len(names) == 1 and names[0]:
        # The sender is older than its consumers, or another system; a class of this process may have bases.
        return next(
            (messages.type_names(cls) for registration in registrations if (cls := registration.knows(names[0]))), names
        )
    return names


def recipients_of(queue: Any, names: Sequence[str]) -> tuple[str, ...]:
    """The names of all consumers of a type, and of its bases, on a queue with ``recipients``; ('',) if this process
    knows none."""
    return tuple(consumer.name for consumer in matching_consumers(registered.of(queue), names)) or ("",)
