"""Moving the unroutable messages of one type to another queue of their database, or to poison.

Only an operator does that: a type that no live worker handles today may be meant for the next release. Each batch is
one transaction that locks the rows, inserts and deletes them, so a message is always in exactly one table. Messages in
flight, and messages for one consumer (``subscriptions.move_copies``), are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from django.db import connections, router, transaction

from .. import delayed, messages, notifier
from ..errors import InvalidOption
from ..flow import group_members, ledger
from ..messages import MAX_ADDRESS
from ..models import DelayedMessage
from ..options import require_text
from ..sending import dedupe
from ..sending.validation import alias_of
from ..sql import nonblocking, queue_sql
from ..sql.message_columns import COUNTS, Row
from . import control

#: Message heads read in one statement; whole messages, and delayed ones, moved in one transaction.
PAGE, BATCH, DELAYED_BATCH = 1000, 100, 1000


def count_of_type(queue: Any, kind: str, *, using: str | None = None) -> int:
    """The number of messages that ``move_type`` would try to move. Reads the heads of the whole table."""
    return sum(map(len, _of_type(queue, alias_of(queue, using), kind)))


def move_type(
    queue: Any, kind: str, to: Any, *, using: str | None = None, progress: Callable[[int], None] | None = None
) -> int:
    """Move the messages of a type, named as in statistics ('': without a type), to the end of another queue; returns
    how many. They keep id, headers, body and their own time of expiry, and start with all their attempts and a new age:
    by the ``expiration`` of that queue they expire as if they were sent now. A message whose dedupe key another one has
    in that queue stays. Raises InvalidOption for the same queue, or a queue in another database."""
    alias = alias_of(queue, using)
    if to is queue or router.db_for_write(to) != alias:
        raise InvalidOption("to", to._meta.label, f"another queue in the database {alias!r} than {queue._meta.label}")

    def move(keys: list[int]) -> int:
        connection = connections[alias]
        with transaction.atomic(using=alias):
            rows = control.lock_unleased(queue, alias, keys)
            stored = [dedupe.Stored(row.id, row.headers, row.body) for row in rows]
            admitted = dedupe.admit_stored(to, connection, stored)
            rows = [row for row, is_admitted in zip(rows, admitted, strict=True) if is_admitted]
            if rows:
                queue_sql(to, connection).inserts.insert_rows(connection, [_reset(row) for row in rows])
                notifier.sent(to, connection)
            count = control.remove(queue, alias, [row.seq for row in rows])
            if not to.delivery.groups:  # its acks end no member, and the group would never complete
                group_members.end_members(connection, rows, group_members.DROPPED)
            return count

    return _move_batches(queue, alias, kind, move, progress)


def move_type_to_poison(
    queue: Any, kind: str, *, using: str | None = None, progress: Callable[[int], None] | None = None
) -> int:
    """Move the messages of a type ('': without a type) to poison, where they stay until an operator requeues, edits or
    archives them; returns how many. Sends the ``poisoned`` signal for each."""
    reason = f"moved by an operator: no consumer for {kind or 'messages without a type'}"

    def to_poison(keys: list[int]) -> int:
        return control.move_to_poison(queue, keys, reason=reason, using=using)

    return _move_batches(queue, alias_of(queue, using), kind, to_poison, progress)


def move_delayed(source: str, to: Any, *, using: str = "default", progress: Callable[[int], None] | None = None) -> int:
    """Let the delayed messages for a destination go to a queue when they are due; returns how many. A message whose
    dedupe key another one has in that queue stays. Raises InvalidOption, and MissingVerb for a store that cannot do
    it."""
    require_text("source", source, MAX_ADDRESS)
    if to.delivery.dedupe_key is not None:
        _require_keys_of(to, using)
    done, step = 0, _readdress if to.delivery.dedupe_key is None else _readdress_keyed
    while count := step(source, to, using=using, limit=DELAYED_BATCH):
        done += count
        if progress is not None:
            progress(done)
    return done


def _require_keys_of(queue: Any, using: str) -> None:
    """Raise InvalidOption where the keys of a queue are not known beside these delayed messages."""
    if delayed.address_in(using, queue) != queue._meta.label or delayed.name_of_other_store(using):
        accepted = f"one without dedupe_key: no key of {queue._meta.label} is known where these messages are"
        raise InvalidOption("queue", queue._meta.label, accepted)


def _readdress(source: str, to: Any, *, using: str, limit: int) -> int:
    address, moved = delayed.address_in(using, to), 0
    if not to.delivery.groups:
        rows = DelayedMessage.objects.using(using).filter(destination=source).exclude(destination=address)
        rows = rows.only("number", "message_id", "headers").order_by("due", "number")
        with transaction.atomic(using=using):
            moved = _write_address(list(rows.select_for_update()[:limit]), source, address, to, using)
    return moved or delayed.readdress(source, to, using=using, limit=limit)


def _readdress_keyed(source: str, to: Any, *, using: str, limit: int) -> int:
    address = delayed.address_in(using, to)
    rows = DelayedMessage.objects.using(using).filter(destination=source).exclude(destination=address)
    last = -1
    with transaction.atomic(using=using):
        while page := list(rows.filter(number__gt=last).select_for_update().order_by("number")[:limit]):
            last = page[-1].number
            admitted = dedupe.admit_stored(to, connections[using], list(map(dedupe.Stored.of, page)))
            chosen = [row for row, is_admitted in zip(page, admitted, strict=True) if is_admitted]
            if chosen:
                return _write_address(chosen, source, address, to, using)
    return 0


def _write_address(locked: Sequence[DelayedMessage], source: str, address: str, to: Any, using: str) -> int:
    """Readdress messages that the open transaction has locked; returns how many. Where the acks of their new queue end
    no member of a group, they end here: with this transaction, so that one that stays where it is remains a member."""
    connection = connections[using]
    rows = DelayedMessage.objects.using(using).filter(pk__in=[row.number for row in locked])
    changed = rows.update(destination=address, retries=0)
    ledger.count(connection, source, ledger.DELAYED, ledger.MOVED, -changed)
    ledger.count(connection, address, ledger.DELAYED, ledger.MOVED, changed)
    if changed:
        notifier.delayed(connection)
    if not to.delivery.groups:
        group_members.end_members(connection, locked, group_members.DROPPED)
    return changed


def _move_batches(
    queue: Any, alias: str, kind: str, move: Callable[[list[int]], int], progress: Callable[[int], None] | None
) -> int:
    done = 0
    for keys in _of_type(queue, alias, kind):
        done += move(keys)
        if progress is not None:
            progress(done)
    return done


def _of_type(queue: Any, alias: str, kind: str) -> Iterator[list[int]]:
    """Batches of keys of the present messages of a type."""
    rows = nonblocking(queue._base_manager.using(alias)).order_by("pk")
    if queue.delivery.recipients:
        rows = rows.filter(recipient="")
    newest = rows.values_list("pk", flat=True).last()
    last = -(2**63)
    while newest is not None and (
        heads := list(rows.filter(pk__gt=last, pk__lte=newest).values_list("pk", "headers")[:PAGE])
    ):
        last = heads[-1][0]
        found = [key for key, headers in heads if messages.type_label(headers)[:255] == kind[:255]]
        for first in range(0, len(found), BATCH):
            yield found[first : first + BATCH]


def _reset(row: Row) -> Row:
    return row._replace(**dict.fromkeys(COUNTS))
