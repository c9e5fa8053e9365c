"""``Kit``: run consumers in a test, see what they did and what was sent, and let time pass.

It handles messages in the test's own thread, on the test's connection and within its transaction, by the receivers of
the workers: attempts, policies, time limits, delayed retries and poison are as they will be. It starts only a thread
that watches time limits while a message is handled.

What was sent (``Sent``) is read from the tables: rolled-back sends are not there, and the sending code needs no mock.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections, models
from django.db.models import F

from .. import delayed, inline, messages, notifier, overrides
from ..consuming.registry import registered, unwrap
from ..delayed import dispatch, forward, store
from ..errors import QueueNotFound, UndecodableMessage
from ..flow import rate_limit
from ..inline import Outcome
from ..journal import retention
from ..models import DeferredAck, DelayedMessage, ForwardedMessage, PoisonMessage, Subscriber
from ..models.delivery.topics import content_type_of
from ..receiving import barriers, low_water_marks
from ..registry import queues
from ..schedules import declarations, stored
from ..sending import fanout, validation
from ..sending.isolation import close_isolated
from ..sending.validation import alias_of
from ..sql.claims import LAST_END
from ..topics.backfill import QueueFeeder, is_over_journal

#: Messages that one ``drain`` handles at most.
MAX_MESSAGES = 1_000


class Kit:
    """Runs consumers in a test. ``close`` it at the end; the fixture and the mixin do."""

    def __init__(self) -> None:
        #: The outcome of every message handled in this test, in order, also in eager mode.
        self.outcomes: list[Outcome] = []
        inline.observers.append(self.outcomes.append)
        self._observer = inline.observers[-1]

    def close(self) -> None:
        """End the test."""
        if self._observer in inline.observers:
            inline.observers.remove(self._observer)
        close_isolated()

    # -- running ---------------------------------------------------------------------------------------------------

    def process_next(self, queue: Any, *, using: str | None = None) -> Outcome | None:
        """Handle the next message of a queue; None: there is none that a consumer of this process takes now. What a
        handler raises is judged as in a worker, and is in the outcome's ``error``."""
        alias = alias_of(queue, using)
        _fill(queue, alias)
        return inline.handle_next(queue, alias)

    async def aprocess_next(self, queue: Any, *, using: str | None = None) -> Outcome | None:
        """``process_next`` for an async test."""
        return await sync_to_async(self.process_next, thread_sensitive=True)(queue, using=using)

    def drain(self, *queues: Any, limit: int = MAX_MESSAGES) -> list[Outcome]:
        """Handle messages of these queues (default: of all that have consumers), and what their handlers send to them,
        until there are none; returns what became of each. What is delayed stays: see ``advance``. Raises AssertionError
        after ``limit`` messages: a handler may be sending to itself for ever."""
        __tracebackhide__ = True
        before = len(self.outcomes)
        wanted = list(queues) or [queue for queue in registered.queues() if queue._meta.managed]
        busy = True
        while busy:
            busy = False
            for queue in wanted:
                while (outcome := self.process_next(queue)) is not None:
                    busy = True
                    if len(self.outcomes) - before >= limit:
                        raise AssertionError(
                            f"{limit} messages were handled and more are waiting, of {outcome.consumer}."
                        )
        return self.outcomes[before:]

    async def adrain(self, *queues: Any, limit: int = MAX_MESSAGES) -> list[Outcome]:
        """``drain`` for an async test."""
        return await sync_to_async(self.drain, thread_sensitive=True)(*queues, limit=limit)

    def advance(self, period: timedelta) -> None:
        """Let a period pass: delayed messages become due and are in their queues, leases expire, messages expire.
        Nothing is handled. It is everything stored that grows older; ``timezone.now()`` stays as it is."""
        aliases = self._aliases()
        let_pass(period, aliases)
        for alias in aliases:
            while delayed.dispatch_due(alias, 500).moved:
                pass

    async def aadvance(self, period: timedelta) -> None:
        """``advance`` for an async test."""
        await sync_to_async(self.advance, thread_sensitive=True)(period)

    def run_schedule(self, name: str) -> uuid.UUID:
        """Run a schedule that is declared in code, or stored, once, as if it were due; returns the id of its message.
        Raises LookupError for a name that no schedule has."""
        aliases = self._aliases()
        if (declaration := declarations.declared.get(name)) is not None:
            aliases = [declaration.alias]
            stored.declare(declaration.alias)
        for alias in aliases:
            if (identity := stored.run_now(alias, name)) is not None:
                return identity
        raise LookupError(f"No schedule is called {name!r}: neither declared in this process, nor stored.")

    def _aliases(self) -> list[str]:
        """The databases that this test has opened; a ``TestCase`` opens all that it may use."""
        opened = [
            connection.alias
            for connection in connections.all(initialized_only=True)
            if connection.connection is not None
        ]
        return opened or [alias_of(DelayedMessage)]

    # -- what was sent ---------------------------------------------------------------------------------------------

    def sent(self, *queues: Any) -> list[Sent]:
        """What was sent to these queues (default: to any) and is there, delayed, or was handled in this test. What was
        rolled back was not sent."""
        found = {
            (outcome.message_id, outcome.recipient): taken(outcome)
            for outcome in self.outcomes
            if not queues or outcome.queue in queues
        }
        found |= {(message.message_id, message.recipient): message for message in waiting(queues)}
        return list(found.values())

    @contextmanager
    def capture(self, *queues: Any) -> Iterator[list[Sent]]:
        """A list that holds, after the block, what was sent in it."""
        before = {(message.message_id, message.recipient) for message in self.sent(*queues)}
        captured: list[Sent] = []
        yield captured
        captured += [message for message in self.sent(*queues) if (message.message_id, message.recipient) not in before]

    # -- assertions ------------------------------------------------------------------------------------------------

    def assert_sent(self, queue: Any, expected: Any = ..., *, times: int | None = None) -> Sent:
        """Assert that a message was sent to the queue; returns the first. ``expected``: its body, the class of a typed
        body, or a function of the ``Sent``; ``times``: so many were, and no more."""
        __tracebackhide__ = True
        there = self.sent(queue)
        found = [message for message in there if expected is ... or message.is_like(expected)]
        if not found or times not in (None, len(found)):
            wanted = "a message" if expected is ... else repr(expected)
            often = "" if times is None else f" {times} times, not {len(found)}"
            raise AssertionError(f"Expected {wanted} to be sent to {queue._meta.label}{often}. Sent: {_listed(there)}")
        return found[0]

    def assert_not_sent(self, queue: Any, expected: Any = ...) -> None:
        """Assert that no such message was sent to the queue."""
        __tracebackhide__ = True
        found = [message for message in self.sent(queue) if expected is ... or message.is_like(expected)]
        if found:
            raise AssertionError(f"Expected no such message to be sent to {queue._meta.label}. Sent: {_listed(found)}")

    def assert_handled(self, by: Any, *, times: int | None = None) -> list[Outcome]:
        """Assert that messages were handled: ``by`` a consumer (the function, the class, or its name), or of a
        queue."""
        __tracebackhide__ = True
        return self._assert(by, "handled", lambda outcome: outcome.handled, times)

    def assert_retried(self, by: Any, *, times: int | None = None) -> list[Outcome]:
        """Assert that attempts failed and are retried."""
        __tracebackhide__ = True
        return self._assert(by, "retried", lambda outcome: outcome.retried, times)

    def assert_discarded(self, by: Any, *, times: int | None = None) -> list[Outcome]:
        """Assert that messages were discarded by their policy."""
        __tracebackhide__ = True
        return self._assert(by, "discarded", lambda outcome: outcome.discarded, times)

    def assert_poisoned(self, by: Any, *, times: int | None = None, reason: str = "") -> list[Outcome]:
        """Assert that messages became poison, with ``reason`` in their reason."""
        __tracebackhide__ = True
        return self._assert(by, "poisoned", lambda outcome: outcome.poisoned and reason in str(outcome.verdict), times)

    def assert_empty(self, *queues: Any) -> None:
        """Assert that no message waits in these queues or is delayed for them."""
        __tracebackhide__ = True
        if remaining := list(waiting(queues)):
            raise AssertionError(f"Expected no message to wait. Waiting: {_listed(remaining)}")

    def poison(self, queue: Any, *, using: str | None = None) -> list[PoisonMessage]:
        """The poison messages of a queue."""
        rows = PoisonMessage.objects.using(alias_of(queue, using)).filter(queue=queue._meta.label)
        return list(rows.order_by("number"))

    def _assert(self, by: Any, how: str, is_so: Callable[[Outcome], bool], times: int | None) -> list[Outcome]:
        __tracebackhide__ = True
        belongs = _belongs_to(by)
        outcomes = [outcome for outcome in self.outcomes if belongs(outcome)]
        found = [outcome for outcome in outcomes if is_so(outcome)]
        if not found or times not in (None, len(found)):
            often = "" if times is None else f" {times} times, not {len(found)}"
            shown = (
                "; ".join(f"{outcome.consumer} attempt {outcome.attempt}: {_shown(outcome)}" for outcome in outcomes)
                or "nothing"
            )
            raise AssertionError(f"Expected a message of {_name(by)} to be {how}{often}. Outcomes: {shown}.")
        return found


def _fill(queue: Any, alias: str) -> None:
    """Fill the queue from the journal, if it takes messages from there. Publications of an open transaction are not
    readable yet."""
    if is_over_journal(queue) and not connections[alias].in_atomic_block:
        filler = QueueFeeder(queue, alias)
        filler.attach()
        while filler.fill().more:
            pass


def _belongs_to(by: Any) -> Callable[[Outcome], bool]:
    __tracebackhide__ = True
    if hasattr(by, "delivery") and hasattr(by, "_meta"):
        return lambda outcome: outcome.queue is by
    if isinstance(by, str):
        return lambda outcome: outcome.consumer == by or outcome.consumer.endswith(f".{by}")
    names = {
        registration.name
        for queue in registered.queues()
        for registration in registered.of(queue)
        if any(layer is by for layer in unwrap(registration.handler))
        or type(getattr(registration.handler, "__self__", None)) is by
    }
    if not names:
        raise AssertionError(f"{by!r} is neither a consumer, nor the name of one, nor a queue.")
    return lambda outcome: outcome.consumer in names


def _name(by: Any) -> str:
    return str(by._meta.label) if hasattr(by, "_meta") else str(getattr(by, "__qualname__", by))


def _shown(outcome: Outcome) -> str:
    return "handled" if outcome.handled else f"{outcome.verdict!r} after {outcome.error!r}"


def _listed(there: list[Sent]) -> str:
    return "\n  ".join(["", *map(str, there)]) if there else "nothing."


class QueueTestMixin:
    """``self.queues`` is a ``Kit``. For ``TestCase`` and ``TransactionTestCase``, before them among the bases.

    >>> class OrderTests(QueueTestMixin, TestCase):
    ...     def test_an_order_is_shipped(self):
    ...         place_order()
    ...         self.queues.drain()
    """

    def setUp(self) -> None:
        # Before the test's own: what its setUp sends in eager mode is seen as well.
        kit = self.queues
        test: Any = self
        test.addCleanup(kit.close)
        super().setUp()  # type: ignore[misc]

    @cached_property
    def queues(self) -> Kit:
        """What this test does with queues."""
        return Kit()


def reset_caches() -> None:
    """Forget what this process has learnt of queues and of other processes: up to where a queue is empty, consumers,
    overrides, rates, the last notifications, opened delayed stores.

    For a test that empties a queue's table by SQL, or changes ``DELAYED_STORE``.
    """
    for module in (
        low_water_marks, barriers, validation, fanout, overrides, rate_limit, notifier, store, dispatch, forward,
        retention,
    ):  # fmt: skip
        module.forget()


_MODELS = (ForwardedMessage, DeferredAck, DelayedMessage, PoisonMessage, Subscriber)


def let_pass(period: timedelta, aliases: Sequence[str]) -> None:
    """Make everything in these databases so much older."""
    if not isinstance(period, timedelta) or period <= timedelta(0):
        raise ValueError(
            f"period = {period!r} is not accepted: it must be a timedelta above 0; time does not run backwards."
        )
    for alias in aliases:
        there = set(connections[alias].introspection.table_names())
        for model in _models(alias):
            if model._meta.db_table in there and model._default_manager.using(alias).exists():
                _shift(model, alias, period)


def _models(alias: str) -> Iterator[Any]:
    yield from _MODELS
    for queue in queues:
        if queue._meta.managed and alias_of(queue) == alias:
            yield queue


def _shift(model: Any, alias: str, period: timedelta) -> None:
    rows = model._default_manager.using(alias).order_by()
    for field in model._meta.concrete_fields:
        if isinstance(field, models.DateTimeField):
            # Unlimited times stay: a lease without an end, a message that waits for evaluation.
            rows.filter(**{f"{field.name}__lt": LAST_END}).update(**{field.name: F(field.name) - period})


@dataclasses.dataclass(frozen=True, slots=True)
class Sent:
    """One message that was sent."""

    queue: Any
    message_id: uuid.UUID
    headers: Mapping[str, str]
    raw_body: bytes | None
    recipient: str = ""
    #: It waits in the delayed store.
    delayed: bool = False

    @property
    def body(self) -> Any:
        """Plain JSON values, or bytes."""
        return self.decode()

    @property
    def message_type(self) -> str:
        """The name of its type; '' for a message without one."""
        return messages.well_known(self.headers, messages.TYPE) or ""

    def decode(self, cls: Any = Any) -> Any:
        """The body as an instance of ``cls``. Raises UndecodableMessage."""
        stored, default_type = messages.encode_headers(self.headers), content_type_of(self.queue)
        return messages.read_stored(self.raw_body, stored, self.message_id, alias_of(self.queue), cls, default_type)

    def is_like(self, expected: Any) -> bool:
        """Whether it is what a test expects: a body (compared with what is stored, read as its class), the class of a
        typed one, or a function of this object."""
        try:
            if isinstance(expected, type):
                return messages.is_typed(expected) and self.message_type == messages.type_name(expected)
            cls: Any = type(expected)
            if messages.is_typed(cls):
                return self.message_type == messages.type_name(cls) and bool(self.decode(cls) == expected)
            if callable(expected):
                return bool(expected(self))
            return bool(self.body == expected)
        except UndecodableMessage:
            return False

    def __str__(self) -> str:
        shown = repr(self.raw_body)[1:]
        kind = f"{self.message_type} " if self.message_type else ""
        return f"{self.queue._meta.label}: {kind}{shown[:300]}{' (delayed)' if self.delayed else ''}"


def waiting(only: Iterable[Any] = ()) -> Iterator[Sent]:
    """What is in the tables of these queues (default: of all that are managed) and, for them, in the delayed store."""
    wanted = list(only) or [queue for queue in queues if queue._meta.managed]
    by_alias: dict[str, list[Any]] = {}
    for queue in wanted:
        by_alias.setdefault(alias_of(queue), []).append(queue)
    for alias, alias_queues in by_alias.items():
        try:
            there = set(connections[alias].introspection.table_names())
        except AssertionError:  # Django's, of a database that the test case does not name
            continue
        for queue in alias_queues:
            # A model of the test's own may have no table; to ask it would break the test's transaction.
            if queue._meta.db_table in there:
                names = [
                    local_field.name for local_field in queue._meta.local_fields if local_field.name == "recipient"
                ]
                for key, headers, body, *rest in (
                    queue.objects.using(alias).order_by("seq").values_list("id", "headers", "body", *names)
                ):
                    yield Sent(queue, messages.as_uuid(key), messages.readable_headers(headers), _bytes(body), *rest)
        if DelayedMessage._meta.db_table in there:
            for row in DelayedMessage.objects.using(alias).order_by("number"):
                queue = _of(row.destination)
                if queue in alias_queues:
                    yield Sent(
                        queue,
                        row.message_id,
                        messages.readable_headers(row.headers),
                        _bytes(row.body),
                        row.recipient,
                        delayed=True,
                    )


def taken(outcome: Outcome) -> Sent:
    """One that was handled meanwhile."""
    return Sent(outcome.queue, outcome.message_id, outcome.headers, outcome.body, outcome.recipient)


def _of(destination: str) -> Any:
    try:
        return queues.find_addressed(destination)[0]
    except QueueNotFound:
        return None


def _bytes(body: Any) -> bytes | None:
    return None if body is None else bytes(body)
