"""SQL Server: members of groups."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from ...messages.ids import as_uuid
from ..groups import EndedIn, GroupSql, GroupTables, LockedGroup
from .errors import LockTimeout
from .statements import MAX_BATCH, TAKING, execute, fetch, fetch_within, json_of, quote_table

_IDS = "OPENJSON(%s) WITH ([id] uniqueidentifier '$') AS u"


def _json(ids: Sequence[uuid.UUID]) -> Any:
    return json_of([str(identity) for identity in ids])


class SqlServerGroups(GroupSql):
    """READPAST finds a waiting member that no other transaction is ending."""

    def add(
        self, connection: Any, tables: GroupTables, group: uuid.UUID, ids: Sequence[uuid.UUID], *, nested: bool = False
    ) -> int:
        groups, count = quote_table(tables.groups), 0
        # Index: the primary keys. Safe: REPEATABLEREAD keeps the shared lock of the group's row until the transaction
        # ends, so that a completion, which locks it exclusively, comes before or after; adders share it.
        hints = "WITH (REPEATABLEREAD, ROWLOCK, READCOMMITTEDLOCK)"
        for first in range(0, len(ids), MAX_BATCH):
            piece = ids[first : first + MAX_BATCH]
            sql = (
                f"INSERT INTO {quote_table(tables.members)} ([message_id], [group_id], [outcome], [nested]) "
                f"SELECT u.[id], g.[id], 0, %s FROM {groups} AS g {hints} CROSS JOIN {_IDS} "
                "WHERE g.[id] = %s AND g.[completed_at] IS NULL"
            )
            added = execute(connection, sql, (int(nested), _json(piece), group))
            if not added:
                break
            count += added
            # No further row is read. Safe: under the lock of the group's row.
            note = f"INSERT INTO {quote_table(tables.additions)} ([group_id], [members]) VALUES (%s, %s)"
            execute(connection, note, (group, added))
        return count

    def end(self, connection: Any, tables: GroupTables, ids: Sequence[uuid.UUID], outcome: int) -> list[EndedIn]:
        members, ended = quote_table(tables.members), set[uuid.UUID]()
        verb = f"UPDATE m SET [outcome] = {int(outcome)} OUTPUT inserted" if outcome else "DELETE m OUTPUT deleted"
        for first in range(0, len(ids), MAX_BATCH):
            # Index: the primary key, one seek an id. Safe: a transaction that has locked one of them waits for nothing.
            sql = (
                f"{verb}.[group_id] FROM {_IDS} INNER LOOP JOIN {members} AS m WITH (ROWLOCK) "
                "ON m.[message_id] = u.[id] WHERE m.[outcome] = 0"
            )
            rows = fetch(connection, sql, (_json(ids[first : first + MAX_BATCH]),))
            ended |= {as_uuid(group) for (group,) in rows}
        if not ended:
            return []
        # Index: the one on group, outcome and id, from its end. Safe: all ends are written before the first row is
        # locked; TAKING waits for no row, and skips what another transaction is ending or has locked.
        sql = (
            f"SELECT u.[id], w.[message_id] FROM {_IDS} OUTER APPLY (SELECT TOP (1) m.[message_id] "
            f"FROM {members} AS m WITH ({TAKING}) WHERE m.[group_id] = u.[id] AND m.[outcome] = 0 AND m.[nested] = 0 "
            "ORDER BY m.[message_id] DESC) AS w"
        )
        found = fetch(connection, sql, (_json(sorted(ended)),))
        return [EndedIn(as_uuid(group), waiting is not None) for group, waiting in found]

    def lock(self, connection: Any, tables: GroupTables, group: uuid.UUID) -> LockedGroup | None:
        # Index: the primary key. Safe: XLOCK waits for adders, whose shared locks a U lock would not.
        sql = (
            "SELECT [parent], CASE WHEN [completed_at] IS NULL THEN 0 ELSE 1 END "
            f"FROM {quote_table(tables.groups)} WITH (XLOCK, ROWLOCK, READCOMMITTEDLOCK) WHERE [id] = %s"
        )
        rows = fetch(connection, sql, (group,))
        return LockedGroup(None if rows[0][0] is None else as_uuid(rows[0][0]), bool(rows[0][1])) if rows else None

    def is_waiting(self, connection: Any, tables: GroupTables, group: uuid.UUID) -> bool:
        # Index: the one on group, outcome and id. Safe: a row that another transaction is ending counts as waiting: its
        # lock is not waited for, and that it is locked is the answer. READCOMMITTEDLOCK, since row versions would show
        # what was there when a transaction under SNAPSHOT began.
        sql = (
            f"SELECT TOP (1) 1 AS [waiting] FROM {quote_table(tables.members)} WITH (ROWLOCK, READCOMMITTEDLOCK) "
            "WHERE [group_id] = %s AND [outcome] = 0"
        )
        try:
            return bool(fetch_within(connection, 0, sql, (group,)))
        except LockTimeout:
            return True
