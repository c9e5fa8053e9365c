"""PostgreSQL: members of groups."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from ...messages.ids import as_uuid
from ..groups import EndedIn, GroupSql, GroupTables, LockedGroup
from .raw.cursor import execute, fetch
from .raw.plan_guard import PlanGuard
from .statements import quote_table


class PostgresqlGroups(GroupSql):
    """SKIP LOCKED finds a waiting member that no other transaction is ending."""

    def __init__(self, guard: PlanGuard) -> None:
        self._guard = guard

    def add(
        self, connection: Any, tables: GroupTables, group: uuid.UUID, ids: Sequence[uuid.UUID], *, nested: bool = False
    ) -> int:
        # Primary keys. Safe: KEY SHARE waits for the FOR UPDATE of a completion and reads its result, and keeps the
        # next one waiting; adders do not wait for each other.
        sql = (
            f"WITH g AS MATERIALIZED (SELECT id FROM {quote_table(tables.groups)} WHERE id = %s "
            "AND completed_at IS NULL FOR KEY SHARE), n AS (INSERT INTO "
            f"{quote_table(tables.additions)} (group_id, members) SELECT id, %s FROM g) "
            f"INSERT INTO {quote_table(tables.members)} (message_id, group_id, outcome, nested) "
            "SELECT u.id, g.id, 0, %s FROM g, unnest(%s::uuid[]) AS u(id)"
        )
        return execute(connection, sql, (group, len(ids), nested, list(ids)))

    def end(self, connection: Any, tables: GroupTables, ids: Sequence[uuid.UUID], outcome: int) -> list[EndedIn]:
        members = quote_table(tables.members)
        verb = f"UPDATE {members} SET outcome = {int(outcome)}" if outcome else f"DELETE FROM {members}"
        # Primary key, then the index on group, outcome and id, from its end. Safe: the aggregate reads all of ``ended``
        # before the first row is locked, so nothing is waited for while one is; a row that was ended since the snapshot
        # is skipped. Without NOT ANY it would be one of those ended here.
        sql = (
            f"WITH ended AS ({verb} WHERE message_id = ANY(%s) AND outcome = 0 RETURNING group_id) "
            f"SELECT g.group_id, (SELECT true FROM {members} AS m WHERE m.group_id = g.group_id AND m.outcome = 0 "
            "AND NOT m.nested AND NOT (m.message_id = ANY(%s)) ORDER BY m.message_id DESC LIMIT 1 "
            "FOR UPDATE SKIP LOCKED) FROM (SELECT group_id FROM ended GROUP BY group_id) AS g"
        )
        rows = self._guard.fetch(connection, sql, (list(ids), list(ids)))
        return [EndedIn(as_uuid(group), bool(found)) for group, found in rows]

    def lock(self, connection: Any, tables: GroupTables, group: uuid.UUID) -> LockedGroup | None:
        # Primary key. Waits for the end of another member that was one of the last, and for adders.
        sql = f"SELECT parent, completed_at IS NOT NULL FROM {quote_table(tables.groups)} WHERE id = %s FOR UPDATE"
        rows = fetch(connection, sql, (group,))
        return LockedGroup(None if rows[0][0] is None else as_uuid(rows[0][0]), rows[0][1]) if rows else None

    def is_waiting(self, connection: Any, tables: GroupTables, group: uuid.UUID) -> bool:
        # The index on group, outcome and id. Safe: under READ COMMITTED the snapshot is that of this statement, which
        # runs after the lock was granted; what another transaction is ending is still seen waiting.
        sql = f"SELECT EXISTS (SELECT 1 FROM {quote_table(tables.members)} WHERE group_id = %s AND outcome = 0)"
        return bool(fetch(connection, sql, (group,))[0][0])
