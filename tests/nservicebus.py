"""What an NServiceBus endpoint says to a database: the statements of its PostgreSQL and SQL Server transports.

They name the columns of that system's tables and no others, take rows by its rules, and inspect a table as it does at
start. Tests let them run on our tables, and our verbs on tables that its scripts made. Values are parameters, as there.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from django.db import connections

POSTGRESQL = {
    "create queue": """
CREATE TABLE IF NOT EXISTS {queue} (
    Id uuid NOT NULL PRIMARY KEY, Expires timestamp, Headers text NOT NULL, Body bytea, Seq serial NOT NULL UNIQUE)""",
    "create delayed": """
CREATE TABLE IF NOT EXISTS {delayed} (
    Id uuid NOT NULL DEFAULT gen_random_uuid() PRIMARY KEY, Headers text NOT NULL, Body bytea, Due timestamptz NOT NULL)
WITH (fillfactor = 100);
CREATE INDEX IF NOT EXISTS {delayed}_Due ON {delayed} (Due)""",
    "send": """
INSERT INTO {queue} (Id, Expires, Headers, Body) VALUES (%s,
    CASE WHEN %s::int IS NOT NULL THEN now() AT TIME ZONE 'UTC' + (%s::int * interval '1 ms') END, %s, %s)""",
    "receive": """
DELETE FROM {queue} rs WHERE rs.id = (SELECT id FROM {queue} ORDER BY Seq LIMIT 1 FOR UPDATE SKIP LOCKED)
RETURNING rs.id,
    CASE WHEN rs.Expires IS NULL THEN 0 WHEN rs.Expires > now() AT TIME ZONE 'UTC' THEN 0 ELSE 1 END,
    rs.Headers, rs.Body""",
    "peek": """
SELECT COALESCE((SELECT Seq FROM {queue} ORDER BY Seq DESC LIMIT 1 FOR UPDATE SKIP LOCKED)
    - (SELECT Seq FROM {queue} ORDER BY Seq LIMIT 1 FOR UPDATE SKIP LOCKED) + 1, 0)""",
    "purge": "DELETE FROM {queue}",
    "store delayed": """
INSERT INTO {delayed} (Headers, Body, Due) VALUES (%s, %s, now() AT TIME ZONE 'UTC'
    + make_interval(days => %s, hours => %s, mins => %s, secs => %s::float8 + %s::float8 / 1000))""",
    "move": """
WITH moved AS (DELETE FROM {delayed} WHERE Id IN (
        SELECT Id FROM {delayed} WHERE Due < now() AT TIME ZONE 'UTC' LIMIT %s) RETURNING Headers, Body)
INSERT INTO {queue} (Id, Headers, Body) SELECT gen_random_uuid(), Headers, Body FROM moved""",
    "next due": "SELECT now() AT TIME ZONE 'UTC', Due FROM {delayed} ORDER BY Due LIMIT 1",
}

#: Users' settings of NOCOUNT survive a send.
KEEPING_NOCOUNT = (
    "DECLARE @NOCOUNT varchar(3) = 'OFF'; IF ((512 & @@OPTIONS) = 512) SET @NOCOUNT = 'ON'; SET NOCOUNT ON; "
    "{statement}; IF (@NOCOUNT = 'ON') SET NOCOUNT ON; IF (@NOCOUNT = 'OFF') SET NOCOUNT OFF"
)
#: Who makes a table takes turns, and looks again when it is his.
CREATING = (
    "IF OBJECT_ID(N'{table}', N'U') IS NOT NULL RETURN; "
    "EXEC sp_getapplock @Resource = '{table}_lock', @LockMode = 'Exclusive'; "
    "IF OBJECT_ID(N'{table}', N'U') IS NOT NULL BEGIN; EXEC sp_releaseapplock @Resource = '{table}_lock'; RETURN; END; "
    "BEGIN TRY {statement}; EXEC sp_releaseapplock @Resource = '{table}_lock'; END TRY "
    "BEGIN CATCH EXEC sp_releaseapplock @Resource = '{table}_lock'; THROW; END CATCH"
)
_INDEX_ON = """
SELECT COUNT(*) FROM sys.indexes AS i
INNER JOIN sys.index_columns AS ic ON ic.index_id = i.index_id AND ic.object_id = i.object_id AND ic.key_ordinal = 1
INNER JOIN sys.columns AS c ON c.column_id = ic.column_id AND c.object_id = ic.object_id
WHERE i.object_id = OBJECT_ID('{queue}') AND c.name = """
SQLSERVER = {
    "create queue": """
CREATE TABLE {queue} (
    Id uniqueidentifier NOT NULL, CorrelationId varchar(255), ReplyToAddress varchar(255), Recoverable bit NOT NULL,
    Expires datetime, Headers nvarchar(max) NOT NULL, Body varbinary(max), RowVersion bigint IDENTITY(1,1) NOT NULL);
CREATE NONCLUSTERED INDEX Index_RowVersion ON {queue} (RowVersion);
CREATE NONCLUSTERED INDEX Index_Expires ON {queue} (Expires) INCLUDE (Id, RowVersion) WHERE Expires IS NOT NULL""",
    "create delayed": """
CREATE TABLE {delayed} (
    Headers nvarchar(max) NOT NULL, Body varbinary(max), Due datetime NOT NULL, RowVersion bigint IDENTITY(1,1) NOT NULL);
CREATE NONCLUSTERED INDEX Index_Due ON {delayed} (Due)""",  # noqa: E501
    "send": """
INSERT INTO {queue} (Id, Recoverable, Expires, Headers, Body) VALUES (%s, 1,
    CASE WHEN CAST(%s AS int) IS NOT NULL THEN DATEADD(ms, CAST(%s AS int), GETUTCDATE()) END,
    %s, CAST(%s AS varbinary(max)))""",
    # Before 2.x dropped them, senders filled these columns; their tables still have them.
    "send, as it was": """
INSERT INTO {queue} (Id, CorrelationId, ReplyToAddress, Recoverable, Expires, Headers, Body) VALUES (%s, %s, %s, 1,
    CASE WHEN CAST(%s AS int) IS NOT NULL THEN DATEADD(ms, CAST(%s AS int), GETUTCDATE()) END,
    %s, CAST(%s AS varbinary(max)))""",
    "receive": """
WITH message AS (SELECT TOP (1) * FROM {queue} WITH (UPDLOCK, READPAST, ROWLOCK) ORDER BY RowVersion)
DELETE FROM message OUTPUT deleted.Id,
    CASE WHEN deleted.Expires IS NULL THEN 0 WHEN deleted.Expires > GETUTCDATE() THEN 0 ELSE 1 END,
    deleted.Headers, deleted.Body""",
    "peek": """
SELECT isnull(cast(max([RowVersion]) - min([RowVersion]) + 1 AS int), 0)
FROM {queue} WITH (READPAST, READCOMMITTEDLOCK)""",
    "purge": "DELETE FROM {queue}",
    "purge expired": """
DELETE FROM {queue} WHERE RowVersion IN (
    SELECT TOP (%s) RowVersion FROM {queue} WITH (READPAST) WHERE Expires < GETUTCDATE())""",
    "store delayed": """
INSERT INTO {delayed} (Headers, Body, Due) VALUES (%s, CAST(%s AS varbinary(max)), DATEADD(day, CAST(%s AS int),
    DATEADD(hour, CAST(%s AS int), DATEADD(minute, CAST(%s AS int), DATEADD(second, CAST(%s AS int),
    DATEADD(millisecond, CAST(%s AS int), GETUTCDATE()))))))""",
    "move": """
WITH message AS (
    SELECT TOP (%s) * FROM {delayed} WITH (UPDLOCK, READPAST, ROWLOCK) WHERE Due < GETUTCDATE())
DELETE FROM message OUTPUT NEWID(), 1, deleted.Headers, deleted.Body
INTO {queue} (Id, Recoverable, Headers, Body)""",
    "next due": "SELECT TOP (1) GETUTCDATE(), Due FROM {delayed} WITH (READPAST) ORDER BY Due",
    # -- what is looked at when an endpoint starts; each is a warning, and the last decides which send it uses
    "has an index on Expires": f"{_INDEX_ON}'Expires'",
    "has a nonclustered index on RowVersion": f"{_INDEX_ON}'RowVersion' AND i.type = 2",
    "has Index_RowVersion": """
SELECT COUNT(*) FROM sys.indexes WHERE name = 'Index_RowVersion' AND object_id = OBJECT_ID('{queue}') AND type = 2""",
    "has Unicode headers": """
SELECT t.name FROM sys.columns AS c INNER JOIN sys.types AS t ON c.system_type_id = t.system_type_id
WHERE c.object_id = OBJECT_ID('{queue}') AND c.name = 'Headers'""",
    "has Recoverable": """
SELECT COUNT(*) FROM sys.columns AS c WHERE c.object_id = OBJECT_ID('{queue}') AND c.name = 'Recoverable'""",
}
STATEMENTS = {"postgresql": POSTGRESQL, "microsoft": SQLSERVER}


class Received(NamedTuple):
    """A row as an endpoint gets it."""

    id: uuid.UUID
    expired: bool
    headers: dict[str, str]
    body: bytes | None


@dataclass
class Endpoint:
    """An endpoint on one queue table: a connection of its own, in autocommit unless it is handling a message."""

    connection: Any
    queue: str
    delayed: str = "nservicebus_delayed"

    @classmethod
    def at(cls, alias: str, queue: str) -> Endpoint:
        """One in another process, as far as the database of this alias knows."""
        connection = connections[alias].copy()
        connection.inc_thread_sharing()
        return cls(connection, queue)

    def close(self) -> None:
        self.connection.close()

    def text(self, name: str) -> str:
        """The text of a statement for these tables."""
        return _text(self.connection.vendor, name, self.queue, self.delayed)

    def _run(self, sql: str, params: Sequence[Any] = ()) -> list[Any]:
        with self.connection.cursor() as cursor:
            cursor.execute(sql, tuple(params) or None)
            return list(cursor.fetchall()) if cursor.description else []

    # -- messages -----------------------------------------------------------------------------------------------------

    def send(
        self, body: bytes | None, headers: dict[str, str] | None = None, *, expires: timedelta | None = None
    ) -> uuid.UUID:
        """Send one message; it is given the headers that every message of theirs has."""
        identity = uuid.uuid4()
        reported = headers_of(identity) if headers is None else headers
        remaining = None if expires is None else int(expires / timedelta(milliseconds=1))
        self._run(self.text("send"), (str(identity), remaining, remaining, json.dumps(reported), body))
        return identity

    def receive(self) -> Received | None:
        """Take the lowest row that is not locked."""
        rows = self._run(self.text("receive"))
        if not rows:
            return None
        identity, expired, headers, body = rows[0]
        return Received(
            uuid.UUID(str(identity)), bool(expired), json.loads(headers), None if body is None else bytes(body)
        )

    @contextmanager
    def handling(self) -> Iterator[Received | None]:
        """Receive, and handle in the same transaction."""
        self.connection.set_autocommit(False)
        try:
            yield self.receive()
            self.connection.commit()
        except BaseException:
            self.connection.rollback()
            raise
        finally:
            self.connection.set_autocommit(True)

    def peek(self) -> int:
        """The span from the lowest to the highest row that is not locked: an estimate of the backlog."""
        return int(self._run(self.text("peek"))[0][0])

    def store_delayed(self, body: bytes, delay: timedelta, headers: dict[str, str] | None = None) -> None:
        """Keep a message until it is due; the delay is added in the parts that a server can add."""
        reported = headers_of(uuid.uuid4()) if headers is None else headers
        minutes, seconds = divmod(delay.seconds, 60)
        hours, minutes = divmod(minutes, 60)
        parts = (delay.days, hours, minutes, seconds, delay.microseconds // 1000)
        self._run(self.text("store delayed"), (json.dumps(reported), body, *parts))

    def move_due(self, batch: int = 100) -> None:
        """Move what is due into the queue, under ids of its own."""
        self._run(self.text("move"), (batch,))

    def next_due(self) -> timedelta | None:
        """How long until the next delayed message is due, by the database's clock."""
        rows = self._run(self.text("next due"))
        if not rows:
            return None
        now, due = (value.replace(tzinfo=None) for value in rows[0])
        wait: timedelta = due - now
        return wait

    def purge(self) -> None:
        self._run(self.text("purge"))

    def purge_expired(self, batch: int = 10_000) -> None:
        self._run(self.text("purge expired"), (batch,))

    # -- tables -------------------------------------------------------------------------------------------------------

    def create(self) -> None:
        """Make the queue table and the one for delayed messages, where they are not there."""
        for name, table in (("create queue", self.queue), ("create delayed", self.delayed)):
            statement = self.text(name)
            if self.connection.vendor == "microsoft":
                statement = CREATING.format(table=table, statement=statement.strip())
            self.connection.set_autocommit(False)  # the lock is the transaction's
            try:
                self._run(statement)
                self.connection.commit()
            finally:
                self.connection.rollback()
                self.connection.set_autocommit(True)

    def drop(self, *tables: str) -> None:
        for table in tables or (self.queue, self.delayed):
            self._run(f"DROP TABLE IF EXISTS {table}")

    def finds(self, name: str) -> Any:
        """What an inspection at start finds."""
        return self._run(self.text(name))[0][0]


def _text(vendor: str, name: str, queue: str, delayed: str) -> str:
    text = STATEMENTS[vendor][name].format(queue=queue, delayed=delayed)
    return KEEPING_NOCOUNT.format(statement=text.strip()) if vendor == "microsoft" and name in _COUNTED else text


_COUNTED = ("send", "send, as it was", "move", "store delayed")


def headers_of(identity: uuid.UUID, **more: str) -> dict[str, str]:
    """The headers of a message that an endpoint sends."""
    return {
        "NServiceBus.MessageId": str(identity),
        "NServiceBus.MessageIntent": "Send",
        "NServiceBus.ConversationId": str(uuid.uuid4()),
        "NServiceBus.EnclosedMessageTypes": "tests.testapp.messages.Ping, Acme, Version=1.0.0.0; Acme.IPing, Acme",
        "NServiceBus.ContentType": "application/json",
        "NServiceBus.TimeSent": "2026-01-02 03:04:05:678901 Z",
        "NServiceBus.CorrelationId": "conversation-7",
        "NServiceBus.ReplyToAddress": "billing",
    } | {f"NServiceBus.{name}": value for name, value in more.items()}
