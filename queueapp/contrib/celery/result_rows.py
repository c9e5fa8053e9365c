"""Reads and deletes the rows of Celery's results, groups and chord parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from django.db import Error, connections, router, transaction
from django.db.models import Q, QuerySet

from ...models import Now
from ...sql import ErrorKind, backend_of
from .models import LAST_POSITION, CeleryChordPart, CeleryGroup, CeleryResult

log = logging.getLogger("queueapp")

#: ``CeleryGroup.size`` of a chord that expired before all of its members ended, and how long its row is kept after
#: that.
EXPIRED, EXPIRED_KEPT_FOR = -1, timedelta(days=7)
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


def end_chord(alias: str, group_id: str, expires_ms: int | None) -> None:
    """Mark a chord as finished, in the transaction that sends its body or fails it. Its row expires from now on."""
    groups = CeleryGroup._default_manager.using(alias).filter(group_id=group_id)
    groups.update(is_over=True, expires_at=_in(expires_ms))
    delete_parts(alias, group_id)


def expire_group(alias: str, group_id: str, expires_ms: int | None) -> None:
    """Let the row of a group expire."""
    CeleryGroup._default_manager.using(alias).filter(group_id=group_id).update(expires_at=_in(expires_ms))


def keep_unfinished(alias: str, group_id: str, expires_ms: int | None) -> None:
    """Restore the expiry of a group's row if its chord is unfinished: a saved result has another expiry."""
    groups = CeleryGroup._default_manager.using(alias).filter(group_id=group_id, size__isnull=False, is_over=False)
    groups.update(expires_at=_in(expires_ms))


def close_expired(alias: str, group_id: str) -> None:
    """Note that the body of an expired chord has failed."""
    groups = CeleryGroup._default_manager.using(alias).filter(group_id=group_id, size=EXPIRED)
    groups.update(size=0, expires_at=Now() + EXPIRED_KEPT_FOR)


def _in(ms: int | None) -> Any:
    return None if ms is None else Now() + timedelta(milliseconds=ms)


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
    """Delete expired groups. A chord with missing members is reported and marked, so that a late member fails its body;
    parts whose chord never stored a size are reported."""
    for group in rows.exclude(is_over=True).exclude(size=None, counted=0):
        facts = {"group_id": group.group_id, "counted": group.counted, "size": group.size}
        if group.size is None:
            log.error(
                "Chord %s: %d %s counted, but the chord does not exist: its row has expired, or its sender died.",
                group.group_id, group.counted, "member was" if group.counted == 1 else "members were", extra=facts,
            )  # fmt: skip
        else:
            log.error(
                "Chord %s expired: %d of %d members have ended. Its body is not sent; the next member that ends "
                "fails it.",
                group.group_id, group.counted, group.size + group.added, extra=facts,
            )  # fmt: skip
    ids = list(rows.values_list("group_id", flat=True))
    CeleryChordPart._default_manager.using(alias).filter(group_id__in=ids)._raw_delete(alias)
    unfinished = rows.filter(is_over=False, size__isnull=False)
    expired = list(unfinished.values_list("pk", flat=True))
    unfinished.update(is_over=True, size=EXPIRED, expires_at=Now() + EXPIRED_KEPT_FOR)
    rows.exclude(pk__in=expired)._raw_delete(alias)


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
