"""PostgreSQL: storing messages and copies of them; dedupe keys, processed keys and early acks, under advisory locks of
the transaction.

``insert`` runs beneath Django's cursor wrapper, on Django's own connection and in the caller's transaction: prepared
and binary, 1.5 to 3 times as fast as the wrapper for single rows.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
import psycopg

from ...errors import TableNotFound
from ...messages.ids import as_uuid
from ...registry import queues
from ..inserts import REFUSED_VALUE, BrokerTables, Dedupe, EarlyAcks, Fanout, Inserts, Source, Subscribed
from ..message_columns import BY_NAME, COUNTS, NO_OPTIONS, OPTIONS, WHOLE, Kind, Outgoing, Row, Run, kind_of
from ..tables import QueueTable, StoreTable
from .raw.binary_copy import copy_runs
from .raw.cursor import execute, fetch, hot_cursor
from .raw.plan_guard import PlanGuard
from .raw.raw_statement import BYTES, PACKERS, TEXT, UUID, RawStatement, can_run_raw
from .statements import TYPES, Statements, TableText, quote, quote_table, to_utc, translated

#: Makes the INSERT of a queue with barriers from that of any other: it takes the send lock in the same statement.
Fence = Callable[[Outgoing, str, tuple[Any, ...]], tuple[str, tuple[Any, ...]]]

_TYPES = {
    "id": "uuid",
    "headers": "text",
    "body": "bytea",
    "deliveries": "integer",
    "cancels": "integer",
    "failures": "text",
}
_TYPES |= {column.name: TYPES[column.kind] for column in BY_NAME.values()}
_TYPES_PRIORITY64 = _TYPES | {column.name: TYPES[kind_of(column, priority64=True)] for column in BY_NAME.values()}

# JSON of the rows of a SELECT, by the numbers of PostgreSQL's types
_INTEGERS = {20, 21, 23, 26}
_BOOLEAN, _BYTES, _JSON, _JSONB, _PLAIN, _FLOATS = {16}, {17}, {114}, {3802}, {1700, 2950}, {700, 701}
_DATE, _TIME, _NAIVE, _AWARE, _INTERVAL = {1082}, {1083}, {1114}, {1184}, {1186}
#: Arrays of what ``to_json`` writes unlike ``send``: the type of the array, and that of its elements.
_ARRAYS = {
    199: 114, 1001: 17, 1021: 700, 1022: 701, 1115: 1114, 1182: 1082, 1183: 1083, 1185: 1184, 1187: 1186, 1231: 1700,
}  # fmt: skip
#: In JSON text: an escaped half of a surrogate pair without the other one, and a number that may be too large for a
#: float.
_HIGH, _LOW_HALF = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HALF = rf"{_HIGH}(?!{_LOW_HALF})|(?<!{_HIGH}){_LOW_HALF}"
_LARGE = r"[0-9][eE][+]?[0-9]{3}"
#: Of an id: its last 64 bits, of which the first is set, as a signed number.
_LOW = 2**64
_AT_ONCE = 40


class PostgresqlInserts(Statements, Inserts):
    """The statements are written once per combination of columns. ``fence``: on a queue with barriers."""

    def __init__(self, text: TableText, fence: Fence | None = None) -> None:
        super().__init__(text)
        self._fence = fence
        self._optional = tuple(name in self._c for name in OPTIONS)
        self._inserts: dict[tuple[str, ...], str] = {}
        #: Indexes of the options that the table has columns for; and the raw statement of each combination.
        self._places = tuple(place for place, has in enumerate(self._optional) if has)
        self._raw_inserts: dict[tuple[int, ...], tuple[RawStatement, Any]] = {}
        self._plain_insert = RawStatement(self._insert_into((), ("%s", "%s", "%s")), (UUID, TEXT, BYTES))

    def insert(self, connection: Any, message: Outgoing) -> None:
        try:
            if self._fence is not None:
                execute(connection, *self._fence(message, *self.insert_of(message)))
            elif can_run_raw(connection):
                if message[3:] == NO_OPTIONS:
                    self._plain_insert.execute(connection, [message[0].bytes, message[1].encode(), message[2]])
                else:
                    self._insert_raw(connection, message)
            else:
                execute(connection, *self.insert_of(message))
        except Exception as error:
            if isinstance(error.__cause__, psycopg.errors.UndefinedTable):
                table = self.table.db_table
                raise TableNotFound(table, connection.alias, foreign=queues.is_foreign(table)) from error
            raise

    def insert_of(self, message: Outgoing) -> tuple[str, tuple[Any, ...]]:
        """The INSERT of one message and its parameters, with only the columns that differ from their defaults: one
        statement per combination, each prepared. Values without a column in a foreign table are in the headers."""
        wanted = zip(OPTIONS, message[3:], NO_OPTIONS, self._optional, strict=True)
        used = tuple((name, value) for name, value, default, has in wanted if value != default and has)
        names = tuple(name for name, _ in used)
        sql = self._inserts.get(names)
        if sql is None:
            # The expiry is computed by the database's clock, so that a sender's clock cannot expire a message early.
            later = f"{self._clock} + %s * interval '1 ms'"
            values = [later if BY_NAME[name].kind is Kind.TIME else "%s" for name in names]
            sql = self._inserts[names] = self._insert_into(names, ["%s", "%s", "%s", *values])
        return sql, (*message[:3], *(value for _, value in used))

    def _insert_raw(self, connection: Any, message: Outgoing) -> None:
        """The same as a raw statement: half the cost of a cursor."""
        said = tuple(place for place in self._places if message[3 + place] != NO_OPTIONS[place])
        found = self._raw_inserts.get(said)
        if found is None:
            found = self._raw_inserts[said] = self._raw_insert(said)
        statement, packers = found
        values = [pack(message[3 + place]) for place, pack in packers]
        statement.execute(connection, [message[0].bytes, message[1].encode(), message[2], *values])

    def _raw_insert(self, said: tuple[int, ...]) -> tuple[RawStatement, Any]:
        names = [OPTIONS[place] for place in said]
        kinds = [kind_of(BY_NAME[name], priority64=self.table.priority64) for name in names]
        values = [f"{self._clock} + %s * interval '1 ms'" if kind is Kind.TIME else "%s" for kind in kinds]
        sql = self._insert_into(names, ["%s", "%s", "%s", *values])
        types = [PACKERS[kind][0] for kind in kinds]
        packers = tuple((place, PACKERS[kind][1]) for place, kind in zip(said, kinds, strict=True))
        return RawStatement(sql, (UUID, TEXT, BYTES, *types)), packers

    def _insert_into(self, optional: Sequence[str], values: Sequence[str]) -> str:
        columns = [self._c[name] for name in ("id", "headers", "body", *optional, *self._filled)]
        values = [*values, *self._filled.values()]
        # No index beyond those of the table; safe: one row, the caller's transaction.
        return f"INSERT INTO {self._q} ({', '.join(columns)}) VALUES ({', '.join(values)})"

    def insert_runs(self, connection: Any, runs: Iterable[Run], undisturbed: bool = False) -> int:
        # COPY, in the caller's transaction.
        with translated(connection, self.table.db_table):
            return copy_runs(connection, self._q, self._c, runs, self.table.filled, undisturbed, self.table.priority64)

    def insert_row(self, connection: Any, row: Row, *, same_queue: bool = False) -> None:
        row = self.table.within_levels(row)
        names = Row._fields if same_queue else self.table.moved(Row._fields)
        given = {name: getattr(row, name) for name in names if name in self._c}
        given = {name: value for name, value in given.items() if value is not None}
        given.pop("seq")
        columns = [self._c[name] for name in [*given, *self._filled]]
        values = [*(to_utc(self.table, name, "%s") for name in given), *self._filled.values()]
        # No index beyond those of the table; safe: one row, the caller's transaction.
        sql = f"INSERT INTO {self._q} ({', '.join(columns)}) VALUES ({', '.join(values)})"
        with translated(connection, self.table.db_table):
            execute(connection, sql, tuple(given.values()))

    def insert_rows(self, connection: Any, rows: Sequence[Row]) -> int:
        rows = [self.table.within_levels(row) for row in rows]
        types = _TYPES_PRIORITY64 if self.table.priority64 else _TYPES
        moved = [name for name in self.table.moved(types) if name in self._c]
        said = [name for name in moved if any(getattr(row, name) is not None for row in rows)]
        columns = ", ".join(self._c[name] for name in [*said, *self._filled])
        values = ", ".join([*(to_utc(self.table, name, f"u.{name}") for name in said), *self._filled.values()])
        arrays = ", ".join(f"%s::{types[name]}[]" for name in said)
        # No index is read; safe: the caller's transaction. Seqs follow the ORDER BY.
        sql = (
            f"INSERT INTO {self._q} ({columns}) SELECT {values} FROM unnest({arrays}) WITH ORDINALITY "
            f"AS u({', '.join(said)}, place) ORDER BY u.place"
        )
        with translated(connection, self.table.db_table):
            return execute(connection, sql, [[getattr(row, name) for row in rows] for name in said])

    def insert_from(
        self, connection: Any, source: StoreTable, keys: Sequence[int], *, reset_counts: bool = False
    ) -> int:
        names = self.table.moved(name for name in (*WHOLE, *(() if reset_counts else COUNTS)) if self.table.has(name))
        columns = [self._c[name] for name in ["id", *names, *self._filled]]
        values = [f"s.{quote(source.columns['message_id'])}"]
        values += [to_utc(self.table, name, f"s.{quote(source.columns[name])}") for name in names]
        values += self._filled.values()
        if self.table.restarts_age and (retried := source.retried("s")):
            columns.append(self._c["enqueued_at"])
            values.append(
                f"CASE WHEN {retried} THEN s.{quote(source.columns['enqueued_at'])} ELSE clock_timestamp() END"
            )
        params: tuple[Any, ...] = (list(keys),)
        if self.table.levels:
            place = 1 + names.index("priority")
            values[place] = f"least(greatest({values[place]}, 0), %s)"
            params = (self.table.levels - 1, *params)
        # Primary key of the source; the caller holds the locks of its rows and deletes them in the same transaction.
        sql = (
            f"INSERT INTO {self._q} ({', '.join(columns)}) SELECT {', '.join(values)} FROM "
            f"{quote_table(source.db_table)} s "
            f"WHERE s.{quote(source.key)} = ANY(%s) ORDER BY s.{quote(source.order)}, s.{quote(source.key)}"
        )
        with translated(connection, self.table.db_table):
            return execute(connection, sql, params)

    # -- messages made of the rows of a SELECT ------------------------------------------------------------------------

    def ordered_select(self, select: str) -> str:
        return select

    def columns_of(self, connection: Any, source: Source) -> list[tuple[str, int]]:
        connection.validate_no_broken_transaction()
        connection.ensure_connection()
        cursor = hot_cursor(connection)
        # Index: none; no row is read.
        with connection.wrap_database_errors:
            cursor.execute(f"SELECT * FROM ({source.sql}) AS s LIMIT 0", tuple(source.params))
            described = [(found.name, found.type_code) for found in cursor.description or ()]
        if source.names is None:
            return described
        return [(name, type_) for name, (_, type_) in zip(source.names, described, strict=True)]

    def insert_select(self, connection: Any, like: Outgoing, source: Source, columns: Sequence[tuple[str, int]]) -> int:
        high, low = divmod(like.id.int, _LOW)
        pairs = [
            ("id", "(%s || to_hex(%s::bigint + row_number() OVER ()))::uuid"),
            ("headers", "%s"),
            ("body", f"convert_to({self._body_of(columns)}, 'UTF8')"),
        ]
        # A negative number in two's complement: always sixteen digits.
        params: list[Any] = [f"{high:016x}", low - _LOW - 1, like.headers]
        params += _texts(columns)
        for name, value, default in zip(OPTIONS, like[3:], NO_OPTIONS, strict=True):
            if value != default and name in self._c:
                later = BY_NAME[name].kind is Kind.TIME
                pairs.append((name, f"{self._clock} + %s * interval '1 ms'" if later else "%s"))
                params.append(value)
        # Messages that are evaluated on entry are pending by the table's default.
        held = {"lease_expires"} if self.table.has_unevaluated else set()
        pairs += [(name, value) for name, value in self._filled.items() if name not in held]
        names = ", ".join(f"c{n}" for n in range(len(columns)))
        # Index: that of the caller's SELECT. Safe: the caller's transaction; seqs and ids are assigned in the order of
        # the rows.
        sql = (
            f"INSERT INTO {self._q} ({', '.join(self._c[name] for name, _ in pairs)}) "
            f"SELECT {', '.join(value for _, value in pairs)} FROM ({source.sql}) AS s({names})"
        )
        with translated(connection, self.table.db_table):
            return execute(connection, sql, (*params, *source.params))

    @staticmethod
    def _body_of(columns: Sequence[tuple[str, int]]) -> str:
        parts = [f"%s::text, coalesce({_as_json(f's.c{n}', type_)}, 'null')" for n, (_, type_) in enumerate(columns)]
        # A function takes at most a hundred arguments.
        groups = [", ".join(parts[first : first + _AT_ONCE]) for first in range(0, len(parts), _AT_ONCE)]
        if len(groups) > 1:
            groups = [f"concat({group})" for group in groups]
        return f"concat({', '.join(groups)}, '}}')"


def _as_json(column: str, type_: int) -> str:
    """The JSON text of a value as ``send`` writes it, an error for one that it refuses; NULL for NULL."""
    if type_ in _INTEGERS or type_ in _JSONB:
        return f"{column}::text"
    if type_ in _JSON:  # as text, unless no reader accepts that: jsonb writes large numbers as whole ones
        half = rf"substring(replace({column}::text, '\\', '') FROM '{_HALF}')"
        return (
            f"CASE WHEN {half} IS NOT NULL THEN {_refused('text', half)} "
            f"WHEN {column}::text ~ '{_LARGE}' THEN {column}::jsonb::text ELSE {column}::text END"
        )
    if type_ in _BOOLEAN:
        return f"CASE WHEN {column} THEN 'true' WHEN NOT {column} THEN 'false' END"
    if type_ in _PLAIN:  # nothing in them needs escapes
        return f"'\"' || {column}::text || '\"'"
    if type_ in _BYTES:
        return f"'\"' || translate(encode({column}, 'base64'), E'\\n', '') || '\"'"
    if type_ in _FLOATS:  # a whole number stays a float, minus zero too
        return (
            f"CASE WHEN {column}::text IN ('NaN', 'Infinity', '-Infinity') THEN {_refused('number', column)} "
            f"WHEN {column}::text ~ '^-?[0-9]+$' THEN {column}::text || '.0' ELSE {column}::text END"
        )
    if type_ in _DATE:
        return _within_years(column, "", f"to_json({column})::text")
    if type_ in _NAIVE:
        return _within_years(column, "", _written(column, 'YYYY-MM-DD"T"HH24:MI:SS.US'))
    if type_ in _AWARE:
        return _within_years(column, "+00", _written(f"{column} AT TIME ZONE 'UTC'", 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'))
    if type_ in _TIME:
        written = _written(column, "HH24:MI:SS.US")
        return f"CASE WHEN {column} = '24:00' THEN {_refused('time', column)} ELSE {written} END"
    if type_ in _INTERVAL:
        return _duration(column)
    if type_ in _ARRAYS:
        elements = f"string_agg(coalesce({_as_json('u.e', _ARRAYS[type_])}, 'null'), ',' ORDER BY u.o)"
        return (
            f"CASE WHEN array_ndims({column}) > 1 THEN {_refused('array', f'array_ndims({column})')} "
            f"WHEN {column} IS NOT NULL THEN (SELECT '[' || coalesce({elements}, '') || ']' "
            f"FROM unnest({column}) WITH ORDINALITY AS u(e, o)) END"
        )
    return f"to_json({column})::text"


def _refused(kind: str, value: str) -> str:
    """A cast that fails with a text of ``REFUSED_VALUE``."""
    return f"('{REFUSED_VALUE}{kind}: ' || {value}::text)::bigint::text"


def _written(value: str, pattern: str) -> str:
    return f"'\"' || replace(to_char({value}, '{pattern}'), '.000000', '') || '\"'"


def _within_years(column: str, zone: str, written: str) -> str:
    outside = f"{column} < '0001-01-01{zone}' OR {column} >= '10000-01-01{zone}'"
    return f"CASE WHEN {outside} THEN {_refused('time', column)} ELSE {written} END"


def _duration(column: str) -> str:
    """ISO 8601 in days and seconds, whatever the server's IntervalStyle: a month has 30 days and a year 365, as in the
    driver (in ``epoch`` a year has a quarter of a day more)."""
    seconds = f"extract(epoch FROM {column})::numeric - 21600 * extract(year FROM {column})::numeric"
    return (
        "(SELECT CASE WHEN y.e IS NULL THEN NULL "
        f"WHEN abs(y.e) >= 86400000000000 THEN {_refused('interval', column)} ELSE "
        "'\"' || CASE WHEN y.e < 0 THEN '-' ELSE '' END || 'P' || CASE WHEN x.d > 0 THEN x.d::text || 'D' ELSE '' END "
        "|| CASE WHEN x.s > 0 THEN 'T' || trim_scale(x.s)::text || 'S' WHEN x.d = 0 THEN '0D' ELSE '' END || '\"' END "
        f"FROM (SELECT {seconds} AS e) AS y "
        "CROSS JOIN LATERAL (SELECT div(abs(y.e), 86400) AS d, mod(abs(y.e), 86400) AS s) AS x)"
    )


def _texts(columns: Sequence[tuple[str, int]]) -> list[str]:
    """The text before each value, with the key of the JSON object; as parameters, since keys may hold any character."""
    names = (msgspec.json.encode(name).decode() for name, _ in columns)
    return [f"{',' if n else '{'}{name}:" for n, name in enumerate(names)]


class PostgresqlFanout(Statements, Fanout):
    """Copies of messages; whether the sender knows all subscriptions is verified in the INSERT itself."""

    def __init__(self, text: TableText, inserts: PostgresqlInserts) -> None:
        super().__init__(text)
        self._inserts = inserts

    def read_subscriptions(self, connection: Any, subscriptions: str) -> list[Subscribed]:
        # The unique index, which begins with the queue; a few rows. No lock, no WAL.
        sql = (
            f"SELECT consumer, type_name, aliases, mark FROM {quote_table(subscriptions)} WHERE queue = %s ORDER BY "
            "number"
        )
        return [Subscribed(*row) for row in fetch(connection, sql, (self.table.label,))]

    def insert_copies(
        self, connection: Any, message: Outgoing, recipients: Sequence[str], subscriptions: str, mark: int
    ) -> int:
        single, params = self._inserts.insert_of(message)
        head, _, values = single.partition(") VALUES (")
        # The unique index of the subscriptions, once a statement; of the queue none is read. Safe: one statement, so
        # all copies or none; a subscription that was committed before it begins is in its snapshot, except in a
        # transaction with a fixed snapshot, where it inserts nothing. Seqs follow the ORDER BY.
        asked = (
            f"(SELECT coalesce(sum(s.mark), 0)::bigint FROM {quote_table(subscriptions)} s WHERE s.queue = %s) = "
            "%s::bigint AND current_setting('transaction_isolation') = 'read committed'"
        )
        names: Any = list(recipients)
        if len(names) == 1:  # no sort, which is most of the statement's cost
            sql, names = f"{head}, {self._c['recipient']}) SELECT {values[:-1]}, %s::varchar WHERE {asked}", names[0]
        else:
            sql = (
                f"{head}, {self._c['recipient']}) SELECT {values[:-1]}, r.name FROM unnest(%s::varchar[]) WITH "
                f"ORDINALITY AS r(name, place) WHERE {asked} ORDER BY r.place"
            )
        with translated(connection, self.table.db_table):
            return execute(connection, sql, (*params, names, self.table.label, mark))

    def replace_by_copies(
        self,
        connection: Any,
        seqs: Sequence[int],
        recipients: Sequence[str],
        token: uuid.UUID | None = None,
        recipient: str = "",
    ) -> int:
        c = self._c
        names = [name for name in self.table.copied if name in c]
        columns = ", ".join(c[name] for name in names)
        free = ", ".join([columns, c["recipient"], *([c["lease_expires"]] if self.table.has_unevaluated else [])])
        values = ", ".join(
            [*(f"g.{c[name]}" for name in names), "r.name", *(["NULL"] if self.table.has_unevaluated else [])]
        )
        condition = self._fenced if token else self._free
        # Primary key. Safe: one statement, so either the message or its copies exist; SKIP LOCKED waits for no row, the
        # token fences. Copies of one message are adjacent, in the order of the originals.
        sql = (
            f"WITH gone AS (DELETE FROM {self._q} WHERE {c['seq']} = ANY(ARRAY(SELECT {c['seq']} FROM {self._q} "
            f"WHERE {c['seq']} = ANY(%s) AND {c['recipient']} = %s AND {condition} ORDER BY {c['seq']} FOR UPDATE SKIP "
            "LOCKED)) "
            f"RETURNING {c['seq']}, {columns}), put AS (INSERT INTO {self._q} ({free}) SELECT {values} FROM gone g "
            f"CROSS JOIN unnest(%s::varchar[]) WITH ORDINALITY AS r(name, place) ORDER BY g.{c['seq']}, r.place) "
            "SELECT count(*) FROM gone"
        )
        params = (list(seqs), recipient, *([token] if token else []), list(recipients))
        with translated(connection, self.table.db_table):
            return int(fetch(connection, sql, params)[0][0])

    def insert_routed(
        self, connection: Any, tables: BrokerTables, message: Outgoing, exchange: str, routing_key: str | None
    ) -> int:
        columns = ", ".join(self._c[name] for name in ("id", "headers", "body", "recipient", "priority", "expires"))
        by_key = "" if routing_key is None else " AND b.routing_key = %s"
        # The unique index of the bindings (exchange, routing key, queue), then the primary key of the queues. Safe: one
        # statement in the caller's transaction; a queue that is deleted meanwhile gets a message, which a later queue
        # of that name receives.
        sql = (
            f"INSERT INTO {self._q} ({columns}) SELECT %s::uuid, %s::text, %s::bytea, d.name, %s::smallint, "
            "clock_timestamp() + least(%s::bigint, d.message_ttl_ms) * interval '1 ms' "
            f"FROM {quote_table(tables.queues)} d WHERE (d.expires_at IS NULL OR d.expires_at > clock_timestamp()) "
            f"AND d.name = ANY(ARRAY(SELECT b.queue FROM {quote_table(tables.bindings)} b WHERE b.exchange = "
            f"%s{by_key}))"
        )
        params = (*message[:3], message.priority, message.expires_ms, exchange)
        return execute(connection, sql, params if routing_key is None else (*params, routing_key))


class PostgresqlDedupe(Dedupe):
    """The two tables that all queues of a database share."""

    def __init__(self, guard: PlanGuard) -> None:
        self._guard = guard

    def lock_keys(
        self, connection: Any, db_table: str, queue: str, keys: Sequence[str], ids: Sequence[uuid.UUID]
    ) -> dict[str, uuid.UUID]:
        # The unique index on queue and key, one seek a key. Safe: the no-op update locks an existing row, and waits for
        # a transaction that inserts it; in key order, so that two senders never wait for each other. (Digests in one
        # text: psycopg escapes each item of an array.)
        sql = (
            f"INSERT INTO {quote_table(db_table)} AS t (queue, key, message_id) "
            "SELECT %s, u.key, u.id FROM unnest(string_to_array(%s, ','), %s::uuid[]) AS u(key, id) ORDER BY u.key "
            "ON CONFLICT (queue, key) DO UPDATE SET queue = excluded.queue RETURNING t.key, t.message_id"
        )
        return {
            key: as_uuid(message_id) for key, message_id in fetch(connection, sql, (queue, ",".join(keys), list(ids)))
        }

    def set_keys(
        self, connection: Any, db_table: str, queue: str, keys: Sequence[str], ids: Sequence[uuid.UUID]
    ) -> int:
        # The unique index on queue and key. Safe: the caller holds the rows.
        sql = (
            f"UPDATE {quote_table(db_table)} t SET message_id = u.id, changed_at = clock_timestamp() "
            "FROM unnest(%s::text[], %s::uuid[]) AS u(key, id) WHERE t.queue = %s AND t.key = u.key"
        )
        return self._guard.execute_by_key(connection, sql, (list(keys), list(ids), queue))

    def lock_stored(
        self, connection: Any, table: StoreTable, destination: str, ids: Sequence[uuid.UUID]
    ) -> list[tuple[int, uuid.UUID]]:
        key, identity, where = (
            quote(table.key),
            quote(table.columns["message_id"]),
            quote(table.columns["destination"]),
        )
        # The index on message_id. Safe: it waits for a dispatcher that is moving a row, whose commit deletes it.
        sql = (
            f"SELECT {key}, {identity} FROM {quote_table(table.db_table)} WHERE {identity} = ANY(%s) AND {where} = %s "
            f"ORDER BY {key} FOR UPDATE"
        )
        rows = self._guard.fetch_by_key(connection, sql, (list(ids), destination))
        return [(number, as_uuid(message_id)) for number, message_id in rows]

    def purge_keys(
        self, connection: Any, db_table: str, queue: QueueTable, store: StoreTable, keep_ms: int, limit: int
    ) -> int:
        table, waiting, stored = quote_table(db_table), quote_table(queue.db_table), quote_table(store.db_table)
        # The index on changed_at, and for each key the ones on the id in the queue and in the store. Safe: a key that a
        # sender has locked is skipped, and a deleted one is created again.
        sql = (
            f"DELETE FROM {table} WHERE id = ANY(ARRAY(SELECT t.id FROM {table} t WHERE t.queue = %s "
            "AND t.changed_at < clock_timestamp() - %s * interval '1 ms' "
            f"AND NOT EXISTS (SELECT 1 FROM {waiting} q WHERE q.{quote(queue.columns['id'])} = t.message_id) "
            f"AND NOT EXISTS (SELECT 1 FROM {stored} s WHERE s.{quote(store.columns['message_id'])} = t.message_id) "
            "ORDER BY t.changed_at LIMIT %s FOR UPDATE OF t SKIP LOCKED))"
        )
        return execute(connection, sql, (queue.label, keep_ms, limit))

    def record_processed(self, connection: Any, db_table: str, key: str, queue: str) -> bool:
        # The primary key. Safe: it waits for a transaction that inserts the same key, and inserts after its rollback.
        sql = f"INSERT INTO {quote_table(db_table)} (key, queue) VALUES (%s, %s) ON CONFLICT (key) DO NOTHING"
        return execute(connection, sql, (key, queue)) == 1

    def purge_processed(self, connection: Any, db_table: str, keep_ms: int, limit: int) -> int:
        table = quote_table(db_table)
        # The index on processed_at; SKIP LOCKED waits for no row.
        sql = (
            f"DELETE FROM {table} WHERE key = ANY(ARRAY(SELECT key FROM {table} "
            "WHERE processed_at < clock_timestamp() - %s * interval '1 ms' ORDER BY processed_at LIMIT %s "
            "FOR UPDATE SKIP LOCKED))"
        )
        return execute(connection, sql, (keep_ms, limit))


class PostgresqlEarlyAcks(EarlyAcks):
    """The table of early acks."""

    def __init__(self, guard: PlanGuard) -> None:
        self._guard = guard

    def lock_name(self, connection: Any, name: str, *, shared: bool = False) -> None:
        # No index. Names with equal digests wait for each other, which is harmless.
        key = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)
        fetch(connection, f"SELECT pg_advisory_xact_lock{'_shared' if shared else ''}(%s::bigint)", (key,))

    def store(
        self, connection: Any, db_table: str, queue: str, ids: Sequence[uuid.UUID], kind: str, keep_ms: int
    ) -> None:
        # The unique index on queue and id. Safe: every other writer of these rows waits for the name's lock.
        sql = (
            f"INSERT INTO {quote_table(db_table)} (queue, message_id, kind, expires) "
            "SELECT %s, u.id, %s, clock_timestamp() + %s * interval '1 ms' FROM unnest(%s::uuid[]) AS u(id) ORDER BY "
            "u.id ON CONFLICT (queue, message_id) DO UPDATE SET kind = excluded.kind, expires = excluded.expires"
        )
        execute(connection, sql, (queue, kind, keep_ms, list(ids)))

    def take(self, connection: Any, db_table: str, queue: str, ids: Sequence[uuid.UUID]) -> list[uuid.UUID]:
        # The unique index on queue and id, one seek an id. Safe: as above; in the caller's transaction, so the ack of a
        # message whose send rolls back is kept.
        sql = (
            f"DELETE FROM {quote_table(db_table)} WHERE queue = %s AND message_id = ANY(%s) "
            "RETURNING message_id, expires > clock_timestamp()"
        )
        rows = self._guard.fetch_by_key(connection, sql, (queue, list(ids)))
        return [as_uuid(key) for key, in_time in rows if in_time]
