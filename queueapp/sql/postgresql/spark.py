"""The statements of the Spark data source on PostgreSQL 14 to 18: the sink's for psycopg (``%s``) and ADBC, the
source's for ADBC (``$1``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..barriers import lock_numbers
from ..journal import Position
from ..message_columns import BY_NAME, SENT, kind_of
from ..spark import (
    DUE_AT,
    ENTERS,
    EVERYTHING,
    MARKS,
    STAGED,
    Condition,
    LedgerTable,
    ReadKind,
    Selection,
    SparkJournalSql,
    SparkReadSql,
    SparkSql,
    StagingName,
    attribute_of,
    expiry_of,
)
from ..tables import QueueTable
from .journal import HORIZON
from .statements import LITERALS, TYPES

_WIDE = {"priority": TYPES[kind_of(BY_NAME["priority"], priority64=True)]}
_TYPES = {"id": "uuid", "headers": "text", "body": "bytea"} | {column.name: TYPES[column.kind] for column in SENT}
_TYPES |= {DUE_AT: "timestamptz", MARKS: "text", ENTERS: "boolean"}

#: First in the transaction of the moves. A concurrent scan of a staging table could make ours start in its middle;
#: there is none, but the order is guaranteed.
KEEP_ORDER = "SET LOCAL synchronize_seqscans = off"
#: First in the transaction of a page. Of a table without statistics (one that was just filled) the planner expects few
#: rows between two keys, and reads and sorts the whole range for each page (0.4 of the rate).
BY_KEY = "SELECT set_config('enable_sort', 'off', true), set_config('enable_bitmapscan', 'off', true)"


def quote(name: str) -> str:
    """An identifier with ``%`` doubled (psycopg formats); ``schema"."table`` is Django's idiom and is kept."""
    return '"' + (name if '"."' in name else name.replace('"', '""')).replace("%", "%%") + '"'


class PostgresqlSparkSql(SparkSql):
    """One queue's sink on PostgreSQL."""

    clock = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint"

    # Index: pg_class_relname_nsp_index (the pattern has a fixed prefix). Safe: a snapshot of the catalog; a table that
    # appears later belongs to an attempt that the next commit's list will show.
    list_staging = (
        "SELECT c.relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
        r"WHERE c.relname LIKE 'queueapp\_stage\_%%' AND c.relkind = 'r' AND n.nspname = current_schema()"
    )

    # Takes a cluster-wide lock at commit: one per publication, after it is committed, never in its transaction.
    notify = "SELECT pg_notify(%s, %s)"

    def __init__(self, queue: QueueTable | None, ledger: LedgerTable) -> None:
        super().__init__(queue, ledger)
        self._ledger = quote(ledger.db_table)
        self._l = {name: quote(column) for name, column in ledger.columns.items()}
        self._queue = "" if queue is None else quote(queue.db_table)
        self._q = {} if queue is None else {name: quote(column) for name, column in queue.columns.items()}
        # A topic's queues may be claimed by a 64-bit priority.
        self._types = _TYPES | (_WIDE if queue is None or queue.priority64 else {})

    def fence(self, *, exclusive: bool) -> tuple[str, tuple[str, ...]]:
        # No table is read. Nothing but two integers is written into the text.
        first, second = lock_numbers("send", self._table.db_table)
        lock = f"pg_advisory_xact_lock{'' if exclusive else '_shared'}({first}, {second})"
        return f"SELECT length({lock}::text)::bigint", ()

    def probe_queue(self) -> str:
        # No rows and no index. An insert, so that the sink needs no right to read the queue.
        names = [name for name in STAGED if name in self._q]
        values = ", ".join(f"NULL::{self._types[name]}" for name in names)
        return f"INSERT INTO {self._queue} ({', '.join(self._q[name] for name in names)}) SELECT {values} WHERE false"

    def probe_ledger(self) -> str:
        return self._record("SELECT NULL::text, NULL::text, NULL::bigint, NULL::bigint, NULL::integer WHERE false")

    def create_staging(self, name: StagingName, attributes: Sequence[str], *, logged: bool = False) -> str:
        # Unlogged where all tables are moved at once: the move writes these rows to the WAL once, and that is enough. A
        # server crash empties the table, and then the move touches fewer rows than the task reported, which fails the
        # publication.
        columns = ", ".join(f"{attribute} {self._types[attribute_of(attribute)]}" for attribute in attributes)
        return f"CREATE {'' if logged else 'UNLOGGED '}TABLE {name.name} ({columns})"

    def drop_staging(self, name: StagingName) -> str:
        return f"DROP TABLE IF EXISTS {name.name}"

    def record(self) -> str:
        return self._record("VALUES (%s, %s, %s, %s, %s)")

    def _record(self, rows: str) -> str:
        # Index: the unique (queue, publish_id, batch_id). Safe: a second commit of the batch waits on the index entry
        # of the first and then finds a conflict, or inserts if the first rolled back.
        names = ("queue", "publish_id", "batch_id", "rows", "tasks")
        return (
            f"INSERT INTO {self._ledger} ({', '.join(self._l[name] for name in names)}) {rows} "
            f"ON CONFLICT ({', '.join(self._l[name] for name in names[:3])}) DO NOTHING"
        )

    def recorded(self) -> str:
        # Index: the unique (queue, publish_id, batch_id). Safe: read after the conflict, so the row is committed.
        return f"SELECT {self._l['rows']}, {self._l['pending']} FROM {self._ledger} WHERE {self._key()}"

    def _key(self) -> str:
        return " AND ".join(f"{self._l[name]} = %s" for name in ("queue", "publish_id", "batch_id"))

    def set_pending(self) -> str:
        # Index: the unique (queue, publish_id, batch_id). Safe: in the transaction that inserted or locked the row.
        return f"UPDATE {self._ledger} SET {self._l['pending']} = %s WHERE {self._key()}"

    def lock_pending(self) -> str:
        # Index: the same. Safe: of two drivers that go on with one publication, the second waits, and then sees what is
        # left.
        return f"SELECT {self._l['pending']} FROM {self._ledger} WHERE {self._key()} FOR UPDATE"

    def list_pending(self) -> str:
        # Index: none, a scan of the ledger, only when a janitor has found tables of dead jobs. Locks nothing; safe: a
        # table that is taken off the list meanwhile is moved, and dropped by who moved it.
        return f"SELECT {self._l['pending']} FROM {self._ledger} WHERE {self._l['pending']} IS NOT NULL"

    def staged_bytes(self, name: StagingName) -> str:
        # Index: none, a scan of the staging table; a body that is stored apart is not fetched for its length. Safe: the
        # table belongs to one task, which is done.
        return f"SELECT coalesce(sum(octet_length(body)), 0)::bigint FROM {name.name}"

    def forget(self) -> str:
        # Index: the unique (queue, publish_id, batch_id), a range of its third column. Safe: Spark replays only the
        # batch after the last one in its commit log, and that one is far inside what is kept.
        c = self._l
        return f"DELETE FROM {self._ledger} WHERE {c['queue']} = %s AND {c['publish_id']} = %s AND {c['batch_id']} < %s"

    def move(
        self,
        name: StagingName,
        attributes: Sequence[str],
        constants: Sequence[str],
        lifetime: bool,
        selection: Selection = EVERYTHING,
    ) -> str:
        # Index: none, a scan of the whole staging table; it was filled by one COPY, so the scan is in the order of the
        # COPY and seq numbers follow it (an INSERT's source is never scanned in parallel). Safe: the table belongs to
        # this task; its row count is compared with what the task reported.
        plain = [name for name in attributes if name not in ("expires", DUE_AT)]
        targets = [self._q[attribute] for attribute in plain]
        values = [selection.renamed.get(attribute, attribute) for attribute in plain]
        targets += [self._q[attribute] for attribute in constants]
        values += ["%s" for _ in constants]
        if "expires" in attributes or lifetime:
            targets.append(self._q["expires"])
            value = expiry_of("expires", "statement_timestamp() + %s * interval '1 ms'", attributes, lifetime)
            values.append(f"({value}) AT TIME ZONE 'UTC'" if self._table.naive_expires else value)
        for attribute, constant in self._table.filled.items():
            targets.append(self._q[attribute])
            values.append(LITERALS[constant])
        rows = name.name + (f" WHERE {selection.where}" if selection.where else "")
        if DUE_AT in attributes:
            rows += f" WHERE {DUE_AT} IS NULL"
        return f"INSERT INTO {self._queue} ({', '.join(targets)}) SELECT {', '.join(values)} FROM {rows}"

    def move_delayed(
        self, name: StagingName, table: str, attributes: Sequence[str], constants: Sequence[str], lifetime: bool
    ) -> str:
        # Index: none, as above. Safe: the dispatcher finds the rows when they are committed.
        plain = [name for name in attributes if name not in ("id", "expires", DUE_AT)]
        targets = ["destination", "due", "message_id", *plain, *constants]
        values = ["%s", DUE_AT, "id", *plain, *("%s" for _ in constants)]
        if "expires" in attributes or lifetime:
            targets.append("expires")
            values.append(expiry_of("expires", f"{DUE_AT} + %s * interval '1 ms'", attributes, lifetime))
        return (
            f"INSERT INTO {quote(table)} ({', '.join(targets)}) SELECT {', '.join(values)} FROM {name.name} "
            f"WHERE {DUE_AT} IS NOT NULL"
        )

    def move_to_journal(
        self, name: StagingName, table: str, attributes: Sequence[str], constants: Sequence[str]
    ) -> str:
        # Index: none, as above. Safe: one transaction with the moves into the queues, whose number orders the entries.
        plain = [name for name in attributes if name not in ("id", MARKS)]
        targets = ["txid", "topic", "queues", "message_id", *plain, *constants]
        marks = MARKS if MARKS in attributes else "%s"
        values = ["pg_current_xact_id()::text::bigint", "%s", marks, "id", *plain, *("%s" for _ in constants)]
        return f"INSERT INTO {quote(table)} ({', '.join(targets)}) SELECT {', '.join(values)} FROM {name.name}"

    def probe_insert(self, table: str) -> str:
        # No rows and no index.
        return f"INSERT INTO {quote(table)} (headers) SELECT NULL::text WHERE false"

    def depth(self) -> str:
        # A scan of the table that ends at the limit. Locks nothing.
        return f"SELECT count(*) FROM (SELECT 1 FROM {self._queue} LIMIT %s) AS f"


#: How a column of a kind is read, where not as it is: ADBC has no uuid, and Spark's types are wider.
_READ = {
    ReadKind.INT: "{}::int",
    ReadKind.UUID: "{}::text",
    ReadKind.NAIVE_TIME: "({} AT TIME ZONE 'UTC')",
}
#: How a parameter is compared with it.
_COMPARED = {
    ReadKind.INT: "{}::bigint",
    ReadKind.LONG: "{}::bigint",
    ReadKind.TEXT: "{}::text",
    ReadKind.TIME: "{}::timestamptz",
}


class PostgresqlSparkReadSql(SparkReadSql):
    """One table on PostgreSQL. ADBC formats nothing, so a ``%`` in a name stays single."""

    @property
    def bounds(self) -> str:
        # Primary key, its two ends (of a partitioned table, of each partition). Locks nothing.
        key, table = self._column(self.table.key), self._table()
        ends = [f"(SELECT {key} FROM {table} ORDER BY {key} {order} LIMIT 1)" for order in ("ASC", "DESC")]
        return f"SELECT {ends[0]}::bigint AS first, {ends[1]}::bigint AS last"

    def page(
        self, attributes: Sequence[str], conditions: Sequence[Condition], after: int, last: int, limit: int
    ) -> tuple[str, list[Any]]:
        # Primary key, a range of it in its order. Locks nothing; safe: a row that is acked or moved between two pages
        # is in one of them or in none, never in two; one that commits late with a lower key is not seen.
        params: list[Any] = []
        key = self.table.key
        within = [Condition(key, ">", (after,)), Condition(key, "<=", (last,)), *conditions]
        where = " AND ".join(self._condition(condition, params) for condition in within)
        columns = [f"{self._column(key)}::bigint AS queueapp_key", *map(self._read, attributes)]
        params.append(limit)
        return (
            f"SELECT {', '.join(columns)} FROM {self._table()} WHERE {where} ORDER BY {self._column(key)} "
            f"LIMIT ${len(params)}::bigint"
        ), params

    def _table(self) -> str:
        return _plain(self.table.db_table)

    def _column(self, attribute: str) -> str:
        return _plain(self.table.columns[attribute][0])

    def _read(self, attribute: str) -> str:
        kind = self.table.columns[attribute][1]
        return f"{_READ.get(kind, '{}').format(self._column(attribute))} AS {_plain(attribute)}"

    def _condition(self, condition: Condition, params: list[Any]) -> str:
        column, kind = self._column(condition.attribute), self.table.columns[condition.attribute][1]
        marks = []
        for value in condition.values:
            params.append(value)
            marks.append(_COMPARED[kind].format(f"${len(params)}"))
        if condition.operator == "contains":
            return "(" + " OR ".join(f"position({mark} IN {column}) > 0" for mark in marks) + ")"
        return f"{column} {condition.operator} {marks[0]}"


class PostgresqlSparkJournalSql(PostgresqlSparkReadSql, SparkJournalSql):
    """The journal on PostgreSQL."""

    horizon = HORIZON

    def last_position(self, topic: str, horizon: int) -> tuple[str, list[Any]]:
        # The index on (topic, txid, seq), one step from its end for the topic. Locks nothing.
        return (
            f"SELECT txid, seq FROM {self._table()} WHERE topic = $1::text AND txid < $2::bigint "
            "ORDER BY topic DESC, txid DESC, seq DESC LIMIT 1"
        ), [topic, horizon]

    def position_after(self, topic: str, after: Position, last: Position, rows: int) -> tuple[str, list[Any]]:
        # The index on (topic, txid, seq), so many entries of it. Locks nothing.
        return (
            f"SELECT txid, seq FROM {self._table()} WHERE topic = $1::text AND (txid, seq) > ($2::bigint, $3::bigint) "
            "AND (txid, seq) <= ($4::bigint, $5::bigint) ORDER BY txid, seq OFFSET $6::bigint LIMIT 1"
        ), [topic, *after, *last, rows - 1]

    def page_by_position(
        self, attributes: Sequence[str], conditions: Sequence[Condition], after: Position, last: Position, limit: int
    ) -> tuple[str, list[Any]]:
        # The index on (topic, txid, seq), a range of it in its order. Locks nothing; safe: all of it is before a
        # horizon, so it is the same whenever it is read.
        params: list[Any] = [*after, *last]
        where = " AND ".join(self._condition(condition, params) for condition in conditions)
        params.append(limit)
        columns = ["txid AS queueapp_txid", "seq AS queueapp_key", *map(self._read, attributes)]
        return (
            f"SELECT {', '.join(columns)} FROM {self._table()} WHERE (txid, seq) > ($1::bigint, $2::bigint) "
            f"AND (txid, seq) <= ($3::bigint, $4::bigint) AND {where} ORDER BY 1, 2 LIMIT ${len(params)}::bigint"
        ), params


def _plain(name: str) -> str:
    """An identifier for a driver that formats nothing."""
    return quote(name).replace("%%", "%")
