"""SQL Server: notifications by Service Broker.

A broker queue delivers each message to one reader, and a notification is for all. So every listener has a conversation
of its own, both ends of which are in one queue: ``queueapp_wake`` sends on each, and a listener waits for its own with
WAITFOR (RECEIVE …). The statements are procedures that run as their owner: callers need EXECUTE and no privilege on
queue, service or catalog. A conversation that is not renewed expires, and the next listener removes it.

Written from the documentation: it has not been run on a server with Service Broker yet (docs/sqlserver.md).
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from time import monotonic
from typing import Any

from django.db import Error, OperationalError

from ..base import ErrorKind
from ..database import ListenerConnection, Notifications, NotificationsUnavailable, Unavailable
from .errors import error_kind
from .statements import execute, fetch

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
    _renew_at = 0.0
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
            if monotonic() < self._renew_at:
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
        self._renew_at = monotonic() + _RENEWED

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
