"""SQL Server: Celery's results. What may be NULL comes as one JSON document."""

from __future__ import annotations

import json
from typing import Any

from ..notifications import ListenerConnection
from ..results import ChordCount, ChordPart, TaskState
from .locking import KEEPING
from .session import LATER, Json, execute, fetch, later_params, quote_table

_TYPES = {
    "status": "nvarchar(50)", "retries": "int", "result": "nvarchar(max)", "traceback": "nvarchar(max)",
    "children": "nvarchar(max)", "args": "nvarchar(max)", "kwargs": "nvarchar(max)", "meta": "nvarchar(max)",
    "name": "nvarchar(255)", "worker": "nvarchar(255)", "queue": "nvarchar(255)",
}  # fmt: skip
_GIVEN = "OPENJSON(%s) WITH (" + ", ".join(f"[{name}] {kind} '$.{name}'" for name, kind in _TYPES.items()) + ") AS s"
#: What is not known now is left as it was.
_KEPT = {
    **{name: f"COALESCE(NULLIF(s.[{name}], N''), r.[{name}])" for name in ("name", "worker", "queue")},
    **{name: f"COALESCE(s.[{name}], r.[{name}])" for name in ("args", "kwargs")},
}
_OVER = ", ".join(f"[{name}] = {_KEPT.get(name, f's.[{name}]')}" for name in _TYPES)


class SqlServerCeleryResults:
    """The tables of Celery's results."""

    def store_result(self, connection: Any, results: str, stored: TaskState) -> bool:
        table = quote_table(results)
        given = Json(json.dumps({name: getattr(stored, name) for name in _TYPES}))
        done = "SYSUTCDATETIME()" if stored.done else "NULL"
        later, later_values = _later(stored.expires_ms)
        # Index: the unique one on the task's id. Safe: KEEPING, to the end of the transaction. Without one somebody may insert it
        # between the two statements: then it is changed after all.
        update = (
            f"UPDATE r SET {_OVER}, [date_done] = {done}, [expires_at] = {later} FROM {_GIVEN} "
            f"INNER JOIN {table} AS r WITH ({KEEPING}) ON r.[task_id] = %s WHERE r.[status] <> N'SUCCESS'"
        )
        changed = (*later_values, given, stored.task_id)
        if execute(connection, update, changed):
            return True
        # Index: the same. Safe: the same.
        insert = (
            f"INSERT INTO {table} ([task_id], {', '.join(f'[{name}]' for name in _TYPES)}, [created_at], [date_done], "
            f"[expires_at]) SELECT %s, {', '.join(f's.[{name}]' for name in _TYPES)}, SYSUTCDATETIME(), {done}, {later} "
            f"FROM {_GIVEN} WHERE NOT EXISTS (SELECT 1 FROM {table} AS r WITH ({KEEPING}) WHERE r.[task_id] = %s)"
        )
        if execute(connection, insert, (stored.task_id, *changed)):
            return True
        return bool(execute(connection, update, changed))

    def count_part(
        self, connection: Any, groups: str, parts: str, part: ChordPart, expires_ms: int | None
    ) -> ChordCount:
        table = quote_table(parts)
        given = Json(json.dumps({"status": part.status, "result": part.result}))
        # Index: the unique one on the part. Safe: KEEPING, so who counts the same part waits for who was first.
        sql = (
            f"INSERT INTO {table} ([group_id], [task_id], [position], [status], [result]) "
            "SELECT %s, %s, %s, s.[status], s.[result] FROM OPENJSON(%s) WITH ([status] nvarchar(50) '$.status', "
            f"[result] nvarchar(max) '$.result') AS s WHERE NOT EXISTS (SELECT 1 FROM {table} AS p WITH ({KEEPING}) "
            "WHERE p.[group_id] = %s AND p.[task_id] = %s AND p.[position] = %s)"
        )
        key = (part.group_id, part.task_id, part.position)
        new = execute(connection, sql, (*key, given, *key))
        self._upsert(
            connection, groups, part.group_id, expires_ms,
            {"counted": (f"[counted] + CASE WHEN [is_over] = 1 THEN 0 ELSE {new} END", str(new), ())},
        )  # fmt: skip
        # Index: the unique one on the group. Safe: the row is locked by the statement before.
        sql = f"SELECT g.[counted], g.[size], g.[added], g.[is_over] FROM {quote_table(groups)} AS g WHERE g.[group_id] = %s"
        counted, size, added, is_over = fetch(connection, sql, (part.group_id,))[0]
        return ChordCount(counted, size, added, bool(is_over))

    def set_size(self, connection: Any, groups: str, group_id: str, size: int, expires_ms: int | None) -> None:
        anew = {name: (f"CASE WHEN [is_over] = 1 THEN 0 ELSE [{name}] END", "0", ()) for name in ("counted", "added")}
        self._upsert(
            connection, groups, group_id, expires_ms, {**anew, "is_over": ("0", "0", ()), "size": ("%s", "%s", (size,))}
        )

    def add_to_size(self, connection: Any, groups: str, group_id: str, expires_ms: int | None) -> None:
        self._upsert(connection, groups, group_id, expires_ms, {"added": ("[added] + 1", "1", ())})

    def save_group(self, connection: Any, groups: str, group_id: str, result: str, expires_ms: int | None) -> None:
        self._upsert(connection, groups, group_id, expires_ms, {"result": ("%s", "%s", (result,))})

    def ear_for_results(self, connection: Any) -> ListenerConnection | None:
        return None  # Service Broker's ears are the workers': each of them would wake for every result

    def tell_waiting(self, connection: Any, told: str) -> None:
        """There is nobody."""

    @staticmethod
    def _upsert(
        connection: Any, groups: str, group_id: str, expires_ms: int | None, columns: dict[str, tuple[str, str, Any]]
    ) -> None:
        """``columns``: name -> (what an update makes of it, what an insert does, the parameters of either)."""
        table = quote_table(groups)
        later, later_values = _later(expires_ms)
        params = [value for _, _, given in columns.values() for value in given]
        # Index: the unique one on the group. Safe: KEEPING, to the end of the transaction.
        sql = (
            f"UPDATE g SET {', '.join(f'[{name}] = {old}' for name, (old, _, _) in columns.items())}, "
            f"[expires_at] = {later} FROM {table} AS g WITH ({KEEPING}) WHERE g.[group_id] = %s"
        )
        if execute(connection, sql, (*params, *later_values, group_id)):
            return
        # Index: the same. Safe: the same. One that was put in between is changed after all.
        insert = (
            f"INSERT INTO {table} ([group_id], {', '.join(f'[{name}]' for name in columns)}, [expires_at]) "
            f"SELECT %s, {', '.join(new for _, new, _ in columns.values())}, {later} "
            f"WHERE NOT EXISTS (SELECT 1 FROM {table} AS g WITH ({KEEPING}) WHERE g.[group_id] = %s)"
        )
        if not execute(connection, insert, (group_id, *params, *later_values, group_id)):
            execute(connection, sql, (*params, *later_values, group_id))


def _later(ms: int | None) -> tuple[str, tuple[int, ...]]:
    return ("NULL", ()) if ms is None else (LATER, later_params(ms))
