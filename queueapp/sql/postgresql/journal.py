"""PostgreSQL: the journal, partitioned by the day of publishing.

The horizon is the lowest transaction that was open when the statement's snapshot was taken: all before it are over, and
those to come get higher numbers. A transaction that has written holds it up in every database of the server, also one
that has nothing to do with the journal; one that only reads has no number.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from ..journal import COLUMNS, IdColumn, JournalRecord, JournalSql, Partition, Position
from ..message_columns import NO_OPTIONS, SENT, Kind, Outgoing
from .raw.cursor import execute, fetch
from .raw.plan_guard import PlanGuard
from .raw.raw_statement import BYTES, TEXT, UUID, RawStatement, can_run_raw
from .statements import TYPES, quote, quote_table

_NUMBER = "pg_current_xact_id()::text::bigint"
#: The advisory lock of ``renumber``: the first bytes of "journal".
_RENUMBERING = int.from_bytes(b"journal\0", "big") >> 1
_KEPT = ", ".join(f"j.{name}" for name in COLUMNS)


# Reads no table; the list of sessions only when a transaction is open. Safe: a session stays in its database, so a
# transaction that is listed for another database cannot publish here; one that is not listed may, such as one whose
# session has ended or is not visible.
HORIZON = (
    "SELECT coalesce(min(o.txid), pg_snapshot_xmax(pg_current_snapshot())::text::bigint) AS horizon "
    "FROM (SELECT pg_snapshot_xip(pg_current_snapshot())::text::bigint AS txid OFFSET 0) AS o "
    "WHERE NOT EXISTS (SELECT FROM pg_stat_activity AS a WHERE a.backend_xid::text::bigint = o.txid & 4294967295 "
    "AND a.datid <> (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())) "
    "AND NOT EXISTS (SELECT FROM pg_prepared_xacts AS p WHERE p.transaction::text::bigint = o.txid & 4294967295 "
    "AND p.database <> current_database())"
)


class PostgresqlJournalSql(JournalSql):
    """PostgreSQL 14 to 18."""

    def __init__(self, table: str, guard: PlanGuard) -> None:
        super().__init__(table)
        self.guard = guard
        self._t = quote_table(table)
        self._rest = f"{table}_rest"
        plain = (
            f"INSERT INTO {self._t} (txid, topic, queues, message_id, headers, body) VALUES ({_NUMBER}, %s, %s, %s, "
            "%s, %s)"
        )
        self._plain = RawStatement(plain, (TEXT, TEXT, UUID, TEXT, BYTES))

    # -- the table ------------------------------------------------------------------------------------------------

    def create(self, schema_editor: Any, model: Any) -> None:
        name = schema_editor.quote_name
        table, columns, params = name(self.table), [], []
        for field in model._meta.local_concrete_fields:
            definition, part = schema_editor.column_sql(model, field)
            # The key of a partitioned table has to include the partition column.
            suffix = field.db_type_suffix(connection=schema_editor.connection) or ""
            columns.append(f"{name(field.column)} {definition.replace(' PRIMARY KEY', '')} {suffix}".rstrip())
            params += part
        schema_editor.execute(
            f"CREATE TABLE {table} ({', '.join(columns)}, PRIMARY KEY (seq, published_at)) PARTITION BY RANGE "
            "(published_at)",
            params or None,
        )
        for index in model._meta.indexes:
            schema_editor.add_index(model, index)
        # Entries of a day without a partition, because no maintenance runs, are kept nevertheless.
        schema_editor.execute(f"CREATE TABLE {name(self._rest)} PARTITION OF {table} DEFAULT", None)

    def partitions(self, connection: Any) -> list[Partition]:
        # Catalog only. The end of a range is the second of the times in its definition. A user who does not own the
        # table may neither drop a partition nor read one by its name.
        sql = (
            "SELECT c.relname::text, (regexp_match(pg_get_expr(c.relpartbound, c.oid), 'TO "
            "\\(''([^'']+)''\\)'))[1]::timestamptz "
            "FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid JOIN pg_class p ON p.oid = i.inhparent "
            "WHERE p.oid = to_regclass(%s) AND pg_has_role(p.relowner, 'USAGE') ORDER BY 2 NULLS LAST"
        )
        return [Partition(*row) for row in fetch(connection, sql, (self._t.replace("%%", "%"),))]

    def add_partition(self, connection: Any, days: int, wait_ms: int) -> bool:
        # The day is the database's, in UTC.
        sql = (
            "SELECT to_char(d, 'YYYYMMDD'), (d AT TIME ZONE 'UTC')::text, ((d + interval '1 day') AT TIME ZONE "
            "'UTC')::text "
            "FROM (SELECT date_trunc('day', clock_timestamp() AT TIME ZONE 'UTC') + %s * interval '1 day' AS d) AS day"
        )
        day, start, end = fetch(connection, sql, (days,))[0]
        name = f"{self.table}_{day}"
        # Catalog only.
        if fetch(connection, "SELECT 1 WHERE to_regclass(%s) IS NOT NULL", (quote(name).replace("%%", "%"),)):
            return False
        # Primary keys of the default partition, which normally is empty: entries of that day prevent the new partition.
        held = (
            f"SELECT 1 FROM {quote(self._rest)} WHERE published_at >= %s::timestamptz AND published_at < "
            "%s::timestamptz LIMIT 1"
        )
        if fetch(connection, held, (start, end)):
            return False
        self._wait(connection, wait_ms)
        # Created separately and attached: that locks the default partition, which normally is empty, and no publisher
        # or reader waits. CREATE ... PARTITION OF would lock the table itself.
        execute(connection, f"CREATE TABLE {quote(name)} (LIKE {self._t} INCLUDING ALL EXCLUDING IDENTITY)", ())
        # The bounds are the two texts that the server has just returned; this kind of statement takes no parameters.
        execute(
            connection,
            f"ALTER TABLE {self._t} ATTACH PARTITION {quote(name)} FOR VALUES FROM ('{start}') TO ('{end}')",
            (),
        )
        return True

    def lock_partition(self, connection: Any, partition: Partition, wait_ms: int) -> None:
        self._wait(connection, wait_ms)
        # The table first, like every writer and reader: the reverse order would deadlock with them.
        execute(connection, f"LOCK TABLE ONLY {self._t} IN ACCESS EXCLUSIVE MODE", ())
        execute(connection, f"LOCK TABLE {quote(partition.name)} IN ACCESS EXCLUSIVE MODE", ())

    def drop_partition(self, connection: Any, partition: Partition) -> None:
        execute(connection, f"DROP TABLE {quote(partition.name)}", ())

    def _wait(self, connection: Any, wait_ms: int) -> None:
        execute(connection, "SELECT set_config('lock_timeout', %s, true)", (f"{max(1, wait_ms)}ms",))

    # -- writing --------------------------------------------------------------------------------------------------

    def keep(self, connection: Any, topic: str, messages: Sequence[Outgoing], queues: Sequence[str]) -> None:
        # One message without options, the most frequent case: saves a fifth of the time of a cursor. As ``append``.
        if len(messages) == 1 and messages[0][3:] == NO_OPTIONS and can_run_raw(connection):
            identity, headers, body = messages[0][:3]
            values = [topic.encode(), queues[0].encode(), identity.bytes, headers.encode(), body]
            self._plain.execute(connection, values)
        else:
            self.append(connection, topic, messages, queues)

    def append(self, connection: Any, topic: str, messages: Sequence[Outgoing], queues: Sequence[str]) -> list[int]:
        said = [
            (place, column)
            for place, column in enumerate(SENT)
            if any(message[3 + place] != NO_OPTIONS[place] for message in messages)
        ]
        columns = ", ".join(
            ["txid", "topic", "queues", "message_id", "headers", "body", *(column.name for _, column in said)]
        )
        later = "clock_timestamp() + {} * interval '1 ms'"
        # No index is read; safe: the caller's transaction, whose number orders its entries. Expiry by the database's
        # clock.
        if len(messages) == 1:
            values = [later.format("%s") if column.kind is Kind.TIME else "%s" for _, column in said]
            sql = (
                f"INSERT INTO {self._t} ({columns}) VALUES "
                f"({', '.join([_NUMBER, '%s', '%s', '%s', '%s', '%s', *values])}) "
                "RETURNING seq"
            )
            (message,) = messages
            params = [topic, queues[0], *message[:3], *(message[3 + place] for place, _ in said)]
            return [row[0] for row in fetch(connection, sql, params)]
        names = ["queues", "id", "headers", "body", *(column.name for _, column in said)]
        types = [
            "text",
            "uuid",
            "text",
            "bytea",
            *("bigint" if column.kind is Kind.TIME else TYPES[column.kind] for _, column in said),
        ]
        values = ["u.queues", "u.id", "u.headers", "u.body"]
        values += [
            later.format(f"u.{column.name}") if column.kind is Kind.TIME else f"u.{column.name}" for _, column in said
        ]
        sql = (
            f"INSERT INTO {self._t} ({columns}) SELECT {_NUMBER}, %s, {', '.join(values)} "
            f"FROM unnest({', '.join(f'%s::{kind}[]' for kind in types)}) WITH ORDINALITY AS u({', '.join(names)}, "
            "place) ORDER BY u.place RETURNING seq"
        )
        places = [0, 1, 2, *(3 + place for place, _ in said)]
        arrays = [[message[place] for message in messages] for place in places]
        return [row[0] for row in fetch(connection, sql, [topic, list(queues), *arrays])]

    # -- reading --------------------------------------------------------------------------------------------------

    def horizon(self, connection: Any) -> Position:
        return Position(fetch(connection, HORIZON, ())[0][0], 0)

    def topics(self, connection: Any, source: str = "") -> list[str]:
        table = quote(source) if source else self._t
        # The index on (topic, txid, seq), one step to the next topic each time, in each partition. Locks nothing.
        sql = (
            f"WITH RECURSIVE t AS ((SELECT topic FROM {table} ORDER BY topic LIMIT 1) UNION ALL "
            f"SELECT (SELECT j.topic FROM {table} j WHERE j.topic > t.topic ORDER BY j.topic LIMIT 1) FROM t "
            "WHERE t.topic IS NOT NULL) SELECT topic FROM t WHERE topic IS NOT NULL"
        )
        return [row[0] for row in fetch(connection, sql, ())]

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
        # The index on (topic, txid, seq), for each topic in its order from the position on, merged over the partitions;
        # those that end before ``not_before`` are not opened. Locks nothing; safe: nothing can come in before the
        # horizon.
        insert = (
            f"SELECT {_KEPT} FROM {self._t} j WHERE j.topic = {{}} AND {where} AND (j.txid, j.seq) < (%s, %s) "
            "ORDER BY j.txid, j.seq LIMIT %s"
        )
        rest = [*params, *before, limit]
        if len(topics) == 1:
            rows = self.guard.fetch(connection, insert.format("%s"), [topics[0], *rest])
        else:
            sql = (
                f"SELECT e.* FROM unnest(%s::text[]) AS t(topic) CROSS JOIN LATERAL ({insert.format('t.topic')}) AS e "
                "ORDER BY e.txid, e.seq LIMIT %s"
            )
            rows = self.guard.fetch_by_key(connection, sql, [list(topics), *rest, limit])
        return [JournalRecord(*row) for row in rows]

    def count(self, connection: Any, topics: Sequence[str], after: Position, without: Sequence[str], limit: int) -> int:
        where, params = self._condition(after, without, None)
        # The index on (topic, txid, seq) from the position on, and the rows behind it, at most so many. Locks nothing.
        sql = f"SELECT count(*) FROM (SELECT 1 FROM {self._t} j WHERE j.topic = ANY(%s) AND {where} LIMIT %s) AS f"
        return int(fetch(connection, sql, [list(topics), *params, limit])[0][0])

    def _condition(self, after: Position, without: Sequence[str], not_before: datetime | None) -> tuple[str, list[Any]]:
        where = "(j.txid, j.seq) > (%s, %s)"
        params: list[Any] = [*after]
        for mark in without:
            # For "= 0" the planner expects one row in two hundred, and would sort a whole topic instead of scanning it
            # in order.
            where += " AND NOT position(%s in j.queues) > 0"
            params.append(mark)
        if not_before is not None:
            where += " AND j.published_at >= %s"
            params.append(not_before)
        return where, params

    def first_marked(self, connection: Any, topics: Sequence[str], mark: str) -> Position | None:
        # The index on (topic, txid, seq) and all rows of the topics: once in a queue's life. Locks nothing.
        sql = (
            f"SELECT j.txid, j.seq FROM {self._t} j WHERE j.topic = ANY(%s) AND position(%s in j.queues) > 0 "
            "ORDER BY j.txid, j.seq LIMIT 1"
        )
        rows = fetch(connection, sql, (list(topics), mark))
        return Position(*rows[0]) if rows else None

    def earliest(self, connection: Any, topics: Sequence[str], after: Position) -> datetime | None:
        where, params = self._condition(after, (), None)
        # The index on (topic, txid, seq) from the position on, and the rows behind it: when a queue is refilled. Locks
        # nothing.
        sql = f"SELECT min(j.published_at) FROM {self._t} j WHERE j.topic = ANY(%s) AND {where}"
        found: datetime | None = fetch(connection, sql, [list(topics), *params])[0][0]
        return found

    def beyond(self, connection: Any, topics: Sequence[str], horizon: Position) -> list[int]:
        # The index on (topic, txid, seq), the end of each topic. Locks nothing.
        sql = f"SELECT j.seq FROM {self._t} j WHERE j.topic = ANY(%s) AND j.txid >= %s"
        return [row[0] for row in fetch(connection, sql, (list(topics), horizon.txid))]

    def find(self, connection: Any, seq: int) -> Position | None:
        # Primary key, a step in each partition. Locks nothing.
        rows = self.guard.fetch_by_key(connection, f"SELECT txid, seq FROM {self._t} WHERE seq = %s", (seq,))
        return Position(*rows[0]) if rows else None

    def edge(self, connection: Any, topic: str, *, last: bool, source: str = "") -> tuple[Position, datetime] | None:
        table, order = quote(source) if source else self._t, "DESC" if last else "ASC"
        # The index on (topic, txid, seq), its first or last entry for the topic. Locks nothing.
        sql = (
            f"SELECT txid, seq, published_at FROM {table} WHERE topic = %s ORDER BY topic {order}, txid {order}, seq "
            f"{order} LIMIT 1"
        )
        rows = self.guard.fetch(connection, sql, (topic,))
        return (Position(*rows[0][:2]), rows[0][2]) if rows else None

    # -- purging -----------------------------------------------------------------------------------------------

    def purge(self, connection: Any, topic: str, keep_ms: int, hold: Position, limit: int, source: str = "") -> int:
        table = quote(source) if source else self._t
        # The index on (topic, txid, seq), the first entries of the topic; then the primary key, by an array, because a
        # join is planned as a scan. Safe: two purges wait for each other, and the second finds the rows gone.
        sql = (
            f"DELETE FROM {table} WHERE seq = ANY(ARRAY(SELECT f.seq FROM (SELECT txid, seq, published_at FROM {table} "
            "WHERE topic = %s ORDER BY txid, seq LIMIT %s) AS f WHERE (f.txid, f.seq) < (%s, %s) "
            "AND f.published_at < clock_timestamp() - %s * interval '1 ms'))"
        )
        return execute(connection, sql, (topic, limit, *hold, keep_ms))

    def is_over(self, connection: Any, at: datetime, keep_ms: int) -> bool:
        sql = "SELECT %s::timestamptz < clock_timestamp() - %s * interval '1 ms'"
        return bool(fetch(connection, sql, (at, keep_ms))[0][0])

    def present(self, connection: Any, seqs: Sequence[int]) -> set[int]:
        # Primary key, a step for each in each partition. Locks nothing.
        sql = f"SELECT seq FROM {self._t} WHERE seq = ANY(%s)"
        return {row[0] for row in self.guard.fetch_by_key(connection, sql, (list(seqs),))}

    def renumber(self, connection: Any, cursor_table: str) -> int:
        # One session at a time, until the end of the transaction.
        execute(connection, "SELECT pg_advisory_xact_lock(%s::bigint)", (_RENUMBERING,))
        # The index on (topic, txid, seq), its end for each topic. A publisher of this server has a number below the
        # next one, so an entry with a higher one is another server's.
        topics = self.topics(connection)
        highest = max(
            (edge[0].txid for topic in topics if (edge := self.edge(connection, topic, last=True))), default=0
        )
        if highest < fetch(connection, "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint", ())[0][0]:
            return 0
        # All rows. xmin is the transaction that wrote a row here; of a restored row, the one that restored it. Entries
        # published since are unchanged, and come after all shifted ones.
        execute(
            connection,
            f"UPDATE {quote_table(cursor_table)} SET txid = txid - %s WHERE txid > -(2::bigint ^ 62)::bigint",
            (highest + 1,),
        )
        sql = f"UPDATE {self._t} SET txid = txid - %s WHERE (txid & 4294967295) <> xmin::text::bigint"
        return execute(connection, sql, (highest + 1,))

    def size(self, connection: Any) -> tuple[int, int]:
        # Catalog only.
        sql = (
            "SELECT coalesce(sum(greatest(c.reltuples, 0)), 0)::bigint, coalesce(sum(pg_total_relation_size(c.oid)), "
            "0)::bigint FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = to_regclass(%s)"
        )
        entries, size = fetch(connection, sql, (self._t.replace("%%", "%"),))[0]
        return int(entries), int(size)

    # -- readers ------------------------------------------------------------------------------------------------

    def note_reader(self, connection: Any, cursor_table: str, name: str, topic: str, position: Position) -> None:
        # Primary key; one row, which only this reader writes.
        sql = (
            f"INSERT INTO {quote_table(cursor_table)} (name, topic, txid, seq, seen_at) VALUES (%s, %s, %s, %s, "
            "clock_timestamp()) "
            "ON CONFLICT (name) DO UPDATE SET txid = excluded.txid, seq = excluded.seq, seen_at = excluded.seen_at"
        )
        execute(connection, sql, (name, topic, *position))

    def forget_reader(self, connection: Any, cursor_table: str, name: str) -> None:
        # Primary key; one row, which only this reader writes.
        execute(connection, f"DELETE FROM {quote_table(cursor_table)} WHERE name = %s", (name,))

    # -- queues filled from the journal -------------------------------------------------------------------------------

    def rows_up_to(self, connection: Any, table: str, limit: int) -> int:
        # A scan of the table that ends at the limit. Locks nothing.
        sql = f"SELECT count(*) FROM (SELECT 1 FROM {quote_table(table)} LIMIT %s) AS f"
        return int(fetch(connection, sql, (limit,))[0][0])

    def waiting(self, connection: Any, places: Sequence[IdColumn], ids: Sequence[uuid.UUID]) -> set[bytes]:
        # A queue's id has no index: a scan, of an operator's command. Locks nothing; one statement, so one snapshot.
        parts, params = [], list[Any]()
        for table, column, where in places:
            name = quote(column)
            conditions = "".join(f" AND {quote(name)} = %s" for name in where)
            parts.append(f"SELECT {name} FROM {quote_table(table)} WHERE {name} = ANY(%s){conditions}")
            params += [list(ids), *where.values()]
        return {bytes(row[0]) for row in fetch(connection, " UNION ALL ".join(parts), params)}
