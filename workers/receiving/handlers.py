"""ActiveHandler handlers: which one takes a message, and calling it, sync or async.

Everything that can be looked up once is looked up once, when the worker starts; per message there is one dict lookup,
two decodes and the call.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from datetime import timedelta
from time import monotonic
from typing import Any

from asgiref.sync import async_to_sync
from django.utils.module_loading import import_string

from queueapp import messages
from queueapp.conf import settings
from queueapp.consuming.context import Context
from queueapp.consuming.registration import Registration
from queueapp.consuming.registry import matching_consumers, registered
from queueapp.errors import MessageCancelled, UndecodableMessage
from queueapp.models.delivery.topics import content_type_of
from queueapp.sending import fanout
from queueapp.sql.claims import HEADERS, RECIPIENT, Claimed
from queueapp.telemetry import tracing

from .consumer_limits import limiter_of

#: Kinds of messages whose consumers are remembered; and seconds after which those without one are looked up again.
MOST_KINDS, FORGET_AFTER = 1024, 60.0


#: (fast one of the usual body or None, one of any body)
Reader = tuple[Callable[[bytes], Any] | None, messages.Read]


#: What is put around every handler that is looked up from now on (``processes.measuring``).
handler_wrappers: list[Callable[[Registration, Callable[[Any, Context], None]], Callable[[Any, Context], None]]] = []


class Interrupted(Exception):
    """Raised in the thread or the coroutine of a handler from outside."""


class TimeLimitExceeded(Interrupted):
    """A handler ran longer than its time limit: the attempt has failed."""


class WorkerStopped(Interrupted):
    """The worker had to stop before the handler had ended. No failure: the message is given back uncounted."""


class Cancelled(Interrupted, MessageCancelled):
    """An operator asked it to stop, and the handler has not ended by itself."""


class BoundConsumer:
    """One consumer, ready to be called."""

    __slots__ = ("_readers", "attempts", "batch", "call", "registration", "timeout")

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
        #: It takes so many messages a call, as a list; 0: one.
        self.batch: int = registration.options["batch"] or 0
        self.call = _caller(registration, self.timeout)
        if settings.HANDLER_CONTEXT_MANAGER and not registration.name.startswith("queueapp."):
            self.call = _within(import_string(settings.HANDLER_CONTEXT_MANAGER), self.call)
        for watch in handler_wrappers:
            self.call = watch(registration, self.call)
        if tracing.tracer is not None:
            traced = tracing.tracer.batch_handler if registration.takes_several else tracing.tracer.handler
            self.call = traced(registration.queue, registration.name, self.call)
        self._readers: dict[messages.Kind, Reader] = {}

    def reader(self, kind: messages.Kind) -> Reader:
        """How the bodies of messages of a kind are read for it; see ``messages.reader_of``."""
        found = self._readers.get(kind)
        if found is None:
            if len(self._readers) >= MOST_KINDS:
                self._readers.clear()
            found = self._readers[kind] = messages.reader_of(self.registration.message_type, kind)
        return found


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


def _within(
    around: Callable[[Any], AbstractContextManager[Any]], call: Callable[[Any, Context], None]
) -> Callable[[Any, Context], None]:
    def called(message: Any, context: Context) -> None:
        with around(context):
            call(message, context)

    return called


def _refuse_generator(name: str, result: Any) -> None:
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        kind = type(result).__name__.replace("_", " ")
        raise TypeError(f"{name} returned a generator ({kind}): its body did not run, so nothing was handled.")


class HandlerTable:
    """The consumers of one queue in this process, by what a message says."""

    def __init__(self, queue: Any, lane: Collection[str] = ()) -> None:
        """``lane``: the names of the consumers that this process is for; of a queue that has none of them, all are."""
        self.queue = queue
        #: Whether a message says which consumer it is for: headers alone do not.
        self.addressed = queue.delivery.recipients
        #: Of a message that does not say: a foreign producer's.
        self._content_type = content_type_of(queue)
        #: Says who handles what, where consumers are not registered one by one; their names are addresses and nothing else.
        self.finder = registered.resolver_of(queue)
        own = registered.of(queue)
        self.registrations = self._registrations = [one for one in own if one.name in lane] or own
        self._by_name = {name: BoundConsumer(one) for one in self._registrations for name in (one.name, *one.aliases)}
        #: Of consumers that have a limit; None: none has.
        self.limiter = limiter_of(self._registrations)
        if self.limiter is not None:
            for entry in self._by_name.values():
                entry.call = self.limiter.around(entry.registration, entry.call)
        #: Who takes messages of a kind that was met; None: nobody here.
        self._by_kind: dict[Any, BoundConsumer | None] = {}
        self._forget_at = 0.0
        #: Whether a message without a recipient is for every consumer of its type, here and elsewhere.
        self.copies = self.addressed and self.finder is None
        self._varies = self.finder is not None and self.finder.varies
        self._subscribers = fanout.Subscribers(queue)

    def __bool__(self) -> bool:
        return bool(self._by_name)

    @property
    def largest_batch(self) -> int:
        """The most messages that one of them takes at once; 0: none takes several."""
        return max((entry.batch for entry in self._by_name.values()), default=0)

    @property
    def batch_wait(self) -> float:
        """Seconds for which more messages are waited for before a batch that is not full is taken."""
        waits = [entry.registration.options["batch_wait"] for entry in self._by_name.values()]
        return max((wait.total_seconds() for wait in waits if wait is not None), default=0.0)

    @property
    def have_limits(self) -> bool:
        """Whether any of them has a time limit."""
        return any(entry.timeout is not None for entry in self._by_name.values())

    @property
    def recipients(self) -> list[str]:
        """Whose messages this process takes: '' and every consumer it has."""
        return ["", *self._by_name] if self.addressed else [""]

    def find(self, claimed: Claimed) -> tuple[BoundConsumer | None, messages.Kind]:
        """(who handles it or None, what its body is). Raises UndecodableMessage when the headers do not parse."""
        kind = messages.read_kind(claimed[HEADERS])
        if not kind.content_type:
            kind = kind._replace(content_type=self._content_type)
        if self.copies:
            recipient = claimed[RECIPIENT] or self._sole(kind)
            entry = self._by_name.get(recipient)
            return (entry if entry is not None and _is_known(entry.registration, kind) else None), kind
        if self._varies:
            return self._variant(kind, self.finder.variant_of(claimed[HEADERS])), kind
        return self._taker(kind), kind

    def _sole(self, kind: messages.Kind) -> str:
        """Who alone takes what is addressed to nobody; '' where nobody does, or several."""
        names = self._subscribers.of(kind.names)
        return names[0] if len(names) == 1 else ""

    def learn(self, connection: Any) -> None:
        """Who subscribes now; until then the consumers of this code are all that are known."""
        self._subscribers = fanout.read_subscribers(self.queue, connection)

    def wanted_by(self, headers: str) -> tuple[str, ...]:
        """Who is to have a copy of a message with these headers that names no recipient; () where it is one consumer's, which
        needs none but to be told from others by a claim, nobody's, or cannot be read."""
        try:
            names = self._subscribers.of(fanout.types_in(headers))
        except UndecodableMessage:
            return ()
        return names if len(names) > 1 or (self.limiter is not None and names[0] in self.limiter) else ()

    def _taker(self, kind: messages.Kind) -> BoundConsumer | None:
        """Who takes what is addressed to nobody; looked up once for each kind."""
        try:
            found = self._by_kind[kind]
        except KeyError:
            return self._remember(kind, self._look_up(kind))
        if found is None and monotonic() > self._forget_at:
            # A class of this process may be imported late, and be below one that is consumed here.
            self._by_kind.clear()
            self._forget_at = monotonic() + FORGET_AFTER
        return found

    def _variant(self, kind: messages.Kind, variant: str) -> BoundConsumer | None:
        """Who takes a message of which the finder asks more than its kind."""
        key = kind, variant
        return self._by_kind.get(key) or self._remember(key, BoundConsumer(self.finder.find(kind.names[0], variant)))

    def _remember(self, key: Any, found: BoundConsumer | None) -> BoundConsumer | None:
        if len(self._by_kind) >= MOST_KINDS:
            self._by_kind.clear()
        self._by_kind[key] = found
        return found

    def _look_up(self, kind: messages.Kind) -> BoundConsumer | None:
        if self.finder is not None:
            return BoundConsumer(self.finder.find(kind.names[0]))
        found = matching_consumers(self._registrations, kind.names)
        return self._by_name[found[0].name] if found and _is_known(found[0], kind) else None

    def knows(self, headers: str) -> bool:
        """Whether a message with these headers, addressed to nobody, is for a consumer here, or is to be copied for several.
        One whose headers do not parse is: it is to be kept as poison."""
        if self.finder is not None:
            return True
        try:
            kind = messages.read_kind(headers)
            if self.copies:
                names = self._subscribers.of(kind.names)
                own = self._by_name.get(names[0]) if len(names) == 1 else None
                return len(names) > 1 or (own is not None and _is_known(own.registration, kind))
            return self._taker(kind) is not None
        except UndecodableMessage:
            return True

    @staticmethod
    def type_of(headers: str) -> str:
        """The type that headers name, as it is told of; '' where they name none, or do not parse."""
        return messages.told_type(headers)

    @staticmethod
    def types_of(headers: str) -> tuple[str, ...]:
        """The types that headers name; ('',) where they name none, or do not parse."""
        try:
            return messages.read_kind(headers).names
        except UndecodableMessage:
            return ("",)


def _is_known(registration: Registration, kind: messages.Kind) -> bool:
    """Whether it is of no newer version than the consumer's class: if it is, a worker of newer code is to take it."""
    if kind.version == 1 or kind.names[0] not in registration.type_names:
        return True  # what is derived from it has versions of its own
    return kind.version <= messages.type_version(registration.message_type)
