"""Operations on queues and single messages: pause, resume, purge, set options, delete, release leases, move to poison.

No function waits for a worker: rows that a worker has locked are skipped, leased rows are skipped unless the operation
is about the lease. Every function returns how many messages it changed, for the caller to compare with its request. The
admin's log records which user paused, resumed or purged a queue.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, NamedTuple

from django.apps import apps
from django.db import DataError, connections, router, transaction
from django.db.models import F, Q, QuerySet

from .. import notifier, overrides, signals
from ..conf import MAX_CONCURRENCY, settings
from ..errors import InvalidOption
from ..failures import expire_actions
from ..failures.history import attempts_of, clean
from ..failures.poison_store import full_record, insert_all, insert_poison, is_transient
from ..failures.recoverability import Failure, Poison
from ..models import NO_QUEUES, Now, QueueControl, Subscriber
from ..models.delivery import OPTIONS
from ..models.queue import holds
from ..options import Option
from ..sending.validation import alias_of
from ..sql import queue_sql
from ..sql.claims import FOREVER
from ..sql.message_columns import COUNTS, Row, message_values

#: A purge from a web page answers before a proxy times out; the user repeats it for the rest.
PURGE_FOR = timedelta(seconds=20)


class Purged(NamedTuple):
    """The result of a purge. ``complete=False``: its time was over before the queue was empty."""

    deleted: int
    complete: bool


# -- the whole queue -----------------------------------------------------------------------------------------------


def pause(queue: Any, *, by: Any = None, using: str | None = None) -> bool:
    """Stop the workers from receiving from a queue; sending goes on. False: it was paused already. As all that sets an
    option of a queue, it is part of the caller's transaction: workers see it after the commit.

    Workers apply it within a peek delay and handle the messages in flight to their end. ``by`` is the user for the log.
    """
    return _set(queue, {"paused": True}, by, using, "Paused.")


def resume(queue: Any, *, by: Any = None, using: str | None = None) -> bool:
    """Undo ``pause``. False: the queue was not paused."""
    resumed = _set(queue, {"paused": False}, by, using, "Resumed.")
    if resumed:
        notifier.sent(queue, connections[alias_of(queue, using)])
    return resumed


def set_concurrency(queue: Any, receivers: int | None, *, by: Any = None, using: str | None = None) -> bool:
    """Set the number of receivers that each worker process has for a queue, in place of the number that it was started
    with; None: back to that number. False: it was set already. Raises InvalidOption.

    Workers apply it within a peek delay, up to their maximum (32, or the number that they were started with). A
    receiver above the number stops after its current message.
    """
    if receivers is not None and not (isinstance(receivers, int) and 1 <= receivers <= MAX_CONCURRENCY):
        raise InvalidOption("concurrency", receivers, f"a whole number from 1 to {MAX_CONCURRENCY}, or None")
    return _set(queue, {"concurrency": receivers}, by, using, f"Concurrency set to {receivers or 'as started'}.")


def set_option(queue: Any, name: str, value: Any, *, by: Any = None, using: str | None = None) -> bool:
    """Set one of ``overrides.SETTABLE`` in place of what is declared, from now on; None: as it is declared again.
    False: that was set already. Raises InvalidOption, as the declaration would.

    Workers see it within a peek delay, other processes that receive within ``overrides.MAX_AGE`` seconds.
    """
    stored = check_override(queue, name, value)
    shown = "as declared" if stored is None else stored
    changed = _set(queue, {name: stored}, by, using, f"{name} set to {shown}.")
    overrides.set_here(alias_of(queue, using))
    if changed:
        notifier.sent(queue, connections[alias_of(queue, using)])
    return changed


# -- overrides ---------------------------------------------------------------------------------------------------------


def settable_options() -> list[str]:
    """The names of ``overrides.SETTABLE`` that this version declares as options."""
    declared = {option.name for option in OPTIONS}
    return [name for name in overrides.SETTABLE if name in declared]


def settable_option(name: str) -> Option:
    """The declaration of an option that can be set. Raises InvalidOption."""
    if name in overrides.SETTABLE:
        for option in OPTIONS:
            if option.name == name:
                return option
    raise InvalidOption("option", name, "one of " + ", ".join(settable_options()))


def check_override(queue: Any, name: str, given: Any) -> Any:
    """The value as it is stored; None: the declared value. Raises InvalidOption for a value out of the option's bounds,
    and for a queue whose table cannot support the option."""
    option = settable_option(name)
    if given is None:
        return None
    label, why = queue._meta.label, ""
    if name == "max_backlog" and queue.delivery.max_backlog is None:
        why = ", and so keeps no record of its claims"
    elif name == "expiration" and not queue.delivery.expires_by_age:
        why = ", and so has no index to find by age"
    elif name != "target_queue_depth" or getattr(queue.delivery, name, None) is not None:
        value: Any = option.read(given, f"{label}: ")
        return value
    raise InvalidOption(f"{label}: {name}", given, f"None: the queue declares none in its class Delivery{why}")


# -- worker processes --------------------------------------------------------------------------------------------------


def stop_workers(supervisor: uuid.UUID, *, using: str | None = None) -> bool:
    """Ask the process tree of a worker to stop: no more claims, running handlers get ``SHUTDOWN_GRACE``. It sees that
    with its next heartbeat. False: it is asked already, or no process of it that receives is alive. What has started
    the tree (systemd, Kubernetes) may start it again.

    >>> stop_workers(worker.supervisor)  # doctest: +SKIP
    True
    """
    alias = using or router.db_for_write(Subscriber) or "default"
    with transaction.atomic(using=alias):
        rows = Subscriber.objects.using(alias).filter(supervisor=supervisor, alive_until__gt=Now())
        processes = list(rows.exclude(queue__in=NO_QUEUES).select_for_update().order_by("id"))
        if not processes or any(row.stop_requested for row in processes):
            return False
        # One process passes it on to the supervisor: a second request would be an order not to wait for handlers.
        return bool(rows.filter(pk=processes[0].pk).update(stop_requested=True))


# -- purge -------------------------------------------------------------------------------------------------------------


def purge(queue: Any, *, by: Any = None, using: str | None = None, within: timedelta = PURGE_FOR) -> Purged:
    """Delete every message that is not in flight, from the head, in batches that commit one by one, for at most
    ``within``.

    Leased messages stay: their handlers are running and may ack them.
    """
    alias = alias_of(queue, using)
    limit, end = settings.PURGE_BATCH, monotonic() + within.total_seconds()
    deleted = 0
    while True:
        gone = purge_batch(queue, alias, limit)
        deleted += gone
        if gone < limit or monotonic() >= end:
            break
    complete = gone < limit
    messages = "1 message" if deleted == 1 else f"{deleted} messages"
    log(by, queue, f"Purged {messages}." + ("" if complete else " Stopped when its time was over."))
    return Purged(deleted, complete)


def purge_batch(queue: Any, alias: str, limit: int) -> int:
    """Delete one batch of messages that are not in flight, and call the removal hook with them, in one transaction;
    returns how many."""
    hook, connection = expire_actions.removal_hook_of(queue), connections[alias]
    if hook is None:
        return queue_sql(queue, connection).maintenance.purge(connection, limit)
    with transaction.atomic(using=alias):
        waiting = queue._base_manager.using(alias).select_for_update(skip_locked=True).filter(unleased(queue))
        rows = _read(queue, alias, waiting.order_by("pk")[:limit])
        hook(alias, rows, "purged")
        return remove(queue, alias, [row.seq for row in rows])


def _set(queue: Any, values: dict[str, Any], by: Any, using: str | None, text: str) -> bool:
    alias, label = alias_of(queue, using), queue._meta.label
    with transaction.atomic(using=alias):
        QueueControl.objects.using(alias).get_or_create(queue=label)
        # One UPDATE decides: of two operators at once, one changes the row and is logged.
        changed = (
            QueueControl.objects.using(alias)
            .filter(queue=label)
            .exclude(**{f"{name}__isnull" if value is None else name: True if value is None else value
                        for name, value in values.items()})
            .update(**values, changed_at=Now(), changed_by_id=by.pk if by is not None else None)
        )  # fmt: skip
        if changed:
            log(by, queue, text)
    return bool(changed)


def log(by: Any, queue: Any, text: str) -> None:
    """Write an entry into the admin's log, under the queue. Without a user (a script) or without the admin: nothing."""
    if by is None or not apps.is_installed("django.contrib.admin"):
        return
    from django.contrib.admin.models import CHANGE, LogEntry
    from django.contrib.contenttypes.models import ContentType

    label = queue._meta.label
    LogEntry.objects.create(
        user_id=by.pk,
        content_type=ContentType.objects.get_for_model(QueueControl, for_concrete_model=False),
        object_id=label,
        object_repr=label,
        action_flag=CHANGE,
        change_message=text,
    )


# -- single messages -----------------------------------------------------------------------------------------------


def delete(queue: Any, seqs: Sequence[int], *, using: str | None = None) -> int:
    """Delete messages that are not in flight; returns how many. Leased, locked and missing ones are skipped."""
    alias = alias_of(queue, using)
    with transaction.atomic(using=alias):
        hook = expire_actions.removal_hook_of(queue)
        if hook is not None:
            rows = lock_unleased(queue, alias, seqs)
            hook(alias, rows, "deleted")
            return remove(queue, alias, [row.seq for row in rows])
        keys = list(_unleased(queue, alias, seqs).values_list("pk", flat=True))
        return remove(queue, alias, keys)


def set_priority(queue: Any, seqs: Sequence[int], priority: int, *, using: str | None = None) -> int:
    """Give messages that are not in flight another priority; returns how many. Raises InvalidOption for one that the
    queue has not."""
    levels = queue.delivery.priorities
    if "priority" not in _columns(queue) or not 0 <= priority < levels:
        raise InvalidOption(f"{queue._meta.label}: priority", priority, f"a whole number from 0 to {levels - 1}")
    alias = alias_of(queue, using)
    with transaction.atomic(using=alias):
        keys = list(_unleased(queue, alias, seqs).exclude(priority=priority).values_list("pk", flat=True))
        changed = queue._base_manager.using(alias).filter(pk__in=keys).update(priority=priority)
        if changed:
            notifier.sent(queue, connections[alias])
        return int(changed)


def release_leases(queue: Any, seqs: Sequence[int], *, using: str | None = None) -> int:
    """End leases, current ones included, so that the messages are received again now; returns how many.

    The deliveries stay counted, and a message that reaches a limit of the queue with this delivery is expired. A holder
    that is still working loses its lease: its message is handled twice. Messages that an AT_MOST_ONCE queue has sent
    are skipped.
    """
    if "lease_token" not in _columns(queue):
        return 0
    alias = alias_of(queue, using)
    with transaction.atomic(using=alias):
        locked = _locked(queue, alias, seqs).filter(lease_token__isnull=False)
        if queue.delivery.keeps_in_flight:
            # A sent message is never delivered again; one that is only assigned to a worker was not delivered yet.
            locked = locked.filter(lease_token=F("lease_owner"))
        expired = _expire_spent(queue, alias, locked)
        keys = list(locked.values_list("pk", flat=True))
        ended = queue._base_manager.using(alias).filter(pk__in=keys).update(
            lease_token=None, lease_owner=None, lease_expires=None
        )  # fmt: skip
        if ended:
            notifier.sent(queue, connections[alias])
        return expired + int(ended)


def _expire_spent(queue: Any, alias: str, leased: QuerySet[Any]) -> int:
    """Expire messages that were delivered as often as ``max_deliveries`` allows: with the lease their last delivery
    ends."""
    limit = queue.delivery.max_deliveries
    rows = _read(queue, alias, leased.filter(deliveries__gte=limit)) if limit else []
    given = (expire_actions.limit_reached(queue, row) for row in rows)
    expire_actions.apply_expire_actions(queue, alias, [message for message in given if message is not None])
    return remove(queue, alias, [row.seq for row in rows])


def move_to_poison(queue: Any, seqs: Sequence[int], *, reason: str, using: str | None = None) -> int:
    """Move messages that are not in flight to the poison table, whole; returns how many.

    The ``poisoned`` signal is sent for each, after the commit."""
    alias = alias_of(queue, using)
    with transaction.atomic(using=alias):
        rows = lock_unleased(queue, alias, seqs)
        try:
            insert_all(alias, [full_record(queue._meta.label, row, reason, **_history(row)) for row in rows])
        except Exception as error:
            if is_transient(error, alias):
                raise
            # A value in one of them does not fit its column: store them one by one, as far as they fit.
            for row in rows:
                insert_poison(alias, queue._meta.label, row, reason, **_history(row))
        hook = expire_actions.removal_hooks.get(queue)
        if hook is not None and rows:
            hook(alias, rows, reason)
        moved = remove(queue, alias, [row.seq for row in rows])
        transaction.on_commit(lambda: _send_poisoned(queue, rows, reason), using=alias, robust=True)
        return moved


def unleased(queue: Any) -> Q:
    """The condition of a message without a current lease, by the database's clock. A message that is pending evaluation
    has none either."""
    if "lease_expires" not in _columns(queue):
        return Q()
    unleased = Q(lease_expires__isnull=True) | Q(lease_expires__lt=Now())
    return unleased | pending_evaluation() if holds(queue) else unleased


def pending_evaluation() -> Q:
    """The condition of a message that is pending evaluation, on a queue that ``holds`` such messages."""
    return Q(lease_expires=FOREVER, lease_token__isnull=True)


def _locked(queue: Any, alias: str, seqs: Sequence[int]) -> QuerySet[Any]:
    # In seq order, as an ack locks them. SKIP LOCKED leaves rows that a receiver is claiming to that receiver.
    everything: QuerySet[Any] = queue._base_manager.using(alias)
    return everything.select_for_update(skip_locked=True).filter(pk__in=list(seqs)).order_by("pk")


def _unleased(queue: Any, alias: str, seqs: Sequence[int]) -> QuerySet[Any]:
    """The rows of these messages that are not in flight, locked."""
    return _locked(queue, alias, seqs).filter(unleased(queue))


def lock_unleased(queue: Any, alias: str, seqs: Sequence[int]) -> list[Row]:
    """Lock the messages that are not in flight, and read them whole. Call it in a transaction."""
    return _read(queue, alias, _unleased(queue, alias, seqs))


def _read(queue: Any, alias: str, locking: QuerySet[Any]) -> list[Row]:
    """The rows that the query locks, whole."""
    try:
        return [_as_row(row) for row in locking]
    except DataError:
        # A time that Python cannot represent; another program stored it. Read the rows one by one, without the expiry.
        connection = connections[alias]
        keys = locking.values_list("pk", flat=True)
        rows = (queue_sql(queue, connection).failures.lock(connection, key, None, 0) for key in list(keys))
        return [row for row in rows if row is not None]


def remove(queue: Any, alias: str, keys: list[int]) -> int:
    """Delete messages that the caller has locked; returns how many."""
    if not keys:
        return 0
    connection = connections[alias]
    gone = queue_sql(queue, connection).failures.remove(connection, keys)
    if gone != len(keys):
        raise RuntimeError(f"{len(keys)} messages of {queue._meta.label} were locked, but {gone} could be removed.")
    return gone


class MovedByHand(Exception):
    """Stands for the exception of a message that an operator moved to poison."""


def _send_poisoned(queue: Any, rows: Sequence[Row], reason: str) -> None:
    for row in rows:
        failure = Failure(queue, None, row, MovedByHand(reason), attempts_of(row.failures))
        signals.send(signals.poisoned, failure, Poison(clean(reason, 500)), failed=False)


def _as_row(row: Any) -> Row:
    """A message that the ORM read, as a ``Row``."""
    counts = {name: getattr(row, name, default) for name, default in zip(COUNTS, (0, 0, None), strict=True)}
    return Row(seq=row.pk, id=row.id, **counts, **{"body": None} | message_values(row))


def _history(row: Row) -> dict[str, Any]:
    """The attempts and the consumer for the poison record."""
    return {"attempts": attempts_of(row.failures), "consumer": row.recipient or ""}


def _columns(queue: Any) -> set[str]:
    """The columns of this queue. A foreign table (NServiceBus) may lack those of this package."""
    return {field.name for field in queue._meta.local_concrete_fields}
