"""SQL Server: the state of a session and connection options (the drivers know only their own mode; the rest is
queried); the schema and privileges; notifications by Service Broker."""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import monotonic
from typing import Any

from django.db import Error, OperationalError

from ..base import ErrorKind
from ..database import (
    ConnectionLimit,
    Drift,
    IndexInfo,
    ListenerConnection,
    Notifications,
    NotificationsUnavailable,
    Schema,
    Sessions,
    SessionState,
    SettingAdvice,
    TableInfo,
    Unavailable,
)
from .errors import LockRefused, error_kind
from .statements import execute, fetch, json_of, quote_table, set_lock_timeout

#: The parts of a text that are no statement: comments, literals and quoted names; to the end of the text if they do not
#: end before. A batch in a literal (EXEC) is none either: the server takes back what it has set.
_NO_STATEMENT = re.compile(
    r"--[^\n]*|/\*.*?(?:\*/|\Z)|N?'(?P<literal>[^']*)(?:'|\Z)|\[(?P<name>[^]]*)(?:\]|\Z)|\"(?P<quoted>[^\"]*)(?:\"|\Z)",
    re.IGNORECASE | re.DOTALL,
)
#: Names that mean the same when they are quoted.
_PROCEDURES = frozenset({"sp_set_session_context", "sp_setapprole", "sp_getapplock"})
#: One of these is in a text that holds another statement.
_ANOTHER = (";", "SET", "set", "Set", "#", "EXEC", "exec", "Exec", "USE ", "use ", "REVERT", "revert")
#: Statements of which something outlives their transaction: options, another database or user, locks and tables of the
#: session. T-SQL needs nothing between two statements, so options are known by their names. Not those that mssql-django
#: sets around a statement (NOCOUNT, IDENTITY_INSERT).
_CHANGES_SESSION = re.compile(
    r"\bSET\s+(?:ROWCOUNT|TEXTSIZE|LOCK_TIMEOUT|DEADLOCK_PRIORITY|XACT_ABORT|IMPLICIT_TRANSACTIONS|TRANSACTION\s+ISOLATION"
    r"|LANGUAGE|DATEFORMAT|DATEFIRST|CONTEXT_INFO|CURSOR_CLOSE_ON_COMMIT|ANSI_\w+|QUOTED_IDENTIFIER|ARITHABORT|ARITHIGNORE"
    r"|NUMERIC_ROUNDABORT|CONCAT_NULL_YIELDS_NULL|NOEXEC|FMTONLY|PARSEONLY|FORCEPLAN|SHOWPLAN_\w+|STATISTICS)\b"
    r"|(?:^|[;\n])\s*(?:USE\s+(?!HINT|PLAN)|REVERT\b)|\bEXEC(?:UTE)?\s+AS\s+(?:USER|LOGIN|CALLER)\b"
    r"|\b(?:TABLE|INTO|PROC(?:EDURE)?)\s+(?:\w*\s*\.\s*)*#|\bsp_(?:set_session_context|setapprole)\b"
    # Whose a lock is may be a parameter or a variable.
    r"|\bsp_getapplock\b(?:.*'Session'|.*@LockOwner\s*=\s*[%?@])",
    re.IGNORECASE | re.DOTALL,
)


def _blank(found: re.Match[str]) -> str:
    if found.lastgroup is None:
        return " "  # a comment
    inner = found[found.lastgroup]
    if found.lastgroup == "literal":
        return "'Session'" if inner.lower() == "session" else "''"
    return " # " if inner.startswith("#") else f" {inner} " if inner.lower() in _PROCEDURES else " x "


class SqlServerSessions(Sessions):
    """Without a query the client does not notice a BEGIN TRANSACTION in autocommit, nor a rollback by the server."""

    def state(self, connection: Any, *, ask: bool = False) -> SessionState:
        raw = connection.connection
        try:
            if raw is None or raw.closed:
                return SessionState.GONE
            autocommit = bool(raw.autocommit)
            if not ask:
                return SessionState.IDLE if autocommit else SessionState.IN_TRANSACTION
            # Beneath Django's cursor, which refuses while a rollback is due.
            cursor = connection.create_cursor()
            # Index: none, two figures of the session. Safe: locks nothing, and a doomed transaction may run it.
            cursor.execute("SELECT @@TRANCOUNT, XACT_STATE()")
            ((open_transactions, state),) = cursor.fetchall()
            cursor.close()
        except Exception as error:  # drivers raise various errors on a broken connection
            return SessionState.GONE if error_kind(error) is ErrorKind.CONNECTION else SessionState.BUSY
        if state < 0:
            return SessionState.FAILED
        if open_transactions:
            return SessionState.IN_TRANSACTION
        return SessionState.IDLE if autocommit else SessionState.MANUAL

    def is_disconnected(self, connection: Any) -> bool:
        return False  # neither driver reports it; mssql-django closes the connection when a statement fails

    def transaction_mark(self, connection: Any) -> Any:
        return None

    def may_be_another_transaction(self, connection: Any, mark: Any) -> bool:
        # A deadlock, and any error under XACT_ABORT, ends the transaction, and the next statement begins another. Not
        # seen: an error that Django does not flag (IntegrityError, DataError), and a ROLLBACK without an error.
        return bool(connection.errors_occurred)

    def may_be_multiple(self, sql: str) -> bool:
        return any(word in sql for word in _ANOTHER)

    def changes_session(self, sql: str, params: Any = None) -> bool:
        return _CHANGES_SESSION.search(_NO_STATEMENT.sub(_blank, sql)) is not None

    # -- timeouts and options -----------------------------------------------------------------------------------------

    @contextmanager
    def lock_timeout(self, connection: Any, ms: int) -> Iterator[None]:
        before = set_lock_timeout(connection, max(1, int(ms)))
        try:
            yield
        finally:
            self._reset_lock_timeout(connection, before)

    @staticmethod
    def _reset_lock_timeout(connection: Any, before: int) -> None:
        try:
            set_lock_timeout(connection, before)
        except Error as error:
            # A lost session has no setting. Any other failure is raised: all later statements would fail on locks.
            if error_kind(error) is not ErrorKind.CONNECTION:
                raise

    def statement_timeout(self, connection: Any, ms: int) -> AbstractContextManager[None]:
        return nullcontext()  # neither driver exposes it; DATABASES' query_timeout has the same effect

    def has_fixed_snapshot(self, connection: Any) -> bool:
        # Index: none, a view of this session, which every user may read. Only SNAPSHOT reads as of its first statement.
        sql = "SELECT transaction_isolation_level FROM sys.dm_exec_sessions WHERE session_id = @@SPID"
        return int(fetch(connection, sql, ())[0][0]) == 5

    def liveness_options(self, seconds: float) -> dict[str, Any]:
        return {}  # the drivers send keepalives: after 30 s, then each second

    def handler_options(self) -> dict[str, Any]:
        return {}  # the server keeps plans by text

    def name_statements(self, connection: Any) -> None:
        """Nothing to do: the drivers prepare by numbers that belong to one cursor, and no pooler passes a session of
        SQL Server to another process."""

    def watch_client(self, connection: Any, seconds: float) -> None:
        """Nothing to set: SQL Server sends keepalives, and rolls back the transaction of a lost client."""

    def socket_of(self, connection: Any) -> int | None:
        return None  # neither driver exposes it; DATABASES' query_timeout has the same effect


# -- computed columns and index options of a table, its indexes, settings, privileges, and the migration lock ----------

#: The resource of the migration lock, the wait of one call, and its answer after that time.
_MIGRATING, _ROUND_MS, _NOT_YET = "queueapp.migrate", 1_000, -1
#: The catalog writes 100 as 0.
_FULL = (0, 100)
#: Django executes any statement list, so there has to be one.
_NO_DDL = "DECLARE @nothing_to_alter bit"
_SEQUENTIAL = "OPTIMIZE_FOR_SEQUENTIAL_KEY"


class SqlServerSchema(Schema):
    """Options are those of the primary key, which is the table. Privileges are those of the session's present user
    (``EXECUTE AS``), including the roles that it is a member of."""

    names_indexes = True

    def _computed(self, quote_name: Any, seq: str, body: str, options: dict[str, Any]) -> dict[str, str]:
        columns = {}
        # The order column has an alias with its name in NServiceBus' tables; a column of that name needs none.
        if seq.lower() != "rowversion":
            columns["RowVersion"] = quote_name(seq)
        if options["body_string"]:
            # Not nvarchar: bodies are UTF-8, not UTF-16. ASCII, hence most JSON, reads unchanged.
            columns["BodyString"] = f"CAST({quote_name(body)} AS varchar(max))"
        return columns

    def inline_columns(self, schema_editor: Any, seq: str, body: str, options: dict[str, Any]) -> str | None:
        computed = self._computed(schema_editor.quote_name, seq, body, options)
        return ", ".join(f"[{name}] AS {expression}" for name, expression in computed.items())

    def options_after_create(self, schema_editor: Any, table: str, seq: str, body: str, options: dict[str, Any]) -> str:
        # A fill factor applies to rebuilds, so the empty table is rebuilt. Full pages: messages are appended, and a
        # lease makes no row longer, since its columns have a fixed width; the server's default may differ.
        sequential = f", {_SEQUENTIAL} = ON" if _knows_sequential(schema_editor.connection) else ""
        return f"ALTER INDEX ALL ON {schema_editor.quote_name(table)} REBUILD WITH (FILLFACTOR = 100{sequential})"

    def set_options(self, schema_editor: Any, table: str, seq: str, body: str, options: dict[str, Any]) -> str:
        computed, quoted = self._computed(schema_editor.quote_name, seq, body, options), schema_editor.quote_name(table)
        added = ", ".join(f"[{name}] AS {expression}" for name, expression in computed.items())
        statements = [f"ALTER TABLE {quoted} ADD {added}"] if added else []
        if _knows_sequential(schema_editor.connection):
            # Changes the catalog only; a rebuild would lock a table in use.
            statements.append(_set_sequential(quoted, "ON"))
        return "; ".join(statements) or _NO_DDL

    def reset_options(self, schema_editor: Any, table: str, seq: str, body: str, options: dict[str, Any]) -> str:
        computed, quoted = self._computed(schema_editor.quote_name, seq, body, options), schema_editor.quote_name(table)
        statements = [_set_sequential(quoted, "OFF")] if _knows_sequential(schema_editor.connection) else []
        if computed:
            dropped = ", ".join(f"[{name}]" for name in computed)
            statements.append(f"ALTER TABLE {quoted} DROP COLUMN {dropped}")
        return "; ".join(statements) or _NO_DDL

    def tables(self, connection: Any, names: Sequence[str]) -> dict[str, TableInfo]:
        quoted = {_name(name): name for name in names}
        given = "FROM OPENJSON(%s) WITH ([name] nvarchar(776) '$') AS t"
        # Catalog only.
        sql = f"SELECT t.[name], c.[name] {given} INNER JOIN sys.columns AS c ON c.[object_id] = OBJECT_ID(t.[name])"
        columns: dict[str, list[str]] = {}
        for name, column in fetch(connection, sql, (json_of(list(quoted)),)):
            columns.setdefault(quoted[name], []).append(column)
        found = {name: TableInfo(tuple(listed), {}, {}) for name, listed in columns.items()}
        # Catalog only. A disabled index may not be named in a hint (315), and a filtered one does not serve any claim
        # (8622). The second property is NULL on a server that is older than it.
        sql = (
            "SELECT t.[name], i.[name], c.[name], CAST(i.[is_disabled] AS int), CAST(i.[has_filter] AS int), "
            "CAST(i.[is_primary_key] AS int), INDEXPROPERTY(i.[object_id], i.[name], 'IndexFillFactor'), "
            f"INDEXPROPERTY(i.[object_id], i.[name], 'IsOptimizedForSequentialKey') {given} "
            "INNER JOIN sys.indexes AS i ON i.[object_id] = OBJECT_ID(t.[name]) "
            "INNER JOIN sys.index_columns AS ic ON ic.[object_id] = i.[object_id] AND ic.[index_id] = i.[index_id] "
            "INNER JOIN sys.columns AS c ON c.[object_id] = ic.[object_id] AND c.[column_id] = ic.[column_id] "
            "WHERE ic.[key_ordinal] > 0 ORDER BY t.[name], i.[index_id], ic.[key_ordinal]"
        )
        for name, index, column, disabled, filtered, primary, fill_factor, sequential in fetch(
            connection, sql, (json_of(list(quoted)),)
        ):
            if (table := found.get(quoted[name])) is None:
                continue  # made since
            before = table.indexes[index].columns if index in table.indexes else ()
            table.indexes[index] = IndexInfo((*before, column), usable=not disabled, filtered=bool(filtered))
            if primary:
                table.options.update(fill_factor=fill_factor, sequential=sequential)
        return found

    def drift(
        self, connection: Any, table: str, there: TableInfo, seq: str, body: str, options: dict[str, Any]
    ) -> list[Drift]:
        columns, quoted = {name.lower() for name in there.columns}, connection.ops.quote_name(table)
        found = [
            Drift(f"the computed column {column} is missing", f"ALTER TABLE {quoted} ADD [{column}] AS {expression}")
            for column, expression in self._computed(connection.ops.quote_name, seq, body, options).items()
            if column.lower() not in columns
        ]
        if there.options.get("sequential") == 0:
            problem = f"{_SEQUENTIAL} of the primary key is off: many senders wait for each other at its last page"
            found.append(Drift(problem, _set_sequential(quoted, "ON")))
        if (fill_factor := there.options.get("fill_factor", 0)) not in _FULL:
            problem = f"the fill factor of the primary key is {fill_factor} instead of 100"
            found.append(Drift(problem, f"ALTER INDEX ALL ON {quoted} REBUILD WITH (FILLFACTOR = 100)"))
        return found

    def rename_index(self, connection: Any, table: str, old: str, new: str) -> str:
        path = f"{connection.ops.quote_name(table)}.[{old.replace(']', ']]')}]"
        return f"EXEC sp_rename {_literal(path)}, {_literal(new)}, N'INDEX'"

    def create_row_version_index(self, schema_editor: Any, table: str) -> str:
        # On a computed column that is an alias: deterministic and precise, so it need not be persisted. Safe: no claim
        # of ours names the index, and ORDER BY RowVersion is planned over the clustered key as before.
        return f"CREATE NONCLUSTERED INDEX [Index_RowVersion] ON {schema_editor.quote_name(table)} ([RowVersion])"

    def drop_row_version_index(self, schema_editor: Any, table: str) -> str:
        return f"DROP INDEX [Index_RowVersion] ON {schema_editor.quote_name(table)}"

    def has_row_version_index(self, connection: Any, table: str) -> bool:
        # Catalog only: what NServiceBus asks, any nonclustered index (type 2) that begins with the column.
        sql = (
            "SELECT COUNT(*) FROM sys.indexes AS i INNER JOIN sys.index_columns AS p ON p.[object_id] = i.[object_id] "
            "AND p.[index_id] = i.[index_id] AND p.[key_ordinal] = 1 INNER JOIN sys.columns AS c ON "
            "c.[object_id] = p.[object_id] AND c.[column_id] = p.[column_id] "
            "WHERE i.[object_id] = OBJECT_ID(%s) AND i.[type] = 2 AND c.[name] = 'RowVersion'"
        )
        return bool(fetch(connection, sql, (_name(table),))[0][0])

    def remarks(self, connection: Any) -> list[SettingAdvice]:
        # Catalog only. By name: on Azure DB_ID() is not that of sys.databases.
        sql = "SELECT CAST(d.[is_read_committed_snapshot_on] AS int) FROM sys.databases AS d WHERE d.[name] = DB_NAME()"
        rows = fetch(connection, sql, ())
        if not rows or rows[0][0] is None:
            return []
        if rows[0][0]:
            return [SettingAdvice("READ_COMMITTED_SNAPSHOT is on", "")]
        return [
            SettingAdvice(
                "READ_COMMITTED_SNAPSHOT is off: what your own code reads of a queue's table, or of tables that "
                "handlers write, waits behind open transactions, of TRANSACTIONAL handlers too",
                "ALTER DATABASE CURRENT SET READ_COMMITTED_SNAPSHOT ON WITH ROLLBACK IMMEDIATE; or read with "
                "queueapp.sql.nonblocking(). Queues work either way.",
            )
        ]

    def connection_limits(self, connection: Any) -> list[ConnectionLimit]:
        # Catalog only, a row by its name, which every user may read. 0 means as many as the server can have. The
        # sessions of others are seen with VIEW SERVER STATE only. Databases and users have no limit of their own.
        sql = (
            "SELECT CAST(c.[value_in_use] AS int), (SELECT COUNT(*) FROM sys.dm_exec_sessions AS s "
            "WHERE s.[is_user_process] = 1 AND s.[session_id] <> @@SPID), @@MAX_CONNECTIONS "
            "FROM sys.configurations AS c WHERE c.[name] = 'user connections'"
        )
        rows = fetch(connection, sql, ())
        return [
            ConnectionLimit(
                "the server accepts", limit or maximum, used, "user connections", "raise 'user connections'"
            )
            for limit, used, maximum in rows
        ]

    def lock_migrations(self, connection: Any) -> None:
        # A lock by name, of the session: it is freed when that ends, however it ends. sp_getapplock raises nothing when
        # it does not get it, it answers so. In rounds, because a statement may last no longer than the driver's
        # query_timeout.
        sql = (
            "SET NOCOUNT ON; DECLARE @got int; EXEC @got = sp_getapplock @Resource = %s, @LockMode = 'Exclusive', "
            f"@LockOwner = 'Session', @LockTimeout = {_ROUND_MS}; SELECT @got"
        )
        while (got := fetch(connection, sql, (_MIGRATING,))[0][0]) == _NOT_YET:
            pass
        if got < 0:
            raise LockRefused(_MIGRATING, got)

    def unlock_migrations(self, connection: Any) -> None:
        # The drivers keep the session of a closed connection, and with it this lock, for the next connection.
        execute(connection, "EXEC sp_releaseapplock @Resource = %s, @LockOwner = 'Session'", (_MIGRATING,))

    def missing_privileges(self, connection: Any, table: str, privileges: Sequence[str]) -> list[str]:
        name = quote_table(table).replace("%%", "%")
        asked = ", ".join(["(%s)"] * len(privileges))
        # Catalog only: the table by its name, then its columns. A user without any privilege on a table does not see
        # it: HAS_PERMS_BY_NAME is NULL then, and OBJECT_ID as well.
        sql = (
            f"SELECT r.[name] FROM (VALUES {asked}) AS r([name]) "
            "WHERE COALESCE(HAS_PERMS_BY_NAME(%s, 'OBJECT', r.[name]), 0) = 0 AND NOT EXISTS "
            "(SELECT 1 FROM sys.columns AS c WHERE c.[object_id] = OBJECT_ID(%s) "
            "AND HAS_PERMS_BY_NAME(%s, 'OBJECT', r.[name], c.[name], 'COLUMN') = 1)"
        )
        found = {row[0] for row in fetch(connection, sql, (*privileges, name, name, name))}
        return [privilege for privilege in privileges if privilege in found]

    def grant(self, connection: Any, table: str, privileges: Sequence[str]) -> str:
        # No table is read.
        user = fetch(connection, "SELECT QUOTENAME(USER_NAME())", ())[0][0]
        return f"GRANT {', '.join(privileges)} ON {quote_table(table).replace('%%', '%')} TO {user};"

    def read_only(self, connection: Any) -> str:
        # Catalog only, by its key. A secondary replica cannot be written to either, but is not set so.
        sql = "SELECT [is_read_only] FROM sys.databases WHERE [database_id] = DB_ID()"
        rows = fetch(connection, sql, ())
        return "ALTER DATABASE CURRENT SET READ_WRITE;" if rows and rows[0][0] else ""


def _set_sequential(quoted: str, value: str) -> str:
    return f"ALTER INDEX ALL ON {quoted} SET ({_SEQUENTIAL} = {value})"


def _knows_sequential(connection: Any) -> bool:
    """2019 and later, and Azure, which calls itself 12."""
    return bool(connection.sql_server_version >= 2019 or connection.to_azure_sql_db)


def _literal(text: str) -> str:
    """A name as text, for a statement that an operator runs."""
    return "N'" + text.replace("'", "''") + "'"


def _name(table: str) -> str:
    """A table as OBJECT_ID takes it."""
    return quote_table(table).replace("%%", "%")


# -- notifications by Service Broker -----------------------------------------------------------------------------------
#
# A broker queue delivers each message to one reader, and a notification is for all. So every listener has a
# conversation of its own, both ends of which are in one queue: ``queueapp_wake`` sends on each, and a listener waits
# for its own with WAITFOR (RECEIVE …). The statements are procedures that run as their owner: callers need EXECUTE and
# no privilege on queue, service or catalog. A conversation that is not renewed expires, and the next listener removes
# it.
#
# Written from the documentation: it has not been run on a server with Service Broker yet (docs/sqlserver.md).


#: Seconds after which the server ends a conversation, and after which its listener begins another. Messages for a dead
#: listener stay in the queue until then.
LIFETIME = 600
_RENEWED = 200.0
#: Milliseconds of one wait: a listener stops after at most this time.
_WAIT_MS = 1000
#: Seconds before a process that found notifications unavailable tries again.
RETRY_AFTER = 300.0

#: The message type: [DEFAULT] exists in every database.
_TYPE = "DEFAULT"
_ENDED = "SELECT e.[conversation_handle] FROM sys.conversation_endpoints AS e"

#: Object -> the batch that creates it, in this order. A procedure has to be a batch of its own.
SCRIPT = {
    # Five rollbacks in a row, which a killed reader can cause, would disable the queue.
    "queue": "CREATE QUEUE [queueapp_wakeups] WITH STATUS = ON, RETENTION = OFF, POISON_MESSAGE_HANDLING (STATUS = "
    "OFF)",
    "service": "CREATE SERVICE [queueapp_wakeups] ON QUEUE [queueapp_wakeups] ([DEFAULT])",
    # Index: none, the catalog. Safe: each SEND commits by itself and waits at most for another SEND to the same
    # listener. A listener that ends meanwhile is skipped.
    "queueapp_wake": f"""CREATE PROCEDURE [queueapp_wake] @payload nvarchar(400) WITH EXECUTE AS OWNER AS
BEGIN
    SET NOCOUNT ON;
    DECLARE @listener uniqueidentifier, @end uniqueidentifier;
    DECLARE listeners CURSOR LOCAL FORWARD_ONLY STATIC READ_ONLY FOR
        {_ENDED} WHERE e.[is_initiator] = 1 AND e.[far_service] = N'queueapp_wakeups' AND e.[state] IN ('SO', 'CO');
    OPEN listeners;
    FETCH NEXT FROM listeners INTO @listener;
    WHILE @@FETCH_STATUS = 0
    BEGIN
        BEGIN TRY
            SET @end = @listener;
            SEND ON CONVERSATION @end MESSAGE TYPE [DEFAULT] (@payload);
        END TRY
        BEGIN CATCH
            SET @listener = NULL;
        END CATCH;
        FETCH NEXT FROM listeners INTO @listener;
    END;
    CLOSE listeners;
    DEALLOCATE listeners;
END""",
    # Index: none, the catalog. Safe: only ended conversations are removed, by the first listener. The first message
    # creates the other end, in the same transaction, because both are in one database.
    "queueapp_listen": f"""CREATE PROCEDURE [queueapp_listen] WITH EXECUTE AS OWNER AS
BEGIN
    SET NOCOUNT ON;
    DECLARE @sender uniqueidentifier, @old uniqueidentifier, @gone uniqueidentifier;
    DECLARE ended CURSOR LOCAL FORWARD_ONLY STATIC READ_ONLY FOR
        {_ENDED} WHERE e.[far_service] = N'queueapp_wakeups' AND e.[state] IN ('DI', 'DO', 'ER');
    OPEN ended;
    FETCH NEXT FROM ended INTO @old;
    WHILE @@FETCH_STATUS = 0
    BEGIN
        BEGIN TRY
            SET @gone = @old;
            END CONVERSATION @gone WITH CLEANUP;
        END TRY
        BEGIN CATCH
            SET @old = NULL;
        END CATCH;
        FETCH NEXT FROM ended INTO @old;
    END;
    CLOSE ended;
    DEALLOCATE ended;
    BEGIN DIALOG CONVERSATION @sender FROM SERVICE [queueapp_wakeups]
        TO SERVICE N'queueapp_wakeups', N'CURRENT DATABASE' ON CONTRACT [DEFAULT]
        WITH LIFETIME = {LIFETIME}, ENCRYPTION = OFF;
    SEND ON CONVERSATION @sender MESSAGE TYPE [DEFAULT] (N'');
    SELECT CAST(t.[conversation_handle] AS nvarchar(36)), CAST(h.[conversation_handle] AS nvarchar(36))
        FROM sys.conversation_endpoints AS t INNER JOIN sys.conversation_endpoints AS h
        ON h.[conversation_id] = t.[conversation_id] AND h.[is_initiator] = 0 WHERE t.[conversation_handle] = @sender;
END""",
    # Index: the queue's own on its conversations. Safe: each listener receives from its own conversation only, and
    # commits what it has received at once; a notification that is lost with its connection costs a peek delay.
    "queueapp_hear": f"""CREATE PROCEDURE [queueapp_hear] @receiver uniqueidentifier WITH EXECUTE AS OWNER AS
BEGIN
    SET NOCOUNT ON;
    DECLARE @heard TABLE ([type] nvarchar(256), [payload] nvarchar(400));
    WAITFOR (
        RECEIVE TOP (100) [message_type_name], CAST([message_body] AS nvarchar(400)) FROM [queueapp_wakeups]
        INTO @heard WHERE [conversation_handle] = @receiver
    ), TIMEOUT {_WAIT_MS};
    SELECT h.[type], h.[payload] FROM @heard AS h;
END""",
    # Safe: both ends belong to the caller, as do the messages in the queue for them.
    "queueapp_stop_listening": """CREATE PROCEDURE [queueapp_stop_listening]
    @sender uniqueidentifier, @receiver uniqueidentifier WITH EXECUTE AS OWNER AS
BEGIN
    SET NOCOUNT ON;
    END CONVERSATION @sender WITH CLEANUP;
    END CONVERSATION @receiver WITH CLEANUP;
END""",
}
PROCEDURES = tuple(name for name in SCRIPT if name.startswith("queueapp_"))

#: Engine editions without Service Broker.
_WITHOUT = {5: "Azure SQL Database", 12: "SQL database in Fabric"}
_TURN_ON = "ALTER DATABASE CURRENT SET ENABLE_BROKER WITH ROLLBACK IMMEDIATE"
_MAKE = (
    "run `manage.py migrate` as the owner of the tables, or GRANT CREATE QUEUE, CREATE SERVICE, CREATE PROCEDURE and "
    "ALTER ON SCHEMA to the user that runs it; then GRANT EXECUTE as docs/privileges.md says"
)

# Index: none, the catalog. Safe: the batch that notifies checks whether the procedure exists. OBJECT_ID is NULL also
# for a user who may not execute it.
_NOTIFY = (
    "DECLARE @there int = (SELECT OBJECT_ID(N'queueapp_wake', N'P') FROM sys.databases AS d "
    "WHERE d.[name] = DB_NAME() AND d.[is_broker_enabled] = 1); "
    "IF @there IS NOT NULL EXEC [queueapp_wake] @payload = %s; SELECT @there"
)


class SqlServerListener(ListenerConnection):
    """One conversation, renewed before it ends."""

    _sender: uuid.UUID | None = None
    _receiver: uuid.UUID | None = None
    renew_at = 0.0
    _lost = True

    def connect(self) -> None:
        with self._watched():
            self.connection.ensure_connection()

    def listen(self) -> None:
        with self._watched():
            prepare(self.connection)
            self._begin()

    def received(self, seconds: float) -> list[str]:
        with self._watched():
            if monotonic() < self.renew_at:
                return self._receive(self._receiver)
            sender, receiver = self._sender, self._receiver
            self._begin()
            # The new conversation receives already, so no notification is lost between the two.
            payloads = self._receive(receiver)
            self._stop(sender, receiver)
            return payloads

    def ping(self) -> None:
        """Each wait is a round trip."""

    @property
    def broken(self) -> bool:
        return self._lost

    def close(self) -> None:
        with contextlib.suppress(Exception):
            if self._sender is not None and not self._lost:
                self._stop(self._sender, self._receiver)
        with contextlib.suppress(Exception):
            self.connection.close()

    def _begin(self) -> None:
        rows = fetch(self.connection, "EXEC [queueapp_listen]", ())
        if not rows:
            raise NotificationsUnavailable("Service Broker did not deliver a message that was sent within the database")
        sender, receiver = rows[0]
        self._sender, self._receiver = uuid.UUID(sender), uuid.UUID(receiver)
        self.renew_at = monotonic() + _RENEWED

    def _stop(self, *ends: uuid.UUID | None) -> None:
        execute(self.connection, "EXEC [queueapp_stop_listening] @sender = %s, @receiver = %s", ends)

    def _receive(self, receiver: uuid.UUID | None) -> list[str]:
        payloads = []
        for kind, payload in fetch(self.connection, "EXEC [queueapp_hear] @receiver = %s", (receiver,)):
            if kind != _TYPE:
                self._sender = None
                raise OperationalError(f"the conversation of this listener has ended ({kind})")
            if payload:
                payloads.append(payload)
        return payloads

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except Error as error:
            self._lost = error_kind(error) is ErrorKind.CONNECTION
            raise
        self._lost = False


class SqlServerNotifications(Notifications):
    """Service Broker, where the server has it and the database enables it."""

    def __init__(self) -> None:
        #: Alias -> until when no notification is sent: disabled or not permitted.
        self._off: dict[str, float] = {}

    def may_notify(self, connection: Any) -> bool:
        until = self._off.get(connection.alias)
        return until is None or monotonic() > until

    def notify(self, connection: Any, channel: str, payload: str) -> None:
        if fetch(connection, _NOTIFY, (payload,))[0][0] is None:
            self._off[connection.alias] = monotonic() + RETRY_AFTER
        else:
            self._off.pop(connection.alias, None)

    def listener(self, connection: Any, channel: str) -> ListenerConnection:
        return SqlServerListener(connection, channel)

    def prepare(self, connection: Any) -> None:
        prepare(connection)
        self._off.pop(connection.alias, None)

    def unavailable(self, connection: Any) -> Unavailable | None:
        edition, enabled, missing = _state(connection)
        if edition in _WITHOUT:
            return None  # there is no remedy
        if not enabled:
            return Unavailable("Service Broker is turned off in this database, so there are no wake-ups", _TURN_ON)
        if missing:
            return Unavailable(f"the procedures of wake-ups are missing ({', '.join(missing)})", _MAKE)
        return None


def prepare(connection: Any) -> None:
    """Create the missing ones of queue, service and procedures. Raises NotificationsUnavailable."""
    edition, enabled, missing = _state(connection)
    if edition in _WITHOUT:
        raise NotificationsUnavailable(f"{_WITHOUT[edition]} has no Service Broker")
    if not enabled:
        raise NotificationsUnavailable(f"Service Broker is turned off in this database ({_TURN_ON})")
    if not missing:
        return
    try:
        for name, batch in SCRIPT.items():
            if not _exists(connection, name):
                execute_batch(connection, batch)
    except Error as error:
        if error_kind(error) is ErrorKind.CONNECTION:
            raise
        # Another process may have been faster, and made all of it by now.
        if _state(connection)[2]:
            first_line = str(error).strip().split("\n", 1)[0]
            raise NotificationsUnavailable(f"what they need could not be made: {first_line} ({_MAKE})") from error


def execute_batch(connection: Any, batch: str) -> None:
    """A batch as it stands: CREATE PROCEDURE must be its first statement, and it has no parameters."""
    with connection.cursor() as cursor:
        cursor.execute(batch)


def _state(connection: Any) -> tuple[int, bool, list[str]]:
    """(engine edition, whether the broker is on, the procedures that are missing or that this user may not execute)."""
    # Index: none, server properties and catalog rows. By name: on Azure DB_ID() is not that of sys.databases.
    sql = (
        "SELECT CAST(SERVERPROPERTY('EngineEdition') AS int), (SELECT CAST(d.[is_broker_enabled] AS int) "
        f"FROM sys.databases AS d WHERE d.[name] = DB_NAME()), {', '.join(_object(name) for name in PROCEDURES)}"
    )
    edition, enabled, *found = fetch(connection, sql, ())[0]
    return edition, bool(enabled), [name for name, number in zip(PROCEDURES, found, strict=True) if number is None]


def _object(name: str) -> str:
    return f"OBJECT_ID(N'{name}')"


def _exists(connection: Any, name: str) -> bool:
    # Index: none, the catalog.
    if name == "service":
        sql = "SELECT COUNT(*) FROM sys.services AS s WHERE s.[name] = N'queueapp_wakeups'"
    else:
        sql = f"SELECT COALESCE({_object('queueapp_wakeups' if name == 'queue' else name)}, 0)"
    return bool(fetch(connection, sql, ())[0][0])
