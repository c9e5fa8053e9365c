"""PostgreSQL: the outcomes of a batch come as arrays and are joined to the rows that their own ack deletes."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from ..results import Outcome
from ..tables import QueueTable
from .index_order import IndexOrder
from .session import execute, quote_table

_TYPES = {
    "seq": "bigint", "id": "uuid", "task": "text", "queue_name": "text", "backend": "text", "first_started": "timestamptz",
    "started_us": "bigint", "finished_us": "bigint", "return_value": "text", "errors": "text", "worker_ids": "text",
    "headers": "text", "body": "bytea", "enqueued_at": "timestamptz",
}  # fmt: skip
#: What a worker tells of a message that is still there.
_TOLD = tuple(name for name in _TYPES if name not in ("id", "headers", "body", "enqueued_at"))
_KEPT = (
    "id, headers, body, enqueued_at, task, queue_name, backend, status, return_value, errors, worker_ids, started_at, "
    "last_attempted_at, finished_at"
)
_VALUES = (
    "id, headers, body, enqueued_at, task, queue_name, backend, 'SUCCESSFUL', return_value, errors, worker_ids, "
    "coalesce(first_started, statement_timestamp() - started_us * interval '1 microsecond'), "
    "statement_timestamp() - started_us * interval '1 microsecond', statement_timestamp() - finished_us * interval '1 microsecond'"
)
_OVER = ", ".join(f"{name} = excluded.{name}" for name in _KEPT.split(", ")[1:])


class PostgresqlResults:
    """The verbs of one queue; ``_q`` and ``_c`` are its names, quoted."""

    table: QueueTable
    _q: str
    _c: dict[str, str]
    _in_order: IndexOrder
    _fenced: str

    def ack_and_keep(
        self,
        connection: Any,
        results: str,
        outcomes: Sequence[Outcome],
        token: uuid.UUID,
        wait_ms: int | None = None,
    ) -> list[int]:
        c = self._c
        seqs = [one.seq for one in outcomes]
        given = f"unnest({', '.join(f'%s::{_TYPES[name]}[]' for name in _TOLD)}) AS g({', '.join(_TOLD)})"
        params: list[Any] = [[getattr(one, name) for one in outcomes] for name in _TOLD]
        where = f"q.{c['seq']} = g.seq AND {self._fenced}"
        params.append(token)
        if wait_ms is not None:
            where += (
                f" AND q.{c['seq']} = ANY(ARRAY(SELECT {c['seq']} FROM {self._q} WHERE {c['seq']} = ANY(%s) "
                f"AND {self._fenced} FOR UPDATE SKIP LOCKED))"
            )
            params += [seqs, token]
            execute(connection, "SELECT set_config('lock_timeout', %s, true)", (f"{max(1, wait_ms)}ms",))
        # Primary keys: one seek a key, in the order of the array, so that two acks never lock rows in opposite orders; the token
        # fences, and what it keeps out has no result. A message that somebody copied has the id of another one, of which a
        # statement may write one row only.
        sql = (
            f"WITH gone AS (DELETE FROM {self._q} AS q USING {given} WHERE {where} RETURNING q.{c['id']} AS id, "
            f"q.{c['headers']} AS headers, q.{c['body']} AS body, q.{c['enqueued_at']} AS enqueued_at, g.*), "
            f"kept AS (INSERT INTO {quote_table(results)} ({_KEPT}) SELECT DISTINCT ON (id) {_VALUES} FROM gone "
            f"ORDER BY id, seq DESC ON CONFLICT (id) DO UPDATE SET {_OVER}) SELECT seq FROM gone"
        )
        return [seq for (seq,) in self._in_order.fetch_by_key(connection, sql, params)]

    def keep(self, connection: Any, results: str, outcome: Outcome) -> None:
        names = [name for name in Outcome._fields if name != "enqueued_at" or outcome.enqueued_at is not None]
        given = ", ".join(f"%s::{_TYPES[name]} AS {name}" for name in names)
        if "enqueued_at" not in names:
            given += ", clock_timestamp() AS enqueued_at"
        # Primary key. Safe: the caller's transaction; of two writers of one id the second waits and overwrites.
        sql = (
            f"INSERT INTO {quote_table(results)} ({_KEPT}) SELECT {_VALUES} FROM (SELECT {given}) AS g "
            f"ON CONFLICT (id) DO UPDATE SET {_OVER}"
        )
        execute(connection, sql, [getattr(outcome, name) for name in names])
