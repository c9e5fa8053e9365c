"""The handlers of one queue in one process: which consumer takes a message, calling it, sync or async, and the gate for
quick ones.

Everything that can be looked up once is looked up once, when the worker starts; per message there is one dict lookup,
two decodes and the call.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import sys
import threading
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
from queueapp.consuming.registry import Registration, matching_consumers, registered
from queueapp.errors import MessageCancelled, UndecodableMessage
from queueapp.flow import results
from queueapp.models.delivery.topics import content_type_of
from queueapp.sending import fanout
from queueapp.sql.claims import HEADERS, RECIPIENT, Claimed
from queueapp.telemetry import tracing

from .limits import limiter_of

#: Kinds of messages whose consumers are remembered; and seconds after which those without one are looked up again.
MAX_KINDS, FORGET_AFTER = 1024, 60.0

#: Handlers that may run at once where each waits at a gate of its own; see ``HandlerGate``.
HANDLERS_AT_ONCE = 2
#: Seconds: of a wait at the gate, and of a quick handler. A slower one waits for something itself, and the more of
#: those wait at once the better.
GATE_PATIENCE = QUICK = 0.0005
#: A handler's time counts for so much of what the next is expected to take, and at most for so many times ``QUICK``:
#: one of ten seconds is no reason to expect that of the next hundred.
_WEIGHT, _MAX_QUICKS = 0.1, 10

#: (fast decoder of the usual body or None, decoder of any body)
Reader = tuple[Callable[[bytes], Any] | None, messages.Read]

#: Functions that wrap every handler that is looked up from now on (``processes.metrics``).
handler_wrappers: list[Callable[[Registration, Callable[[Any, Context], None]], Callable[[Any, Context], None]]] = []


class Interrupted(Exception):
    """Raised from outside in the thread or the coroutine of a handler, where the interpreter makes it without
    arguments."""

    default_text = "the handler was interrupted"

    def __str__(self) -> str:
        return super().__str__() or self.default_text


class TimeLimitExceeded(Interrupted):
    """A handler ran longer than its time limit: the attempt has failed."""

    default_text = "the handler ran longer than its time limit"


class WorkerStopped(Interrupted):
    """The worker stopped before the handler had ended. Not a failure: the message is released uncounted."""


class Cancelled(Interrupted, MessageCancelled):
    """An operator cancelled the message, and its handler has not ended within the grace period."""


class BoundConsumer:
    """One consumer, ready to be called."""

    __slots__ = ("_readers", "attempts", "batch", "call", "registration", "timeout")

    def __init__(self, registration: Registration) -> None:
        self.registration = registration
        limit: timedelta | None = registration.option("timeout") or settings.TIMEOUT
        #: Seconds, or None for no limit.
        self.timeout = limit.total_seconds() if limit else None
        #: A message that failed so often is not handled again. A consumer's own policy may want more attempts than the
        #: project's default, so the default does not bound it.
        option = registration.option
        attempts = option("attempts") or (sys.maxsize if option("policy") else settings.ATTEMPTS)
        self.attempts = min(attempts, registration.queue.delivery.max_deliveries or sys.maxsize)
        #: It takes so many messages a call, as a list; 0: one message.
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

    def keeping_result(self) -> BoundConsumer:
        """The same consumer, for a message whose result is kept."""
        found = copy.copy(self)
        found.call = results.keeping(self.call)
        return found

    def reader(self, kind: messages.Kind) -> Reader:
        """The decoders of messages of a kind for this consumer; see ``messages.reader_of``."""
        found = self._readers.get(kind)
        if found is None:
            if len(self._readers) >= MAX_KINDS:
                self._readers.clear()
            found = self._readers[kind] = messages.reader_of(self.registration.message_type, kind)
        return found


def _caller(registration: Registration, timeout: float | None) -> Callable[[Any, Context], Any]:
    """The handler as a sync function of two arguments that returns when the handler has run to its end."""
    handler, wants_context = registration.handler, registration.wants_context

    async def ended(result: Any, context: Context) -> None:
        # The handler's loop is on another thread; this is how the watchdog of its own thread reaches it.
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
                results.returned(result)
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
            results.returned(result)

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

    def __init__(self, queue: Any, only_consumers: Collection[str] = ()) -> None:
        """``only_consumers``: the consumers that this process runs; of a queue that has none of them, it runs all."""
        self.queue = queue
        #: Whether a message names its consumer, by its recipient: headers alone do not.
        self.addressed = queue.delivery.recipients
        #: Of a message that names none: a foreign producer's.
        self._content_type = content_type_of(queue)
        #: Resolves consumers that are not registered one by one; their names are only addresses.
        self.resolver = registered.resolver_of(queue)
        registrations = registered.of(queue)
        self.registrations = self._registrations = [
            registration for registration in registrations if registration.name in only_consumers
        ] or registrations
        self.by_name = {
            name: BoundConsumer(registration)
            for registration in self._registrations
            for name in (registration.name, *registration.aliases)
        }
        #: The limiter of consumers that have a limit; None: none has.
        self.limiter = limiter_of(self._registrations)
        if self.limiter is not None:
            for entry in self.by_name.values():
                entry.call = self.limiter.around_handler(entry.registration, entry.call)
        #: The consumer of each kind that was met; None: there is none here.
        self._by_kind: dict[Any, BoundConsumer | None] = {}
        self._forget_at = 0.0
        #: Whether a message without a recipient is for every consumer of its type, here and elsewhere.
        self.copies = self.addressed and self.resolver is None
        self._varies = self.resolver is not None and self.resolver.varies
        self._subscribers = fanout.Subscribers(queue)

    def __bool__(self) -> bool:
        return bool(self.by_name)

    @property
    def bound_consumers(self) -> list[BoundConsumer]:
        """The consumers that are registered one by one, each once."""
        return list({id(entry): entry for entry in self.by_name.values()}.values())

    @property
    def largest_batch(self) -> int:
        """The largest batch that a consumer takes in one call; 0: none takes batches."""
        return max((entry.batch for entry in self.by_name.values()), default=0)

    @property
    def batch_wait(self) -> float:
        """Seconds to wait for more messages before a batch that is not full is claimed."""
        waits = [entry.registration.options["batch_wait"] for entry in self.by_name.values()]
        return max((wait.total_seconds() for wait in waits if wait is not None), default=0.0)

    @property
    def have_limits(self) -> bool:
        """Whether any consumer has a time limit."""
        return any(entry.timeout is not None for entry in self.by_name.values())

    @property
    def recipients(self) -> list[str]:
        """The recipients whose messages this process takes: '' and every consumer that it has."""
        return ["", *self.by_name] if self.addressed else [""]

    def find(self, claimed: Claimed) -> tuple[BoundConsumer | None, messages.Kind]:
        """(consumer or None, kind of its body). Raises UndecodableMessage when the headers do not parse."""
        kind = messages.read_kind(claimed[HEADERS])
        if not kind.content_type:
            kind = kind._replace(content_type=self._content_type)
        if self.copies:
            recipient = claimed[RECIPIENT] or self._sole(kind)
            entry = self.by_name.get(recipient)
            return (entry if entry is not None and _is_known(entry.registration, kind) else None), kind
        if self._varies:
            return self._variant(kind, self.resolver.variant_of(claimed[HEADERS])), kind
        return self._taker(kind), kind

    def _sole(self, kind: messages.Kind) -> str:
        """The only subscriber of messages without a recipient; '' where there is none, or several."""
        names = self._subscribers.of(kind.names)
        return names[0] if len(names) == 1 else ""

    def refresh_subscribers(self, connection: Any) -> None:
        """Read who subscribes now; before the first call, only the consumers of this code are known."""
        self._subscribers = fanout.read_subscribers(self.queue, connection)

    def copy_recipients(self, headers: str) -> tuple[str, ...]:
        """The consumers that get a copy each of a message with these headers that names no recipient. () where it needs
        none: one consumer subscribes (unless it has a limit, so that a claim must tell its messages apart), none does,
        or the headers do not parse."""
        try:
            names = self._subscribers.of(fanout.types_in(headers))
        except UndecodableMessage:
            return ()
        return names if len(names) > 1 or (self.limiter is not None and names[0] in self.limiter) else ()

    def _taker(self, kind: messages.Kind) -> BoundConsumer | None:
        """The consumer of messages without a recipient; looked up once for each kind."""
        try:
            found = self._by_kind[kind]
        except KeyError:
            return self._remember(kind, self._look_up(kind))
        if found is None and monotonic() > self._forget_at:
            # A class may be imported late and be derived from one that has a consumer here.
            self._by_kind.clear()
            self._forget_at = monotonic() + FORGET_AFTER
        return found

    def _variant(self, kind: messages.Kind, variant: str) -> BoundConsumer | None:
        """The consumer of a message of which the resolver needs more than its kind."""
        key = kind, variant
        return self._by_kind.get(key) or self._remember(key, BoundConsumer(self.resolver.find(kind.names[0], variant)))

    def _remember(self, key: Any, found: BoundConsumer | None) -> BoundConsumer | None:
        if len(self._by_kind) >= MAX_KINDS:
            self._by_kind.clear()
        self._by_kind[key] = found
        return found

    def _look_up(self, kind: messages.Kind) -> BoundConsumer | None:
        if self.resolver is not None:
            return BoundConsumer(self.resolver.find(kind.names[0]))
        found = matching_consumers(self._registrations, kind.names)
        return self.by_name[found[0].name] if found and _is_known(found[0], kind) else None

    def knows(self, headers: str) -> bool:
        """Whether a message with these headers and without a recipient has a consumer here, or is to be copied for
        several. One whose headers do not parse has: it is kept as poison."""
        if self.resolver is not None:
            return True
        try:
            kind = messages.read_kind(headers)
            if self.copies:
                names = self._subscribers.of(kind.names)
                consumer = self.by_name.get(names[0]) if len(names) == 1 else None
                return len(names) > 1 or (consumer is not None and _is_known(consumer.registration, kind))
            return self._taker(kind) is not None
        except UndecodableMessage:
            return True

    @staticmethod
    def type_of(headers: str) -> str:
        """The type that headers name, for display; '' where they name none, or do not parse."""
        return messages.type_label(headers)

    @staticmethod
    def types_of(headers: str) -> tuple[str, ...]:
        """The types that headers name; ('',) where they name none, or do not parse."""
        try:
            return messages.read_kind(headers).names
        except UndecodableMessage:
            return ("",)


def _is_known(registration: Registration, kind: messages.Kind) -> bool:
    """Whether it is of no newer version than the consumer's class; a newer one is left to a worker with newer code."""
    if kind.version == 1 or kind.names[0] not in registration.type_names:
        return True  # what is derived from it has versions of its own
    return kind.version <= messages.type_version(registration.message_type)


class HandlerGate:
    """Lets one quick handler of several receivers run at a time. A queue has ``HANDLERS_AT_ONCE`` gates in one process.

    Python runs one thread at a time. Where handlers take a few tenths of a millisecond, four threads spend as much on
    handing its lock to each other as on a statement: each answer of the database ends in a wait for the lock, and each
    of these is a change of threads, mostly to another processor (4.6 a message; 2.5 where a process may use one alone).
    With two gates, four receivers handle 15 % more, for a tenth less CPU time, than without (8 samples each, by turns,
    two processors, one ORM insert a message). One handler at a time is 12 % slower, three are no quicker.

    The gate is a hint and no promise: a receiver that waited for ``GATE_PATIENCE`` goes on without it, and none waits
    for a handler that overstays.
    """

    __slots__ = ("_lock", "overstayed")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: A receiver has waited in vain for the present handler. Changed without a lock: that costs a wait more, or one
        #: less.
        self.overstayed = False

    def enter(self) -> bool:
        """Wait at the gate; return whether the caller has it, and is to ``leave``."""
        if self.overstayed and self._lock.locked():
            return False
        if self._lock.acquire(timeout=GATE_PATIENCE):
            return True
        self.overstayed = True
        return False

    def leave(self) -> None:
        """Open the gate for the next receiver."""
        self.overstayed = False
        self._lock.release()


class GatedHandler:
    """Around each handler of one receiver."""

    __slots__ = ("_began", "_expected", "_has_gate", "gate")

    def __init__(self, gate: HandlerGate) -> None:
        self.gate = gate
        #: Seconds that its next handler is expected to take. Until one was quick none is expected to be.
        self._expected = QUICK
        self._has_gate = False
        self._began = 0.0

    def __enter__(self) -> None:
        self._has_gate = self._expected < QUICK and self.gate.enter()
        self._began = monotonic()

    def __exit__(self, *_: object) -> None:
        if self._has_gate:
            self.gate.leave()
        took = min(monotonic() - self._began, _MAX_QUICKS * QUICK)
        self._expected += (took - self._expected) * _WEIGHT
