"""SQL Server: the journal in one table, ordered by a ``rowversion``.

The horizon is ``MIN_ACTIVE_ROWVERSION()``: no open transaction of this database has a lower one, and those to come get
higher ones. A row version is one number, so the bookmark says nothing more about the order.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from ..journal import COLUMNS, IdColumn, JournalRecord, JournalSql, Partition, Position
from ..message_columns import NO_OPTIONS, SENT, Kind, Outgoing
from .inserts import given
from .statements import LOOKING, MAX_BATCH, Json, aware, execute, fetch, guid, json_of, quote, quote_table, type_of

#: A position as a parameter, and as it is read.
_AT = "CAST(%s AS binary(8))"
_READ = {"txid": "CAST(j.[txid] AS bigint)", "is_barrier": "CAST(j.[is_barrier] AS int)"}
_KEPT = ", ".join(_READ.get(name, f"j.[{name}]") for name in COLUMNS)
_TIMES = [place for place, name in enumerate(COLUMNS) if name in ("published_at", "expires")]
#: A duration before now. DATEADD takes an int, and the milliseconds of 25 days are none.
_EARLIER = "DATEADD(millisecond, -%s, DATEADD(day, -%s, SYSUTCDATETIME()))"


def _earlier(ms: int) -> tuple[int, int]:
    days, rest = divmod(ms, 86_400_000)
    return rest, days


# Index: none, no table is read.
HORIZON = "SELECT CAST(MIN_ACTIVE_ROWVERSION() AS bigint) AS horizon"


class SqlServerJournalSql(JournalSql):
    """SQL Server 2017 and later, and Azure SQL."""

    def __init__(self, table: str) -> None:
        super().__init__(table)
        self._t = quote_table(table)

    # -- the table ------------------------------------------------------------------------------------------------

    def create(self, schema_editor: Any, model: Any) -> None:
        schema_editor.create_model(model)

    def partitions(self, connection: Any) -> list[Partition]:
        return []

    def add_partition(self, connection: Any, days: int, wait_ms: int) -> bool:
        return False

    def lock_partition(self, connection: Any, partition: Partition, wait_ms: int) -> None:
        """There are none."""

    def drop_partition(self, connection: Any, partition: Partition) -> None:
        """There are none."""

    # -- writing --------------------------------------------------------------------------------------------------

    def append(self, connection: Any, topic: str, messages: Sequence[Outgoing], queues: Sequence[str]) -> list[int]:
        if len(messages) == 1:
            return self._append_one(connection, topic, messages[0], queues[0])
        found: list[int] = []
        for first in range(0, len(messages), MAX_BATCH):
            part = slice(first, first + MAX_BATCH)
            found += self._append_some(connection, topic, messages[part], queues[part])
        return found

    def _append_one(self, connection: Any, topic: str, message: Outgoing, queues: str) -> list[int]:
        values: dict[str, tuple[str, tuple[Any, ...]]] = {
            "topic": ("%s", (topic,)),
            "queues": ("%s", (queues,)),
            "message_id": ("%s", (message.id,)),
            "headers": ("%s", (message.headers,)),
        }
        if message.body is not None:
            values["body"] = "%s", (message.body,)
        for place, column in enumerate(SENT):
            if message[3 + place] != NO_OPTIONS[place]:
                values[column.name] = given(column, message[3 + place])
        # Index: none is read. Safe: one row in the caller's transaction; expiry by the database's clock.
        sql = (
            f"INSERT INTO {self._t} ({', '.join(f'[{name}]' for name in values)}) OUTPUT inserted.[seq] "
            f"VALUES ({', '.join(text for text, _ in values.values())})"
        )
        return [int(row[0]) for row in fetch(connection, sql, [value for _, part in values.values() for value in part])]

    def _append_some(
        self, connection: Any, topic: str, messages: Sequence[Outgoing], queues: Sequence[str]
    ) -> list[int]:
        said = [
            (place, column)
            for place, column in enumerate(SENT)
            if any(message[3 + place] != NO_OPTIONS[place] for message in messages)
        ]
        fields = [
            "[n] int '$[0]'",
            "[id] uniqueidentifier '$[1]'",
            "[headers] nvarchar(max) '$[2]'",
            "[body] varchar(max) '$[3]'",
            "[queues] nvarchar(max) '$[4]'",
        ]
        columns = ["[topic]", "[message_id]", "[headers]", "[body]", "[queues]"]
        values = ["%s", "r.[id]", "r.[headers]", "CONVERT(varbinary(max), r.[body], 2)", "r.[queues]"]
        for n, (_, column) in enumerate(said):
            value = f"r.[{column.name}]"
            if column.kind is Kind.TIME:
                value = f"DATEADD(millisecond, {value} %% 86400000, DATEADD(day, {value} / 86400000, SYSUTCDATETIME()))"
            fields.append(f"[{column.name}] {'bigint' if column.kind is Kind.TIME else type_of(column)} '$[{n + 5}]'")
            columns.append(f"[{column.name}]")
            values.append(value)
        # Index: none is read. Safe: the caller's transaction; identity numbers, and the row versions with them, follow
        # the ORDER BY.
        sql = (
            f"INSERT INTO {self._t} ({', '.join(columns)}) OUTPUT inserted.[seq] SELECT {', '.join(values)} "
            f"FROM OPENJSON(%s) WITH ({', '.join(fields)}) AS r ORDER BY r.[n]"
        )
        rows = [
            [
                n,
                str(message.id),
                message.headers,
                None if message.body is None else message.body.hex(),
                queues[n],
                *(message[3 + place] for place, _ in said),
            ]
            for n, message in enumerate(messages)
        ]
        params = (topic, Json(json.dumps(rows, separators=(",", ":"))))
        return sorted(int(row[0]) for row in fetch(connection, sql, params))

    # -- reading --------------------------------------------------------------------------------------------------

    def horizon(self, connection: Any) -> Position:
        return Position(int(fetch(connection, HORIZON, ())[0][0]), 0)

    def topics(self, connection: Any, source: str = "") -> list[str]:
        # Index: (topic, txid, seq), one step to the next topic each time. Safe: LOOKING.
        found: list[str] = []
        sql = f"SELECT TOP (1) j.[topic] FROM {self._t} AS j WITH ({LOOKING}) WHERE j.[topic] > %s ORDER BY j.[topic]"
        while rows := fetch(connection, sql, (found[-1] if found else "",)):
            found.append(rows[0][0])
        return found

    def read(
        self,
        connection: Any,
        topics: Sequence[str],
        after: Position,
        before: Position,
        limit: int,
        *,
        not_before: datetime | None = None,
        without: Sequence[str] = (),
    ) -> list[JournalRecord]:
        if not topics:
            return []
        where, params = self._condition(after, without, not_before)
        # Index: (topic, txid, seq), for each topic from the position on. Safe: nothing before the horizon is in flight,
        # so this waits for no publisher.
        sql = (
            f"SELECT TOP (%s) {_KEPT} FROM OPENJSON(%s) WITH ([topic] nvarchar(255) '$') AS t "
            f"CROSS APPLY (SELECT TOP (%s) j.* FROM {self._t} AS j WHERE j.[topic] = t.[topic] AND {where} "
            f"AND j.[txid] < {_AT} ORDER BY j.[txid]) AS j ORDER BY j.[txid]"
        )
        rows = fetch(connection, sql, (limit, json_of(list(topics)), limit, *params, before.txid))
        return [_kept(row) for row in rows]

    def count(self, connection: Any, topics: Sequence[str], after: Position, without: Sequence[str], limit: int) -> int:
        where, params = self._condition(after, without, None)
        # Index: (topic, txid, seq) from the position on, and the rows behind it, at most so many. Safe: LOOKING.
        sql = (
            f"SELECT COUNT(*) FROM (SELECT TOP (%s) 1 AS [one] FROM {self._t} AS j WITH ({LOOKING}) "
            f"INNER JOIN OPENJSON(%s) WITH ([topic] nvarchar(255) '$') AS t ON j.[topic] = t.[topic] WHERE {where}) AS "
            "f"
        )
        return int(fetch(connection, sql, (limit, json_of(list(topics)), *params))[0][0])

    def _condition(self, after: Position, without: Sequence[str], not_before: datetime | None) -> tuple[str, list[Any]]:
        version = _version(after)
        where = f"j.[txid] >= {_AT} AND (j.[txid] > {_AT} OR j.[seq] > %s)"
        params: list[Any] = [version, version, after.seq]
        for mark in without:
            where += " AND CHARINDEX(%s, j.[queues]) = 0"
            params.append(mark)
        if not_before is not None:
            where += " AND j.[published_at] >= %s"
            params.append(not_before)
        return where, params

    def first_marked(self, connection: Any, topics: Sequence[str], mark: str) -> Position | None:
        # Index: (topic, txid, seq) and all rows of the topics: once in a queue's life. Safe: LOOKING.
        sql = (
            f"SELECT TOP (1) CAST(j.[txid] AS bigint), j.[seq] FROM {self._t} AS j WITH ({LOOKING}) "
            f"INNER JOIN OPENJSON(%s) WITH ([topic] nvarchar(255) '$') AS t ON j.[topic] = t.[topic] "
            "WHERE CHARINDEX(%s, j.[queues]) > 0 ORDER BY j.[txid]"
        )
        rows = fetch(connection, sql, (json_of(list(topics)), mark))
        return Position(int(rows[0][0]), int(rows[0][1])) if rows else None

    def earliest(self, connection: Any, topics: Sequence[str], after: Position) -> datetime | None:
        where, params = self._condition(after, (), None)
        # Index: (topic, txid, seq) from the position on, and the rows behind it: when a queue is refilled. Safe:
        # LOOKING.
        sql = (
            f"SELECT MIN(j.[published_at]) FROM {self._t} AS j WITH ({LOOKING}) "
            f"INNER JOIN OPENJSON(%s) WITH ([topic] nvarchar(255) '$') AS t ON j.[topic] = t.[topic] WHERE {where}"
        )
        return aware(fetch(connection, sql, (json_of(list(topics)), *params))[0][0])

    def beyond(self, connection: Any, topics: Sequence[str], horizon: Position) -> list[int]:
        # Index: (topic, txid, seq), the end of each topic. Safe: LOOKING, which skips rows in flight.
        sql = (
            f"SELECT j.[seq] FROM {self._t} AS j WITH ({LOOKING}) "
            "INNER JOIN OPENJSON(%s) WITH ([topic] nvarchar(255) '$') AS t ON j.[topic] = t.[topic] WHERE j.[txid] >= "
            f"{_AT}"
        )
        return [int(row[0]) for row in fetch(connection, sql, (json_of(list(topics)), horizon.txid))]

    def find(self, connection: Any, seq: int) -> Position | None:
        # Index: the primary key, one row. Safe: LOOKING.
        sql = f"SELECT CAST(j.[txid] AS bigint), j.[seq] FROM {self._t} AS j WITH ({LOOKING}) WHERE j.[seq] = %s"
        rows = fetch(connection, sql, (seq,))
        return Position(int(rows[0][0]), int(rows[0][1])) if rows else None

    def edge(self, connection: Any, topic: str, *, last: bool, source: str = "") -> tuple[Position, datetime] | None:
        # Index: (topic, txid, seq), its first or last entry for the topic. Safe: LOOKING.
        sql = (
            f"SELECT TOP (1) CAST(j.[txid] AS bigint), j.[seq], j.[published_at] FROM {self._t} AS j WITH ({LOOKING}) "
            f"WHERE j.[topic] = %s ORDER BY j.[txid] {'DESC' if last else 'ASC'}"
        )
        rows = fetch(connection, sql, (topic,))
        if not rows:
            return None
        at = aware(rows[0][2])
        assert at is not None, "the column is NOT NULL"
        return Position(int(rows[0][0]), int(rows[0][1])), at

    # -- purging -----------------------------------------------------------------------------------------------

    def purge(self, connection: Any, topic: str, keep_ms: int, hold: Position, limit: int, source: str = "") -> int:
        # Index: (topic, txid, seq), the first entries of the topic. Safe: fewer than 5,000 rows, so readers meet no
        # table lock; another purge waits, and finds the rows gone.
        sql = (
            f"WITH f AS (SELECT TOP (%s) j.[txid], j.[published_at] FROM {self._t} AS j WITH (ROWLOCK) WHERE j.[topic] "
            f"= %s ORDER BY j.[txid]) DELETE FROM f WHERE f.[txid] < {_AT} AND f.[published_at] < {_EARLIER}"
        )
        return execute(connection, sql, (min(limit, MAX_BATCH), topic, _version(hold), *_earlier(keep_ms)))

    def is_over(self, connection: Any, at: datetime, keep_ms: int) -> bool:
        # Index: none, no table is read.
        sql = f"SELECT CASE WHEN CAST(%s AS datetime2) < {_EARLIER} THEN 1 ELSE 0 END"
        return bool(fetch(connection, sql, (at, *_earlier(keep_ms)))[0][0])

    def present(self, connection: Any, seqs: Sequence[int]) -> set[int]:
        # Index: the primary key, one seek a number. Safe: it waits for uncommitted deletes.
        sql = (
            f"SELECT j.[seq] FROM OPENJSON(%s) WITH ([seq] bigint '$') AS k INNER LOOP JOIN {self._t} AS j ON j.[seq] "
            "= k.[seq]"
        )
        return {int(row[0]) for row in fetch(connection, sql, (json_of(list(seqs)),))}

    def renumber(self, connection: Any, cursor_table: str) -> int:
        return 0  # row versions belong to the database, and continue where a backup ends

    def size(self, connection: Any) -> tuple[int, int]:
        # Index: none, the catalog. A partition has a unit (of type 1) for its rows, and more for long values.
        sql = (
            "SELECT COALESCE(SUM(CASE WHEN p.[index_id] IN (0, 1) AND a.[type] = 1 THEN p.[rows] ELSE 0 END), 0), "
            "COALESCE(SUM(a.[total_pages]), 0) * 8192 FROM sys.partitions AS p "
            "INNER JOIN sys.allocation_units AS a ON a.[container_id] = p.[partition_id] WHERE p.[object_id] = "
            "OBJECT_ID(%s)"
        )
        entries, size = fetch(connection, sql, (self._t.replace("%%", "%"),))[0]
        return int(entries), int(size)

    # -- readers ------------------------------------------------------------------------------------------------

    def note_reader(self, connection: Any, cursor_table: str, name: str, topic: str, position: Position) -> None:
        table = quote_table(cursor_table)
        # Index: the primary key; one row, which only this reader writes.
        sql = f"UPDATE {table} SET [txid] = %s, [seq] = %s, [seen_at] = SYSUTCDATETIME() WHERE [name] = %s"
        if execute(connection, sql, (*position, name)):
            return
        # Index: none is read. Safe: as above.
        sql = (
            f"INSERT INTO {table} ([name], [topic], [txid], [seq], [seen_at]) VALUES (%s, %s, %s, %s, SYSUTCDATETIME())"
        )
        execute(connection, sql, (name, topic, *position))

    def forget_reader(self, connection: Any, cursor_table: str, name: str) -> None:
        # Index: the primary key; one row of the reader's own.
        execute(connection, f"DELETE FROM {quote_table(cursor_table)} WHERE [name] = %s", (name,))

    # -- queues filled from the journal -------------------------------------------------------------------------------

    def rows_up_to(self, connection: Any, table: str, limit: int) -> int:
        # Index: any; a scan that ends at the limit. Safe: LOOKING; rows being claimed are not counted.
        sql = f"SELECT COUNT(*) FROM (SELECT TOP (%s) 1 AS [one] FROM {quote_table(table)} AS q WITH ({LOOKING})) AS f"
        return int(fetch(connection, sql, (limit,))[0][0])

    def waiting(self, connection: Any, places: Sequence[IdColumn], ids: Sequence[uuid.UUID]) -> set[bytes]:
        # Index: none, a queue's id has no index: a scan, of an operator's command. It waits for rows that are being
        # claimed, which may be released.
        parts, params = [], list[Any]()
        for table, column, where in places:
            conditions = "".join(f" AND q.{quote(name)} = %s" for name in where)
            parts.append(
                f"SELECT q.{quote(column)} FROM {quote_table(table)} AS q "
                f"INNER JOIN OPENJSON(%s) WITH ([id] uniqueidentifier '$') AS k ON q.{quote(column)} = "
                f"k.[id]{conditions}"
            )
            params += [json_of([str(key) for key in ids]), *where.values()]
        return {guid(row[0]) for row in fetch(connection, " UNION ALL ".join(parts), params)}


def _version(position: Position) -> int:
    """Row versions are not negative."""
    return max(position.txid, 0)


def _kept(row: Any) -> JournalRecord:
    values = list(row)
    for place in _TIMES:
        values[place] = aware(values[place])
    values[3] = guid(values[3])
    values[-1] = bool(values[-1])
    return JournalRecord(*values)
