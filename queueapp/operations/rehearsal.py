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
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic
from typing import Any, NamedTuple

from django.db import Error, connections, router, transaction

from .. import inline, messages, registry
from ..errors import InvalidOption, QueueError, UndecodableMessage, UnsupportedServer
from ..messages.header_names import DIED
from ..models import DelayedMessage, PoisonMessage, Semantics, StoredMessage
from ..sql import backend_of, nonblocking

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
                    "queue": one.queue, "message_id": str(one.message_id), "headers": dict(one.headers),
                    "body": (one.body or b"")[:SHOWN].decode(errors="replace"), "recipient": one.recipient,
                    "delayed": one.delayed,
                }
                for one in self.sent
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
    row = {one.attname: getattr(message, one.attname) for one in type(message)._meta.concrete_fields}
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
        kept = {name: value for name, value in _headers(row["headers"]).items() if name not in counted}
        row["headers"] = messages.encode_headers(kept)
    if consumer:
        row["recipient"] = consumer
    return row


# -- the sandbox -----------------------------------------------------------------------------------------------------


class _Before(NamedTuple):
    rows: dict[str, dict[str, RowsChanged]]
    highest: dict[tuple[str, Any], int]


class _Sandbox:
    """The transactions of a rehearsal, and what happens in them."""

    def __init__(self) -> None:
        #: The aliases whose database can be reached.
        self.aliases: list[str] = []
        #: Rows by table, of databases that do not count them themselves.
        self.counted: dict[str, list[int]] = {}

    def state(self) -> _Before:
        """What is there before the handler runs."""
        rows = {alias: found for alias in self.aliases if (found := _rows_changed(alias)) is not None}
        return _Before(rows, {(alias, model): _highest(model, alias) for alias, model in self._message_tables()})

    def changes(self, before: _Before) -> tuple[dict[str, RowsChanged], list[RehearsedSend]]:
        """What has changed since, also where the handler has left a transaction that can only be rolled back."""
        total: dict[str, RowsChanged] = {}
        for alias in self.aliases:
            if not _is_usable(alias):
                continue
            for table, now in (_rows_changed(alias) or {}).items():
                then = before.rows.get(alias, {}).get(table, RowsChanged(0, 0, 0))
                if now != then:
                    total[table] = RowsChanged(*(a - b for a, b in zip(now, then, strict=True)))
        for table, numbers in self.counted.items():
            total.setdefault(table, RowsChanged(*numbers))
        sent = [
            one
            for (alias, model), highest in before.highest.items()
            if _is_usable(alias)
            for one in _sent_since(model, alias, highest)
        ]
        return total, sent[:MAX_SENT]

    def _message_tables(self) -> Iterator[tuple[str, Any]]:
        for alias in self.aliases:
            own = [queue for queue in registry.queues if router.db_for_write(queue) == alias and queue._meta.managed]
            there = set(connections[alias].introspection.table_names()) if own else set()
            for model in (*own, DelayedMessage):
                if model._meta.db_table in there:
                    yield alias, model


@contextmanager
def _sandbox(found: Rehearsal, network: bool, transactional: str) -> Iterator[_Sandbox]:
    sandbox = _Sandbox()
    with ExitStack() as around:
        for alias in connections:
            _enter(around, alias, sandbox, alias != transactional)
        around.enter_context(inline.within_rehearsal())
        if not network:
            around.enter_context(_refusing(found.refused))
        try:
            yield sandbox
        finally:
            for alias in sandbox.aliases:
                if connections[alias].in_atomic_block:
                    transaction.set_rollback(True, using=alias)


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
        self._alias, self._counted, self._commits_each = alias, counted, commits_each
        self._depth = len(connections[alias].savepoint_ids)
        self._in_savepoint = False

    def __call__(self, execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any) -> Any:
        text = sql if isinstance(sql, str) else ""
        if _ENDS.match(text):
            raise RehearsalRefused(f"{text.strip()[:40]!r} is refused: a rehearsal is always rolled back.")
        if self._commits_each and not self._in_savepoint and len(connections[self._alias].savepoint_ids) <= self._depth:
            self._in_savepoint = True
            try:
                with transaction.atomic(using=self._alias):
                    result = execute(sql, params, many, context)
            finally:
                self._in_savepoint = False
        else:
            result = execute(sql, params, many, context)
        if self._counted is not None and (verb := _CHANGES.match(text)):
            numbers = self._counted.setdefault(verb["table"].strip('"[]'), [0, 0, 0])
            numbers["IUD".index(verb["verb"][0].upper())] += max(0, context["cursor"].rowcount)
        return result


_CHANGES = re.compile(r"\s*(?P<verb>INSERT|UPDATE|DELETE)\s+(?:INTO\s+|FROM\s+)?(?P<table>[^\s(]+)", re.IGNORECASE)


def _refuse_all(execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
    raise RehearsalRefused("This database could not be reached when the rehearsal began, so it takes no part in it.")


def _ms(span: timedelta) -> int:
    return int(span / timedelta(milliseconds=1))


def _is_usable(alias: str) -> bool:
    """Whether statements can still be run in the transaction of a rehearsal. A failed one is rolled back to its last
    intact point by then, or not at all."""
    connection = connections[alias]
    return connection.in_atomic_block and not connection.needs_rollback and not connection.closed_in_transaction


def _rows_changed(alias: str) -> dict[str, RowsChanged] | None:
    connection = connections[alias]
    try:
        found = backend_of(connection).sessions.rows_changed(connection)
    except UnsupportedServer:
        return None
    return None if found is None else {table: RowsChanged(*numbers) for table, numbers in found.items()}


def _key_of(model: Any) -> str:
    return "number" if model is DelayedMessage else "seq"


def _highest(model: Any, alias: str) -> int:
    key = _key_of(model)
    found = model._base_manager.using(alias).order_by(f"-{key}").values_list(key, flat=True).first()
    return -(2**63) if found is None else int(found)


def _sent_since(model: Any, alias: str, highest: int) -> list[RehearsedSend]:
    """The messages above a key that only this transaction sees: others do not see what is not committed."""
    key, names = _key_of(model), {one.name for one in model._meta.concrete_fields}
    wanted = [
        name for name in (key, "id", "message_id", "headers", "body", "recipient", "destination") if name in names
    ]
    new = model._base_manager.using(alias).filter(**{f"{key}__gt": highest})
    rows = list(new.order_by(key).values(*wanted)[: 10 * MAX_SENT])
    if not rows:
        return []
    others = _seen_by_others(model, alias, [row[key] for row in rows])
    return [
        RehearsedSend(
            row.get("destination") or model._meta.label,
            messages.as_uuid(row.get("message_id") or row["id"]),
            _headers(row["headers"]),
            None if row["body"] is None else bytes(row["body"]),
            row.get("recipient", ""),
            model is DelayedMessage,
        )
        for row in rows
        if row[key] not in others
    ]


def _seen_by_others(model: Any, alias: str, keys: list[int]) -> set[int]:
    found: set[int] = set()

    def read() -> None:
        rows = nonblocking(model._base_manager.using(alias))
        for first in range(0, len(keys), 500):
            found.update(rows.filter(pk__in=keys[first : first + 500]).values_list("pk", flat=True))

    _in_another_thread(alias, read)
    return found


def _in_another_thread(alias: str, work: Callable[[], None]) -> None:
    """Call it with a connection of its own, which is not in the transaction of the rehearsal."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)
        finally:
            connections[alias].close()

    thread = threading.Thread(target=run, name="queueapp-rehearsal")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def _headers(text: str) -> dict[str, str]:
    try:
        return messages.decode_headers(text)
    except UndecodableMessage:
        return {}


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
