"""Fan-out: a message without a recipient is copied for every consumer that subscribes to its type.

Subscriptions are rows (``models.Subscription``) plus the consumers that this process has imported, which may be newer
than the rows. So every process makes the same copies: a producer without consumers, a worker with a consumer filter, an
older or a newer version.

A sender caches the rows. Its INSERT compares them with the table (``QueueSql.fanout.insert_copies``), so that no extra
statement is needed, and no consumer whose row has just been committed misses a copy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from django.db import Error

from .. import messages, notifier
from ..consuming.registry import Registration, matching_consumers, registered, with_bases
from ..errors import NotMigrated, UndecodableMessage
from ..models import Subscription
from ..sql import ErrorKind, backend_of, queue_sql
from ..sql.claims import MAX_SEQ, SeqRange
from ..sql.message_columns import Outgoing
from .isolation import atomic_on

TABLE: str = Subscription._meta.db_table
#: Attempts of one send while other processes change the rows. After that it is stored without a recipient.
_ATTEMPTS = 5
#: Cached combinations of types and consumers.
_MOST_FOUND = 1_000
#: Headers that one statement reads; the identity column may start below zero.
_PIECE, _LOWEST = 500, -(2**63)


class Subscribers:
    """The subscriptions of one queue, as its rows were read."""

    __slots__ = ("_by_type", "_found", "_queue", "mark")

    def __init__(self, queue: Any, rows: Iterable[tuple[str, str, str, int]] = ()) -> None:
        self._queue = queue
        self.mark = 0
        #: Results by types and imported consumers: 2 µs instead of 12 a send.
        self._found: dict[tuple[Sequence[str], tuple[Any, ...]], tuple[str, ...]] = {}
        self._by_type: dict[str, list[tuple[str, frozenset[str]]]] = {}
        for consumer, type_name, aliases, mark in rows:
            self.mark += mark
            self._by_type.setdefault(type_name, []).append((consumer, frozenset({consumer, *_list(aliases)})))

    def of(self, types: Sequence[str]) -> tuple[str, ...]:
        """The recipients of a message of these types, in the order of the rows, then those that only this process
        knows. A consumer with an alias counts once, under the name that has a row."""
        here = tuple(registered.of(self._queue))
        key = tuple(types), here
        found = self._found.get(key, ())
        if not found:
            found = self._find(types, [registration for registration in here if registration.finder is None])
            if len(self._found) >= _MOST_FOUND:
                self._found.clear()
            if found:  # do not cache a miss: a class with a subscribed base may be imported later
                self._found[key] = found
        return found

    def _find(self, types: Sequence[str], here: list[Registration]) -> tuple[str, ...]:
        types = with_bases(here, types)
        subscribed = [subscription for kind in types for subscription in self._by_type.get(kind, ())]
        in_code = [
            (consumer.name, frozenset({consumer.name, *consumer.aliases}))
            for consumer in matching_consumers(here, types)
        ]
        found: list[str] = []
        taken: set[str] = set()
        for consumer, names in [*subscribed, *in_code]:
            if taken.isdisjoint(names):
                found.append(consumer)
            taken |= names
        return tuple(found)


def types_in(headers: str) -> tuple[str, ...]:
    """The type in the headers, and its bases. Raises UndecodableMessage."""
    return messages.read_kind(headers).names


def _list(text: str) -> list[str]:
    return [str(subscription) for subscription in json.loads(text)] if text else []


#: (alias, label) -> the subscriptions that this process read last.
_remembered: dict[tuple[str, str], Subscribers] = {}


def forget() -> None:
    """Clear the cache (tests)."""
    _remembered.clear()


def read_subscribers(queue: Any, connection: Any) -> Subscribers:
    """Read the subscriptions: one statement, in the connection's transaction. Raises NotMigrated."""
    try:
        rows = queue_sql(queue, connection).fanout.read_subscriptions(connection, TABLE)
    except Error as error:
        if backend_of(connection).error_kind(error) is ErrorKind.MISSING:
            raise NotMigrated(connection.alias, [TABLE]) from error
        raise
    found = _remembered[connection.alias, queue._meta.label] = Subscribers(queue, rows)
    return found


def insert(queue: Any, connection: Any, message: Outgoing, types: Sequence[str]) -> None:
    """Store a message without a recipient: a copy for each consumer of its types, all or none, in the connection's
    transaction. If no consumer subscribes, it is stored as it is, and copied when it is received."""
    sql = queue_sql(queue, connection)
    known = _remembered.get((connection.alias, queue._meta.label)) or read_subscribers(queue, connection)
    for _ in range(_ATTEMPTS):
        names = known.of(types)
        if not names:
            break
        with atomic_on(connection) if sql.table.barriers else nullcontext():
            if sql.fanout.insert_copies(connection, message, names, TABLE, known.mark):
                return
        if has_fixed_snapshot(connection):
            break
        known = read_subscribers(queue, connection)
    sql.inserts.insert(connection, message)


def has_fixed_snapshot(connection: Any) -> bool:
    """Whether the open transaction may not see the newest subscriptions (REPEATABLE READ): then a message is stored
    without a recipient, and copied when it is received."""
    return connection.in_atomic_block and backend_of(connection).sessions.has_fixed_snapshot(connection)


def replace_waiting(queue: Any, connection: Any, recipient: str, limit: int) -> int:
    """Make the copies for a recipient that receives without a worker: replace at least ``limit`` messages without a
    recipient that it subscribes to, if there are so many, by their copies. Returns how many. In a transaction of its
    own."""
    sql, known = queue_sql(queue, connection), read_subscribers(queue, connection)
    done = 0
    for priority in range(queue.delivery.priorities - 1, -1, -1):
        low = _LOWEST
        while done < limit:
            heads = sql.claims.read_heads(connection, SeqRange(low, MAX_SEQ, priority=priority), _PIECE)
            parts: dict[tuple[str, ...], list[int]] = {}
            for seq, headers in heads:
                if recipient in (names := _wanting(known, headers)):
                    parts.setdefault(names, []).append(seq)
            with atomic_on(connection):
                done += sum(sql.fanout.replace_by_copies(connection, seqs, names) for names, seqs in parts.items())
            if len(heads) < _PIECE:
                break
            low = heads[-1][0] + 1
    if done:
        notifier.sent(queue, connection)
    return done


def _wanting(known: Subscribers, headers: str) -> tuple[str, ...]:
    try:
        return known.of(types_in(headers))
    except UndecodableMessage:
        return ()
