"""SQL Server: acks that come before their message, under application locks of the transaction."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from ...errors import QueueError
from ...messages.ids import as_uuid
from .locking import MAX_BATCH
from .session import LATER, execute, fetch, json_of, later_params, quote_table

_IDS = "OPENJSON(%s) WITH ([id] uniqueidentifier '$') AS u"


class SqlServerDeferred:
    """The table of deferred acks."""

    def lock_name(self, connection: Any, name: str, *, shared: bool = False) -> None:
        # No index. sp_getapplock raises nothing when it is a deadlock's victim (-3): it answers.
        mode = "Shared" if shared else "Exclusive"
        got = fetch(
            connection,
            f"SET NOCOUNT ON; DECLARE @got int; EXEC @got = sp_getapplock @Resource = %s, @LockMode = '{mode}', "
            "@LockOwner = 'Transaction', @LockTimeout = -1; SELECT @got",
            (name,),
        )[0][0]
        if got < 0:
            raise QueueError(f"The lock {name!r} was refused: sp_getapplock said {got}.")

    def defer(
        self, connection: Any, db_table: str, queue: str, ids: Sequence[uuid.UUID], kind: str, keep_ms: int
    ) -> None:
        table = quote_table(db_table)
        for first in range(0, len(ids), MAX_BATCH):
            some = json_of(list(ids[first : first + MAX_BATCH]))
            # Index: the unique one on queue and id, one seek an id. Safe: whoever else would write one of these rows waits
            # for the name's lock, so none comes in between the two statements.
            sql = (
                f"UPDATE d SET [kind] = %s, [expires] = {LATER} FROM {_IDS} INNER LOOP JOIN {table} AS d WITH (ROWLOCK) "
                "ON d.[message_id] = u.[id] WHERE d.[queue] = %s"
            )
            execute(connection, sql, (kind, *later_params(keep_ms), some, queue))
            sql = (
                f"INSERT INTO {table} ([queue], [message_id], [kind], [expires]) SELECT %s, u.[id], %s, {LATER} FROM {_IDS} "
                f"WHERE NOT EXISTS (SELECT 1 FROM {table} AS d WHERE d.[queue] = %s AND d.[message_id] = u.[id])"
            )
            execute(connection, sql, (queue, kind, *later_params(keep_ms), some, queue))

    def take_deferred(self, connection: Any, db_table: str, queue: str, ids: Sequence[uuid.UUID]) -> list[uuid.UUID]:
        found: list[uuid.UUID] = []
        for first in range(0, len(ids), MAX_BATCH):
            some = json_of(list(ids[first : first + MAX_BATCH]))
            # Index: the unique one on queue and id, one seek an id. Safe: as above; in the caller's transaction, so an ack
            # whose message is not stored after all is kept.
            sql = (
                "DELETE d OUTPUT deleted.[message_id], CASE WHEN deleted.[expires] > SYSUTCDATETIME() THEN 1 ELSE 0 END "
                f"FROM {_IDS} INNER LOOP JOIN {quote_table(db_table)} AS d WITH (ROWLOCK) ON d.[message_id] = u.[id] "
                "WHERE d.[queue] = %s"
            )
            found += [as_uuid(one) for one, in_time in fetch(connection, sql, (some, queue)) if in_time]
        return found
