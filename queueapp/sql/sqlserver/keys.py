"""SQL Server: keys of messages, and what was processed once."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from ...messages.ids import as_uuid
from ..tables import QueueTable, StoreTable
from .claims import Claims
from .locking import KEEPING, MAX_BATCH, TAKING
from .session import LATER, execute, fetch, json_of, later_params, quote, quote_table

_PAIRS = "OPENJSON(%s) WITH ([key] varchar(64) '$[0]', [id] uniqueidentifier '$[1]') AS u"
_IDS = "OPENJSON(%s) WITH ([id] uniqueidentifier '$') AS u"


class SqlServerKeys:
    """The two tables that all queues of a database share."""

    def hold_keys(
        self, connection: Any, db_table: str, queue: str, keys: Sequence[str], ids: Sequence[uuid.UUID]
    ) -> dict[str, uuid.UUID]:
        table, found = quote_table(db_table), dict[str, uuid.UUID]()
        pairs = sorted(zip(keys, ids, strict=True))
        for first in range(0, len(pairs), MAX_BATCH):
            some = json_of([[key, str(one)] for key, one in pairs[first : first + MAX_BATCH]])
            # Index: the unique one on queue and key, one seek a key. Safe: KEEPING, so nobody else inserts one between the look and
            # the insert.
            sql = (
                f"INSERT INTO {table} ([queue], [key], [message_id]) SELECT %s, u.[key], u.[id] FROM {_PAIRS} "
                f"WHERE NOT EXISTS (SELECT 1 FROM {table} AS t WITH ({KEEPING}) "
                "WHERE t.[queue] = %s AND t.[key] = u.[key]) ORDER BY u.[key]"
            )
            execute(connection, sql, (queue, some, queue))
            # Index: the same. Safe: they are held.
            sql = (
                f"SELECT t.[key], t.[message_id] FROM {_PAIRS} INNER LOOP JOIN {table} AS t WITH (UPDLOCK, ROWLOCK) "
                "ON t.[key] = u.[key] WHERE t.[queue] = %s"
            )
            found |= {key: as_uuid(one) for key, one in fetch(connection, sql, (some, queue))}
        return found

    def set_keys(
        self, connection: Any, db_table: str, queue: str, keys: Sequence[str], ids: Sequence[uuid.UUID]
    ) -> int:
        pairs, count = sorted(zip(keys, ids, strict=True)), 0
        for first in range(0, len(pairs), MAX_BATCH):
            some = json_of([[key, str(one)] for key, one in pairs[first : first + MAX_BATCH]])
            # Index: the unique one on queue and key, one seek a key. Safe: the caller holds the rows.
            sql = (
                f"UPDATE t SET [message_id] = u.[id], [changed_at] = SYSUTCDATETIME() FROM {_PAIRS} INNER LOOP JOIN "
                f"{quote_table(db_table)} AS t WITH (ROWLOCK) ON t.[key] = u.[key] WHERE t.[queue] = %s"
            )
            count += execute(connection, sql, (some, queue))
        return count

    def lock_stored(
        self, connection: Any, table: StoreTable, destination: str, ids: Sequence[uuid.UUID]
    ) -> list[tuple[int, uuid.UUID]]:
        key, identity, where = (
            quote(name) for name in (table.key, table.columns["message_id"], table.columns["destination"])
        )
        found: list[tuple[int, uuid.UUID]] = []
        for first in range(0, len(ids), MAX_BATCH):
            some = json_of([str(one) for one in ids[first : first + MAX_BATCH]])
            # Index: the one on message_id, one seek an id. Safe: it waits for a dispatcher that is moving one.
            sql = (
                f"SELECT s.{key}, s.{identity} FROM {_IDS} INNER LOOP JOIN {quote_table(table.db_table)} AS s "
                f"WITH (UPDLOCK, ROWLOCK, READCOMMITTEDLOCK) ON s.{identity} = u.[id] WHERE s.{where} = %s"
            )
            found += [(number, as_uuid(one)) for number, one in fetch(connection, sql, (some, destination))]
        return sorted(found)

    def forget_keys(
        self, connection: Any, db_table: str, queue: QueueTable, store: StoreTable, keep_ms: int, limit: int
    ) -> int:
        table, waiting, stored = quote_table(db_table), quote_table(queue.db_table), quote_table(store.db_table)
        # Index: the one on changed_at, and for each key those on the id in the queue and in the store. Safe: a key that a sender
        # holds is passed over, and one that is gone is made again; READCOMMITTEDLOCK waits for what is just put in or taken.
        sql = (
            f"WITH old AS (SELECT TOP ({int(limit)}) t.[id] FROM {table} AS t WITH ({TAKING}) WHERE t.[queue] = %s "
            f"AND t.[changed_at] < {LATER} AND NOT EXISTS (SELECT 1 FROM {waiting} AS q WITH (READCOMMITTEDLOCK) "
            f"WHERE q.{quote(queue.columns['id'])} = t.[message_id]) "
            f"AND NOT EXISTS (SELECT 1 FROM {stored} AS s WITH (READCOMMITTEDLOCK) "
            f"WHERE s.{quote(store.columns['message_id'])} = t.[message_id]) ORDER BY t.[changed_at]) DELETE FROM old"
        )
        return execute(connection, sql, (queue.label, *later_params(-keep_ms)))

    def note_processed(self, connection: Any, db_table: str, key: str, queue: str) -> bool:
        table = quote_table(db_table)
        # Index: the primary key. Safe: KEEPING.
        sql = (
            f"INSERT INTO {table} ([key], [queue]) SELECT v.[key], v.[queue] FROM (SELECT %s AS [key], %s AS [queue]) AS v "
            f"WHERE NOT EXISTS (SELECT 1 FROM {table} AS t WITH ({KEEPING}) WHERE t.[key] = v.[key])"
        )
        return execute(connection, sql, (key, queue)) == 1

    def forget_processed(self, connection: Any, db_table: str, keep_ms: int, limit: int) -> int:
        # Index: the one on processed_at. Safe: what somebody holds is passed over.
        sql = (
            f"WITH old AS (SELECT TOP ({int(limit)}) t.[key] FROM {quote_table(db_table)} AS t WITH ({TAKING}) "
            f"WHERE t.[processed_at] < {LATER} ORDER BY t.[processed_at]) DELETE FROM old"
        )
        return execute(connection, sql, later_params(-keep_ms))


class SqlServerWaiting:
    """The verb of one queue; ``_q``, ``_c`` and ``_claims`` are its names and its conditions."""

    table: QueueTable
    _q: str
    _c: dict[str, str]
    _claims: Claims

    def lock_waiting(self, connection: Any, ids: Sequence[uuid.UUID]) -> list[tuple[int, uuid.UUID]]:
        seq, identity = f"q.{self._c['seq']}", f"q.{self._c['id']}"
        begun = f" AND q.{self._c['lease_token']} IS NULL" if self.table.has("lease_token") else ""
        found: list[tuple[int, uuid.UUID]] = []
        for first in range(0, len(ids), MAX_BATCH):
            some = json_of([str(one) for one in ids[first : first + MAX_BATCH]])
            # Index: the one on id, one seek an id. Safe: TAKING passes over what a receiver has, since it has begun; what is
            # locked here claims pass over until this transaction ends.
            sql = (
                f"SELECT {seq}, {identity} FROM {_IDS} INNER LOOP JOIN {self._q} AS q WITH ({TAKING}) ON {identity} = u.[id] "
                f"WHERE {self._claims.free('q')}{begun}"
            )
            found += [(number, as_uuid(one)) for number, one in fetch(connection, sql, (some,))]
        return sorted(found)
