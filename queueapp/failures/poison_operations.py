"""What is done with poison messages: requeueing them (one, many, by group, by queue, all), archiving, editing.

Requeueing is set-based and in batches: each batch is one transaction that locks the rows, copies them into their queue
and deletes them, so a message is never in both tables and never in none, and a crash in between loses nothing. What
another session has locked, archived or moved meanwhile is left as it is.

A message keeps its expiry while that is still to come: its sender did not want it handled later than that. One that is
over is dropped, because it was received in time, and requeueing it means to have it handled.

A message stays poison if another message with its dedupe key waits in the queue.
"""

from __future__ import annotations

import sys
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

from django.db import connections, router, transaction
from django.db.models import QuerySet

from .. import messages as wire
from .. import notifier, registry
from ..conf import settings
from ..consuming.registry import registered
from ..errors import InvalidMessage, InvalidOption, MessageNotFound, QueueNotFound, UndecodableMessage
from ..flow import group_members, ledger
from ..messages.body_filters import innermost, is_secret, wrapped_anew
from ..models import DelayedMessage, Now, PoisonMessage
from ..models.delivery.topics import content_type_of
from ..options import is_storable
from ..sending import dedupe
from ..sql import backend_of, nonblocking, queue_sql
from ..sql.message_columns import COUNTS, Row, message_values, row_from
from ..sql.tables import StoreTable
from .history import reset_attempts

BATCH = 1000


def requeue(
    messages: QuerySet[PoisonMessage],
    *,
    to: Any = None,
    reset_counts: bool = True,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Put unresolved poison messages back into the queue they came from, or into ``to``; returns how many went.

    ``reset_counts=False`` keeps deliveries, cancels and the history, so the message has only the attempts left that it
    had. Raises QueueNotFound, before anything is moved of that batch, for a queue that is no more.
    """
    # Where they are written: a router may read from a replica.
    alias = messages.select_for_update().db
    done, last = 0, 0
    # What fails again at once is there anew, with a number of its own: it is not requeued for as long as it fails.
    newest = PoisonMessage.objects.using(alias).order_by("-number").values_list("number", flat=True).first() or 0
    todo = nonblocking(messages.using(alias)).filter(status=PoisonMessage.Status.UNRESOLVED, number__lte=newest)
    todo = todo.order_by("number")
    while keys := list(todo.filter(number__gt=last).values_list("number", flat=True)[:BATCH]):
        last = keys[-1]
        done += _requeue_batch(alias, keys, to, reset_counts)
        if progress is not None:
            progress(done)
    return done


def _requeue_batch(alias: str, keys: list[int], to: Any, reset_counts: bool) -> int:
    connection = connections[alias]
    store = StoreTable.of(PoisonMessage, "number")
    everything = PoisonMessage.objects.using(alias)
    with transaction.atomic(using=alias):
        # Locked first: of two operators who press requeue together, one moves a message and the other finds it gone.
        rows = list(
            everything.select_for_update(skip_locked=True)
            .filter(number__in=keys, status=PoisonMessage.Status.UNRESOLVED)
            .only("number", "queue", "destination", "consumer", "attempts", "cancels", "failures")
        )
        by_queue: defaultdict[Any, list[int]] = defaultdict(list)
        elsewhere: defaultdict[str, list[int]] = defaultdict(list)
        for row in rows:
            name = row.destination or row.queue
            if to and (address := address_from(alias, to)):
                elsewhere[address].append(row.number)
                continue
            queue, is_elsewhere = (to, False) if to else meant_for(name, alias)
            (elsewhere[name] if is_elsewhere else by_queue[queue]).append(row.number)
        if not reset_counts:
            _leave_one_attempt(everything, rows)
        over = everything.filter(number__in=[row.number for row in rows], expires__lte=Now())
        over.update(expires=None)
        moved = 0
        # Of all queues at once, because it locks groups in one order. A queue with groups has no dedupe keys.
        numbers = [number for queue, given in by_queue.items() if queue.delivery.groups for number in given]
        if numbers:
            members = group_members.members_among(everything.filter(number__in=numbers))
            group_members.reopen(connection, list(members.values_list("message_id", flat=True)))
        for queue, given in by_queue.items():
            numbers = _admitted(queue, everything, given)
            if not numbers:
                continue
            count = queue_sql(queue, connection).inserts.insert_from(
                connection, store, numbers, reset_counts=reset_counts
            )
            gone = backend_of(connection).delayed.delete(connection, store, numbers)
            for name, left in Counter(row.queue for row in rows if row.number in set(numbers)).items():
                ledger.count(connection, name, ledger.POISON, ledger.MOVED, -left)
            if count != gone:
                raise RuntimeError(f"Requeue copied {count} messages into {queue._meta.label} but removed {gone}.")
            moved += count
            notifier.sent(queue, connection)
        for destination, numbers in elsewhere.items():
            chosen = everything.filter(number__in=numbers)
            anew = dict.fromkeys(COUNTS) if reset_counts else {}
            moved += send_back(alias, destination, [row_from(row, **anew) for row in chosen.order_by("number")])
            ledger.delete(chosen, ledger.POISON)
    return moved


def _admitted(queue: Any, everything: Any, numbers: list[int]) -> list[int]:
    """The poison messages that may be inserted: those whose dedupe key no other message in the queue has. The others
    stay poison."""
    if queue.delivery.dedupe_key is None:
        return numbers
    rows = list(everything.filter(number__in=numbers).order_by("number"))
    admitted = dedupe.admit_stored(queue, connections[everything.db], list(map(dedupe.Stored.of, rows)))
    return [row.number for row, is_admitted in zip(rows, admitted, strict=True) if is_admitted]


def is_admitted(queue: Any, connection: Any, row: Row) -> bool:
    """Whether a message may be inserted: no other one in the queue has its dedupe key. In a transaction."""
    return dedupe.admit_stored(queue, connection, [dedupe.Stored(row.id, row.headers, row.body)])[0]


def _leave_one_attempt(everything: Any, rows: list[PoisonMessage]) -> None:
    """Kept counts stand one below the limit: the message gets exactly one more attempt, as AsyncMonolith's do. Its
    hand-outs are those attempts and what was given back: unacknowledged deliveries are not counted, or it might not be
    handled at all."""
    limits: dict[tuple[str, str], tuple[int, int]] = {}
    for row in rows:
        origin = row.queue, row.consumer
        if origin not in limits:
            limits[origin] = _limits_of(*origin)
        most_attempts, most_deliveries = limits[origin]
        attempts = max(0, min(row.attempts, most_attempts) - 1)
        row.failures = reset_attempts(row.failures, attempts)
        row.deliveries = min(attempts + row.cancels, most_deliveries - 1)
    everything.bulk_update(rows, ["failures", "deliveries"])


def _limits_of(label: str, consumer: str) -> tuple[int, int]:
    """(attempts, deliveries) that a message of this queue and consumer may have."""
    try:
        queue = registry.queues.find(label)
    except QueueNotFound:
        return settings.ATTEMPTS, sys.maxsize
    known = {registration.name: registration for registration in registered.of(queue)}
    attempts = known[consumer].option("attempts") if consumer in known else queue.delivery.attempts
    return attempts or settings.ATTEMPTS, queue.delivery.max_deliveries or sys.maxsize


def meant_for(name: str, alias: str) -> tuple[Any, bool]:
    """The queue that a poison message of this database is to go back to, and whether that lies in another one. Raises
    QueueNotFound, also when no dispatcher would forward it."""
    queue, there = registry.queues.find_addressed(name)
    if not there:
        return queue, False
    if alias not in queue.delivery.delayed_in or there != router.db_for_write(queue):
        raise QueueNotFound(name)
    return queue, True


def address_from(alias: str, queue: Any) -> str:
    """The destination under which messages of this database reach a queue by a forwarder; '' where none goes there, and
    they are put into its table here, if there is one."""
    there = router.db_for_write(queue)
    return registry.address(queue, there) if there != alias and alias in queue.delivery.delayed_in else ""


def send_back(alias: str, destination: str, rows: Iterable[Row]) -> int:
    """Let these messages be forwarded, in the caller's transaction; returns how many they are."""
    messages = [
        DelayedMessage(
            message_id=row.id,
            destination=destination,
            due=Now(),
            **{name: getattr(row, name) for name in COUNTS if getattr(row, name) is not None},
            **message_values(row),
        )
        for row in rows
    ]
    DelayedMessage.objects.using(alias).bulk_create(messages)
    notifier.delayed(connections[alias])
    return len(messages)


# -- finding poison messages, hiding and restoring them, and dropping those whose retention is over --------------------


def archive(messages: QuerySet[PoisonMessage]) -> int:
    """Hide unresolved messages: kept until their retention is over, not requeued, restorable. Returns how many."""
    return messages.filter(status=PoisonMessage.Status.UNRESOLVED).update(
        status=PoisonMessage.Status.ARCHIVED, archived_at=Now()
    )


def restore(messages: QuerySet[PoisonMessage]) -> int:
    """The reverse of ``archive``. Returns how many."""
    return messages.filter(status=PoisonMessage.Status.ARCHIVED).update(
        status=PoisonMessage.Status.UNRESOLVED, archived_at=None
    )


def drop_old(retention: timedelta, *, using: str = "default") -> int:
    """Delete the oldest ``BATCH`` of the archived and edited messages whose retention is over; returns how many.

    Unresolved ones are never deleted.
    """
    kept = PoisonMessage.objects.using(using).exclude(status=PoisonMessage.Status.UNRESOLVED)
    old = kept.filter(archived_at__lt=Now() - retention)
    keys = list(nonblocking(old).order_by("number").values_list("number", flat=True)[:BATCH])
    # Asked again: one that was restored since then stays.
    return ledger.delete(old.filter(number__in=keys), ledger.POISON)


def find(numbers: Iterable[int] | None = None, *, using: str = "default", **filters: Any) -> QuerySet[PoisonMessage]:
    """Unresolved poison messages by number, queue label, group key, ...: what ``requeue`` and ``archive`` take. Raises
    InvalidOption for a text that no column can hold."""
    for name, value in filters.items():
        if isinstance(value, str) and not is_storable(value, len(value)):
            raise InvalidOption(name, value, "a text without NUL and halves of surrogate pairs")
    found = PoisonMessage.objects.using(using).filter(status=PoisonMessage.Status.UNRESOLVED, **filters)
    return found if numbers is None else found.filter(number__in=list(numbers))


# -- sending a corrected copy of a poison message in its place
# ----------------------------------------------------------


def edit_and_requeue(
    number: int,
    *,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    to: Any = None,
    using: str = "default",
) -> uuid.UUID:
    """Send a mended copy of an unresolved poison message, with a new id and all its attempts; returns that id.

    ``body`` (as its codec wrote it, neither compressed nor encrypted) and ``headers`` (all of them) replace those of
    the message; None leaves them as they are. What was compressed or encrypted is so again. The copy names the original
    in its header ``edit-of``; the original stays as ``edited``, names the copy, and can be neither edited again nor
    requeued. Raises MessageNotFound when it is not unresolved any more, QueueNotFound, and InvalidMessage for an empty
    body, one that its content type contradicts, headers that are locked, and what is encrypted and cannot be read.

    >>> edit_and_requeue(17, body=b'{"gate": "B12"}')  # doctest: +SKIP
    UUID('01941f29-7c00-7000-8000-5c3ea1f0a2b4')
    """
    connection = connections[using]
    with transaction.atomic(using=using):
        # Locked: of two operators who edit together the second finds it edited.
        row = PoisonMessage.objects.using(using).select_for_update().filter(number=number).first()
        if row is None or row.status != PoisonMessage.Status.UNRESOLVED:
            now = "gone" if row is None else row.status
            raise MessageNotFound(f"Poison message {number} is {now}: only unresolved ones can be edited.")
        name = row.destination or row.queue
        queue, is_elsewhere = (to, False) if to else meant_for(name, using)
        identity = wire.new_id()
        stored = wire.edited_headers(row.headers, headers, row.message_id, identity)
        if body is not None:
            _check_body(queue, body, stored)
        stored, body = _wrapped(row, stored, body, identity, using)
        # A new message: not tried yet, arriving now, and without an expiry, since an operator has just edited it.
        new = {"id": identity, "headers": stored, "expires": None, "enqueued_at": None} | dict.fromkeys(COUNTS)
        copy = row_from(row, **new, body=body)
        if is_elsewhere:
            send_back(using, name, [copy])
        else:
            if not is_admitted(queue, connection, copy):
                raise InvalidMessage(f"Another message with the dedupe key of the copy waits in {queue._meta.label}.")
            queue_sql(queue, connection).inserts.insert_row(connection, copy)
            if queue.delivery.groups and group_members.is_member(stored):
                group_members.reopen(connection, [row.message_id], edited=identity)
            notifier.sent(queue, connection)
        row.status, row.edited_as, row.archived_at = PoisonMessage.Status.EDITED, identity, Now()
        row.save(update_fields=["status", "edited_as", "archived_at"])
    return identity


def _wrapped(
    row: PoisonMessage, headers: str, body: bytes | None, identity: uuid.UUID, using: str
) -> tuple[str, bytes | None]:
    """(headers, body) of the copy: compressed and encrypted as the original is, under the copy's id. What is encrypted
    stays so."""
    try:
        before = wire.read_head(row.headers)[1]
    except UndecodableMessage:
        before = ""
    after = wire.read_head(headers)[1]
    if is_secret(before) and before != after:
        raise InvalidMessage(f"Header {wire.CONTENT_TYPE!r} is locked: an encrypted message stays encrypted.")
    try:
        return wrapped_anew(
            headers, None if row.body is None else bytes(row.body), body, row.message_id, identity, using
        )
    except UndecodableMessage as error:
        raise InvalidMessage(
            f"The copy cannot be encrypted anew, since its original cannot be read: {error}"
        ) from error


def _check_body(queue: Any, body: bytes, headers: str) -> None:
    if not body:
        raise InvalidMessage("The edited body is empty; a message that should be without one is sent anew.")
    content_type = innermost(wire.read_head(headers)[1] or content_type_of(queue))
    if "json" in content_type or wire.codec_for(content_type) is not None:
        try:
            wire.decode_body(body, content_type)
        except UndecodableMessage as error:
            raise InvalidMessage(f"The edited body does not suit its content type {content_type}. {error}") from error
