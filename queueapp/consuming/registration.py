"""One registered consumer, and the options that it may have."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from .. import messages
from ..errors import InvalidOption
from ..options import Option, read_all

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
