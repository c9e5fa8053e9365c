"""The rows of Celery's results: looked up, forgotten, and deleted when they have expired."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from django.db import Error, connections, router, transaction
from django.db.models import Q, QuerySet

from ...models import Now
from ...sql import ErrorKind, backend_of
from .models import LAST_POSITION, CeleryChordPart, CeleryGroup, CeleryResult

log = logging.getLogger("queueapp")

#: Rows deleted at a time.
BATCH = 1000


def results_of(alias: str, ids: Sequence[str]) -> list[CeleryResult]:
    """What is kept of these tasks, and has not expired."""
    return list(_in_time(CeleryResult._default_manager.using(alias)).filter(task_id__in=ids)) if ids else []


def group_of(alias: str, group_id: str) -> CeleryGroup | None:
    """What is kept of a group, and has not expired."""
    return _in_time(CeleryGroup._default_manager.using(alias)).filter(group_id=group_id).first()


def forget(alias: str, task_id: str) -> None:
    """Forget the result of a task."""
    CeleryResult._default_manager.using(alias).filter(task_id=task_id)._raw_delete(alias)


def delete_group(alias: str, group_id: str) -> None:
    """Forget a group, in a transaction. What a chord has still to count stays."""
    rows = CeleryGroup._default_manager.using(alias).filter(group_id=group_id)
    rows.filter(Q(is_over=True) | Q(size=None, counted=0))._raw_delete(alias)
    rows.update(result=None)


def parts_of(alias: str, group_id: str) -> list[CeleryChordPart]:
    """What the members of a chord have come to, in the order of its header; those without a place as they came."""
    return list(CeleryChordPart._default_manager.using(alias).filter(group_id=group_id).order_by("position", "number"))


def end_chord(alias: str, group_id: str) -> None:
    """Nothing is counted for a chord any more, in the transaction that sends its body or fails it."""
    CeleryGroup._default_manager.using(alias).filter(group_id=group_id).update(is_over=True)
    drop_parts(alias, group_id)


def drop_parts(alias: str, group_id: str) -> None:
    """Forget what members of a chord have come to."""
    CeleryChordPart._default_manager.using(alias).filter(group_id=group_id)._raw_delete(alias)


def place_of(index: Any) -> int:
    """Where a member stands in the header."""
    return index if isinstance(index, int) and 0 <= index < LAST_POSITION else LAST_POSITION


def run_maintenance(alias: str, may_continue: Callable[[], bool]) -> None:
    """What the processes do that keep house in a database; nothing where the tables are not, or are not theirs."""
    if not router.allow_migrate_model(alias, CeleryResult):
        return
    try:
        count = delete_old(alias, may_continue)
    except Error as error:
        if backend_of(connections[alias]).error_kind(error) not in (ErrorKind.MISSING, ErrorKind.DENIED):
            raise
        return
    if count:
        log.info("%d results of Celery's tasks in %r were deleted: they have expired.", count, alias)


def delete_old(alias: str, may_continue: Callable[[], bool] = lambda: True) -> int:
    """Delete what has expired, in batches that skip what is locked; returns how many results."""
    count = _in_batches(alias, CeleryResult, lambda rows: rows._raw_delete(alias), may_continue)
    _in_batches(alias, CeleryGroup, lambda rows: _delete_groups(alias, rows), may_continue)
    return count


def _delete_groups(alias: str, rows: QuerySet[CeleryGroup]) -> None:
    parts = CeleryChordPart._default_manager.using(alias).filter(
        group_id__in=list(rows.values_list("group_id", flat=True))
    )
    parts._raw_delete(alias)
    rows._raw_delete(alias)


def _in_batches(alias: str, model: Any, delete: Callable[[Any], Any], may_continue: Callable[[], bool]) -> int:
    rows, count = model.objects.using(alias), 0
    while may_continue():
        with transaction.atomic(using=alias):
            old = rows.filter(expires_at__lt=Now()).order_by("expires_at")
            keys = list(old.select_for_update(skip_locked=True).values_list("pk", flat=True)[:BATCH])
            delete(rows.filter(pk__in=keys))
        count += len(keys)
        if len(keys) < BATCH:
            break
    return count


def _in_time(rows: QuerySet[Any]) -> QuerySet[Any]:
    return rows.filter(Q(expires_at=None) | Q(expires_at__gt=Now()))
