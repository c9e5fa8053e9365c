"""PostgreSQL: results of tasks. The outcomes of a batch come as arrays and are joined to the rows that their own ack
deletes."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from ..database import ListenerConnection
from ..results import CeleryResults, ChordCount, ChordPart, Outcome, TaskResults, TaskState
from .database import PostgresqlListener
from .raw.cursor import execute, fetch
from .statements import Statements, quote_table

_TYPES = {
    "seq": "bigint",
    "id": "uuid",
    "task": "text",
    "queue_name": "text",
    "backend": "text",
    "first_started": "timestamptz",
    "started_us": "bigint",
    "finished_us": "bigint",
    "return_value": "text",
    "errors": "text",
    "worker_ids": "text",
    "headers": "text",
    "body": "bytea",
    "enqueued_at": "timestamptz",
}
#: The fields that a worker supplies for a message that still exists.
_SUPPLIED = tuple(name for name in _TYPES if name not in ("id", "headers", "body", "enqueued_at"))
_STORED = (
    "id, headers, body, enqueued_at, task, queue_name, backend, status, return_value, errors, worker_ids, started_at, "
    "last_attempted_at, finished_at"
)
_VALUES = (
    "id, headers, body, enqueued_at, task, queue_name, backend, 'SUCCESSFUL', return_value, errors, worker_ids, "
    "coalesce(first_started, statement_timestamp() - started_us * interval '1 microsecond'), "
    "statement_timestamp() - started_us * interval '1 microsecond', statement_timestamp() - finished_us * interval '1 "
    "microsecond'"
)
_OVER = ", ".join(f"{name} = excluded.{name}" for name in _STORED.split(", ")[1:])


class PostgresqlTaskResults(Statements, TaskResults):
    """Results of outcome queue's tasks."""

    def ack_and_store(
        self,
        connection: Any,
        results: str,
        outcomes: Sequence[Outcome],
        token: uuid.UUID,
        wait_ms: int | None = None,
    ) -> list[int]:
        c = self._c
        seqs = [outcome.seq for outcome in outcomes]
        given = f"unnest({', '.join(f'%s::{_TYPES[name]}[]' for name in _SUPPLIED)}) AS g({', '.join(_SUPPLIED)})"
        params: list[Any] = [[getattr(outcome, name) for outcome in outcomes] for name in _SUPPLIED]
        where = f"q.{c['seq']} = g.seq AND {self._fenced}"
        params.append(token)
        if wait_ms is not None:
            where += (
                f" AND q.{c['seq']} = ANY(ARRAY(SELECT {c['seq']} FROM {self._q} WHERE {c['seq']} = ANY(%s) "
                f"AND {self._fenced} FOR UPDATE SKIP LOCKED))"
            )
            params += [seqs, token]
            execute(connection, "SELECT set_config('lock_timeout', %s, true)", (f"{max(1, wait_ms)}ms",))
        # Primary keys: one seek a key, in the order of the array, so that two acks never lock rows in opposite
        # orders; the token fences, and a message that it excludes gets no result. A copied message has the id of
        # another one, and one statement may write only one row of an id.
        sql = (
            f"WITH gone AS (DELETE FROM {self._q} AS q USING {given} WHERE {where} RETURNING q.{c['id']} AS id, "
            f"q.{c['headers']} AS headers, q.{c['body']} AS body, q.{c['enqueued_at']} AS enqueued_at, g.*), "
            f"kept AS (INSERT INTO {quote_table(results)} ({_STORED}) SELECT DISTINCT ON (id) {_VALUES} FROM gone "
            f"ORDER BY id, seq DESC ON CONFLICT (id) DO UPDATE SET {_OVER}) SELECT seq FROM gone"
        )
        return [seq for (seq,) in self._guard.fetch_by_key(connection, sql, params)]

    def store(self, connection: Any, results: str, outcome: Outcome) -> None:
        names = [name for name in Outcome._fields if name != "enqueued_at" or outcome.enqueued_at is not None]
        given = ", ".join(f"%s::{_TYPES[name]} AS {name}" for name in names)
        if "enqueued_at" not in names:
            given += ", clock_timestamp() AS enqueued_at"
        # Primary key. Safe: the caller's transaction; of two writers of one id the second waits and overwrites.
        sql = (
            f"INSERT INTO {quote_table(results)} ({_STORED}) SELECT {_VALUES} FROM (SELECT {given}) AS g "
            f"ON CONFLICT (id) DO UPDATE SET {_OVER}"
        )
        execute(connection, sql, [getattr(outcome, name) for name in names])


# -- Celery --------------------------------------------------------------------------------------------------

CHANNEL = "queueapp_results"
#: A lock that every listener holds shared: "qresults".
_WAITING = 0x71726573756C7473
_TEXTS = ("result", "traceback", "children", "args", "kwargs", "meta")
_NAMES = ("name", "worker", "queue")
_ALWAYS = ("status", "result", "traceback", "children", "meta", "retries", "date_done", "expires_at")
_LATER = "statement_timestamp() + %s * interval '1 ms'"


class PostgresqlResultsListener(PostgresqlListener):
    """LISTEN, and a shared lock that shows senders that there is a listener."""

    def listen(self) -> None:
        super().listen()
        # No index. Safe: a sender that tries the lock releases it at once, so this waits no longer than one
        # statement.
        self._execute(f"SELECT pg_advisory_lock_shared({_WAITING})")


class PostgresqlCeleryResults(CeleryResults):
    """The tables of Celery's results."""

    def store_result(self, connection: Any, results: str, state: TaskState) -> bool:
        table = quote_table(results)
        columns = ("task_id", "status", "retries", *_TEXTS, *_NAMES, "created_at", "date_done", "expires_at")
        values = ["%s"] * (len(columns) - 3)
        values += ["statement_timestamp()", "statement_timestamp()" if state.done else "NULL", _LATER]
        over = [f"{name} = excluded.{name}" for name in _ALWAYS]
        over += [f"{name} = coalesce(nullif(excluded.{name}, ''), r.{name})" for name in _NAMES]
        over += [f"{name} = coalesce(excluded.{name}, r.{name})" for name in ("args", "kwargs")]
        # NOTIFY takes a cluster-wide lock at commit, so it is sent only if there is a listener, which holds a lock
        # shared: if the exclusive lock is granted, there is none. Two senders that try at once notify needlessly.
        notify = (
            f"CASE WHEN pg_try_advisory_lock({_WAITING}) THEN pg_advisory_unlock({_WAITING})::text "
            f"ELSE pg_notify('{CHANNEL}', r.task_id)::text END"
        )
        # The unique index on the task's id. Safe: of two writers of one task the second waits and sees what the
        # first wrote.
        sql = (
            f"INSERT INTO {table} AS r ({', '.join(columns)}) VALUES ({', '.join(values)}) "
            f"ON CONFLICT (task_id) DO UPDATE SET {', '.join(over)} WHERE r.status <> 'SUCCESS' "
            f"RETURNING {notify if state.done else '1'}"
        )
        params = [state.task_id, state.status, state.retries]
        params += [getattr(state, name) for name in (*_TEXTS, *_NAMES)]
        return bool(fetch(connection, sql, [*params, state.expires_ms]))

    def count_part(
        self, connection: Any, groups: str, parts: str, part: ChordPart, expires_ms: int | None
    ) -> ChordCount:
        # The unique indexes on the part and on the group. Safe: of two sessions that count the same part the second
        # waits and counts nothing; the group's row is locked to the end of the transaction. Parts of a chord that is
        # over are deleted with it, so a later part is inserted again, and deleted by the caller that sees that it is
        # over.
        sql = (
            f"WITH part AS (INSERT INTO {quote_table(parts)} (group_id, task_id, position, status, result) "
            "VALUES (%s, %s, %s, %s, %s) ON CONFLICT (group_id, task_id, position) DO NOTHING RETURNING 1) "
            f"INSERT INTO {quote_table(groups)} AS g (group_id, counted, expires_at) "
            f"VALUES (%s, (SELECT count(*) FROM part), {_LATER}) ON CONFLICT (group_id) DO UPDATE SET "
            "counted = g.counted + CASE WHEN g.is_over THEN 0 ELSE excluded.counted END, expires_at = "
            "excluded.expires_at RETURNING counted, size, added, is_over"
        )
        return ChordCount(*fetch(connection, sql, (*part, part.group_id, expires_ms))[0])

    def set_size(self, connection: Any, groups: str, group_id: str, size: int, expires_ms: int | None) -> None:
        # The unique index on the group. Safe: a concurrent count of a member waits for it, or came before.
        sql = (
            f"INSERT INTO {quote_table(groups)} AS g (group_id, size, expires_at) VALUES (%s, %s, {_LATER}) "
            "ON CONFLICT (group_id) DO UPDATE SET size = excluded.size, expires_at = excluded.expires_at, is_over = "
            "false, "
            "counted = CASE WHEN g.is_over THEN 0 ELSE g.counted END, added = CASE WHEN g.is_over THEN 0 ELSE g.added "
            "END"
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

    def listener(self, connection: Any) -> ListenerConnection | None:
        return PostgresqlResultsListener(connection, CHANNEL)

    def notify_waiting(self, connection: Any, payload: str) -> None:
        execute(connection, "SELECT pg_notify(%s, %s)", (CHANNEL, payload))
