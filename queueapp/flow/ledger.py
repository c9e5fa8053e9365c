"""Counts what comes into a queue with ``Delivery.ledger`` and what leaves it, in the transaction in which it does.

A queue's messages are in three tables: its own, that of delayed messages, and that of poison. What comes into one of
them or leaves it is an entry of the ledger: so many messages, in which table, of which kind. A message that moves from
one of the tables to another is -1 here and +1 there, both of the kind MOVED. So for each table the sum of its entries
is the number of its rows, and of the kinds

    opening + sent = acked + expired + what MOVED out of all three + the rows of the three tables.

Statements on the queue's own table are counted by what wraps them (``CountedVerbs``): each verb says how many rows it
has changed. The other two tables are shared by all queues, and whatever writes to them says so by ``count`` or
``delete``. A queue without a ledger costs no statement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any

from django.db import connections, transaction

from .. import sql
from ..errors import QueueNotFound
from ..models import DelayedMessage, LedgerEntry, PoisonMessage
from ..registry import queues
from ..sql import QueueSql, backend_of
from ..sql.ledger import ACKED, DELAYED, EXPIRED, MOVED, POISON, QUEUE, SENT, Count, LedgerTables

__all__ = [
    "ACKED",
    "DELAYED",
    "EXPIRED",
    "MOVED",
    "POISON",
    "QUEUE",
    "SENT",
    "count",
    "delete",
    "names_of",
    "reclassify",
    "tables",
    "transaction_of",
    "transaction_on",
]

#: The column that names the queue.
_NAMED_BY = {DELAYED: "destination", POISON: "queue"}
#: Rows that are deleted in one statement.
_BATCH = 1000


@lru_cache(maxsize=1)
def tables() -> LedgerTables:
    """The names of the tables."""
    return LedgerTables(*(model._meta.db_table for model in (LedgerEntry, DelayedMessage, PoisonMessage)))


def names_of(queue: Any) -> tuple[str, str]:
    """The names by which delayed and poison messages of a queue are counted."""
    return queue._meta.label, queue._meta.db_table


def _queue_named(name: str) -> Any:
    """The queue with a ledger that has this name; None: there is none."""
    try:
        queue = queues.find(name)
    except QueueNotFound:
        return None
    return queue if queue.delivery.ledger and name in names_of(queue) else None


@contextmanager
def transaction_on(connection: Any) -> Iterator[None]:
    """The open transaction, or one of its own."""
    if connection.in_atomic_block or not connection.get_autocommit():
        yield
        return
    with transaction.atomic(using=connection.alias):
        yield


# -- the tables that all queues share ----------------------------------------------------------------------------------


def transaction_of(connection: Any, *names: str) -> AbstractContextManager[None]:
    """The open transaction, or one of its own, if one of these queues has a ledger; else nothing."""
    return transaction_on(connection) if any(map(_queue_named, names)) else nullcontext()


def count(connection: Any, name: str, place: int, kind: str, messages: int = 1) -> None:
    """Count messages of the queue with this name that have come into a table, or left it (below 0), in the transaction
    that moves them."""
    queue = _queue_named(name) if messages else None
    if queue is not None:
        _add(connection, queue, Count(place, kind, messages))


def delete(rows: Any, place: int) -> int:
    """Delete the rows of a queryset of delayed or poison messages, and count them; returns how many."""
    column = _NAMED_BY[place]
    names = [name for queue in queues if queue.delivery.ledger for name in names_of(queue)]
    if not names:
        return int(rows.delete()[0])
    with transaction.atomic(using=rows.db):
        # Locked, and deleted by their keys: what comes meanwhile is not counted, and stays.
        locked = dict(rows.filter(**{f"{column}__in": names}).select_for_update().values_list("pk", column))
        keys, gone = list(locked), 0
        for first in range(0, len(keys), _BATCH):
            gone += int(rows.filter(pk__in=keys[first : first + _BATCH]).delete()[0])
        if gone != len(keys):
            raise RuntimeError(f"{len(keys)} messages were locked, but {gone} could be deleted.")
        for name, messages in Counter(locked.values()).items():
            count(connections[rows.db], name, place, MOVED, -messages)
        return gone + int(rows.exclude(**{f"{column}__in": names}).delete()[0])


# -- the queue's own table ---------------------------------------------------------------------------------------------


def reclassify(queue: Any, connection: Any, messages: int, was: str, kind: str) -> None:
    """Messages that were counted as having left the queue as ``was`` have left it as ``kind``."""
    if queue.delivery.ledger and messages:
        _add(connection, queue, Count(QUEUE, was, messages), Count(QUEUE, kind, -messages))


def _add(connection: Any, queue: Any, *counts: Count) -> None:
    backend_of(connection).ledger.add(connection, tables().entries, queue._meta.label, counts)


def _came(kind: str, result: Any, *_: Any, **__: Any) -> Count:
    return Count(QUEUE, kind, _rows(result))


def _left(kind: str, result: Any, *_: Any, **__: Any) -> Count:
    return Count(QUEUE, kind, -_rows(result))


def _row_came(result: Any, row: Any, *, same_queue: bool = False) -> Count:
    """A message that comes back into the queue was counted as acked by the claim that deleted it."""
    return Count(QUEUE, ACKED if same_queue else SENT, 1)


def _copied(result: Any, seqs: Any, recipients: Any, *_: Any, **__: Any) -> Count:
    """Copies replace their original; without recipients it is deleted."""
    return Count(QUEUE, SENT if recipients else MOVED, _rows(result) * (len(recipients) - 1))


def _rows(result: Any) -> int:
    """How many rows a verb has changed: a number, or the rows; None: one."""
    return 1 if result is None else result if isinstance(result, int) else len(result)


_sent, _moved_in = partial(_came, SENT), partial(_came, MOVED)
_acked, _expired, _moved_out = partial(_left, ACKED), partial(_left, EXPIRED), partial(_left, MOVED)

#: All verbs by which messages come into a queue's table and leave it. A claim that deletes acks: a rollback takes its
#: entry back as well.
COUNTED: dict[str, dict[str, Callable[..., Count]]] = {
    "claims": {"claim_by_delete": _acked},
    "acks": dict.fromkeys(("ack", "ack_without", "ack_whole", "try_ack"), _acked),
    "ack_by_seq": {
        **dict.fromkeys(("ack", "ack_without", "ack_whole"), _acked),
        **dict.fromkeys(("take", "take_owned"), _moved_out),
    },
    "results": {"ack_and_store": _acked},
    "inserts": {
        **dict.fromkeys(("insert", "insert_many", "insert_runs", "insert_rows", "insert_select"), _sent),
        "insert_row": _row_came,
        "insert_from": _moved_in,
    },
    "fanout": {"insert_copies": _sent, "insert_routed": _sent, "replace_by_copies": _copied},
    "failures": {"remove": _moved_out},
    "limits": {"delete_in_flight": _acked},
    "maintenance": {"purge": _moved_out, "purge_expired": _expired, "take_expired": _moved_out},
}


class CountedVerbs:
    """The verbs of one subject of a queue's statements; ``counted`` of them insert their entry in the same
    transaction."""

    def __init__(self, queue: Any, verbs: Any, counted: dict[str, Callable[..., Count]]) -> None:
        self._queue, self._verbs = queue, verbs
        for name, entry in counted.items():
            setattr(self, name, partial(self._run, getattr(verbs, name), entry))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._verbs, name)

    @property
    def plain(self) -> Any:
        """Of acks: these, which do no more than delete and count."""
        return self

    def pipelined_claim(self, connection: Any, ranges: Iterable[Any]) -> None:
        """Of claims: none, since the entry is a statement between the claim and its commit."""

    def _run(
        self, verb: Callable[..., Any], entry: Callable[..., Count], connection: Any, *args: Any, **kwargs: Any
    ) -> Any:
        with transaction_on(connection):
            result = verb(connection, *args, **kwargs)
            counted = entry(result, *args, **kwargs)
            if counted.messages:
                _add(connection, self._queue, counted)
        return result


def _wrap_counted(queue: Any, statements: QueueSql) -> None:
    for subject, counted in COUNTED.items():
        setattr(statements, subject, CountedVerbs(queue, getattr(statements, subject), counted))


sql.wrap_counted = _wrap_counted
