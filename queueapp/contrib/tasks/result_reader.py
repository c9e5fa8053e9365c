"""Reads the current state of a result: from the location of its message and from its stored row.

A message is in one of three tables, and one statement reads all of them, so that a message that moves meanwhile is not
missed. The row is read after that: an ack writes it before the message disappears. A task whose worker died is RUNNING
until its lease expires and READY after that; no row is written when an attempt starts.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from django.db import connections
from django.db.models import Case, CharField, F, IntegerField, Value, When
from django.utils import timezone

from ...delayed import is_built_in, store_of
from ...errors import KeyMissing, UndecodableMessage
from ...models import DelayedMessage, Now, PoisonMessage, Subscriber
from ...sending.isolation import in_transaction, outside_transaction
from ...sql import backend_of, nonblocking
from .compat import TaskError, TaskResult, TaskResultStatus
from .models import Result
from .result_store import BATCH, sent_at
from .serialization import TaskHeaders, restored, stored_arguments

#: Locations of a message, in order of precedence if copies of it are in several.
LEASED, WAITING, DELAYED, POISON = range(4)
_STATUS = {
    LEASED: TaskResultStatus.RUNNING,
    WAITING: TaskResultStatus.READY,
    DELAYED: TaskResultStatus.READY,
    POISON: TaskResultStatus.FAILED,
}
#: Maximum number of reads: on SQL Server a statement reads the tables one after another, and a message may move
#: meanwhile.
READS = 3


class MessageState(NamedTuple):
    """The location and content of a message."""

    location: int
    id: uuid.UUID
    headers: str
    body: bytes | None
    enqueued_at: Any
    failures: str | None
    queue: str


def message_states(queue: Any, alias: str, ids: Collection[uuid.UUID]) -> dict[uuid.UUID, MessageState]:
    """The states of these messages; messages that are in no table are left out."""

    def found(rows: Any, key: str, location: Any, queue_label: Any) -> Any:
        return (
            nonblocking(rows)
            .filter(**{f"{key}__in": ids})
            .order_by()
            .annotate(location=location, queue_label=queue_label)
            .values_list("location", key, "headers", "body", "enqueued_at", "failures", "queue_label")
        )

    leased = Case(When(lease_expires__gt=Now(), then=LEASED), default=WAITING, output_field=IntegerField())
    label = queue._meta.label
    everywhere = found(queue.objects.using(alias), "id", leased, Value(label, CharField())).union(
        found(DelayedMessage.objects.using(alias), "message_id", Value(DELAYED, IntegerField()), F("destination")),
        found(PoisonMessage.objects.using(alias), "message_id", Value(POISON, IntegerField()), F("queue")),
        all=True,
    )
    rows = sorted((MessageState(*row) for row in everywhere.order_by()), key=lambda state: -state.location)
    # Filtered here by queue: a condition in the statement could make the planner use another index.
    return {state.id: state for state in rows if state.queue == label}


def read(queue: Any, alias: str, identity: uuid.UUID) -> Any:
    """The result of a task; None if neither its message nor its row exists."""
    for _ in range(READS):
        location = message_states(queue, alias, [identity]).get(identity)
        stored = Result.objects.using(alias).filter(pk=identity).first()
        if location is not None:
            return _result_of_message(queue, alias, location, stored)
        if stored is not None and not _is_lost(alias, stored):
            return _result_of_row(alias, stored)
    return None


def read_current(queue: Any, alias: str, identity: uuid.UUID) -> Any:
    """``read``, also from a transaction that does not see what others commit: its caller would never see the task
    end."""
    result = read(queue, alias, identity)
    connection = connections[alias]
    if (
        (result is None or not result.is_finished)
        and in_transaction(connection)
        and backend_of(connection).sessions.has_fixed_snapshot(connection)
    ):
        # None: the task was enqueued in the open transaction.
        return outside_transaction(alias, lambda: read(queue, alias, identity)) or result
    return result


def _is_lost(alias: str, stored: Result) -> bool:
    """Whether a task that was to be retried was purged: its message is in no table. Only the built-in delayed store can
    be searched."""
    return stored.status == Result.Status.READY and is_built_in(store_of(alias))


def status_of(location: MessageState | None, stored: Result | None) -> TaskResultStatus:
    """The status of a task. Its message decides, unless the stored row is successful: then a copy of the message was
    sent."""
    if stored is not None and (location is None or stored.status == Result.Status.SUCCESSFUL):
        return TaskResultStatus(stored.status)
    assert location is not None
    return _STATUS[location.location]


def _result_of_message(queue: Any, alias: str, location: MessageState, stored: Result | None) -> Any:
    status = status_of(location, stored)
    if status is TaskResultStatus.SUCCESSFUL:
        return _result_of_row(alias, stored)
    # A message requeued without its history starts from the beginning.
    history = stored if stored is not None and (location.failures or status is TaskResultStatus.FAILED) else None
    result = _result(alias, location.id, location.headers, location.body, location.enqueued_at, status, history)
    if status is TaskResultStatus.RUNNING:
        _add_attempt(queue, alias, location.id, result)
    if status is TaskResultStatus.FAILED and (history is None or history.status != Result.Status.FAILED):
        _add_poison(alias, location.id, result)
    return result


def _result_of_row(alias: str, stored: Any) -> Any:
    return _result(
        alias, stored.pk, stored.headers, stored.body, stored.enqueued_at, TaskResultStatus(stored.status), stored
    )


def _result(
    alias: str, identity: uuid.UUID, headers: str, body: Any, enqueued_at: Any, status: Any, stored: Result | None
) -> Any:
    task_headers = TaskHeaders.by(headers)
    try:
        args, kwargs = stored_arguments(bytes(body) if body is not None else None, headers, identity, alias)
    except (UndecodableMessage, KeyMissing):
        args, kwargs = [], {}
    result: Any = TaskResult(
        task=restored(task_headers),
        id=str(identity),
        status=status,
        enqueued_at=enqueued_at,
        started_at=stored.started_at if stored else None,
        finished_at=stored.finished_at if stored else None,
        last_attempted_at=stored.last_attempted_at if stored else None,
        args=args,
        kwargs=kwargs,
        backend=task_headers.backend,
        errors=errors_from(stored.errors) if stored else [],
        worker_ids=json.loads(stored.worker_ids) if stored else [],
    )
    if stored is not None and status is TaskResultStatus.SUCCESSFUL:
        object.__setattr__(result, "_return_value", json.loads(stored.return_value))
    return result


def _add_attempt(queue: Any, alias: str, identity: uuid.UUID, result: Any) -> None:
    """Add the running attempt: its worker, and its start as the lease token has it, by that worker\'s clock."""
    leases = queue.objects.using(alias).filter(id=identity, lease_token__isnull=False)
    lease = leases.values_list("lease_token", "lease_owner").first()
    began, owner = (sent_at(lease[0]), lease[1]) if lease else (timezone.now(), None)
    who = Subscriber.objects.using(alias).filter(pk=owner).values_list("host", "process").first() if owner else None
    result.worker_ids.append(f"{who[0]}:{who[1]}" if who else str(owner))
    object.__setattr__(result, "last_attempted_at", began)
    if result.started_at is None:
        object.__setattr__(result, "started_at", began)


def _add_poison(alias: str, identity: uuid.UUID, result: Any) -> None:
    """Add the data of the poison record of a task that has no stored row of its failure."""
    rows = PoisonMessage.objects.using(alias).filter(message_id=identity).order_by("-number")
    names = ("exception_type", "traceback", "host", "process", "attempts", "first_failed_at", "failed_at")
    row = rows.values(*names).first()
    if row is None:
        return
    if not result.errors or result.errors[-1].traceback != row["traceback"]:
        kind = row["exception_type"] or "queueapp.errors.QueueError"
        result.errors.append(
            TaskError(exception_class_path=kind if "." in kind else f"builtins.{kind}", traceback=row["traceback"])
        )
    worker = f"{row['host']}:{row['process'].partition(':')[0]}"
    result.worker_ids.extend([worker] * (row["attempts"] - len(result.worker_ids)))
    for name, value in (
        ("started_at", result.started_at or row["first_failed_at"]),
        ("last_attempted_at", row["failed_at"]),
        ("finished_at", row["failed_at"]),
    ):
        object.__setattr__(result, name, value)


def errors_from(text: str) -> list[Any]:
    """Stored errors as the framework has them."""
    return [TaskError(exception_class_path=path, traceback=traceback) for path, traceback in json.loads(text)]


def statuses(queues: Sequence[Any], alias: str, stored: Sequence[Result]) -> dict[uuid.UUID, TaskResultStatus]:
    """The current statuses of many results, with one statement per queue."""
    ids = [row.pk for row in stored]
    found: dict[uuid.UUID, MessageState] = {}
    for queue in queues:
        found |= message_states(queue, alias, ids)
    return {row.pk: status_of(found.get(row.pk), row) for row in stored}


def delete_lost(
    queue: Any, alias: str, backend: str, retention: timedelta, may_continue: Callable[[], bool] = lambda: True
) -> int:
    """Delete the rows of tasks that were to be retried and whose messages are in no table any more, once the last
    attempt is older than ``retention``; returns the number."""
    old = Result.objects.using(alias).filter(backend=backend, finished_at=None, last_attempted_at__lt=Now() - retention)
    count, after = 0, uuid.UUID(int=0)
    while is_built_in(store_of(alias)) and may_continue():
        keys = list(old.filter(pk__gt=after).order_by("pk").values_list("pk", flat=True)[:BATCH])
        found = message_states(queue, alias, keys) if keys else {}
        lost = [key for key in keys if key not in found]
        old.filter(pk__in=lost)._raw_delete(alias)
        count += len(lost)
        if len(keys) < BATCH:
            break
        after = keys[-1]
    return count
