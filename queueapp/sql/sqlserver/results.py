"""SQL Server: the messages are deleted first, and what became of them comes back as one JSON document."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from ..results import Outcome
from ..tables import QueueTable
from .locking import KEEPING, KEYS, TAKING
from .rows import guid
from .session import Json, execute, fetch, fetch_within, in_json, json_of, quote_table

_TYPES = {
    "id": "uniqueidentifier", "task": "nvarchar(500)", "queue_name": "nvarchar(200)", "backend": "nvarchar(200)",
    "first_started": "datetime2", "started_us": "bigint", "finished_us": "bigint", "return_value": "nvarchar(max)",
    "errors": "nvarchar(max)", "worker_ids": "nvarchar(max)", "headers": "nvarchar(max)", "body": "varchar(max)",
    "enqueued_at": "datetime2",
}  # fmt: skip
#: DATEADD takes an int, and the microseconds of an hour are none.
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


class SqlServerResults:
    """The verbs of one queue; ``_q`` and ``_c`` are its names, quoted."""

    table: QueueTable
    _q: str
    _c: dict[str, str]

    def ack_and_keep(
        self,
        connection: Any,
        results: str,
        outcomes: Sequence[Outcome],
        token: uuid.UUID,
        wait_ms: int | None = None,
    ) -> list[int]:
        c = self._c
        returned = ", ".join(f"deleted.{c[name]}" for name in ("seq", "id", "headers", "body", "enqueued_at"))
        # Index: the primary key, one seek a key (KEYS), ascending, so two enders never lock rows in opposite orders. Safe: the
        # token fences, a stale one touches nothing.
        hint = "ROWLOCK" if wait_ms is None else TAKING
        sql = (
            f"DELETE q OUTPUT {returned} {KEYS} {self._q} AS q WITH ({hint}) ON q.{c['seq']} = k.[key] "
            f"WHERE q.{c['lease_token']} = %s"
        )
        params = (json_of([one.seq for one in outcomes]), token)
        by_seq = {one.seq: one for one in outcomes}
        rows = fetch(connection, sql, params) if wait_ms is None else fetch_within(connection, wait_ms, sql, params)
        gone = [
            by_seq[seq]._replace(id=uuid.UUID(bytes=guid(key)), headers=headers, body=body, enqueued_at=enqueued_at)
            for seq, key, headers, body, enqueued_at in rows
        ]
        # A message that somebody copied has the id of another one.
        self._keep(connection, results, list({one.id: one for one in gone}.values()))
        return sorted(one.seq for one in gone)

    def keep(self, connection: Any, results: str, outcome: Outcome) -> None:
        self._keep(connection, results, [outcome])

    @staticmethod
    def _keep(connection: Any, results: str, outcomes: Sequence[Outcome]) -> None:
        if not outcomes:
            return
        table = quote_table(results)
        told = [[n, *(in_json(getattr(one, name)) for name in _TYPES)] for n, one in enumerate(outcomes)]
        given = Json(json.dumps(told, separators=(",", ":")))
        # Index: the primary key. Safe: KEEPING, so of two transactions that keep the same one the second waits and then overwrites
        # it.
        values = ", ".join(f"[{name}] = {value}" for name, value in _VALUES.items())
        execute(
            connection,
            f"UPDATE t SET {values} FROM {_GIVEN} INNER LOOP JOIN {table} AS t WITH ({KEEPING}) ON t.[id] = r.[id]",
            (given,),
        )
        execute(
            connection,
            f"INSERT INTO {table} ([id], {', '.join(f'[{name}]' for name in _VALUES)}) "
            f"SELECT r.[id], {', '.join(_VALUES.values())} FROM {_GIVEN} "
            f"WHERE NOT EXISTS (SELECT 1 FROM {table} AS t WITH ({KEEPING}) WHERE t.[id] = r.[id])",
            (given,),
        )
