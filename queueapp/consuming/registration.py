"""One registered consumer, the options that it may have, and what may be one.

A generator function is none: to call it makes a generator and runs nothing of its body, and the message would be acked.
It is refused here, however it is wrapped; where only the call shows it, the attempt fails (``workers``).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from asgiref.sync import iscoroutinefunction

from .. import messages
from ..errors import InvalidOption
from ..options import read_all
from .options import OPTIONS

_BY_PLACE = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


def unwrap(handler: Any) -> Iterator[Any]:
    """A callable and what it stands for, from the outside in: through ``functools.wraps``, ``functools.partial``, methods
    and callable objects."""
    seen: list[Any] = []
    pending = [handler]
    while pending:
        one = pending.pop()
        if any(one is other for other in seen):
            continue
        seen.append(one)
        yield one
        if isinstance(one, partial):
            pending.append(one.func)
            continue
        if isinstance(one, MethodType):
            pending.append(one.__func__)
        elif not isinstance(one, FunctionType | BuiltinFunctionType | type):
            pending.append(type(one).__call__)
        if (wrapped := getattr(one, "__wrapped__", None)) is not None:
            pending.append(wrapped)


def is_async(handler: Any) -> bool:
    """Whether calling it makes a coroutine."""
    while isinstance(handler, partial):
        handler = handler.func
    return iscoroutinefunction(handler) or (
        not isinstance(handler, FunctionType | MethodType | type) and iscoroutinefunction(type(handler).__call__)
    )


def _places(handler: Any, name: str) -> int:
    """How many arguments a handler takes by place. Raises InvalidOption when it cannot be called with one or two."""
    try:
        parameters = list(inspect.signature(handler).parameters.values())
    except ValueError:
        parameters = []
    by_place = [p for p in parameters if p.kind in _BY_PLACE]
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    needed = [p for p in parameters if p.default is inspect.Parameter.empty and p.kind not in variable]
    beyond = [p for p in needed if p not in by_place[:2]]
    if not by_place or beyond:
        more = f", and nothing gives it {', '.join(p.name for p in beyond)}" if beyond else ""
        accepted = f"a function of (message) or (message, context){more}"
        raise InvalidOption(f"@consumer {name}", handler, accepted)
    return len(by_place)


def source_location(declared: Any) -> str:
    """File and line of a function, or of what it wraps, or of a class; '' where there is none."""
    for one in unwrap(declared):
        code = getattr(one, "__code__", None)
        if code is not None:
            return f"{code.co_filename}, line {code.co_firstlineno}"
    if isinstance(declared, type):
        lines = [one.__code__.co_firstlineno for one in vars(declared).values() if hasattr(one, "__code__")]
        file = getattr(sys.modules.get(declared.__module__), "__file__", None) or declared.__module__
        return f"{file}, line {min(lines)}" if lines else file
    return ""


@contextmanager
def located(where: str) -> Iterator[None]:
    """What is refused in the block is told with the place of its declaration."""
    try:
        yield
    except InvalidOption as error:
        raise error.at(where) from error.__cause__


#: Versions of a type that a worker tells in its row.
_TOLD = 100


def _aliases(queue: Any, name: str, given: Any) -> tuple[str, ...]:
    option, longest = f"@consumer {name}: aliases", messages.MAX_RECIPIENT
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidOption(option, given, "a list of names that it had before")
    aliases = tuple(given)
    for one in aliases:
        if not isinstance(one, str) or not one or len(one) > longest or one == name:
            raise InvalidOption(option, one, f"a name of 1 to {longest} characters that it had before")
    if aliases and not queue.delivery.recipients:
        accepted = f"absent: nothing in {queue._meta.label} is addressed to a consumer (Delivery.recipients)"
        raise InvalidOption(option, aliases, accepted)
    return tuple(dict.fromkeys(aliases))


class Registration:
    """A registered consumer: which messages it takes, what it calls, and its options."""

    __slots__ = (
        "aliases", "finder", "handler", "is_async", "message_type", "name", "options", "queue", "type_name", "type_names",
        "wants_context",
    )  # fmt: skip

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
        #: Names that it had before: what is addressed to one of them is its.
        self.aliases = _aliases(queue, name, aliases)
        self.queue = queue
        self.name = name
        #: A ``finding.Finder``, which says who handles the messages of this queue in its stead; or None.
        self.finder = finder
        self.message_type = message_type
        self.type_name = messages.type_name_of(message_type)
        #: The same, and the names that the type had before.
        self.type_names = messages.known_as(message_type)
        if any(inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in unwrap(handler)):
            accepted = "a function or an async function (the body of a generator does not run when it is called)"
            raise InvalidOption(f"@consumer {name}", handler, accepted)
        problem = messages.unstorable(message_type)
        if problem is not None:
            accepted = (
                f"of a type that a message can have: a msgspec.Struct, a dataclass, or what JSON holds ({problem})"
            )
            raise InvalidOption(f"first parameter of @consumer {name}", message_type, accepted)
        places = _places(handler, name)
        self.handler = handler
        #: Whether calling it makes a coroutine, as far as its looks tell. ``functools.wraps`` around one does not look so:
        #: that is called as a sync function, and what it returns is awaited.
        self.is_async = is_async(handler)
        self.options = read_all(OPTIONS, given, f"@consumer {name}: ")
        if self.options["batch_wait"] is not None and self.options["batch"] is None:
            raise InvalidOption(f"@consumer {name}: batch_wait", given["batch_wait"], "absent where there is no batch")
        if self.options["concurrency"] is not None and not queue.delivery.recipients:
            # Its messages lie among those of the others there: a claim could not leave them where they are.
            accepted = (
                f"absent: in {queue._meta.label} nothing is addressed to a consumer (Delivery.recipients), where "
                "Delivery.concurrency and max_backlog bound all of them"
            )
            raise InvalidOption(f"@consumer {name}: concurrency", given["concurrency"], accepted)
        self.wants_context = places > 1

    def option(self, name: str) -> Any:
        """Its own option, or else its queue's; None: neither says anything, so the project's counts."""
        value = self.options[name]
        return value if value is not None else getattr(self.queue.delivery, name)

    @property
    def takes_several(self) -> bool:
        """Whether its handler is called with several messages and their ``BatchContext``: it has a ``batch``, or takes sets."""
        return self.options["batch"] is not None or (self.finder is not None and self.finder.alone)

    def knows(self, type_name: str) -> type | None:
        """Its message class, or the one below it that has or had this name, as far as this process has imported it."""
        return messages.class_named(self.message_type, type_name)

    def told(self) -> list[tuple[str, str]]:
        """(name, type) of all that it takes, for the row of a worker: under former names, and of former versions, as well."""
        known = messages.type_version(self.message_type) if self.type_name else 1
        types = [messages.version_told(one, n) for one in self.type_names for n in range(1, min(known, _TOLD) + 1)]
        return [(name, kind) for name in (self.name, *self.aliases) for kind in types]

    def __repr__(self) -> str:
        return f"<consumer {self.name} of {self.type_name or 'untyped messages'} in {self.queue._meta.label}>"
