"""Delayed messages that could not be delivered: what went wrong at which step of the dispatch, and becoming poison.

The steps are those of NServiceBus' poller, each with a breaker of its own: fetching, dispatching, and recovering from a
refused dispatch, which is counting it or moving the message to poison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from django.db import Error, connections, transaction

from .. import signals
from ..errors import MissingVerb, SemanticsRefused
from ..failures.history import first_failed, one_line
from ..failures.poison_store import insert_poison
from ..failures.recoverability import Failure, Poison
from ..models import Now
from ..sql import ErrorKind, backend_of
from ..sql.message_columns import Row


class Dispatched(NamedTuple):
    """What one round did: messages moved to their queues, moved to poison, and failed but to be tried again."""

    moved: int
    poisoned: int
    failed: int = 0


#: Called with the error of each message that its queue has refused.
OnRefused = Callable[[BaseException], None]


def ignore(error: BaseException) -> None:
    """An ``OnRefused`` of who need not know."""


class StepFailed(Exception):
    """A step of the dispatch failed because of ``__cause__``. What was not committed by then is undone."""


class FetchFailed(StepFailed):
    """The store could not be opened or asked for what is due."""


class DispatchFailed(StepFailed):
    """A message was fetched and could not be handed over, for a reason that is not the message's."""


class RecoveryFailed(StepFailed):
    """A refused message could neither be counted nor moved to poison."""


@contextmanager
def step(failed: type[StepFailed], alias: str) -> Iterator[None]:
    """Around a step: what is raised in it is raised as ``failed``, but for a deadlock, after which the same is tried
    again."""
    try:
        yield
    except (StepFailed, MissingVerb, SemanticsRefused):
        raise
    except Exception as error:
        if isinstance(error, Error) and backend_of(connections[alias]).error_kind(error) is ErrorKind.DEADLOCK:
            raise
        raise failed(one_line(error)) from error


def poison(
    alias: str, queue: Any, destination: str, row: Row, reason: str, error: BaseException, *, retries: int
) -> None:
    """Keep a message that could not be delivered, in the caller's transaction; the signal follows its commit.
    ``queue``: None where this process does not know the destination."""
    insert_poison(
        alias,
        destination,
        row,
        reason,
        attempts=retries,
        exception=error,
        destination=destination,
        # A store counts its retries and not when they were. By the database's clock.
        first_failed_at=first_failed(row.failures) or Now(),
    )

    def notify() -> None:
        signals.send(signals.poisoned, Failure(queue, None, row, error, retries), Poison(reason))

    transaction.on_commit(notify, using=alias, robust=True)
