"""What rude handlers leave behind: swallowed errors, connections in another state than they were handed out,
transactions left open, things that cannot be recorded.

Each rudeness is a function of ``leave``, which writes the effect of the message, and the context; its name, with
dashes, is what a ``Rude`` message carries. Beside it stands what has to become of such a message, in a transaction
(TRANSACTIONAL) and in autocommit (the other two semantics): *poison* after its attempts, or *handled* where by contract
no other message is affected. Whatever it is, no other message may feel it.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from time import monotonic, sleep
from typing import Any

from django.apps import apps
from django.db import Error, IntegrityError, connection, connections, transaction

from queueapp import Context
from queueapp.failures.recoverability import Poison, RetryLater, Verdict

#: A second alias of the same database, on which every thread has a session of its own.
ELSEWHERE = "elsewhere"
#: A name in a unique column that is taken (see ``ledger.TABLES``).
TAKEN = "taken"
#: Time limit of the consumer of hasty messages.
HASTE = timedelta(seconds=0.3)
#: Longer than the lease period of the test queue, and within the time that the handler asks for.
SLOW_SECONDS, EXTENDED = 7.0, timedelta(seconds=20)
UNWRITABLE = "NUL \0 and a lone surrogate \udcff"

Leave = Callable[[], None]


class Fate(StrEnum):
    """What has to become of a rude message."""

    POISON = "poison"
    HANDLED = "handled"
    #: It depends on the moment.
    EITHER = "either"


@dataclass(frozen=True)
class Rudeness:
    """One of them. The last five are for its producer."""

    name: str
    act: Callable[[Leave, Context], None]
    #: In a transaction, and in autocommit.
    transactional: Fate
    other_queues: Fate
    #: In a transaction on SQL Server, where that is something else.
    transactional_on_sqlserver: Fate | None = None
    #: Why there is none on SQL Server.
    not_on_sqlserver: str = ""
    #: The handler has a time limit.
    hasty: bool = False
    #: Columns besides body and headers, and headers: as a foreign producer writes them, past all checks.
    foreign: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    #: Innocent messages sent beside it that would feel it, as fields of ``Act``, and how many.
    beside: Mapping[str, Any] = field(default_factory=dict)
    count_beside: int = 0
    #: How long the next rude message waits for this one's work.
    rest_seconds: float = 0.0

    def fate(self, semantics: str, vendor: str) -> Fate:
        """What has to become of it on a queue of these semantics."""
        if semantics != "transactional":
            return self.other_queues
        second = self.transactional_on_sqlserver if vendor == "microsoft" else None
        return second or self.transactional


RUDENESSES: dict[str, Rudeness] = {}
#: What those say that SQL has to say: by rudeness and vendor. (RAISERROR of this severity ends the session that says
#: it: for a sysadmin, as KILL is, which no session may do to itself.)
SAID = {
    "elsewhere-dies": {
        "postgresql": "SELECT pg_terminate_backend(pg_backend_pid())",
        "microsoft": "RAISERROR (N'a rude handler ends its session', 20, 1) WITH LOG",
    },
    "session-settings": {
        # The time limit last: what comes behind it is under it, and fails the handler on a busy machine.
        "postgresql": "SET search_path = nowhere; SET TIME ZONE 'Pacific/Kiritimati'; SET statement_timeout = '1ms'",
        "microsoft": "SET ROWCOUNT 1; SET LOCK_TIMEOUT 1; SET DATEFORMAT dmy",
    },
    "read-only": {
        "postgresql": "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
        # It has no such setting; in transactions of this level it refuses READPAST, and so every claim.
        "microsoft": "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE",
    },
}


def left_out(vendor: str) -> dict[str, str]:
    """The rudenesses that a database does not know, and why."""
    if vendor != "microsoft":
        return {}
    return {name: rudeness.not_on_sqlserver for name, rudeness in RUDENESSES.items() if rudeness.not_on_sqlserver}


def _say(name: str, alias: str) -> None:
    connection = connections[alias]
    with connection.cursor() as cursor:
        cursor.execute(SAID[name][connection.vendor])


def _rude(transactional: Fate, rest: Fate, **options: Any) -> Callable[[Callable[[Leave, Context], None]], Any]:
    def register(act: Callable[[Leave, Context], None]) -> Callable[[Leave, Context], None]:
        name = act.__name__.replace("_", "-")
        RUDENESSES[name] = Rudeness(name, act, transactional, rest, **options)
        return act

    return register


class Asked(Exception):
    """An attempt that fails so that the policy is asked; ``answer`` is what the policy does then."""

    def __init__(self, answer: Callable[[], Verdict]) -> None:
        super().__init__("on purpose")
        self.answer = answer


class Rudely(Exception):
    """A failed attempt, on purpose."""


# -- errors swallowed, transactions spoiled ------------------------------------------------------------------------


@_rude(Fate.POISON, Fate.HANDLED)
def swallowed_integrity(leave: Leave, context: Context) -> None:
    """In a transaction nothing can be committed any more; in autocommit one statement has failed, and that is all."""
    leave()
    with contextlib.suppress(IntegrityError):
        apps.get_model("auth", "Group").objects.using(context.alias).create(name=TAKEN)


@_rude(Fate.POISON, Fate.HANDLED, transactional_on_sqlserver=Fate.HANDLED)
def swallowed_sql(leave: Leave, context: Context) -> None:
    """The same by a cursor: Django does not know that the server will answer COMMIT with ROLLBACK. SQL Server does not:
    there one statement has failed, and the transaction is as good as before."""
    leave()
    with contextlib.suppress(Error), connections[context.alias].cursor() as cursor:
        cursor.execute("SELECT 1 / 0")


@_rude(Fate.POISON, Fate.POISON)
def set_rollback(leave: Leave, context: Context) -> None:
    """In autocommit it is refused, so the handler fails."""
    leave()
    transaction.set_rollback(True, using=context.alias)


# -- connections that are not as they were handed out --------------------------------------------------------------


@_rude(Fate.POISON, Fate.EITHER)
def close(leave: Leave, context: Context) -> None:
    """It is the worker's connection. Only where it was not open yet, behind another rude one, no worker notices or
    minds."""
    leave()
    connections[context.alias].close()


@_rude(Fate.POISON, Fate.EITHER)
def close_all(leave: Leave, context: Context) -> None:
    """The same for every alias."""
    leave()
    connections.close_all()


@_rude(Fate.POISON, Fate.POISON)
def autocommit_off(leave: Leave, context: Context) -> None:
    """In a transaction it is refused, so the handler fails; elsewhere nothing is committed from here on."""
    transaction.set_autocommit(False, using=context.alias)
    leave()


@_rude(Fate.POISON, Fate.POISON)
def open_atomic(leave: Leave, context: Context) -> None:
    """Entered and not left: a savepoint in a transaction, a transaction in autocommit."""
    transaction.atomic(using=context.alias).__enter__()
    leave()


@_rude(Fate.HANDLED, Fate.HANDLED)
def open_savepoint(leave: Leave, context: Context) -> None:
    """A savepoint that is never released ends with its transaction; in autocommit Django makes none."""
    transaction.savepoint(using=context.alias)
    leave()


@_rude(Fate.POISON, Fate.POISON)
def elsewhere_open(leave: Leave, context: Context) -> None:
    """A transaction left open on another alias: what it was meant to write there is not going to be there."""
    leave()
    transaction.atomic(using=ELSEWHERE).__enter__()


@_rude(Fate.HANDLED, Fate.HANDLED, beside={"elsewhere": True}, count_beside=5)
def elsewhere_dies(leave: Leave, context: Context) -> None:
    """The session on another alias dies, and the handler does not care: one statement there has failed. The next ones
    on this thread that need that alias have done nothing wrong."""
    leave()
    with contextlib.suppress(Error):
        _say("elsewhere-dies", ELSEWHERE)


@_rude(Fate.EITHER, Fate.EITHER, hasty=True)
def time_limit(leave: Leave, context: Context) -> None:
    """The time limit interrupts a line of Atomic, now in one line and now in another. Now and then library code
    swallows it, and then no worker knows."""
    leave()
    until = monotonic() + 3
    while monotonic() < until:
        with transaction.atomic(using=context.alias), connections[context.alias].cursor() as cursor:
            cursor.execute("SELECT 1")


@_rude(Fate.HANDLED, Fate.HANDLED)
def session_settings(leave: Leave, context: Context) -> None:
    """What it sets for good on the worker's session would fail the next user of the session."""
    leave()
    _say("session-settings", context.alias)


@_rude(Fate.HANDLED, Fate.HANDLED)
def read_only(leave: Leave, context: Context) -> None:
    """The same for every transaction to come."""
    leave()
    _say("read-only", context.alias)


@_rude(Fate.POISON, Fate.HANDLED, not_on_sqlserver="no statement there takes back all that a session has")
def discard_all(leave: Leave, context: Context) -> None:
    """What is prepared and set is gone. In a transaction it is refused, so the handler fails."""
    leave()
    with connections[context.alias].cursor() as cursor:
        cursor.execute("DISCARD ALL")


@_rude(Fate.HANDLED, Fate.HANDLED)
def threads(leave: Leave, context: Context) -> None:
    """Threads that go on after it, and that a process would wait for at its end."""
    leave()
    for _ in range(20):
        threading.Thread(target=sleep, args=(5.0,), daemon=False).start()


# -- what cannot be recorded -----------------------------------------------------------------------------------------


@_rude(Fate.POISON, Fate.POISON)
def items_at(leave: Leave, context: Context) -> None:
    """What a handler keeps in its items is not JSON."""
    context.items["at"] = object()
    raise Rudely("its items are odd")


@_rude(Fate.POISON, Fate.POISON)
def odd_text(leave: Leave, context: Context) -> None:
    """No database takes this text."""
    error = Rudely(UNWRITABLE)
    error.add_note(UNWRITABLE)
    raise error


@_rude(Fate.POISON, Fate.POISON)
def poison_none(leave: Leave, context: Context) -> None:
    """A policy's reason is no text."""
    raise Asked(lambda: Poison(None))  # type: ignore[arg-type]


@_rude(Fate.POISON, Fate.POISON)
def poison_text(leave: Leave, context: Context) -> None:
    """A policy's reason is text that no database takes."""
    raise Asked(lambda: Poison(UNWRITABLE))


@_rude(Fate.POISON, Fate.POISON)
def retry_max(leave: Leave, context: Context) -> None:
    """A policy's delay ends after the end of time."""
    raise Asked(lambda: RetryLater(timedelta.max))


@_rude(Fate.POISON, Fate.POISON)
def policy_closes(leave: Leave, context: Context) -> None:
    """A policy closes the connection under the transaction that it is asked in."""

    def answer() -> Verdict:
        connection.close()
        return Poison("closed")

    raise Asked(answer)


@_rude(Fate.POISON, Fate.POISON, headers=dict.fromkeys(("note", "correlation-id", "reply-to", "edit-of"), "\0"))
def nul_header(leave: Leave, context: Context) -> None:
    """A foreign producer has escaped a NUL in its headers, which as text are harmless and as columns are not."""
    raise Rudely(repr(dict(context.headers)))


@_rude(
    Fate.POISON, Fate.POISON, foreign={"expires": "infinity"}, not_on_sqlserver="its datetime2 ends with the year 9999"
)
def infinite_expiry(leave: Leave, context: Context) -> None:
    """A foreign producer knows times that no ``datetime`` can hold."""
    raise Rudely("it lives for ever")


@_rude(Fate.POISON, Fate.POISON)
def system_exit(leave: Leave, context: Context) -> None:
    """It ends the attempt, and not the worker."""
    sys.exit(f"enough of {context.message_id}")


# -- locks ---------------------------------------------------------------------------------------------------------


@_rude(
    Fate.HANDLED,
    Fate.HANDLED,
    beside={"sleep_ms": int(1000 * SLOW_SECONDS)},
    count_beside=2,
    rest_seconds=SLOW_SECONDS / 2,
)
def extend_in_atomic(leave: Leave, context: Context) -> None:
    """The handler's own transaction holds the row of its own lease, and for longer than that lease; the leases of slow
    ones beside it have to be renewed all the same."""
    with transaction.atomic(using=context.alias):
        context.checkpoint(1)
        context.extend(EXTENDED)
        sleep(SLOW_SECONDS)
        leave()


# -- sending -------------------------------------------------------------------------------------------------------


def insert_foreign(alias: str, table: str, message_id: Any, rude: Rudeness, message_type: str, body: bytes) -> None:
    """Put a message into a queue's table as a foreign producer does: past all of our checks."""
    headers = {"type": message_type, "content-type": "application/json", **rude.headers}
    columns = {"id": message_id, "headers": json.dumps(headers), "body": body, **rude.foreign}
    with connections[alias].cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join(['%s'] * len(columns))})",
            [*columns.values()],
        )
