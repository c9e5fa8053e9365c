"""Messages that are being handled: how far they are, and asking one to stop.

Both go by rows that every worker reads and writes anyway: how far a handler is by the heartbeat of its process, a request by
the controls of the queue.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connections, router, transaction

from .. import registry
from ..errors import InvalidMessage
from ..failures.history import clean
from ..models import Now, QueueControl, Subscriber
from ..models.subscribers import parse_json_list
from ..sending.validation import alias_of
from ..sql import backend_of
from .control import log

#: Requests are kept for so long, and so many of a queue: for workers that do not answer at the moment.
KEPT, MOST = timedelta(minutes=10), 200


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a handler was at its worker's last heartbeat."""

    message_id: uuid.UUID
    queue: str
    consumer: str
    attempt: int
    done: float
    total: float | None
    note: str
    #: How long it had been running.
    running_for: timedelta
    #: When the worker told this, by the database's clock.
    reported_at: datetime
    host: str
    process: int

    @property
    def share(self) -> float | None:
        """From 0 to 1; None: it did not say of how much."""
        return min(1.0, self.done / self.total) if self.total else None


def progress_of(message_id: uuid.UUID, *, using: str | None = None) -> Progress | None:
    """How far the handler of a message is, as of its worker's last heartbeat; None: nobody handles it now, or its handler does
    not say. ``using``: the queue's database (default: all that hold queues are asked)."""
    for alias in [using] if using is not None else _homes():
        rows = Subscriber.objects.using(alias).filter(progress__contains=str(message_id), alive_until__gt=Now())
        for row in rows.order_by("-heartbeat_at"):
            for one in told_by(row):
                if one.message_id == message_id:
                    return one
    return None


def told_by(row: Subscriber) -> Iterator[Progress]:
    """What one worker tells of the messages that it has in hand. Read tolerantly: it may be of another version."""
    for one in parse_json_list(row.progress):
        try:
            yield Progress(
                uuid.UUID(one["id"]),
                row.queue,
                str(one["consumer"]),
                int(one["attempt"]),
                float(one["done"]),
                None if one["total"] is None else float(one["total"]),
                str(one["note"]),
                timedelta(seconds=float(one["seconds"])),
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
    """Ask whoever handles this message now to stop; whether there is any live worker to ask. Workers see it within a second, or
    their peek delay if that is longer.

    An async handler is cancelled, a sync one sees ``context.cancelled`` and is interrupted after ``CANCEL_GRACE``. Its message
    becomes poison with the reason, or is dropped (``discard``), and no attempt is counted; one that ends well all the same is
    handled. A message that nobody handles at this moment is left as it is. ``queue``: where it is, which spares the others the
    look; ``by``: the user for the admin's log.
    """
    if not isinstance(message_id, uuid.UUID):
        raise InvalidMessage(f"message_id = {message_id!r} is not accepted: it must be a uuid.UUID.")
    if queue is not None:
        places: Iterable[tuple[str, str]] = [(alias_of(queue, using), queue._meta.label)]
    else:
        found = progress_of(message_id, using=using)
        aliases = [using] if using is not None else _homes()
        places = [
            (alias, label)
            for alias in aliases
            for label in _live_queues(alias)
            if found is None or found.queue == label
        ]
    asked = False
    for alias, label in places:
        if label in _live_queues(alias):
            _ask(alias, label, message_id, clean(reason, 200), discard)
            asked = True
    if by is not None and queue is not None:
        log(by, queue, f"Asked the handler of message {message_id} to stop. {reason}".strip())
    return asked


def _ask(alias: str, label: str, message_id: uuid.UUID, reason: str, discard: bool) -> None:
    connection = connections[alias]
    with transaction.atomic(using=alias):
        rows = QueueControl.objects.using(alias)
        rows.get_or_create(queue=label)
        # The lock, so that of two requests at once neither is lost.
        row = rows.select_for_update().get(queue=label)
        now = backend_of(connection).now(connection)
        kept = [
            one for one in parse_json_list(row.cancelling) if _is_new(one, now) and one.get("id") != str(message_id)
        ]
        kept.append({"id": str(message_id), "at": now.isoformat(), "reason": reason, "discard": discard})
        rows.filter(queue=label).update(cancelling=json.dumps(kept[-MOST:]))


def _is_new(one: Any, now: datetime) -> bool:
    try:
        return now - datetime.fromisoformat(one["at"]) < KEPT
    except (KeyError, ValueError, TypeError):
        return False


def _live_queues(alias: str) -> set[str]:
    rows = Subscriber.objects.using(alias).filter(alive_until__gt=Now())
    return set(rows.order_by().values_list("queue", flat=True).distinct()) & {
        one._meta.label for one in registry.queues
    }


def _homes() -> list[str]:
    """The databases that hold queues."""
    return sorted({router.db_for_write(queue) for queue in registry.queues if queue._meta.managed})
