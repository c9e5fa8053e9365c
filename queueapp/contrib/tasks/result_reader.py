"""What a result says now: where its message is, and what is kept of it.

A message is in one of three tables, and one statement looks into all of them, so that one that moves meanwhile is not
missed; what is kept is read after that, since an ack keeps it before anybody finds the message gone. A task whose worker
died is RUNNING until its lease ends, and READY from then on, whatever was written when it began: nothing was.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from django.db.models import Case, CharField, F, IntegerField, Value, When
from django.utils import timezone

from ...delayed import is_built_in, store_of
from ...errors import UndecodableMessage
from ...models import DelayedMessage, Now, PoisonMessage, Subscriber
from ...sql import nonblocking
from .compat import TaskError, TaskResult, TaskResultStatus
from .import_task import restored
from .models import Result
from .result_store import BATCH, sent_at
from .serialization import Said, arguments_of

#: Where a message is, in the order in which one that is in several places counts: somebody has sent a copy of it.
LEASED, WAITING, DELAYED, POISON = range(4)
_STATUS = {
    LEASED: TaskResultStatus.RUNNING,
    WAITING: TaskResultStatus.READY,
    DELAYED: TaskResultStatus.READY,
    POISON: TaskResultStatus.FAILED,
}
#: SQL Server shows the tables one after another: a message that moved against that order is looked for again.
LOOKS = 3


class Place(NamedTuple):
    """A message as it was found."""

    place: int
    id: uuid.UUID
    headers: str
    body: bytes | None
    enqueued_at: Any
    failures: str | None
    queue: str


def places(queue: Any, alias: str, ids: Collection[uuid.UUID]) -> dict[uuid.UUID, Place]:
    """Where these messages are, of those that are anywhere."""

    def found(rows: Any, key: str, place: Any, whose: Any) -> Any:
        return (
            nonblocking(rows).filter(**{f"{key}__in": ids}).order_by().annotate(place=place, whose=whose)
            .values_list("place", key, "headers", "body", "enqueued_at", "failures", "whose")
        )  # fmt: skip

    leased = Case(When(lease_expires__gt=Now(), then=LEASED), default=WAITING, output_field=IntegerField())
    label = queue._meta.label
    everywhere = found(queue.objects.using(alias), "id", leased, Value(label, CharField())).union(
        found(DelayedMessage.objects.using(alias), "message_id", Value(DELAYED, IntegerField()), F("destination")),
        found(PoisonMessage.objects.using(alias), "message_id", Value(POISON, IntegerField()), F("queue")),
        all=True,
    )
    rows = sorted((Place(*row) for row in everywhere.order_by()), key=lambda one: -one.place)
    # Those of other queues are no tasks of this one. Told apart here: a statement that asked for them could take their index.
    return {one.id: one for one in rows if one.queue == label}


def read(queue: Any, alias: str, identity: uuid.UUID) -> Any:
    """The result of a task, or None where nobody knows it."""
    for _ in range(LOOKS):
        place = places(queue, alias, [identity]).get(identity)
        kept = Result.objects.using(alias).filter(pk=identity).first()
        if place is not None:
            return _of_place(queue, alias, place, kept)
        if kept is not None and not _is_lost(alias, kept):
            return _of_kept(kept)
    return None


def _is_lost(alias: str, kept: Result) -> bool:
    """Whether a task that was to be tried again, and whose message is nowhere, will not be: somebody has purged it. Another
    store than the table of the delayed ones cannot be asked."""
    return kept.status == Result.Status.READY and is_built_in(store_of(alias))


def status_of(place: Place | None, kept: Result | None) -> TaskResultStatus:
    """A message that is anywhere says it; what was kept of one that is nowhere says it else. One that is kept as successful is
    that, even if somebody has sent it once more."""
    if kept is not None and (place is None or kept.status == Result.Status.SUCCESSFUL):
        return TaskResultStatus(kept.status)
    assert place is not None
    return _STATUS[place.place]


def _of_place(queue: Any, alias: str, place: Place, kept: Result | None) -> Any:
    status = status_of(place, kept)
    if status is TaskResultStatus.SUCCESSFUL:
        return _of_kept(kept)
    # Requeued without its history: it starts anew.
    history = kept if kept is not None and (place.failures or status is TaskResultStatus.FAILED) else None
    result = _result(place.id, place.headers, place.body, place.enqueued_at, status, history)
    if status is TaskResultStatus.RUNNING:
        _add_attempt(queue, alias, place.id, result)
    if status is TaskResultStatus.FAILED and (history is None or history.status != Result.Status.FAILED):
        _add_poison(alias, place.id, result)
    return result


def _of_kept(kept: Any) -> Any:
    return _result(kept.pk, kept.headers, kept.body, kept.enqueued_at, TaskResultStatus(kept.status), kept)


def _result(identity: uuid.UUID, headers: str, body: Any, enqueued_at: Any, status: Any, kept: Result | None) -> Any:
    said = Said.by(headers)
    try:
        args, kwargs = arguments_of(bytes(body) if body is not None else None)
    except UndecodableMessage:
        args, kwargs = [], {}
    result: Any = TaskResult(
        task=restored(said),
        id=str(identity),
        status=status,
        enqueued_at=enqueued_at,
        started_at=kept.started_at if kept else None,
        finished_at=kept.finished_at if kept else None,
        last_attempted_at=kept.last_attempted_at if kept else None,
        args=args,
        kwargs=kwargs,
        backend=said.backend,
        errors=errors_from(kept.errors) if kept else [],
        worker_ids=json.loads(kept.worker_ids) if kept else [],
    )
    if kept is not None and status is TaskResultStatus.SUCCESSFUL:
        object.__setattr__(result, "_return_value", json.loads(kept.return_value))
    return result


def _add_attempt(queue: Any, alias: str, identity: uuid.UUID, result: Any) -> None:
    """The attempt that is under way: who has it, and since when as the token of its lease says, by that worker's clock."""
    leases = queue.objects.using(alias).filter(id=identity, lease_token__isnull=False)
    lease = leases.values_list("lease_token", "lease_owner").first()
    began, owner = (sent_at(lease[0]), lease[1]) if lease else (timezone.now(), None)
    who = Subscriber.objects.using(alias).filter(pk=owner).values_list("host", "process").first() if owner else None
    result.worker_ids.append(f"{who[0]}:{who[1]}" if who else str(owner))
    object.__setattr__(result, "last_attempted_at", began)
    if result.started_at is None:
        object.__setattr__(result, "started_at", began)


def _add_poison(alias: str, identity: uuid.UUID, result: Any) -> None:
    """What the poison page knows of a task of which nothing else is kept."""
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
    """The errors of a result as the framework has them."""
    return [TaskError(exception_class_path=path, traceback=traceback) for path, traceback in json.loads(text)]


def statuses(queues: Sequence[Any], alias: str, kept: Sequence[Result]) -> dict[uuid.UUID, TaskResultStatus]:
    """What many results say now: of a list, in one statement per queue."""
    ids = [one.pk for one in kept]
    found: dict[uuid.UUID, Place] = {}
    for queue in queues:
        found |= places(queue, alias, ids)
    return {one.pk: status_of(found.get(one.pk), one) for one in kept}


def delete_lost(
    queue: Any, alias: str, backend: str, retention: timedelta, may_continue: Callable[[], bool] = lambda: True
) -> int:
    """Delete what is kept of tasks that were to be tried again and whose messages are nowhere any more, once their last attempt
    is so long ago; returns how many."""
    old = Result.objects.using(alias).filter(backend=backend, finished_at=None, last_attempted_at__lt=Now() - retention)
    count, after = 0, uuid.UUID(int=0)
    while is_built_in(store_of(alias)) and may_continue():
        keys = list(old.filter(pk__gt=after).order_by("pk").values_list("pk", flat=True)[:BATCH])
        found = places(queue, alias, keys) if keys else {}
        lost = [key for key in keys if key not in found]
        old.filter(pk__in=lost)._raw_delete(alias)
        count += len(lost)
        if len(keys) < BATCH:
            break
        after = keys[-1]
    return count
