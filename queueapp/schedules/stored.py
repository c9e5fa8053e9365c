"""The rows of schedules: writing the declarations of this process, running what is due, and what operators do.

    waiting --due--> locked by one dispatcher: messages inserted, next_at written --COMMIT--> waiting, or over
                                       |--the process dies---> rolled back: waiting, and due
                                       |--send refuses-------> rolled back; due again after a wait that grows

The messages and the record of the run are one transaction, so a run is neither lost nor repeated, however many
dispatchers run and whenever one dies. Each schedule has a transaction of its own: the failure of one touches no other.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.db import IntegrityError, connections, router, transaction
from django.db.models import F

from .. import messages, notifier, registry
from ..consuming.registry import registered
from ..errors import InvalidOption, QueueNotFound
from ..failures.poison_store import is_transient
from ..models import Misfire, Schedule
from ..options import require_text
from ..sending.send import send
from ..sql import backend_of, is_locked, short_lock_waits
from . import declarations
from .declarations import MAX_NAME, read_options
from .timing import Timing, delay_of

log = logging.getLogger("queueapp.workers")

#: Schedules that one look runs at most.
BATCH = 100
#: The wait after a failed run: the first, which doubles with each failure in a row, and the longest.
FIRST_WAIT, LONGEST_WAIT = timedelta(seconds=5), timedelta(hours=1)

#: Enqueues the task of a row, and returns its id; set by ``queueapp.contrib.tasks``.
enqueue_task: Callable[[Schedule, str], uuid.UUID] | None = None


def clock(connection: Any) -> datetime:
    """The database's time. Tests replace it to move the clock."""
    return backend_of(connection).now(connection)


def timing_of(row: Schedule) -> Timing:
    """The times of a row. Raises InvalidOption."""
    return Timing(row.cron, row.every, row.at, row.timezone, row.start, row.end)


def labels_in(alias: str) -> list[str]:
    """The queues of this process in a database: schedules of others are left to the projects that know them."""
    return [queue._meta.label for queue in registry.queues if router.db_for_write(queue) == alias]


# -- declarations ----------------------------------------------------------------------------------------------------


def declare(alias: str) -> None:
    """Write the declarations of this process for a database: new ones are added, changed ones updated, and those that
    are gone from the code deleted. What was made in the admin stays. A declaration whose times have not changed keeps
    its next run, and each keeps whether it is paused."""
    rows = Schedule.objects.using(alias)
    wanted: dict[str, dict[str, Any]] = {}
    invalid: list[str] = []
    for item in list(declarations.declared.values()):
        try:
            if item.alias == alias:
                wanted[item.name] = item.row
        except (InvalidOption, QueueNotFound) as error:
            invalid.append(item.name)
            log.error("Schedule %r is not run: %s", item.name, error, extra={"schedule": item.name})
    found = {row.name: row for row in rows.filter(name__in=wanted)} if wanted else {}
    for name, columns in wanted.items():
        known = found.get(name)
        if known is not None and known.declared == columns["declared"]:
            continue
        if known is not None and not known.declared:
            log.error(
                "Schedule %r is declared in the code and was made in the admin as well, which stays; rename one of "
                "them.", name, extra={"schedule": name, "database": alias},
            )  # fmt: skip
            continue
        with transaction.atomic(using=alias):
            _write(rows, name, columns)
        log.info("Schedule %r was %s.", name, "updated" if known else "added", extra={"schedule": name})
    gone = rows.filter(queue__in=labels_in(alias)).exclude(declared="").exclude(name__in=[*wanted, *invalid])
    for name in gone.values_list("name", flat=True):
        if rows.filter(name=name).exclude(declared="").delete()[0]:
            log.info("Schedule %r was deleted: no code declares it.", name, extra={"schedule": name})


def _write(rows: Any, name: str, columns: dict[str, Any]) -> None:
    row = rows.select_for_update().filter(name=name).first()
    if row is None:
        row = Schedule(name=name, **columns)
        plan(row, rows.db)
        with suppress(IntegrityError), transaction.atomic(using=rows.db):  # another dispatcher may be adding it
            row.save(force_insert=True, using=rows.db)
        return
    before = _times_of(row)
    for column, value in columns.items():
        setattr(row, column, value)
    changed = set(columns)
    if _times_of(row) != before:
        plan(row, rows.db)
        changed |= {"next_at", "due_at"}
    rows.filter(name=name).update(**{column: getattr(row, column) for column in changed}, failures=0, error="")


def _times_of(row: Schedule) -> Any:
    return timing_of(row), row.jitter


def plan(row: Schedule, alias: str) -> None:
    """Set the next run of a row, from now on. Raises InvalidOption."""
    row.next_at = timing_of(row).after(clock(connections[alias]))
    row.due_at = row.next_at and row.next_at + delay_of(row.name, row.next_at, row.jitter)


# -- running ---------------------------------------------------------------------------------------------------------


def run_due(alias: str, may_continue: Callable[[], bool] = lambda: True) -> timedelta | None:
    """Run the schedules of this process that are due; returns how long until the next one is, None: there is none."""
    connection = connections[alias]
    waiting = Schedule.objects.using(alias).filter(paused=False, due_at__isnull=False, queue__in=labels_in(alias))
    waiting = waiting.order_by("due_at")
    first: list[tuple[str, Any]] = list(waiting.values_list("name", "due_at")[:BATCH])
    if not first:
        return None
    now = clock(connection)
    due = [name for name, due_at in first if due_at <= now]
    for name in due:
        if not may_continue():
            return timedelta(0)
        run_one(alias, name, now)
    if not due:
        return first[0][1] - now  # type: ignore[no-any-return]
    if len(due) == BATCH:
        return timedelta(0)
    next_due = waiting.values_list("due_at", flat=True).first()
    return None if next_due is None else next_due - clock(connection)


def run_one(alias: str, name: str, now: datetime) -> int:
    """Send what one schedule is due for, in one transaction with the record of it; returns how many messages. 0 also
    when another dispatcher has it locked or was first, when the table of its queue is locked, and when it fails, which
    is recorded."""
    rows = Schedule.objects.using(alias).filter(name=name, paused=False)
    try:
        with short_lock_waits(alias):
            row = rows.select_for_update(skip_locked=True).filter(due_at__lte=now).first()
            return 0 if row is None else _run(row, alias, now)
    except Exception as error:
        if is_locked(error, alias):
            return 0  # the table of its queue, which other schedules do not wait for
        if is_transient(error, alias):
            raise
        _record_failure(alias, name, now, error)
        return 0


def _run(row: Schedule, alias: str, now: datetime) -> int:
    timing, first = timing_of(row), row.next_at
    if first is None:
        return 0
    # Everything up to here is due whatever its jitter.
    horizon = max(first, now - (row.jitter or timedelta(0)))
    moments = _to_send(row, timing, first, horizon)
    identity = None
    for moment in moments:
        identity = send_run(row, alias, moment)
    following = timing.after(horizon)
    changes: dict[str, Any] = {
        "next_at": following,
        "due_at": following and following + delay_of(row.name, following, row.jitter),
        "failures": 0,
        "error": "",
    }
    if moments:
        changes |= {"last_at": moments[-1], "last_sent_at": now, "last_id": identity, "runs": F("runs") + len(moments)}
    if Schedule.objects.using(alias).filter(name=row.name).update(**changes) != 1:
        raise RuntimeError(f"Schedule {row.name!r} is locked and has no row.")
    return len(moments)


def _to_send(row: Schedule, timing: Timing, first: datetime, horizon: datetime) -> list[datetime]:
    """The times that are sent for now, of those from ``first`` to ``horizon``."""
    on_time_from = horizon - row.misfire_grace
    if first >= on_time_from:
        return timing.latest(first, horizon, row.misfire_limit)
    late = timing.latest(first, horizon, row.misfire_limit)
    on_time = [item for item in late if item >= on_time_from]
    missed = [item for item in late if item < on_time_from]
    made_up = {Misfire.ONCE: missed[-1:], Misfire.ALL: missed, Misfire.SKIP: []}[Misfire(row.misfire)]
    log.warning(
        "Schedule %r: runs since %s were missed; %d of them %s made up (misfire = %s).",
        row.name, f"{first:%Y-%m-%d %H:%M:%S %Z}", len(made_up), "is" if len(made_up) == 1 else "are", row.misfire,
        extra={"schedule": row.name, "queue": row.queue},
    )  # fmt: skip
    return made_up + on_time


def send_run(row: Schedule, alias: str, moment: datetime) -> uuid.UUID:
    """Send the message of a schedule, or enqueue its task, in the open transaction; returns its id. Raises
    InvalidOption, InvalidMessage and QueueNotFound."""
    if row.task:
        if enqueue_task is None:
            accepted = "run by a process with queueapp.contrib.tasks in INSTALLED_APPS"
            raise InvalidOption(f"task of schedule {row.name!r}", row.task, accepted)
        return enqueue_task(row, alias)
    queue = registry.queues.find(row.queue)
    body, headers = _message_of(row, queue)
    headers |= {messages.SCHEDULE: row.name, messages.SCHEDULED_FOR: moment.isoformat()}
    return send(queue, body, headers=headers, using=alias, **read_options(row.options))


def _message_of(row: Schedule, queue: Any) -> tuple[Any, dict[str, str]]:
    """The body and the headers of a row. The body is an instance of its class where this process knows that; elsewhere
    it is plain, and the headers name its type."""
    try:
        headers = msgspec.json.decode(row.headers or "{}", type=dict[str, str])
        plain = msgspec.json.decode(row.body or "null")
    except msgspec.MsgspecError as error:
        raise InvalidOption(f"message of schedule {row.name!r}", row.body, f"JSON ({error})") from None
    name = headers.get(messages.TYPE, "")
    cls = next((knows for registration in registered.of(queue) if name and (knows := registration.knows(name))), None)
    if cls is None:
        return plain, headers
    kind = messages.read_kind(json.dumps({**headers, messages.CONTENT_TYPE: messages.JSON}))
    typed = messages.read_as(row.body.encode(), kind, cls)
    encoded_anew = (messages.TYPE, messages.BASE_TYPES, messages.TYPE_VERSION)
    return typed, {header: value for header, value in headers.items() if header not in encoded_anew}


def _record_failure(alias: str, name: str, now: datetime, error: Exception) -> None:
    """Count a failed run and let it wait. Its time stays, so that it is made up for by its misfire policy."""
    text = f"{type(error).__name__}: {error}".replace("\0", "")[:500]
    rows = Schedule.objects.using(alias).filter(name=name, due_at__lte=now)
    failures = rows.values_list("failures", flat=True).first()
    if failures is None:
        return  # it was run, changed or deleted meanwhile
    wait = min(FIRST_WAIT * 2 ** min(failures, 20), LONGEST_WAIT)
    rows.update(failures=failures + 1, error=text, due_at=now + wait)
    log.error(
        "Schedule %r could not be run (failure %d); trying again in %s.", name, failures + 1, wait,
        exc_info=error, extra={"schedule": name, "database": alias},
    )  # fmt: skip


# -- operators -------------------------------------------------------------------------------------------------------


def run_now(alias: str, name: str) -> uuid.UUID | None:
    """Send one message of a schedule at once, in the caller's transaction, or in one of its own; returns its id, None:
    there is no such schedule. Its next run stays as it is; a paused one may be run too."""
    rows = Schedule.objects.using(alias).filter(name=require_text("name", name, MAX_NAME))
    with transaction.atomic(using=alias):
        row = rows.select_for_update().first()
        if row is None:
            return None
        now = clock(connections[alias])
        identity = send_run(row, alias, now)
        rows.update(last_at=now, last_sent_at=now, last_id=identity, runs=F("runs") + 1)
    return identity


def pause(alias: str, names: Sequence[str]) -> int:
    """Pause schedules; returns how many were running. Raises InvalidOption for what is no name."""
    names = [require_text("name", name, MAX_NAME) for name in names]
    return Schedule.objects.using(alias).filter(name__in=names, paused=False).update(paused=True)


def resume(alias: str, names: Sequence[str]) -> int:
    """Resume paused schedules from their next time on: a pause leaves nothing to make up for. Returns how many."""
    count = 0
    rows = Schedule.objects.using(alias)
    for name in [require_text("name", name, MAX_NAME) for name in names]:
        with transaction.atomic(using=alias):
            row = rows.select_for_update().filter(name=name, paused=True).first()
            if row is None:
                continue
            plan(row, alias)
            count += rows.filter(name=name).update(
                paused=False, next_at=row.next_at, due_at=row.due_at, failures=0, error=""
            )
    if count:
        changed(alias)
    return count


def changed(alias: str) -> None:
    """Wake the dispatcher after a schedule was changed."""
    notifier.delayed(connections[alias])


def refuse_bad_message(row: Schedule) -> None:
    """Raise what sending the message of a row would raise, as far as that needs no query."""
    queue = registry.queues.find(row.queue)
    body, headers = _message_of(row, queue)
    declarations.refuse_bad_message(queue, body, headers, read_options(row.options))


def problem_of(row: Schedule) -> str:
    """Why a schedule cannot run, in one line; '': it can. Sends nothing."""
    try:
        timing_of(row)
        if row.task:
            registry.queues.find(row.queue)
        else:
            refuse_bad_message(row)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if row.task and enqueue_task is None:
        return "queueapp.contrib.tasks is not in INSTALLED_APPS"
    if row.failures:
        return f"{row.failures} failed runs in a row: {row.error}"
    return ""
