"""Rehearsal: a message is handled by the code of this process in a transaction that is always rolled back.

    atomic on every database --> handler --> what changed, what was sent --> ROLLBACK
                                 |-- a connection outside of these transactions: the one inside is used instead
                                 |-- COMMIT, or a program or socket outside: refused

Nothing is acked, retried or moved, and no ``on_commit`` hook runs. Rows that the handler locks stay locked until the
end, and sequences advance. What cannot be seen from here is not held back: files, threads that the handler starts, and
sockets that C libraries open by themselves.
"""

from __future__ import annotations

import re
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic
from typing import Any, NamedTuple

from django.db import Error, connections, router, transaction

from .. import inline, messages, registry
from ..errors import InvalidOption, QueueError, UnsupportedServer
from ..messages.headers import DIED
from ..models import DelayedMessage, PoisonMessage, Semantics, StoredMessage
from ..sending.isolation import in_another_thread
from ..sql import SessionState, backend_of, nonblocking

#: Bytes of a body that is reported.
SHOWN = 2_000
#: Sent messages that are reported.
MAX_SENT = 1_000
#: How long a statement of a rehearsal waits for a lock that a real handler holds.
LOCK_WAIT = timedelta(seconds=5)

#: Events of Python's audit hooks that reach beyond this process.
_OUTSIDE = {
    "socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "subprocess.Popen", "os.system",
    "os.posix_spawn", "os.exec",
}  # fmt: skip
#: What would end the transaction; rolling back to a savepoint does not (PostgreSQL's form and SQL Server's).
_ENDS = re.compile(
    r"\s*(?:COMMIT|END|ABORT|PREPARE\s+TRANSACTION"
    r"|ROLLBACK(?!\s+(?:(?:WORK|TRANSACTION)\s+)?TO\b|\s+TRAN(?:SACTION)?\s+\w))\b",
    re.IGNORECASE,
)


class RehearsalRefused(QueueError):
    """A handler tried in a rehearsal what would reach beyond it: a socket, a program, a COMMIT."""


class RowsChanged(NamedTuple):
    """How many rows of one table the handler inserted, updated and deleted."""

    inserted: int
    updated: int
    deleted: int


@dataclass(frozen=True, slots=True)
class RehearsedSend:
    """One message that the handler sent."""

    queue: str
    message_id: uuid.UUID
    headers: Mapping[str, str]
    body: bytes | None
    recipient: str = ""
    delayed: bool = False

    def __str__(self) -> str:
        kind = messages.well_known(self.headers, messages.TYPE) or ""
        return f"{self.queue}: {kind} {(self.body or b'')[:200]!r}{' (delayed)' if self.delayed else ''}"


@dataclass(slots=True)
class Rehearsal:
    """What a handler did in a rehearsal."""

    queue: str
    message_id: uuid.UUID
    #: The name of the consumer; '' where there is none for the message.
    consumer: str = ""
    #: What the handler raised, or what it left behind; None: it ended well.
    error: BaseException | None = None
    #: Rows changed, by table.
    rows: dict[str, RowsChanged] = field(default_factory=dict)
    sent: list[RehearsedSend] = field(default_factory=list)
    #: ``on_commit`` hooks that would have run.
    hooks: int = 0
    #: What was refused: "socket.connect ('10.0.0.7', 443)".
    refused: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def succeeded(self) -> bool:
        """Whether a consumer handled it without an error."""
        return bool(self.consumer) and self.error is None

    @property
    def traceback(self) -> str:
        """The traceback of the error; '' without one."""
        return "" if self.error is None else "".join(traceback.format_exception(self.error))

    @property
    def result(self) -> str:
        """How it ended, in words."""
        if self.error is not None:
            return f"failed: {type(self.error).__name__}: {self.error}"
        return "handled" if self.consumer else "no consumer here"

    def effects(self) -> Iterator[str]:
        """What the handler did, a line for each table, message and refusal."""
        for table, rows in sorted(self.rows.items()):
            yield f"{table}: {rows.inserted} inserted, {rows.updated} updated, {rows.deleted} deleted"
        for message in self.sent:
            yield f"sent to {message}"
        if self.hooks:
            yield f"{self.hooks} on_commit hook{'' if self.hooks == 1 else 's'} not run"
        for what in self.refused:
            yield f"refused: {what}"

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {
            "queue": self.queue,
            "message_id": str(self.message_id),
            "consumer": self.consumer or None,
            "succeeded": self.succeeded,
            "error": None if self.error is None else f"{type(self.error).__name__}: {self.error}",
            "rows": {table: changed._asdict() for table, changed in sorted(self.rows.items())},
            "sent": [
                {
                    "queue": message.queue, "message_id": str(message.message_id), "headers": dict(message.headers),
                    "body": (message.body or b"")[:SHOWN].decode(errors="replace"), "recipient": message.recipient,
                    "delayed": message.delayed,
                }
                for message in self.sent
            ],
            "hooks": self.hooks,
            "refused": self.refused,
            "seconds": round(self.seconds, 3),
        }  # fmt: skip


def rehearse(
    message: Any,
    *,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    consumer: str = "",
    network: bool = False,
) -> Rehearsal:
    """Handle a message in this thread by the code of this process, in transactions that are rolled back; returns what
    the handler did.

    ``message``: a row of a queue, of the poison messages or of the delayed messages. ``body`` and ``headers`` are used
    in place of its own, for an edit before it is made. ``consumer``: the name of the consumer, on a queue where several
    take the message. ``network``: let the handler open sockets and start programs; the default refuses them, except
    those of the databases. Raises QueueError where nothing here can handle messages, and QueueNotFound.

    >>> rehearse(PoisonMessage.objects.first()).succeeded
    """
    queue, alias = _queue_of(message)
    row = _row_of(message, body, headers, consumer)
    found = Rehearsal(queue._meta.label, messages.as_uuid(row["id"]))
    begun = monotonic()
    # What is no part of the message's own transaction commits statement by statement.
    transactional = alias if queue.delivery.semantics is Semantics.TRANSACTIONAL else ""
    with _sandbox(found, network, transactional) as sandbox:
        before = sandbox.state()
        outcome = inline.handle_once(queue, alias, row)
        found.consumer, found.error, found.hooks = outcome.consumer, outcome.error, outcome.hooks
        found.rows, found.sent = sandbox.changes(before)
    found.seconds = monotonic() - begun
    return found


def _queue_of(message: Any) -> tuple[Any, str]:
    if isinstance(message, PoisonMessage):
        name = message.destination or message.queue
    elif isinstance(message, DelayedMessage):
        name = message.destination
    elif hasattr(type(message), "delivery"):
        return type(message), message._state.db or router.db_for_write(type(message))
    else:
        raise InvalidOption("message of rehearse", message, "a row of a queue, of PoisonMessage or of DelayedMessage")
    queue, alias = registry.queues.find_addressed(name)
    return queue, alias or message._state.db or router.db_for_write(queue)


def _row_of(message: Any, body: bytes | None, headers: Mapping[str, str] | None, consumer: str) -> dict[str, Any]:
    stored = isinstance(message, StoredMessage)
    row = {
        concrete_field.attname: getattr(message, concrete_field.attname)
        for concrete_field in type(message)._meta.concrete_fields
    }
    row["id"] = message.message_id if stored else message.id
    row["seq"] = 0 if stored else message.seq
    # Its attempts so far do not count: the question is what one more would do.
    row |= {"deliveries": 0, "cancels": 0, "failures": None}
    if body is not None:
        row["body"] = body
    if headers is not None:
        row["headers"] = messages.encode_headers(dict(headers))
    elif messages.ATTEMPTS in row["headers"]:
        counted = {messages.ATTEMPTS, DIED}
        kept = {name: value for name, value in messages.readable_headers(row["headers"]).items() if name not in counted}
        row["headers"] = messages.encode_headers(kept)
    if consumer:
        row["recipient"] = consumer
    return row


# -- the sandbox -----------------------------------------------------------------------------------------------------


#: Rows changed, by database and table.
_Counts = dict[str, dict[str, RowsChanged]]


class _Sandbox:
    """The transactions of a rehearsal, and what happens in them."""

    def __init__(self) -> None:
        #: The aliases whose database can be reached.
        self.aliases: list[str] = []
        #: Their savepoints from before the handler, for what can be read after it has broken its transaction.
        self.points: dict[str, Any] = {}
        #: Rows by table, of databases that do not count them themselves.
        self.counted: dict[str, list[int]] = {}

    def state(self) -> _Counts:
        """What was changed in these transactions before the handler runs."""
        return {alias: found for alias in self.aliases if (found := _rows_changed(alias)) is not None}

    def changes(self, before: _Counts) -> tuple[dict[str, RowsChanged], list[RehearsedSend]]:
        """What has changed since, also where the handler has left a transaction that can only be rolled back."""
        total: dict[str, RowsChanged] = {}
        sent: list[RehearsedSend] = []
        for alias in self.aliases:
            if not self._is_usable(alias):
                continue
            counts = _rows_changed(alias)
            changed: dict[str, RowsChanged] = {}
            for table, now in (counts or {}).items():
                then = before.get(alias, {}).get(table, RowsChanged(0, 0, 0))
                if now != then:
                    changed[table] = RowsChanged(*(a - b for a, b in zip(now, then, strict=True)))
            filled = {table: rows.inserted for table, rows in changed.items()} if counts is not None else None
            for model, limit in _message_tables(alias, filled):
                sent += _sent_in(model, alias, limit)
            total |= changed
        for table, numbers in self.counted.items():
            total.setdefault(table, RowsChanged(*numbers))
        return total, sent[:MAX_SENT]

    def _is_usable(self, alias: str) -> bool:
        """Whether statements can be run. A transaction that has failed is rolled back to where the handler began."""
        connection = connections[alias]
        if not connection.in_atomic_block or connection.closed_in_transaction:
            return False
        if connection.needs_rollback or _has_failed(connection):
            connection.needs_rollback = False
            try:
                connection.savepoint_rollback(self.points[alias])
            except Error:
                return False
        return True


def _message_tables(alias: str, filled: dict[str, int] | None) -> Iterator[tuple[Any, int]]:
    """The tables that messages are sent to, with how many new rows they have at most. ``filled``: the new rows of all
    tables; None: they are not known."""
    own_queues = [queue for queue in registry.queues if router.db_for_write(queue) == alias]
    if filled is None:
        filled = dict.fromkeys(connections[alias].introspection.table_names(), MAX_SENT)
    for model in (*own_queues, DelayedMessage):
        if limit := filled.get(model._meta.db_table.rpartition('"."')[2], 0):
            yield model, limit


class _End(Exception):
    """The end of a rehearsal."""


@contextmanager
def _sandbox(found: Rehearsal, network: bool, transactional: str) -> Iterator[_Sandbox]:
    sandbox = _Sandbox()
    with suppress(_End), ExitStack() as around:
        for alias in connections:
            _enter(around, alias, sandbox, alias != transactional)
        around.enter_context(inline.within_rehearsal())
        if not network:
            around.enter_context(_refusing(found.refused))
        yield sandbox
        raise _End  # rolls every transaction back, in whatever state it is


def _enter(around: ExitStack, alias: str, sandbox: _Sandbox, commits_each: bool) -> None:
    """Open the transaction on one database. One that cannot be reached is refused for the time of the rehearsal."""
    connection = connections[alias]
    atomic = transaction.atomic(using=alias)
    # As of a test case: a handler's ``atomic(durable=True)`` is allowed within.
    atomic._from_testcase = True  # type: ignore[attr-defined]
    try:
        connection.ensure_connection()
    except Error:
        around.enter_context(connection.execute_wrapper(_refuse_all))
        return
    around.enter_context(atomic)
    sandbox.aliases.append(alias)
    sandbox.points[alias] = connection.savepoint()
    try:
        around.enter_context(backend_of(connection).sessions.lock_timeout(connection, _ms(LOCK_WAIT)))
        counts = _rows_changed(alias) is not None
    except UnsupportedServer:
        counts = False
    statements = _Statements(alias, None if counts else sandbox.counted, commits_each)
    around.enter_context(connection.execute_wrapper(statements))
    # Hooks of the caller are its own.
    hooks, connection.run_on_commit = connection.run_on_commit, []
    around.callback(lambda: setattr(connection, "run_on_commit", hooks if connection.in_atomic_block else []))


class _Statements:
    """Around each statement of the handler: no COMMIT; in a savepoint where it would be a transaction of its own, so
    that one that fails leaves the others; and counted, where the database does not count."""

    def __init__(self, alias: str, counted: dict[str, list[int]] | None, commits_each: bool) -> None:
        self._connection, self._counted, self._commits_each = connections[alias], counted, commits_each
        self._depth = self._savepoints()
        self._in_savepoint = False

    def __call__(self, execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any) -> Any:
        text = sql if isinstance(sql, str) else ""
        if _ENDS.match(text):
            raise RehearsalRefused(f"{text.strip()[:40]!r} is refused: a rehearsal is always rolled back.")
        if self._commits_each and not self._in_savepoint and self._is_alone(text):
            result = self._in_own_savepoint(lambda: execute(sql, params, many, context))
        else:
            result = execute(sql, params, many, context)
        if self._counted is not None and (changed := rows_changed_by(text, context["cursor"].rowcount)):
            table, verb, count = changed
            self._counted.setdefault(table, [0, 0, 0])[verb] += count
        return result

    def _is_alone(self, text: str) -> bool:
        """Whether it would be in no transaction, or in one without a savepoint, as of ``bulk_create``."""
        return self._savepoints() <= self._depth and not _OF_SAVEPOINTS.match(text)

    def _in_own_savepoint(self, execute: Callable[[], Any]) -> Any:
        # Django has marked the transaction if the statement before has failed, and that was rolled back by itself.
        self._connection.needs_rollback = False
        self._in_savepoint = True
        try:
            with transaction.atomic(using=self._connection.alias):
                return execute()
        finally:
            self._in_savepoint = False

    def _savepoints(self) -> int:
        return sum(savepoint_id is not None for savepoint_id in self._connection.savepoint_ids)


_OF_SAVEPOINTS = re.compile(r"\s*(?:SAVEPOINT|RELEASE|ROLLBACK|SAVE|SET(?!\s+NOCOUNT))\b", re.IGNORECASE)
#: mssql-django sets NOCOUNT before a statement, and makes a table for the columns that an INSERT returns.
_CHANGES = re.compile(
    r"\s*(?:SET\s+NOCOUNT\s+(?:OFF|(?P<uncounted>ON))\b[\s;]*)?(?:IF OBJECT_ID\(.*? INTO #django[^;]*;\s*)?"
    r"(?P<verb>INSERT|UPDATE|DELETE)\s+(?:INTO\s+|FROM\s+)?(?P<table>[^\s(]+)",
    re.IGNORECASE | re.DOTALL,
)


def rows_changed_by(text: str, rowcount: int) -> tuple[str, int, int] | None:
    """(table, 0, 1 or 2 for INSERT, UPDATE or DELETE, rows) of a statement; None if it changes no table."""
    found = _CHANGES.match(text)
    if found is None:
        return None
    verb = "IUD".index(found["verb"][0].upper())
    if rowcount < 0:  # NOCOUNT is on, as when the ORM inserts one row; what a queue's own INSERT counts is among `sent`
        rowcount = int(verb == 0 and bool(found["uncounted"]) and not text.endswith("@@ROWCOUNT"))
    return found["table"].strip('"[]'), verb, rowcount


def _refuse_all(execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
    raise RehearsalRefused("This database could not be reached when the rehearsal began, so it takes no part in it.")


def _ms(span: timedelta) -> int:
    return int(span / timedelta(milliseconds=1))


def _has_failed(connection: Any) -> bool:
    try:
        return backend_of(connection).sessions.state(connection, ask=True) is SessionState.FAILED
    except UnsupportedServer:
        return False


def _rows_changed(alias: str) -> dict[str, RowsChanged] | None:
    connection = connections[alias]
    try:
        found = backend_of(connection).sessions.rows_changed(connection)
    except UnsupportedServer:
        return None
    return None if found is None else {table: RowsChanged(*numbers) for table, numbers in found.items()}


def _sent_in(model: Any, alias: str, limit: int) -> list[RehearsedSend]:
    """The messages of a table that this transaction has inserted: others do not see what is not committed."""
    # What others have locked was not inserted here.
    rows = nonblocking(model._base_manager.using(alias))
    # New rows have the highest keys, but for those that others insert meanwhile.
    newest = list(rows.order_by("-pk").values_list("pk", flat=True)[: 10 * MAX_SENT])
    seqs = sorted(set(newest) - _seen_by_others(model, alias, min(newest))) if newest else []
    seqs = seqs[-min(limit, MAX_SENT) :]
    names = {concrete_field.name for concrete_field in model._meta.concrete_fields}
    wanted = names & {"id", "message_id", "headers", "body", "recipient", "destination"}
    return [
        RehearsedSend(
            row.get("destination") or model._meta.label,
            messages.as_uuid(row.get("message_id") or row["id"]),
            messages.readable_headers(row["headers"]),
            None if row["body"] is None else bytes(row["body"]),
            row.get("recipient", ""),
            model is DelayedMessage,
        )
        for row in rows.filter(pk__in=seqs).order_by("pk").values(*wanted)
    ]


def _seen_by_others(model: Any, alias: str, lowest: int) -> set[int]:
    """Keys that are committed: read on a connection that is not in the transaction of the rehearsal."""

    def read() -> set[int]:
        rows = nonblocking(model._base_manager.using(alias)).filter(pk__gte=lowest)
        return set(rows.values_list("pk", flat=True))

    return in_another_thread(alias, read)


# -- what reaches beyond this process --------------------------------------------------------------------------------

_hook_installed = False


@contextmanager
def _refusing(refused: list[str]) -> Iterator[None]:
    """Refuse sockets and programs in this thread and in the coroutines that it waits for."""
    global _hook_installed
    if not _hook_installed:
        # An audit hook stays for the life of the process, and sees what a library does as well.
        sys.addaudithook(_audit)
        _hook_installed = True
    token = inline.refusing.set(refused)
    try:
        yield
    finally:
        inline.refusing.reset(token)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event not in _OUTSIDE or (refused := inline.refusing.get()) is None:
        return
    what = f"{event} {args[1]!r}" if event.startswith("socket.") and len(args) > 1 else f"{event} {args[0]!r}"
    if event == "socket.getaddrinfo":
        what = f"{event} {args[0]!r}:{args[1]!r}"
    refused.append(what[:200])
    raise RehearsalRefused(f"{what[:200]} is refused in a rehearsal (network=True allows it).")
