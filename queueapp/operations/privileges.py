"""What the database user of a worker may not do with the tables that it works with, and the statements that give it that right.

No retry mends a missing right, so a worker looks before it starts, and says it in the words of who can mend it. What each role
needs is in docs/privileges.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from django.db import Error, connections, router

from .. import registry
from ..errors import UnsupportedServer
from ..models import DelayedMessage, Leader, PoisonMessage, QueueControl, Subscriber, Subscription
from ..sql import ErrorKind, backend_of
from .error_hints import connection_of

_ALL = ("SELECT", "INSERT", "UPDATE", "DELETE")
#: Of a queue, without which no message is received; the rest of a table's is for retries, poison, delayed messages.
_TO_RECEIVE = ("SELECT", "UPDATE", "DELETE")
#: (table, what a worker needs there, what of it nothing is received without)
_OF_WORKERS = (
    (Subscriber, _ALL, _ALL),
    (QueueControl, ("SELECT", "INSERT", "UPDATE"), ("SELECT",)),
    (DelayedMessage, _ALL, ()),
    (PoisonMessage, ("SELECT", "INSERT", "DELETE"), ()),
    (Subscription, ("SELECT", "INSERT", "UPDATE"), ()),
    (Leader, ("SELECT", "INSERT", "UPDATE"), ()),
)


class Lack(NamedTuple):
    """A table that a worker may not work with as it has to. ``needed``: nothing is received without."""

    model: Any
    problem: str
    statement: str
    needed: bool


def missing_privileges(alias: str, queues: Iterable[Any]) -> list[Lack]:
    """What the user of this database's connection lacks to receive these queues. Reads the catalog only."""
    connection = connections[alias]
    backend = backend_of(connection)
    if statement := backend.schema.read_only(connection):
        return [Lack(None, f"nothing can be written in {alias!r} by its user", statement, True)]
    found = []
    for model, rights, needed in [*((queue, _ALL, _TO_RECEIVE) for queue in queues), *_OF_WORKERS]:
        table = model._meta.db_table
        if lacking := backend.schema.missing_privileges(connection, table, rights):
            problem = f"the database user may not {', '.join(lacking)} in table {table} of {alias!r}"
            statement = backend.schema.grant(connection, table, lacking)
            found.append(Lack(model, problem, statement, not set(lacking).isdisjoint(needed)))
    return found


def in_words(lacks: Iterable[Lack]) -> str:
    """What is lacking, and the statements that mend it, in one line."""
    lacks = list(lacks)
    problems = "; ".join(lack.problem for lack in lacks)
    return f"{problems}. To mend it, as the owner of the tables: {' '.join(lack.statement for lack in lacks)}"


def remedy_of(error: BaseException) -> str | None:
    """What would mend an error that is a missing right, in one line; None for any other. Asks the database, if it can be
    asked."""
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
        lacks = [] if connection.in_atomic_block else missing_privileges(alias, queues)
    except Error:
        lacks = []  # it says no more, or goes meanwhile
    # The server names the table, which narrows it down: others may be no business of this user's.
    statements = [lack.statement for lack in lacks if lack.model is None or lack.model._meta.db_table in text]
    return " ".join(statements) or "the GRANTs that docs/privileges.md has for this role."
