"""Requeueing poison after a deploy: each group is taken up as a canary, by the workers of the new version.

    probe: 1 --handled--> 2 --> 5 --> 20 --> 100 --> 100 ... --last message--> finished
       |--poison again--> stopped       |--more failures than the budget, or another version--> stopped

A canary is an operation (``bulk_operations``) on one group of one queue. Each of its steps is one transaction, which
holds the operation's row: it finds out which messages of the last batch have ended, and requeues the next batch when
all have. The batch is recorded in the transaction that requeues it, so a process that is killed leaves no message
requeued twice and none lost. A message has ended when it is in poison again, or when it is neither in its queue nor
delayed.

The note of a canary (``PoisonNote``) is unique by group, queue and version: it keeps every process from starting a
second one, also when the operation is deleted after its retention.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Collection, Iterable, MutableMapping
from datetime import timedelta
from typing import Any

import msgspec
from django.db import Error, router, transaction
from django.db.models import Max, Min, QuerySet

from .. import registry
from ..errors import QueueError, QueueNotFound
from ..failures import poison_operations
from ..failures.history import clean
from ..messages import as_uuid
from ..models import BulkOperation, DelayedMessage, Now, PoisonMessage, PoisonNote, Subscriber
from ..models.delivery import Semantics
from ..sql import is_locked, nonblocking, short_lock_waits

log = logging.getLogger("queueapp.workers")

#: The action of these operations.
ACTION = "requeue_after_deploy"
#: Messages of the batches; the last number is repeated.
BATCHES = (1, 2, 5, 20, 100)
#: Failures at which a canary goes on, where the queue has no ``requeue_after_deploy``.
DEFAULT_BUDGET = 5
#: The wait until a batch is looked at, doubled from look to look.
FIRST_LOOK, LONGEST_LOOK = timedelta(seconds=1), timedelta(seconds=30)
#: The wait while no worker is alive, or workers of several versions are.
DEPLOY_WAIT = timedelta(seconds=10)
#: Canaries of a database at the same time, and groups that are read to start them.
MAX_RUNNING, MAX_GROUPS = 20, 1000
#: Notes are kept so long.
NOTES_KEPT = timedelta(days=365)

State = BulkOperation.State


class _Batch(msgspec.Struct):
    """The column ``waiting``. ``number``: batches so far; ``looks``: at the last one; ``above``: a seq below those that
    its messages got; ``messages``: id and recipient of those that have not ended."""

    number: int = 0
    looks: int = 0
    above: int = 0
    messages: list[tuple[uuid.UUID, str]] = []


# -- which queues and groups -------------------------------------------------------------------------------------------


def refused(queue: Any) -> str:
    """What keeps the poison of a queue from being requeued after a deploy; '' if nothing does."""
    if queue.delivery.semantics is Semantics.AT_MOST_ONCE:
        return "an AT_MOST_ONCE message has left the table before it is handled, so nothing shows when it has ended"
    if not {"id", "recipient"} <= {field.name for field in queue._meta.concrete_fields}:
        return "its table is one of another system"
    return ""


def live_versions(alias: str, label: str) -> set[str]:
    """The versions of the live workers of a queue."""
    rows = Subscriber.objects.using(alias).filter(queue=label, receives=True, alive_until__gt=Now())
    return set(rows.order_by().values_list("version", flat=True).distinct())


def deployed_version(alias: str, queue: Any) -> str:
    """The version of all live workers of a queue. Raises QueueError where there is none, or more than one."""
    label = queue._meta.label
    versions = sorted(live_versions(alias, label))
    if len(versions) == 1 and versions[0]:
        return versions[0]
    known = f"workers of versions {', '.join(versions)} are alive" if len(versions) > 1 else "no worker is alive"
    raise QueueError(f"{label}: {known}. A canary needs live workers, all of one version.")


def _unresolved(alias: str, label: str) -> QuerySet[PoisonMessage]:
    """The messages that can go back into this queue. One with another destination was not handled in it."""
    return PoisonMessage.objects.using(alias).filter(
        queue=label, destination="", status=PoisonMessage.Status.UNRESOLVED
    )


def groups_of(alias: str, label: str, group: str = "") -> QuerySet[PoisonMessage, str]:
    """The keys of the groups that a queue has in poison. ``group``: only this one, if it is among them."""
    rows = nonblocking(_unresolved(alias, label)).exclude(group_key="")
    if group:
        rows = rows.filter(group_key=group)
    return rows.order_by("group_key").values_list("group_key", flat=True).distinct()


def due_groups(alias: str, label: str, version: str, group: str = "") -> list[str]:
    """The groups in which a message failed on another version, and that have had no canary on this one. ``group``: as
    in ``groups_of``."""
    tried = PoisonNote.objects.using(alias).filter(queue=label, version=version).order_by().values("group_key")
    due = groups_of(alias, label, group).exclude(worker_version=version).exclude(group_key__in=tried)
    return list(due[:MAX_GROUPS])


# -- starting ----------------------------------------------------------------------------------------------------------


def start(
    queue: Any, group: str, *, budget: int | None = None, again: bool = False, using: str = "default", by: Any = None
) -> BulkOperation:
    """Start the canary of a poison group on the version of the live workers. ``budget``: the failures at which it goes
    on, by default those of ``Delivery.requeue_after_deploy``; ``again``: also if this version has had a canary of the
    group; ``by``: the user. Raises QueueError where it cannot be started.

    >>> start(Orders, "3f2a…", budget=0).state  # doctest: +SKIP
    'running'
    """
    label = queue._meta.label
    if cause := refused(queue):
        raise QueueError(f"{label}: {cause}.")
    if router.db_for_write(queue) != using:
        raise QueueError(f"{label} is not in the database {using!r}.")
    version = deployed_version(using, queue)
    if budget is None:
        given = queue.delivery.requeue_after_deploy
        budget = DEFAULT_BUDGET if given is None else given
    filters = json.dumps({"queue": label, "group": group})
    with transaction.atomic(using=using):
        notes = PoisonNote.objects.using(using)
        note, is_first = notes.get_or_create(group_key=group, queue=label, version=version)
        # Locked: of two who start a canary, the second finds the operation of the first.
        notes.select_for_update().get(pk=note.pk)
        if not (is_first or again):
            raise QueueError(f"{label}: group {group[:6]} has had its canary on version {version}.")
        if running(using).filter(filters=filters).exists():
            raise QueueError(f"{label}: a canary of group {group[:6]} is running.")
        bounds = _unresolved(using, label).filter(group_key=group).aggregate(first=Min("number"), last=Max("number"))
        if bounds["first"] is None:
            raise QueueError(f"{label}: group {group[:6]} has no unresolved message that goes back into this queue.")
        operation = BulkOperation.objects.using(using).create(
            action=ACTION, source=PoisonMessage._meta.label, filters=filters,
            options=json.dumps({"version": version, "budget": budget}), cursor=bounds["first"] - 1, **bounds,
            started_by_id=by.pk if by is not None else None,
            username=by.get_username()[:150] if by is not None else "",
        )  # fmt: skip
        text = f"Canary on version {version}: operation {operation.pk}."
        notes.filter(pk=note.pk).update(text=text, username=operation.username, written_at=Now())
    return operation


def start_due(alias: str, queues: Iterable[Any], examined: MutableMapping[str, str]) -> int:
    """Start the canaries of the queues with ``requeue_after_deploy`` whose workers have a new version; returns how
    many. ``examined``: the version on which a queue had nothing more to start, by its label."""
    started, room = 0, MAX_RUNNING - running(alias).count()
    for queue in queues:
        if room <= started or queue.delivery.requeue_after_deploy is None or refused(queue):
            continue
        label = queue._meta.label
        versions = live_versions(alias, label)
        version = versions.pop() if len(versions) == 1 else ""
        if not version or examined.get(label) == version:
            continue
        groups = due_groups(alias, label, version)
        if not groups:
            examined[label] = version
        for group in groups:
            if room <= started:
                break
            try:
                operation = start(queue, group, using=alias)
            except QueueError as error:
                log.debug("%s", error, extra={"queue": label})  # an earlier version's canary has not ended
                continue
            started += 1
            log.info("%s: version %s is live; operation %d requeues poison group %s as a canary.",
                     label, version, operation.pk, group[:6],
                     extra={"queue": label, "operation": operation.pk, "version": version})  # fmt: skip
    return started


def running(alias: str) -> QuerySet[BulkOperation]:
    """The canaries that have not ended."""
    return BulkOperation.objects.using(alias).filter(action=ACTION, state__in=(State.RUNNING, State.PAUSED))


def failed(alias: str, labels: Collection[str]) -> list[tuple[str, str, str]]:
    """Queue, group and version of each canary that has stopped because of failures, was the last one of its group, and
    has left messages of the group in poison."""
    rows = BulkOperation.objects.using(alias).filter(action=ACTION).order_by("-number")[:MAX_GROUPS]
    newest = {operation.filters: operation for operation in reversed(rows)}
    found = []
    for operation in newest.values():
        filters, options = json.loads(operation.filters), json.loads(operation.options)
        is_over = operation.failed > options["budget"] or (operation.failed and not operation.changed)
        if operation.state != State.STOPPED or not is_over or filters["queue"] not in labels:
            continue
        if nonblocking(_unresolved(alias, filters["queue"])).filter(group_key=filters["group"]).exists():
            found.append((filters["queue"], filters["group"], options["version"]))
    return found


# -- carrying out ------------------------------------------------------------------------------------------------------


def advance(operation: BulkOperation, alias: str) -> timedelta:
    """Make the next step of a canary, in the caller's transaction, which has locked the operation and saves it; returns
    how long the one after it waits."""
    filters, options = json.loads(operation.filters), json.loads(operation.options)
    try:
        queue = registry.queues.find(filters["queue"])
    except QueueNotFound:
        return DEPLOY_WAIT  # it is left to a process that has the queue
    batch = msgspec.json.decode(operation.waiting, type=_Batch)
    if batch.messages:
        _look(operation, batch, queue, alias)
    if batch.messages:
        wait = min(FIRST_LOOK * 2 ** min(batch.looks, 10), LONGEST_LOOK)
        batch.looks += 1
    else:
        wait = _next(operation, batch, queue, alias, options["version"], options["budget"])
    operation.waiting = msgspec.json.encode(batch).decode()
    return wait


def waiting_in(operation: BulkOperation) -> int:
    """How many messages of the last batch have not ended."""
    return len(msgspec.json.decode(operation.waiting, type=_Batch).messages)


def _look(operation: BulkOperation, batch: _Batch, queue: Any, alias: str) -> None:
    """Count the messages of the batch that have ended, and keep the others."""
    ids = [identity for identity, _ in batch.messages]
    try:
        with short_lock_waits(alias):
            present = _present(queue, alias, batch.above, ids)
            if len(present) < len(batch.messages):
                # On PostgreSQL the statement is one snapshot. On SQL Server it reads the tables one after the other, so
                # a message that moves between them may be in neither; twice in a row it is not.
                present |= _present(queue, alias, batch.above, ids)
    except Error as error:
        if not is_locked(error, alias):
            raise
        return  # a handler's transaction has one of them
    # Read after these: what has left them for poison by then is found there.
    rows = PoisonMessage.objects.using(alias).filter(number__gt=operation.last, message_id__in=ids)
    rows = rows.filter(queue=queue._meta.label).order_by("number")
    poison = {
        (as_uuid(identity), recipient): (number, reason)
        for number, identity, recipient, reason in rows.values_list("number", "message_id", "recipient", "reason")
    }
    # One without a recipient may have been replaced by a copy for each consumer.
    present |= {(identity, "") for identity, _ in present}
    poison = {(identity, ""): found for (identity, _), found in poison.items()} | poison
    errors, remaining = json.loads(operation.errors), []
    for message in batch.messages:
        if message in present:
            remaining.append(message)
        elif message in poison:
            number, reason = poison[message]
            operation.failed += 1
            errors.append([number, clean(reason, 300)])
        else:
            operation.changed += 1
    batch.messages, operation.errors = remaining, json.dumps(errors[:20])


def _present(queue: Any, alias: str, above: int, ids: list[uuid.UUID]) -> set[tuple[uuid.UUID, str]]:
    """Those of the messages that are in their queue or delayed for it. A published message has the same id in other
    queues."""
    # There is no index on ids: a message gets a seq above this one, also when it comes back from the delayed ones.
    in_queue = queue._base_manager.using(alias).filter(pk__gt=above, id__in=ids)
    delayed = DelayedMessage.objects.using(alias).filter(message_id__in=ids, destination=queue._meta.label)
    rows = (
        in_queue.order_by().values_list("id", "recipient")
        .union(delayed.order_by().values_list("message_id", "recipient"), all=True)
    )  # fmt: skip
    return {(as_uuid(identity), recipient) for identity, recipient in rows}


def _next(operation: BulkOperation, batch: _Batch, queue: Any, alias: str, version: str, budget: int) -> timedelta:
    """The last batch has ended: end the canary, wait for workers, or requeue the next batch."""
    is_last = operation.cursor >= operation.last
    if is_last:
        # Also those that another session had locked when it was their turn.
        operation.skipped = max(operation.skipped, nonblocking(_remaining(operation, alias)).count())
    counts = f"{operation.changed} handled, {operation.failed} failed again"
    if operation.skipped:
        counts += f", {operation.skipped} skipped"
    if batch.number == 1 and operation.failed:
        text = f"Version {version} still fails: the first message is poison again."
        return _end(operation, alias, State.STOPPED, text)
    if operation.failed > budget:
        return _end(operation, alias, State.STOPPED, f"Stopped on version {version}: {counts}.")
    if is_last:
        healed = "Ended on" if operation.failed or operation.skipped else "Healed by"
        return _end(operation, alias, State.FINISHED, f"{healed} version {version}: {counts}.")
    versions = live_versions(alias, queue._meta.label)
    if versions and version not in versions:
        text = f"Stopped, because version {version} was replaced by {', '.join(sorted(versions))}: {counts}."
        return _end(operation, alias, State.STOPPED, text)
    if versions != {version}:
        return DEPLOY_WAIT
    size = BATCHES[min(batch.number, len(BATCHES) - 1)]
    batch.messages = _requeue(operation, batch, queue, alias, size)
    if not batch.messages:
        return timedelta(0)
    batch.number, batch.looks = batch.number + 1, 0
    return FIRST_LOOK


def _remaining(operation: BulkOperation, alias: str) -> QuerySet[PoisonMessage]:
    """The messages that the group had at the start, and that were not requeued."""
    filters = json.loads(operation.filters)
    rows = _unresolved(alias, filters["queue"]).filter(group_key=filters["group"])
    return rows.filter(number__gte=operation.first, number__lte=operation.last)


def _requeue(operation: BulkOperation, batch: _Batch, queue: Any, alias: str, size: int) -> list[tuple[uuid.UUID, str]]:
    """Requeue the next messages; returns those that went. What another session has locked stays poison."""
    rows = _remaining(operation, alias).filter(number__gt=operation.cursor).select_for_update(skip_locked=True)
    found = list(rows.order_by("number").values_list("number", "message_id", "recipient")[:size])
    numbers = [number for number, _, _ in found]
    newest = nonblocking(queue._base_manager.using(alias)).order_by("-pk").values_list("pk", flat=True).first()
    batch.above = newest or 0
    chosen = PoisonMessage.objects.using(alias).filter(number__in=numbers)
    poison_operations.requeue(chosen)
    # Its dedupe key may be that of a message that waits.
    kept = set(chosen.values_list("number", flat=True))
    operation.skipped += len(kept)
    operation.cursor = numbers[-1] if len(numbers) == size else operation.last
    return [(as_uuid(identity), recipient) for number, identity, recipient in found if number not in kept]


def _end(operation: BulkOperation, alias: str, state: str, text: str) -> timedelta:
    filters, options = json.loads(operation.filters), json.loads(operation.options)
    operation.state, operation.note = state, text[:500]
    notes = PoisonNote.objects.using(alias)
    notes.filter(group_key=filters["group"], queue=filters["queue"], version=options["version"]).update(
        text=f"{text[:900]} (operation {operation.pk})", written_at=Now()
    )
    log.log(
        logging.INFO if state == State.FINISHED else logging.WARNING,
        "%s: poison group %s: %s", filters["queue"], filters["group"][:6], text,
        extra={"queue": filters["queue"], "operation": operation.pk, "version": options["version"],
               "changed": operation.changed, "failed": operation.failed},
    )  # fmt: skip
    return timedelta(0)


def drop_old_notes(alias: str) -> int:
    """Delete the notes whose retention is over; returns how many. That of a version whose workers are alive stays: it
    says that the version has had its canary."""
    alive = Subscriber.objects.using(alias).filter(alive_until__gt=Now()).exclude(version="").values("version")
    rows = PoisonNote.objects.using(alias).filter(written_at__lt=Now() - NOTES_KEPT).exclude(version__in=alive)
    return int(rows.delete()[0])
