"""The subscriptions of consumers: written by the code that has them, shown with the copies that wait, removed by
operators only.

``migrate``, a worker at its start and ``registerconsumers`` write them. The row of a consumer that no code has any more
stays, and copies are made for it and wait, so that a rolled-back deploy finds them. Statistics report a consumer
without a live worker.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from django.db import connections, router, transaction

from .. import notifier, registry
from ..consuming.registry import registered
from ..delayed.store import delete_rows
from ..errors import InvalidMessage, InvalidOption, did_you_mean
from ..failures.expire_actions import removal_hook_of
from ..messages import MAX_RECIPIENT
from ..messages.escaping import in_one_line
from ..models import DelayedMessage, Now, Subscription
from ..models.subscribers import MAX_TYPE_NAME, new_mark
from ..options import require_text
from ..sending.validation import alias_of
from ..sql import backend_of, queue_sql
from ..sql.claims import MAX_SEQ, SeqRange
from .control import delete, log
from .live_workers import Live

#: Copies that are moved or purged in one transaction.
BATCH = 500


# -- writing -------------------------------------------------------------------------------------------------------


def register(alias: str, queues: Iterable[Any] | None = None) -> int:
    """Write the missing rows of the consumers in this process' code, for the queues of one database; returns how many.
    The time ``seen_at`` of the others is updated."""
    new = 0
    for queue in queues if queues is not None else registry.queues:
        if queue.delivery.recipients and router.db_for_write(queue) == alias and _may_have_rows(alias):
            new += _register(queue, alias)
    return new


def _may_have_rows(alias: str) -> bool:
    return bool(router.allow_migrate_model(alias, Subscription))


def _register(queue: Any, alias: str) -> int:
    wanted = [
        (registration.name, kind, registration.aliases)
        for registration in registered.of(queue)
        if registration.finder is None
        for kind in registration.type_names
        if len(kind) <= MAX_TYPE_NAME
    ]
    if not wanted:
        return 0
    with SubscriptionLock(queue, alias):
        new = sum(write(queue, alias, *subscription) for subscription in wanted)
    if new:
        notifier.sent(queue, connections[alias])
    return new


def subscribe(queue: Any, consumer: str, type_name: str = "", *, by: Any = None, using: str | None = None) -> bool:
    """Subscribe a consumer that no code registers, such as a script that calls ``receive(recipient=...)``: from now on
    it gets a copy of each message of a type. False: it was subscribed already. Raises InvalidOption."""
    alias = alias_of(queue, using)
    _refuse_without_recipients(queue)
    require_text("consumer", consumer, MAX_RECIPIENT)
    require_text("type", type_name, MAX_TYPE_NAME, shortest=0)
    with SubscriptionLock(queue, alias):
        new = bool(write(queue, alias, consumer, type_name, ()))
    if new:
        log(by, queue, f"Consumer {consumer} subscribed to {type_name or 'messages without a type'}.")
    return new


class SubscriptionLock:
    """A transaction that excludes other writers of this queue's subscriptions: of the old and the new name of a
    consumer only one may get a row, in any order of starts."""

    def __init__(self, queue: Any, alias: str) -> None:
        self._name, self._alias = f"queueapp:subscriptions:{queue._meta.label}", alias
        self._atomic = transaction.atomic(using=alias)

    def __enter__(self) -> None:
        self._atomic.__enter__()
        try:
            connection = connections[self._alias]
            backend_of(connection).early_acks.lock_name(connection, self._name)
        except BaseException as error:
            self._atomic.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(self, *failed: Any) -> None:
        self._atomic.__exit__(*failed)


def write(queue: Any, alias: str, consumer: str, type_name: str, aliases: tuple[str, ...]) -> int:
    """Write a row or update its ``seen_at``; 1 if it is new. A row under an earlier or later name of the consumer
    counts."""
    rows = Subscription._default_manager.using(alias).filter(queue=queue._meta.label, type_name=type_name)
    same = [row for row in rows if row.consumer == consumer]
    same += [row for row in rows if row.consumer in aliases or consumer in _names(row.aliases)]
    if not same:
        rows.create(
            queue=queue._meta.label,
            consumer=consumer,
            type_name=type_name,
            aliases=json.dumps(aliases) if aliases else "",
        )
        return 1
    row = same[0]
    changes: dict[str, Any] = {"seen_at": Now()}
    if row.consumer == consumer and set(_names(row.aliases)) < set(aliases):
        changes |= {"aliases": json.dumps(aliases), "mark": new_mark()}
    rows.filter(pk=row.pk).update(**changes)
    return 0


def _names(text: str) -> list[str]:
    return [str(subscription) for subscription in json.loads(text)] if text else []


# -- statistics ----------------------------------------------------------------------------------------------------


@dataclass
class ConsumerStats:
    """One subscribed consumer. ``active``: whether a live worker has it; None: a worker does not report its consumers.
    ``waiting``: copies ready to be received, counted up to a limit for each priority; ``exact``: whether that is
    all."""

    queue: str
    consumer: str
    types: list[str]
    active: bool | None
    waiting: int
    exact: bool
    oldest_seconds: float | None
    made_at: str = ""
    seen_at: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        many = f"{self.waiting}{'' if self.exact else '+'}"
        copies = f"{many} {'copy waits' if many == '1' else 'copies wait'}"
        return f"consumer '{_shown(self.consumer)}' has no live worker; {copies}"


def consumer_stats(
    queues: Iterable[Any], connection: Any, live: Mapping[str, Live], limit: int
) -> dict[Any, list[ConsumerStats]]:
    """The subscribed consumers of each of these queues of a database, by name. One statement for all subscriptions and
    one for all copies, about ``limit`` rows for each consumer."""
    listed: dict[Any, list[ConsumerStats]] = {queue: [] for queue in queues}
    by_label = {queue._meta.label: queue for queue in listed if queue.delivery.recipients}
    if not by_label:
        return listed
    found: dict[tuple[str, str], ConsumerStats] = {}
    rows = Subscription._default_manager.using(connection.alias).filter(queue__in=list(by_label))
    for row in rows.order_by("queue", "consumer", "type_name"):
        stats = found.get((row.queue, row.consumer))
        if stats is None:
            recipients = live[row.queue].recipients
            active = None if recipients is None else row.consumer in recipients
            stats = ConsumerStats(row.queue, row.consumer, [], active, 0, True, None)
            found[row.queue, row.consumer] = stats
        stats.types.append(row.type_name)
        stats.made_at = min(filter(None, (stats.made_at, row.made_at.isoformat())), default="")
        stats.seen_at = max(stats.seen_at, row.seen_at.isoformat())
    _count({key: by_label[key[0]] for key in found}, connection, found, limit)
    for stats in found.values():
        listed[by_label[stats.queue]].append(stats)
    return listed


def _count(
    queues: Mapping[tuple[str, str], Any], connection: Any, found: Mapping[tuple[str, str], ConsumerStats], limit: int
) -> None:
    """Count the copies of each consumer."""
    counted, queries, figures = [], [], None
    for key, queue in queues.items():
        sql = queue_sql(queue, connection)
        figures = sql.figures
        for priority in range(queue.delivery.priorities):
            places = {"recipient": key[1], "priority": priority}
            queries.append(figures.head_query(limit + 1, tuple(places[name] for name in sql.table.claim_by)))
            counted.append(found[key])
    heads = figures.heads(connection, queries) if figures is not None else []
    for stats, head in zip(counted, heads, strict=True):
        stats.waiting += min(head.waiting, limit)
        stats.exact = stats.exact and head.rows <= limit
        if head.oldest_ms is not None:
            stats.oldest_seconds = max(stats.oldest_seconds or 0.0, head.oldest_ms / 1000)


# -- operations ---------------------------------------------------------------------------------------------------


def unsubscribe(queue: Any, consumer: str, *, by: Any = None, using: str | None = None) -> int:
    """Delete the rows of a consumer: processes whose code does not have it make no more copies for it. Waiting copies
    stay. Returns how many rows were deleted. A process whose code has the consumer writes them again when it starts."""
    alias = alias_of(queue, using)
    require_text("consumer", consumer, MAX_RECIPIENT)
    with SubscriptionLock(queue, alias):
        rows = Subscription._default_manager.using(alias).filter(queue=queue._meta.label, consumer=consumer)
        gone = rows.delete()[0]
    if gone:
        log(by, queue, f"Subscriptions of consumer {consumer} removed.")
    return gone


def purge_copies(queue: Any, consumer: str, *, by: Any = None, using: str | None = None) -> int:
    """Delete the copies that wait for a consumer, delayed ones included; returns how many. Copies in flight stay."""
    alias = alias_of(queue, using)
    require_text("consumer", consumer, MAX_RECIPIENT, shortest=0)
    gone = _each_batch(queue, alias, consumer, ())
    gone += delete_rows(_delayed(queue, alias, consumer))
    log(by, queue, f"Purged {gone} copies for consumer {consumer}.")
    return gone


def move_copies(queue: Any, consumer: str, to: str, *, by: Any = None, using: str | None = None) -> int:
    """Address the copies that wait for a consumer, delayed ones included, to another one; returns how many. They start
    anew, behind its waiting copies. Raises InvalidMessage for an unknown name."""
    alias = alias_of(queue, using)
    require_consumer(queue, alias, consumer, to)
    moved = _each_batch(queue, alias, consumer, (to,))
    moved += _delayed(queue, alias, consumer).update(recipient=to)
    if moved:
        notifier.sent(queue, connections[alias])
    log(by, queue, f"Moved {moved} copies for consumer {consumer} to {to}.")
    return moved


def rename(queue: Any, consumer: str, to: str, *, by: Any = None, using: str | None = None) -> int:
    """Rename the rows of a consumer and move its waiting copies, for the deploy that drops the old name of a renamed
    consumer. Returns how many copies were moved."""
    alias = alias_of(queue, using)
    label = queue._meta.label
    require_text("consumer", consumer, MAX_RECIPIENT)
    require_text("to", to, MAX_RECIPIENT)
    if to == consumer:
        raise InvalidOption("to", to, "another name than the present one")
    with SubscriptionLock(queue, alias):
        rows = Subscription._default_manager.using(alias).filter(queue=label)
        for row in rows.filter(consumer=consumer):
            if not rows.filter(consumer=to, type_name=row.type_name).exists():
                rows.create(queue=label, consumer=to, type_name=row.type_name)
            row.delete()
    return move_copies(queue, consumer, to, by=by, using=using)


def _each_batch(queue: Any, alias: str, consumer: str, to: tuple[str, ...]) -> int:
    """Replace the waiting copies by copies for others; for none they are deleted."""
    connection = connections[alias]
    sql = queue_sql(queue, connection)
    done, has_hook = 0, not to and removal_hook_of(queue) is not None
    for priority in range(queue.delivery.priorities):
        low = -(2**63)
        while heads := sql.claims.read_heads(connection, SeqRange(low, MAX_SEQ, consumer, priority), BATCH):
            seqs = [seq for seq, _ in heads]
            if has_hook:
                done += delete(queue, seqs, using=alias)
            else:
                with transaction.atomic(using=alias):
                    done += sql.fanout.replace_by_copies(connection, seqs, to, recipient=consumer)
            low = heads[-1][0] + 1
    return done


def _delayed(queue: Any, alias: str, consumer: str) -> Any:
    return DelayedMessage.objects.using(alias).filter(destination=queue._meta.label, recipient=consumer)


def require_consumer(queue: Any, alias: str, consumer: str, to: str) -> None:
    """Raise InvalidMessage unless ``to`` is another consumer of the queue."""
    require_text("consumer", consumer, MAX_RECIPIENT, shortest=0)
    require_text("to", to, MAX_RECIPIENT)
    known = {registration.name for registration in registered.of(queue)}
    known |= set(
        Subscription._default_manager.using(alias).filter(queue=queue._meta.label).values_list("consumer", flat=True)
    )
    if to == consumer or to not in known:
        names = ", ".join(map(_shown, sorted(known - {consumer}))) or "none"
        raise InvalidMessage(
            f"Copies for '{_shown(consumer)}' of {queue._meta.label} cannot be moved to '{_shown(to)}': it must be "
            f"another consumer of the queue. Known: {names}."
        )


def require_known_consumer(queue: Any, alias: str, consumer: str) -> None:
    """Raise InvalidMessage for a name without a subscription and without waiting copies: usually a misspelt one."""
    require_text("consumer", consumer, MAX_RECIPIENT, shortest=0)
    rows = Subscription._default_manager.using(alias).filter(queue=queue._meta.label)
    if rows.filter(consumer=consumer).exists() or _delayed(queue, alias, consumer).exists():
        return
    sql, connection = queue_sql(queue, connections[alias]), connections[alias]
    for priority in range(queue.delivery.priorities):
        if sql.claims.read_heads(connection, SeqRange(-(2**63), MAX_SEQ, consumer, priority), 1):
            return
    names = sorted(set(rows.values_list("consumer", flat=True)))
    subscribed = ", ".join(map(_shown, names)) or "none"
    raise InvalidMessage(
        f"{queue._meta.label} has no consumer '{_shown(consumer)}': it is not subscribed, and no copy waits for it"
        + (f"; {hint} " if (hint := did_you_mean(consumer, names)) else ". ")
        + f"Subscribed: {subscribed}."
    )


def _shown(name: str) -> str:
    """A name for a terminal: it may come from a message."""
    return in_one_line(name, 200)


def _refuse_without_recipients(queue: Any) -> None:
    if not queue.delivery.recipients:
        raise InvalidOption(
            "queue", queue._meta.label, "a queue with Delivery.recipients: elsewhere a message has one consumer"
        )
