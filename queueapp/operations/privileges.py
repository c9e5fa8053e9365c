"""Missing privileges of the database user of a worker, and the statements that grant them.

No retry repairs a missing privilege, so a worker checks them before it starts and reports the statements for the
database administrator. The privileges of each role are in docs/privileges.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from django.db import Error, connections, router

from .. import registry
from ..errors import UnsupportedServer
from ..models import (
    BulkOperation,
    ClaimRecord,
    DeferredAck,
    DelayedMessage,
    FairTurn,
    GroupAddition,
    GroupMember,
    GroupMessage,
    KeyTokenBucket,
    Leader,
    LedgerCheck,
    LedgerEntry,
    MessageGroup,
    MessageKey,
    MessageResult,
    PoisonMessage,
    PoisonNote,
    ProcessedMessage,
    QueueControl,
    QueueSnapshot,
    Schedule,
    Subscriber,
    Subscription,
    TokenBucket,
)
from ..sql import ErrorKind, backend_of
from .error_hints import connection_of

_ALL = ("SELECT", "INSERT", "UPDATE", "DELETE")
_BUT_DELETE = _ALL[:3]
#: On a queue, required to receive any message; the others are for retries, poison and delayed messages.
_TO_RECEIVE = ("SELECT", "UPDATE", "DELETE")
#: (table, the privileges that a worker needs, those of them without which it receives nothing)
_OF_WORKERS = (
    (Subscriber, _ALL, _ALL),
    (QueueControl, ("SELECT", "INSERT", "UPDATE"), ("SELECT",)),
    (DelayedMessage, _ALL, ()),
    (PoisonMessage, _ALL, ()),
    (PoisonNote, _ALL, ()),
    (Subscription, ("SELECT", "INSERT", "UPDATE"), ()),
    (Leader, ("SELECT", "INSERT", "UPDATE"), ()),
    (Schedule, _ALL, ()),
    (BulkOperation, _ALL, ()),
    (QueueSnapshot, ("SELECT", "INSERT", "DELETE"), ()),
    (ProcessedMessage, _ALL, ()),
)
#: The same for queues with an option: (table, rights, those without which nothing of such a queue is received, whether
#: a queue is one)
_OF_OPTIONS: tuple[tuple[Any, tuple[str, ...], tuple[str, ...], Callable[[Any], bool]], ...] = (
    (MessageKey, _ALL, (), lambda delivery: delivery.dedupe_key is not None),
    (DeferredAck, _ALL, (), lambda delivery: delivery.deferred_ack_expiration is not None),
    (TokenBucket, _BUT_DELETE, _BUT_DELETE, lambda delivery: delivery.rate is not None),
    (KeyTokenBucket, _ALL, _BUT_DELETE, lambda delivery: delivery.rate_per_key is not None),
    (ClaimRecord, _ALL, _ALL, lambda delivery: delivery.counts_leases and not delivery.dispatches),
    (FairTurn, _BUT_DELETE, _BUT_DELETE, lambda delivery: delivery.dispatches),
    (MessageGroup, _ALL, ("SELECT", "UPDATE"), lambda delivery: delivery.groups),
    (GroupMember, _ALL, ("SELECT", "UPDATE", "DELETE"), lambda delivery: delivery.groups),
    (GroupAddition, ("SELECT", "INSERT", "DELETE"), ("SELECT",), lambda delivery: delivery.groups),
    (GroupMessage, ("SELECT", "INSERT", "DELETE"), ("SELECT", "DELETE"), lambda delivery: delivery.groups),
    (MessageResult, _ALL, (), lambda delivery: delivery.workflow),
    (LedgerEntry, _ALL, ("INSERT",), lambda delivery: delivery.ledger),
    (LedgerCheck, _BUT_DELETE, (), lambda delivery: delivery.ledger),
)


class MissingPrivilege(NamedTuple):
    """Missing privileges on one table. ``required``: the worker receives nothing without them."""

    model: Any
    problem: str
    statement: str
    required: bool


def missing_privileges(alias: str, queues: Iterable[Any]) -> list[MissingPrivilege]:
    """The missing privileges of the user of this database's connection to receive these queues. Reads the catalog
    only."""
    connection = connections[alias]
    backend = backend_of(connection)
    if statement := backend.schema.read_only(connection):
        return [MissingPrivilege(None, f"nothing can be written in {alias!r} by its user", statement, True)]
    found, queues = [], list(queues)
    of_options = [
        (model, rights, needed)
        for model, rights, needed, has in _OF_OPTIONS
        if any(has(queue.delivery) for queue in queues)
    ]
    for model, rights, needed in [*((queue, _ALL, _TO_RECEIVE) for queue in queues), *_OF_WORKERS, *of_options]:
        table = model._meta.db_table
        if lacking := backend.schema.missing_privileges(connection, table, rights):
            problem = f"the database user may not {', '.join(lacking)} in table {table} of {alias!r}"
            statement = backend.schema.grant(connection, table, lacking)
            found.append(MissingPrivilege(model, problem, statement, not set(lacking).isdisjoint(needed)))
    return found


def describe(missing: Iterable[MissingPrivilege]) -> str:
    """The missing privileges and the statements that grant them, in one line."""
    missing = list(missing)
    problems = "; ".join(privilege.problem for privilege in missing)
    return f"{problems}. Run as the owner of the tables: {' '.join(privilege.statement for privilege in missing)}"


def remedy_of(error: BaseException) -> str | None:
    """The statements that repair an error about a missing privilege, in one line; None for any other error. Queries the
    database if possible."""
    if not isinstance(error, Error):
        return None
    connection = connection_of(error)
    try:
        if backend_of(connection).error_kind(error) is not ErrorKind.DENIED:
            return None
    except UnsupportedServer:
        return None
    alias, text = connection.alias, str(error)
    queues = [queue for queue in registry.queues if router.db_for_write(queue) == alias]
    try:
        missing = [] if connection.in_atomic_block else missing_privileges(alias, queues)
    except Error:
        missing = []  # the connection failed meanwhile
    # Only the table that the server names: this user may not need the others.
    statements = [
        privilege.statement
        for privilege in missing
        if privilege.model is None or privilege.model._meta.db_table in text
    ]
    return " ".join(statements) or "the GRANTs for this role in docs/privileges.md."
