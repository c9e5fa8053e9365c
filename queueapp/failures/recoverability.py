"""Recoverability: what a policy gets (``Failure``), what it may decide (``Verdict``), the default policy, asking the
one of a consumer, and the options of failed messages: a consumer's, else its queue's, else the project's
(``QUEUEAPP``)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from django.db import connections, transaction

from .. import callbacks, messages, signals
from ..conf import settings
from ..errors import ErasedMessage, UndecodableMessage
from ..options import Option
from .history import clean, one_line

if TYPE_CHECKING:
    from ..consuming.registry import Registration
    from ..sql.message_columns import Row


def _are_errors(value: Any) -> bool:
    return all(isinstance(cls, type) and issubclass(cls, BaseException) for cls in value)


OPTIONS: tuple[Option, ...] = (
    Option("timeout", timedelta, None, "Time limit of one attempt; None: the queue's, then QUEUEAPP.TIMEOUT.",
           timedelta(milliseconds=10), timedelta(hours=24), True, True),
    Option("attempts", int, None, "Attempts before the message is poison; None: the queue's, then QUEUEAPP.ATTEMPTS.",
           1, 1000, True),
    Option("retry_delay", timedelta, None,
           "Wait between attempts; None: the queue's, then QUEUEAPP.RETRY_DELAY; 0: at once, in place.",
           timedelta(0), timedelta(days=30), True, True),
    Option("retry_delay_increase", timedelta, None,
           "Added to the wait at each further attempt; None: the queue's, then QUEUEAPP.RETRY_DELAY_INCREASE.",
           timedelta(0), timedelta(days=30), True, True),
    Option("retry_backoff", float, None,
           "Factor by which each further wait is longer (2: exponential back-off); None: the queue's, then "
           "QUEUEAPP.RETRY_BACKOFF.",
           1.0, 100.0, True),
    Option("retry_backoff_max", timedelta, None,
           "Longest wait that `retry_backoff` leads to, jitter included; None: the queue's, then "
           "QUEUEAPP.RETRY_BACKOFF_MAX.",
           timedelta(0), timedelta(days=30), True, True),
    Option("retry_jitter", float, None,
           "Share of the wait that is added at random; None: the queue's, then QUEUEAPP.RETRY_JITTER.", 0.0, 1.0, True),
    Option("immediate_retries", int, None,
           "Attempts repeated at once before waits begin; None: the queue's, then QUEUEAPP.IMMEDIATE_RETRIES.",
           0, 1000, True),
    Option("unrecoverable", tuple, None,
           "Exception classes that send the message to poison at once; None: the queue's, which has none by itself.",
           optional=True, accept=_are_errors),
    Option("policy", object, None,
           "Callable (failure) -> RetryNow | RetryLater | Poison | Discard; None: the queue's, then the default one.",
           optional=True, accept=callable),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RetryNow:
    """Put the message back in its place; it is received again at once."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    """Move the message to the delayed store; it comes back to its queue after ``delay``."""

    delay: timedelta


@dataclass(frozen=True, slots=True)
class Poison:
    """Move the message to the poison table, with this reason in one line."""

    reason: str


@dataclass(frozen=True, slots=True)
class Discard:
    """Drop the message for good; the reason is logged."""

    reason: str = ""


Verdict = RetryNow | RetryLater | Poison | Discard


@dataclass(slots=True)
class Failure:
    """One failed attempt as a policy sees it: ``policy(failure) -> verdict``. The row is as it is stored, so header
    changes of the failed handler are not here; its deliveries count this hand-out. ``attempt``: how many have failed by
    now, this one included. Where no handler was involved (a delayed message that could not be forwarded, one that was
    moved by hand) there is no consumer, and where the queue is unknown, no queue."""

    queue: Any
    consumer: Registration | None
    row: Row
    exception: BaseException
    attempt: int
    items: dict[str, Any] = field(default_factory=dict)
    #: The limits of its queue that it has reached with this attempt, if that is why it ends.
    reasons: tuple[str, ...] = ()

    @property
    def headers(self) -> dict[str, str]:
        """The stored headers; empty when they do not parse."""
        return messages.readable_headers(self.row.headers)

    @property
    def message_type(self) -> str:
        """The type that the headers name; '' where they name none, or do not parse."""
        try:
            return messages.read_head(self.row.headers)[0]
        except UndecodableMessage:
            return ""

    def option(self, name: str) -> Any:
        """An option of the consumer, or else of its queue, or else of the project (``attempts`` ->
        ``QUEUEAPP.ATTEMPTS``)."""
        value = self.consumer.option(name) if self.consumer is not None else getattr(self.queue.delivery, name)
        return value if value is not None else getattr(settings, name.upper())


#: A retry in the farther future is a mistake: as the ``delay`` of a send.
LONGEST_DELAY = timedelta(days=36500)


class ConnectionSpoiled(Exception):
    """A policy has taken away the connection under the transaction that it was asked in."""


def default_policy(failure: Failure) -> Verdict:
    """Immediate retries, then delayed ones with increase and jitter, then poison (NServiceBus' order of decisions)."""
    if isinstance(failure.exception, UndecodableMessage):
        return Poison("undecodable: " + one_line(failure.exception))
    unrecoverable = failure.consumer.option("unrecoverable") if failure.consumer else ()
    if unrecoverable and isinstance(failure.exception, unrecoverable):
        return Poison("unrecoverable: " + one_line(failure.exception))
    attempts = failure.option("attempts")
    if failure.attempt >= attempts:
        return Poison(f"failed {failure.attempt} of {attempts} attempts: {one_line(failure.exception)}")
    immediate = failure.option("immediate_retries")
    if failure.attempt <= immediate:
        return RetryNow()
    wait = _wait(failure, failure.attempt - immediate - 1)
    return RetryLater(min(wait, LONGEST_DELAY)) if wait else RetryNow()


def _wait(failure: Failure, waits: int) -> timedelta:
    """The wait before the next attempt, after so many waits."""
    delay, backoff = failure.option("retry_delay"), failure.option("retry_backoff")
    wait, jitter = delay + failure.option("retry_delay_increase") * waits, failure.option("retry_jitter")
    if backoff > 1 and delay:
        # The bound holds with the jitter, which keeps its spread there. A thousand attempts overflow any number.
        bound = max(delay, failure.option("retry_backoff_max") / (1 + jitter))
        longer = math.log(bound / delay) / math.log(backoff)
        wait = bound if waits >= longer else min(wait + delay * (backoff**waits - 1), bound)
    return wait + wait * (jitter * random.random())  # type: ignore[no-any-return]


def ask(failure: Failure, alias: str) -> Verdict:
    """The verdict of the consumer's policy, or of the default one where it has none, or it fails or makes no sense.
    What it says is text that every column takes, and a time that every clock knows. Raises ConnectionSpoiled."""
    if isinstance(failure.exception, ErasedMessage):
        return Discard(one_line(failure.exception))  # whatever a policy says: nothing will ever open it
    policy: Callable[[Failure], Verdict] | None = failure.consumer.option("policy") if failure.consumer else None
    if policy is None:
        return _default(failure)
    connection = connections[alias]
    blocks, savepoints = connection.atomic_blocks[:], connection.savepoint_ids[:]
    try:
        # What a policy writes or sends is kept with its verdict, and undone alone when it raises.
        with transaction.atomic(using=alias):
            verdict = callbacks.run("the recoverability policy", partial(policy, failure), outcome_final=False)
        found = accepted(verdict)
        error: BaseException | None = None
    except BaseException as raised:  # sys.exit() and a cancelled coroutine end no worker
        found, error = None, raised
    if connection.in_atomic_block and (connection.atomic_blocks, connection.savepoint_ids) != (blocks, savepoints):
        # A block that it did not leave: our transaction would end as if it were within that one, uncommitted.
        connection.close()
        connection.atomic_blocks, connection.savepoint_ids = blocks, savepoints
    if connection.closed_in_transaction:
        # With the connection went the transaction that this failure is recorded in; another one would go the same way.
        raise ConnectionSpoiled(
            f"The recoverability policy of {failure.consumer!r} closed the connection, or did not leave an atomic "
            "block."
        )
    if error is not None:
        # A policy that fails must not lose the message nor stop the queue: the default one decides.
        signals.log.error(
            "The recoverability policy of %r failed; the default decides.", failure.consumer, exc_info=error
        )
        failure.items["policy_error"] = clean(_shown(error), 1000)
        return _default(failure)
    if found is None:
        shown = clean(_shown(verdict), 1000)
        signals.log.error("The recoverability policy of %r returned %s; the default decides.", failure.consumer, shown)
        return _default(failure)
    return found


def _default(failure: Failure) -> Verdict:
    try:
        return default_policy(failure)
    except BaseException as error:
        # Comparing exception classes runs callbacks of the user's classes.
        return Poison(f"the default policy failed ({one_line(error)}): {one_line(failure.exception)}")


def accepted(verdict: Any) -> Verdict | None:
    """A verdict that can be carried out, or None for what is none."""
    if isinstance(verdict, RetryNow):
        return verdict
    if isinstance(verdict, RetryLater):
        fits = isinstance(verdict.delay, timedelta) and verdict.delay <= LONGEST_DELAY
        return RetryLater(max(verdict.delay, timedelta(0))) if fits else None
    # A reason that is no text is still a decision.
    if isinstance(verdict, Poison):
        return Poison(clean("no reason was given" if verdict.reason is None else verdict.reason, 500))
    return Discard(clean(verdict.reason, 500)) if isinstance(verdict, Discard) else None


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except BaseException as error:
        return f"{type(value).__name__} (its __repr__ raised {type(error).__name__})"
