"""Messages of one type that nobody takes where they lie: moved to another queue of their database, or to poison.

By hand only, since what no live worker knows today may be meant for tomorrow's. Each batch is one transaction that locks
the rows, puts them in and takes them out, so a message is never in both and never in none. What somebody has in hand, and
what is addressed to one consumer (``subscriptions.move_copies``), is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from django.db import connections, router, transaction

from .. import messages, notifier
from ..errors import InvalidOption
from ..sending.validation import alias_of
from ..sql import nonblocking, queue_sql
from ..sql.message_columns import COUNTS, Row
from . import control

#: Heads that are read in one statement, and messages, which are read whole, that are moved in one transaction.
PAGE, BATCH = 1000, 100


def count_of_type(queue: Any, kind: str, *, using: str | None = None) -> int:
    """How many messages ``move_type`` would try to move. Reads the heads of the whole table."""
    return sum(map(len, _of_type(queue, alias_of(queue, using), kind)))


def move_type(
    queue: Any, kind: str, to: Any, *, using: str | None = None, progress: Callable[[int], None] | None = None
) -> int:
    """Move the messages of a type ('': of none), named as figures name it, to another queue, behind what waits there; returns how
    many went. They keep id, headers, body and times, and have all their attempts again. Raises InvalidOption for a queue that
    is this one, or lies elsewhere."""
    alias = alias_of(queue, using)
    if to is queue or router.db_for_write(to) != alias:
        raise InvalidOption("to", to._meta.label, f"another queue in the database {alias!r} than {queue._meta.label}")

    def move(keys: list[int]) -> int:
        connection = connections[alias]
        with transaction.atomic(using=alias):
            rows = control.lock_unleased(queue, alias, keys)
            if rows:
                queue_sql(to, connection).inserts.insert_rows(connection, [_anew(row) for row in rows])
                notifier.sent(to, connection)
            return control.remove(queue, alias, [row.seq for row in rows])

    return _each(queue, alias, kind, move, progress)


def move_type_to_poison(
    queue: Any, kind: str, *, using: str | None = None, progress: Callable[[int], None] | None = None
) -> int:
    """Move the messages of a type ('': of none) to poison, where they are kept until somebody requeues, edits or archives them;
    returns how many went. The ``poisoned`` signal is sent for each."""
    reason = f"set aside by hand: nobody takes {kind or 'messages without a type'}"

    def insert_poison(keys: list[int]) -> int:
        return control.move_to_poison(queue, keys, reason=reason, using=using)

    return _each(queue, alias_of(queue, using), kind, insert_poison, progress)


def _each(
    queue: Any, alias: str, kind: str, move: Callable[[list[int]], int], progress: Callable[[int], None] | None
) -> int:
    done = 0
    for keys in _of_type(queue, alias, kind):
        done += move(keys)
        if progress is not None:
            progress(done)
    return done


def _of_type(queue: Any, alias: str, kind: str) -> Iterator[list[int]]:
    """Keys of messages of a type, some at a time, of those that are there now."""
    rows = nonblocking(queue._base_manager.using(alias)).order_by("pk")
    if queue.delivery.recipients:
        rows = rows.filter(recipient="")
    newest = rows.values_list("pk", flat=True).last()
    last = -(2**63)
    while newest is not None and (
        heads := list(rows.filter(pk__gt=last, pk__lte=newest).values_list("pk", "headers")[:PAGE])
    ):
        last = heads[-1][0]
        found = [key for key, headers in heads if messages.told_type(headers)[:255] == kind[:255]]
        for first in range(0, len(found), BATCH):
            yield found[first : first + BATCH]


def _anew(row: Row) -> Row:
    return row._replace(**dict.fromkeys(COUNTS))
