"""The statements of the Spark data source on SQL Server 2019 and later, for mssql-python (``?``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..barriers import lock_name
from ..journal import Position
from ..message_columns import BY_NAME, SENT
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
from .errors import DEADLOCKED
from .journal import HORIZON
from .key_locks import EXISTING
from .statements import LITERALS, LOOKING, type_of

#: Before the first statement of a session: by a server's ``user options`` NOCOUNT may be on, and no driver would know
#: how many rows a statement has moved, nor whether a batch was recorded before.
COUNT_ROWS = "SET NOCOUNT OFF"
#: An id arrives as text: the driver's bulk copy and the server disagree on the byte order of a binary uniqueidentifier.
_TYPES = {"id": "char(36)", "headers": "nvarchar(max)", "body": "varbinary(max)"}
_TYPES |= {column.name: type_of(column) for column in SENT}
_TYPES |= {DUE_AT: "datetime2", MARKS: "nvarchar(max)", ENTERS: "bit"}
_GUID = "CAST(s.[id] AS uniqueidentifier)"
#: DATEADD takes an int, and milliseconds of a month are none.
_LATER = "DATEADD(millisecond, p.[ms] % 1000, DATEADD(second, p.[ms] / 1000, {}))"
#: The parameter of a lifetime, after all but those of the piece.
_MS = " CROSS JOIN (VALUES (CAST(? AS bigint))) AS p ([ms])"
#: The piece of a staging table: two parameters, the last in their statement.
_PIECE = "s.[ord] >= ? AND s.[ord] < ?"
#: The rows of a piece. The server tries to lock a whole table when one statement has taken 5,000 locks on it, or on one
#: of its indexes; it checks that after every 1,250 new locks. A row is one lock on each, and a second one where it has
#: a page of its own, since the intent locks of pages are counted, too.
_PIECE_ROWS = 2_000
#: After all rows, ``ord`` being below it.
_END = 2**63 - 1
_WIDE = {"priority": type_of(BY_NAME["priority"], priority64=True)}


def quote(name: str) -> str:
    """An identifier in brackets; ``schema].[table`` is mssql-django's idiom for a qualified one and is kept."""
    return f"[{name}]" if "].[" in name else "[" + name.replace("]", "]]") + "]"


class SqlServerSparkSql(SparkSql):
    """One queue's sink on SQL Server."""

    clock = "SELECT DATEDIFF_BIG(millisecond, '1970-01-01', SYSUTCDATETIME())"

    # Index: none of ours, a catalog view. Safe: as on PostgreSQL, a later table is shown to the next commit.
    list_staging = (
        "SELECT t.name FROM sys.tables AS t WHERE t.name LIKE 'queueapp[_]stage[_]%' AND t.schema_id = SCHEMA_ID()"
    )

    notify = None

    def __init__(self, queue: QueueTable | None, ledger: LedgerTable) -> None:
        super().__init__(queue, ledger)
        self._ledger = quote(ledger.db_table)
        self._l = {name: quote(column) for name, column in ledger.columns.items()}
        self._queue = "" if queue is None else quote(queue.db_table)
        self._q = {} if queue is None else {name: quote(column) for name, column in queue.columns.items()}
        # A topic's queues may be claimed by a 64-bit priority.
        self._types = _TYPES | (_WIDE if queue is None or queue.priority64 else {})

    def fence(self, *, exclusive: bool) -> tuple[str, tuple[str, ...]]:
        # No table is read. Safe: released when the transaction ends in any way. The procedure raises nothing by itself,
        # not even for the victim of a deadlock.
        number, text = DEADLOCKED
        mode = "Exclusive" if exclusive else "Shared"
        sql = (
            "SET NOCOUNT ON; DECLARE @held int; EXEC @held = sp_getapplock @Resource = ?, "
            f"@LockMode = '{mode}', @LockOwner = 'Transaction', @LockTimeout = -1; "
            f"IF @held < 0 THROW {number}, '{text}', 1; SELECT @held"
        )
        return sql, (lock_name("send", self._table.db_table),)

    def probe_queue(self) -> str:
        # No rows and no index: names are resolved when the statement is compiled. An insert into the queue, so that the
        # sink needs no right to read it.
        names = [name for name in STAGED if name in self._q]
        casts = {**self._types, "id": "uniqueidentifier"}
        values = ", ".join(f"CAST(NULL AS {casts[name]})" for name in names)
        return f"INSERT INTO {self._queue} ({', '.join(self._q[name] for name in names)}) SELECT {values} WHERE 1 = 0"

    def probe_ledger(self) -> str:
        # No rows and no index, as above.
        return f"SELECT TOP (0) {', '.join(self._l.values())} FROM {self._ledger}"

    def create_staging(self, name: StagingName, attributes: Sequence[str], *, logged: bool = False) -> str:
        # ord: a FIFO queue needs the order of the partition, and the move of each piece seeks a range of it, where it
        # would scan the whole of a heap. The task writes in this order, so rows are appended to the index.
        columns = ", ".join(f"[{name}] {self._types[attribute_of(name)]} NULL" for name in attributes)
        return f"CREATE TABLE [{name.name}] ([ord] bigint NOT NULL PRIMARY KEY, {columns})"

    def drop_staging(self, name: StagingName) -> str:
        return f"DROP TABLE IF EXISTS [{name.name}]"

    def record(self) -> str:
        # Index: the unique (queue, publish_id, batch_id). Safe: a second commit of the batch waits for the row of the
        # first; its own INSERT fails then, and the next try finds that row. No HOLDLOCK: on an absent key it locks the
        # range up to the next one, and commits of other batches would wait while this one moves its rows.
        names = ("queue", "publish_id", "batch_id", "rows", "tasks")
        columns = [self._l[name] for name in names]
        same = " AND ".join(f"l.{column} = p.{column}" for column in columns[:3])
        return (
            f"INSERT INTO {self._ledger} ({', '.join(columns)}) "
            f"SELECT {', '.join('p.' + column for column in columns)} "
            f"FROM (VALUES (?, ?, ?, ?, ?)) AS p ({', '.join(columns)}) "
            f"WHERE NOT EXISTS (SELECT 1 FROM {self._ledger} AS l WITH ({EXISTING}) WHERE {same})"
        )

    def recorded(self) -> str:
        # Index and safety as on PostgreSQL.
        return f"SELECT {self._l['rows']}, {self._l['pending']} FROM {self._ledger} WHERE {self._key()}"

    def _key(self) -> str:
        return " AND ".join(f"{self._l[name]} = ?" for name in ("queue", "publish_id", "batch_id"))

    def set_pending(self) -> str:
        # Index and safety as on PostgreSQL.
        return f"UPDATE {self._ledger} SET {self._l['pending']} = ? WHERE {self._key()}"

    def lock_pending(self) -> str:
        # Index and safety as on PostgreSQL.
        return f"SELECT {self._l['pending']} FROM {self._ledger} WITH (UPDLOCK, {EXISTING}) WHERE {self._key()}"

    def list_pending(self) -> str:
        # Index and safety as on PostgreSQL.
        return f"SELECT {self._l['pending']} FROM {self._ledger} WHERE {self._l['pending']} IS NOT NULL"

    def staged_bytes(self, name: StagingName) -> str:
        # Index: none, a scan of the staging table. Safe: the table belongs to one task, which is done.
        return f"SELECT COALESCE(SUM(CAST(DATALENGTH([body]) AS bigint)), 0) FROM [{name.name}]"

    def forget(self) -> str:
        # Index and safety as on PostgreSQL.
        c = self._l
        return f"DELETE FROM {self._ledger} WHERE {c['queue']} = ? AND {c['publish_id']} = ? AND {c['batch_id']} < ?"

    def pieces(self, rows: int) -> Iterator[tuple[int, ...]]:
        # The server counts the locks of each statement for itself. So the pieces are in one transaction and become
        # visible at once, and a receiver, which passes over locked rows, meets no lock of the table. What remains is
        # memory: every row stays locked until the commit, and when the locks of all sessions take 24 % of the server's
        # memory (40 % by its page on the setting "locks"), it escalates those of any statement. Therefore a very large
        # publication takes atomic = false, whose transactions hold the rows of one staging table each.
        starts = range(0, max(rows, 1), _PIECE_ROWS)
        for start in starts:
            # The last one is open: rows beyond those that the task wrote are moved, so that the count betrays them.
            yield start, _END if start == starts[-1] else start + _PIECE_ROWS

    def move(
        self,
        name: StagingName,
        attributes: Sequence[str],
        constants: Sequence[str],
        lifetime: bool,
        selection: Selection = EVERYTHING,
    ) -> str:
        # Index: the primary key of the staging table, a range in its order; identity values of INSERT … SELECT … ORDER
        # BY are assigned in that order. Safe: the staging table is known to this task only, and no other session sees
        # a piece before the commit.
        plain = [name for name in attributes if name not in ("expires", DUE_AT)]
        targets = [self._q[attribute] for attribute in plain]
        values = [_GUID if name == "id" else f"s.[{selection.renamed.get(name, name)}]" for name in plain]
        targets += [self._q[attribute] for attribute in constants]
        values += ["?" for _ in constants]
        if "expires" in attributes or lifetime:
            targets.append(self._q["expires"])
            values.append(expiry_of("s.[expires]", _LATER.format("SYSUTCDATETIME()"), attributes, lifetime))
        for attribute, constant in self._table.filled.items():
            targets.append(self._q[attribute])
            values.append(LITERALS[constant])
        rows = f"s.[{selection.where}] = 1 AND " if selection.where else ""
        if DUE_AT in attributes:
            rows = f"s.[{DUE_AT}] IS NULL AND "
        return (
            f"INSERT INTO {self._queue} ({', '.join(targets)}) SELECT {', '.join(values)} "
            f"FROM [{name.name}] AS s{_MS if lifetime else ''} WHERE {rows}{_PIECE} ORDER BY s.[ord]"
        )

    def move_delayed(
        self, name: StagingName, table: str, attributes: Sequence[str], constants: Sequence[str], lifetime: bool
    ) -> str:
        # Index and safety as above; the dispatcher finds the rows when they are committed.
        plain = [name for name in attributes if name not in ("id", "expires", DUE_AT)]
        targets = ["destination", "due", "message_id", *plain, *constants]
        values = ["?", f"s.[{DUE_AT}]", _GUID, *(f"s.[{name}]" for name in plain), *("?" for _ in constants)]
        if "expires" in attributes or lifetime:
            targets.append("expires")
            values.append(expiry_of("s.[expires]", _LATER.format(f"s.[{DUE_AT}]"), attributes, lifetime))
        return (
            f"INSERT INTO {quote(table)} ({', '.join(f'[{column}]' for column in targets)}) SELECT {', '.join(values)} "
            f"FROM [{name.name}] AS s{_MS if lifetime else ''} WHERE s.[{DUE_AT}] IS NOT NULL AND {_PIECE} "
            "ORDER BY s.[ord]"
        )

    def move_to_journal(
        self, name: StagingName, table: str, attributes: Sequence[str], constants: Sequence[str]
    ) -> str:
        # Index and safety as above; txid is a rowversion, which the server fills in.
        plain = [name for name in attributes if name not in ("id", MARKS)]
        targets = ["topic", "queues", "message_id", *plain, *constants]
        marks = f"s.[{MARKS}]" if MARKS in attributes else "?"
        values = ["?", marks, _GUID, *(f"s.[{name}]" for name in plain), *("?" for _ in constants)]
        return (
            f"INSERT INTO {quote(table)} ({', '.join(f'[{column}]' for column in targets)}) SELECT {', '.join(values)} "
            f"FROM [{name.name}] AS s WHERE {_PIECE} ORDER BY s.[ord]"
        )

    def probe_insert(self, table: str) -> str:
        # No rows and no index, as above.
        return f"INSERT INTO {quote(table)} ([headers]) SELECT CAST(NULL AS nvarchar(max)) WHERE 1 = 0"

    def depth(self) -> str:
        # A scan of the table that ends at the limit. READPAST: what a receiver holds is not counted.
        return f"SELECT COUNT(*) FROM (SELECT TOP (?) 1 AS n FROM {self._queue} WITH ({LOOKING})) AS f"


_READ = {
    ReadKind.INT: "CAST({} AS int)",
    ReadKind.UUID: "LOWER(CONVERT(char(36), {}))",
    ReadKind.POSITION: "CAST({} AS bigint)",
}


class SqlServerSparkReadSql(SparkReadSql):
    """One table on SQL Server. Texts are compared by the column's collation."""

    @property
    def bounds(self) -> str:
        # Primary key, its two ends. LOOKING: locked rows are passed over.
        key = self._column(self.table.key)
        return (
            f"SELECT CAST(MIN({key}) AS bigint) AS first, CAST(MAX({key}) AS bigint) AS last FROM {self._table()} "
            f"WITH ({LOOKING})"
        )

    def page(
        self, attributes: Sequence[str], conditions: Sequence[Condition], after: int, last: int, limit: int
    ) -> tuple[str, list[Any]]:
        # Primary key, a range of it in its order. READPAST: a row that a receiver or a sender holds is passed over, so
        # that neither waits for the other. Safe: nothing is locked beyond the row that is read.
        params: list[Any] = [limit]
        key = self.table.key
        within = [Condition(key, ">", (after,)), Condition(key, "<=", (last,)), *conditions]
        where = " AND ".join(self._condition(condition, params) for condition in within)
        columns = [f"CAST({self._column(key)} AS bigint) AS queueapp_key", *map(self._read, attributes)]
        return (
            f"SELECT TOP (?) {', '.join(columns)} FROM {self._table()} WITH ({LOOKING}) WHERE {where} "
            f"ORDER BY {self._column(key)}"
        ), params

    def _table(self) -> str:
        return quote(self.table.db_table)

    def _column(self, attribute: str) -> str:
        return quote(self.table.columns[attribute][0])

    def _read(self, attribute: str) -> str:
        kind = self.table.columns[attribute][1]
        return f"{_READ.get(kind, '{}').format(self._column(attribute))} AS {quote(attribute)}"

    def _condition(self, condition: Condition, params: list[Any]) -> str:
        column = self._column(condition.attribute)
        params += condition.values
        if condition.operator == "contains":
            return "(" + " OR ".join(f"CHARINDEX(?, {column}) > 0" for _ in condition.values) + ")"
        return f"{column} {condition.operator} ?"


class SqlServerSparkJournalSql(SqlServerSparkReadSql, SparkJournalSql):
    """The journal on SQL Server, ordered by its row versions."""

    horizon = HORIZON

    def last_position(self, topic: str, horizon: int) -> tuple[str, list[Any]]:
        # Index: (topic, txid, seq), one step from its end for the topic. Safe: LOOKING.
        return (
            f"SELECT TOP (1) CAST([txid] AS bigint) AS txid, [seq] FROM {self._table()} WITH ({LOOKING}) "
            "WHERE [topic] = ? AND [txid] < CAST(? AS binary(8)) ORDER BY [txid] DESC"
        ), [topic, horizon]

    def position_after(self, topic: str, after: Position, last: Position, rows: int) -> tuple[str, list[Any]]:
        # Index: (topic, txid, seq), so many entries of it. Safe: all of it is before a horizon.
        within, params = self._within(after, last)
        return (
            f"SELECT CAST([txid] AS bigint) AS txid, [seq] FROM {self._table()} WHERE {within} AND [topic] = ? "
            "ORDER BY [txid] OFFSET ? ROWS FETCH NEXT 1 ROWS ONLY"
        ), [*params, topic, rows - 1]

    def page_by_position(
        self, attributes: Sequence[str], conditions: Sequence[Condition], after: Position, last: Position, limit: int
    ) -> tuple[str, list[Any]]:
        # Index: (topic, txid, seq), a range of it in its order. Safe: all of it is before a horizon, so nothing of it
        # is in flight, and it is the same whenever it is read.
        within, params = self._within(after, last)
        params.insert(0, limit)
        where = " AND ".join(self._condition(condition, params) for condition in conditions)
        columns = ["CAST([txid] AS bigint) AS queueapp_txid", "[seq] AS queueapp_key", *map(self._read, attributes)]
        return (
            f"SELECT TOP (?) {', '.join(columns)} FROM {self._table()} WHERE {within} AND {where} ORDER BY [txid]"
        ), params

    @staticmethod
    def _within(after: Position, last: Position) -> tuple[str, list[Any]]:
        # A row version is one entry's alone, so the bookmark adds nothing to it; below 0 there is none.
        return ("[txid] > CAST(? AS binary(8)) AND [txid] <= CAST(? AS binary(8))"), [
            max(after.txid, 0),
            max(last.txid, 0),
        ]
