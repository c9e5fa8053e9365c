"""Running handlers: their progress, and requests to stop one.

Both use rows that every worker reads and writes anyway: the heartbeat of a process has the progress of its handlers,
the control row of a queue has the requests. Neither is part of the caller's transaction: a request has to reach the
handler now and stays when the transaction is rolled back, and progress is read as it is now.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from django.db import Error, connections, router, transaction

from .. import registry
from ..consuming.registry import registered
from ..errors import InvalidMessage, shortened
from ..failures.history import clean
from ..models import Now, QueueControl, Subscriber
from ..models.subscribers import parse_json_list
from ..sending.isolation import as_of_now, in_transaction, outside_transaction
from ..sending.validation import alias_of
from ..sql import ErrorKind, backend_of
from .control import log

#: How long requests are kept, for workers that do not answer at the moment, and how many per queue.
KEPT, MAX_REQUESTS = timedelta(minutes=10), 200
#: Milliseconds that a request waits for the control row of its queue.
LOCK_WAIT_MS = 2_000

_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a handler at the last heartbeat of its worker."""

    message_id: uuid.UUID
    queue: str
    consumer: str
    attempt: int
    done: float
    total: float | None
    note: str
    #: The running time of the handler.
    running_for: timedelta
    #: The time of the heartbeat, by the database's clock.
    reported_at: datetime
    host: str
    process: int

    @property
    def share(self) -> float | None:
        """From 0 to 1; None: the handler reports no total."""
        return min(1.0, self.done / self.total) if self.total else None


def progress_of(message_id: uuid.UUID, *, using: str | None = None) -> Progress | None:
    """The progress of the handler of a message, as of the last heartbeat of its worker; None: it is not being handled,
    or its handler reports none. ``using``: the queue's database (default: all databases with queues). Raises
    InvalidMessage for an id that is no UUID."""
    _refuse_other_id(message_id)
    for alias in [using] if using is not None else _databases_with_queues():
        rows = Subscriber.objects.using(alias).filter(progress__contains=str(message_id), alive_until__gt=Now())
        for row in as_of_now(alias, lambda rows=rows: list(rows.order_by("-heartbeat_at"))):  # type: ignore[misc]
            for handler in progress_in(row):
                if handler.message_id == message_id:
                    return handler
    return None


def _refuse_other_id(message_id: Any) -> None:
    if not isinstance(message_id, uuid.UUID):
        raise InvalidMessage(f"message_id = {shortened(message_id)} is not accepted: it must be a uuid.UUID.")


def progress_in(row: Subscriber) -> Iterator[Progress]:
    """The progress that one worker reports for its messages in flight. Read tolerantly: it may be of another
    version."""
    for item in parse_json_list(row.progress):
        try:
            yield Progress(
                uuid.UUID(item["id"]),
                row.queue,
                str(item["consumer"]),
                int(item["attempt"]),
                float(item["done"]),
                None if item["total"] is None else float(item["total"]),
                str(item["note"]),
                timedelta(seconds=float(item["seconds"])),
                row.heartbeat_at,
                row.host,
                row.process,
            )
        except (KeyError, ValueError, TypeError, AttributeError):
            continue


def cancel_running(
    message_id: uuid.UUID,
    *,
    queue: Any = None,
    reason: str = "",
    discard: bool = False,
    by: Any = None,
    using: str | None = None,
) -> bool:
    """Ask the running handler of a message to stop; returns whether any live worker was asked. Workers read the request
    within a second, or within their peek delay if that is longer, also when the caller has a transaction open; a
    rollback does not undo it.

    An async handler is cancelled; a sync handler sees ``context.cancelled`` and is interrupted after ``CANCEL_GRACE``.
    Its message becomes poison with the reason, or is deleted (``discard``), and no attempt is counted; if the handler
    still succeeds, the message is handled. A message that is not being handled stays as it is. ``queue``: its queue, so
    that the others are not asked; ``by``: the user for the admin's log.
    """
    _refuse_other_id(message_id)
    if queue is not None:
        targets: Iterable[tuple[str, str]] = [(alias_of(queue, using), queue._meta.label)]
    else:
        found = progress_of(message_id, using=using)
        aliases = [using] if using is not None else _databases_with_queues()
        targets = [
            (alias, label)
            for alias in aliases
            for label in _live_queues(alias)
            if found is None or found.queue == label
        ]
    asked = False
    for alias, label in targets:
        if label in _live_queues(alias):
            _ask_now(alias, partial(_ask, alias, label, message_id, clean(reason, 200), discard))
            asked = True
    if by is not None and queue is not None:
        log(by, queue, f"Asked the handler of message {message_id} to stop. {reason}".strip())
    return asked


def _ask_now(alias: str, ask: Callable[[], None]) -> None:
    """Ask in a transaction of its own. If the caller's has changed the control row of the queue, this one would wait
    for it: then the request is part of the caller's transaction."""
    connection = connections[alias]
    if not in_transaction(connection):
        ask()
        return
    try:
        outside_transaction(alias, ask)
    except Error as error:
        if backend_of(connection).error_kind(error) is not ErrorKind.LOCKED:
            raise
        ask()


def _ask(alias: str, label: str, message_id: uuid.UUID, reason: str, discard: bool) -> None:
    connection = connections[alias]
    with transaction.atomic(using=alias), backend_of(connection).sessions.lock_timeout(connection, LOCK_WAIT_MS):
        rows = QueueControl.objects.using(alias)
        rows.get_or_create(queue=label)
        # Locked, so that two requests at once do not overwrite each other.
        row = rows.select_for_update().get(queue=label)
        now = backend_of(connection).now(connection)
        kept = [
            item for item in parse_json_list(row.cancelling) if _is_new(item, now) and item.get("id") != str(message_id)
        ]
        kept.append({"id": str(message_id), "at": now.isoformat(), "reason": reason, "discard": discard})
        rows.filter(queue=label).update(cancelling=json.dumps(kept[-MAX_REQUESTS:]))


def _is_new(item: Any, now: datetime) -> bool:
    try:
        return now - datetime.fromisoformat(item["at"]) < KEPT
    except (KeyError, ValueError, TypeError):
        return False


def _live_queues(alias: str) -> set[str]:
    rows = Subscriber.objects.using(alias).filter(alive_until__gt=Now()).order_by()
    live = as_of_now(alias, lambda: set(rows.values_list("queue", flat=True).distinct()))
    return live & {queue._meta.label for queue in registry.queues}


def _databases_with_queues() -> list[str]:
    """The databases with queues."""
    return sorted({router.db_for_write(queue) for queue in registry.queues if registered.maintains(queue)})
