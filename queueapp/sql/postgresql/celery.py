"""PostgreSQL: Celery's results, one statement a verb."""

from __future__ import annotations

from typing import Any

from ..notifications import ListenerConnection
from ..results import ChordCount, ChordPart, TaskState
from .session import execute, fetch, quote_table
from .wakeups import PostgresqlEar

CHANNEL = "queueapp_results"
#: Held shared by everybody who listens there: "qresults".
_WAITING = 0x71726573756C7473

_TEXTS = ("result", "traceback", "children", "args", "kwargs", "meta")
_NAMES = ("name", "worker", "queue")
_ALWAYS = ("status", "result", "traceback", "children", "meta", "retries", "date_done", "expires_at")
_LATER = "statement_timestamp() + %s * interval '1 ms'"


class PostgresqlResultsEar(PostgresqlEar):
    """LISTEN, and a lock by which whoever ends a task knows that somebody does."""

    def listen(self) -> None:
        super().listen()
        # No index. Safe: whoever tries the lock gives it back at once, so nobody waits here for longer than a statement.
        self._execute(f"SELECT pg_advisory_lock_shared({_WAITING})")


class PostgresqlCeleryResults:
    """The tables of Celery's results."""

    def store_result(self, connection: Any, results: str, stored: TaskState) -> bool:
        table = quote_table(results)
        columns = ("task_id", "status", "retries", *_TEXTS, *_NAMES, "created_at", "date_done", "expires_at")
        values = ["%s"] * (len(columns) - 3)
        values += ["statement_timestamp()", "statement_timestamp()" if stored.done else "NULL", _LATER]
        over = [f"{name} = excluded.{name}" for name in _ALWAYS]
        over += [f"{name} = coalesce(nullif(excluded.{name}, ''), r.{name})" for name in _NAMES]
        over += [f"{name} = coalesce(excluded.{name}, r.{name})" for name in ("args", "kwargs")]
        # NOTIFY takes a cluster-wide lock at commit, so it is sent only where somebody listens, which holds a lock shared: who
        # can have it alone, for an instant, is alone. Two that try at once tell for nothing.
        tell = (
            f"CASE WHEN pg_try_advisory_lock({_WAITING}) THEN pg_advisory_unlock({_WAITING})::text "
            f"ELSE pg_notify('{CHANNEL}', r.task_id)::text END"
        )
        # The unique index on the task's id. Safe: of two writers of one task the second waits and sees what the first wrote.
        sql = (
            f"INSERT INTO {table} AS r ({', '.join(columns)}) VALUES ({', '.join(values)}) "
            f"ON CONFLICT (task_id) DO UPDATE SET {', '.join(over)} WHERE r.status <> 'SUCCESS' "
            f"RETURNING {tell if stored.done else '1'}"
        )
        params = [stored.task_id, stored.status, stored.retries]
        params += [getattr(stored, name) for name in (*_TEXTS, *_NAMES)]
        return bool(fetch(connection, sql, [*params, stored.expires_ms]))

    def count_part(
        self, connection: Any, groups: str, parts: str, part: ChordPart, expires_ms: int | None
    ) -> ChordCount:
        # The unique indexes on the part and on the group. Safe: who counts the same part waits for who was first and then counts
        # nothing; the group's row is locked to the end of the transaction. Parts of a chord that is over are deleted with
        # it, so one that comes after that is put in anew, and whoever sees that it is over deletes it.
        sql = (
            f"WITH part AS (INSERT INTO {quote_table(parts)} (group_id, task_id, position, status, result) "
            "VALUES (%s, %s, %s, %s, %s) ON CONFLICT (group_id, task_id, position) DO NOTHING RETURNING 1) "
            f"INSERT INTO {quote_table(groups)} AS g (group_id, counted, expires_at) "
            f"VALUES (%s, (SELECT count(*) FROM part), {_LATER}) ON CONFLICT (group_id) DO UPDATE SET "
            "counted = g.counted + CASE WHEN g.is_over THEN 0 ELSE excluded.counted END, expires_at = excluded.expires_at "
            "RETURNING counted, size, added, is_over"
        )
        return ChordCount(*fetch(connection, sql, (*part, part.group_id, expires_ms))[0])

    def set_size(self, connection: Any, groups: str, group_id: str, size: int, expires_ms: int | None) -> None:
        # The unique index on the group. Safe: whoever counts a member meanwhile waits for it, or was before it.
        sql = (
            f"INSERT INTO {quote_table(groups)} AS g (group_id, size, expires_at) VALUES (%s, %s, {_LATER}) "
            "ON CONFLICT (group_id) DO UPDATE SET size = excluded.size, expires_at = excluded.expires_at, is_over = false, "
            "counted = CASE WHEN g.is_over THEN 0 ELSE g.counted END, added = CASE WHEN g.is_over THEN 0 ELSE g.added END"
        )
        execute(connection, sql, (group_id, size, expires_ms))

    def add_to_size(self, connection: Any, groups: str, group_id: str, expires_ms: int | None) -> None:
        # The unique index on the group. Safe: as above.
        sql = (
            f"INSERT INTO {quote_table(groups)} AS g (group_id, added, expires_at) VALUES (%s, 1, {_LATER}) "
            "ON CONFLICT (group_id) DO UPDATE SET added = g.added + 1, expires_at = excluded.expires_at"
        )
        execute(connection, sql, (group_id, expires_ms))

    def save_group(self, connection: Any, groups: str, group_id: str, result: str, expires_ms: int | None) -> None:
        # The unique index on the group. Safe: as above.
        sql = (
            f"INSERT INTO {quote_table(groups)} (group_id, result, expires_at) VALUES (%s, %s, {_LATER}) "
            "ON CONFLICT (group_id) DO UPDATE SET result = excluded.result, expires_at = excluded.expires_at"
        )
        execute(connection, sql, (group_id, result, expires_ms))

    def ear_for_results(self, connection: Any) -> ListenerConnection | None:
        return PostgresqlResultsEar(connection, CHANNEL)

    def tell_waiting(self, connection: Any, told: str) -> None:
        execute(connection, "SELECT pg_notify(%s, %s)", (CHANNEL, told))
