"""Statements of Celery's results, in whatever state a task has left its connection, and whatever befalls the database.

In a transaction of the caller's they are part of it, and what goes wrong is the caller's. In none they are tried again where
the error says nothing of them: a deadlock, a lock, a connection that is gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

from django.db import DatabaseError, connections, transaction

from ...failures.poison_store import PASSING
from ...sql import ErrorKind, SessionState, backend_of

log = logging.getLogger("queueapp")

_T = TypeVar("_T")

#: How often something is tried, and how many seconds apart at first and at most: ten seconds in all.
ATTEMPTS = 10
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 2.0


def with_retries(alias: str, call: Callable[[], _T]) -> _T:
    """Call it, again if an error passes by itself. Each statement commits by itself, or is part of the caller's transaction."""
    for attempt in count(1):
        try:
            return call()
        except Exception as error:
            _wait_or_raise(alias, error, attempt)
    raise AssertionError("unreachable")


def in_transaction(alias: str, call: Callable[[], _T]) -> _T:
    """Call it in one transaction, again if that fails for a reason that passes; in the caller's, if there is one."""
    if connections[alias].in_atomic_block:
        return call()

    def whole() -> _T:
        with transaction.atomic(using=alias):
            value = call()
            # Somebody may have caught an error, and COMMIT would answer ROLLBACK without a word.
            if backend_of(connections[alias]).sessions.state(connections[alias]) is SessionState.FAILED:
                raise DatabaseError("A statement of this transaction has failed, so nothing of it would be kept.")
        return value

    return with_retries(alias, whole)


def rollback_leftovers(alias: str) -> None:
    """Make sure that a connection is out of any transaction, after a task: what that has left open would never be committed."""
    connection = connections[alias]
    if connection.in_atomic_block:
        log.error("A task has left an atomic block open in %r: it is rolled back.", alias)
        backend_of(connection).sessions.discard(connection.connection)
        del connections[alias]  # type: ignore[attr-defined]
        return
    state = backend_of(connection).sessions.state(connection)
    if state not in (SessionState.IDLE, SessionState.GONE):
        log.error("A task has left a transaction open in %r: it is rolled back.", alias)
        connection.close()
    elif state is SessionState.GONE and connection.connection is not None:
        connection.close()


def close_lost(**_: Any) -> None:
    """After a task: close what is lost. Celery with ``CELERY_DB_REUSE_MAX`` looks at its connections when that many tasks have
    used them, and until then each of them would fail."""
    for connection in connections.all(initialized_only=True):
        if connection.errors_occurred:
            connection.close_if_unusable_or_obsolete()


def is_transient(alias: str, error: BaseException) -> bool:
    """Whether an error says nothing of what was tried, and that may be tried again: there is no transaction around it."""
    connection = connections[alias]
    return not connection.in_atomic_block and backend_of(connection).error_kind(error) in PASSING


def close_if_lost(alias: str, error: BaseException) -> None:
    """Close a connection that an error says is lost."""
    if backend_of(connections[alias]).error_kind(error) is ErrorKind.CONNECTION:
        connections[alias].close()


def _wait_or_raise(alias: str, error: Exception, attempt: int) -> Any:
    if attempt >= ATTEMPTS or not is_transient(alias, error):
        raise error
    log.info("A statement of Celery's results is tried again: %s", str(error).split("\n", 1)[0])
    close_if_lost(alias, error)
    time.sleep(min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** (attempt - 1)))
