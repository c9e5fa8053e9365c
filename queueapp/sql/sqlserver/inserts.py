"""SQL Server: storing messages and copies of them, one by one, and in bulk as JSON; dedupe keys, processed
keys and early acks, under application locks of the transaction.

The driver's bulk copy uses a connection of its own, outside of the caller's transaction; ``INSERT … SELECT … FROM
OPENJSON`` is inside. One parameter holds any number of rows, so there is one text and one plan. The order of the rows
is the order of their identity numbers. A body is hex there: JSON has no bytes.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from ...messages.ids import as_uuid
from ..inserts import BrokerTables, Dedupe, EarlyAcks, Fanout, Inserts, Source, Subscribed
from ..message_columns import BY_NAME, COUNTS, NO_OPTIONS, SENT, WHOLE, Kind, MessageColumn, Outgoing, Row, Run
from ..tables import QueueTable, StoreTable
from .errors import LockRefused
from .key_locks import EXISTING, lock_keys_of
from .statements import (
    KEYS,
    LATER,
    MAX_BATCH,
    TAKING,
    Json,
    Statements,
    TableText,
    execute,
    fetch,
    in_json,
    json_of,
    later_params,
    names_of,
    quote,
    quote_table,
    translated,
    type_of,
)

#: Rows and characters of one statement. Its row locks stay well below the 5,000 at which the server locks the table.
_ROWS = 1_000
_CHARACTERS = 4_000_000


def _in_json(column: MessageColumn) -> tuple[str, str]:
    """(type in the JSON, value in the SELECT) of an optional attribute."""
    value = f"r.[{column.name}]"
    if column.kind is not Kind.TIME:
        return type_of(column), value
    later = f"DATEADD(millisecond, {value} %% 86400000, DATEADD(day, {value} / 86400000, SYSUTCDATETIME()))"
    return "bigint", later


#: Named only where a message of the statement sets them.
_OPTIONAL = {"body": ("varchar(max)", "CONVERT(varbinary(max), r.[body], 2)")}
_OPTIONAL |= {column.name: _in_json(column) for column in SENT}
_NAMES = tuple(_OPTIONAL)
_DEFAULTS = (None, *NO_OPTIONS)
_ID, _HEADERS = "[id] uniqueidentifier '$[1]'", "[headers] nvarchar(max) '$[2]'"

#: Columns and the expressions that fill them.
Pairs = list[tuple[str, str]]

# Rows of another database
_TYPES = {
    "id": "uniqueidentifier",
    "headers": "nvarchar(max)",
    "body": "varchar(max)",
    "deliveries": "int",
    "cancels": "int",
    "failures": "nvarchar(max)",
} | {column.name: type_of(column) for column in BY_NAME.values()}
_TYPES_PRIORITY64 = _TYPES | {column.name: type_of(column, priority64=True) for column in BY_NAME.values()}
#: A body is hex in JSON, which has no bytes.
_VALUES = {"body": "CONVERT(varbinary(max), r.[body], 2)"}
# Rows of a SELECT
#: Of an id: its last 64 bits, of which the first is set, as a signed number.
_LOW = 2**64
_UTF8 = "Latin1_General_100_BIN2_UTF8"

_RECIPIENTS = "OPENJSON(%s) WITH ([n] int '$[0]', [name] nvarchar(200) '$[1]') AS r"


def _shape(message: Outgoing, columns: dict[str, str]) -> tuple[bool, ...]:
    """Which optional attributes differ from their column's default. A column that the table lacks is never named."""
    values = zip(_NAMES, message[2:], _DEFAULTS, strict=True)
    return tuple([value != default and name in columns for name, value, default in values])


def given(column: MessageColumn, value: Any) -> tuple[str, tuple[Any, ...]]:
    """(text, parameters) of a value that is not None; a duration becomes a time by the database's clock."""
    if column.kind is Kind.TIME:
        return LATER, later_params(value)
    return (str(int(value)), ()) if column.kind is Kind.BOOL else ("%s", (value,))


def insert_statement(
    table: str, columns: dict[str, str], filled: Pairs, known: dict[tuple[bool, ...], str], message: Outgoing
) -> tuple[str, tuple[Any, ...]]:
    """The INSERT of one message and its parameters; ``known`` keeps one text per combination of columns."""
    shape = _shape(message, columns)
    params: list[Any] = [message.id, message.headers]
    if shape[0]:
        params.append(message.body)
    used = [(column, value) for column, value, is_used in zip(SENT, message[3:], shape[1:], strict=True) if is_used]
    values = [(column.name, *given(column, value)) for column, value in used]
    for _, _, of_value in values:
        params += of_value
    # A bit is written into the text, only where it differs from its default, so there is one text per shape.
    sql = known.get(shape)
    if sql is None:
        pairs = [(columns["id"], "%s"), (columns["headers"], "%s"), *([(columns["body"], "%s")] if shape[0] else [])]
        pairs += [(columns[name], text) for name, text, _ in values] + filled
        # Index: none is read. Safe: one row in the caller's transaction; expiry by the database's clock.
        sql = known[shape] = (
            f"INSERT INTO {table} ({', '.join(column for column, _ in pairs)}) "
            f"VALUES ({', '.join(value for _, value in pairs)})"
        )
    return sql, tuple(params)


def insert_bulk(
    connection: Any, table: str, columns: dict[str, str], filled: Pairs, runs: Iterable[Run], priority64: bool = False
) -> int:
    """Store all messages in the caller's transaction; returns how many. ``priority64``: their priority has 64 bits."""
    types = {name: kind for name, (kind, _) in _OPTIONAL.items()}
    types["priority"] = type_of(BY_NAME["priority"], priority64=priority64)
    count = 0
    for rows, shape in _chunks(runs, columns):
        used = [name for name, is_used in zip(_NAMES, shape, strict=True) if is_used]
        pairs = [(columns["id"], "r.[id]"), (columns["headers"], "r.[headers]")]
        pairs += [(columns[name], _OPTIONAL[name][1]) for name in used] + filled
        fields = [f"[{name}] {types[name]} '$[{n + 3}]'" for n, name in enumerate(_NAMES) if name in used]
        # Index: none is read. Safe: identity numbers of INSERT … SELECT … ORDER BY are assigned in that order; fewer
        # than 5,000 rows a statement, so receivers never meet a table lock; expiry by the database's clock.
        sql = (
            f"INSERT INTO {table} ({', '.join(column for column, _ in pairs)}) "
            f"SELECT {', '.join(value for _, value in pairs)} FROM OPENJSON(%s) WITH ([n] int '$[0]', "
            f"{', '.join([_ID, _HEADERS, *fields])}) AS r ORDER BY r.[n]"
        )
        count += execute(connection, sql, (Json("[" + ",".join(rows) + "]"),))
    return count


def _chunks(runs: Iterable[Run], columns: dict[str, str]) -> Iterator[tuple[list[str], tuple[bool, ...]]]:
    """Rows as JSON arrays, in pieces, and which optional columns those rows need.

    Rows are drawn before their statement runs, because the iterable may be a queryset on the same connection.
    """
    encode = json.JSONEncoder(check_circular=False, separators=(",", ":")).encode
    rows: list[str] = []
    characters, shape = 0, (False,) * len(_NAMES)
    for like, ids, bodies, _ in chain.from_iterable(run.alike() for run in runs):
        headers, rest = like.headers, like[3:]
        shapes = [_shape(like._replace(body=body), columns) for body in (None, b"")]
        for identity, body in zip(ids, bodies, strict=True):
            text = None if body is None else body.hex()
            row = encode([len(rows), str(uuid.UUID(bytes=identity)), headers, text, *rest])
            rows.append(row)
            characters += len(row)
            shape = tuple(map(max, shape, shapes[body is not None]))
            if len(rows) == _ROWS or characters >= _CHARACTERS:
                yield rows, shape
                rows, characters, shape = [], 0, (False,) * len(_NAMES)
    if rows:
        yield rows, shape


class SqlServerInserts(Statements, Inserts):
    """The statements are written once per combination of columns."""

    def __init__(self, text: TableText) -> None:
        super().__init__(text)
        self._inserts: dict[tuple[bool, ...], str] = {}

    def insert_of(self, message: Outgoing) -> tuple[str, tuple[Any, ...]]:
        """The INSERT of one message and its parameters."""
        return insert_statement(self._q, self._c, self._filled, self._inserts, message)

    def insert(self, connection: Any, message: Outgoing) -> None:
        with translated(connection, self.table.db_table):
            execute(connection, *self.insert_of(message))

    def insert_runs(self, connection: Any, runs: Iterable[Run], undisturbed: bool = False) -> int:
        # Each piece is one statement, drawn before it is sent, so ``undisturbed`` makes no difference.
        with translated(connection, self.table.db_table):
            return insert_bulk(connection, self._q, self._c, self._filled, runs, self.table.priority64)

    def insert_row(self, connection: Any, row: Row, *, same_queue: bool = False) -> None:
        row = self.table.within_levels(row)
        names = Row._fields if same_queue else self.table.moved(Row._fields)
        given = {name: getattr(row, name) for name in names if name in self._c}
        given = {name: value for name, value in given.items() if value is not None}
        given.pop("seq")
        # A bit is written into the text: see ``execute``.
        pairs = [(self._c[name], str(int(value)) if isinstance(value, bool) else "%s") for name, value in given.items()]
        pairs += self._filled
        params = [value for value in given.values() if not isinstance(value, bool)]
        # Index: none is read. Safe: one row in the caller's transaction.
        sql = (
            f"INSERT INTO {self._q} ({', '.join(column for column, _ in pairs)}) "
            f"VALUES ({', '.join(value for _, value in pairs)})"
        )
        with translated(connection, self.table.db_table):
            execute(connection, sql, params)

    def insert_rows(self, connection: Any, rows: Sequence[Row]) -> int:
        rows = [self.table.within_levels(row) for row in rows]
        types = _TYPES_PRIORITY64 if self.table.priority64 else _TYPES
        moved = [name for name in self.table.moved(types) if name in self._c]
        used = [name for name in moved if any(getattr(row, name) is not None for row in rows)]
        pairs = [(self._c[name], _VALUES.get(name, f"r.[{name}]")) for name in used] + self._filled
        fields = ", ".join(f"[{name}] {types[name]} '$[{n + 1}]'" for n, name in enumerate(used))
        # Index: none is read. Safe: the caller's transaction; identity numbers follow the ORDER BY.
        sql = (
            f"INSERT INTO {self._q} ({', '.join(column for column, _ in pairs)}) "
            f"SELECT {', '.join(value for _, value in pairs)} FROM OPENJSON(%s) WITH ([n] int '$[0]', {fields}) AS r "
            "ORDER BY r.[n]"
        )
        count = 0
        with translated(connection, self.table.db_table):
            for first in range(0, len(rows), MAX_BATCH):
                piece = rows[first : first + MAX_BATCH]
                values = [[n, *(in_json(getattr(row, name)) for name in used)] for n, row in enumerate(piece)]
                count += execute(connection, sql, (Json(json.dumps(values, separators=(",", ":"))),))
        return count

    def insert_from(
        self, connection: Any, source: StoreTable, keys: Sequence[int], *, reset_counts: bool = False
    ) -> int:
        names = self.table.moved(name for name in (*WHOLE, *(() if reset_counts else COUNTS)) if self.table.has(name))
        pairs = [(self._c["id"], f"q.{quote(source.columns['message_id'])}")]
        pairs += [(self._c[name], f"q.{quote(source.columns[name])}") for name in names] + self._filled
        if self.table.restarts_age and (retried := source.retried("q")):
            age = f"CASE WHEN {retried} THEN q.{quote(source.columns['enqueued_at'])} ELSE SYSUTCDATETIME() END"
            pairs.append((self._c["enqueued_at"], age))
        params: tuple[Any, ...] = (json_of(list(keys)),)
        if highest := max(0, self.table.levels - 1):
            place = 1 + names.index("priority")
            column, value = pairs[place]
            pairs[place] = column, f"CASE WHEN {value} < 0 THEN 0 WHEN {value} > %s THEN %s ELSE {value} END"
            params = (highest, highest, *params)
        # Index: the primary key of the source, one seek a key (KEYS). Safe: the caller holds the locks of its rows and
        # deletes them in the same transaction; identity numbers follow the ORDER BY.
        sql = (
            f"INSERT INTO {self._q} ({', '.join(column for column, _ in pairs)}) "
            f"SELECT {', '.join(value for _, value in pairs)} {KEYS} {quote_table(source.db_table)} AS q "
            f"ON q.{quote(source.key)} = k.[key] ORDER BY q.{quote(source.order)}, q.{quote(source.key)}"
        )
        with translated(connection, self.table.db_table):
            return execute(connection, sql, params)

    # -- messages made of the rows of a SELECT ------------------------------------------------------------------------

    def ordered_select(self, select: str) -> str:
        # Without OFFSET a derived table may not be ordered. mssql-django appends it to an ordered SELECT, but not to a
        # union.
        return select if select.endswith("OFFSET 0 ROWS") else f"{select} OFFSET 0 ROWS"

    def columns_of(self, connection: Any, source: Source) -> list[tuple[str, int]]:
        if source.names is not None:
            return [(name, 0) for name in source.names]
        # Index: none; no row is read.
        sql = f"SELECT * FROM ({source.sql}) AS s WHERE 1 = 0"
        return [(name, 0) for name in names_of(connection, sql, source.params)]

    def insert_select(self, connection: Any, like: Outgoing, source: Source, columns: Sequence[tuple[str, int]]) -> int:
        number = "CAST(%s AS bigint) + ROW_NUMBER() OVER (ORDER BY (SELECT NULL))"
        # The last eight bytes of an id are stored in written order.
        pairs = [
            (self._c["id"], f"CAST(CAST(%s AS binary(8)) + CAST({number} AS binary(8)) AS uniqueidentifier)"),
            (self._c["headers"], "%s"),
            (self._c["body"], f"CAST(CAST(j.[body] COLLATE {_UTF8} AS varchar(max)) AS varbinary(max))"),
        ]
        params: list[Any] = [like.id.bytes_le[:8], like.id.int % _LOW - _LOW - 1, like.headers]
        for column, value, default in zip(SENT, like[3:], NO_OPTIONS, strict=True):
            if value != default and column.name in self._c:
                text, of_value = given(column, value)
                pairs.append((self._c[column.name], text))
                params += of_value
        # Messages that are evaluated on entry are pending by the table's default.
        pending = {self._c["lease_expires"]} if self.table.has_unevaluated else set()
        pairs += [pair for pair in self._filled if pair[0] not in pending]
        names = ", ".join(f"[c{n}]" for n in range(len(columns)))
        fields = ", ".join(f"s.[c{n}] AS {quote(name)}" for n, (name, _) in enumerate(columns))
        # Index: that of the caller's SELECT. Safe: the caller's transaction. From a few thousand rows on the server
        # locks the table, and receivers wait for the commit.
        sql = (
            f"INSERT INTO {self._q} ({', '.join(column for column, _ in pairs)}) "
            f"SELECT {', '.join(value for _, value in pairs)} FROM ({source.sql}) AS s({names}) "
            f"CROSS APPLY (SELECT (SELECT {fields} FOR JSON PATH, INCLUDE_NULL_VALUES, WITHOUT_ARRAY_WRAPPER) AS "
            "[body]) AS j"
        )
        with translated(connection, self.table.db_table):
            return execute(connection, sql, (*params, *source.params))


def _numbered(names: Sequence[str]) -> str:
    return json_of(list(enumerate(names)))


class SqlServerFanout(Statements, Fanout):
    """Copies of messages. A statement has no snapshot here, so originals are locked, copied and deleted in three."""

    def __init__(self, text: TableText, inserts: SqlServerInserts) -> None:
        super().__init__(text)
        self._inserts = inserts

    def read_subscriptions(self, connection: Any, subscriptions: str) -> list[Subscribed]:
        # Index: the unique one, which begins with the queue; a few rows. Safe: waits for uncommitted subscriptions.
        sql = (
            f"SELECT s.[consumer], s.[type_name], s.[aliases], s.[mark] FROM {quote_table(subscriptions)} AS s "
            "WITH (READCOMMITTEDLOCK) WHERE s.[queue] = %s ORDER BY s.[number]"
        )
        return [Subscribed(*row) for row in fetch(connection, sql, (self.table.label,))]

    def insert_copies(
        self, connection: Any, message: Outgoing, recipients: Sequence[str], subscriptions: str, mark: int
    ) -> int:
        single, params = self._inserts.insert_of(message)
        head, _, values = single.partition(") VALUES (")
        # Index: the unique one of the subscriptions, once a statement; none of the queue. Safe: one statement, so all
        # copies or none; it waits for uncommitted subscriptions. Identity numbers follow the ORDER BY.
        sql = (
            f"{head}, {self._c['recipient']}) SELECT {values[:-1]}, r.[name] FROM {_RECIPIENTS} WHERE (SELECT "
            "COALESCE(SUM(s.[mark]), 0) "
            f"FROM {quote_table(subscriptions)} AS s WITH (READCOMMITTEDLOCK) WHERE s.[queue] = %s) = %s ORDER BY r.[n]"
        )
        with translated(connection, self.table.db_table):
            return execute(connection, sql, (*params, _numbered(recipients), self.table.label, mark))

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
        columns = ", ".join([*(c[name] for name in names), c["recipient"]])
        values = ", ".join([*(f"q.{c[name]}" for name in names), "r.[name]"])
        if self.table.has_unevaluated:
            columns, values = f"{columns}, {c['lease_expires']}", f"{values}, NULL"
        condition = f"q.{c['lease_token']} = %s" if token else self.free()
        # Index: the primary key, one seek a key (KEYS), in all three. Safe: TAKING waits for no row, and this
        # transaction keeps its locks to its end: the same rows are copied and deleted. Identity numbers follow the
        # ORDER BY.
        lock = (
            f"SELECT q.{c['seq']} {KEYS} {self._q} AS q WITH ({TAKING}) ON q.{c['seq']} = k.[key] "
            f"WHERE q.{c['recipient']} = %s AND {condition} ORDER BY q.{c['seq']}"
        )
        copy = (
            f"INSERT INTO {self._q} ({columns}) SELECT {values} {KEYS} {self._q} AS q WITH (ROWLOCK) ON q.{c['seq']} = "
            f"k.[key] CROSS JOIN {_RECIPIENTS} ORDER BY q.{c['seq']}, r.[n]"
        )
        delete = f"DELETE q {KEYS} {self._q} AS q WITH (ROWLOCK) ON q.{c['seq']} = k.[key]"
        done = 0
        size = max(1, MAX_BATCH // max(1, len(recipients)))
        with translated(connection, self.table.db_table):
            for first in range(0, len(seqs), size):
                asked = (json_of(list(seqs[first : first + size])), recipient, *([str(token)] if token else []))
                keys = json_of([seq for (seq,) in fetch(connection, lock, asked)])
                if recipients:
                    execute(connection, copy, (keys, _numbered(recipients)))
                done += execute(connection, delete, (keys,))
        return done

    def insert_routed(
        self, connection: Any, tables: BrokerTables, message: Outgoing, exchange: str, routing_key: str | None
    ) -> int:
        columns = ", ".join(self._c[name] for name in ("id", "headers", "body", "recipient", "priority", "expires"))
        # A parameter is never NULL: NULLs are written into the text. There is no LEAST before 2022.
        params: list[Any] = [message.id, message.headers]
        body = "NULL" if message.body is None else "%s"
        if message.body is not None:
            params.append(message.body)
        params.append(message.priority)
        least = "d.[message_ttl_ms]"
        if message.expires_ms is not None:
            least = "CASE WHEN d.[message_ttl_ms] < %s THEN d.[message_ttl_ms] ELSE %s END"
            params += [message.expires_ms, message.expires_ms]
        params.append(exchange)
        by_key = ""
        if routing_key is not None:
            by_key = " AND b.[routing_key] = %s"
            params.append(routing_key)
        later = "DATEADD(millisecond, e.ms %% 86400000, DATEADD(day, e.ms / 86400000, SYSUTCDATETIME()))"
        # Index: the unique one of the bindings (exchange, routing key, queue), then the primary key of the queues.
        # Safe: one statement in the caller's transaction; a queue that is deleted meanwhile gets a message, which a
        # later queue of that name receives.
        sql = (
            f"INSERT INTO {self._q} ({columns}) SELECT %s, %s, {body}, d.[name], %s, {later} "
            f"FROM {quote_table(tables.queues)} AS d CROSS APPLY (SELECT {least} AS ms) AS e "
            "WHERE (d.[expires_at] IS NULL OR d.[expires_at] > SYSUTCDATETIME()) "
            f"AND d.[name] IN (SELECT b.[queue] FROM {quote_table(tables.bindings)} AS b WHERE b.[exchange] = "
            f"%s{by_key})"
        )
        return execute(connection, sql, params)


# Dedupe keys, processed keys and early acks
_PAIRS = "OPENJSON(%s) WITH ([key] varchar(64) '$[0]', [id] uniqueidentifier '$[1]') AS u"
_IDS = "OPENJSON(%s) WITH ([id] uniqueidentifier '$') AS u"


class SqlServerDedupe(Dedupe):
    """The two tables that all queues of a database share."""

    def lock_keys(
        self, connection: Any, db_table: str, queue: str, keys: Sequence[str], ids: Sequence[uuid.UUID]
    ) -> dict[str, uuid.UUID]:
        table, found = quote_table(db_table), dict[str, uuid.UUID]()
        pairs = sorted(zip(keys, ids, strict=True))
        lock_keys_of(connection, db_table, (f"{queue} {key}" for key in keys))
        for first in range(0, len(pairs), MAX_BATCH):
            piece = json_of([[key, str(message_id)] for key, message_id in pairs[first : first + MAX_BATCH]])
            # Index: the unique one on queue and key, one seek a key. Safe: under the lock on its name no other session
            # inserts a key; UPDLOCK keeps an existing one from a purge.
            sql = (
                f"INSERT INTO {table} ([queue], [key], [message_id]) SELECT %s, u.[key], u.[id] FROM {_PAIRS} "
                f"WHERE NOT EXISTS (SELECT 1 FROM {table} AS t WITH ({EXISTING}) "
                "WHERE t.[queue] = %s AND t.[key] = u.[key]) ORDER BY u.[key]"
            )
            execute(connection, sql, (queue, piece, queue))
            # Index: the same. Safe: they are locked.
            sql = (
                f"SELECT t.[key], t.[message_id] FROM {_PAIRS} INNER LOOP JOIN {table} AS t WITH (UPDLOCK, ROWLOCK) "
                "ON t.[key] = u.[key] WHERE t.[queue] = %s"
            )
            found |= {key: as_uuid(message_id) for key, message_id in fetch(connection, sql, (piece, queue))}
        return found

    def set_keys(
        self, connection: Any, db_table: str, queue: str, keys: Sequence[str], ids: Sequence[uuid.UUID]
    ) -> int:
        pairs, count = sorted(zip(keys, ids, strict=True)), 0
        for first in range(0, len(pairs), MAX_BATCH):
            piece = json_of([[key, str(message_id)] for key, message_id in pairs[first : first + MAX_BATCH]])
            # Index: the unique one on queue and key, one seek a key. Safe: the caller holds the locks.
            sql = (
                f"UPDATE t SET [message_id] = u.[id], [changed_at] = SYSUTCDATETIME() FROM {_PAIRS} INNER LOOP JOIN "
                f"{quote_table(db_table)} AS t WITH (ROWLOCK) ON t.[key] = u.[key] WHERE t.[queue] = %s"
            )
            count += execute(connection, sql, (piece, queue))
        return count

    def lock_stored(
        self, connection: Any, table: StoreTable, destination: str, ids: Sequence[uuid.UUID]
    ) -> list[tuple[int, uuid.UUID]]:
        key, identity, where = (
            quote(name) for name in (table.key, table.columns["message_id"], table.columns["destination"])
        )
        found: list[tuple[int, uuid.UUID]] = []
        for first in range(0, len(ids), MAX_BATCH):
            piece = json_of([str(key) for key in ids[first : first + MAX_BATCH]])
            # Index: the one on message_id, one seek an id. Safe: it waits for a dispatcher that is moving a row.
            sql = (
                f"SELECT s.{key}, s.{identity} FROM {_IDS} INNER LOOP JOIN {quote_table(table.db_table)} AS s "
                f"WITH (UPDLOCK, ROWLOCK, READCOMMITTEDLOCK) ON s.{identity} = u.[id] WHERE s.{where} = %s"
            )
            found += [
                (number, as_uuid(message_id)) for number, message_id in fetch(connection, sql, (piece, destination))
            ]
        return sorted(found)

    def purge_keys(
        self, connection: Any, db_table: str, queue: QueueTable, store: StoreTable, keep_ms: int, limit: int
    ) -> int:
        table, waiting, stored = quote_table(db_table), quote_table(queue.db_table), quote_table(store.db_table)
        # Index: the one on changed_at, and for each key those on the id in the queue and in the store. Safe: a key that
        # a sender has locked is skipped, and a deleted one is created again; READCOMMITTEDLOCK waits for uncommitted
        # inserts and deletes.
        sql = (
            f"WITH old AS (SELECT TOP ({int(limit)}) t.[id] FROM {table} AS t WITH ({TAKING}) WHERE t.[queue] = %s "
            f"AND t.[changed_at] < {LATER} AND NOT EXISTS (SELECT 1 FROM {waiting} AS q WITH (READCOMMITTEDLOCK) "
            f"WHERE q.{quote(queue.columns['id'])} = t.[message_id]) "
            f"AND NOT EXISTS (SELECT 1 FROM {stored} AS s WITH (READCOMMITTEDLOCK) "
            f"WHERE s.{quote(store.columns['message_id'])} = t.[message_id]) ORDER BY t.[changed_at]) DELETE FROM old"
        )
        return execute(connection, sql, (queue.label, *later_params(-keep_ms)))

    def record_processed(self, connection: Any, db_table: str, key: str, queue: str) -> bool:
        table = quote_table(db_table)
        lock_keys_of(connection, db_table, (key,))
        # Index: the primary key. Safe: under the lock on its name no other session inserts the key.
        sql = (
            f"INSERT INTO {table} ([key], [queue]) SELECT v.[key], v.[queue] FROM (SELECT %s AS [key], %s AS [queue]) "
            f"AS v WHERE NOT EXISTS (SELECT 1 FROM {table} AS t WITH ({EXISTING}) WHERE t.[key] = v.[key])"
        )
        return execute(connection, sql, (key, queue)) == 1

    def purge_processed(self, connection: Any, db_table: str, keep_ms: int, limit: int) -> int:
        # Index: the one on processed_at. Safe: locked rows are skipped.
        sql = (
            f"WITH old AS (SELECT TOP ({int(limit)}) t.[key] FROM {quote_table(db_table)} AS t WITH ({TAKING}) "
            f"WHERE t.[processed_at] < {LATER} ORDER BY t.[processed_at]) DELETE FROM old"
        )
        return execute(connection, sql, later_params(-keep_ms))


class SqlServerEarlyAcks(EarlyAcks):
    """The table of early acks."""

    def lock_name(self, connection: Any, name: str, *, shared: bool = False) -> None:
        # No index. sp_getapplock raises nothing when it is a deadlock's victim (-3): it returns that.
        mode = "Shared" if shared else "Exclusive"
        got = fetch(
            connection,
            f"SET NOCOUNT ON; DECLARE @got int; EXEC @got = sp_getapplock @Resource = %s, @LockMode = '{mode}', "
            "@LockOwner = 'Transaction', @LockTimeout = -1; SELECT @got",
            (name,),
        )[0][0]
        if got < 0:
            raise LockRefused(name, got)

    def store(
        self, connection: Any, db_table: str, queue: str, ids: Sequence[uuid.UUID], kind: str, keep_ms: int
    ) -> None:
        table = quote_table(db_table)
        for first in range(0, len(ids), MAX_BATCH):
            piece = json_of(list(ids[first : first + MAX_BATCH]))
            # Index: the unique one on queue and id, one seek an id. Safe: every other writer of these rows waits for
            # the name's lock, so none writes between the two statements.
            sql = (
                f"UPDATE d SET [kind] = %s, [expires] = {LATER} FROM {_IDS} INNER LOOP JOIN {table} AS d WITH "
                "(ROWLOCK) ON d.[message_id] = u.[id] WHERE d.[queue] = %s"
            )
            execute(connection, sql, (kind, *later_params(keep_ms), piece, queue))
            sql = (
                f"INSERT INTO {table} ([queue], [message_id], [kind], [expires]) SELECT %s, u.[id], %s, {LATER} FROM "
                f"{_IDS} WHERE NOT EXISTS (SELECT 1 FROM {table} AS d WHERE d.[queue] = %s AND d.[message_id] = u.[id])"
            )
            execute(connection, sql, (queue, kind, *later_params(keep_ms), piece, queue))

    def take(self, connection: Any, db_table: str, queue: str, ids: Sequence[uuid.UUID]) -> list[uuid.UUID]:
        found: list[uuid.UUID] = []
        for first in range(0, len(ids), MAX_BATCH):
            piece = json_of(list(ids[first : first + MAX_BATCH]))
            # Index: the unique one on queue and id, one seek an id. Safe: as above; in the caller's transaction, so an
            # ack whose message is not stored after all is kept.
            sql = (
                "DELETE d OUTPUT deleted.[message_id], CASE WHEN deleted.[expires] > SYSUTCDATETIME() THEN 1 ELSE 0 "
                "END "
                f"FROM {_IDS} INNER LOOP JOIN {quote_table(db_table)} AS d WITH (ROWLOCK) ON d.[message_id] = u.[id] "
                "WHERE d.[queue] = %s"
            )
            found += [as_uuid(identity) for identity, in_time in fetch(connection, sql, (piece, queue)) if in_time]
        return found
