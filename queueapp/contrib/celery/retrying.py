"""Retries of the result backend's statements after transient errors, and cleanup of the connection that a task leaves
behind.

Inside the caller's transaction a statement is part of that transaction, and its error is the caller's. Outside of one
it is retried after a transient error: a deadlock, a lock timeout, a lost connection.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

from django.db import DatabaseError, connections, transaction

from ...circuit_breaker import pool_hint
from ...failures.poison_store import PASSING
from ...sql import ErrorKind, SessionState, backend_of

log = logging.getLogger("queueapp")

_T = TypeVar("_T")

#: Maximum number of attempts, and seconds between them at first and at most: ten seconds in all.
ATTEMPTS = 10
_FIRST_WAIT, _MAX_WAIT = 0.05, 2.0


def with_retries(alias: str, call: Callable[[], _T]) -> _T:
    """Call ``call``, again after a transient error. Each statement commits by itself, or is part of the caller's
    transaction."""
    for attempt in count(1):
        try:
            return call()
        except Exception as error:
            _wait_or_raise(alias, error, attempt)
    raise AssertionError("unreachable")


def in_transaction(alias: str, call: Callable[[], _T]) -> _T:
    """Call ``call`` in one transaction, again after a transient error; inside the caller's transaction if there is
    one."""
    if connections[alias].in_atomic_block:
        return call()

    def whole() -> _T:
        with transaction.atomic(using=alias):
            value = call()
            # If an error was caught inside, COMMIT would roll back without an error.
            if backend_of(connections[alias]).sessions.state(connections[alias]) is SessionState.FAILED:
                raise DatabaseError("A statement of this transaction failed, so a commit would save nothing.")
        return value

    return with_retries(alias, whole)


def rollback_leftovers(alias: str) -> None:
    """Roll back a transaction that a task left open on its connection: it would never be committed."""
    connection = connections[alias]
    if connection.in_atomic_block:
        log.error("A task left an atomic block open in %r; it is rolled back.", alias)
        backend_of(connection).sessions.discard(connection.connection)
        del connections[alias]  # type: ignore[attr-defined]
        return
    state = backend_of(connection).sessions.state(connection)
    if state not in (SessionState.IDLE, SessionState.GONE):
        log.error("A task left a transaction open in %r; it is rolled back.", alias)
        connection.close()
    elif state is SessionState.GONE and connection.connection is not None:
        connection.close()


def close_lost_connections(**_: Any) -> None:
    """Close connections that a task's error left unusable. With ``CELERY_DB_REUSE_MAX`` Celery checks them only after
    that many tasks, and each task until then would fail."""
    for connection in connections.all(initialized_only=True):
        if connection.errors_occurred:
            connection.close_if_unusable_or_obsolete()


def is_transient(alias: str, error: BaseException) -> bool:
    """Whether a retry may succeed: the error is transient and there is no transaction around the statement."""
    connection = connections[alias]
    return not connection.in_atomic_block and backend_of(connection).error_kind(error) in PASSING


def close_if_lost(alias: str, error: BaseException) -> None:
    """Close the connection if the error says that it is lost."""
    if backend_of(connections[alias]).error_kind(error) is ErrorKind.CONNECTION:
        connections[alias].close()


def _wait_or_raise(alias: str, error: Exception, attempt: int) -> Any:
    if attempt >= ATTEMPTS or not is_transient(alias, error):
        raise error
    cause = str(error).split("\n", 1)[0] + pool_hint(error)
    log.info("Celery results: attempt %d of %d failed and is repeated: %s", attempt, ATTEMPTS, cause)
    close_if_lost(alias, error)
    time.sleep(min(_MAX_WAIT, _FIRST_WAIT * 2 ** (attempt - 1)))
