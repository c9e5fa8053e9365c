"""SQL Server: dedupe keys, processed keys, and acks that arrive before their message (under application locks of the
transaction)."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from ...messages.ids import as_uuid
from ..dedupe import Dedupe, EarlyAcks
from ..tables import QueueTable, StoreTable
from .columns import MAX_BATCH, TAKING
from .errors import LockRefused
from .key_locks import EXISTING, lock_keys_of
from .session import LATER, execute, fetch, json_of, later_params, quote, quote_table

_PAIRS = "OPENJSON(%s) WITH ([key] varchar(64) '$[0]', [id] uniqueidentifier '$[1]') AS u"
_IDS = "OPENJSON(%s) WITH ([id] uniqueidentifier '$') AS u"


class SqlServerDedupe(Dedupe):
    """The two tables that all queues of a database share."""

    def lock_keys(
        self, connection: Any, db_table: str, queue: str, keys: Sequence[str], ids: Sequence[uuid.UUID]
    ) -> dict[str, uuid.UUID]:
        table, found = quote_table(db_table), dict[str, uuid.UUID]()
        pairs = sorted(zip(keys, ids, strict=True))
        lock_keys_of(connection, db_table, (f"{queue} {key}" for key in keys))
        for first in range(0, len(pairs), MAX_BATCH):
            piece = json_of([[key, str(message_id)] for key, message_id in pairs[first : first + MAX_BATCH]])
            # Index: the unique one on queue and key, one seek a key. Safe: under the lock on its name no other session
            # inserts a key; UPDLOCK keeps an existing one from a purge.
            sql = (
                f"INSERT INTO {table} ([queue], [key], [message_id]) SELECT %s, u.[key], u.[id] FROM {_PAIRS} "
                f"WHERE NOT EXISTS (SELECT 1 FROM {table} AS t WITH ({EXISTING}) "
                "WHERE t.[queue] = %s AND t.[key] = u.[key]) ORDER BY u.[key]"
            )
            execute(connection, sql, (queue, piece, queue))
            # Index: the same. Safe: they are locked.
            sql = (
                f"SELECT t.[key], t.[message_id] FROM {_PAIRS} INNER LOOP JOIN {table} AS t WITH (UPDLOCK, ROWLOCK) "
                "ON t.[key] = u.[key] WHERE t.[queue] = %s"
            )
            found |= {key: as_uuid(message_id) for key, message_id in fetch(connection, sql, (piece, queue))}
        return found

    def set_keys(
        self, connection: Any, db_table: str, queue: str, keys: Sequence[str], ids: Sequence[uuid.UUID]
    ) -> int:
        pairs, count = sorted(zip(keys, ids, strict=True)), 0
        for first in range(0, len(pairs), MAX_BATCH):
            piece = json_of([[key, str(message_id)] for key, message_id in pairs[first : first + MAX_BATCH]])
            # Index: the unique one on queue and key, one seek a key. Safe: the caller holds the locks.
            sql = (
                f"UPDATE t SET [message_id] = u.[id], [changed_at] = SYSUTCDATETIME() FROM {_PAIRS} INNER LOOP JOIN "
                f"{quote_table(db_table)} AS t WITH (ROWLOCK) ON t.[key] = u.[key] WHERE t.[queue] = %s"
            )
            count += execute(connection, sql, (piece, queue))
        return count

    def lock_stored(
        self, connection: Any, table: StoreTable, destination: str, ids: Sequence[uuid.UUID]
    ) -> list[tuple[int, uuid.UUID]]:
        key, identity, where = (
            quote(name) for name in (table.key, table.columns["message_id"], table.columns["destination"])
        )
        found: list[tuple[int, uuid.UUID]] = []
        for first in range(0, len(ids), MAX_BATCH):
            piece = json_of([str(key) for key in ids[first : first + MAX_BATCH]])
            # Index: the one on message_id, one seek an id. Safe: it waits for a dispatcher that is moving a row.
            sql = (
                f"SELECT s.{key}, s.{identity} FROM {_IDS} INNER LOOP JOIN {quote_table(table.db_table)} AS s "
                f"WITH (UPDLOCK, ROWLOCK, READCOMMITTEDLOCK) ON s.{identity} = u.[id] WHERE s.{where} = %s"
            )
            found += [
                (number, as_uuid(message_id)) for number, message_id in fetch(connection, sql, (piece, destination))
            ]
        return sorted(found)

    def purge_keys(
        self, connection: Any, db_table: str, queue: QueueTable, store: StoreTable, keep_ms: int, limit: int
    ) -> int:
        table, waiting, stored = quote_table(db_table), quote_table(queue.db_table), quote_table(store.db_table)
        # Index: the one on changed_at, and for each key those on the id in the queue and in the store. Safe: a key that
        # a sender has locked is skipped, and a deleted one is created again; READCOMMITTEDLOCK waits for uncommitted
        # inserts and deletes.
        sql = (
            f"WITH old AS (SELECT TOP ({int(limit)}) t.[id] FROM {table} AS t WITH ({TAKING}) WHERE t.[queue] = %s "
            f"AND t.[changed_at] < {LATER} AND NOT EXISTS (SELECT 1 FROM {waiting} AS q WITH (READCOMMITTEDLOCK) "
            f"WHERE q.{quote(queue.columns['id'])} = t.[message_id]) "
            f"AND NOT EXISTS (SELECT 1 FROM {stored} AS s WITH (READCOMMITTEDLOCK) "
            f"WHERE s.{quote(store.columns['message_id'])} = t.[message_id]) ORDER BY t.[changed_at]) DELETE FROM old"
        )
        return execute(connection, sql, (queue.label, *later_params(-keep_ms)))

    def record_processed(self, connection: Any, db_table: str, key: str, queue: str) -> bool:
        table = quote_table(db_table)
        lock_keys_of(connection, db_table, (key,))
        # Index: the primary key. Safe: under the lock on its name no other session inserts the key.
        sql = (
            f"INSERT INTO {table} ([key], [queue]) SELECT v.[key], v.[queue] FROM (SELECT %s AS [key], %s AS [queue]) "
            "AS v "
            f"WHERE NOT EXISTS (SELECT 1 FROM {table} AS t WITH ({EXISTING}) WHERE t.[key] = v.[key])"
        )
        return execute(connection, sql, (key, queue)) == 1

    def purge_processed(self, connection: Any, db_table: str, keep_ms: int, limit: int) -> int:
        # Index: the one on processed_at. Safe: locked rows are skipped.
        sql = (
            f"WITH old AS (SELECT TOP ({int(limit)}) t.[key] FROM {quote_table(db_table)} AS t WITH ({TAKING}) "
            f"WHERE t.[processed_at] < {LATER} ORDER BY t.[processed_at]) DELETE FROM old"
        )
        return execute(connection, sql, later_params(-keep_ms))


class SqlServerEarlyAcks(EarlyAcks):
    """The table of early acks."""

    def lock_name(self, connection: Any, name: str, *, shared: bool = False) -> None:
        # No index. sp_getapplock raises nothing when it is a deadlock's victim (-3): it returns that.
        mode = "Shared" if shared else "Exclusive"
        got = fetch(
            connection,
            f"SET NOCOUNT ON; DECLARE @got int; EXEC @got = sp_getapplock @Resource = %s, @LockMode = '{mode}', "
            "@LockOwner = 'Transaction', @LockTimeout = -1; SELECT @got",
            (name,),
        )[0][0]
        if got < 0:
            raise LockRefused(name, got)

    def store(
        self, connection: Any, db_table: str, queue: str, ids: Sequence[uuid.UUID], kind: str, keep_ms: int
    ) -> None:
        table = quote_table(db_table)
        for first in range(0, len(ids), MAX_BATCH):
            piece = json_of(list(ids[first : first + MAX_BATCH]))
            # Index: the unique one on queue and id, one seek an id. Safe: every other writer of these rows waits for
            # the name's lock, so none writes between the two statements.
            sql = (
                f"UPDATE d SET [kind] = %s, [expires] = {LATER} FROM {_IDS} INNER LOOP JOIN {table} AS d WITH "
                "(ROWLOCK) "
                "ON d.[message_id] = u.[id] WHERE d.[queue] = %s"
            )
            execute(connection, sql, (kind, *later_params(keep_ms), piece, queue))
            sql = (
                f"INSERT INTO {table} ([queue], [message_id], [kind], [expires]) SELECT %s, u.[id], %s, {LATER} FROM "
                f"{_IDS} "
                f"WHERE NOT EXISTS (SELECT 1 FROM {table} AS d WHERE d.[queue] = %s AND d.[message_id] = u.[id])"
            )
            execute(connection, sql, (queue, kind, *later_params(keep_ms), piece, queue))

    def take(self, connection: Any, db_table: str, queue: str, ids: Sequence[uuid.UUID]) -> list[uuid.UUID]:
        found: list[uuid.UUID] = []
        for first in range(0, len(ids), MAX_BATCH):
            piece = json_of(list(ids[first : first + MAX_BATCH]))
            # Index: the unique one on queue and id, one seek an id. Safe: as above; in the caller's transaction, so an
            # ack whose message is not stored after all is kept.
            sql = (
                "DELETE d OUTPUT deleted.[message_id], CASE WHEN deleted.[expires] > SYSUTCDATETIME() THEN 1 ELSE 0 "
                "END "
                f"FROM {_IDS} INNER LOOP JOIN {quote_table(db_table)} AS d WITH (ROWLOCK) ON d.[message_id] = u.[id] "
                "WHERE d.[queue] = %s"
            )
            found += [as_uuid(one) for one, in_time in fetch(connection, sql, (piece, queue)) if in_time]
        return found
