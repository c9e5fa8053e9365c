"""SQL Server: results of tasks. The messages are deleted first, and their outcomes come back as one JSON document."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from ..database import ListenerConnection
from ..results import CeleryResults, ChordCount, ChordPart, Outcome, TaskResults, TaskState
from .key_locks import EXISTING, insert_locked, lock_keys_of
from .statements import (
    KEYS,
    LATER,
    TAKING,
    Json,
    Statements,
    execute,
    fetch,
    fetch_within,
    guid,
    in_json,
    json_of,
    later_params,
    quote_table,
)

_TYPES = {
    "id": "uniqueidentifier", "task": "nvarchar(500)", "queue_name": "nvarchar(200)", "backend": "nvarchar(200)",
    "first_started": "datetime2", "started_us": "bigint", "finished_us": "bigint", "return_value": "nvarchar(max)",
    "errors": "nvarchar(max)", "worker_ids": "nvarchar(max)", "headers": "nvarchar(max)", "body": "varchar(max)",
    "enqueued_at": "datetime2",
}  # fmt: skip
#: DATEADD takes an int, which the microseconds of an hour exceed.
_AGO = "DATEADD(microsecond, -(r.[{0}] %% 1000000), DATEADD(second, -(r.[{0}] / 1000000), SYSUTCDATETIME()))"
#: A body is hex in JSON, which has no bytes.
_VALUES = {
    "headers": "r.[headers]",
    "body": "CONVERT(varbinary(max), r.[body], 2)",
    "enqueued_at": "COALESCE(r.[enqueued_at], SYSUTCDATETIME())",
    "task": "r.[task]",
    "queue_name": "r.[queue_name]",
    "backend": "r.[backend]",
    "status": "N'SUCCESSFUL'",
    "return_value": "r.[return_value]",
    "errors": "r.[errors]",
    "worker_ids": "r.[worker_ids]",
    "started_at": f"COALESCE(r.[first_started], {_AGO.format('started_us')})",
    "last_attempted_at": _AGO.format("started_us"),
    "finished_at": _AGO.format("finished_us"),
}
_GIVEN = "OPENJSON(%s) WITH ([n] int '$[0]', " + ", ".join(
    f"[{name}] {kind} '$[{n}]'" for n, (name, kind) in enumerate(_TYPES.items(), 1)
) + ") AS r"  # fmt: skip


class SqlServerTaskResults(Statements, TaskResults):
    """Results of one queue's tasks."""

    def ack_and_store(
        self,
        connection: Any,
        results: str,
        outcomes: Sequence[Outcome],
        token: uuid.UUID,
        wait_ms: int | None = None,
    ) -> list[int]:
        c = self._c
        returned = ", ".join(f"deleted.{c[name]}" for name in ("seq", "id", "headers", "body", "enqueued_at"))
        # Index: the primary key, one seek a key (KEYS), ascending, so two acks never lock rows in opposite orders.
        # Safe: the token fences, a stale one changes nothing.
        hint = "ROWLOCK" if wait_ms is None else TAKING
        sql = (
            f"DELETE q OUTPUT {returned} {KEYS} {self._q} AS q WITH ({hint}) ON q.{c['seq']} = k.[key] "
            f"WHERE q.{c['lease_token']} = %s"
        )
        params = (json_of([outcome.seq for outcome in outcomes]), token)
        by_seq = {outcome.seq: outcome for outcome in outcomes}
        rows = fetch(connection, sql, params) if wait_ms is None else fetch_within(connection, wait_ms, sql, params)
        gone = [
            by_seq[seq]._replace(id=uuid.UUID(bytes=guid(key)), headers=headers, body=body, enqueued_at=enqueued_at)
            for seq, key, headers, body, enqueued_at in rows
        ]
        # A copied message has the id of another one.
        self._store(connection, results, list({outcome.id: outcome for outcome in gone}.values()))
        return sorted(outcome.seq for outcome in gone)

    def store(self, connection: Any, results: str, outcome: Outcome) -> None:
        self._store(connection, results, [outcome])

    @staticmethod
    def _store(connection: Any, results: str, outcomes: Sequence[Outcome]) -> None:
        if not outcomes:
            return
        table = quote_table(results)
        rows = [[n, *(in_json(getattr(outcome, name)) for name in _TYPES)] for n, outcome in enumerate(outcomes)]
        given = Json(json.dumps(rows, separators=(",", ":")))
        lock_keys_of(connection, results, (outcome.id for outcome in outcomes))
        # Index: the primary key. Safe: under the locks of the ids, so of two transactions that store the same one the
        # second waits and then overwrites it.
        values = ", ".join(f"[{name}] = {value}" for name, value in _VALUES.items())
        execute(
            connection,
            f"UPDATE t SET {values} FROM {_GIVEN} INNER LOOP JOIN {table} AS t WITH ({EXISTING}) ON t.[id] = r.[id]",
            (given,),
        )
        execute(
            connection,
            f"INSERT INTO {table} ([id], {', '.join(f'[{name}]' for name in _VALUES)}) "
            f"SELECT r.[id], {', '.join(_VALUES.values())} FROM {_GIVEN} "
            f"WHERE NOT EXISTS (SELECT 1 FROM {table} AS t WITH ({EXISTING}) WHERE t.[id] = r.[id])",
            (given,),
        )


# -- Celery --------------------------------------------------------------------------------------------------

_CELERY_TYPES = {
    "status": "nvarchar(50)", "retries": "int", "result": "nvarchar(max)", "traceback": "nvarchar(max)",
    "children": "nvarchar(max)", "args": "nvarchar(max)", "kwargs": "nvarchar(max)", "meta": "nvarchar(max)",
    "name": "nvarchar(255)", "worker": "nvarchar(255)", "queue": "nvarchar(255)",
}  # fmt: skip
_CELERY_GIVEN = (
    "OPENJSON(%s) WITH (" + ", ".join(f"[{name}] {kind} '$.{name}'" for name, kind in _CELERY_TYPES.items()) + ") AS s"
)
#: Unknown values keep what was stored.
_CELERY_STORED = {
    **{name: f"COALESCE(NULLIF(s.[{name}], N''), r.[{name}])" for name in ("name", "worker", "queue")},
    **{name: f"COALESCE(s.[{name}], r.[{name}])" for name in ("args", "kwargs")},
}
_CELERY_OVER = ", ".join(f"[{name}] = {_CELERY_STORED.get(name, f's.[{name}]')}" for name in _CELERY_TYPES)


class SqlServerCeleryResults(CeleryResults):
    """The tables of Celery's results."""

    def store_result(self, connection: Any, results: str, state: TaskState) -> bool:
        table = quote_table(results)
        given = Json(json.dumps({name: getattr(state, name) for name in _CELERY_TYPES}))
        done = "SYSUTCDATETIME()" if state.done else "NULL"
        later, later_values = _later(state.expires_ms)
        # Index: the unique one on the task's id. Safe: the row is locked to the end of the transaction. Where there is
        # none, another session may insert it before the second statement has the lock of the id: then it is updated.
        update = (
            f"UPDATE r SET {_CELERY_OVER}, [date_done] = {done}, [expires_at] = {later} FROM {_CELERY_GIVEN} "
            f"INNER JOIN {table} AS r WITH ({EXISTING}) ON r.[task_id] = %s WHERE r.[status] <> N'SUCCESS'"
        )
        changed = (*later_values, given, state.task_id)
        if execute(connection, update, changed):
            return True
        # Index: the same. Safe: under the lock of the id.
        insert = (
            f"INSERT INTO {table} ([task_id], {', '.join(f'[{name}]' for name in _CELERY_TYPES)}, [created_at], "
            "[date_done], "
            f"[expires_at]) SELECT %s, {', '.join(f's.[{name}]' for name in _CELERY_TYPES)}, SYSUTCDATETIME(), {done}, "
            f"{later} "
            f"FROM {_CELERY_GIVEN} WHERE NOT EXISTS (SELECT 1 FROM {table} AS r WITH ({EXISTING}) WHERE r.[task_id] = "
            "%s)"
        )
        if insert_locked(connection, results, state.task_id, insert, (state.task_id, *changed)):
            return True
        return bool(execute(connection, update, changed))

    def count_part(
        self, connection: Any, groups: str, parts: str, part: ChordPart, expires_ms: int | None
    ) -> ChordCount:
        table = quote_table(parts)
        given = Json(json.dumps({"status": part.status, "result": part.result}))
        # Index: the unique one on the part. Safe: under the lock of its group, so who counts the same part waits for
        # who was first. The group's row is locked next in any case.
        sql = (
            f"INSERT INTO {table} ([group_id], [task_id], [position], [status], [result]) "
            "SELECT %s, %s, %s, s.[status], s.[result] FROM OPENJSON(%s) WITH ([status] nvarchar(50) '$.status', "
            f"[result] nvarchar(max) '$.result') AS s WHERE NOT EXISTS (SELECT 1 FROM {table} AS p WITH ({EXISTING}) "
            "WHERE p.[group_id] = %s AND p.[task_id] = %s AND p.[position] = %s)"
        )
        key = (part.group_id, part.task_id, part.position)
        new = insert_locked(connection, groups, part.group_id, sql, (*key, given, *key))
        self._upsert(
            connection, groups, part.group_id, expires_ms,
            {"counted": (f"[counted] + CASE WHEN [is_over] = 1 THEN 0 ELSE {new} END", str(new), ())},
        )  # fmt: skip
        # Index: the unique one on the group. Safe: the row is locked by the statement before.
        sql = (
            f"SELECT g.[counted], g.[size], g.[added], g.[is_over] FROM {quote_table(groups)} AS g WHERE g.[group_id] "
            "= %s"
        )
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

    def listener(self, connection: Any) -> ListenerConnection | None:
        return None  # Service Broker's ears are the workers': each of them would wake for every result

    def notify_waiting(self, connection: Any, payload: str) -> None:
        """There are no listeners."""

    @staticmethod
    def _upsert(
        connection: Any, groups: str, group_id: str, expires_ms: int | None, columns: dict[str, tuple[str, str, Any]]
    ) -> None:
        """``columns``: name -> (what an update makes of it, what an insert does, the parameters of either)."""
        table = quote_table(groups)
        later, later_values = _later(expires_ms)
        params = [value for _, _, given in columns.values() for value in given]
        # Index: the unique one on the group. Safe: the row is locked to the end of the transaction.
        sql = (
            f"UPDATE g SET {', '.join(f'[{name}] = {old}' for name, (old, _, _) in columns.items())}, "
            f"[expires_at] = {later} FROM {table} AS g WITH ({EXISTING}) WHERE g.[group_id] = %s"
        )
        if execute(connection, sql, (*params, *later_values, group_id)):
            return
        # Index: the same. Safe: under the lock of the group. A row that was put in between is changed after all.
        insert = (
            f"INSERT INTO {table} ([group_id], {', '.join(f'[{name}]' for name in columns)}, [expires_at]) "
            f"SELECT %s, {', '.join(new for _, new, _ in columns.values())}, {later} "
            f"WHERE NOT EXISTS (SELECT 1 FROM {table} AS g WITH ({EXISTING}) WHERE g.[group_id] = %s)"
        )
        if not insert_locked(connection, groups, group_id, insert, (group_id, *params, *later_values, group_id)):
            execute(connection, sql, (*params, *later_values, group_id))


def _later(ms: int | None) -> tuple[str, tuple[int, ...]]:
    return ("NULL", ()) if ms is None else (LATER, later_params(ms))
