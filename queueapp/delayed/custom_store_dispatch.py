"""Dispatching from a third party's store, message by message, by the contract of the interface.

A store that takes part in our transactions (TRANSACTIONAL) has fetch, send and remove in one of them: exactly once.
With any other the send is committed before the message is removed: a process that dies in between sends it again, and
never loses it.
"""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any

from django.db import connections, transaction

from .. import notifier, registry
from ..conf import settings
from ..errors import QueueNotFound
from ..failures.poison_store import is_transient
from ..models.delivery import Semantics
from ..sql import queue_sql
from ..sql.message_columns import row_from
from .dispatch_failures import Dispatched, DispatchFailed, FetchFailed, OnRefused, RecoveryFailed, ignore, poison, step
from .store import Delayed, DelayedStore

log = logging.getLogger("queueapp")


def dispatch_next(
    store: DelayedStore,
    at: datetime,
    on_refused: OnRefused = ignore,
    semantics: Semantics = Semantics.TRANSACTIONAL,
) -> Dispatched | None:
    """Dispatch one message of a third party's store that is due at ``at``; None: there is none. ``semantics``: what the
    store was opened for. A message for a queue that this process does not know becomes poison: the contract has no way
    to leave it alone and look behind it. Raises StepFailed."""
    if semantics is Semantics.TRANSACTIONAL:
        with transaction.atomic(using=store.alias):
            return _in_one_transaction(store, at, on_refused)
    return _at_least_once(store, at, on_refused)


def _in_one_transaction(store: DelayedStore, at: datetime, on_refused: OnRefused) -> Dispatched | None:
    alias = store.alias
    with step(FetchFailed, alias):
        message = store.fetch_next_due(at)
    if message is None:
        return None
    try:
        queue = _send(alias, message)
    except Exception as error:
        # Also what is no error of the database: another store may hold what no column takes.
        if is_transient(error, alias):
            with step(DispatchFailed, alias):
                raise
        _report(error, on_refused)
        with step(RecoveryFailed, alias):
            if _may_retry(message, error):
                return _counted(store, message)
            if not store.remove(message):
                return Dispatched(0, 0)  # another dispatcher sent it
            _poison(alias, message, error)
        return Dispatched(0, 1)
    with step(DispatchFailed, alias):
        gone = store.remove(message)
    if not gone:
        # Contract: False says that it was dispatched already. Undo ours rather than send it twice.
        transaction.set_rollback(True, using=alias)
        return Dispatched(0, 0)
    notifier.sent(queue, connections[alias])
    return Dispatched(1, 0)


def _at_least_once(store: DelayedStore, at: datetime, on_refused: OnRefused) -> Dispatched | None:
    alias = store.alias
    # A transaction around each call: a store that locks rows of this database in a lower mode needs one.
    with step(FetchFailed, alias), transaction.atomic(using=alias):
        message = store.fetch_next_due(at)
    if message is None:
        return None
    try:
        with transaction.atomic(using=alias):
            notifier.sent(_send(alias, message), connections[alias])
        with transaction.atomic(using=alias):
            gone = store.remove(message)
    except Exception as error:
        if is_transient(error, alias):
            with step(DispatchFailed, alias):
                raise
        _report(error, on_refused)
        with step(RecoveryFailed, alias):
            if _may_retry(message, error):
                with transaction.atomic(using=alias):
                    return _counted(store, message)
            # Poison first: what is removed before that is committed would be lost with this process.
            with transaction.atomic(using=alias):
                _poison(alias, message, error)
            with transaction.atomic(using=alias):
                store.remove(message)
        return Dispatched(0, 1)
    if not gone:
        log.warning("%s: delayed message %s was dispatched by another process as well, and may be there twice.",
                    message.destination, message.message_id)  # fmt: skip
    return Dispatched(1, 0)


def _send(alias: str, message: Delayed) -> Any:
    queue = registry.queues.find(message.destination)
    with transaction.atomic(using=alias):
        retried = bool(message.deliveries or message.cancels or message.failures)
        queue_sql(queue, connections[alias]).inserts.insert_row(
            connections[alias], row_from(message), same_queue=retried
        )
    return queue


def _report(error: BaseException, on_refused: OnRefused) -> None:
    if not isinstance(error, QueueNotFound):
        on_refused(error)


def _may_retry(message: Delayed, error: BaseException) -> bool:
    return not isinstance(error, QueueNotFound) and message.retries < settings.NUMBER_OF_RETRIES


def _counted(store: DelayedStore, message: Delayed) -> Dispatched:
    return Dispatched(0, 0, 1) if store.increment_failure_count(message) else Dispatched(0, 0)


def _poison(alias: str, message: Delayed, error: BaseException) -> None:
    try:
        queue = registry.queues.find(message.destination)
    except QueueNotFound:
        queue = None
    missing = isinstance(error, QueueNotFound)
    reason = ("queue not found: " if missing else "could not be forwarded to ") + message.destination
    # This attempt is one more than the store has counted; without a queue there was none.
    attempts = message.retries + (not missing)
    poison(alias, queue, message.destination, row_from(message), reason, error, retries=attempts)
