"""One-line explanations of errors that an operator can fix: a wrong name, a database that does not answer, missing
tables.

Only errors with a cause outside the code are explained; for all others the traceback is the best report. The message of
a server is repeated as it is: it contains no password.
"""

from __future__ import annotations

import re
import traceback
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from django.utils.connection import ConnectionDoesNotExist

from .. import registry
from ..errors import QueueError, TableNotFound, UnsupportedServer, migrate_command
from ..sql import ErrorKind, backend_of


def explain(error: BaseException) -> str | None:
    """The cause and the remedy in one line; None for any other error."""
    if isinstance(error, ConnectionDoesNotExist):
        return f"{_one_line(error)} Databases of this project (DATABASES): {', '.join(sorted(connections))}."
    if isinstance(error, QueueError | ImproperlyConfigured):
        return _one_line(error)
    if not isinstance(error, Error):
        return None
    connection = connection_of(error)
    try:
        kind = backend_of(connection).error_kind(error)
    except UnsupportedServer as unsupported:
        return _one_line(unsupported)
    alias = connection.alias
    if kind is ErrorKind.MISSING and (table := _foreign_table(error)):
        return _one_line(TableNotFound(table, alias, foreign=True))
    if kind is ErrorKind.MISSING:
        return (
            f"A table or column is missing in {alias!r}: run `{migrate_command(alias)}` first ({_first_line(error)})."
        )
    if kind is ErrorKind.DENIED:
        return (
            f"{_named(connection)} refuses: {_one_line(error)} -- grant its user that privilege (docs/privileges.md)."
        )
    if kind is ErrorKind.CONNECTION or connection.connection is None:
        return (
            f"{_named(connection)} cannot be reached: {_one_line(error)} -- check that its server runs, and its "
            "address, user and password in DATABASES."
        )
    return None


def _foreign_table(error: BaseException) -> str:
    """The table of a foreign queue that the server reports as missing; '' for any other."""
    text = _first_line(error)
    for queue in registry.queues:
        table = queue._meta.db_table
        # The server quotes the name, and may put a schema before it, as db_table may.
        name = re.escape(table.rpartition('"."')[2])
        if not queue._meta.managed and re.search(rf"[\"'.\[]{name}[\"'\]]", text):
            return table
    return ""


def connection_of(error: BaseException) -> Any:
    """The Django connection that raised the error, found in the frames of its traceback; else the default one."""
    found: Any = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for name in ("self", "connection"):
            value = frame.f_locals.get(name)
            if isinstance(value, CursorWrapper):
                value = value.db
            if isinstance(value, BaseDatabaseWrapper):
                found = value
    return found if found is not None else connections[DEFAULT_DB_ALIAS]


def _named(connection: Any) -> str:
    settings = connection.settings_dict
    host = settings.get("HOST") or "localhost"
    port = f":{settings['PORT']}" if settings.get("PORT") else ""
    user = f" as user {settings['USER']}" if settings.get("USER") else ""
    return f"The database {connection.alias!r} ({settings['NAME']} on {host}{port}{user})"


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
