"""The statements of the Spark sink on SQL Server 2019 and later, for mssql-python (``?``)."""

from __future__ import annotations

from collections.abc import Sequence

from ..barriers import lock_name
from ..message_columns import BY_NAME, SENT
from ..spark import STAGED, LedgerTable, SparkSql, StagingName
from ..tables import QueueTable
from .errors import DEADLOCKED
from .key_locks import EXISTING
from .statements import LITERALS, type_of

#: An id arrives as text: the driver's bulk copy and the server disagree on the byte order of a binary uniqueidentifier.
_TYPES = {"id": "char(36)", "headers": "nvarchar(max)", "body": "varbinary(max)"}
_TYPES |= {column.name: type_of(column) for column in SENT}
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

    def __init__(self, queue: QueueTable, ledger: LedgerTable) -> None:
        super().__init__(queue, ledger)
        self._ledger = quote(ledger.db_table)
        self._l = {name: quote(column) for name, column in ledger.columns.items()}
        self._queue = quote(queue.db_table)
        self._q = {name: quote(column) for name, column in queue.columns.items()}
        self._types = _TYPES | (_WIDE if queue.priority64 else {})

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
        return sql, (lock_name("send", self.queue.db_table),)

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

    def create_staging(self, name: StagingName, attributes: Sequence[str]) -> str:
        # ord: a heap has no order, and a FIFO queue needs the order of the partition. A heap and not a clustered
        # index, because bulk copy into an empty heap is minimally logged.
        columns = ", ".join(f"[{attribute}] {self._types[attribute]} NULL" for attribute in attributes)
        return f"CREATE TABLE [{name.name}] ([ord] bigint NOT NULL, {columns})"

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

    def forget(self) -> str:
        # Index and safety as on PostgreSQL.
        c = self._l
        return f"DELETE FROM {self._ledger} WHERE {c['queue']} = ? AND {c['publish_id']} = ? AND {c['batch_id']} < ?"

    def move(self, name: StagingName, attributes: Sequence[str], constants: Sequence[str], lifetime: bool) -> str:
        # Index: none, a scan and sort of the staging table; identity values of INSERT … SELECT … ORDER BY are assigned
        # in that order. Safe: the staging table is known to this task only. More than about 5,000 rows escalate to a
        # table lock on the queue until the commit: receivers wait (they do not fail); "atomic" cannot be had for less.
        plain = [attribute for attribute in attributes if attribute != "expires"]
        targets = [self._q[attribute] for attribute in plain]
        values = [
            "CAST(s.[id] AS uniqueidentifier)" if attribute == "id" else f"s.[{attribute}]" for attribute in plain
        ]
        targets += [self._q[attribute] for attribute in constants]
        values += ["?" for _ in constants]
        if "expires" in attributes or lifetime:
            targets.append(self._q["expires"])
            # DATEADD takes an int, and milliseconds of a month are none.
            later = "DATEADD(millisecond, p.[ms] % 1000, DATEADD(second, p.[ms] / 1000, SYSUTCDATETIME()))"
            has_expires = "expires" in attributes
            values.append(
                f"COALESCE(s.[expires], {later})" if has_expires and lifetime else later if lifetime else "s.[expires]"
            )
        for attribute, constant in self.queue.filled.items():
            targets.append(self._q[attribute])
            values.append(LITERALS[constant])
        parameter = " CROSS JOIN (VALUES (CAST(? AS bigint))) AS p ([ms])" if lifetime else ""
        return (
            f"INSERT INTO {self._queue} ({', '.join(targets)}) SELECT {', '.join(values)} "
            f"FROM [{name.name}] AS s{parameter} ORDER BY s.[ord]"
        )
