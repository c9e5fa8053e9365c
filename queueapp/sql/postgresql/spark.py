"""The statements of the Spark sink on PostgreSQL 14 to 18, for psycopg (``%s``) and ADBC."""

from __future__ import annotations

from collections.abc import Sequence

from ..barriers import lock_numbers
from ..message_columns import BY_NAME, SENT, kind_of
from ..spark import STAGED, LedgerTable, SparkSql, StagingName
from ..tables import QueueTable
from .statements import LITERALS, TYPES

_WIDE = {"priority": TYPES[kind_of(BY_NAME["priority"], priority64=True)]}
_TYPES = {"id": "uuid", "headers": "text", "body": "bytea"} | {column.name: TYPES[column.kind] for column in SENT}

#: First in the transaction of the moves. A concurrent scan of a staging table could make ours start in its middle;
#: there is none, but the order is guaranteed.
KEEP_ORDER = "SET LOCAL synchronize_seqscans = off"


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

    def __init__(self, queue: QueueTable, ledger: LedgerTable) -> None:
        super().__init__(queue, ledger)
        self._ledger = quote(ledger.db_table)
        self._l = {name: quote(column) for name, column in ledger.columns.items()}
        self._queue = quote(queue.db_table)
        self._q = {name: quote(column) for name, column in queue.columns.items()}
        self._types = _TYPES | (_WIDE if queue.priority64 else {})

    def fence(self, *, exclusive: bool) -> tuple[str, tuple[str, ...]]:
        # No table is read. Nothing but two integers is written into the text.
        first, second = lock_numbers("send", self.queue.db_table)
        lock = f"pg_advisory_xact_lock{'' if exclusive else '_shared'}({first}, {second})"
        return f"SELECT length({lock}::text)::bigint", ()

    def probe_queue(self) -> str:
        # No rows and no index. An insert, so that the sink needs no right to read the queue.
        names = [name for name in STAGED if name in self._q]
        values = ", ".join(f"NULL::{self._types[name]}" for name in names)
        return f"INSERT INTO {self._queue} ({', '.join(self._q[name] for name in names)}) SELECT {values} WHERE false"

    def probe_ledger(self) -> str:
        return self._record("SELECT NULL::text, NULL::text, NULL::bigint, NULL::bigint, NULL::integer WHERE false")

    def create_staging(self, name: StagingName, attributes: Sequence[str]) -> str:
        # Unlogged: the move writes these rows to the WAL once, and that is enough. A server crash empties the table,
        # and then the move touches fewer rows than the task reported, which fails the publication.
        columns = ", ".join(f"{attribute} {self._types[attribute]}" for attribute in attributes)
        return f"CREATE UNLOGGED TABLE {name.name} ({columns})"

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

    def forget(self) -> str:
        # Index: the unique (queue, publish_id, batch_id), a range of its third column. Safe: Spark replays only the
        # batch after the last one in its commit log, and that one is far inside what is kept.
        c = self._l
        return f"DELETE FROM {self._ledger} WHERE {c['queue']} = %s AND {c['publish_id']} = %s AND {c['batch_id']} < %s"

    def move(self, name: StagingName, attributes: Sequence[str], constants: Sequence[str], lifetime: bool) -> str:
        # Index: none, a scan of the whole staging table; it was filled by one COPY, so the scan is in the order of the
        # COPY and seq numbers follow it (an INSERT's source is never scanned in parallel). Safe: the table belongs to
        # this task; its row count is compared with what the task reported.
        targets = [self._q[attribute] for attribute in attributes if attribute != "expires"]
        values = [attribute for attribute in attributes if attribute != "expires"]
        targets += [self._q[attribute] for attribute in constants]
        values += ["%s" for _ in constants]
        if "expires" in attributes or lifetime:
            targets.append(self._q["expires"])
            later = "statement_timestamp() + %s * interval '1 ms'"
            has_expires = "expires" in attributes
            value = f"COALESCE(expires, {later})" if has_expires and lifetime else later if lifetime else "expires"
            values.append(f"({value}) AT TIME ZONE 'UTC'" if self.queue.naive_expires else value)
        for attribute, constant in self.queue.filled.items():
            targets.append(self._q[attribute])
            values.append(LITERALS[constant])
        return f"INSERT INTO {self._queue} ({', '.join(targets)}) SELECT {', '.join(values)} FROM {name.name}"
