"""Operations on messages, and those on many of them, which maintenance carries out in the background.

    running --batch--> running ... --last key--> finished        paused --resume--> running
       |--pause, or nothing but errors--> paused                running or paused --stop--> stopped

A batch is one transaction: it locks the operation's row, changes the messages, and writes the counts and the key up to
which it is done. A process that is killed loses at most the batch that it has not committed; the next leader goes on
behind the last one. A stopped operation keeps what it has done. A batch in which a message fails is divided until the
message is alone; its error is kept, and the others are done.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, NamedTuple

from django.db import Error, connections, router, transaction

from .. import delayed, registry
from ..delayed.store import delete_rows
from ..errors import InvalidOption, QueueNotFound
from ..failures import poison_operations
from ..failures.history import clean
from ..failures.poison_store import is_transient
from ..flow import ledger
from ..messages import as_uuid
from ..models import BulkOperation, DelayedMessage, JournalEntry, Now, PoisonMessage
from ..sql import ErrorKind, backend_of, nonblocking
from . import control, journal, requeue_after_deploy, selections
from .running_handlers import cancel_running
from .selections import Source

log = logging.getLogger("queueapp.workers")

#: Messages of one transaction, and rows that are read to find them.
BATCH, SCAN = 1000, 5000
#: Seconds of batches in one round of maintenance, which has other work.
SLICE_S = 1.0
#: Errors of messages that are kept.
MAX_ERRORS = 20
MAX_RATE = 1_000_000.0
#: Ended operations are kept so long.
KEPT = timedelta(days=30)

#: The action that inserts entries of the journal into a queue.
REPLAY = "replay"

State = BulkOperation.State
RUNNING, PAUSED, STOPPED, FINISHED = State.RUNNING, State.PAUSED, State.STOPPED, State.FINISHED


class Result(NamedTuple):
    """How many messages were changed, and the error of each that failed, by its key."""

    changed: int
    errors: Mapping[int, str] = {}


#: Carries an action out on messages, in transactions of its own; ``by``: the name of the user. Rows that are gone or in
#: flight are skipped.
Run = Callable[[Source, Sequence[int], Mapping[str, Any], str], Result]


# -- actions -----------------------------------------------------------------------------------------------------------


def delete(source: Source, keys: Sequence[int], options: Mapping[str, Any], by: str) -> Result:
    """Delete messages that are not in flight."""
    if source.kind == "queue":
        return Result(control.delete(source.model, keys, using=source.alias))
    rows = source.model._base_manager.using(source.alias).filter(pk__in=keys)
    return Result(delete_rows(rows) if source.kind == "delayed" else ledger.delete(rows, ledger.POISON))


def release_leases(source: Source, keys: Sequence[int], options: Mapping[str, Any], by: str) -> Result:
    """End leases."""
    return Result(control.release_leases(source.model, keys, using=source.alias))


def move_to_poison(source: Source, keys: Sequence[int], options: Mapping[str, Any], by: str) -> Result:
    """Move messages that are not in flight to poison."""
    reason = f"moved to poison by {by}"
    return Result(control.move_to_poison(source.model, keys, reason=reason, using=source.alias))


def stop_handlers(source: Source, keys: Sequence[int], options: Mapping[str, Any], by: str) -> Result:
    """Ask the handlers of messages to stop."""
    ids = source.model._base_manager.using(source.alias).filter(pk__in=keys).values_list("id", flat=True)
    asked = [cancel_running(as_uuid(key), queue=source.model, reason=f"by {by}", using=source.alias) for key in ids]
    return Result(sum(asked))


def make_due(source: Source, keys: Sequence[int], options: Mapping[str, Any], by: str) -> Result:
    """Make delayed messages due."""
    return Result(delayed.make_due(DelayedMessage.objects.using(source.alias).filter(pk__in=keys)))


def reschedule(source: Source, keys: Sequence[int], options: Mapping[str, Any], by: str) -> Result:
    """Make delayed messages due in ``options["minutes"]`` from now. An expiry moves with it."""
    ids = DelayedMessage.objects.using(source.alias).filter(pk__in=keys).values_list("message_id", flat=True)
    delay = timedelta(minutes=float(options["minutes"]))
    return Result(sum(delayed.reschedule(as_uuid(key), delay=delay, using=source.alias) for key in list(ids)))


def set_priority(source: Source, keys: Sequence[int], options: Mapping[str, Any], by: str) -> Result:
    """Give messages that are not in flight another priority."""
    return Result(control.set_priority(source.model, keys, int(options["priority"]), using=source.alias))


def requeue(source: Source, keys: Sequence[int], options: Mapping[str, Any], by: str) -> Result:
    """Put poison messages back into their queues, or into ``options["to"]``."""
    chosen = PoisonMessage.objects.using(source.alias).filter(number__in=keys)
    to = registry.queues.find(options["to"]) if options.get("to") else None
    by_queue: defaultdict[str, list[int]] = defaultdict(list)
    for number, queue, destination in nonblocking(chosen).values_list("number", "queue", "destination"):
        by_queue[destination or queue].append(number)
    moved, errors = 0, {}
    for label, numbers in by_queue.items():
        try:
            # By queue: a missing queue must not keep the messages of the others.
            moved += poison_operations.requeue(
                chosen.filter(number__in=numbers), to=to, reset_counts=options.get("counts") != "keep"
            )
        except QueueNotFound:
            errors.update(dict.fromkeys(numbers, f"There is no queue {label}."))
    return Result(moved, errors)


def archive(source: Source, keys: Sequence[int], options: Mapping[str, Any], by: str) -> Result:
    """Hide unresolved poison messages."""
    return Result(poison_operations.archive(PoisonMessage.objects.using(source.alias).filter(number__in=keys)))


def restore(source: Source, keys: Sequence[int], options: Mapping[str, Any], by: str) -> Result:
    """Undo ``archive``."""
    return Result(poison_operations.restore(PoisonMessage.objects.using(source.alias).filter(number__in=keys)))


#: What can be done in the background, by the kind of the source and the name in the menu of its list.
ACTIONS: dict[tuple[str, str], Run] = {
    ("queue", "delete_selected"): delete,
    ("queue", "release_lease"): release_leases,
    ("queue", "move_to_poison"): move_to_poison,
    ("queue", "set_priority"): set_priority,
    ("delayed", "delete_selected"): delete,
    ("delayed", "reschedule"): reschedule,
    ("delayed", "dispatch_now"): make_due,
    ("poison", "delete_selected"): delete,
    ("poison", "requeue"): requeue,
    ("poison", "archive"): archive,
    ("poison", "restore"): restore,
}


# -- operating ---------------------------------------------------------------------------------------------------------


def can_start(source: Source, action: str, filters: Mapping[str, str]) -> bool:
    """Whether this can be done in the background."""
    return (source.kind, action) in ACTIONS and selections.is_known(source, filters)


def start(
    source: Source,
    action: str,
    filters: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    last: int | None = None,
    rate: float | None = None,
    by: Any = None,
) -> BulkOperation:
    """Start an action on all messages that match the filters and have a key up to ``last`` (default: the newest one).
    ``rate``: the most messages a second; ``by``: the user. Raises InvalidOption.

    >>> orders = Source(PoisonMessage, "default")
    >>> start(orders, "requeue", {"queue": "shop.Orders"}, rate=100).state  # doctest: +SKIP
    'running'
    """
    filters = filters or {}
    if (source.kind, action) not in ACTIONS:
        accepted = ", ".join(name for kind, name in ACTIONS if kind == source.kind)
        raise InvalidOption("action", action, f"one of {accepted}")
    selections.condition(source, filters)
    _check_rate(rate)
    keys = nonblocking(source.model._base_manager.using(source.alias)).order_by("pk").values_list("pk", flat=True)
    first = keys.first()
    last = last if last is not None else keys.last()
    bounds = (0, -1) if first is None or last is None else (first, last)
    return _create(source, action, filters, options or {}, bounds, rate, by)


def _create(
    source: Source,
    action: str,
    filters: Mapping[str, str],
    options: Mapping[str, Any],
    bounds: tuple[int, int],
    rate: float | None,
    by: Any,
) -> BulkOperation:
    return BulkOperation.objects.using(source.alias).create(
        action=action,
        source=source.label,
        filters=json.dumps(dict(filters)),
        options=json.dumps(dict(options)),
        first=bounds[0],
        last=bounds[1],
        cursor=bounds[0] - 1,
        rate=rate,
        started_by_id=by.pk if by is not None else None,
        username=by.get_username()[:150] if by is not None else "",
    )


def start_replay(options: Mapping[str, Any], *, rate: float | None = None, by: Any = None) -> BulkOperation:
    """Start inserting what was published to a journaled topic into a queue again, up to the newest entry. ``options``:
    ``topic``, a name or a regular expression; ``since``: epoch, a bookmark, or a time in ISO 8601; ``filter``, an
    expression, or ''; ``to``, the queue. Raises InvalidOption, InvalidExpression, QueueNotFound and BookmarkNotFound.

    >>> start_replay({"topic": "orders", "since": "epoch", "filter": "", "to": "shop.Orders"}).state  # doctest: +SKIP
    'running'
    """
    queue = journal.checked(options)
    _check_rate(rate)
    first = journal.preview(options).first
    alias = router.db_for_write(queue)
    last = nonblocking(JournalEntry.objects.using(alias)).order_by("-pk").values_list("pk", flat=True).first()
    bounds = (0, -1) if first is None or last is None else (first[0], last)
    return _create(Source(JournalEntry, alias), REPLAY, {}, options, bounds, rate, by)


def pause(number: int, *, using: str = "default") -> bool:
    """Pause a running operation after its present batch. False: it was not running."""
    return _change(number, using, (RUNNING,), state=PAUSED)


def resume(number: int, *, using: str = "default") -> bool:
    """Go on with a paused operation. False: it was not paused."""
    return _change(number, using, (PAUSED,), state=RUNNING, note="", next_at=Now())


def stop(number: int, *, using: str = "default") -> bool:
    """End an operation after its present batch; what it has done stays. False: it has ended already."""
    return _change(number, using, (RUNNING, PAUSED), state=STOPPED)


def set_rate(number: int, rate: float | None, *, using: str = "default") -> bool:
    """Set the most messages a second; None: as fast as it can. False: it has ended. Raises InvalidOption."""
    _check_rate(rate)
    return _change(number, using, (RUNNING, PAUSED), rate=rate, next_at=Now())


def _change(number: int, alias: str, states: Sequence[str], **values: Any) -> bool:
    rows = BulkOperation.objects.using(alias).filter(number=number, state__in=states)
    return bool(rows.update(changed_at=Now(), **values))


def _check_rate(rate: float | None) -> None:
    if rate is not None and not 0 < rate <= MAX_RATE:
        raise InvalidOption("rate", rate, f"a number above 0 and up to {MAX_RATE:.0f}, or None")


# -- carrying out ------------------------------------------------------------------------------------------------------


def carry_out(alias: str, may_continue: Callable[[], bool] = lambda: True, seconds: float = SLICE_S) -> bool:
    """Carry out the batches of this database that are due, for about so many seconds; returns whether more are due. The
    operation that waited longest is first."""
    ends_at = monotonic() + seconds
    rows = BulkOperation.objects.using(alias)
    due = rows.filter(state=RUNNING, next_at__lte=Now(), source__in=selections.sources())
    while may_continue():
        number = due.order_by("changed_at").values_list("number", flat=True).first()
        if number is None or not _carry_out_batch(alias, number):
            return False
        if monotonic() >= ends_at:
            return True
    return False


def _carry_out_batch(alias: str, number: int) -> bool:
    """One batch in one transaction. False: another process has the operation, or it was paused."""
    with transaction.atomic(using=alias):
        rows = BulkOperation.objects.using(alias).select_for_update(skip_locked=True)
        operation = rows.filter(number=number, state=RUNNING).first()
        if operation is None:
            return False
        source = selections.source_of(operation.source, alias)
        assert source is not None
        try:
            with transaction.atomic(using=alias):
                if operation.action == requeue_after_deploy.ACTION:
                    wait = requeue_after_deploy.advance(operation, alias)
                else:
                    wait = _advance(operation, source)
        except Exception as error:
            if is_transient(error, alias):
                raise
            _pause_for(operation, error)
            return True
        operation.next_at, operation.changed_at = Now() + wait, Now()
        operation.save()
    return True


def _advance(operation: BulkOperation, source: Source) -> timedelta:
    """Carry the next batch out, and count it; returns how long the one after it waits."""
    step = _replay_batch if operation.action == REPLAY else _change_batch
    count, cursor, result = step(operation, source)
    _add(operation, count, result)
    operation.cursor = cursor
    if cursor < operation.last and len(result.errors) == count > 1:
        # What fails for each of them is likely to fail for the rest.
        operation.state = PAUSED
        operation.note = f"Paused: no message of the last batch could be changed. It goes on behind {cursor}."
    elif cursor >= operation.last:
        operation.state = FINISHED
        log.info("%s %d on %s has ended: %d changed, %d skipped, %d failed.", operation.action, operation.pk,
                 operation.source, operation.changed, operation.skipped, operation.failed,
                 extra={"operation": operation.pk, "queue": operation.source})  # fmt: skip
    return timedelta(seconds=count / operation.rate) if operation.rate else timedelta(0)


class Step(NamedTuple):
    """One batch: its rows, the key up to which the operation is done, and the result."""

    count: int  # type: ignore[assignment]
    cursor: int
    result: Result


def _change_batch(operation: BulkOperation, source: Source) -> Step:
    keys, cursor = _next_keys(operation, source)
    return Step(len(keys), cursor, _run(operation, source, keys) if keys else Result(0))


def _replay_batch(operation: BulkOperation, source: Source) -> Step:
    options = json.loads(operation.options)
    since = operation.cursor if operation.cursor >= operation.first else options["since"]
    count, inserted, cursor = journal.insert_batch(
        options, since, _limit(operation), operation.last, f"operation {operation.number}"
    )
    return Step(count, cursor, Result(inserted))


def _limit(operation: BulkOperation) -> int:
    """The rows of one batch, so that the rate is kept."""
    return max(1, min(BATCH, int(operation.rate))) if operation.rate else BATCH


def _next_keys(operation: BulkOperation, source: Source) -> tuple[list[int], int]:
    """The keys of the next batch, and the key up to which it goes. Reads at most ``SCAN`` rows."""
    rows = nonblocking(source.model._base_manager.using(source.alias)).order_by("pk")
    rows = rows.filter(pk__gt=operation.cursor, pk__lte=operation.last)
    limit = _limit(operation)
    ends = list(rows.values_list("pk", flat=True)[SCAN - 1 : SCAN])
    end = ends[0] if ends else operation.last
    condition = selections.condition(source, json.loads(operation.filters))
    keys = list(rows.filter(condition, pk__lte=end).values_list("pk", flat=True)[:limit])
    return keys, keys[-1] if len(keys) == limit else end


def _run(operation: BulkOperation, source: Source, keys: Sequence[int]) -> Result:
    """Run the action; of messages that fail the error, of the others what was done."""
    alias = source.alias
    try:
        with transaction.atomic(using=alias):
            run = ACTIONS[source.kind, operation.action]
            return run(source, keys, json.loads(operation.options), operation.username or "a script")
    except Exception as error:
        of_table = isinstance(error, Error) and backend_of(connections[alias]).error_kind(error) in (
            ErrorKind.DENIED,
            ErrorKind.MISSING,
        )
        if of_table or is_transient(error, alias):
            raise
        if len(keys) == 1:
            return Result(0, {keys[0]: f"{type(error).__name__}: {error}"})
    half = len(keys) // 2
    parts = [_run(operation, source, part) for part in (keys[:half], keys[half:])]
    return Result(parts[0].changed + parts[1].changed, {**parts[0].errors, **parts[1].errors})


def _add(operation: BulkOperation, count: int, result: Result) -> None:
    operation.changed += result.changed
    operation.failed += len(result.errors)
    operation.skipped += max(0, count - result.changed - len(result.errors))
    errors = json.loads(operation.errors)
    errors += [[key, clean(text, 300)] for key, text in result.errors.items()][: MAX_ERRORS - len(errors)]
    operation.errors = json.dumps(errors)


def _pause_for(operation: BulkOperation, cause: Any) -> None:
    text = clean(str(cause), 400)
    log.warning("%s %d on %s is paused: %s", operation.action, operation.number, operation.source, text,
                extra={"operation": operation.number, "queue": operation.source})  # fmt: skip
    operation.state, operation.note = PAUSED, f"Paused by an error: {text}"
    operation.changed_at = Now()
    operation.save(update_fields=["state", "note", "changed_at"])


def drop_old(alias: str, may_continue: Callable[[], bool] = lambda: True) -> int:
    """Delete operations that ended ``KEPT`` ago; returns how many."""
    rows = BulkOperation.objects.using(alias).filter(state__in=(STOPPED, FINISHED), changed_at__lt=Now() - KEPT)
    return int(rows.delete()[0])
