"""Reads and deletes the rows of Celery's results, groups and chord parts."""

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

#: Maximum number of rows that one transaction deletes.
BATCH = 1000


def results_of(alias: str, ids: Sequence[str]) -> list[CeleryResult]:
    """The unexpired results of these tasks."""
    return list(_unexpired(CeleryResult._default_manager.using(alias)).filter(task_id__in=ids)) if ids else []


def group_of(alias: str, group_id: str) -> CeleryGroup | None:
    """The row of a group, unless it has expired."""
    return _unexpired(CeleryGroup._default_manager.using(alias)).filter(group_id=group_id).first()


def forget(alias: str, task_id: str) -> None:
    """Delete the result of a task."""
    CeleryResult._default_manager.using(alias).filter(task_id=task_id)._raw_delete(alias)


def delete_group(alias: str, group_id: str) -> None:
    """Delete a group, in a transaction. The counts of an unfinished chord stay."""
    rows = CeleryGroup._default_manager.using(alias).filter(group_id=group_id)
    rows.filter(Q(is_over=True) | Q(size=None, counted=0))._raw_delete(alias)
    rows.update(result=None)


def parts_of(alias: str, group_id: str) -> list[CeleryChordPart]:
    """The parts of a chord in the order of its header; those without a position last, in order of arrival."""
    return list(CeleryChordPart._default_manager.using(alias).filter(group_id=group_id).order_by("position", "number"))


def end_chord(alias: str, group_id: str) -> None:
    """Mark a chord as finished, in the transaction that sends its body or fails it."""
    CeleryGroup._default_manager.using(alias).filter(group_id=group_id).update(is_over=True)
    delete_parts(alias, group_id)


def delete_parts(alias: str, group_id: str) -> None:
    """Delete the parts of a chord."""
    CeleryChordPart._default_manager.using(alias).filter(group_id=group_id)._raw_delete(alias)


def position_of(index: Any) -> int:
    """The position of a member in the header."""
    return index if isinstance(index, int) and 0 <= index < LAST_POSITION else LAST_POSITION


def run_maintenance(alias: str, may_continue: Callable[[], bool]) -> None:
    """Delete expired rows; called by maintenance. Does nothing without the tables, or without the privilege."""
    if not router.allow_migrate_model(alias, CeleryResult):
        return
    try:
        count = delete_old(alias, may_continue)
    except Error as error:
        if backend_of(connections[alias]).error_kind(error) not in (ErrorKind.MISSING, ErrorKind.DENIED):
            raise
        return
    if count:
        log.info("Celery results: %d expired %s deleted in %r.", count, "row was" if count == 1 else "rows were", alias)


def delete_old(alias: str, may_continue: Callable[[], bool] = lambda: True) -> int:
    """Delete expired rows in batches, skipping locked ones; returns the number of results deleted."""
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


def _unexpired(rows: QuerySet[Any]) -> QuerySet[Any]:
    return rows.filter(Q(expires_at=None) | Q(expires_at__gt=Now()))
