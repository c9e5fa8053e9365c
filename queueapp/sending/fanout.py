"""Who gets a copy of a message that names no recipient: every consumer that subscribes to its type.

Those are rows (``models.Subscription``), and the consumers of this process' code, which may be newer than the rows. So it
makes no difference who copies a message: a producer that imports no consumers, a worker of a lane, a process of the code
before or after.

A sender remembers the rows. Its INSERT asks whether they are still the same (``QueueSql.fanout.insert_copies``), so no statement is
spent on that, and no copy is lost to a consumer whose row was committed a moment ago.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from django.db import Error

from .. import messages, notifier
from ..consuming.registration import Registration
from ..consuming.registry import matching_consumers, registered, with_bases
from ..errors import NotMigrated, UndecodableMessage
from ..models import Subscription
from ..sql import ErrorKind, backend_of, queue_sql
from ..sql.claims import MAX_SEQ, SeqRange
from ..sql.message_columns import Outgoing
from .isolation import atomic_on

TABLE: str = Subscription._meta.db_table
#: So often others changed the rows while one message was sent. After that it goes in as a foreign producer's does.
_ATTEMPTS = 5
#: Kinds of messages of which is remembered who gets a copy.
_MOST_FOUND = 1_000
#: Headers that are read at once for who receives without a worker; an identity may have been seeded below zero.
_PIECE, _LOWEST = 500, -(2**63)


class Subscribers:
    """Who subscribes to what of one queue: the rows as they were read."""

    __slots__ = ("_by_type", "_found", "_queue", "mark")

    def __init__(self, queue: Any, rows: Iterable[tuple[str, str, str, int]] = ()) -> None:
        self._queue = queue
        self.mark = 0
        #: What was found, by the types and by the consumers of the code: 2 µs instead of 12 a send.
        self._found: dict[tuple[Sequence[str], tuple[Any, ...]], tuple[str, ...]] = {}
        self._by_type: dict[str, list[tuple[str, frozenset[str]]]] = {}
        for consumer, type_name, aliases, mark in rows:
            self.mark += mark
            self._by_type.setdefault(type_name, []).append((consumer, frozenset({consumer, *_list(aliases)})))

    def of(self, types: Sequence[str]) -> tuple[str, ...]:
        """Who gets a copy of a message of these types: in the order of the rows, then those that only this code knows. A
        consumer that was renamed is one, under the name that has a row."""
        here = tuple(registered.of(self._queue))
        key = tuple(types), here
        found = self._found.get(key, ())
        if not found:
            found = self._find(types, [one for one in here if one.finder is None])
            if len(self._found) >= _MOST_FOUND:
                self._found.clear()
            if found:  # else a class may be imported late, whose base somebody takes
                self._found[key] = found
        return found

    def _find(self, types: Sequence[str], here: list[Registration]) -> tuple[str, ...]:
        types = with_bases(here, types)
        subscribed = [one for kind in types for one in self._by_type.get(kind, ())]
        in_code = [(one.name, frozenset({one.name, *one.aliases})) for one in matching_consumers(here, types)]
        found: list[str] = []
        taken: set[str] = set()
        for consumer, names in [*subscribed, *in_code]:
            if taken.isdisjoint(names):
                found.append(consumer)
            taken |= names
        return tuple(found)


def types_in(headers: str) -> tuple[str, ...]:
    """The type that headers say a message is of, and the bases of that. Raises UndecodableMessage."""
    return messages.read_kind(headers).names


def _list(text: str) -> list[str]:
    return [str(one) for one in json.loads(text)] if text else []


#: (alias, label) -> who subscribed when this process last looked.
_remembered: dict[tuple[str, str], Subscribers] = {}


def forget() -> None:
    """Look again at the next send (tests)."""
    _remembered.clear()


def read_subscribers(queue: Any, connection: Any) -> Subscribers:
    """Who subscribes now: one statement, in the connection's transaction. Raises NotMigrated."""
    try:
        rows = queue_sql(queue, connection).fanout.read_subscriptions(connection, TABLE)
    except Error as error:
        if backend_of(connection).error_kind(error) is ErrorKind.MISSING:
            raise NotMigrated(connection.alias, [TABLE]) from error
        raise
    found = _remembered[connection.alias, queue._meta.label] = Subscribers(queue, rows)
    return found


def insert(queue: Any, connection: Any, message: Outgoing, types: Sequence[str]) -> None:
    """Store a message that names no recipient: a copy for each consumer of its types, all or none, in the connection's
    transaction. Where nobody subscribes it is stored as it is, and copied when it is received."""
    sql = queue_sql(queue, connection)
    known = _remembered.get((connection.alias, queue._meta.label)) or read_subscribers(queue, connection)
    for _ in range(_ATTEMPTS):
        names = known.of(types)
        if not names:
            break
        with atomic_on(connection) if sql.table.barriers else nullcontext():
            if sql.fanout.insert_copies(connection, message, names, TABLE, known.mark):
                return
        known = read_subscribers(queue, connection)
    sql.inserts.insert(connection, message)


def replace_waiting(queue: Any, connection: Any, recipient: str, limit: int) -> int:
    """Let a consumer that receives without a worker have its copies: replace at least so many messages that name no recipient and
    that it wants, where there are so many, by a copy for each who does. Returns how many. In a transaction of its own."""
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
