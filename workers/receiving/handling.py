"""Running handlers: which one takes a message, and calling it, sync or async.

Everything that can be looked up once is looked up once, when the worker starts; per message there is one dict lookup,
two decodes and the call.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from asgiref.sync import async_to_sync
from django.db import connections, transaction

from queueapp import messages
from queueapp.conf import settings
from queueapp.consuming.context import Context
from queueapp.consuming.registration import Registration
from queueapp.consuming.registry import registered
from queueapp.errors import UndecodableMessage
from queueapp.sql import queue_sql
from queueapp.sql.carried import COUNTS
from queueapp.sql.claimed import HEADERS, RECIPIENT, Claimed


class Interrupted(Exception):
    """Raised in the thread or the coroutine of a handler from outside."""


class TimeLimitExceeded(Interrupted):
    """A handler ran longer than its time limit: the attempt has failed."""


class WorkerStopped(Interrupted):
    """The worker had to stop before the handler had ended. No failure: the message is given back uncounted."""


class Entry:
    """One consumer, ready to be called."""

    __slots__ = ("attempts", "call", "decode", "registration", "timeout")

    def __init__(self, registration: Registration) -> None:
        self.registration = registration
        limit: timedelta | None = registration.option("timeout") or settings.TIMEOUT
        #: Seconds, or None for no limit.
        self.timeout = limit.total_seconds() if limit else None
        #: A message that failed so often is not handled any more. A policy of its own may want more attempts than the
        #: project's default, so that bounds it only where it is asked for.
        option = registration.option
        most = option("attempts") or (sys.maxsize if option("policy") else settings.ATTEMPTS)
        self.attempts = min(most, registration.queue.delivery.max_deliveries or sys.maxsize)
        self.call = _caller(registration, self.timeout)
        of = registration.message_type
        typed = isinstance(of, type) and messages.is_typed(of)
        self.decode: Callable[[bytes], Any] | None = messages.body_decoder(of) if typed else None


def _caller(registration: Registration, timeout: float | None) -> Callable[[Any, Context], Any]:
    """The handler as a sync function of two arguments, that returns when the handler has run to its end."""
    handler, wants_context = registration.handler, registration.wants_context

    async def ended(result: Any, context: Context) -> None:
        # The handler's loop is on another thread; this is how its own thread's watchdog reaches it.
        late: list[bool] = []
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel(for_its_time_limit: bool = False) -> None:
            late.extend([True] * for_its_time_limit)
            loop.call_soon_threadsafe(task.cancel)

        context._cancel = cancel
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                while result is not None and inspect.isawaitable(result):
                    result = await result
        except TimeoutError as error:
            if not limit.expired():
                raise  # the handler's own
            raise TimeLimitExceeded(f"{registration.name} ran longer than {timeout} s") from error
        except asyncio.CancelledError as error:
            if not late:
                raise
            raise TimeLimitExceeded(f"{registration.name} ran longer than {timeout} s") from error
        _refuse_generator(registration.name, result)

    if registration.is_async:

        async def call_async(message: Any, context: Context) -> None:
            await ended(handler(message, context) if wants_context else handler(message), context)

        # async_to_sync runs what the handler does with Django's async ORM back on this very thread, so it is on this
        # thread's connection and in its transaction. An event loop of our own would put it on another connection.
        return async_to_sync(call_async)

    # What looks like a sync function may be a decorator around an async one.
    wait_for = async_to_sync(ended)

    def returned(result: Any, context: Context) -> None:
        if inspect.isawaitable(result):
            wait_for(result, context)
        else:
            _refuse_generator(registration.name, result)

    def call_with_context(message: Any, context: Context) -> None:
        if (result := handler(message, context)) is not None:
            returned(result, context)

    def call(message: Any, context: Context) -> None:
        if (result := handler(message)) is not None:
            returned(result, context)

    return call_with_context if wants_context else call


def _refuse_generator(name: str, result: Any) -> None:
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        kind = type(result).__name__.replace("_", " ")
        raise TypeError(f"{name} returned a generator ({kind}): its body did not run, so nothing was handled.")


def _fan_out(queue: Any, copies: tuple[str, ...]) -> Entry:
    """The consumer of a message that names no recipient though several want it: a foreign producer, or a bulk one, does
    not know our consumers. It is replaced by a copy for each; what is received under that name is handled as usual."""

    def fan_out(body: bytes, context: Context) -> None:
        connection = connections[context.alias]
        sql = queue_sql(queue, connection)
        # All that it carries, for somebody else; nobody has tried that yet.
        row = sql.table.row_of(context._claimed)._replace(**dict.fromkeys(COUNTS))
        with transaction.atomic(using=context.alias):
            for name in copies:
                sql.insert_row(connection, row._replace(recipient=name))

    return Entry(Registration(queue, "queueapp.fan_out", bytes, fan_out, {}))


class Handlers:
    """The consumers of one queue in this process, by what a message says."""

    def __init__(self, queue: Any) -> None:
        self.queue = queue
        #: Whether a message says which consumer it is for: headers alone do not.
        self.addressed = queue.delivery.recipients
        registrations = registered.of(queue)
        self._by_name = {one.name: Entry(one) for one in registrations}
        self._by_type: dict[str, Entry] = {}
        for one in registrations:
            same = tuple(other.name for other in registrations if other.type_name == one.type_name)
            self._by_type[one.type_name] = _fan_out(queue, same) if len(same) > 1 else self._by_name[one.name]

    def __bool__(self) -> bool:
        return bool(self._by_name)

    @property
    def recipients(self) -> list[str]:
        """Whose messages this process takes: '' and every consumer it has."""
        return ["", *self._by_name] if self.addressed else [""]

    def find(self, claimed: Claimed) -> tuple[Entry | None, str]:
        """(who handles it or None, its content type). Raises UndecodableMessage when the headers do not parse."""
        kind, content_type = messages.read_head(claimed[HEADERS])
        if self.addressed and claimed[RECIPIENT]:
            return self._by_name.get(claimed[RECIPIENT]), content_type
        return self._by_type.get(kind), content_type

    def knows(self, headers: str) -> bool:
        """Whether a message with these headers, addressed to nobody, is for a consumer here. One whose headers do not parse
        is: it is to be kept as poison."""
        try:
            return messages.read_head(headers)[0] in self._by_type
        except UndecodableMessage:
            return True

    @staticmethod
    def type_of(headers: str) -> str:
        """The type that headers name; '' where they name none, or do not parse."""
        try:
            return messages.read_head(headers)[0]
        except UndecodableMessage:
            return ""
